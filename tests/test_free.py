"""Holders: sharing, releasing, tombstones, and what the error word says."""

import jax
import numpy as np
import pytest

from tests import tagged_pools as pools
from tests.tagged_pools import check, errors, live, new_pool, pages, physical, row, take
from tests.test_alloc import SWA_FULL, kda_mla, swa_full
from ukv import allocator
from ukv.allocator import ErrorBit, describe_error, raise_on_error
from ukv.errors import PoolStateError
from ukv.layout import static_layout


def refcounts(state, name):
    sub = state.layout.sub_pool(name)
    return np.asarray(state.tables[sub.index].refcounts)


def tables_of(state):
    return jax.device_get((state.tables, state.counters))


def assert_unchanged(before, state):
    jax.tree.map(np.testing.assert_array_equal, before, tables_of(state))


def test_free_of_everything_gives_the_span_back():
    state = kda_mla()
    empty = tables_of(state)[1]
    state, ids = take(state, latent=5, state=2)
    state = pools.free(state, pages("latent", *ids["latent"]))
    state = pools.free(state, pages("state", *ids["state"]))
    np.testing.assert_array_equal(tables_of(state)[1], empty)
    # The last id freed is the next to go.
    state, again = take(state, latent=5)
    assert again["latent"] == [5, 4, 3, 2, 1]
    assert physical(state, "latent", again["latent"]) == [30, 29, 28, 27, 26]
    check(state)


def test_padding_is_skipped():
    state, ids = take(kda_mla(), latent=3)
    before = tables_of(state)
    state = pools.free(state, pages("latent"))
    assert_unchanged(before, state)
    state = pools.free(state, pages("latent", 0, ids["latent"][1], 0))
    assert row(state, "latent") == {"live": 2, "holes": 1, "lo": 28, "hi": 31}
    assert errors(state) == {}
    check(state)


def test_double_free_is_flagged_and_changes_nothing():
    state, _ = take(kda_mla(), latent=3)
    state = pools.free(state, pages("latent", 2))
    before = tables_of(state)
    state = pools.free(state, pages("latent", 2))
    assert errors(state) == {"latent": ErrorBit.DOUBLE_FREE}
    assert_unchanged(before, state)
    check(state)


def test_double_free_in_one_call_frees_once():
    state, _ = take(kda_mla(), latent=3)
    state = pools.free(state, pages("latent", 2, 2, 3, 2))
    assert errors(state) == {"latent": ErrorBit.DOUBLE_FREE}
    assert live(state, "latent") == 1
    assert refcounts(state, "latent")[:4].tolist() == [0, 1, 0, 0]
    check(state)


def test_two_holders_let_go_in_one_call():
    state, _ = take(kda_mla(), latent=4)
    state = pools.share(state, pages("latent", 2, 3))
    assert refcounts(state, "latent")[1:5].tolist() == [1, 2, 2, 1]
    # Both holders of 2, one of the two of 3, the only one of 4.
    state = pools.free(state, pages("latent", 2, 4, 3, 2))
    assert errors(state) == {}
    assert refcounts(state, "latent")[1:5].tolist() == [1, 0, 1, 0]
    assert live(state, "latent") == 2
    check(state)


@pytest.mark.parametrize("lanes", [3, 4, 7])
def test_many_lanes_of_one_page(lanes):
    # Three holders: 3 lanes are right, more are too many.
    state, _ = take(kda_mla(), latent=2)
    for _ in range(2):
        state = pools.share(state, pages("latent", 1))
    state = pools.free(state, pages("latent", *[1] * lanes))
    assert errors(state) == ({} if lanes == 3 else {"latent": ErrorBit.DOUBLE_FREE})
    assert live(state, "latent") == 1
    check(state)


@pytest.mark.parametrize("bad", [-1, -(2**31), 32, 2**31 - 1])
def test_id_outside_the_id_space_is_flagged(bad):
    state, ids = take(kda_mla(), latent=3)
    assert state.layout.sub_pool("latent").num_virtual == 32
    before = tables_of(state)
    for operation in (pools.free, pools.free_full, pools.share):
        state = operation(allocator.clear_error(state), pages("latent", bad))
        assert errors(state) == {"latent": ErrorBit.ID_OUT_OF_RANGE}
        assert_unchanged(before, state)
    # The other lanes count.
    state = pools.free(state, pages("latent", bad, ids["latent"][0]))
    assert live(state, "latent") == 2
    check(state)


def test_null_page_is_never_freed_and_never_handed_out():
    state, _ = take(kda_mla(), latent=16)
    for _ in range(3):
        state = pools.free(state, pages("latent", 0, 0))
    state = pools.free(state, pages("latent", *range(1, 17)))
    assert errors(state) == {}
    seen = set()
    for count in (16, 15):
        state, ids = take(state, latent=count)
        seen |= set(ids["latent"])
    assert seen == set(range(1, 32))
    check(state)


