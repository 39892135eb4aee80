"""Writes of K, V and latent rows: their bits, their place, and what stays as it was."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.gpu_compile import (
    compile_for_h200,
    pool_sized_copies,
    requires_h200_compiler,
)
from tests.paged_rows import PLACEMENTS, layout_with, neighbour
from ukv import ops
from ukv.errors import UnsupportedError
from ukv.ids import ABSENT_BLOCK, KernelBlocks, WriteLocations
from ukv.layout import PartView, unified_layout
from ukv.ops.kv_write import first_rows
from ukv.pool import create_pool, read_entries
from ukv.spec import AttentionSpec, MLASpec

POISON = 0xFFFFFFFF
FP8 = {
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}


def kv_spec(*, page_size=16, heads=2, dims=(16, 16), dtype="float32", num_layers=3):
    return AttentionSpec(
        name="kv",
        num_layers=num_layers,
        page_size=page_size,
        num_kv_heads=heads,
        head_dim=dims[0],
        value_dim=dims[1],
        dtype=np.dtype(dtype),
    )


def mla_spec(*, page_size=16, dims=(24, 8), dtype="bfloat16", num_layers=3):
    return MLASpec(
        name="kv",
        num_layers=num_layers,
        page_size=page_size,
        latent_dim=dims[0],
        rope_dim=dims[1],
        dtype=np.dtype(dtype),
    )


SPECS = {
    "P1-f32": kv_spec(page_size=1),
    "P16-f32": kv_spec(),
    "P64-bf16": kv_spec(page_size=64, dtype=ml_dtypes.bfloat16),
    "P128-f16": kv_spec(page_size=128, dtype="float16"),
    "D192-E128-bf16": kv_spec(dims=(192, 128), dtype=ml_dtypes.bfloat16),
    "D8-E24-f32": kv_spec(dims=(8, 24)),
    "G3-D5-E7-bf16": kv_spec(heads=3, dims=(5, 7), dtype=ml_dtypes.bfloat16),
    "L1-f32": kv_spec(num_layers=1),
    "mla-bf16": mla_spec(),
    "mla-C13-R4-e4m3": mla_spec(dims=(13, 4), dtype=ml_dtypes.float8_e4m3fn),
}


def views_of(layout, layer):
    spec = layout.sub_pool("kv").spec
    return tuple(
        layout.part_view("kv", layer=layer, part=part.name) for part in spec.parts
    )


def draw_values(rng, views, num_tokens):
    return tuple(
        jnp.asarray(rng.standard_normal((num_tokens, *view.shape)).astype(view.dtype))
        for view in views
    )


def locations_of(pages, offsets, layout):
    sub = layout.sub_pool("kv")
    blocks = np.where(pages < 0, ABSENT_BLOCK, pages * sub.blocks_per_page)
    return WriteLocations(
        blocks=jnp.asarray(blocks, jnp.int32),
        offsets=jnp.asarray(offsets, jnp.int32),
        sub_pool="kv",
    )


def entry_bytes_at(view, sub, page, offset):
    """First byte of an entry, from the formula of the layout in Python integers."""
    block = page * sub.blocks_per_page + view.block_offset
    row = block * view.page_size + offset * view.rows_per_entry
    return row * view.row_bytes


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_exactly_the_entries_are_written(spec, placement):
    layout = layout_with(spec, placement, num_pages=6)
    sub = layout.sub_pool("kv")
    layer = spec.num_layers - 1
    views = views_of(layout, layer)
    rng = np.random.default_rng(3)
    slots = rng.permutation(sub.num_pages * sub.page_size)[:7]
    pages, offsets = slots // sub.page_size, slots % sub.page_size
    pages[[1, 4]] = -1
    values = draw_values(rng, views, 7)
    buffers = create_pool(layout, fill_word=POISON).buffers
    expected = [np.asarray(buffer).view(np.uint8).reshape(-1) for buffer in buffers]
    expected = [buffer.copy() for buffer in expected]
    for view, value in zip(views, values, strict=True):
        for token in np.flatnonzero(pages >= 0):
            start = entry_bytes_at(view, sub, pages[token], offsets[token])
            data = np.asarray(value[token]).reshape(-1).view(np.uint8)
            padded = view.rows_per_entry * view.row_bytes
            entry = expected[view.buffer_index][start : start + padded]
            entry[:] = 0
            entry[: len(data)] = data
    written = jax.jit(ops.write_kv, static_argnums=1)(
        buffers, views, locations_of(pages, offsets, layout), values
    )
    for buffer, want in zip(written, expected, strict=True):
        np.testing.assert_array_equal(
            np.asarray(buffer).view(np.uint8).reshape(-1), want
        )


@pytest.mark.parametrize("width", [16, 8], ids=["whole-rows", "padded-rows"])
@pytest.mark.parametrize("name", FP8)
def test_all_bytes_of_fp8_keep_their_bits(name, width):
    spec = kv_spec(page_size=4, heads=1, dims=(width, width), dtype=FP8[name])
    layout = layout_with(spec, "high", num_pages=10)
    views = views_of(layout, 1)
    every = np.arange(256, dtype=np.uint8).reshape(-1, 1, width)
    values = tuple(jnp.asarray(x.view(FP8[name])) for x in (every, every[::-1].copy()))
    slots = np.arange(len(every)) + 4
    locations = locations_of(slots // 4, slots % 4, layout)

    # As arguments: XLA folds constants of e5m2 through a wider type, and NaN with it.
    @jax.jit
    def write_and_read(buffers, values):
        written = ops.write_kv(buffers, views, locations, values)
        return [
            read_entries(written[view.buffer_index], view, first_rows(locations, view))
            for view in views
        ]

    found = write_and_read(create_pool(layout, fill_word=POISON).buffers, values)
    for read, value in zip(found, values, strict=True):
        assert read.dtype == FP8[name]
        np.testing.assert_array_equal(
            np.asarray(read).view(np.uint8), np.asarray(value).view(np.uint8)
        )


@pytest.mark.parametrize("name", FP8)
def test_values_beyond_fp8_become_its_largest(name):
    spec = kv_spec(page_size=4, heads=1, dims=(16, 16), dtype=FP8[name])
    layout = layout_with(spec, "low", num_pages=2)
    views = views_of(layout, 0)
    largest = float(ml_dtypes.finfo(FP8[name]).max)
    values = np.zeros((1, 1, 16), np.float32)
    values[0, 0, :5] = [1e9, -1e9, largest, np.inf, np.nan]
    locations = locations_of(np.array([1]), np.array([2]), layout)

    @jax.jit
    def write_and_read(buffers, value):
        written = ops.write_kv(buffers, views, locations, (value, value))
        view = views[0]
        return read_entries(
            written[view.buffer_index], view, first_rows(locations, view)
        )

    buffers = create_pool(layout, fill_word=POISON).buffers
    found = np.asarray(write_and_read(buffers, values)).astype(np.float32)[0, 0]
    np.testing.assert_array_equal(found[:4], [largest, -largest, largest, largest])
    # NaN stays NaN: it is an error upstream, not a large value.
    assert np.isnan(found[4])


def test_values_of_another_dtype_are_rounded_to_nearest():
    spec = kv_spec(dtype=ml_dtypes.bfloat16)
    layout = layout_with(spec, "low", num_pages=3)
    views = views_of(layout, 0)
    rng = np.random.default_rng(5)
    values = rng.standard_normal((2, 4, *views[0].shape)).astype(np.float32)
    locations = locations_of(np.full(4, 1), np.arange(4), layout)
    written = ops.write_kv(
        create_pool(layout).buffers, views, locations, tuple(map(jnp.asarray, values))
    )
    for view, value in zip(views, values, strict=True):
        rows = first_rows(locations, view)
        found = read_entries(written[view.buffer_index], view, rows)
        np.testing.assert_array_equal(np.asarray(found), value.astype(spec.dtype))


def test_locations_of_any_shape():
    spec = kv_spec()
    layout = layout_with(spec, "high", num_pages=3)
    views = views_of(layout, 0)
    values = draw_values(np.random.default_rng(5), views, 6)
    pages, offsets = np.array([0, 0, 1, 1, 2, -1]), np.array([3, 4, 0, 1, 15, 0])
    locations = locations_of(pages, offsets, layout)
    dense = dataclasses.replace(
        locations,
        blocks=locations.blocks.reshape(3, 2),
        offsets=locations.offsets.reshape(3, 2),
    )
    buffers = create_pool(layout, fill_word=POISON).buffers
    flat = ops.write_kv(buffers, views, locations, values)
    reshaped = tuple(x.reshape(3, 2, *x.shape[1:]) for x in values)
    for a, b in zip(ops.write_kv(buffers, views, dense, reshaped), flat, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# Addresses near the end of int32


def wide_view(*, num_rows, page_size, rows_per_entry, block_offset):
    """A view of a pool too large to exist here."""
    return PartView(
        sub_pool="kv",
        part="k",
        layer=0,
        shape=(rows_per_entry * 8,),
        dtype=np.dtype("float16"),
        page_size=page_size,
        row_bytes=16,
        rows_per_entry=rows_per_entry,
        block_offset=block_offset,
        buffer_index=0,
        num_rows=num_rows,
    )


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("rows_per_entry", [1, 3])
def test_first_rows_stay_inside_int32(page_size, rows_per_entry):
    num_rows = (2**31 - 1) // (6 * page_size) * 6 * page_size
    view = wide_view(
        num_rows=num_rows,
        page_size=page_size,
        rows_per_entry=rows_per_entry,
        block_offset=5,
    )
    last = num_rows // page_size - view.block_offset - rows_per_entry
    blocks = np.array(
        [
            0,
            1,
            last,
            num_rows // page_size,
            2**31 - 2,
            ABSENT_BLOCK,
            2**30,
            -1,
            -(2**31),
        ]
    )
    offsets = np.full(len(blocks), page_size - 1)
    rows = first_rows(
        WriteLocations(
            blocks=jnp.asarray(blocks, jnp.int32),
            offsets=jnp.asarray(offsets, jnp.int32),
            sub_pool="kv",
        ),
        view,
    )
    expected = [
        (int(block) + 5) * page_size + (page_size - 1) * rows_per_entry
        if 0 <= block <= last
        else num_rows
        for block in blocks
    ]
    # A block in the middle is there in a pool of short pages only.
    np.testing.assert_array_equal(np.asarray(rows, np.int64), expected)
    assert max(expected) <= num_rows < 2**31


def test_an_offset_outside_the_page_writes_nothing():
    layout = layout_with(kv_spec(), "low", num_pages=3)
    views = views_of(layout, 1)
    locations = locations_of(np.array([1, 1, 1]), np.array([16, -1, 2**31 - 1]), layout)
    for view in views:
        np.testing.assert_array_equal(first_rows(locations, view), view.num_rows)


# Donation


@pytest.mark.parametrize("placement", ["high", "static"])
def test_a_donated_pool_keeps_its_address(placement):
    layout = layout_with(kv_spec(dims=(16, 24)), placement, num_pages=6)
    views = views_of(layout, 1)
    values = draw_values(np.random.default_rng(1), views, 3)
    locations = locations_of(np.array([1, -1, 2]), np.array([0, 1, 2]), layout)
    step = jax.jit(ops.write_kv, static_argnums=1, donate_argnums=0)
    buffers = create_pool(layout).buffers
    before = [buffer.unsafe_buffer_pointer() for buffer in buffers]
    written = step(buffers, views, locations, values)
    assert [buffer.unsafe_buffer_pointer() for buffer in written] == before
    assert all(buffer.is_deleted() for buffer in buffers)


def serve_layers(buffers, table, locations, q, kv_lens, *, layout, num_layers):
    """Write and attend layer after layer; a layer's values follow from the last."""
    for layer in range(num_layers):
        views = views_of(layout, layer)
        values = tuple(q[:, 0, : view.shape[0], : view.shape[1]] for view in views)
        buffers = ops.write_kv(buffers, views, locations, values)
        q, _ = ops.gqa_decode(
            q, buffers, *views, table, kv_lens=kv_lens, softmax_scale=0.1
        )
    return buffers, q


