"""Addresses: every part of every layer of every page has bytes of its own."""

import itertools

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from tests.test_spec import kimi_latent, kimi_state
from ukv.errors import BudgetError
from ukv.layout import (
    Placement,
    describe,
    packed_bytes,
    smallest_pool_bytes,
    static_layout,
    unified_layout,
)
from ukv.spec import STORAGE_DTYPES, AttentionSpec, MLASpec, Part, StateSpec

GIB = 2**30

DTYPES = st.sampled_from([jnp.dtype(name) for name in STORAGE_DTYPES])
SIZES = st.integers(1, 40)


# Strategies draw descriptions, and the test builds specs of them: a checked
# constructor draws random numbers of its own, which hypothesis does not want.


@st.composite
def token_kinds(draw):
    fields = {
        "num_layers": draw(st.integers(1, 4)),
        "page_size": draw(st.sampled_from([1, 3, 16])),
        "dtype": draw(DTYPES),
    }
    if draw(st.booleans()):
        widths = {"latent_dim": draw(SIZES), "rope_dim": draw(st.integers(0, 9))}
        return MLASpec, {**fields, **widths}
    widths = {
        "num_kv_heads": draw(st.integers(1, 3)),
        "head_dim": draw(SIZES),
        "value_dim": draw(st.none() | SIZES),
    }
    return AttentionSpec, {**fields, **widths}


@st.composite
def state_kinds(draw):
    shape = st.lists(SIZES, min_size=1, max_size=2).map(tuple)
    parts = draw(st.lists(st.tuples(shape, DTYPES), min_size=1, max_size=3))
    return StateSpec, {"num_layers": draw(st.integers(1, 3)), "parts": parts}


KINDS = st.lists(st.one_of(token_kinds(), state_kinds()), min_size=1, max_size=5)


def build(kinds):
    specs = []
    for index, (spec, fields) in enumerate(kinds):
        if "parts" in fields:
            parts = tuple(
                Part(name=f"part{i}", shape=shape, dtype=dtype)
                for i, (shape, dtype) in enumerate(fields["parts"])
            )
            fields = {**fields, "parts": parts}
        specs.append(spec(name=f"sub{index}", **fields))
    return specs


def byte_ranges(layout, sub, page):
    """(buffer, first, last) of the entries of each part and layer, padding excluded."""
    ranges = []
    for layer in range(sub.spec.num_layers):
        for part in sub.spec.parts:
            view = layout.part_view(sub.name, layer=layer, part=part.name)
            for token in range(sub.page_size):
                block = page * sub.blocks_per_page + view.block_offset
                first_row = block * view.page_size + token * view.rows_per_entry
                assert first_row + view.rows_per_entry <= view.num_rows
                first = first_row * view.row_bytes
                ranges.append((view.buffer_index, first, first + part.entry_bytes))
    return ranges


def assert_disjoint(ranges):
    ordered = sorted(ranges)
    for (buffer, _, last), (next_buffer, first, _) in itertools.pairwise(ordered):
        assert buffer < next_buffer or last <= first


