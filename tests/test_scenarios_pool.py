"""Reported failures of other systems, replayed on the pool; named by their numbers.

Left to the engine, whose policy they are: 3, 19, 34, 36, 56, 58, 59, 61, 62, 63, 67
(what to evict, prefix cache, checkpoints), B29, B34, B35, B38, B40, B43, B45 to B47,
B49, B51 to B53, B55 and B59 to B71. Of 2, 20, 26, 32, B32 and B57 the part of the pool
is here. Translation, 15, 42 to 46, 49 to 51 and B1 to B13, is tested with the
translator; B15, B19, B21 to B28 with the ops and the steps; 69, a donated pool that
keeps its pointer, in test_alloc.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tagged_pools as pools
from tests.tagged_pools import (
    check,
    errors,
    full_spec,
    grow,
    held,
    latent_spec,
    live,
    new_pool,
    pages,
    physical,
    poisoned,
    row,
    state_spec,
    take,
    window_spec,
)
from tests.test_alloc import kda_mla, swa_full
from tests.test_layout import assert_disjoint, byte_ranges
from tests.test_spec import kimi_latent, kimi_state
from ukv import allocator
from ukv.allocator import ErrorBit, PoolMirror
from ukv.errors import PoolStateError
from ukv.ids import VirtualPages
from ukv.layout import (
    RequestShape,
    max_pages,
    max_requests,
    max_tokens,
    packed_bytes,
    pages_of_request,
    static_layout,
    unified_layout,
)
from ukv.pool import HI, HOLES, LIVE, LO
from ukv.spec import AttentionSpec, MLASpec, Part, SlidingWindowSpec, StateSpec

GIB = 2**30


def many(space, ids):
    """Unpadded ids, for tests with their own sizes."""
    return VirtualPages(ids=jnp.asarray(np.asarray(ids, np.int32)), space=space)


def tiny_window_specs(*, full_layers, window_layers, window_size, page_size):
    """Rows of 16 bytes: the layers and windows of big models in small pools."""
    shape = {"page_size": page_size, "num_kv_heads": 1, "head_dim": 8}
    return [
        AttentionSpec(name="full", num_layers=full_layers, **shape),
        SlidingWindowSpec(
            name="window",
            num_layers=window_layers,
            window_size=window_size,
            shares_ids="full",
            **shape,
        ),
    ]


def run_request(state, num_pages, *, chunk_pages, window_pages):
    """Grow one request chunk by chunk, sliding its window; return its peak as well."""
    ids, peak = [], 0
    while len(ids) < num_pages:
        behind = ids[: max(len(ids) - window_pages, 0)][-chunk_pages:]
        state = pools.free_window(
            state, "window", pages("full", *behind, length=chunk_pages)
        )
        count = min(chunk_pages, num_pages - len(ids))
        state, grant = pools.alloc(state, {"full": count}, max_pages=chunk_pages)
        assert bool(grant.granted), (len(ids), state.counters)
        ids += held(grant.pages["full"])
        peak = max(peak, live(state, "window"))
    return state, ids, peak


# Admission and sizing.


def test_scenario_02_free_ids_alone_never_imply_capacity():
    # 100 units of 256 bytes; F pages of 1, M slots of 10; F holds 94.
    slot = Part(name="recurrent", shape=(640,), dtype=jnp.dtype("float32"))
    slots = StateSpec(name="state", num_layers=1, parts=(slot,))
    state = new_pool([full_spec(), slots], 25_600)
    state, grant = pools.alloc(state, {"full": 94}, max_pages=94)
    ids = held(grant.pages["full"])
    state = pools.write_tags(state, "full", ids)
    mirror = PoolMirror.read(state)
    assert mirror.free_bytes() == 6 * 256
    # Ten ids of M are free, and not one slot.
    assert state.layout.sub_pool("state").num_virtual - 1 == 10
    assert not mirror.can_allocate({"state": 1})
    state, made = pools.make_room(state, {"state": 1})
    assert not bool(made.fits)
    # Evicting M frees nothing; four scattered pages of F are enough.
    evicted = []
    for virtual in np.random.default_rng(0).permutation(ids)[:60]:
        if PoolMirror.read(state).can_allocate({"state": 1}):
            break
        state = pools.free(state, pages("full", int(virtual)))
        evicted.append(int(virtual))
    assert len(evicted) == 4
    before = pools.contents(state)["full"]
    state, ids = grow(state, state=1)
    assert ids["state"] == [1]
    assert pools.contents(state)["full"] == before
    assert PoolMirror.read(state).free_bytes() == 0
    check(state)


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.8])
def test_scenario_04_sizing_loses_less_than_a_page(ratio):
    # Tokens of 24 and 10 bytes are rows of 32 and 16.
    shape = {"num_layers": 1, "page_size": 16, "rope_dim": 0}
    specs = [
        MLASpec(name="full", latent_dim=12, **shape),
        MLASpec(name="swa", latent_dim=5, **shape),
    ]
    budget = 1_000_003
    layout = unified_layout(specs, pool_bytes=budget)
    page = layout.sub_pool("full").page_bytes
    assert (page, layout.sub_pool("swa").page_bytes) == (512, 256)
    full = int(budget * ratio) // page
    swa = max_pages(layout, "swa", {"full": full})
    mirror = PoolMirror.create(layout).alloc({"full": full, "swa": swa})
    assert budget - page < mirror.bytes_in_use() <= budget
    assert not mirror.can_allocate({"swa": 1})


@pytest.mark.parametrize("column", [LIVE, HOLES, LO, HI])
@pytest.mark.parametrize("name", ["state", "latent"])
def test_scenario_06_conservation_names_the_sub_pool(name, column):
    state, _ = take(kda_mla(), state=2, latent=3)
    allocator.verify(state)
    index = state.layout.sub_pool(name).index
    broken = state.replace(counters=state.counters.at[index, column].add(1))
    with pytest.raises(PoolStateError, match=f"sub-pool '{name}'"):
        allocator.verify(broken)


def test_scenario_07_borrower_is_never_negative():
    # Room for 100 pages with both halves; windows give bytes back to F.
    state = new_pool([full_spec(), window_spec()], 100 * 768)
    state, grant = pools.alloc(state, {"full": 100}, max_pages=128)
    ids = held(grant.pages["full"])
    assert PoolMirror.read(state).free_bytes() == 0
    state = pools.free_window(state, "window", pages("full", *ids[:90], length=128))
    state, _ = pools.make_room(state, {"full": 20})
    state, grant = pools.alloc(state, {"full": 20}, max_pages=128)
    assert bool(grant.granted)
    mirror = PoolMirror.read(state)
    assert mirror.live("full") == 120
    assert mirror.free_bytes() == 76_800 - 120 * 256 - 30 * 512
    # 30,720 bytes are 40 pages more, to the byte.
    assert mirror.can_allocate({"full": 40})
    assert not mirror.can_allocate({"full": 41})
    check(state)


def test_scenario_08_prompt_longer_than_the_window_pool_is_admitted():
    specs = tiny_window_specs(
        full_layers=1, window_layers=1, window_size=1_024, page_size=16
    )
    layout = static_layout(specs, num_pages={"full": 6_250, "window": 193})
    shape = RequestShape(num_tokens=100_000, chunk_len=2_048)
    assert pages_of_request(layout.sub_pool("window"), shape) == 193
    assert max_requests(layout, shape) == 1
    # The 1,023 tokens before a chunk that starts on a page touch 64 pages.
    state, ids, peak = run_request(
        poisoned(layout), 6_250, chunk_pages=128, window_pages=64
    )
    assert len(ids) == 6_250
    assert peak == 192
    assert errors(state) == {}


@jax.jit
def grants(state, counts):
    """What ``alloc`` and ``make_room`` say to each count, on the device."""

    def ask(count):
        _, grant = allocator.alloc(state, {"full": count}, max_pages={"full": 64})
        _, made = allocator.make_room(state, {"full": count})
        return grant.granted, made.fits

    return jax.vmap(ask)(counts)


def test_scenario_10_can_allocate_is_what_allocate_does():
    rng = np.random.default_rng(0)
    state, asked = swa_full(), 0
    while asked < 10_000:
        counts = rng.integers(0, 33, 500)
        mirror = PoolMirror.read(state)
        in_place, after_a_move = grants(state, jnp.asarray(counts, jnp.int32))
        numbers = [int(n) for n in counts]
        assert np.asarray(in_place).tolist() == [
            mirror.fits_in_place({"full": n}) for n in numbers
        ]
        assert np.asarray(after_a_move).tolist() == [
            mirror.can_allocate({"full": n}) for n in numbers
        ]
        asked += len(counts)
        # The next state: some pages more, some window halves and some pages less.
        state, _ = pools.alloc(state, {"full": int(rng.integers(0, 8))})
        found = pools.held_pages(state)
        slid = [i for i in found["window"] if rng.random() < 0.2][:16]
        state = pools.free_window(state, "window", pages("full", *slid))
        gone = [i for i in found["full"] if rng.random() < 0.2][:16]
        state = pools.free(state, pages("full", *gone))
    check(state)


def test_scenario_12_gpt_oss_window_counts_once():
    # gpt-oss-20b: 12 + 12 layers of 8 heads of 64, window 128; length 8,192, batch 32.
    def bytes_of(window_size, page_size):
        shape = {"num_layers": 12, "num_kv_heads": 8, "head_dim": 64}
        shape["page_size"] = page_size
        specs = [
            AttentionSpec(name="full", **shape),
            SlidingWindowSpec(
                name="window", window_size=window_size, shares_ids="full", **shape
            ),
        ]
        layout = unified_layout(specs, pool_bytes=16 * GIB)
        request = RequestShape(num_tokens=8_192)
        needs = {s.name: 32 * pages_of_request(s, request) for s in layout.sub_pools}
        needed = packed_bytes(specs, needs)
        assert max_requests(unified_layout(specs, pool_bytes=needed), request) == 32
        smaller = unified_layout(specs, pool_bytes=needed - 1)
        assert max_requests(smaller, request) == 31
        return needed / GIB

    assert bytes_of(128, 1) == 6.09375
    assert bytes_of(128, 16) == pytest.approx(6.09, abs=0.02)
    assert bytes_of(8_192, 16) == 12.0


@pytest.mark.parametrize(
    ("full_layers", "window_layers", "window_size"),
    [(12, 12, 128), (10, 50, 1_024), (1, 5, 512)],
    ids=["gpt-oss-20b", "gemma-4-31B", "gemma-3"],
)
def test_scenario_12_capacity_is_the_peak_of_the_allocator(
    full_layers, window_layers, window_size
):
    specs = tiny_window_specs(
        full_layers=full_layers,
        window_layers=window_layers,
        window_size=window_size,
        page_size=16,
    )
    # Chunks of 256 tokens that start on a page: W - 1 tokens before it are W / 16.
    request = RequestShape(num_tokens=4_096, chunk_len=256)
    window_pages = window_size // 16
    needs = {"full": 256, "window": window_pages + 16}
    layout = unified_layout(specs, pool_bytes=packed_bytes(specs, needs))
    (_, window) = layout.sub_pools
    # The worst case of the closed form starts inside a page: one page more.
    assert pages_of_request(window, request) == needs["window"] + 1
    state, _, peak = run_request(
        poisoned(layout), 256, chunk_pages=16, window_pages=window_pages
    )
    assert peak == needs["window"]
    assert live(state, "full") == 256
    assert errors(state) == {}


def test_scenario_13_tokens_depend_on_full_layers_only():
    # F 10 layers, S 50 layers with a window of 1,024, and states.
    full, window = tiny_window_specs(
        full_layers=10, window_layers=50, window_size=1_024, page_size=16
    )
    specs = [full, window, state_spec(slot_bytes=76_800)]
    layout = unified_layout(specs, pool_bytes=256 * 2**20)
    full_page, window_page = 10 * 16 * 32, 50 * 16 * 32
    for num_requests in (1, 16):
        # 1,024 tokens touch 65 pages; a float may lose less than one page to its grid.
        caps = num_requests * (65 * window_page + 76_800)
        tokens = max_tokens(layout, num_requests=num_requests)
        exact = (layout.pool_bytes - caps) // full_page * 16
        assert exact - window_page // full_page * 16 <= tokens <= exact


def test_scenario_14_window_bytes_are_counted_once():
    # Different head counts for F and S.
    full = AttentionSpec(
        name="full", num_layers=3, page_size=4, num_kv_heads=4, head_dim=8
    )
    specs = [full, window_spec(num_layers=5, head_dim=8)]
    layout = unified_layout(specs, pool_bytes=2**17)
    page = 3 * 4 * 4 * 32 + 5 * 4 * 32
    count = layout.pool_bytes // page
    mirror = PoolMirror.create(layout)
    assert mirror.can_allocate({"full": count})
    assert not mirror.can_allocate({"full": count + 1})
    assert 0 <= mirror.alloc({"full": count}).free_bytes() < page


def test_scenario_16_window_table_spans_the_ids_of_its_owner():
    specs = [full_spec(page_size=1), window_spec(page_size=1)]
    layout = static_layout(specs, num_pages={"full": 4_095, "window": 512})
    state = poisoned(layout)
    assert state.tables[1].v2p.shape == (4_096,)
    seen = []
    for _ in range(8):
        count = min(512, 4_095 - len(seen))
        state, grant = pools.alloc(state, {"full": count}, max_pages=512)
        assert bool(grant.granted)
        new = held(grant.pages["full"])
        assert all(0 <= page < 512 for page in physical(state, "window", new))
        seen += new
        if len(seen) < 4_095:
            state = pools.free_window(state, "window", pages("full", *new, length=512))
    assert sorted(seen) == list(range(1, 4_096))
    # F-id 4,095 has a half, F-id 1 is a tombstone; neither reads out of range.
    assert physical(state, "window", [4_095])[0] < 512
    assert physical(state, "window", [1]) == [512]
    check(state)


def test_scenario_17_states_are_deducted_before_tokens():
    layout = unified_layout([kimi_state(), kimi_latent()], pool_bytes=100 * GIB)
    states = 64 * 43_417_600
    assert states / GIB == pytest.approx(2.59, abs=0.01)
    tokens = max_tokens(layout, num_requests=64)
    assert tokens == pytest.approx(12.97e6, abs=0.01e6)
    assert tokens <= (100 * GIB - states) // 8_064
    mirror = PoolMirror.create(layout).alloc({"kda": 64, "latent": tokens // 64})
    assert not mirror.can_allocate({"latent": 1})
    assert not mirror.can_allocate({"kda": 1})


def test_scenario_20_one_finishes_and_then_the_other():
    layout = unified_layout([latent_spec()], pool_bytes=100 * 512)
    mirror = PoolMirror.create(layout).alloc({"latent": 30}).alloc({"latent": 30})
    # A and B hold 30 each and need 30 more each: 40 are left, so one of them runs.
    assert mirror.can_allocate({"latent": 30})
    mirror = mirror.alloc({"latent": 30})
    assert not mirror.can_allocate({"latent": 30})
    mirror = mirror.release({"latent": 60})
    assert mirror.can_allocate({"latent": 30})


# Free, double free, window halves.


def test_scenario_23_null_page_never_enters_the_free_list():
    state, _ = take(swa_full(), full=4)
    state = pools.free_window(state, "window", pages("full", 1, 2))
    before = jax.device_get((state.tables, state.counters))
    # Segments without a window half: tombstones and padding.
    for _ in range(2):
        state = pools.free_window(state, "window", pages("full", 0, 1, 0, 2))
        jax.tree.map(
            np.testing.assert_array_equal,
            before,
            jax.device_get((state.tables, state.counters)),
        )
    assert errors(state) == {"window": ErrorBit.DOUBLE_FREE}
    check(state)


def test_scenario_24_tombstone_is_not_released_twice():
    state, _ = take(swa_full(), full=4)
    state = pools.free_window(state, "window", pages("full", 1, 2))
    state = pools.free(state, pages("full", 1))
    state = pools.free_full(state, pages("full", 2))
    assert errors(state) == {}
    assert pools.held_pages(state) == {"full": [3, 4], "window": [3, 4]}
    check(state)


def test_scenario_25_categories_sum_to_the_total():
    # Pages of 256 tokens; a draft keeps a second holder on some.
    state = new_pool([full_spec(page_size=256, head_dim=4)], 16 * 4_096 * 2)
    total = state.layout.sub_pools[0].num_pages
    rng = np.random.default_rng(0)
    for step in range(40):
        mine = pools.held_pages(state)["full"]
        if step % 3 == 2:
            chosen = [i for i in mine if rng.random() < 0.5][:16]
            state = pools.share(state, pages("full", *chosen))
            state = pools.free(state, pages("full", *chosen))
            state = pools.free(state, pages("full", *chosen[::2]))
        else:
            state, _ = pools.alloc(state, {"full": int(rng.integers(0, 6))})
        mirror = PoolMirror.read(state)
        counts = np.asarray(state.tables[0].refcounts)
        protected, single = (counts > 1).sum(), (counts == 1).sum()
        available = mirror.free_bytes() // state.layout.sub_pools[0].page_bytes
        assert available + protected + single == total
        check(state)


def test_scenario_26_window_halves_of_any_page_can_be_freed():
    # 400 internal pages and 20 leaves, and no byte left; 50 pages are wanted.
    state = new_pool([full_spec(), window_spec()], 420 * 768)
    state, grant = pools.alloc(state, {"full": 420}, max_pages=512)
    internal = held(grant.pages["full"])[:400]
    state = pools.share(state, pages("full", *internal, length=512))
    assert not PoolMirror.read(state).can_allocate({"full": 50})
    # 50 * 768 bytes are 75 window halves, taken from the middle of the tree.
    for _ in range(2):
        state = pools.free_window(
            state, "window", pages("full", *internal[100:175], length=512)
        )
    assert PoolMirror.read(state).can_allocate({"full": 50})
    assert not PoolMirror.read(state).can_allocate({"full": 51})
    state, _ = pools.make_room(state, {"full": 50})
    state, grant = pools.alloc(state, {"full": 50}, max_pages=512)
    assert bool(grant.granted)
    assert errors(state) == {}
    check(state)


def test_scenario_29_slots_from_the_frontier_on_stay():
    # 300 tokens, window 64, pages of 16: floor16(300 - 64 - 16) = 208.
    specs = tiny_window_specs(
        full_layers=1, window_layers=1, window_size=64, page_size=16
    )
    state = new_pool(specs, 2**15)
    state, grant = pools.alloc(state, {"full": 19}, max_pages=32)
    ids = held(grant.pages["full"])
    frontier = (300 - 64 - 16) // 16 * 16
    assert frontier == 208
    state = pools.free_window(
        state, "window", pages("full", *ids[: frontier // 16], length=32)
    )
    absent = state.layout.sub_pool("window").num_pages
    found = physical(state, "window", ids)
    assert [page == absent for page in found] == [True] * 13 + [False] * 6
    # A query at 300 sees tokens 237 to 300: pages 14 to 18 are there.
    assert all(page != absent for page in found[237 // 16 :])


def test_scenario_30_last_page_is_inside_every_table():
    # 64 tokens in pages of 4: the last page has tokens 64 to 67 of the id space.
    layout = static_layout(
        [full_spec(), window_spec()], num_pages={"full": 16, "window": 10}
    )
    state = poisoned(layout)
    assert state.tables[0].refcounts.shape == state.tables[1].v2p.shape == (17,)
    state, ids = take(state, full=8)
    state = pools.free_window(state, "window", pages("full", *ids["full"]))
    state, ids = take(state, full=8)
    assert ids["full"][-1] == 16
    state = pools.free_window(state, "window", pages("full", 16))
    assert errors(state) == {}
    check(state)


def test_scenario_30_extend_restores_the_owner_when_the_window_fails():
    layout = static_layout(
        [full_spec(), window_spec()], num_pages={"full": 16, "window": 10}
    )
    state, _ = take(poisoned(layout), full=8)
    before = jax.device_get((state.tables, state.counters))
    table = {"full": VirtualPages(ids=jnp.zeros((1, 8), jnp.int32), space="full")}
    state, table, granted = pools.alloc_extend(
        state,
        table,
        jnp.zeros(1, jnp.int32),
        jnp.asarray([12], jnp.int32),
        max_new_pages=4,
    )
    assert not bool(granted)
    assert not table["full"].ids.any()
    jax.tree.map(
        np.testing.assert_array_equal,
        before,
        jax.device_get((state.tables, state.counters)),
    )


def test_scenario_31_window_is_freed_before_the_next_chunk():
    # Window 1k, chunk 2k, prompt 4k, page size 1: peak 3k pages.
    specs = tiny_window_specs(
        full_layers=1, window_layers=1, window_size=1_024, page_size=1
    )
    layout = static_layout(specs, num_pages={"full": 4_096, "window": 3_072})
    state, ids, peak = run_request(
        poisoned(layout), 4_096, chunk_pages=2_048, window_pages=1_023
    )
    assert peak == 2_048 + 1_023
    assert len(set(ids)) == 4_096
    assert errors(state) == {}


def test_scenario_32_pages_wait_for_the_copy_of_a_connector():
    state, ids = take(kda_mla(), latent=16)
    chosen = ids["latent"][:4]
    # The connector holds a share of what it still copies.
    state = pools.share(state, pages("latent", *chosen))
    state = pools.free(state, pages("latent", *ids["latent"]))
    assert live(state, "latent") == 4
    state, new = take(state, latent=16)
    assert not set(new["latent"]) & set(chosen)
    # Its event fires.
    state = pools.free(state, pages("latent", *chosen))
    assert live(state, "latent") == 16
    state, new = take(state, latent=4)
    assert set(new["latent"]) == set(chosen)
    assert errors(state) == {}
    check(state)


def test_scenario_33_batch_after_a_slide_needs_no_contiguous_cells():
    # Window 1,024, batch 2,048, cache 3,072 cells.
    spec = window_spec(page_size=1, shares_ids=None)
    state = new_pool([spec], 3_072 * 128)
    state, grant = pools.alloc(state, {"window": 2_048}, max_pages=2_048)
    cells = held(grant.pages["window"])
    state = pools.free(state, pages("window", *cells[:1_024], length=2_048))
    assert row(state, "window") == {
        "live": 1_024,
        "holes": 1_024,
        "lo": 0,
        "hi": 2_048,
    }
    state, made = pools.make_room(state, {"window": 2_048})
    assert made.moved.tolist() == [0]
    state, grant = pools.alloc(state, {"window": 2_048}, max_pages=2_048)
    assert bool(grant.granted)
    assert live(state, "window") == 3_072
    check(state)


def test_scenario_37_failed_allocation_returns_everything():
    state, ids = take(kda_mla(), state=15, latent=6)
    a, b = ids["latent"][:2]
    before = jax.device_get((state.tables, state.counters))
    # A prefix is pinned, and the rest of the request does not fit: 2 of 3 pages.
    state = pools.share(state, pages("latent", a, b))
    state, grant = pools.alloc(state, {"latent": 3, "state": 1})
    assert not bool(grant.granted)
    assert [held(found) for found in grant.pages.values()] == [[], []]
    state = pools.free(state, pages("latent", a, b))
    jax.tree.map(
        np.testing.assert_array_equal,
        before,
        jax.device_get((state.tables, state.counters)),
    )


def test_scenario_38_scattered_eviction_reaches_the_floor():
    # 4,096 blocks, every eighth kept: 512 live pages pin the whole span.
    specs = [full_spec(page_size=1, head_dim=8), state_spec(slot_bytes=768)]
    state = new_pool(specs, 4_096 * 32)
    state, grant = pools.alloc(state, {"full": 4_096}, max_pages=4_096)
    ids = held(grant.pages["full"])
    assert state.layout.sub_pool("full").page_bytes == 32
    gone = [virtual for i, virtual in enumerate(ids) if i % 8]
    state = pools.free(state, pages("full", *gone, length=4_096))
    assert row(state, "full")["hi"] - row(state, "full")["lo"] > 4_000
    # 3,584 * 32 bytes are 149 slots, all of them there.
    assert PoolMirror.read(state).can_allocate({"state": 149})
    assert not PoolMirror.read(state).can_allocate({"state": 150})
    state, made = pools.compact(state)
    assert row(state, "full") == {"live": 512, "holes": 0, "lo": 0, "hi": 512}
    # One of eight was inside the band already.
    assert made.moved.tolist() == [512 - 64, 0]
    state, grant = pools.alloc(state, {"state": 149}, max_pages=4_096)
    assert bool(grant.granted)
    check(state)


# Compaction and gates.


def test_scenario_39_capacity_follows_a_closed_gate():
    state, _ = take(kda_mla(), state=10)
    state = pools.free(state, pages("state", *range(1, 10)))
    mirror = PoolMirror.read(state)
    for is_open in [True, False] * 100:
        # A mirror holds no answer that could be stale: it is asked with the gate.
        assert mirror.can_allocate({"latent": 20}, may_move=is_open) == is_open
        assert mirror.can_allocate({"latent": 16}, may_move=is_open)
    # With the gate closed nothing moves, whatever is asked in place.
    before = np.asarray(state.tables[0].v2p)
    state, _ = take(state, latent=16)
    np.testing.assert_array_equal(before, np.asarray(state.tables[0].v2p))


def test_scenario_b30_batches_of_one_event_are_all_accumulated():
    state, _ = take(kda_mla(), latent=10)
    mirror = PoolMirror.read(state)
    pending = [pages("latent", 5), pages("latent", 7, 8)]
    for batch in pending:
        state = pools.free(state, batch)
    assert live(state, "latent") == 7
    assert PoolMirror.read(state) == mirror.release({"latent": 3})
    state, ids = take(state, latent=3)
    assert set(ids["latent"]) == {5, 7, 8}


def test_scenario_40_free_of_64_pages_reads_nothing_back():
    state = new_pool([latent_spec(page_size=64, num_layers=1)], 64 * 4_096)
    state, grant = pools.alloc(state, {"latent": 64}, max_pages=64)
    traced = jax.make_jaxpr(allocator.free)(state, grant.pages["latent"])
    # Inside a trace no value can be read; what is left are callbacks, and loops
    # over pages.
    assert not _primitives(traced.jaxpr) & {
        "pure_callback",
        "io_callback",
        "debug_callback",
        "while",
        "scan",
    }
    state = pools.free(state, grant.pages["latent"])
    assert live(state, "latent") == 0


def _primitives(jaxpr):
    found = set()
    for equation in jaxpr.eqns:
        found.add(equation.primitive.name)
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found |= _primitives(inner)
    return found


def test_scenario_b36_free_has_no_data_dependent_shape():
    # 8,192 tokens in pages of 64; every operation on them has static shapes.
    state = new_pool([latent_spec(page_size=64, num_layers=1)], 128 * 4_096)
    state, _ = pools.alloc(state, {"latent": 128}, max_pages=128)
    for wanted in ([1, 128], range(1, 129), []):
        ids = pages("latent", *wanted, length=128)
        out = jax.eval_shape(allocator.free, state, ids)
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), out) == (
            jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
        )
    # One compilation serves them all.
    state = pools.free(state, pages("latent", length=128))
    num_compiled = pools.free._cache_size()
    for wanted in ([1, 128], range(2, 128), []):
        state = pools.free(state, pages("latent", *wanted, length=128))
    assert pools.free._cache_size() == num_compiled
    assert live(state, "latent") == 0
    assert errors(state) == {}


def test_scenario_b37_ids_are_read_when_free_is_called():
    state, ids = take(kda_mla(), latent=16)
    batch = np.zeros(pools.NUM_IDS, np.int32)
    for virtual in ids["latent"]:
        batch[0] = virtual
        # A copy: JAX may read a NumPy argument only when the program runs.
        state = pools.free(state, VirtualPages(ids=batch.copy(), space="latent"))
        # The caller uses its array again at once.
        batch[0] = 99
    assert errors(state) == {}
    assert live(state, "latent") == 0
    check(state)


def test_scenario_b37_window_half_is_resolved_when_it_is_freed():
    state, _ = take(swa_full(), full=4)
    old = physical(state, "window", [2])
    after = pools.free_window(state, "window", pages("full", 2))
    after, ids = take(after, full=1)
    # Another page has the place now; the tombstone does not name it any more.
    assert physical(after, "window", ids["full"]) == old
    assert physical(after, "window", [2]) == [21]
    after = pools.free(after, pages("full", 2))
    assert physical(after, "window", ids["full"]) == old
    assert errors(after) == {}
    check(after)


def float_pool(num_pages, page_size, side):
    """A float of tagged pages between ends; one end needs half of the pool."""
    spec = latent_spec("float", num_layers=1, page_size=page_size, width=16)
    ends = [full_spec(name, page_size=1, head_dim=8) for name in ("low", "high")]
    page = page_size * 32
    state = new_pool([ends[0], spec, ends[1]], num_pages * page)
    half = num_pages // 2
    other = {"low": "high", "high": "low"}[side]
    # Start where the other end has all the room that is left.
    state, _ = pools.make_room(state, {"float": half, other: half * page_size - 1})
    state, grant = pools.alloc(
        state, {"float": half}, max_pages=max(num_pages, pools.NUM_IDS)
    )
    assert bool(grant.granted)
    return state, held(grant.pages["float"])


def tag_float(state, ids):
    sub = state.layout.sub_pool("float")
    words = np.array(state.buffers[0])
    flat = words.reshape(-1)
    grid = flat[: sub.num_pages * sub.page_bytes // 4].reshape(sub.num_pages, -1)
    grid[np.asarray(state.tables[sub.index].v2p)[ids]] = np.asarray(ids)[:, None]
    return state.replace(buffers=(jnp.asarray(words),))


def float_tags(state, ids):
    sub = state.layout.sub_pool("float")
    flat = np.asarray(state.buffers[0]).reshape(-1)
    grid = flat[: sub.num_pages * sub.page_bytes // 4].reshape(sub.num_pages, -1)
    return grid[np.asarray(state.tables[sub.index].v2p)[ids]]


@pytest.mark.parametrize("side", ["low", "high"])
@pytest.mark.parametrize("fragmented", [False, True], ids=["dense", "fragmented"])
@pytest.mark.parametrize(
    ("num_pages", "page_size"),
    [(32, 1), (512, 1), (512, 16), pytest.param(32_768, 1, marks=pytest.mark.slow)],
)
def test_scenario_52_float_compaction_keeps_every_digest(
    num_pages, page_size, fragmented, side
):
    state, ids = float_pool(num_pages, page_size, side)
    state = tag_float(state, ids)
    if fragmented:
        gone = ids[::3]
        state = pools.free(
            state, pages("float", *gone, length=max(num_pages, pools.NUM_IDS))
        )
        ids = [virtual for virtual in ids if virtual not in set(gone)]
    count = num_pages // 2 * page_size - 1
    before = row(state, "float")
    state, made = pools.make_room(state, {side: count})
    assert bool(made.fits)
    after = row(state, "float")
    assert (float_tags(state, ids) == np.asarray(ids)[:, None]).all()
    # No page moves twice, and none that is inside the new band already.
    band = range(after["lo"], after["hi"])
    assert len(band) == len(ids)
    assert 0 < made.moved.tolist()[1] <= len(ids)
    if not fragmented:
        stays = len(set(band) & set(range(before["lo"], before["hi"])))
        assert made.moved.tolist()[1] == len(ids) - stays
    check(state)


# Bytes with several lives.


def test_scenario_b14_bytes_change_between_kinds():
    state = kda_mla()
    for _ in range(3):
        state, ids = take(state, state=16)
        state = pools.tag_everything(state)
        before = pools.contents(state)
        state = pools.free(state, pages("state", *ids["state"]))
        # Pages over the same bytes: stale until written, and then their own.
        state, ids = take(state, latent=16)
        state, more = take(state, latent=15)
        pages_over_states = set(physical(state, "latent", more["latent"]))
        assert min(pages_over_states) * 512 < 16 * 768
        state = pools.tag_everything(state)
        tags = pools.contents(state)
        assert len(set(tags["latent"].values())) == 31
        assert before["latent"] == {}
        for chosen in (ids, more):
            state = pools.free(state, pages("latent", *chosen["latent"]))
    assert errors(state) == {}
    check(state)


@pytest.mark.parametrize("page_size", [1, 3, 37, 48, 1_000])
def test_scenario_b18_odd_pages_never_overlap_states(page_size):
    specs = [
        state_spec(num_layers=3, slot_bytes=3 * 768),
        latent_spec(page_size=page_size, width=24),
    ]
    needed = packed_bytes(specs, {"state": 3, "latent": 3})
    layout = unified_layout(specs, pool_bytes=needed)
    mirror = PoolMirror.create(layout).alloc({"state": 3, "latent": 3})
    ranges = []
    for sub, (_, _, lo, hi) in zip(layout.sub_pools, mirror.counters, strict=True):
        for page in range(lo, hi):
            ranges += byte_ranges(layout, sub, page)
    assert_disjoint(ranges)


@pytest.mark.parametrize("kind", ["unified", "static"])
def test_scenario_b20_b26_slot_0_is_never_handed_out(kind):
    state = kda_mla()
    if kind == "static":
        specs = [sub.spec for sub in state.layout.sub_pools]
        state = poisoned(static_layout(specs, num_pages={"state": 20, "latent": 4}))
    state, first = take(state, state=16)
    state, second = take(state, state=4)
    assert sorted(first["state"] + second["state"]) == list(range(1, 21))
    # Padded rows hold the null page, and free nothing.
    state = pools.free(state, pages("state"))
    assert live(state, "state") == 20
    state = pools.free(state, pages("state", *first["state"]))
    state, again = take(state, state=16)
    assert 0 not in again["state"]
    assert errors(state) == {}
    check(state)


def test_scenario_b32_b33_feasibility_is_joint():
    # Halves of one size, 21 of them; 7 pages live, and 3 holes on either side.
    state = new_pool([full_spec(), window_spec(num_layers=1)], 21 * 256)
    state, _ = take(state, full=10)
    state = pools.free(state, pages("full", 2, 5, 8))
    mirror = PoolMirror.read(state)
    # F alone has 4 and S alone has 4: three holes and the gap of one page.
    assert mirror.free_bytes() == (3 + 3 + 1) * 256
    assert mirror.can_allocate({"full": 3})
    assert not mirror.can_allocate({"full": 4})
    state, made = pools.make_room(state, {"full": 4})
    assert not bool(made.fits)
    state, grant = pools.alloc(state, {"full": 4})
    assert not bool(grant.granted)
    # One page less is enough, and no more is evicted.
    evicted = 0
    for virtual in (1, 3, 4):
        if PoolMirror.read(state).can_allocate({"full": 4}):
            break
        state = pools.free(state, pages("full", virtual))
        evicted += 1
    assert evicted == 1
    state, _ = grow(allocator.clear_error(state), full=4)
    check(state)


def test_scenario_b44_row_state_and_track_come_together_or_not_at_all():
    specs = [state_spec("state"), latent_spec("row"), state_spec("track")]
    layout = static_layout(specs, num_pages={"state": 4, "row": 8, "track": 1})
    state, _ = take(poisoned(layout), state=1, row=2, track=1)
    before = jax.device_get((state.tables, state.counters))
    state, grant = pools.alloc(state, {"state": 1, "row": 2, "track": 1})
    assert not bool(grant.granted)
    jax.tree.map(
        np.testing.assert_array_equal,
        before,
        jax.device_get((state.tables, state.counters)),
    )
    # The request returns to its queue and comes again.
    state = pools.free(allocator.clear_error(state), pages("track", 1))
    state, _ = take(state, state=1, row=2, track=1)
    check(state)


def test_scenario_b57_request_that_never_fits_is_known_at_admission():
    layout = unified_layout([kimi_state(), kimi_latent()], pool_bytes=4 * GIB)
    empty = PoolMirror.create(layout)
    most = max_tokens(layout)
    assert empty.can_allocate({"kda": 1, "latent": most // 64})
    assert not empty.can_allocate({"kda": 1, "latent": most // 64 + 1})
    assert max_requests(layout, RequestShape(num_tokens=most)) == 1
    assert max_requests(layout, RequestShape(num_tokens=most + 1)) == 0