def test_shared_page_outlives_its_first_holder():
    state, _ = take(kda_mla(), latent=2)
    state = pools.tag_everything(state)
    tags = pools.contents(state)
    state = pools.share(state, pages("latent", 1))
    state = pools.free(state, pages("latent", 1, 2))
    assert pools.contents(state) == {"state": {}, "latent": {1: tags["latent"][1]}}
    state = pools.free(state, pages("latent", 1))
    assert live(state, "latent") == 0
    assert errors(state) == {}


def test_share_of_a_free_page_is_flagged():
    state, _ = take(kda_mla(), latent=1)
    before = tables_of(state)
    state = pools.share(state, pages("latent", 7))
    assert errors(state) == {"latent": ErrorBit.UNOWNED_ID}
    assert_unchanged(before, state)


def test_window_half_goes_first_and_the_page_is_a_tombstone():
    state, _ = take(swa_full(), full=4)
    state = pools.free_window(state, "window", pages("full", 1, 2))
    assert live(state, "full") == 4
    assert row(state, "window") == {"live": 2, "holes": 2, "lo": 17, "hi": 21}
    assert physical(state, "window", [1, 2]) == [21, 21]
    check(state)
    # A tombstone's missing half is skipped.
    state = pools.free(state, pages("full", 1, 3))
    assert errors(state) == {}
    assert pools.held_pages(state) == {"full": [2, 4], "window": [4]}
    check(state)


def test_window_freed_twice_is_flagged():
    state, _ = take(swa_full(), full=2)
    state = pools.free_window(state, "window", pages("full", 1))
    before = tables_of(state)
    state = pools.free_window(state, "window", pages("full", 1))
    assert errors(state) == {"window": ErrorBit.DOUBLE_FREE}
    assert_unchanged(before, state)


def test_free_full_after_free_window():
    state, _ = take(swa_full(), full=2)
    state = pools.share(state, pages("full", 1))
    # One of two holders slides past page 1 and then ends.
    state = pools.free_window(state, "window", pages("full", 1))
    state = pools.free_full(state, pages("full", 1))
    assert errors(state) == {}
    assert refcounts(state, "full")[1] == refcounts(state, "window")[1] == 1
    check(state)
    # The other holds both halves still.
    state = pools.free(state, pages("full", 1))
    assert pools.held_pages(state) == {"full": [2], "window": [2]}
    check(state)


def test_window_half_left_behind_is_released_and_flagged():
    state, _ = take(swa_full(), full=2)
    state = pools.free_full(state, pages("full", 1))
    assert errors(state) == {"window": ErrorBit.WINDOW_STILL_HELD}
    assert pools.held_pages(state) == {"full": [2], "window": [2]}
    check(state)


def test_share_of_a_tombstone_is_a_tombstone():
    state, _ = take(swa_full(), full=2)
    state = pools.free_window(state, "window", pages("full", 1))
    state = pools.share(state, pages("full", 1, 2))
    assert refcounts(state, "full")[1:3].tolist() == [2, 2]
    assert refcounts(state, "window")[1:3].tolist() == [0, 2]
    assert errors(state) == {}


def test_window_without_an_owner_frees_as_a_page():
    spec = pools.window_spec(shares_ids=None)
    state, _ = take(new_pool([spec], 512 * 8), window=3)
    state = pools.free(state, pages("window", 2))
    assert row(state, "window") == {"live": 2, "holes": 1, "lo": 0, "hi": 3}
    check(state)


def test_bits_add_up_and_are_described():
    state, _ = take(swa_full(), full=2)
    state = pools.free(state, pages("full", 9, 99))
    state = pools.free_full(state, pages("full", 1))
    assert errors(state) == {
        "full": ErrorBit.DOUBLE_FREE | ErrorBit.ID_OUT_OF_RANGE,
        "window": ErrorBit.WINDOW_STILL_HELD,
    }
    lines = [
        "sub-pool 'full': DOUBLE_FREE: a page was released more often than it was held",
        "sub-pool 'full': ID_OUT_OF_RANGE: a virtual id is not in the id space",
        "sub-pool 'window': WINDOW_STILL_HELD: a page's last holder left its window "
        "half behind",
    ]
    assert describe_error(state.layout, np.asarray(state.error)) == lines
    with pytest.raises(PoolStateError, match="; ".join(lines)):
        raise_on_error(state)
    raise_on_error(allocator.clear_error(state))


def test_static_pool_frees_in_the_same_way():
    layout = static_layout(SWA_FULL, num_pages={"full": 8, "window": 8})
    state, _ = take(pools.poisoned(layout), full=4)
    state = pools.share(state, pages("full", 3))
    state = pools.free_window(state, "window", pages("full", 1))
    state = pools.free(state, pages("full", 1, 2, 3))
    assert errors(state) == {}
    assert pools.held_pages(state) == {"full": [3, 4], "window": [3, 4]}
    check(state)


def test_free_leaves_the_bytes_alone():
    state, _ = take(swa_full(), full=6)
    state = pools.tag_everything(state)
    before = np.asarray(state.buffers[0])
    state = pools.free_window(state, "window", pages("full", 1, 2))
    state = pools.free(state, pages("full", 2, 4))
    np.testing.assert_array_equal(before, np.asarray(state.buffers[0]))