@hypothesis.given(kinds=KINDS, pages=st.integers(1, 3))
@hypothesis.settings(max_examples=150)
def test_parts_of_all_pages_and_layers_are_disjoint(kinds, pages):
    specs = build(kinds)
    counts = {spec.name: pages for spec in specs}
    layout = unified_layout(specs, pool_bytes=packed_bytes(specs, counts))
    for sub in layout.sub_pools:
        grid = sorted({0, min(1, sub.num_pages - 1), sub.num_pages - 1})
        everything = []
        for page in grid:
            first = sub.base_bytes + page * sub.page_bytes
            ranges = byte_ranges(layout, sub, page)
            assert all(first <= start for _, start, _ in ranges)
            assert all(end <= first + sub.page_bytes for _, _, end in ranges)
            # What the entries leave of the page is the padding of each, no more.
            align = 128 if isinstance(sub.spec, StateSpec) else 16
            padded = sum(-(-(end - start) // align) * align for _, start, end in ranges)
            assert padded == sub.page_bytes
            everything += ranges
        assert_disjoint(everything)
        last_byte = sub.base_bytes + sub.num_pages * sub.page_bytes
        assert last_byte <= layout.pool_bytes
        # TMA: a row and a page start on 16 bytes.
        assert sub.row_bytes % 16 == sub.base_bytes % 16 == sub.page_bytes % 16 == 0
        if sub.placement is Placement.HIGH:
            assert last_byte == layout.pool_bytes
        assert layout.pool_bytes % (sub.page_size * sub.row_bytes) == 0


@hypothesis.given(kinds=KINDS, pages=st.integers(1, 3))
@hypothesis.settings(max_examples=50)
def test_parts_of_a_static_pool_are_disjoint(kinds, pages):
    specs = build(kinds)
    layout = static_layout(specs, num_pages={spec.name: pages for spec in specs})
    ranges = [
        found
        for sub in layout.sub_pools
        for page in range(sub.num_pages)
        for found in byte_ranges(layout, sub, page)
    ]
    assert_disjoint(ranges)
    assert {buffer for buffer, _, _ in ranges} == set(range(len(layout.buffer_bytes)))
    for index, size in enumerate(layout.buffer_bytes):
        assert max(last for buffer, _, last in ranges if buffer == index) <= size


def test_worked_example_of_part_view():
    # The numbers of PartView's docstring.
    spec = AttentionSpec(
        name="full", num_layers=2, page_size=16, num_kv_heads=1, head_dim=128
    )
    layout = unified_layout([spec], pool_bytes=GIB)
    (sub,) = layout.sub_pools
    view = layout.part_view("full", layer=1, part="v")
    assert (sub.row_bytes, sub.blocks_per_page, view.block_offset) == (256, 4, 3)
    assert (3 * sub.blocks_per_page + view.block_offset) * 16 + 5 == 245
    assert (view.row_offset, view.byte_offset) == (48, 48 * 256)
    assert (view.row_words, view.num_elements) == (64, 128)


def test_layers_of_a_page_follow_each_other():
    layout = unified_layout([kimi_state(), kimi_latent()], pool_bytes=GIB)
    latent = layout.sub_pool("latent")
    offsets = [
        layout.part_view("latent", layer=layer, part="latent").byte_offset
        for layer in range(7)
    ]
    first = latent.base_bytes
    assert offsets == [first + layer * 64 * 1_152 for layer in range(7)]
    # B = L for latent rows.
    assert latent.blocks_per_page == 7
    recurrent = layout.part_view("kda", layer=1, part="recurrent")
    conv = layout.part_view("kda", layer=1, part="conv")
    assert recurrent.byte_offset == 2_097_152 + 73_728
    assert conv.byte_offset == recurrent.byte_offset + 2_097_152
    assert (recurrent.rows_per_entry, conv.rows_per_entry) == (256, 9)


def test_keys_and_values_of_different_width_share_one_row():
    spec = AttentionSpec(
        name="full",
        num_layers=2,
        page_size=4,
        num_kv_heads=1,
        head_dim=192,
        value_dim=128,
    )
    layout = unified_layout([spec], pool_bytes=2**20)
    sub = layout.sub_pool("full")
    # Rows of 128 bytes: K takes 3, V takes 2; a layer takes 5 blocks of 4 rows.
    assert (sub.row_bytes, sub.blocks_per_page) == (128, 10)
    views = {
        (layer, part): layout.part_view("full", layer=layer, part=part)
        for layer in range(2)
        for part in "kv"
    }
    assert {key: view.block_offset for key, view in views.items()} == {
        (0, "k"): 0,
        (0, "v"): 3,
        (1, "k"): 5,
        (1, "v"): 8,
    }
    assert views[0, "k"].rows_per_entry == 3
    assert views[0, "v"].rows_per_entry == 2


def test_single_layer_latent_has_kernel_ids_equal_to_physical_ids():
    spec = kimi_latent(num_layers=1)
    layout = unified_layout([spec], pool_bytes=2**24)
    (sub,) = layout.sub_pools
    assert sub.blocks_per_page == 1
    # Virtual and physical ids differ all the same.
    assert sub.is_translating
    assert sub.num_virtual == sub.num_pages + 1


PLACEMENTS = {
    1: ["low"],
    2: ["low", "high"],
    3: ["low", "float", "high"],
    5: ["low", "float", "float", "float", "high"],
}


@pytest.mark.parametrize("count", PLACEMENTS)
def test_ends_and_floats(count):
    specs = [kimi_latent(name=f"sub{i}") for i in range(count)]
    layout = unified_layout(specs, pool_bytes=GIB)
    assert [s.placement.value for s in layout.sub_pools] == PLACEMENTS[count]
    assert [s.grows_up for s in layout.sub_pools] == [
        placement != "high" for placement in PLACEMENTS[count]
    ]
    assert layout.names == tuple(f"sub{i}" for i in range(count))
    assert len(layout.buffer_bytes) == 1


def test_high_end_is_flush_with_the_last_byte():
    layout = unified_layout([kimi_state(), kimi_latent()], pool_bytes=GIB)
    high = layout.sub_pool("latent")
    assert high.base_bytes + high.num_pages * high.page_bytes == layout.pool_bytes
    assert 0 < high.base_bytes < high.page_bytes


@pytest.mark.parametrize("gib", [100, 140, 1000])
def test_addresses_of_pools_with_more_elements_than_int32(gib):
    layout = unified_layout([kimi_state(), kimi_latent()], pool_bytes=gib * GIB)
    assert layout.pool_bytes // 2 > 2**31
    for name, part in [
        ("latent", "latent"),
        ("kda", "recurrent"),
        ("kda", "conv"),
    ]:
        sub = layout.sub_pool(name)
        layer, page, token = sub.spec.num_layers - 1, sub.num_pages - 1, sub.page_size
        view = layout.part_view(name, layer=layer, part=part)
        # In bytes, with Python's integers, from the definition of the layout.
        per_layer = sub.page_bytes // sub.spec.num_layers
        within = {"latent": 0, "recurrent": 0, "conv": 2_097_152}[part]
        expected = sub.base_bytes + page * sub.page_bytes + layer * per_layer
        expected += sub.page_size * within
        expected += (token - 1) * view.rows_per_entry * view.row_bytes
        # In rows, with int32, as a kernel does it. NumPy would say if it wrapped.
        with np.errstate(over="raise"):
            block = np.int32(page) * np.int32(sub.blocks_per_page)
            row = (block + np.int32(view.block_offset)) * np.int32(view.page_size)
            row = row + np.int32(token - 1) * np.int32(view.rows_per_entry)
        assert row.dtype == np.int32
        assert int(row) * view.row_bytes == expected
        assert int(row) + view.rows_per_entry <= view.num_rows < 2**31
        assert expected + view.rows_per_entry * view.row_bytes <= layout.pool_bytes


def test_row_ids_right_below_the_limit():
    # Rows of 16 bytes: 2^31 of them are 32 GiB.
    spec = MLASpec(name="latent", num_layers=1, page_size=16, latent_dim=8, rope_dim=0)
    layout = unified_layout([spec], pool_bytes=32 * GIB - 16 * 16)
    view = layout.part_view("latent", layer=0, part="latent")
    assert view.num_rows == 2**31 - 16
    sub = layout.sub_pool("latent")
    with np.errstate(over="raise"):
        last = np.int32(sub.num_pages - 1) * np.int32(16) + np.int32(15)
    assert int(last) == view.num_rows - 1
    with pytest.raises(BudgetError, match="kernel rows; int32 row ids allow"):
        unified_layout([spec], pool_bytes=32 * GIB)
    with pytest.raises(BudgetError, match=r"2,147,483,648 kernel rows"):
        static_layout([spec], num_pages={"latent": 2**27 - 1})
    assert static_layout([spec], num_pages={"latent": 2**27 - 2})


def test_row_limit_counts_the_narrowest_rows():
    narrow = MLASpec(name="thin", num_layers=1, page_size=1, latent_dim=8, rope_dim=0)
    with pytest.raises(BudgetError, match="sub-pool 'thin' would have"):
        unified_layout([kimi_latent(page_size=1), narrow], pool_bytes=33 * GIB)


def test_row_limit_counts_the_rows_of_the_buffer():
    # Rows of 48 and of 80 bytes: the buffer's own rows are their measure, 16 bytes,
    # though pages of 240 bytes have a longer one.
    a = MLASpec(name="a", num_layers=5, page_size=1, latent_dim=24, rope_dim=0)
    b = MLASpec(name="b", num_layers=3, page_size=1, latent_dim=40, rope_dim=0)
    assert unified_layout([a, b], pool_bytes=31 * GIB).buffer_words == (4,)
    with pytest.raises(BudgetError, match="rows of 16 bytes, the common measure"):
        unified_layout([a, b], pool_bytes=64 * GIB)


def test_unified_and_static_have_the_same_bytes():
    # 24 layers of 576 bfloat16: 27,648 bytes a token in either.
    spec = MLASpec(
        name="latent", num_layers=24, page_size=16, latent_dim=512, rope_dim=64
    )
    unified = unified_layout([spec], pool_bytes=100 * 442_368)
    static = static_layout([spec], num_pages={"latent": 99})
    assert 24 * 576 * 2 * 16 == 442_368
    assert unified.pool_bytes == static.pool_bytes == 44_236_800
    assert unified.sub_pools[0].num_pages == static.sub_pools[0].num_pages == 100
    page = unified.sub_pools[0].page_bytes
    assert page == static.sub_pools[0].page_bytes == 442_368


def test_static_layout_has_a_null_page_and_nothing_to_translate():
    layout = static_layout(
        [kimi_state(), kimi_latent()], num_pages={"kda": 4, "latent": 10}
    )
    assert not layout.is_unified
    kda, latent = layout.sub_pools
    assert (kda.num_pages, latent.num_pages) == (5, 11)
    assert (kda.num_virtual, latent.num_virtual) == (5, 11)
    assert not (kda.is_translating)
    assert not (latent.is_translating)
    assert kda.blocks_per_page == latent.blocks_per_page == 1
    # One buffer for each part: recurrent, conv, latent.
    assert layout.buffer_bytes == (
        20 * 5 * 2_097_152,
        20 * 5 * 73_728,
        7 * 11 * 64 * 1_152,
    )


def test_smallest_pool_is_accepted_and_a_byte_less_refused():
    specs = [kimi_state(), kimi_latent()]
    needed = smallest_pool_bytes(specs)
    # A slot and a page, up to a multiple of the 73,728 bytes of a row block.
    assert needed == -(-(43_417_600 + 516_096) // 73_728) * 73_728
    layout = unified_layout(specs, pool_bytes=needed)
    assert layout.pool_bytes == needed
    with pytest.raises(BudgetError, match=f"less than the {needed:,} bytes"):
        unified_layout(specs, pool_bytes=needed - 1)


def test_smallest_pool_for_more_tokens():
    specs = [kimi_state(), kimi_latent()]
    sizes = [smallest_pool_bytes(specs, num_tokens=n) for n in (1, 64, 65, 6_400)]
    assert sizes[0] == sizes[1]
    assert sizes[2] - sizes[1] == 516_096
    assert sizes[3] - sizes[1] == 99 * 516_096


DESCRIPTION = (
    "pool of 1,073,700,864 bytes (1,023.961 MiB), unified: one buffer",
    "sub-pool  placement  layers  page size  page MiB  bytes/token  row bytes"
    "  blocks/page  max pages  ids of",
    "-" * 104,
    "kda       low            20       slot    41.406            -      8,192"
    "        5,300         24     kda",
    "latent    high            7         64     0.492        8,064      1,152"
    "            7      2,080  latent",
)


def test_describe():
    layout = unified_layout([kimi_state(), kimi_latent()], pool_bytes=GIB)
    assert describe(layout) == "\n".join(DESCRIPTION)


def test_describe_static():
    layout = static_layout([kimi_latent()], num_pages={"latent": 1})
    first, *_, last = describe(layout).splitlines()
    assert first == "pool of 1,032,192 bytes (0.984 MiB), static: own buffers"
    assert last.split() == [
        *("latent", "own", "7", "64", "0.492", "8,064", "1,152", "1", "2", "latent"),
    ]
