"""Random structures of what only moves bytes: writes of new tokens, moves of pages."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from tests.attention_cases import DTYPES
from tests.paged_rows import layout_with
from tests.test_ops_kv_write import (
    draw_values,
    entry_bytes_at,
    kv_spec,
    locations_of,
    mla_spec,
    views_of,
)
from ukv import ops
from ukv.ids import PhysicalPages
from ukv.implementation import OpCase
from ukv.pool import copy_pages, create_pool

_write = jax.jit(ops.write_kv, static_argnums=1, static_argnames="implementation")
_copy = jax.jit(copy_pages, static_argnums=(1, 2), static_argnames="implementation")


def _poisoned(layout):
    return create_pool(layout, fill_word=0xFFFFFFFF).buffers


def _check_write(layout, views, num_tokens, implementation, seed) -> None:
    rng = np.random.default_rng(seed)
    sub = layout.sub_pool("kv")
    slots = rng.permutation(sub.num_pages * sub.page_size)[:num_tokens]
    pages, offsets = slots // sub.page_size, slots % sub.page_size
    # Lanes of padding: no page, or no place in one.
    pages[rng.random(num_tokens) < 0.2] = -1
    offsets[rng.random(num_tokens) < 0.1] = rng.choice([-1, sub.page_size])
    values = draw_values(rng, views, num_tokens)
    written = _write(
        _poisoned(layout),
        views,
        locations_of(pages, offsets, layout),
        values,
        implementation=implementation,
    )
    expected = [np.full(num, 0xFF, np.uint8) for num in layout.buffer_bytes]
    for view, value in zip(views, values, strict=True):
        raw = np.asarray(value).reshape(num_tokens, -1).view(np.uint8)
        padded = np.zeros((num_tokens, view.rows_per_entry * view.row_bytes), np.uint8)
        padded[:, : raw.shape[1]] = raw
        for token, (page, offset) in enumerate(zip(pages, offsets, strict=True)):
            if page >= 0 and 0 <= offset < sub.page_size:
                at = entry_bytes_at(view, sub, page, offset)
                part = expected[view.buffer_index][at : at + padded.shape[1]]
                part[:] = padded[token]
    for buffer, wanted in zip(written, expected, strict=True):
        found = np.asarray(buffer).reshape(-1).view(np.uint8)
        np.testing.assert_array_equal(found, wanted)


def draw_write(rng, implementation, max_len, index):
    """Return a structure of a write: its facts and its check."""
    del max_len, index
    dtype = DTYPES[str(rng.choice(["f32", "bf16", "bf16", "f16", "e4m3", "e5m2"]))]
    page_size = int(rng.choice([1, 4, 16, 64, 128]))
    if rng.random() < 0.4:
        dims = [(512, 64), (24, 8), (13, 4)][int(rng.integers(3))]
        spec = mla_spec(page_size=page_size, dims=dims, dtype=dtype)
    else:
        dims = [(128, 128), (64, 64), (192, 128), (5, 7)][int(rng.integers(4))]
        heads = int(rng.choice([1, 2, 3, 8]))
        spec = kv_spec(page_size=page_size, heads=heads, dims=dims, dtype=dtype)
    num_tokens = int(rng.choice([1, 7, 64, 300]))
    placement = str(rng.choice(["low", "float", "high", "static"]))
    num_pages = -(-num_tokens // page_size) + 5
    layout = layout_with(spec, placement, num_pages=num_pages)
    views = views_of(layout, int(rng.integers(spec.num_layers)))
    case = OpCase(
        page_size=page_size,
        storage_dtype=dtype.name,
        compute_dtype=dtype.name,
        widths=tuple(view.num_elements for view in views),
    )
    return case, functools.partial(
        _check_write, layout, views, num_tokens, implementation
    )


def _check_move(layout, max_moves, implementation, seed) -> None:
    rng = np.random.default_rng(seed)
    sub = layout.sub_pool("kv")
    num_moves = int(rng.integers(max_moves + 1))
    order = rng.permutation(sub.num_pages)
    # Beyond the count stand pages that do not exist.
    src, dst = np.full((2, max_moves), 2**31 - 1, np.int32)
    src[:num_moves], dst[:num_moves] = order[: 2 * num_moves].reshape(2, -1)
    (buffer,) = _poisoned(layout)
    before = rng.integers(0, 1 << 32, buffer.shape, np.uint32)
    (after,) = _copy(
        (jnp.asarray(before),),
        layout,
        sub,
        PhysicalPages(ids=jnp.asarray(src), sub_pool="kv"),
        PhysicalPages(ids=jnp.asarray(dst), sub_pool="kv"),
        jnp.int32(num_moves),
        implementation=implementation,
    )
    expected = before.copy().reshape(-1)
    base, words = sub.base_bytes // 4, sub.page_bytes // 4
    for source, target in zip(src[:num_moves], dst[:num_moves], strict=True):
        start, to = base + int(source) * words, base + int(target) * words
        expected[to : to + words] = expected[start : start + words]
    np.testing.assert_array_equal(np.asarray(after).reshape(-1), expected)


def draw_move(rng, implementation, max_len, index):
    """Return a structure of a page move: its facts and its check."""
    del max_len, index
    page_size = int(rng.choice([16, 32, 64, 128]))
    if rng.random() < 0.5:
        dims = [(512, 64), (128, 32)][int(rng.integers(2))]
        spec = mla_spec(page_size=page_size, dims=dims)
    else:
        dims = [(128, 128), (192, 128), (24, 40)][int(rng.integers(3))]
        spec = kv_spec(page_size=page_size, heads=int(rng.choice([1, 3, 8])), dims=dims)
    max_moves = int(rng.integers(1, 20))
    placement = str(rng.choice(["low", "float", "high"]))
    layout = layout_with(spec, placement, num_pages=2 * max_moves + 3)
    sub = layout.sub_pool("kv")
    case = OpCase(
        page_size=page_size,
        storage_dtype="uint32",
        compute_dtype="uint32",
        widths=(sub.page_bytes // 4,),
    )
    return case, functools.partial(_check_move, layout, max_moves, implementation)


DRAW: dict[str, Callable] = {"write_kv": draw_write, "copy_pages": draw_move}
