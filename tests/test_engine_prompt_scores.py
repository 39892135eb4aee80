"""Scores of prompts: the model's own log-probabilities, whoever shares the steps."""

import dataclasses
import functools as ft

import jax
import numpy as np
import pytest

from tests.engine_runs import CONFIG, STATIC_PAGES, drain, engine, greedy, loaded
from tests.model_runner import ModelRunner
from ukv.engine import RequestError

SCORING = dataclasses.replace(CONFIG, scores_prompts=True)
LENGTHS, FIRST = (131, 9, 70, 33, 47), (1, 8, 50, 20, 1)


@ft.cache
def prompts():
    vocab_size = loaded("kimi_linear").model.vocab_size
    rng = np.random.default_rng(5)
    return [rng.integers(vocab_size, size=length).tolist() for length in LENGTHS]


@ft.cache
def expected_scores():
    """Score each prompt in one go, without an engine."""
    model = loaded("kimi_linear")
    run = ModelRunner(model.model, model.weights, num_rows=len(LENGTHS), max_tokens=192)
    found = []
    wanted = [np.array(prompt) for prompt in prompts()]
    for prompt, logits in zip(wanted, run.step(wanted), strict=True):
        logprobs = np.asarray(jax.nn.log_softmax(logits, axis=-1))
        best = np.argmax(logits, axis=-1)
        found.append(
            [
                (row[t], b == t)
                for row, b, t in zip(logprobs, best, prompt[1:], strict=False)
            ]
        )
    return found


@pytest.mark.parametrize("is_unified", [True, False])
def test_scores_are_those_of_the_model_alone(is_unified):
    pages = None if is_unified else STATIC_PAGES["kimi_linear"]
    config = dataclasses.replace(SCORING, is_unified=is_unified, static_pages=pages)
    run = engine("kimi_linear", config=config)
    wanted = [
        run.add_request(prompt, greedy(48, scores_from=first))
        for prompt, first in zip(prompts(), FIRST, strict=True)
    ]
    found = {}
    while run.has_work:
        for output in run.step():
            if output.prompt_scores:
                assert output.request_id not in found
                found[output.request_id] = output.prompt_scores
        run.verify()
    assert run.stats().num_retractions > 0
    for name, all_scores, first in zip(wanted, expected_scores(), FIRST, strict=True):
        expected = all_scores[first - 1 :]
        scores = found[name]
        assert [score.is_greedy for score in scores] == [best for _, best in expected]
        np.testing.assert_allclose(
            [score.logprob for score in scores],
            [logprob for logprob, _ in expected],
            rtol=2e-5,
            atol=2e-5,
        )


def test_the_greedy_continuation_is_scored_as_greedy():
    prompt = list(range(20))
    first = engine("kimi_linear", config=SCORING)
    first.add_request(prompt, greedy(12, logprobs=True))
    tokens, logprobs = [], []
    while first.has_work:
        for output in first.step():
            tokens += output.new_tokens
            logprobs += output.new_logprobs
    assert len(tokens) == 12

    second = engine("kimi_linear", config=SCORING)
    second.add_request([*prompt, *tokens], greedy(1, scores_from=len(prompt)))
    (scores,) = [o.prompt_scores for o in second.generate([[1]]) if o.prompt_scores]
    assert all(score.is_greedy for score in scores)
    np.testing.assert_allclose([s.logprob for s in scores], logprobs, atol=2e-5)


@pytest.mark.parametrize(
    ("config", "first", "message"),
    [
        (CONFIG, 2, "built with scores_prompts=True, which is False"),
        (SCORING, 5, "scores_from=5 of 5 tokens"),
    ],
)
def test_scores_that_are_not_to_be_had(config, first, message):
    run = engine("kimi_linear", config=config)
    with pytest.raises(RequestError, match=message):
        run.add_request([1] * 5, greedy(1, scores_from=first))


def test_other_requests_have_none():
    run = engine("kimi_linear", config=SCORING)
    run.add_request([1, 2, 3], greedy(2))
    tokens = {}
    drain(run, tokens)
    assert not any(output.prompt_scores for output in run.generate([[4, 5]]))
