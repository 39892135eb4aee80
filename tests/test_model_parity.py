"""Every family gives the logits of its reference, however its tokens are fed."""

import functools as ft

import numpy as np
import pytest

from models.registry import load
from tests.golden import GOLDENS, Golden, worst_row_error
from tests.model_runner import ModelRunner

FAMILIES = [
    "llama",
    "qwen3",
    "gemma3",
    "gpt_oss",
    "gpt_oss_mxfp4",
    "qwen3_next",
    "kimi_linear",
    "deepseek_v2",
    "deepseek_v3",
]
# Where a family keeps states in the pool.
STATES = {"qwen3_next": "gdn", "kimi_linear": "kda"}
PROMPTS = range(4)
# One program for prefill and chunks.
BUCKET = {"num_tokens": 256, "max_query_len": 256}
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


def prefill_and_decode_error(family):
    """Return the worst error of a logit row, over one prefill and all decode steps."""
    expected = golden(family)
    run = runner(family, len(PROMPTS))
    logits = run.step([expected.prompt(i) for i in PROMPTS], **BUCKET)
    errors = [worst_row_error(logits[i], expected.logits(i)) for i in PROMPTS]
    if family in STATES:
        errors += state_errors(run, family, "prompt{i}.layer")
    for j in range(len(expected.decode_tokens(0))):
        logits = run.step([expected.decode_tokens(i)[j : j + 1] for i in PROMPTS])
        for i in PROMPTS:
            wanted = expected.decode_logits(i)[j : j + 1]
            errors.append(worst_row_error(logits[i], wanted))
    if family in STATES:
        errors += state_errors(run, family, "prompt{i}.decoded.layer")
    return np.max(errors)


def state_errors(run, family, stem, prompts=PROMPTS):
    """Return the error of every state and window, each as one row."""
    tensors, name = golden(family).tensors, STATES[family]
    numbers = sorted(
        int(key.removeprefix(stem.format(i=0)).removesuffix(".state"))
        for key in tensors
        if key.startswith(stem.format(i=0)) and key.endswith(".state")
    )
    assert len(numbers) == run.layout.sub_pool(name).spec.num_layers
    errors = []
    for layer, number in enumerate(numbers):
        # The pool has the value channels first.
        states = run.states(name, layer=layer, part="recurrent").swapaxes(2, 3)
        windows = run.states(name, layer=layer, part="conv")
        for row, i in enumerate(prompts):
            key = f"{stem.format(i=i)}{number}"
            if f"{key}.state" in tensors:
                for found, part in ((states[row], "state"), (windows[row], "conv")):
                    wanted = tensors[f"{key}.{part}"]
                    assert found.shape == wanted.shape
                    errors.append(
                        worst_row_error(found.reshape(1, -1), wanted.reshape(1, -1))
                    )
    return errors


def chunked_error(family, take, *, prompts=PROMPTS, bucket=BUCKET):
    """Return the worst error of a logit row or state when prompts come in chunks.

    Args:
      family: The golden.
      take: Called for each row and step, returns the length of its next chunk.
      prompts: Which prompts.
      bucket: Of each step.
    """
    expected = golden(family)
    run = runner(family, len(prompts))
    left = [expected.prompt(i) for i in prompts]
    found = [[] for _ in prompts]
    while any(len(row) for row in left):
        lens = [min(len(row), take()) for row in left]
        logits = run.step(
            [row[:n] for row, n in zip(left, lens, strict=True)], **bucket
        )
        left = [row[n:] for row, n in zip(left, lens, strict=True)]
        for rows, new in zip(found, logits, strict=True):
            rows.append(new)
    errors = [
        worst_row_error(np.concatenate(rows), expected.logits(i))
        for i, rows in zip(prompts, found, strict=True)
    ]
    if family in STATES:
        errors += state_errors(run, family, "prompt{i}.layer", prompts)
    return np.max(errors)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode(family):
    assert prefill_and_decode_error(family) < BOUND


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [0, 1])
def test_chunked_prefill_at_random_split_points(family, seed):
    rng = np.random.default_rng(seed)
    # Rows of one token beside chunks: a mixed batch.
    assert chunked_error(family, lambda: int(rng.choice([1, 7, 30, 50]))) < BOUND
