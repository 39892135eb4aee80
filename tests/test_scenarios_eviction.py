"""Reported failures of eviction in other prefix caches, replayed on ours, by number."""

import pytest

from tests.prefix_rows import CachedRows
from tests.tagged_pools import full_spec, latent_spec, state_spec, window_spec
from tests.test_prefix_cache import FULL, HYBRID, STATES, WINDOW, new_rows, tokens_of
from tests.test_scenarios_prefix import GRID_64, components, window
from ukv.allocator import PoolMirror
from ukv.engine.prefix_cache import PrefixCache
from ukv.engine.prefix_spec import PrefixSpec
from ukv.layout import packed_bytes, static_layout, unified_layout


def mirror_fits(mirror, needs):
    """The question that the engine asks."""
    return lambda freed: mirror.release(freed).can_allocate(needs)


def unified_rows(specs, pool_bytes):
    """Rows over the counts of a real pool of bytes, without a device."""
    layout = unified_layout(specs, pool_bytes=pool_bytes)
    spec = PrefixSpec.of(layout)
    rows = CachedRows(spec, {sub.name: 10**6 for sub in layout.sub_pools})

    def fits(needs):
        mirror = PoolMirror.create(layout).bind(
            {name: len(held) for name, held in rows.pool.holders.items()}
        )
        owners = {owner.name for owner in layout.owners}
        return mirror_fits(mirror, {n: c for n, c in needs.items() if n in owners})

    rows.pool.fits = fits
    return rows


def test_scenario_02_a_state_takes_the_bytes_of_cached_pages():
    specs = [full_spec(head_dim=48), state_spec(slot_bytes=7680)]
    layout = unified_layout(specs, pool_bytes=768 * 100)
    assert [sub.page_bytes for sub in layout.sub_pools] == [768, 7680]
    mirror = PoolMirror.create(layout).alloc({"full": 94})
    rows = new_rows(FULL, pages=94)
    for session in range(12):
        rows.run(tokens_of(FULL, [session, 1, 2, 3, 4]))
    assert rows.cache.held_pages() == {"full": 60}
    assert not mirror.can_allocate({"state": 1})
    dropped = rows.cache.evict(mirror_fits(mirror, {"state": 1}))
    assert dropped is not None
    assert dropped.num_pages == {"full": 4}
    mirror = mirror.release(dropped.num_pages)
    assert mirror.can_allocate({"state": 1})
    mirror = mirror.make_room({"state": 1}).alloc({"state": 1})
    assert mirror.live("state") == 1


@pytest.mark.parametrize("page_size", [1, 64])
def test_scenario_03_and_b32_eviction_stops_when_the_allocation_fits(page_size):
    spec = PrefixSpec(page_size=page_size, owners=("full",))
    per_node = 64 // page_size
    rows = new_rows(spec, pages=3 * per_node + 5)
    for session in range(3):
        rows.run([session] * 64)
    assert rows.pool.free("full") == 5
    dropped = rows.cache.evict(rows.pool.fits({"full": 8}))
    assert dropped is not None
    assert len(dropped.pages["full"]) == min(3, per_node * 3)
    rows.pool.drop(dropped)
    hits = [rows.cache.match([session] * 65).hit_len for session in range(3)]
    assert hits[1:] == ([64, 64] if page_size == 1 else [0, 0])


@pytest.mark.parametrize("spec", [FULL, WINDOW, STATES, HYBRID], ids=components)
def test_scenario_25_categories_sum_to_the_total(spec):
    rows = new_rows(spec, pages=40, states=12)
    for symbols in ([1, 2, 3, 4], [1, 2, 5, 6], [7, 8], [1, 2, 5, 6, 7]):
        row = rows.start(tokens_of(spec, symbols, more=1))
        assert row is not None
        rows.insert(row)
        for name, limit in rows.pool.limits.items():
            evictable = rows.cache.evictable_pages()[name]
            protected = rows.cache.held_pages()[name] - evictable
            free = rows.pool.free(name)
            assert 0 <= free <= limit
            assert evictable + protected + free <= limit
        rows.check()
        if symbols[0] == 7:
            rows.finish(row)


def test_scenario_26_and_b53_eviction_reaches_halves_of_inner_pages():
    spec = window(1, 20)
    rows = new_rows(spec, pages=420)
    row = rows.start([0])
    assert row is not None
    # Cached as it grows, so the inner pages have their halves.
    for token in range(10, 420, 10):
        assert rows.grow(row, list(range(token - 9, token + 1)))
        rows.insert(row)
    assert rows.grow(row, list(range(411, 420)))
    rows.finish(row)
    assert rows.cache.held_pages() == {"full": 420, "swa": 420}
    dropped = rows.cache.evict(rows.pool.fits({"swa": 50}))
    assert dropped is not None
    assert dropped.num_pages == {"swa": 50}
    rows.pool.drop(dropped)
    assert rows.cache.match(range(421)).hit_len == 420


def test_scenario_b33_capacity_is_joint():
    # Both sides have 4 pages left, together they have 3.
    specs = [full_spec(), window_spec()]
    rows = unified_rows(specs, 256 * 4 + 512 * 4 - 512)
    row = rows.start([1] * 4)
    assert row is not None
    rows.finish(row)
    assert not rows.pool.fits({"full": 3, "window": 3})({})
    assert rows.make_room({"full": 3, "window": 3})


