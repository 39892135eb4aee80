"""Compaction: every page keeps its bytes, and free bytes lie together after it."""

import dataclasses

import numpy as np
import pytest

from tests import tagged_pools
from tests import tagged_pools as pools
from tests.tagged_pools import (
    check,
    contents,
    errors,
    full_spec,
    grow,
    latent_spec,
    live,
    new_pool,
    pages,
    physical,
    poisoned,
    row,
    tag_everything,
    take,
    window_spec,
)
from tests.test_alloc import kda_mla, swa_full
from ukv.allocator import PoolMirror
from ukv.layout import Placement, static_layout


def with_floats_at_the_bottom(layout):
    """Let empty floats begin at page 0, where everything pushes them."""
    sub_pools = tuple(
        dataclasses.replace(sub, first_page=0)
        if sub.placement is Placement.FLOAT
        else sub
        for sub in layout.sub_pools
    )
    return dataclasses.replace(layout, sub_pools=sub_pools)


THREE = with_floats_at_the_bottom(tagged_pools.THREE)
FIVE = with_floats_at_the_bottom(tagged_pools.FIVE)


def assert_kept(before, state):
    assert contents(state) == before
    assert errors(state) == {}
    check(state)


def test_kth_page_outside_the_band_moves_to_the_kth_hole_inside():
    state, _ = take(kda_mla(), state=8)
    state = tag_everything(state)
    state = pools.free(state, pages("state", 2, 3, 6))
    before = contents(state)
    assert physical(state, "state", [1, 4, 5, 7, 8]) == [0, 3, 4, 6, 7]
    state, made = pools.compact(state)
    # Five stay in [0, 5): 7 and 8 move to the holes 1 and 2.
    assert physical(state, "state", [1, 4, 5, 7, 8]) == [0, 3, 4, 1, 2]
    assert made.moved.tolist() == [2, 0]
    assert row(state, "state") == {"live": 5, "holes": 0, "lo": 0, "hi": 5}
    assert_kept(before, state)


def test_high_end_compacts_towards_the_last_byte():
    state, _ = take(kda_mla(), latent=6)
    state = tag_everything(state)
    state = pools.free(state, pages("latent", 1, 4))
    before = contents(state)
    assert physical(state, "latent", [2, 3, 5, 6]) == [29, 28, 26, 25]
    state, made = pools.compact(state)
    # Pages 27 to 30 stay: 25 and 26 move up, in this order.
    assert physical(state, "latent", [2, 3, 5, 6]) == [29, 28, 30, 27]
    assert made.moved.tolist() == [0, 2]
    assert row(state, "latent") == {"live": 4, "holes": 0, "lo": 27, "hi": 31}
    assert_kept(before, state)


def test_compaction_without_holes_moves_nothing():
    state, _ = take(kda_mla(), latent=3, state=2)
    before = np.asarray(state.buffers[0])
    state, made = pools.compact(state)
    assert made.moved.tolist() == [0, 0]
    np.testing.assert_array_equal(before, np.asarray(state.buffers[0]))


def test_virtual_ids_stay_and_new_pages_come_after():
    state, _ = take(kda_mla(), state=8)
    state = pools.free(state, pages("state", 1, 2))
    state, _ = pools.compact(state)
    state, ids = take(state, state=1)
    assert ids["state"] == [2]
    assert physical(state, "state", [2]) == [6]
    check(state)


def test_halves_of_a_window_move_apart_from_their_pages():
    state, _ = take(swa_full(), full=8)
    state = tag_everything(state)
    state = pools.free_window(state, "window", pages("full", 1, 2, 3, 5))
    state = pools.free(state, pages("full", 4))
    before = contents(state)
    assert {name: len(found) for name, found in before.items()} == {
        "full": 7,
        "window": 3,
    }
    state, made = pools.compact(state)
    assert made.moved.tolist() == [1, 3]
    assert_kept(before, state)
    assert row(state, "window") == {"live": 3, "holes": 0, "lo": 18, "hi": 21}


def test_float_moves_up_out_of_the_way_of_the_low_end():
    state, _ = grow(poisoned(THREE), state=2, latent=4)
    state = tag_everything(state)
    before = contents(state)
    first = row(state, "latent")["lo"]
    # 19 slots of 768 bytes and 4 pages of 512 do not fit; 16 do.
    state, made = pools.make_room(state, {"state": 14})
    assert bool(made.fits)
    assert row(state, "latent")["lo"] > first
    assert made.moved.tolist()[1] > 0
    assert_kept(before, state)
    state, _ = take(state, state=14)
    assert_kept(before | {"state": contents(state)["state"]}, state)


def test_float_moves_down_out_of_the_way_of_the_high_end():
    state, _ = grow(poisoned(THREE), state=1, latent=4)
    state = tag_everything(pools.free(state, pages("state", 1)))
    before = contents(state)
    # In units of 256 bytes: 47 of 58 are free; 3 + 23 below the float are 13 pages.
    assert row(state, "latent")["lo"] == 13
    state, _ = grow(state, full=16)
    assert row(state, "latent")["lo"] == 13
    # 50 pages of 256 bytes leave 4 pages of 512 at the very bottom.
    for count, lo in ((16, 5), (16, 1), (2, 0)):
        state, made = pools.make_room(state, {"full": count})
        assert bool(made.fits)
        state, _ = take(state, full=count)
        assert row(state, "latent")["lo"] == lo
        assert contents(state)["latent"] == before["latent"]
        check(state)
    state, made = pools.make_room(state, {"full": 1})
    assert not bool(made.fits)
    assert made.moved.tolist() == [0, 0, 0]
    check(state)


