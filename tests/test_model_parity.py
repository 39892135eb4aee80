"""Every family gives the logits of its reference, however its tokens are fed."""

import functools as ft

import numpy as np
import pytest

from models.registry import load
from tests.golden import GOLDENS, Golden, worst_row_error
from tests.model_runner import ModelRunner

FAMILIES = ["llama", "qwen3", "gemma3", "gpt_oss", "gpt_oss_mxfp4"]
PROMPTS = range(4)
BOUND = 1e-4


@ft.cache
def loaded(family):
    return load(GOLDENS / family, dtype="float32", progress=False)


@ft.cache
def golden(family):
    return Golden(family)


def runner(family, num_rows, max_tokens=160, **options):
    model = loaded(family)
    return ModelRunner(
        model.model, model.weights, num_rows=num_rows, max_tokens=max_tokens, **options
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode(family):
    expected = golden(family)
    run = runner(family, len(PROMPTS))
    logits = run.step([expected.prompt(i) for i in PROMPTS])
    for i in PROMPTS:
        assert worst_row_error(logits[i], expected.logits(i)) < BOUND
    for j in range(len(expected.decode_tokens(0))):
        logits = run.step([expected.decode_tokens(i)[j : j + 1] for i in PROMPTS])
        for i in PROMPTS:
            wanted = expected.decode_logits(i)[j : j + 1]
            assert worst_row_error(logits[i], wanted) < BOUND


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [0, 1])
def test_chunked_prefill_at_random_split_points(family, seed):
    expected = golden(family)
    rng = np.random.default_rng(seed)
    run = runner(family, len(PROMPTS))
    left = [expected.prompt(i) for i in PROMPTS]
    found = [[] for _ in PROMPTS]
    while any(len(row) for row in left):
        # Rows of one token beside chunks: a mixed batch.
        take = [min(len(row), int(rng.choice([1, 7, 30, 50]))) for row in left]
        logits = run.step(
            [row[:n] for row, n in zip(left, take, strict=True)], num_tokens=200
        )
        left = [row[n:] for row, n in zip(left, take, strict=True)]
        for rows, new in zip(found, logits, strict=True):
            rows.append(new)
    for i in PROMPTS:
        whole = np.concatenate(found[i])
        assert worst_row_error(whole, expected.logits(i)) < BOUND
