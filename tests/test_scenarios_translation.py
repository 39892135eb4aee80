"""Reported faults of id translation, replayed; each test bears its scenario's number.

Scenarios of the allocator are in ``test_scenarios_admission`` and beside it. Those
about speculative drafts (b11, b12) and host offload gates (b6, b38) concern parts that
do not exist.
"""

import functools as ft

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.pools import int32, jit_alloc, kda_mla_specs, static, unified, window_specs
from ukv.allocator import alloc_extend, compact, free, free_window, raise_on_error
from ukv.errors import IdSpaceError, SpecError
from ukv.ids import ABSENT_BLOCK, KernelBlocks, VirtualPages
from ukv.layout import unified_layout
from ukv.ops import gqa_attention, write_kv
from ukv.pool import create_pool, read_blocks, write_entries
from ukv.spec import AttentionSpec, MLASpec
from ukv.translator import (
    Bucket,
    KVIndexTranslator,
    StepBatch,
    make_static_tables,
    refresh_static_tables,
)

HEADS, DIM, PAGE = 2, 16, 16
FULL = [
    AttentionSpec(
        name="full",
        num_layers=2,
        page_size=PAGE,
        num_kv_heads=HEADS,
        head_dim=DIM,
        dtype=jnp.dtype("float32"),
    )
]

jit_free = jax.jit(free, donate_argnums=0)
jit_compact = jax.jit(compact, donate_argnums=0)
jit_extend = jax.jit(ft.partial(alloc_extend, max_new_pages=16), donate_argnums=(0, 1))


def scrambled(state, owner, keep=6, seed=0):
    """Return the pool with ``keep`` pages whose physical ids are in disorder."""
    state, grant = jit_alloc(state, {owner: 2 * keep})
    new = np.asarray(grant.pages[owner].ids)[: 2 * keep]
    ids = np.random.default_rng(seed).permutation(new)
    dropped = np.zeros(16, np.int32)
    dropped[:keep] = ids[keep:]
    state = jit_free(state, VirtualPages(ids=int32(dropped), space=owner))
    raise_on_error(state)
    return state, ids[:keep]


def physical(state, name, ids):
    sub = state.layout.sub_pool(name)
    return np.asarray(state.tables[sub.index].v2p)[np.asarray(ids)]


def one_row(tables, query_len, kv_len):
    return StepBatch(
        page_tables=tables,
        cu_query_lens=int32([0, query_len]),
        kv_lens=int32([kv_len]),
        num_tokens=query_len,
    )


class Row:
    """One sequence on a pool: K and V written and attended through the translator."""

    def __init__(self, state, table=None):
        self.state = state
        self.translator = KVIndexTranslator(state.layout)
        ids = jnp.zeros((1, 8), jnp.int32) if table is None else int32(table)[None]
        self.tables = {"full": VirtualPages(ids=ids, space="full")}
        self.length = 0

    def extend(self, q, k, v, layer=1):
        """Feed tokens; return what they attend to."""
        count = q.shape[0]
        self.state, self.tables, granted = jit_extend(
            self.state, self.tables, int32([self.length]), int32([count])
        )
        assert bool(granted)
        self.length += count
        out, self.state = attend(
            self.translator, layer, self.state, self.tables, self.length, q, k, v
        )
        return np.asarray(out)


@ft.partial(jax.jit, static_argnums=(0, 1))
def attend(translator, layer, state, tables, length, q, k, v):
    batch = one_row(tables, q.shape[0], length)
    state, places = translator.write_locations_for(state, "full", batch)
    state, table = translator.index_table_for_batch(state, "full", batch)
    views = tuple(
        state.layout.part_view("full", layer=layer, part=part) for part in "kv"
    )
    buffers = write_kv(state.buffers, views, places, (k, v))
    out, _ = gqa_attention(
        q,
        buffers,
        *views,
        table.blocks,
        cu_query_lens=batch.cu_query_lens,
        kv_lens=batch.kv_lens,
        max_query_len=q.shape[0],
        softmax_scale=0.25,
    )
    return out, state.replace(buffers=buffers)


