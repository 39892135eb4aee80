"""Closed-form capacity equals what the allocator grants."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests import tagged_pools as pools
from tests.tagged_pools import KDA_MLA, LAYOUTS, SWA_FULL, latent_spec, state_spec
from tests.test_spec import kimi_latent, kimi_state
from ukv.allocator import PoolMirror
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
from ukv.layout.capacity import pages_fit
from ukv.layout.request import spanned_pages

GIB = 2**30


def test_kimi_64_slots_in_100_gib():
    layout = unified_layout([kimi_state(), kimi_latent()], pool_bytes=100 * GIB)
    pages = max_pages(layout, "latent", {"kda": 64})
    assert pages == (layout.pool_bytes - 64 * 43_417_600) // 516_096
    assert pages * 64 == max_tokens(layout, num_requests=64)
    # 107,374,182,400 - 2,778,726,400 bytes are 12,970,666 tokens of 8,064.
    assert (100 * GIB - 64 * 43_417_600) // 8_064 == 12_970_666
    assert 0 <= 12_970_666 - pages * 64 < 2 * 64


def test_kimi_requests_of_32k():
    layout = unified_layout([kimi_state(), kimi_latent()], pool_bytes=100 * GIB)
    # A slot and 512 pages: 43,417,600 + 264,241,152 bytes.
    each = 43_417_600 + 512 * 516_096
    assert max_requests(layout, RequestShape(num_tokens=32_768)) == 100 * GIB // each


@pytest.mark.parametrize(
    ("num_tokens", "page_size", "pages"),
    [(1, 1, 1), (1, 16, 1), (2, 16, 2), (16, 16, 2), (17, 16, 2), (18, 16, 3)],
)
def test_pages_that_tokens_in_a_row_touch(num_tokens, page_size, pages):
    touched = {
        len({(first + i) // page_size for i in range(num_tokens)})
        for first in range(page_size)
    }
    assert spanned_pages(num_tokens, page_size) == max(touched) == pages


@pytest.mark.parametrize(
    ("num_tokens", "chunk_len", "pages"),
    [(3, 1, 1), (100, 1, 3), (100, 8, 5), (9, 8, 3), (100, 100, 25)],
)
def test_window_pages_of_a_request(num_tokens, chunk_len, pages):
    # A window of 8 in pages of 4: 7 earlier tokens and the chunk.
    sub = SWA_FULL.sub_pool("window")
    shape = RequestShape(num_tokens=num_tokens, chunk_len=chunk_len)
    assert pages_of_request(sub, shape) == pages


def test_state_takes_one_slot_whatever_the_length():
    sub = KDA_MLA.sub_pool("state")
    assert pages_of_request(sub, RequestShape(num_tokens=100_000)) == 1


def fill_one_by_one(state, name):
    """Pages of ``name`` that the device grants before it refuses, compacting."""
    count = 0
    while True:
        mirror = PoolMirror.read(state)
        can = mirror.can_allocate({name: 1})
        state, _ = pools.make_room(state, {name: 1})
        state, grant = pools.alloc(state, {name: 1})
        assert bool(grant.granted) == can
        if not can:
            return state, count
        count += 1


@pytest.mark.parametrize("name", LAYOUTS)
def test_max_pages_is_what_the_allocator_grants(name):
    layout = LAYOUTS[name]
    for owner in layout.owners:
        others = [sub.name for sub in layout.owners if sub != owner]
        held = dict.fromkeys(others, 2)
        state = pools.poisoned(layout)
        if held:
            state, _ = pools.grow(state, **held)
        state, count = fill_one_by_one(state, owner.name)
        # A page of an owner has a half in each sub-pool that shares its ids.
        members = [sub.name for sub in layout.members(owner)]
        if len(members) == 1:
            assert count == max_pages(layout, owner.name, held)
        every = held | dict.fromkeys(members, count)
        more = held | dict.fromkeys(members, count + 1)
        assert pages_fit(layout, every)
        assert not pages_fit(layout, more)
        pools.check(state)


@pytest.mark.parametrize("name", ["alone", "kda+mla", "three", "five"])
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_max_requests_is_what_the_allocator_grants(name, num_tokens):
    layout = LAYOUTS[name]
    shape = RequestShape(num_tokens=num_tokens)
    needs = {owner.name: pages_of_request(owner, shape) for owner in layout.owners}
    state, mirror, count = pools.poisoned(layout), PoolMirror.create(layout), 0
    while True:
        can = mirror.can_allocate(needs)
        state, made = pools.make_room(state, needs)
        state, grant = pools.alloc(state, needs)
        assert bool(grant.granted) == bool(made.fits) == can
        if not can:
            break
        mirror = mirror.make_room(needs).alloc(needs)
        assert mirror == PoolMirror.read(state)
        count += 1
    assert count == max_requests(layout, shape)
    pools.check(state)


def test_max_requests_with_windows_is_what_the_allocator_grants():
    # Every request holds its 10 pages, but window halves of its last 3 only.
    shape = RequestShape(num_tokens=40)
    per_request = {sub.name: pages_of_request(sub, shape) for sub in SWA_FULL.sub_pools}
    assert per_request == {"full": 10, "window": 3}
    expected = max_requests(SWA_FULL, shape)
    # 10 x 256 + 3 x 512 = 4,096 of 10,752 bytes.
    assert expected == 2
    state = pools.poisoned(SWA_FULL)

    def admit(state):
        ids = []
        for _ in range(10):
            state, made = pools.make_room(state, {"full": 1})
            state, grant = pools.alloc(state, {"full": 1})
            if not bool(grant.granted):
                assert not bool(made.fits)
                return state, False
            ids += pools.held(grant.pages["full"])
            if len(ids) > 3:
                state = pools.free_window(state, "window", pools.pages("full", ids[-4]))
        return state, True

    for _ in range(expected):
        state, is_admitted = admit(state)
        assert is_admitted
    assert pools.live(state, "window") == expected * 3
    pools.check(state)
    state, is_admitted = admit(state)
    assert not is_admitted


@pytest.mark.parametrize("name", ["kda+mla", "three", "five"])
@pytest.mark.parametrize("num_requests", [1, 3])
def test_max_tokens_is_what_the_allocator_grants(name, num_requests):
    layout = LAYOUTS[name]
    state = pools.poisoned(layout)
    states = {sub.name: num_requests for sub in layout.owners if not sub.spec.grows}
    grows = {sub.name: 1 for sub in layout.owners if sub.spec.grows}
    state, _ = pools.grow(state, **states)
    pages = 0
    while True:
        state, made = pools.make_room(state, grows)
        if not bool(made.fits):
            break
        state, _ = pools.take(state, **grows)
        pages += 1
    assert max_tokens(layout, num_requests=num_requests) == pages * 4


def test_max_tokens_with_different_page_sizes():
    # A token costs 16 + 16 bytes; pages of 1 and of 4 tokens.
    wide = latent_spec("wide", num_layers=1, page_size=4, width=16)
    thin = latent_spec("thin", num_layers=1, page_size=1, width=16)
    for specs in ([wide, thin], [thin, wide]):
        layout = unified_layout(specs, pool_bytes=1_000 * 64)
        # 1,000 tokens: 250 pages of 128 bytes and 1,000 of 32.
        assert max_tokens(layout) == 1_000
        assert pages_fit(layout, {"wide": 250, "thin": 1_000})
        assert not pages_fit(layout, {"wide": 251, "thin": 1_001})


def test_static_capacity_leaves_the_null_page_out():
    layout = static_layout(
        [state_spec(), latent_spec()], num_pages={"state": 3, "latent": 8}
    )
    assert max_pages(layout, "latent") == 8
    assert max_requests(layout, RequestShape(num_tokens=16)) == 2
    assert max_requests(layout, RequestShape(num_tokens=4)) == 3
    assert max_tokens(layout) == 32
    state = pools.poisoned(layout)
    state, ids = pools.take(state, latent=8, state=3)
    assert ids == {"latent": list(range(1, 9)), "state": [1, 2, 3]}
    state, grant = pools.alloc(state, {"latent": 1})
    assert not bool(grant.granted)


@pytest.mark.parametrize("name", LAYOUTS)
def test_packed_bytes_is_the_smallest_pool(name):
    specs = [sub.spec for sub in LAYOUTS[name].sub_pools]
    counts = {spec.name: 3 for spec in specs}
    needed = packed_bytes(specs, counts)
    assert pages_fit(unified_layout(specs, pool_bytes=needed), counts)
    smaller = unified_layout(specs, pool_bytes=needed - 1)
    bytes_of_pages = sum(3 * sub.page_bytes for sub in smaller.sub_pools)
    if bytes_of_pages > smaller.pool_bytes:
        assert not pages_fit(smaller, counts)


def test_mirror_counts_bytes():
    mirror = PoolMirror.create(KDA_MLA).alloc({"state": 2, "latent": 5})
    assert mirror.bytes_in_use() == 2 * 768 + 5 * 512
    assert mirror.free_bytes() == 512 * 31 - mirror.bytes_in_use()
    mirror = mirror.release({"state": 1})
    assert mirror.bytes_in_use() == 768 + 5 * 512
    assert np.asarray(mirror.counters).tolist()[0] == [1, 1, 0, 2]


def test_counts_are_plain_integers():
    layout = LAYOUTS["five"]
    answers = [
        max_pages(layout, "low"),
        max_requests(layout, RequestShape(num_tokens=4)),
        max_tokens(layout),
    ]
    assert [type(answer) for answer in answers] == [int] * 3
    assert jnp.asarray(answers).shape == (3,)