@pytest.mark.parametrize("spec", [FULL, WINDOW, STATES, HYBRID], ids=components)
def test_scenario_b34_and_b47_eviction_is_bounded_and_gives_up(spec):
    rows = new_rows(spec, pages=2000, states=100)
    for session in range(20):
        rows.run(tokens_of(spec, [session, *range(30)], more=1))
    calls = []

    def never(freed):
        calls.append(freed)
        return False

    before = rows.cache.held_pages()
    assert rows.cache.evict(never) is None
    assert rows.cache.held_pages() == before
    assert len(calls) == 2
    # Even a question that changes its mind ends.
    answers = iter([False, True])
    dropped = rows.cache.evict(lambda _: next(answers, False))
    assert dropped is not None
    rows.pool.drop(dropped)
    rows.check()
    assert not any(rows.cache.held_pages().values())


def test_scenario_b35_a_copy_of_a_state_finds_room():
    rows = new_rows(GRID_64, states=3)
    prompts = [tokens_of(GRID_64, [session, 1], more=1) for session in range(3)]
    for prompt in prompts:
        rows.run(prompt)
    # Every slot is cached; the copy takes the oldest, never its own source.
    row = rows.start(prompts[0], has_checkpoints=False)
    if row is not None:
        rows.finish(row)
    hits = [rows.cache.match(prompt).hit_len for prompt in prompts]
    row = rows.start(prompts[hits.index(128)], has_checkpoints=False)
    assert row is not None
    assert row.hit_len == 128
    assert row.state != row.lease.path[-1].state
    rows.check()


def test_scenario_b43_a_refused_request_leaves_nothing_pinned():
    rows = new_rows(GRID_64, pages=6, states=2)
    rows.run(tokens_of(GRID_64, [1, 2, 3], more=1), has_checkpoints=True)
    before = rows.cache.evictable_pages()
    for _ in range(5):
        assert rows.start(tokens_of(GRID_64, [1, 2, 3, *range(4)])) is None
    assert rows.cache.evictable_pages() == before
    rows.check()


def test_scenario_b44_a_refusal_drops_nothing():
    rows = new_rows(STATES, pages=9, states=4)
    rows.run(tokens_of(STATES, [1, 2, 3, 4], more=1))
    row = rows.start(tokens_of(STATES, [5] * 5))
    assert row is not None
    before = rows.cache.held_pages()
    assert rows.start(tokens_of(STATES, [6] * 5)) is None
    assert rows.cache.held_pages() == before
    rows.check()


def test_scenario_b46_a_refused_request_is_served_after_a_release():
    rows = new_rows(STATES, pages=20, states=1)
    first = rows.start(tokens_of(STATES, [1, 2]), has_checkpoints=False)
    assert first is not None
    assert rows.start(tokens_of(STATES, [3, 4])) is None
    rows.finish(first)
    assert rows.start(tokens_of(STATES, [3, 4])) is not None


def test_scenario_b71_a_tail_goes_only_when_it_must():
    spec = window(4, 8)
    rows = new_rows(spec, pages=100)
    system = tokens_of(spec, [0] * 6)
    rows.run(system)
    sessions = [[*system, *tokens_of(spec, [n] * 6)] for n in (1, 2, 3)]
    for tokens in sessions:
        rows.run(tokens)
    held = rows.cache.held_pages()["swa"]
    tails = {
        id(page)
        for node in rows.cache.tree.nodes()
        if node.is_anchor
        for page in rows.cache.tree.tail(node, 0)
    }
    spare = held - len(tails)
    pool, cache = rows.pool, rows.cache
    pool.limits["swa"] = held
    if spare:
        dropped = cache.evict(pool.fits({"swa": spare}))
        assert dropped is not None
        pool.drop(dropped)
    for tokens in sessions:
        assert cache.match([*tokens, 1]).hit_len == len(tokens)
    # One more half costs the session that was used longest ago, and only that.
    dropped = cache.evict(pool.fits({"swa": spare + 1}))
    assert dropped is not None
    pool.drop(dropped)
    hits = [cache.match([*tokens, 1]).hit_len for tokens in [system, *sessions]]
    assert hits.count(0) <= 1
    assert hits[-1] == len(sessions[-1])


@pytest.mark.parametrize("is_unified", [True, False])
def test_the_mirror_answers_what_eviction_asks(is_unified):
    specs = [latent_spec(page_size=32), state_spec()]
    num_pages = {"latent": 12, "state": 3}
    if is_unified:
        layout = unified_layout(specs, pool_bytes=packed_bytes(specs, num_pages))
    else:
        layout = static_layout(specs, num_pages=num_pages)
    cache = PrefixCache(PrefixSpec.of(layout))
    mirror = PoolMirror.create(layout)
    for session, first in enumerate((1, 5, 9)):
        tokens = [session] * 128
        pages = [(page,) for page in range(first, first + 4)]
        lease = cache.pin(cache.match(tokens))
        done = cache.insert(lease, tokens, pages, {128: (session + 1,)})
        assert not done.unused_states
        cache.release(lease)
        mirror = mirror.alloc({"latent": 4, "state": 1})
    short = next(n for n in range(9) if not mirror.can_allocate({"state": n}))
    states = cache.evict(mirror_fits(mirror, {"state": short}))
    assert states is not None
    assert not states.pages
    assert states.states == {"state": [1]}
    mirror = mirror.release(states.num_pages)
    pages = cache.evict(mirror_fits(mirror, {"latent": 6}))
    assert pages is not None
    assert pages.num_pages["latent"] == 6
    assert mirror.release(pages.num_pages).can_allocate({"latent": 6})
    assert cache.match([2] * 129).hit_len == 128