def tokens(count, seed):
    rng = np.random.default_rng(seed)
    return [
        jnp.asarray(rng.normal(size=(count, HEADS, DIM)), jnp.float32) for _ in range(3)
    ]


def test_scenario_15_smaller_draft_pool_is_refused():
    # Target of 2,000 ids, draft of 1,600: a translator serves one layout only.
    spec = MLASpec(name="mla", num_layers=1, page_size=1, latent_dim=8, rope_dim=0)
    target = unified([spec], {"mla": 2000})
    draft = unified([spec], {"mla": 1600})
    pages = VirtualPages(ids=int32([1900]), space="mla")
    with pytest.raises(SpecError, match="build a translator from the pool's own"):
        KVIndexTranslator(target.layout).translate(draft, "mla", pages)
    # In the draft's own translator the id is out of range: absent, never a row.
    blocks = KVIndexTranslator(draft.layout).translate(draft, "mla", pages)
    assert blocks.ids.tolist() == [ABSENT_BLOCK]


@pytest.mark.usefixtures("unchecked")
def test_scenario_42_wrapper_without_a_translator_cannot_read():
    state, ids = scrambled(unified(FULL, {"full": 16}), "full")
    q, *_ = tokens(1, 0)
    views = tuple(state.layout.part_view("full", layer=0, part=p) for p in "kv")
    for table in (VirtualPages(ids=int32(ids)[None], space="full"), int32(ids)[None]):
        with pytest.raises(IdSpaceError, match="only the translator turns"):
            gqa_attention(
                q,
                state.buffers,
                *views,
                table,
                cu_query_lens=int32([0, 1]),
                kv_lens=int32([1]),
                max_query_len=1,
                softmax_scale=1.0,
            )


