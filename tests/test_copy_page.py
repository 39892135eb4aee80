"""Copy on write: a private copy, its bytes equal, its holders its own."""

import jax
import numpy as np
import pytest

from tests import tagged_pools as pools
from tests.tagged_pools import (
    check,
    contents,
    errors,
    held,
    live,
    pages,
    read_pages,
    row,
    tag_everything,
    take,
)
from tests.test_alloc import KDA_MLA, SWA_FULL, kda_mla, swa_full
from ukv.allocator import ErrorBit, PoolMirror
from ukv.layout import static_layout


def test_copy_has_the_bytes_of_its_source():
    state, _ = take(kda_mla(), latent=4, state=2)
    state = tag_everything(pools.share(state, pages("latent", 2, 3)))
    before = contents(state)
    state, copies, granted = pools.copy_page(state, pages("latent", 2, 0, 3))
    assert bool(granted)
    assert copies.ids[:4].tolist() == [5, 0, 6, 0]
    found = read_pages(state, "latent", [5, 6])
    assert found[5] == before["latent"][2]
    assert found[6] == before["latent"][3]
    assert contents(state)["latent"] == before["latent"] | found
    assert contents(state)["state"] == before["state"]
    # The writer turns to its copy and lets go of the shared page.
    state = pools.free(state, pages("latent", 2, 3))
    assert pools.held_pages(state)["latent"] == [1, 2, 3, 4, 5, 6]
    assert errors(state) == {}
    check(state)


def test_same_page_is_copied_for_two_writers():
    state, _ = take(kda_mla(), state=1)
    state = tag_everything(state)
    state, copies, granted = pools.copy_page(state, pages("state", 1, 1))
    assert bool(granted)
    assert held(copies) == [2, 3]
    assert len(set(read_pages(state, "state", [1, 2, 3]).values())) == 1
    check(state)


def test_copy_into_holes():
    state, _ = take(kda_mla(), latent=6)
    state = tag_everything(state)
    state = pools.free(state, pages("latent", 2, 5))
    before = contents(state)["latent"]
    state, copies, _ = pools.copy_page(state, pages("latent", 6, 1))
    assert row(state, "latent") == {"live": 6, "holes": 0, "lo": 25, "hi": 31}
    first, second = held(copies)
    found = read_pages(state, "latent", [first, second])
    assert (found[first], found[second]) == (before[6], before[1])
    check(state)


def test_tombstone_is_copied_as_a_tombstone():
    state, _ = take(swa_full(), full=3)
    state = tag_everything(state)
    state = pools.free_window(state, "window", pages("full", 1))
    before = contents(state)
    state, copies, granted = pools.copy_page(state, pages("full", 1, 3))
    assert bool(granted)
    assert held(copies) == [4, 5]
    assert pools.held_pages(state) == {"full": [1, 2, 3, 4, 5], "window": [2, 3, 5]}
    assert read_pages(state, "window", [5])[5] == before["window"][3]
    assert read_pages(state, "full", [4])[4] == before["full"][1]
    check(state)


def test_refused_copy_changes_nothing():
    state, _ = take(kda_mla(), state=15, latent=7)
    state = tag_everything(state)
    before = jax.device_get((state.tables, state.counters, state.buffers))
    # 768 bytes are left: one page of 512, not two.
    assert PoolMirror.read(state).free_bytes() == 768
    state, copies, granted = pools.copy_page(state, pages("latent", 1, 2))
    assert not bool(granted)
    assert held(copies) == []
    assert errors(state) == {"latent": ErrorBit.OUT_OF_PAGES}
    after = jax.device_get((state.tables, state.counters, state.buffers))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    state, copies, granted = pools.copy_page(state, pages("latent", 1))
    assert bool(granted)
    check(state)


@pytest.mark.parametrize("bad", [9, -1, 32, 2**31 - 1])
def test_copy_of_a_page_nobody_holds_is_refused_whole(bad):
    state, _ = take(kda_mla(), latent=2)
    state, copies, granted = pools.copy_page(state, pages("latent", 1, bad))
    assert not bool(granted)
    assert held(copies) == []
    assert errors(state) == {"latent": ErrorBit.UNOWNED_ID}
    assert live(state, "latent") == 2
    check(state)


def test_copy_of_nothing():
    state, copies, granted = pools.copy_page(kda_mla(), pages("latent"))
    assert bool(granted)
    assert held(copies) == []
    assert errors(state) == {}


@pytest.mark.parametrize(
    ("specs", "name"), [(KDA_MLA, "latent"), (KDA_MLA, "state"), (SWA_FULL, "full")]
)
def test_copy_in_a_static_pool(specs, name):
    layout = static_layout(specs, num_pages={spec.name: 6 for spec in specs})
    state, _ = take(pools.poisoned(layout), **{name: 4})
    state = tag_everything(state)
    before = contents(state)
    state, copies, granted = pools.copy_page(state, pages(name, 3, 1))
    assert bool(granted)
    assert held(copies) == [5, 6]
    for sub in layout.members(layout.owner(name)):
        found = read_pages(state, sub.name, [5, 6])
        assert found == {5: before[sub.name][3], 6: before[sub.name][1]}
        assert contents(state)[sub.name] == before[sub.name] | found
    check(state)


def test_mirror_of_a_copy_counts_half_by_half():
    state, _ = take(swa_full(), full=3)
    state = pools.free_window(state, "window", pages("full", 1))
    mirror = PoolMirror.read(state).bind({"full": 2, "window": 1})
    state, _, granted = pools.copy_page(state, pages("full", 1, 3))
    assert bool(granted)
    assert PoolMirror.read(state) == mirror
