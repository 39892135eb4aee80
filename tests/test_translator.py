"""The translator: what it gives back, and what it refuses while traced."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pools import (
    int32,
    jit_alloc,
    kda_mla_specs,
    static,
    unified,
    window_specs,
)
from ukv.allocator import (
    ErrorBit,
    alloc_extend,
    compact,
    free,
    free_window,
    raise_on_error,
)
from ukv.errors import IdSpaceError, SpecError
from ukv.ids import (
    ABSENT_BLOCK,
    KernelBlocks,
    PhysicalPages,
    VirtualPages,
    require_ids,
)
from ukv.layout import unified_layout
from ukv.pool import read_blocks, write_entries
from ukv.spec import AttentionSpec, MLASpec
from ukv.translator import (
    Bucket,
    KVIndexTranslator,
    StepBatch,
    make_static_tables,
    refresh_static_tables,
    token_places,
)

jit_free = jax.jit(free)
jit_extend = jax.jit(alloc_extend, static_argnames="max_new_pages")

PAGES = {"mla": 24, "kda": 6}
WINDOW_PAGES = {"full": 16, "state": 4, "swa": 16}


def scattered(state, owner, keep, seed=0):
    """Allocate ``2 * keep`` pages and free every other one: live ids with holes."""
    state, grant = jit_alloc(state, {owner: 2 * keep})
    assert bool(grant.granted)
    new = np.asarray(grant.pages[owner].ids)[: 2 * keep]
    ids = np.random.default_rng(seed).permutation(new)
    dropped = np.zeros(16, np.int32)
    dropped[:keep] = ids[keep:]
    state = jit_free(state, VirtualPages(ids=int32(dropped), space=owner))
    return state, ids[:keep]


def batch_of(tables, query_lens, kv_lens, num_tokens=None):
    cu = np.concatenate([[0], np.cumsum(query_lens)])
    return StepBatch(
        page_tables={
            name: VirtualPages(ids=int32(t), space=name) for name, t in tables.items()
        },
        cu_query_lens=int32(cu),
        kv_lens=int32(kv_lens),
        num_tokens=int(cu[-1]) if num_tokens is None else num_tokens,
    )


def expected_blocks(state, name, ids):
    sub = state.layout.sub_pool(name)
    return np.asarray(state.tables[sub.index].v2p)[ids] * sub.blocks_per_page


class TestTranslate:
    @pytest.mark.parametrize("page_size", [1, 64])
    @pytest.mark.parametrize("shape", [(6,), (2, 3), (3, 2), (0,), (2, 0)])
    def test_any_shape(self, page_size, shape):
        state = unified(kda_mla_specs(page_size), PAGES)
        state, ids = scattered(state, "mla", 6)
        translator = KVIndexTranslator(state.layout)
        ids = ids[: int(np.prod(shape))].reshape(shape)
        blocks = translator.translate(
            state, "mla", VirtualPages(ids=int32(ids), space="mla")
        )
        assert blocks.sub_pool == "mla"
        assert blocks.ids.dtype == jnp.int32
        np.testing.assert_array_equal(blocks.ids, expected_blocks(state, "mla", ids))

    def test_block_ids_differ_from_virtual_ids_after_a_scramble(self):
        state = unified(kda_mla_specs(16), PAGES)
        state, ids = scattered(state, "mla", 6)
        blocks = expected_blocks(state, "mla", ids)
        assert not np.array_equal(blocks, ids)

    def test_null_unowned_and_out_of_range_ids_are_absent(self):
        state = unified(kda_mla_specs(16), PAGES)
        state, ids = scattered(state, "mla", 4)
        num_virtual = state.layout.sub_pool("mla").num_virtual
        free_id = next(i for i in range(1, num_virtual) if i not in set(ids))
        asked = [0, free_id, num_virtual, 2**31 - 1, -1, ids[0]]
        blocks = KVIndexTranslator(state.layout).translate(
            state, "mla", VirtualPages(ids=int32(asked), space="mla")
        )
        assert (np.asarray(blocks.ids)[:-1] == ABSENT_BLOCK).all()
        assert blocks.ids[-1] == expected_blocks(state, "mla", ids[:1])[0]

    def test_single_layer_still_translates(self):
        # With one layer B is 1, so kernel ids equal physical ids: a forgotten
        # translation would only show once pages have moved.
        spec = MLASpec(
            name="mla", num_layers=1, page_size=16, latent_dim=32, rope_dim=0
        )
        state = unified([spec], {"mla": 12})
        assert state.layout.sub_pool("mla").blocks_per_page == 1
        state, ids = scattered(state, "mla", 5)
        translator = KVIndexTranslator(state.layout)
        pages = VirtualPages(ids=int32(ids), space="mla")
        before = np.asarray(translator.translate(state, "mla", pages).ids)
        state, moved = compact(state)
        after = np.asarray(translator.translate(state, "mla", pages).ids)
        assert int(moved.moved.sum()) > 0
        assert not np.array_equal(before, after)
        np.testing.assert_array_equal(after, expected_blocks(state, "mla", ids))

    def test_static_pool_returns_the_same_array(self):
        state = static(kda_mla_specs(16), PAGES)
        translator = KVIndexTranslator(state.layout)
        pages = VirtualPages(ids=int32([3, 1, 2]), space="mla")
        assert not translator.is_translating
        assert translator.translate(state, "mla", pages).ids is pages.ids

    def test_static_window_has_fewer_pages_than_ids(self):
        # Scenario 16: its table is as long as the owner's id space.
        state = static(window_specs(16), {"full": 40, "state": 2, "swa": 4})
        state, grant = jit_alloc(state, {"full": 4}, max_pages=4)
        sub = state.layout.sub_pool("swa")
        assert state.tables[sub.index].v2p.shape == (41,)
        translator = KVIndexTranslator(state.layout)
        pages = VirtualPages(ids=int32([*grant.pages["full"].ids, 40]), space="full")
        blocks = np.asarray(translator.translate(state, "swa", pages).ids)
        assert set(blocks[:4]) == {0, 1, 2, 3}
        assert blocks[4] == ABSENT_BLOCK


@pytest.mark.usefixtures("unchecked")
class TestWrongSpaces:
    """A forgotten or doubled translation fails while the step is traced."""

    def setup_method(self):
        self.state = unified(kda_mla_specs(16), PAGES)
        self.state, ids = scattered(self.state, "mla", 4)
        self.pages = VirtualPages(ids=int32(ids), space="mla")
        self.translator = KVIndexTranslator(self.state.layout)

    def test_doubled_translation(self):
        blocks = self.translator.translate(self.state, "mla", self.pages)
        with pytest.raises(IdSpaceError, match="virtual page ids of 'mla', not kernel"):
            jax.eval_shape(
                lambda b: self.translator.translate(self.state, "mla", b), blocks
            )

    def test_forgotten_translation(self):
        def wrapper(table):
            return require_ids(table, KernelBlocks, owner="mla", argument="table").ids

        with pytest.raises(IdSpaceError, match="kernel block ids of 'mla', not virtua"):
            jax.eval_shape(wrapper, self.pages)

    def test_raw_array(self):
        with pytest.raises(IdSpaceError, match="without a space"):
            self.translator.translate(self.state, "mla", self.pages.ids)

    def test_physical_ids(self):
        physical = PhysicalPages(ids=self.pages.ids, sub_pool="mla")
        with pytest.raises(IdSpaceError, match="not physical page ids"):
            self.translator.translate(self.state, "mla", physical)

    def test_ids_of_another_sub_pool(self):
        with pytest.raises(IdSpaceError, match="of 'kda', not of 'mla'"):
            self.translator.translate(self.state, "kda", self.pages)

    def test_pool_of_another_layout(self):
        other = unified(kda_mla_specs(1), PAGES)
        with pytest.raises(SpecError, match="build a translator from the pool's own"):
            self.translator.translate(other, "mla", self.pages)

    def test_states_have_no_read_table(self):
        batch = batch_of({"mla": [[0]], "kda": [0]}, [1], [1])
        with pytest.raises(SpecError, match="call slots_for"):
            self.translator.index_table_for_batch(self.state, "kda", batch)
        with pytest.raises(SpecError, match="call slots_for"):
            self.translator.write_locations_for(self.state, "kda", batch)
        with pytest.raises(SpecError, match="call index_table_for_batch"):
            self.translator.slots_for(self.state, "mla", batch)
        with pytest.raises(SpecError, match="call write_locations_for"):
            self.translator.sliding_window_write_loc_for(self.state, "mla", batch)


class TestReadTable:
    def test_prefix_only_fill(self):
        state = unified(kda_mla_specs(16), PAGES)
        state, ids = scattered(state, "mla", 6)
        translator = KVIndexTranslator(state.layout)
        table = np.zeros((3, 4), np.int32)
        table[0, :3], table[2, :3] = ids[:3], ids[3:]
        out = KernelBlocks(ids=jnp.full((3, 4), -1, jnp.int32), sub_pool="mla")
        state, filled = translator.fill_read_table(
            out, state, VirtualPages(ids=int32(table), space="mla"), int32([2, 0, 3])
        )
        raise_on_error(state)
        wanted = np.full((3, 4), -1)
        wanted[0, :2] = expected_blocks(state, "mla", ids[:2])
        wanted[2, :3] = expected_blocks(state, "mla", ids[3:])
        np.testing.assert_array_equal(filled.ids, wanted)

    def test_unowned_live_page_sets_the_error_bit(self):
        state = unified(kda_mla_specs(16), PAGES)
        state, ids = scattered(state, "mla", 2)
        state = free(state, VirtualPages(ids=int32(ids[1:]), space="mla"))
        batch = batch_of({"mla": [ids], "kda": [0]}, [1], [32])
        translator = KVIndexTranslator(state.layout)
        state, table = translator.index_table_for_batch(state, "mla", batch, padding=7)
        assert int(state.error[0]) == ErrorBit.UNOWNED_ID
        assert int(table.blocks.ids[0, 1]) == 7

    def test_tombstones_keep_the_padding_and_are_no_error(self):
        # Scenario b9: every window page released, no negative id escapes.
        state = unified(window_specs(16), WINDOW_PAGES)
        state, ids = scattered(state, "full", 4)
        state = free_window(
            state, "swa", VirtualPages(ids=int32(ids[:2]), space="full")
        )
        batch = batch_of({"full": [ids], "state": [0]}, [1], [64])
        translator = KVIndexTranslator(state.layout)
        state, full = translator.index_table_for_batch(state, "full", batch)
        state, window = translator.index_table_for_batch(state, "swa", batch)
        raise_on_error(state)
        np.testing.assert_array_equal(
            full.blocks.ids[0], expected_blocks(state, "full", ids)
        )
        np.testing.assert_array_equal(window.blocks.ids[0, :2], [0, 0])
        np.testing.assert_array_equal(
            window.blocks.ids[0, 2:], expected_blocks(state, "swa", ids[2:])
        )

    @pytest.mark.parametrize("entry_page_size", [1, 4, 16])
    def test_smaller_entries_read_the_same_tokens(self, entry_page_size):
        state = unified(kda_mla_specs(16), PAGES)
        state, ids = scattered(state, "mla", 3)
        translator = KVIndexTranslator(state.layout)
        view = state.layout.part_view("mla", layer=1, part="latent")
        values = np.random.default_rng(0).normal(size=(48, 48)).astype(np.float32)
        batch = batch_of({"mla": [ids], "kda": [0]}, [48], [48])
        state, places = translator.write_locations_for(state, "mla", batch)
        rows = (places.blocks + view.block_offset) * 16 + places.offsets
        buffer = write_entries(
            state.buffers[0], view, rows, jnp.asarray(values, jnp.bfloat16)
        )
        state, table = translator.index_table_for_batch(
            state, "mla", batch, entry_page_size=entry_page_size
        )
        assert table.entry_page_size == entry_page_size
        small = view.with_page_size(entry_page_size)
        found = read_blocks(buffer, small, table.blocks.ids).reshape(48, 48)
        np.testing.assert_array_equal(found, jnp.asarray(values, jnp.bfloat16))

    def test_entries_that_do_not_divide_are_refused(self):
        state = unified(window_specs(16), WINDOW_PAGES)
        batch = batch_of({"full": [[1, 2]], "state": [1]}, [1], [32])
        translator = KVIndexTranslator(state.layout)
        for size in (5, 0, -16):
            with pytest.raises(SpecError, match="must divide page_size=16"):
                translator.index_table_for_batch(
                    state, "full", batch, entry_page_size=size
                )
        # K is 24 and V 16 wide: a token takes several rows, pages stay whole.
        with pytest.raises(SpecError, match="parts of equal width"):
            translator.index_table_for_batch(state, "full", batch, entry_page_size=4)
        view = state.layout.part_view("full", layer=0, part="k")
        with pytest.raises(SpecError, match="cannot be read in pages of 4"):
            view.with_page_size(4)
        out = KernelBlocks(ids=jnp.zeros((1, 3), jnp.int32), sub_pool="full")
        with pytest.raises(SpecError, match="whole number of entries"):
            translator.fill_read_table(
                out, state, batch.page_tables["full"], int32([2])
            )


class TestWriteLocations:
    @pytest.mark.parametrize("page_size", [1, 16, 64])
    def test_every_new_token_lands_on_its_page(self, page_size):
        specs = kda_mla_specs(page_size)
        pages = {"mla": 200 if page_size == 1 else 24, "kda": 2}
        state = unified(specs, pages)
        width = 70 if page_size == 1 else 8
        tables = {
            "mla": VirtualPages(ids=jnp.zeros((3, width), jnp.int32), space="mla")
        }
        context, query = int32([0, 0, 0]), int32([5, 0, 63])
        state, tables, granted = jit_extend(
            state, tables, context, query, max_new_pages=80
        )
        context, query = context + query, int32([3, 0, 4])
        state, tables, granted = jit_extend(
            state, tables, context, query, max_new_pages=8
        )
        assert bool(granted)
        ids = np.asarray(tables["mla"].ids)
        batch = batch_of({"mla": ids, "kda": [0, 0, 0]}, [3, 0, 4], [8, 0, 67], 10)
        translator = KVIndexTranslator(state.layout)
        state, places = translator.write_locations_for(state, "mla", batch)
        raise_on_error(state)
        row = np.array([0, 0, 0, 2, 2, 2, 2])
        position = np.array([5, 6, 7, 63, 64, 65, 66])
        wanted = expected_blocks(state, "mla", ids[row, position // page_size])
        np.testing.assert_array_equal(places.blocks[:7], wanted)
        np.testing.assert_array_equal(places.offsets[:7], position % page_size)
        assert (np.asarray(places.blocks[7:]) == ABSENT_BLOCK).all()

    def test_token_without_a_page_is_flagged_and_not_written(self):
        state = unified(kda_mla_specs(16), PAGES)
        batch = batch_of({"mla": [[0, 0]], "kda": [0]}, [2], [2])
        translator = KVIndexTranslator(state.layout)
        state, places = translator.write_locations_for(state, "mla", batch)
        assert int(state.error[0]) == ErrorBit.UNOWNED_ID
        assert (np.asarray(places.blocks) == ABSENT_BLOCK).all()

    def test_window_half_that_is_gone_is_skipped_quietly(self):
        state = unified(window_specs(16), WINDOW_PAGES)
        state, ids = scattered(state, "full", 2)
        state = free_window(
            state, "swa", VirtualPages(ids=int32(ids[:1]), space="full")
        )
        batch = batch_of({"full": [ids], "state": [0]}, [32], [32])
        translator = KVIndexTranslator(state.layout)
        state, full = translator.write_locations_for(state, "full", batch)
        state, window = translator.sliding_window_write_loc_for(state, "swa", batch)
        raise_on_error(state)
        assert (np.asarray(full.blocks) != ABSENT_BLOCK).all()
        is_gone = np.asarray(window.blocks) == ABSENT_BLOCK
        np.testing.assert_array_equal(is_gone, np.arange(32) < 16)
        np.testing.assert_array_equal(
            window.blocks[16:], np.repeat(expected_blocks(state, "swa", ids[1:]), 16)
        )

    def test_slots_of_padded_rows_are_absent(self):
        state = unified(kda_mla_specs(16), PAGES)
        state, ids = scattered(state, "kda", 3)
        batch = batch_of(
            {"mla": np.zeros((4, 1)), "kda": [ids[0], 0, ids[2], ids[1]]},
            [1, 0, 1, 0],
            [1, 0, 1, 0],
        )
        translator = KVIndexTranslator(state.layout)
        state, slots = translator.slots_for(state, "kda", batch)
        raise_on_error(state)
        wanted = expected_blocks(state, "kda", ids[[0, 2]])
        np.testing.assert_array_equal(
            slots.ids, [wanted[0], ABSENT_BLOCK, wanted[1], ABSENT_BLOCK]
        )

    def test_token_places_example(self):
        batch = batch_of({}, [2, 1], [10, 1], 5)
        places = token_places(batch)
        np.testing.assert_array_equal(places.rows, [0, 0, 1, 1, 1])
        np.testing.assert_array_equal(places.positions[:3], [8, 9, 0])
        np.testing.assert_array_equal(places.is_token, [1, 1, 1, 0, 0])


class TestStaticTables:
    bucket = Bucket(num_rows=4, max_pages=3, num_tokens=6)

    def tables_for(self, state):
        translator = KVIndexTranslator(state.layout)
        tables = make_static_tables(translator, [self.bucket], padding=5)
        return translator, tables[self.bucket]

    def test_small_batch_after_a_large_one_leaves_no_stale_id(self):
        # Scenarios b23, b25, b28: rows and columns beyond the batch are reset.
        state = unified(kda_mla_specs(16), PAGES)
        state, ids = scattered(state, "mla", 8)
        state, slots = scattered(state, "kda", 3)
        translator, tables = self.tables_for(state)
        step = jax.jit(
            ft.partial(refresh_static_tables, translator), donate_argnums=(0, 1)
        )
        large = np.zeros((4, 3), np.int32)
        large[:3, :2] = ids[:6].reshape(3, 2)
        batch = batch_of(
            {"mla": large, "kda": [*slots, 0]}, [2, 2, 2, 0], [32, 32, 32, 0]
        )
        state, tables = step(tables, state, batch)
        small = np.zeros((4, 3), np.int32)
        small[0, 0] = ids[6]
        batch = batch_of(
            {"mla": small, "kda": [slots[1], 0, 0, 0]}, [1, 0, 0, 0], [3, 0, 0, 0], 6
        )
        state, tables = step(tables, state, batch)
        raise_on_error(state)
        block = expected_blocks(state, "mla", ids[6:7])[0]
        reads = np.array(tables.reads["mla"].ids)
        assert reads[0, 0] == block
        reads[0, 0] = 5
        assert (reads == 5).all()
        writes = np.asarray(tables.writes["mla"].blocks)
        np.testing.assert_array_equal(writes, [block] + [ABSENT_BLOCK] * 5)
        np.testing.assert_array_equal(tables.slots["kda"].ids[1:], [ABSENT_BLOCK] * 3)

    def test_buffers_keep_their_address(self):
        state = unified(kda_mla_specs(16), PAGES)
        state, ids = scattered(state, "mla", 4)
        translator, tables = self.tables_for(state)
        step = jax.jit(
            ft.partial(refresh_static_tables, translator), donate_argnums=(0, 1)
        )
        table = np.zeros((4, 3), np.int32)
        table[:2, :2] = ids.reshape(2, 2)
        batch = batch_of(
            {"mla": table, "kda": [0] * 4}, [2, 2, 0, 0], [20, 20, 0, 0], 6
        )

        def pointers(tree):
            return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]

        state, tables = step(tables, state, batch)
        first = pointers(tables), pointers(state.buffers)
        for _ in range(20):
            state, tables = step(tables, state, batch)
            assert (pointers(tables), pointers(state.buffers)) == first

    def test_batch_of_another_bucket_is_refused(self):
        state = unified(kda_mla_specs(16), PAGES)
        translator, tables = self.tables_for(state)
        batch = batch_of({"mla": np.zeros((2, 3)), "kda": [0, 0]}, [1, 1], [1, 1])
        with pytest.raises(SpecError, match="build the batch for this bucket"):
            refresh_static_tables(translator, tables, state, batch)

    def test_bucket_sizes_are_positive(self):
        with pytest.raises(SpecError, match="bucket max_pages=0 must be 1 or more"):
            Bucket(num_rows=1, max_pages=0, num_tokens=1)


def test_address_arithmetic_of_a_pool_of_many_gibibytes():
    # Over 2^31 elements: block ids and rows fit int32, checked without a buffer.
    specs = [
        MLASpec(name="mla", num_layers=7, page_size=64, latent_dim=512, rope_dim=64),
        AttentionSpec(
            name="gqa", num_layers=9, page_size=64, num_kv_heads=8, head_dim=128
        ),
    ]
    layout = unified_layout(specs, pool_bytes=130 * 2**30)
    for sub in layout.sub_pools:
        view = layout.part_view(
            sub.name,
            layer=sub.spec.num_layers - 1,
            part=sub.spec.parts[-1].name,
        )
        last = (sub.num_pages - 1) * sub.blocks_per_page
        row = (last + view.block_offset) * sub.page_size + sub.page_size - 1
        assert row < view.num_rows < 2**31
        in_int32 = (int32(last) + view.block_offset) * sub.page_size
        assert int(in_int32) == row - (sub.page_size - 1)
