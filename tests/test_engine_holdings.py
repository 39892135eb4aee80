"""The scheduler with a prefix cache, over a device that is played on the host."""

import random

import pytest

from tests.played_device import PlayedEngine
from tests.tagged_pools import full_spec, latent_spec, state_spec, window_spec
from ukv.engine import EngineConfig, FinishReason
from ukv.engine.ledger import Ledger
from ukv.engine.prefix_spec import PrefixSpec
from ukv.engine.scheduler import Scheduler
from ukv.layout import packed_bytes, static_layout, unified_layout

SPECS = {
    "pages": [full_spec()],
    "states": [latent_spec(page_size=32), state_spec()],
    "window": [full_spec(), window_spec(window_size=7)],
    "hybrid": [full_spec(page_size=32), state_spec(), window_spec(page_size=32)],
}
# Little more than the longest request holds.
PAGES = {
    "pages": {"full": 12},
    "states": {"latent": 22, "state": 5},
    "window": {"full": 11, "window": 9},
    "hybrid": {"full": 22, "state": 5, "window": 17},
}


def layout_of(kind, is_unified=True, pages=None):
    specs, pages = SPECS[kind], pages or PAGES[kind]
    if is_unified:
        return unified_layout(specs, pool_bytes=packed_bytes(specs, pages))
    return static_layout(specs, num_pages=pages)


def played(kind, *, is_unified=True, pages=None, vocab_size=150, **fields):
    layout = layout_of(kind, is_unified, pages)
    spec = PrefixSpec.of(layout)
    config = EngineConfig(
        page_size=spec.page_size,
        max_rows=4,
        max_kv_len=10 * max(spec.grid, 8),
        max_step_tokens=3 * spec.grid,
        **fields,
    )
    return PlayedEngine(Scheduler(config, Ledger(layout, spec)), vocab_size=vocab_size)


# Checks of annotations would take three quarters of the time.
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("is_unified", [True, False], ids=["unified", "static"])
@pytest.mark.parametrize("decode_steps", [1, 3])
def test_rows_begin_with_what_was_computed_for_the_same_tokens(
    kind, is_unified, decode_steps
):
    num_hit = num_retractions = num_finished = 0
    for seed in range(2):
        rng = random.Random(seed)
        run = played(
            kind,
            is_unified=is_unified,
            decode_steps=decode_steps,
            vocab_size=(9, 10**6)[seed],  # few or many tokens before a row stops
        )
        grid = PrefixSpec.of(run.scheduler.ledger.layout).grid
        roots = [[rng.randrange(9) for _ in range(4 * grid)] for _ in range(3)]
        added = []
        for name in range(16):
            root = rng.choice(roots)
            more = [rng.randrange(9) for _ in range(rng.randrange(grid))]
            prompt = root[: rng.randrange(1, len(root))] + more
            if added and rng.random() < 0.2:
                old = rng.choice(added)
                prompt = old.tokens(0, old.target_len)[: 5 * grid]
            num_new = rng.randint(grid, 4 * grid)
            added.append(run.add(name, prompt, num_new, rng.choice([0, 0, 1])))
            for _ in range(rng.randrange(4)):
                run.step()
            victim = rng.choice(added)
            if rng.random() < 0.15 and victim.finish_reason is None:
                reason = rng.choice([FinishReason.ABORT, FinishReason.ERROR])
                run.scheduler.finish(victim, reason)
        # Together they grow past the pool, so one gives its pages to the other.
        added += [run.add(name, [name], 8 * grid) for name in range(20, 23)]
        run.close()
        assert all(sequence.finish_reason for sequence in added)
        num_finished += len(run.ended)
        num_hit += run.scheduler.holdings.num_hit
        num_retractions += run.scheduler.num_retractions
    assert num_finished > 20
    assert num_hit
    assert num_retractions


@pytest.mark.parametrize("decode_steps", [1, 3])
@pytest.mark.parametrize(("vocab_size", "num_new"), [(150, 2), (1, 8)])
def test_the_last_token_of_a_request_is_not_in_its_pages(
    vocab_size, num_new, decode_steps
):
    # With one token in the vocabulary, the stop token, a row stops at once, while the
    # host plans on. Either way 12 tokens are known, and only 11 were fed.
    run = played("pages", vocab_size=vocab_size, decode_steps=decode_steps)
    first = run.add("first", [5] * (12 - (2 if vocab_size > 1 else 1)), num_new)
    run.run()
    known = first.tokens(0, first.target_len)[:12]
    assert len(first.generated) == (2 if vocab_size > 1 else 1)
    run.add("second", [*known, 5, 5, 5], 1)
    run.run()
    assert run.scheduler.holdings.num_hit == 8
    run.close()


@pytest.mark.parametrize("kind", SPECS)
def test_most_of_a_common_start_is_found_while_rows_overlap(kind):
    run = played(kind, vocab_size=10**6)
    grid = PrefixSpec.of(run.scheduler.ledger.layout).grid
    start = [1] * (4 * grid)
    for name in range(24):
        run.add(name, [*start, *[name + 2] * 3], grid)
    run.close()
    # The first rows begin before anything is cached.
    holdings = run.scheduler.holdings
    assert holdings.num_hit > 0.6 * holdings.num_looked_up
