"""Reported failures of engines with a prefix cache, replayed on ours by their numbers.

Those that are about bits run a model; those about who waits for what run the scheduler
over a device that is played on the host and knows what every page was computed from.
"""

import dataclasses
import functools as ft

import numpy as np
import pytest

from tests.engine_runs import CONFIG, drain, engine, greedy, loaded, require_empty
from tests.tagged_pools import read_pages
from tests.test_engine_holdings import played
from ukv.engine import FinishReason
from ukv.engine.plan import Checkpoint, Reuse
from ukv.errors import BudgetError

FAMILY = "hybrid"  # pages, windows and states
POOL_BYTES = 1_500_000
BUCKETS = dataclasses.replace(CONFIG, decode_buckets=(1, 4))
COLD = dataclasses.replace(BUCKETS, prefix_cache=False)
GRID = 64


def tokens_of(seed, length):
    rng = np.random.default_rng(seed)
    return rng.integers(loaded(FAMILY).model.vocab_size, size=length).tolist()


def new_engine(config=BUCKETS):
    return engine(FAMILY, pool_bytes=POOL_BYTES, config=config)


def answers(run, wanted, num_new=6):
    """Return what each of some prompts draws, together in a batch."""
    names = [run.add_request(prompt, greedy(num_new)) for prompt in wanted]
    tokens = {}
    drain(run, tokens)
    return [tokens[name] for name in names]


@ft.cache
def shared_prompts():
    """Prompts with a common start, as of a benchmark with examples."""
    start = tokens_of(0, GRID + 20)
    return [[*start, *tokens_of(seed, 9 + 7 * seed)] for seed in range(1, 5)]


@ft.cache
def cold_answers():
    run = new_engine(COLD)
    return [answers(run, [prompt])[0] for prompt in shared_prompts()]


def test_scenario_b23_smaller_batches_use_their_own_names():
    # A program of one row runs between those of four, after hits into other rows.
    run = new_engine()
    for prompt, expected in zip(shared_prompts(), cold_answers(), strict=True):
        assert answers(run, [prompt]) == [expected]
    assert answers(run, shared_prompts()) == cold_answers()
    for prompt, expected in zip(shared_prompts(), cold_answers(), strict=True):
        assert answers(run, [prompt]) == [expected]
    assert run.stats().prefix_hit_tokens > 8 * GRID


def test_scenario_b29_the_second_run_of_a_set_is_as_good_as_the_first():
    run = new_engine()
    first = answers(run, shared_prompts())
    hit = run.stats().prefix_hit_tokens
    second = answers(run, shared_prompts())
    assert first == second == cold_answers()
    assert run.stats().prefix_hit_tokens - hit == 4 * GRID
    require_empty(run)


def test_scenario_b60_a_cached_state_outlives_the_rows_that_use_it():
    run = new_engine()
    prompt, expected = shared_prompts()[2], cold_answers()[2]
    (first,) = answers(run, [prompt], 30)
    before = cached_states(run)
    assert before
    # Rows write their own copies, a hundred tokens past the checkpoint.
    for _ in range(2):
        assert answers(run, [prompt], 30) == [first]
    assert first[:6] == expected
    after = cached_states(run)
    assert {name: after[name] for name in before} == before


def cached_states(run):
    """Return the bytes of every cached state, by name."""
    state, cache = run._device.state, run.scheduler.holdings.cache
    cached = np.asarray(state.cached["state"].ids)
    names = [node.state[0] for node in cache.tree.nodes() if node.state]
    slots = [int(cached[name]) for name in names]
    pages = read_pages(state.pool, "state", slots)
    return {name: pages[slot] for name, slot in zip(names, slots, strict=True)}


def test_scenario_b70_prompts_with_one_start_at_the_same_time():
    run = new_engine()
    assert answers(run, [shared_prompts()[0]]) == cold_answers()[:1]
    tokens, names = {}, []
    # They arrive while others that share pages with them are at any stage.
    for prompt in [*shared_prompts(), *shared_prompts()]:
        names.append(run.add_request(prompt, greedy(6)))
        for output in run.step():
            tokens.setdefault(output.request_id, []).extend(output.new_tokens)
        run.verify()
    drain(run, tokens)
    assert [tokens[name] for name in names] == cold_answers() * 2
    assert run.stats().prefix_hit_tokens >= 7 * GRID


def test_scenario_b45_a_hit_without_room_for_a_copy_of_its_state_starts_cold():
    # One slot, and the cached state is in it.
    run = played("states", is_unified=False, pages={"latent": 14, "state": 1})
    prompt = [1] * (2 * GRID + 5)
    for name in range(3):
        sequence = run.add(name, prompt, 2)
        run.run()
        assert sequence.finish_reason is not None
    assert run.scheduler.holdings.num_hit == 0
    run.close()
    # With another one the same prompt hits.
    run = played("states", is_unified=False, pages={"latent": 14, "state": 2})
    for name in range(3):
        run.add(name, prompt, 2)
        run.run()
    assert run.scheduler.holdings.num_hit == 2 * 2 * GRID
    run.close()


