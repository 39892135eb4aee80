"""Reported failures of other systems, replayed: moves, gates, bytes of two lives."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests import tagged_pools as pools
from tests.test_alloc import kda_mla
from tests.test_layout import assert_disjoint, byte_ranges
from ukv.allocator import PoolMirror
from ukv.layout import packed_bytes, static_layout, unified_layout


def test_scenario_39_capacity_follows_a_closed_gate():
    state, _ = pools.take(kda_mla(), state=10)
    state = pools.free(state, pools.pages("state", *range(1, 10)))
    mirror = PoolMirror.read(state)
    for is_open in [True, False] * 100:
        # A mirror holds no answer that could be stale: it is asked with the gate.
        assert mirror.can_allocate({"latent": 20}, may_move=is_open) == is_open
        assert mirror.can_allocate({"latent": 16}, may_move=is_open)
    # With the gate closed nothing moves, whatever is asked in place.
    before = np.asarray(state.tables[0].v2p)
    state, _ = pools.take(state, latent=16)
    np.testing.assert_array_equal(before, np.asarray(state.tables[0].v2p))


def float_pool(num_pages, page_size, side):
    """A float of tagged pages between ends; one end needs half of the pool."""
    spec = pools.latent_spec("float", num_layers=1, page_size=page_size, width=16)
    ends = [pools.full_spec(name, page_size=1, head_dim=8) for name in ("low", "high")]
    page = page_size * 32
    state = pools.new_pool([ends[0], spec, ends[1]], num_pages * page)
    half = num_pages // 2
    other = {"low": "high", "high": "low"}[side]
    # Start where the other end has all the room that is left.
    state, _ = pools.make_room(state, {"float": half, other: half * page_size - 1})
    state, grant = pools.alloc(
        state, {"float": half}, max_pages=max(num_pages, pools.NUM_IDS)
    )
    assert bool(grant.granted)
    return state, pools.held(grant.pages["float"])


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
            state, pools.pages("float", *gone, length=max(num_pages, pools.NUM_IDS))
        )
        ids = [virtual for virtual in ids if virtual not in set(gone)]
    count = num_pages // 2 * page_size - 1
    before = pools.row(state, "float")
    state, made = pools.make_room(state, {side: count})
    assert bool(made.fits)
    after = pools.row(state, "float")
    assert (float_tags(state, ids) == np.asarray(ids)[:, None]).all()
    # No page moves twice, and none that is inside the new band already.
    band = range(after["lo"], after["hi"])
    assert len(band) == len(ids)
    assert 0 < made.moved.tolist()[1] <= len(ids)
    if not fragmented:
        stays = len(set(band) & set(range(before["lo"], before["hi"])))
        assert made.moved.tolist()[1] == len(ids) - stays
    pools.check(state)


def test_scenario_b14_bytes_change_between_kinds():
    state = kda_mla()
    for _ in range(3):
        state, ids = pools.take(state, state=16)
        state = pools.tag_everything(state)
        before = pools.contents(state)
        state = pools.free(state, pools.pages("state", *ids["state"]))
        # Pages over the same bytes: stale until written, and then their own.
        state, ids = pools.take(state, latent=16)
        state, more = pools.take(state, latent=15)
        pages_over_states = set(pools.physical(state, "latent", more["latent"]))
        assert min(pages_over_states) * 512 < 16 * 768
        state = pools.tag_everything(state)
        tags = pools.contents(state)
        assert len(set(tags["latent"].values())) == 31
        assert before["latent"] == {}
        for chosen in (ids, more):
            state = pools.free(state, pools.pages("latent", *chosen["latent"]))
    assert pools.errors(state) == {}
    pools.check(state)


@pytest.mark.parametrize("page_size", [1, 3, 37, 48, 1_000])
def test_scenario_b18_odd_pages_never_overlap_states(page_size):
    specs = [
        pools.state_spec(num_layers=3, slot_bytes=3 * 768),
        pools.latent_spec(page_size=page_size, width=24),
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
        state = pools.poisoned(
            static_layout(specs, num_pages={"state": 20, "latent": 4})
        )
    state, first = pools.take(state, state=16)
    state, second = pools.take(state, state=4)
    assert sorted(first["state"] + second["state"]) == list(range(1, 21))
    # Padded rows hold the null page, and free nothing.
    state = pools.free(state, pools.pages("state"))
    assert pools.live(state, "state") == 20
    state = pools.free(state, pools.pages("state", *first["state"]))
    state, again = pools.take(state, state=16)
    assert 0 not in again["state"]
    assert pools.errors(state) == {}
    pools.check(state)
