"""Reported failures of other systems, replayed: frees, double frees, windows."""

import jax
import jax.numpy as jnp
import numpy as np

from tests import tagged_pools as pools
from tests.test_alloc import kda_mla, swa_full
from tests.window_requests import run_request, tiny_window_specs
from ukv import allocator
from ukv.allocator import ErrorBit, PoolMirror
from ukv.ids import VirtualPages
from ukv.layout import static_layout


def test_scenario_23_null_page_never_enters_the_free_list():
    state, _ = pools.take(swa_full(), full=4)
    state = pools.free_window(state, "window", pools.pages("full", 1, 2))
    before = jax.device_get((state.tables, state.counters))
    # Segments without a window half: tombstones and padding.
    for _ in range(2):
        state = pools.free_window(state, "window", pools.pages("full", 0, 1, 0, 2))
        jax.tree.map(
            np.testing.assert_array_equal,
            before,
            jax.device_get((state.tables, state.counters)),
        )
    assert pools.errors(state) == {"window": ErrorBit.DOUBLE_FREE}
    pools.check(state)


def test_scenario_24_tombstone_is_not_released_twice():
    state, _ = pools.take(swa_full(), full=4)
    state = pools.free_window(state, "window", pools.pages("full", 1, 2))
    state = pools.free(state, pools.pages("full", 1))
    state = pools.free_full(state, pools.pages("full", 2))
    assert pools.errors(state) == {}
    assert pools.held_pages(state) == {"full": [3, 4], "window": [3, 4]}
    pools.check(state)


def test_scenario_25_categories_sum_to_the_total():
    # Pages of 256 tokens; a draft keeps a second holder on some.
    state = pools.new_pool([pools.full_spec(page_size=256, head_dim=4)], 16 * 4_096 * 2)
    total = state.layout.sub_pools[0].num_pages
    rng = np.random.default_rng(0)
    for step in range(40):
        mine = pools.held_pages(state)["full"]
        if step % 3 == 2:
            chosen = [i for i in mine if rng.random() < 0.5][:16]
            state = pools.share(state, pools.pages("full", *chosen))
            state = pools.free(state, pools.pages("full", *chosen))
            state = pools.free(state, pools.pages("full", *chosen[::2]))
        else:
            state, _ = pools.alloc(state, {"full": int(rng.integers(0, 6))})
        mirror = PoolMirror.read(state)
        counts = np.asarray(state.tables[0].refcounts)
        protected, single = (counts > 1).sum(), (counts == 1).sum()
        available = mirror.free_bytes() // state.layout.sub_pools[0].page_bytes
        assert available + protected + single == total
        pools.check(state)


def test_scenario_26_window_halves_of_any_page_can_be_freed():
    # 400 internal pages and 20 leaves, and no byte left; 50 pages are wanted.
    state = pools.new_pool([pools.full_spec(), pools.window_spec()], 420 * 768)
    state, grant = pools.alloc(state, {"full": 420}, max_pages=512)
    internal = pools.held(grant.pages["full"])[:400]
    state = pools.share(state, pools.pages("full", *internal, length=512))
    assert not PoolMirror.read(state).can_allocate({"full": 50})
    # 50 * 768 bytes are 75 window halves, taken from the middle of the tree.
    for _ in range(2):
        state = pools.free_window(
            state, "window", pools.pages("full", *internal[100:175], length=512)
        )
    assert PoolMirror.read(state).can_allocate({"full": 50})
    assert not PoolMirror.read(state).can_allocate({"full": 51})
    state, _ = pools.make_room(state, {"full": 50})
    state, grant = pools.alloc(state, {"full": 50}, max_pages=512)
    assert bool(grant.granted)
    assert pools.errors(state) == {}
    pools.check(state)