@pytest.mark.parametrize("is_unified", [True, False])
def test_scenario_b49_retraction_under_full_windows_goes_on(is_unified):
    # Halves for hardly more than one row with its chunk.
    pages = {"full": 40, "window": 9}
    run = played("window", is_unified=is_unified, pages=pages)
    sequences = [run.add(name, [name] * 19, 20) for name in range(1, 7)]
    while run.flying or not run.scheduler.is_idle:
        plan = run.step()
        assert plan is None or all(chunk.query_len > 0 for chunk in plan.chunks)
        assert run.num_steps < 600
    assert all(sequence.finish_reason for sequence in sequences)
    run.close()


def test_scenario_b57_a_request_near_the_ceiling_runs_beside_what_is_cached():
    run = played("pages", is_unified=False, pages={"full": 12})
    # The cache has most of the 12 pages; then a request needs every one of them.
    for name in range(1, 4):
        run.add(name, [name] * 12, 4)
        run.run()
    assert run.scheduler.holdings.evictable_pages() == {"full": 9}
    large = run.add("large", [9] * 33, 16)
    run.run()
    assert large.finish_reason is not None
    assert large.num_retractions == 0
    with pytest.raises(BudgetError, match="'larger' can never run"):
        run.add("larger", [9] * 33, 17)
    # It hits its own prefix, though the pages for the rest have to be evicted.
    again = run.add("again", [9] * 33, 16)
    run.run()
    assert again.finish_reason is not None
    assert run.scheduler.holdings.num_hit == 32
    run.close()


def test_scenario_b61_a_state_is_copied_after_the_step_that_writes_it():
    run = played("states", pages={"latent": 20, "state": 6})
    sequence = run.add("a", [1] * (2 * GRID + 9), 3)
    plans = []
    while run.flying or not run.scheduler.is_idle:
        plans.append(run.step())
    # The chunk that ends at the checkpoint, and the copy before the row goes on.
    (at,) = [
        i
        for i, plan in enumerate(plans)
        if plan and any(isinstance(action, Checkpoint) for action in plan.actions)
    ]
    (chunk,) = plans[at - 1].chunks
    assert chunk.context_len + chunk.query_len == 2 * GRID
    (chunk,) = plans[at].chunks
    assert (chunk.sequence, chunk.context_len) == (sequence, 2 * GRID)
    run.close()


def test_scenario_61_a_branch_without_a_state_leaves_one_for_the_next():
    run = played("states", pages={"latent": 30, "state": 6})
    start = [1] * (GRID + 40)
    hits = []
    for name in range(2, 5):
        run.add(name, [*start, *[name] * (2 * GRID)], 2)
        run.run()
        hits.append(run.scheduler.holdings.num_hit - sum(hits))
    assert hits == [0, 0, GRID]
    run.close()


def test_scenario_61_the_next_hits_while_the_first_still_runs():
    # The first row uses its pages of the start, so nobody else's take their place.
    # A state belongs to the tokens before it, so the second one's is kept all the same.
    run = played("states", pages={"latent": 60, "state": 9}, vocab_size=10**6)
    start = [1] * (GRID + 40)
    first = run.add("first", [*start, *[2] * 2 * GRID], 5 * GRID)
    hits = []
    for name in range(3, 6):
        for _ in range(8):
            run.step()
        run.add(name, [*start, *[name] * (2 * GRID)], 2)
        for _ in range(8):
            run.step()
        hits.append(run.scheduler.holdings.num_hit - sum(hits))
    assert first.row is not None
    assert hits == [0, GRID, GRID]
    run.close()


def test_scenario_20_two_that_share_a_start_and_do_not_fit_together():
    run = played("pages", is_unified=False, pages={"full": 12})
    start = [1] * 16
    run.add("start", start, 1)
    run.run()
    first = run.add("first", [*start, *[2] * 12], 12)
    second = run.add("second", [*start, *[3] * 12], 12)
    run.run()
    assert run.ended[-2:] == ["first", "second"]
    assert first.hit_len == second.hit_len == 0  # it counts while there is a row
    assert run.scheduler.holdings.num_hit >= 32
    run.close()


def test_pages_that_rows_share_are_counted_once():
    run = played("pages", is_unified=False, pages={"full": 16})
    start = [1] * 32
    run.add("start", start, 1)
    run.run()
    # Alone each holds 11 pages of the 16; together 8 and three each.
    for name in (2, 3):
        run.add(name, [*start, *[name] * 4], 8)
    plan = run.step()
    assert len(plan.admissions) == 2
    assert sum(isinstance(action, Reuse) for action in plan.actions) == 16
    run.close()
    assert run.scheduler.num_retractions == 0


def test_what_a_failed_request_computed_is_not_used_again():
    run = played("pages")
    prompt = [1] * 30
    bad = run.add("bad", prompt, 15)
    for _ in range(4):
        run.step()
    run.scheduler.finish(bad, FinishReason.ERROR)
    run.run()
    assert not any(run.scheduler.holdings.evictable_pages().values())
    run.add("good", prompt, 3)
    run.run()
    assert run.scheduler.holdings.num_hit == 0
    run.close()
