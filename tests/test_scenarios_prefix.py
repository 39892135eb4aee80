"""Reported failures of other prefix caches, replayed on ours; named by their numbers.

What needs an engine is in ``test_scenarios_engine_prefix.py``: B23, B29, B45, B49, B57,
B60, B61, B70.
"""

import pytest

from tests.prefix_rows import CachedRows
from tests.tagged_pools import full_spec, latent_spec, state_spec, window_spec
from tests.test_prefix_cache import FULL, HYBRID, STATES, WINDOW, new_rows, tokens_of
from ukv.allocator import PoolMirror
from ukv.engine.prefix_cache import PrefixCache
from ukv.engine.prefix_spec import PrefixSpec, WindowHalf
from ukv.layout import packed_bytes, static_layout, unified_layout

GRID_64 = PrefixSpec(page_size=64, owners=("mla",), states=("kda",))


def window(page_size, size):
    half = WindowHalf(name="swa", size=size)
    return PrefixSpec(page_size=page_size, owners=("full",), windows=(half,))


def components(spec):
    """For the names of test cases."""
    names = [*spec.owners, *(half.name for half in spec.windows), *spec.states]
    return "-".join(names)


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


def test_scenario_19_short_prompts_hit():
    rows = new_rows(GRID_64)
    prompt = list(range(500))
    assert rows.run([*prompt, 1, 2, 3]) == 0
    assert rows.run([*prompt, 4, 5, 6]) == 448


def test_scenario_20_one_finishes_and_then_the_other():
    rows = new_rows(FULL, pages=100)
    prompts = [tokens_of(FULL, [session] * 60) for session in (0, 1)]
    for prompt in prompts:
        rows.run(prompt[: 30 * 4])
    first = rows.start(prompts[0])
    assert first is not None
    assert first.hit_len == 30 * 4
    # Who waits pins nothing, so the other's cached pages do not lock it out.
    assert rows.start(prompts[1]) is None
    rows.check()
    rows.finish(first)
    second = rows.start(prompts[1])
    assert second is not None
    assert second.hit_len == 30 * 4


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


def test_scenario_29_halves_stay_from_one_page_before_the_window():
    spec = window(16, 64)
    assert spec.kept_start(spec.windows[0], 300) == 208 // 16
    for prompt_len in (288, 300, 303, 304):
        rows = new_rows(spec)
        prompt = list(range(prompt_len))
        rows.run(prompt)
        assert rows.run(prompt) == (prompt_len - 1) // 16 * 16
        assert rows.run([*prompt, 7]) == prompt_len // 16 * 16


def test_scenario_34_sessions_in_turn_hit_after_a_window_moved_on():
    spec = window(16, 64)
    rows = new_rows(spec, pages=1000)
    rows.pool.limits["swa"] = 90
    sessions = [[session] * 60 * 16 for session in range(4)]
    for tokens in sessions:
        assert rows.run(tokens) == 0
    for _ in range(3):
        for tokens in sessions:
            before = len(tokens) // 16 * 16
            tokens += [9] * 17
            assert rows.run(tokens) == before


def test_scenario_36_lookup_comes_before_allocation():
    rows = new_rows(FULL, pages=8)
    oldest = tokens_of(FULL, [1, 2, 3, 4])
    rows.run(oldest)
    rows.run(tokens_of(FULL, [5, 6, 7, 8]))
    assert rows.pool.free("full") == 0
    row = rows.start([*oldest, *tokens_of(FULL, [0, 0])])
    assert row is not None
    assert row.hit_len == 16
    rows.check()


@pytest.mark.parametrize("page_size", [16, 64, 128, 512])
def test_scenario_56_checkpoints_lie_on_absolute_depths(page_size):
    spec = PrefixSpec(page_size=page_size, owners=("mla",), states=("kda",))
    grid = max(page_size, 64)
    assert spec.last_end(605) == 605 // grid * grid
    for prefix in range(0, spec.last_end(605), grid):
        for end in spec.chunk_ends(605, prefix):
            assert end % page_size == 0
            assert (end - prefix) % 64 == 0


@pytest.mark.parametrize("prompt_len", [8192, 8193, 8449])
def test_scenario_58_the_last_chunk_is_kept_too(prompt_len):
    spec = PrefixSpec(page_size=256, owners=("full",))
    rows = new_rows(spec)
    row = rows.start(list(range(8192)))
    assert row is not None
    if prompt_len > 8192:
        assert rows.grow(row, list(range(8192, prompt_len)))
    rows.finish(row)
    assert rows.cache.match(range(prompt_len + 1)).hit_len == prompt_len // 256 * 256