def test_scenario_29_slots_from_the_frontier_on_stay():
    # 300 tokens, window 64, pages of 16: floor16(300 - 64 - 16) = 208.
    specs = tiny_window_specs(
        full_layers=1, window_layers=1, window_size=64, page_size=16
    )
    state = pools.new_pool(specs, 2**15)
    state, grant = pools.alloc(state, {"full": 19}, max_pages=32)
    ids = pools.held(grant.pages["full"])
    frontier = (300 - 64 - 16) // 16 * 16
    assert frontier == 208
    state = pools.free_window(
        state, "window", pools.pages("full", *ids[: frontier // 16], length=32)
    )
    absent = state.layout.sub_pool("window").num_pages
    found = pools.physical(state, "window", ids)
    assert [page == absent for page in found] == [True] * 13 + [False] * 6
    # A query at 300 sees tokens 237 to 300: pages 14 to 18 are there.
    assert all(page != absent for page in found[237 // 16 :])


def test_scenario_30_last_page_is_inside_every_table():
    # 64 tokens in pages of 4: the last page has tokens 64 to 67 of the id space.
    layout = static_layout(
        [pools.full_spec(), pools.window_spec()], num_pages={"full": 16, "window": 10}
    )
    state = pools.poisoned(layout)
    assert state.tables[0].refcounts.shape == state.tables[1].v2p.shape == (17,)
    state, ids = pools.take(state, full=8)
    state = pools.free_window(state, "window", pools.pages("full", *ids["full"]))
    state, ids = pools.take(state, full=8)
    assert ids["full"][-1] == 16
    state = pools.free_window(state, "window", pools.pages("full", 16))
    assert pools.errors(state) == {}
    pools.check(state)


def test_scenario_30_extend_restores_the_owner_when_the_window_fails():
    layout = static_layout(
        [pools.full_spec(), pools.window_spec()], num_pages={"full": 16, "window": 10}
    )
    state, _ = pools.take(pools.poisoned(layout), full=8)
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
        pools.poisoned(layout), 4_096, chunk_pages=2_048, window_pages=1_023
    )
    assert peak == 2_048 + 1_023
    assert len(set(ids)) == 4_096
    assert pools.errors(state) == {}


def test_scenario_32_pages_wait_for_the_copy_of_a_connector():
    state, ids = pools.take(kda_mla(), latent=16)
    chosen = ids["latent"][:4]
    # The connector holds a share of what it still copies.
    state = pools.share(state, pools.pages("latent", *chosen))
    state = pools.free(state, pools.pages("latent", *ids["latent"]))
    assert pools.live(state, "latent") == 4
    state, new = pools.take(state, latent=16)
    assert not set(new["latent"]) & set(chosen)
    # Its event fires.
    state = pools.free(state, pools.pages("latent", *chosen))
    assert pools.live(state, "latent") == 16
    state, new = pools.take(state, latent=4)
    assert set(new["latent"]) == set(chosen)
    assert pools.errors(state) == {}
    pools.check(state)


def test_scenario_33_batch_after_a_slide_needs_no_contiguous_cells():
    # Window 1,024, batch 2,048, cache 3,072 cells.
    spec = pools.window_spec(page_size=1, shares_ids=None)
    state = pools.new_pool([spec], 3_072 * 128)
    state, grant = pools.alloc(state, {"window": 2_048}, max_pages=2_048)
    cells = pools.held(grant.pages["window"])
    state = pools.free(state, pools.pages("window", *cells[:1_024], length=2_048))
    assert pools.row(state, "window") == {
        "live": 1_024,
        "holes": 1_024,
        "lo": 0,
        "hi": 2_048,
    }
    state, made = pools.make_room(state, {"window": 2_048})
    assert made.moved.tolist() == [0]
    state, grant = pools.alloc(state, {"window": 2_048}, max_pages=2_048)
    assert bool(grant.granted)
    assert pools.live(state, "window") == 3_072
    pools.check(state)


def test_scenario_37_failed_allocation_returns_everything():
    state, ids = pools.take(kda_mla(), state=15, latent=6)
    a, b = ids["latent"][:2]
    before = jax.device_get((state.tables, state.counters))
    # A prefix is pinned, and the rest of the request does not fit: 2 of 3 pages.
    state = pools.share(state, pools.pages("latent", a, b))
    state, grant = pools.alloc(state, {"latent": 3, "state": 1})
    assert not bool(grant.granted)
    assert [pools.held(found) for found in grant.pages.values()] == [[], []]
    state = pools.free(state, pools.pages("latent", a, b))
    jax.tree.map(
        np.testing.assert_array_equal,
        before,
        jax.device_get((state.tables, state.counters)),
    )


def test_scenario_38_scattered_eviction_reaches_the_floor():
    # 4,096 blocks, every eighth kept: 512 live pages pin the whole span.
    specs = [pools.full_spec(page_size=1, head_dim=8), pools.state_spec(slot_bytes=768)]
    state = pools.new_pool(specs, 4_096 * 32)
    state, grant = pools.alloc(state, {"full": 4_096}, max_pages=4_096)
    ids = pools.held(grant.pages["full"])
    assert state.layout.sub_pool("full").page_bytes == 32
    gone = [virtual for i, virtual in enumerate(ids) if i % 8]
    state = pools.free(state, pools.pages("full", *gone, length=4_096))
    assert pools.row(state, "full")["hi"] - pools.row(state, "full")["lo"] > 4_000
    # 3,584 * 32 bytes are 149 slots, all of them there.
    assert PoolMirror.read(state).can_allocate({"state": 149})
    assert not PoolMirror.read(state).can_allocate({"state": 150})
    state, made = pools.compact(state)
    assert pools.row(state, "full") == {"live": 512, "holes": 0, "lo": 0, "hi": 512}
    # One of eight was inside the band already.
    assert made.moved.tolist() == [512 - 64, 0]
    state, grant = pools.alloc(state, {"state": 149}, max_pages=4_096)
    assert bool(grant.granted)
    pools.check(state)


def test_scenario_b30_batches_of_one_event_are_all_accumulated():
    state, _ = pools.take(kda_mla(), latent=10)
    mirror = PoolMirror.read(state)
    pending = [pools.pages("latent", 5), pools.pages("latent", 7, 8)]
    for batch in pending:
        state = pools.free(state, batch)
    assert pools.live(state, "latent") == 7
    assert PoolMirror.read(state) == mirror.release({"latent": 3})
    state, ids = pools.take(state, latent=3)
    assert set(ids["latent"]) == {5, 7, 8}


def test_scenario_40_free_of_64_pages_reads_nothing_back():
    state = pools.new_pool([pools.latent_spec(page_size=64, num_layers=1)], 64 * 4_096)
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
    assert pools.live(state, "latent") == 0


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
    state = pools.new_pool([pools.latent_spec(page_size=64, num_layers=1)], 128 * 4_096)
    state, _ = pools.alloc(state, {"latent": 128}, max_pages=128)
    for wanted in ([1, 128], range(1, 129), []):
        ids = pools.pages("latent", *wanted, length=128)
        out = jax.eval_shape(allocator.free, state, ids)
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), out) == (
            jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
        )
    # One compilation serves them all.
    state = pools.free(state, pools.pages("latent", length=128))
    num_compiled = pools.free._cache_size()
    for wanted in ([1, 128], range(2, 128), []):
        state = pools.free(state, pools.pages("latent", *wanted, length=128))
    assert pools.free._cache_size() == num_compiled
    assert pools.live(state, "latent") == 0
    assert pools.errors(state) == {}


def test_scenario_b37_ids_are_read_when_free_is_called():
    state, ids = pools.take(kda_mla(), latent=16)
    batch = np.zeros(pools.NUM_IDS, np.int32)
    for virtual in ids["latent"]:
        batch[0] = virtual
        # A copy: JAX may read a NumPy argument only when the program runs.
        state = pools.free(state, VirtualPages(ids=batch.copy(), space="latent"))
        # The caller uses its array again at once.
        batch[0] = 99
    assert pools.errors(state) == {}
    assert pools.live(state, "latent") == 0
    pools.check(state)


def test_scenario_b37_window_half_is_resolved_when_it_is_freed():
    state, _ = pools.take(swa_full(), full=4)
    old = pools.physical(state, "window", [2])
    after = pools.free_window(state, "window", pools.pages("full", 2))
    after, ids = pools.take(after, full=1)
    # Another page has the place now; the tombstone does not name it any more.
    assert pools.physical(after, "window", ids["full"]) == old
    assert pools.physical(after, "window", [2]) == [21]
    after = pools.free(after, pools.pages("full", 2))
    assert pools.physical(after, "window", ids["full"]) == old
    assert pools.errors(after) == {}
    pools.check(after)