def test_float_moves_by_less_than_its_own_length():
    # Source and destination spans overlap: only what lies outside the band moves.
    state, _ = grow(poisoned(THREE), state=5, latent=12)
    state = tag_everything(state)
    before = contents(state)
    assert row(state, "latent")["lo"] == 12
    # 11 slots end at 8,448 bytes, in page 16 of 512.
    state, made = pools.make_room(state, {"state": 6})
    assert bool(made.fits)
    assert row(state, "latent")["lo"] == 17
    assert made.moved.tolist() == [0, 5, 0]
    assert_kept(before, state)


def scattered(layout, seed):
    """A pool of many pages, a random third of them freed again."""
    rng = np.random.default_rng(seed)
    state = poisoned(layout)
    for _ in range(6):
        for sub in layout.owners:
            counts = {sub.name: int(rng.integers(0, 4))}
            if PoolMirror.read(state).can_allocate(counts):
                state, _ = grow(state, **counts)
    state = tag_everything(state)
    for sub in layout.owners:
        ids = pools.held_pages(state)[sub.name]
        chosen = [i for i in ids if rng.random() < 0.4][: pools.NUM_IDS]
        state = pools.free(state, pages(sub.name, *chosen))
    return state


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("layout", [THREE, FIVE], ids=["three", "five"])
def test_several_floats_keep_their_pages(layout, seed):
    state = scattered(layout, seed)
    before = contents(state)
    mirror = PoolMirror.read(state)
    state, _ = pools.compact(state)
    assert_kept(before, state)
    assert all(row(state, name)["holes"] == 0 for name in layout.names)
    assert PoolMirror.read(state) == mirror.compact()
    # Everything that is left, for one sub-pool after the other.
    for sub in layout.owners:
        counts = {sub.name: 3}
        can = PoolMirror.read(state).can_allocate(counts)
        state, made = pools.make_room(state, counts)
        assert bool(made.fits) == can
        assert_kept(before, state)


def test_floats_move_both_ways_in_one_pass():
    state, _ = grow(poisoned(FIVE), a=3, b=3, c=3)
    state = tag_everything(state)
    before = contents(state)
    old = {name: row(state, name)["lo"] for name in "abc"}
    # 12 + 26 pages at the ends and 18 in the floats are 56 of 60: pressed together.
    state, made = pools.make_room(state, {"low": 12, "high": 26})
    assert bool(made.fits)
    new = {name: row(state, name)["lo"] for name in "abc"}
    assert new["a"] > old["a"]
    assert new["c"] < old["c"]
    assert_kept(before, state)


def test_room_that_does_not_exist_moves_nothing():
    state = scattered(FIVE, 1)
    before = np.asarray(state.buffers[0])
    counters = np.asarray(state.counters)
    state, made = pools.make_room(state, {"a": 16, "b": 16, "c": 1})
    assert not bool(made.fits)
    assert not made.moved.any()
    np.testing.assert_array_equal(before, np.asarray(state.buffers[0]))
    np.testing.assert_array_equal(counters, np.asarray(state.counters))
    assert errors(state) == {}


def test_room_that_is_there_moves_nothing():
    state, _ = take(kda_mla(), state=6)
    state = pools.free(state, pages("state", 2, 4))
    state, made = pools.make_room(state, {"state": 3})
    assert bool(made.fits)
    assert made.moved.tolist() == [0, 0]
    assert row(state, "state")["holes"] == 2


def test_empty_float_goes_where_there_is_room():
    state, _ = grow(poisoned(THREE), state=6, full=8)
    assert row(state, "latent") == {"live": 0, "holes": 0, "lo": 0, "hi": 0}
    # 14,848 - 6 * 768 - 8 * 256 bytes are 16 pages of 512.
    state, ids = grow(state, latent=16)
    assert len(ids["latent"]) == 16
    check(state)
    state, made = pools.make_room(state, {"full": 1})
    assert not bool(made.fits)


@pytest.mark.parametrize("layout", [tagged_pools.THREE, tagged_pools.FIVE])
def test_an_empty_float_begins_where_its_neighbours_can_grow(layout):
    # A page for every sub-pool, the ends first: no float is in the way of any.
    mirror = PoolMirror.create(layout)
    for sub in (layout.sub_pools[0], layout.sub_pools[-1], *layout.sub_pools[1:-1]):
        for _ in range(2):
            assert mirror.fits_in_place({sub.name: 1})
            mirror = mirror.alloc({sub.name: 1})


@pytest.mark.parametrize(
    "specs", [[latent_spec(num_layers=1)], [window_spec(shares_ids=None)]]
)
def test_sub_pool_alone(specs):
    state = new_pool(specs, 512 * 8)
    (name,) = state.layout.names
    state, _ = take(state, **{name: 7})
    state = tag_everything(state)
    state = pools.free(state, pages(name, 1, 2, 5))
    before = contents(state)
    state, made = pools.compact(state)
    # [0, 4) stays: pages 5 and 6 go to 0 and 1.
    assert made.moved.tolist() == [2]
    assert physical(state, name, [3, 4, 6, 7]) == [2, 3, 0, 1]
    assert_kept(before, state)


def test_shared_pages_move_once():
    state, _ = take(kda_mla(), state=4)
    state = tag_everything(pools.share(state, pages("state", 4)))
    state = pools.free(state, pages("state", 1))
    before = contents(state)
    state, made = pools.compact(state)
    assert made.moved.tolist() == [1, 0]
    assert_kept(before, state)
    state = pools.free(state, pages("state", 4, 4))
    assert errors(state) == {}
    assert live(state, "state") == 2


def test_static_pool_is_not_compacted():
    layout = static_layout(
        [full_spec(), window_spec()], num_pages={"full": 4, "window": 4}
    )
    mirror = PoolMirror.create(layout)
    assert mirror.can_allocate({"full": 4})
    assert not mirror.can_allocate({"full": 5})