def test_scenario_59_less_than_a_page_is_no_node():
    spec = PrefixSpec(page_size=64, owners=("full",))
    rows = new_rows(spec)
    rows.run([1] * 64)
    before = rows.cache.held_pages()
    row = rows.start([1] * 63)
    assert row is not None
    assert row.hit_len == 0
    done = rows.insert(row)
    assert not done.shares
    assert rows.cache.held_pages() == before
    rows.check()


def test_scenario_61_a_branch_without_state_gets_one():
    rows = new_rows(GRID_64)
    a_b_c = tokens_of(GRID_64, [1, 2, 3], more=1)
    a_b_d = tokens_of(GRID_64, [1, 2, 4], more=1)
    rows.run(a_b_c)
    match = rows.cache.match(a_b_d)
    assert (match.hit_len, match.full_len) == (0, 128)
    assert GRID_64.chunk_ends(len(a_b_d), match.full_len) == [128, 192]
    assert rows.run(a_b_d) == 0
    assert rows.run(tokens_of(GRID_64, [1, 2, 5], more=1)) == 128
    # The prompt that ends at the branch computes its last token.
    assert rows.cache.match(tokens_of(GRID_64, [1, 2])).hit_len == 0
    assert rows.cache.match(tokens_of(GRID_64, [1, 2])).full_len == 128


def test_scenario_62_a_draft_computes_the_last_page_again():
    spec = PrefixSpec(page_size=64, owners=("full",))
    rows = new_rows(spec)
    tokens = tokens_of(spec, [1, 2, 3, 4], more=1)
    rows.run(tokens)
    assert rows.cache.match(tokens).hit_len == 4 * 64
    assert rows.cache.match(tokens, num_computed=2).hit_len == 3 * 64


