"""Several decode steps in one dispatch give the tokens of one at a time."""

import dataclasses

import pytest

from tests.engine_runs import CONFIG, all_greedy, engine, plain_tokens, prompts, run_all

PASSES = dataclasses.replace(CONFIG, decode_steps=5)
# Small enough that requests lose their pages, or that others are moved.
BYTES = {"kimi_linear": 93_000, "gemma3": 297_000}


@pytest.mark.parametrize("family", ["kimi_linear", "gemma3"])
def test_passes_change_no_token(family):
    run = engine(family, pool_bytes=BYTES[family], config=PASSES)
    found = run_all(run, prompts(family), all_greedy())
    assert found == plain_tokens(family)
    stats = run.stats()
    assert stats.num_retractions + stats.num_moves > 0
    assert stats.num_steps < sum(map(len, found)) / 5


def test_a_row_that_stops_between_passes():
    run = engine("kimi_linear", pool_bytes=BYTES["kimi_linear"], config=PASSES)
    expected = plain_tokens("kimi_linear")
    params = all_greedy()
    stops = [tokens[7] for tokens in expected]
    params = [
        dataclasses.replace(param, stop_token_ids=(stop,), temperature=0.0)
        for param, stop in zip(params, stops, strict=True)
    ]
    found = run_all(run, prompts("kimi_linear"), params)
    assert found == [
        tokens[: tokens.index(stop) + 1]
        for tokens, stop in zip(expected, stops, strict=True)
    ]
