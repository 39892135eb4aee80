"""The host's counts are the device's counts, after any history."""

import numpy as np
import pytest

from tests import tagged_pools as pools
from tests.tagged_pools import LAYOUTS, check, errors, pages, poisoned
from tests.test_alloc import kda_mla, swa_full
from ukv.allocator import PoolMirror
from ukv.layout import static_layout


def test_mirror_of_an_empty_pool():
    state = kda_mla()
    mirror = PoolMirror.create(state.layout)
    assert mirror == PoolMirror.read(state)
    assert mirror.counters == ((0, 0, 0, 0), (0, 0, 31, 31))
    assert (mirror.bytes_in_use(), mirror.free_bytes()) == (0, 15_872)
    assert mirror.live("latent") == 0


def test_mirror_is_immutable():
    mirror = PoolMirror.create(kda_mla().layout)
    after = mirror.alloc({"latent": 3})
    assert (mirror.live("latent"), after.live("latent")) == (0, 3)


def test_answers_that_need_a_move():
    state, _ = pools.take(kda_mla(), state=10)
    state = pools.free(state, pages("state", *range(1, 10)))
    mirror = PoolMirror.read(state)
    # 15,872 - 10 * 768 bytes are 16 pages in place; all but one slot are free.
    assert mirror.fits_in_place({"latent": 16})
    assert not mirror.fits_in_place({"latent": 17})
    assert mirror.can_allocate({"latent": 29})
    assert not mirror.can_allocate({"latent": 30})
    assert mirror.can_allocate({"latent": 16}, may_move=False)
    assert not mirror.can_allocate({"latent": 17}, may_move=False)
    # What need not move does not.
    assert mirror.make_room({"latent": 16}) == mirror
    assert mirror.make_room({"latent": 30}) == mirror
    assert mirror.make_room({"latent": 29}).counters[0] == (1, 0, 0, 1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["alone", "kda+mla", "swa+full", "three", "five"])
def test_mirror_follows_the_device(name, seed):
    layout = LAYOUTS[name]
    rng = np.random.default_rng(seed)
    state, mirror = poisoned(layout), PoolMirror.create(layout)
    for _ in range(25):
        kind = rng.integers(0, 8)
        if kind < 4:
            counts = {
                sub.name: int(rng.integers(0, 6))
                for sub in layout.owners
                if rng.random() < 0.7
            }
            can, in_place = mirror.can_allocate(counts), mirror.fits_in_place(counts)
            state, made = pools.make_room(state, counts)
            mirror = mirror.make_room(counts)
            assert bool(made.fits) == can
            assert not in_place or not made.moved.any()
            state, grant = pools.alloc(state, counts)
            assert bool(grant.granted) == can
            if can:
                mirror = mirror.alloc(counts)
        elif kind < 6:
            owner = layout.owners[rng.integers(0, len(layout.owners))]
            held = pools.held_pages(state)
            chosen = [i for i in held[owner.name] if rng.random() < 0.4]
            chosen = chosen[: pools.NUM_IDS]
            mirror = mirror.release(
                {
                    sub.name: len(set(chosen) & set(held[sub.name]))
                    for sub in layout.members(owner)
                }
            )
            state = pools.free(state, pages(owner.name, *chosen))
        elif kind < 7 and name == "swa+full":
            held = pools.held_pages(state)["window"][:2]
            mirror = mirror.release({"window": len(held)})
            state = pools.free_window(state, "window", pages("full", *held))
        else:
            state, _ = pools.compact(state)
            mirror = mirror.compact()
        assert mirror == PoolMirror.read(state)
        assert mirror.bytes_in_use() + mirror.free_bytes() == layout.pool_bytes
    assert set(errors(state)) <= set(layout.names)
    check(state)


def test_window_needs_are_counted_in_both_halves():
    mirror = PoolMirror.create(swa_full().layout).alloc({"full": 3})
    assert [counters[0] for counters in mirror.counters] == [3, 3]
    mirror = mirror.release({"window": 2})
    assert mirror.bytes_in_use() == 3 * 256 + 512


def test_static_mirror_has_fixed_borders():
    layout = static_layout(
        [pools.full_spec(), pools.window_spec()], num_pages={"full": 8, "window": 3}
    )
    mirror = PoolMirror.create(layout).alloc({"full": 3})
    assert not mirror.can_allocate({"full": 1})
    mirror = mirror.release({"window": 1})
    assert mirror.can_allocate({"full": 1})
    assert not mirror.can_allocate({"full": 2})
    assert mirror.compact().counters[0][0] == 3
