"""Reported failures of other prefix caches, replayed on ours; named by their numbers.

What needs an engine is in ``test_scenarios_engine_prefix.py``: B23, B29, B45, B49, B57,
B60, B61, B70.
"""

import pytest

from tests.test_prefix_cache import FULL, HYBRID, STATES, WINDOW, new_rows, tokens_of
from ukv.engine.prefix_spec import PrefixSpec, WindowHalf

GRID_64 = PrefixSpec(page_size=64, owners=("mla",), states=("kda",))


def window(page_size, size):
    half = WindowHalf(name="swa", size=size)
    return PrefixSpec(page_size=page_size, owners=("full",), windows=(half,))


def components(spec):
    """For the names of test cases."""
    names = [*spec.owners, *(half.name for half in spec.windows), *spec.states]
    return "-".join(names)


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