def test_scenario_43_every_consumer_translates_after_a_permutation():
    state, ids = scrambled(unified(kda_mla_specs(16), {"mla": 24, "kda": 8}), "mla", 4)
    state, slots = scrambled(state, "kda", 2)
    translator = KVIndexTranslator(state.layout)
    tables = {
        "mla": VirtualPages(ids=int32(ids)[None], space="mla"),
        "kda": VirtualPages(ids=int32(slots[:1]), space="kda"),
    }
    for query_len, kv_len in ((1, 50), (50, 50), (7, 64)):
        batch = one_row(tables, query_len, kv_len)
        bucket = Bucket(num_rows=1, max_pages=4, num_tokens=query_len)
        static_tables = make_static_tables(translator, [bucket])[bucket]
        state, done = refresh_static_tables(translator, static_tables, state, batch)
        raise_on_error(state)
        pages = physical(state, "mla", ids) * 2
        np.testing.assert_array_equal(done.reads["mla"].ids[0], pages)
        position = np.arange(kv_len - query_len, kv_len)
        np.testing.assert_array_equal(done.writes["mla"].blocks, pages[position // 16])
        slot = physical(state, "kda", slots[:1])
        slot = slot * state.layout.sub_pool("kda").blocks_per_page
        np.testing.assert_array_equal(done.slots["kda"].ids, slot)


@pytest.mark.parametrize("page_size", [1, 64])
def test_scenario_44_ids_of_any_shape_and_stride(page_size):
    state, ids = scrambled(
        unified(kda_mla_specs(page_size), {"mla": 24, "kda": 1}), "mla", 6
    )
    translator = KVIndexTranslator(state.layout)
    grid = np.arange(12).reshape(6, 2)
    grid[:, 0] = ids
    for array in (ids, ids.reshape(2, 3), ids[:0], grid[:, 0], ids[::-1]):
        pages = VirtualPages(ids=int32(array), space="mla")
        blocks = translator.translate(state, "mla", pages)
        np.testing.assert_array_equal(blocks.ids, physical(state, "mla", array) * 2)


@pytest.mark.parametrize("split", [(40,), (20, 20), (1, 38, 1)])
def test_scenario_45_extend_after_compaction_equals_the_static_pool(split):
    # The prefix lies at moved pages and the new tokens at fresh ones.
    state, junk = scrambled(unified(FULL, {"full": 20}), "full", 5)
    paged = Row(state)
    plain = Row(static(FULL, {"full": 20}))
    for step, count in enumerate(split):
        new = tokens(count, step)
        np.testing.assert_array_equal(paged.extend(*new), plain.extend(*new))
        dropped = np.zeros(16, np.int32)
        dropped[0], junk = junk[0], junk[1:]
        state = jit_free(paged.state, VirtualPages(ids=int32(dropped), space="full"))
        paged.state, made = jit_compact(state)
        assert int(made.moved[0]) > 0


def test_scenario_46_a_request_moves_between_pools_through_its_ids():
    source = Row(scrambled(unified(FULL, {"full": 16}), "full", 4)[0])
    source.extend(*tokens(40, 0))
    target = Row(scrambled(unified(FULL, {"full": 24}), "full", 7, seed=3)[0])
    # Pages of another pool, taken by another request's ids.
    pages = source.tables["full"].ids[0, :3]
    sent = 0
    target.state, tables, _ = jit_extend(
        target.state, target.tables, int32([0]), int32([40])
    )
    target.tables, target.length = tables, 40
    images = {}
    for row, state in (("source", source.state), ("target", target.state)):
        ids = pages if row == "source" else tables["full"].ids[0, :3]
        images[row] = KVIndexTranslator(state.layout).translate(
            state, "full", VirtualPages(ids=ids, space="full")
        )
    assert not np.array_equal(images["source"].ids, images["target"].ids)
    for layer in range(2):
        for part in "kv":
            view = source.state.layout.part_view("full", layer=layer, part=part)
            far = target.state.layout.part_view("full", layer=layer, part=part)
            blocks = read_blocks(source.state.buffers[0], view, images["source"].ids)
            sent += blocks.size * blocks.dtype.itemsize
            batch = one_row(target.tables, 40, 40)
            state, places = target.translator.write_locations_for(
                target.state, "full", batch
            )
            values = blocks.reshape(-1, HEADS, DIM)[:40]
            buffers = write_kv(state.buffers, (far,), places, (values,))
            target.state = state.replace(buffers=buffers)
            found = read_blocks(buffers[0], far, images["target"].ids)
            found = found.reshape(-1, HEADS, DIM)[:40]
            assert np.asarray(found).tobytes() == np.asarray(values).tobytes()
    assert sent == 3 * state.layout.sub_pool("full").page_bytes
    q, k, v = tokens(1, 9)
    np.testing.assert_array_equal(source.extend(q, k, v), target.extend(q, k, v))


def test_scenario_49_fnuz_bytes_are_copied_not_converted():
    spec = MLASpec(
        name="mla",
        num_layers=1,
        page_size=16,
        latent_dim=16,
        rope_dim=0,
        dtype=ml_dtypes.float8_e4m3fnuz,
    )
    state, ids = scrambled(unified([spec], {"mla": 8}), "mla", 2)
    batch = one_row({"mla": VirtualPages(ids=int32(ids)[None], space="mla")}, 16, 16)
    translator = KVIndexTranslator(state.layout)
    state, places = translator.write_locations_for(state, "mla", batch)
    every = np.arange(256, dtype=np.uint8).reshape(16, 16)
    view = state.layout.part_view("mla", layer=0, part="latent")
    write = jax.jit(lambda buffers, value: write_kv(buffers, (view,), places, (value,)))
    buffers = write(state.buffers, jnp.asarray(every.view(spec.dtype)))
    block = int(physical(state, "mla", ids[:1])[0]) * 16 * 16
    stored = np.asarray(buffers[0]).view(np.uint8).reshape(-1)[block : block + 256]
    np.testing.assert_array_equal(stored, every.reshape(-1))


@pytest.mark.gpu
def test_scenario_50_last_page_of_the_last_layer_of_a_large_pool():
    specs = [
        MLASpec(name="mla", num_layers=7, page_size=64, latent_dim=512, rope_dim=64)
    ]
    layout = unified_layout(specs, pool_bytes=9 * 10**9)
    state = create_pool(layout, fill_word=0xFFFFFFFF)
    sub = layout.sub_pool("mla")
    view = layout.part_view("mla", layer=6, part="latent")
    last = KernelBlocks(
        ids=int32([(sub.num_pages - 1) * sub.blocks_per_page]), sub_pool="mla"
    )
    rows = (last.ids + view.block_offset) * 64 + 63
    assert int(rows[0]) * view.row_bytes > 2**32
    value = jnp.arange(576, dtype=jnp.bfloat16)[None]

    @ft.partial(jax.jit, donate_argnums=0)
    def write_and_read(buffer):
        buffer = write_entries(buffer, view, rows, value)
        return buffer, read_blocks(buffer, view, last.ids)[0, 63]

    _, found = write_and_read(state.buffers[0])
    np.testing.assert_array_equal(found, value[0])


@pytest.mark.parametrize("order", ["identity", "reversed", "random"])
def test_scenario_51_page_tables_in_any_order_give_the_same_bits(order):
    ids = np.arange(1, 9)
    if order != "identity":
        rng = np.random.default_rng(0)
        ids = ids[::-1] if order == "reversed" else rng.permutation(ids)
    state, grant = jit_alloc(unified(FULL, {"full": 16}), {"full": 8})
    assert bool(grant.granted)
    new = tokens(100, 0)
    tables = {"full": VirtualPages(ids=int32(ids)[None], space="full")}
    out, _ = attend(KVIndexTranslator(state.layout), 1, state, tables, 100, *new)
    plain = Row(static(FULL, {"full": 8}))
    np.testing.assert_array_equal(out, plain.extend(*new))


def test_scenario_b1_every_mode_reads_moved_pages_alike():
    state, _ = scrambled(unified(FULL, {"full": 20}), "full", 5)
    row, whole = Row(state), Row(static(FULL, {"full": 20}))
    new = tokens(37, 1)
    expected = whole.extend(*new)
    found = [row.extend(*(x[a:b] for x in new)) for a, b in ((0, 30), (30, 36))]
    row.state, made = jit_compact(row.state)
    assert int(made.moved[0]) > 0
    found.append(row.extend(*(x[36:] for x in new)))
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("num_layers", [1, 2, 7])
def test_scenario_b3_multiplier_comes_from_the_spec(num_layers):
    spec = MLASpec(
        name="mla", num_layers=num_layers, page_size=4, latent_dim=8, rope_dim=0
    )
    state, ids = scrambled(unified([spec], {"mla": 16}), "mla", 6)
    pages = VirtualPages(ids=int32(ids), space="mla")
    blocks = KVIndexTranslator(state.layout).translate(state, "mla", pages).ids
    # The first row of a block id begins a page, for any number of layers.
    assert not np.any(np.asarray(blocks) * 4 % (4 * num_layers))
    np.testing.assert_array_equal(blocks, physical(state, "mla", ids) * num_layers)


def test_scenario_b5_table_built_before_a_compaction_is_wrong_after_it():
    # Why a step refreshes its tables wholly: the ids of before name other pages.
    state, ids = scrambled(unified(FULL, {"full": 16}), "full", 5)
    translator = KVIndexTranslator(state.layout)
    pages = VirtualPages(ids=int32(ids), space="full")
    before = np.asarray(translator.translate(state, "full", pages).ids)
    state, made = jit_compact(state)
    after = np.asarray(translator.translate(state, "full", pages).ids)
    assert int(made.moved[0]) == np.sum(before != after) > 0
    np.testing.assert_array_equal(after, physical(state, "full", ids) * 4)


@pytest.mark.usefixtures("unchecked")
def test_scenario_b7_writes_take_translated_locations_only():
    state, ids = scrambled(unified(FULL, {"full": 16}), "full")
    views = tuple(state.layout.part_view("full", layer=0, part=p) for p in "kv")
    _, k, v = tokens(6, 0)
    for places in (VirtualPages(ids=int32(ids), space="full"), int32(ids)):
        with pytest.raises(IdSpaceError, match="write locations of 'full'"):
            write_kv(state.buffers, views, places, (k, v))


def test_scenario_b9_all_tombstones_give_no_negative_id():
    state, ids = scrambled(
        unified(window_specs(16), {"full": 16, "state": 4, "swa": 16}), "full", 4
    )
    pages = VirtualPages(ids=int32(ids), space="full")
    state = free_window(state, "swa", pages)
    tables = {"full": VirtualPages(ids=int32(ids)[None], space="full")}
    batch = one_row(tables, 3, 64)
    translator = KVIndexTranslator(state.layout)
    for step in (lambda f: f, jax.jit):
        read = step(lambda s: translator.index_table_for_batch(s, "swa", batch)[1])
        write = step(lambda s: translator.sliding_window_write_loc_for(s, "swa", batch))
        assert (np.asarray(read(state).blocks.ids) == 0).all()
        after, places = write(state)
        raise_on_error(after)
        assert (np.asarray(places.blocks) == ABSENT_BLOCK).all()


@pytest.mark.parametrize("padding", [-1, 0, 12345])
def test_scenario_b10_tail_keeps_the_backends_own_padding(padding):
    state, ids = scrambled(unified(FULL, {"full": 16}), "full", 3)
    table = np.zeros((1, 6), np.int32)
    # Stale ids past the live prefix must not be translated.
    table[0] = [*ids, *ids]
    batch = one_row({"full": VirtualPages(ids=int32(table), space="full")}, 1, 35)
    state, found = KVIndexTranslator(state.layout).index_table_for_batch(
        state, "full", batch, padding=padding
    )
    expected = [*(physical(state, "full", ids) * 4), padding, padding, padding]
    np.testing.assert_array_equal(found.blocks.ids[0], expected)


@pytest.mark.parametrize("scenario", ["b23", "b25", "b28"])
def test_scenarios_b23_b25_b28_nothing_of_a_larger_batch_survives(scenario):
    # b23: the tail of a slot buffer; b25: write locations; b28: rows of a table.
    specs = kda_mla_specs(16)
    state, ids = scrambled(unified(specs, {"mla": 24, "kda": 8}), "mla", 6)
    state, slots = scrambled(state, "kda", 3)
    translator = KVIndexTranslator(state.layout)
    bucket = Bucket(num_rows=3, max_pages=2, num_tokens=6)
    tables = make_static_tables(translator, [bucket], padding=-7)[bucket]
    step = jax.jit(ft.partial(refresh_static_tables, translator), donate_argnums=(0, 1))

    def batch(rows):
        table, slot = np.zeros((3, 2), np.int32), np.zeros(3, np.int32)
        table[:rows] = ids.reshape(3, 2)[:rows]
        slot[:rows] = slots[:rows]
        live = np.arange(3) < rows
        return StepBatch(
            page_tables={
                "mla": VirtualPages(ids=int32(table), space="mla"),
                "kda": VirtualPages(ids=int32(slot), space="kda"),
            },
            cu_query_lens=int32([0, *np.cumsum(2 * live)]),
            kv_lens=int32(live * 20),
            num_tokens=6,
        )

    state, tables = step(tables, state, batch(3))
    state, tables = step(tables, state, batch(1))
    raise_on_error(state)
    stale = {
        "b23": np.asarray(tables.slots["kda"].ids)[1:] - ABSENT_BLOCK,
        "b25": np.asarray(tables.writes["mla"].blocks)[2:] - ABSENT_BLOCK,
        "b28": np.asarray(tables.reads["mla"].ids)[1:] + 7,
    }
    assert not np.any(stale[scenario])