def test_scenario_63_recompute_from_the_state_and_leave_one_at_the_branch():
    rows = new_rows(GRID_64)
    prompt = list(range(4000))
    row = rows.start(prompt[:2049])
    assert row is not None
    assert rows.cache.match(prompt[:2049]).hit_len == 2048
    # Pages up to 3,000 are of the same row, whose next state lies beyond the branch.
    assert rows.grow(row, prompt[2049:3200])
    row.checkpoints[3200 // 64 * 64] = rows.pool.new_state()
    rows.finish(row)
    branch = [*prompt[:3000], *[7] * 500]
    match = rows.cache.match(branch)
    assert match.hit_len == 2048
    assert match.full_len == 3000 // 64 * 64 == 2944
    assert GRID_64.chunk_ends(len(branch), match.full_len) == [2944, 3456]
    rows.run(branch)
    assert rows.cache.match([*prompt[:2944], 7]).hit_len == 2944


@pytest.mark.parametrize("spec", [FULL, WINDOW, STATES, HYBRID], ids=components)
def test_scenario_67_and_b64_same_prefix_is_warm_and_so_is_the_same_prompt(spec):
    rows = new_rows(spec)
    prompt = tokens_of(spec, [1, 2, 3, 4, 5, 6], more=1)
    assert rows.run(prompt) == 0
    assert rows.run(prompt) == 6 * spec.page_size
    assert rows.run(prompt) == 6 * spec.page_size
    assert rows.run([*prompt[:-1], 3, 3, 3]) == 6 * spec.page_size
    # Of a branch inside, the first computes it again and leaves what the next needs.
    first, second, third = (
        tokens_of(spec, [1, 2, 3, 4, symbol], more=1) for symbol in (7, 8, 9)
    )
    rows.run(first)
    rows.run(second)
    assert rows.run(third) == 4 * spec.page_size


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


def test_scenario_b51_halves_that_a_window_left_are_not_cached():
    spec = window(4, 8)
    rows = new_rows(spec)
    row = rows.start(tokens_of(spec, list(range(10))))
    assert row is not None
    rows.insert(row)
    start = spec.kept_start(spec.windows[0], 40)
    halves = [node.halves[0] for node in rows.cache.tree.path(row.tokens)]
    assert halves == [False] * start + [True] * (10 - start)
    # The window moves on: the row lets go of its holds, not of the cache's.
    assert rows.grow(row, [5] * 40)
    rows.check()
    rows.finish(row)
    rows.check()


@pytest.mark.parametrize("size", [1, 2, 16, 63, 64, 65, 128, 129])
def test_scenario_b52_a_page_longer_than_the_window(size):
    spec = window(64, size)
    rows = new_rows(spec)
    for prompt_len in (64, 127, 128, 129, 191, 320, 321):
        prompt = [prompt_len] * prompt_len
        rows.run(prompt)
        assert rows.run(prompt) == (prompt_len - 1) // 64 * 64
        assert rows.run([*prompt, 1]) == prompt_len // 64 * 64


def test_scenario_b59_a_checkpoint_that_was_not_written_is_not_kept():
    # The row knows which slots a step wrote, and hands in no others.
    rows = new_rows(GRID_64)
    prompt = tokens_of(GRID_64, [1, 2, 3], more=1)
    row = rows.start(prompt, has_checkpoints=False)
    assert row is not None
    done = rows.insert(row)
    assert not done.shares
    assert rows.cache.match(prompt).hit_len == 0
    row.checkpoints = {192: rows.pool.new_state()}
    rows.finish(row)
    assert rows.cache.match(prompt).hit_len == 192


@pytest.mark.parametrize(
    ("page_size", "grid"), [(1, 64), (16, 64), (48, 192), (64, 64), (128, 128)]
)
def test_scenario_b63_the_grid_is_a_common_multiple(page_size, grid):
    spec = PrefixSpec(page_size=page_size, owners=("mla",), states=("kda",))
    assert spec.grid == grid
    rows = new_rows(spec)
    prompt = list(range(500))
    rows.run(prompt)
    assert rows.run(prompt) == 499 // grid * grid


def test_scenario_b65_a_node_without_its_state_keeps_its_pages():
    rows = new_rows(GRID_64, states=5)
    prompt = tokens_of(GRID_64, [1, 2, 3, 4], more=1)
    rows.run(prompt[: 2 * 64 + 1])
    rows.run(prompt)
    assert rows.cache.held_pages() == {"mla": 4, "kda": 2}
    dropped = rows.cache.evict(rows.pool.fits({"kda": 4}))
    assert dropped is not None
    assert dropped.num_pages == {"kda": 1}
    rows.pool.drop(dropped)
    match = rows.cache.match([*prompt, 1])
    assert match.full_len == 256
    assert match.hit_len in (128, 256)


def test_scenario_b66_a_prompt_in_chunks_is_kept_chunk_by_chunk():
    rows = new_rows(GRID_64)
    prompt = tokens_of(GRID_64, [1, 2, 3, 4], more=3)
    rows.run(prompt[:65])
    row = rows.start(prompt[:100], has_checkpoints=False)
    assert row is not None
    assert row.hit_len == 64
    for stop in (130, 200, len(prompt)):
        assert rows.grow(row, prompt[len(row.tokens) : stop])
        end = stop // 64 * 64
        row.checkpoints[end] = rows.pool.new_state()
        rows.insert(row)
        rows.check()
        assert rows.cache.match(prompt[: end + 1]).hit_len == end
    rows.finish(row)
    rows.check()


@pytest.mark.parametrize("spec", [WINDOW, STATES, HYBRID], ids=components)
def test_scenario_b67_nothing_is_kept_that_a_match_would_reject(spec):
    rows = new_rows(spec)
    row = rows.start(tokens_of(spec, range(8)), has_checkpoints=False)
    assert row is not None
    # The caller lost the halves or the state that the end of the prefix needs.
    lost = [10**6] * len(spec.windows)
    kept, row.lease.half_starts = row.lease.half_starts, lost
    before = rows.cache.held_pages()
    done = rows.cache.insert(row.lease, row.tokens, row.pages)
    assert not any((done.shares, done.dropped.num_pages, done.unused_states))
    assert rows.cache.held_pages() == before
    row.lease.half_starts = kept
    rows.finish(row, is_kept=False)
    rows.check()


def test_scenario_b68_the_last_checkpoint_leaves_a_token_to_compute():
    ends = {n: GRID_64.last_end(n) for n in (1, 64, 65, 128, 129, 500, 512)}
    assert ends == {1: 0, 64: 0, 65: 64, 128: 64, 129: 128, 500: 448, 512: 448}


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