@requires_h200_compiler
def test_a_step_of_several_layers_is_in_place_on_a_gpu():
    spec = kv_spec(
        page_size=64, heads=8, dims=(128, 128), dtype=ml_dtypes.bfloat16, num_layers=3
    )
    layout = unified_layout([spec, neighbour("other")], pool_bytes=16 << 30)
    rows, ids = 8, jax.ShapeDtypeStruct((8, 512), jnp.int32)
    lens = jax.ShapeDtypeStruct((rows,), jnp.int32)
    program = compile_for_h200(
        lambda *args: serve_layers(*args, layout=layout, num_layers=3),
        jax.eval_shape(lambda: create_pool(layout).buffers),
        KernelBlocks(ids=ids, sub_pool="kv"),
        WriteLocations(blocks=lens, offsets=lens, sub_pool="kv"),
        jax.ShapeDtypeStruct((rows, 1, 32, 128), jnp.bfloat16),
        lens,
        donate_argnums=0,
    )
    assert program.alias_bytes >= layout.pool_bytes
    # A block of 256 keys of 8 rows has 8 MiB of K and V; nothing of 32,768 keys.
    assert program.temp_bytes < 64 << 20
    assert pool_sized_copies(program.hlo_text, layout.pool_bytes // 2) == []


# Refusals


def test_write_locations_of_another_sub_pool_are_refused():
    layout = layout_with(kv_spec(), "low", num_pages=3)
    views = views_of(layout, 0)
    locations = locations_of(np.array([1]), np.array([0]), layout)
    values = draw_values(np.random.default_rng(1), views, 1)
    buffers = create_pool(layout).buffers
    other = dataclasses.replace(locations, sub_pool="other")
    with pytest.raises(TypeError, match="'kv', not of 'other'"):
        ops.write_kv(buffers, views, other, values)
    with pytest.raises(TypeError, match="locations"):
        ops.write_kv(
            buffers, views, KernelBlocks(ids=locations.blocks, sub_pool="kv"), values
        )


def test_values_of_another_shape_are_refused():
    layout = layout_with(kv_spec(), "low", num_pages=3)
    views = views_of(layout, 0)
    locations = locations_of(np.array([1]), np.array([0]), layout)
    k, v = draw_values(np.random.default_rng(1), views, 1)
    buffers = create_pool(layout).buffers
    with pytest.raises(ValueError, match="2 views take as many values, not 1"):
        ops.write_kv(buffers, views, locations, (k,))
    with pytest.raises(ValueError, match=r"kv\.v have shape \(1, 2, 15\)"):
        ops.write_kv(buffers, views, locations, (k, v[..., :15]))


def test_an_implementation_that_does_not_exist_is_refused():
    layout = layout_with(kv_spec(), "low", num_pages=3)
    views = views_of(layout, 0)
    locations = locations_of(np.array([1]), np.array([0]), layout)
    values = draw_values(np.random.default_rng(1), views, 1)
    buffers = create_pool(layout).buffers
    with pytest.raises(UnsupportedError, match="works 'xla'"):
        ops.write_kv(buffers, views, locations, values, implementation="triton")
