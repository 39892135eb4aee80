"""Sampling against NumPy: which tokens stay, how often each is drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ukv.engine import SamplingParams
from ukv.engine.sampling import kept_tokens, pack_params, sample, unpack_params

VOCAB = 61


def kept_by_oracle(logits, temperature, top_k, top_p, min_p):
    """Return which tokens stay, in float64: sort, cut, renormalise, cut again."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    keep = np.zeros(len(scaled), bool)
    keep[order[:top_k]] = True
    weights = np.exp(scaled - scaled.max()) * keep
    weights /= weights.sum()
    before = np.cumsum(weights[order]) - weights[order]
    if top_p < 1:
        keep[order[before >= top_p]] = False
    return keep & (np.exp(scaled - scaled.max()) >= min_p)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (None, 1.0, 0.0),
        (1, 1.0, 0.0),
        (7, 1.0, 0.0),
        (1000, 1.0, 0.0),
        (None, 0.6, 0.0),
        (None, 0.01, 0.0),
        (None, 1.0, 0.2),
        (20, 0.8, 0.05),
    ],
)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_filters(top_k, top_p, min_p, temperature):
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(5, VOCAB), scale=3).astype(np.float32)
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    rows = unpack_params(jnp.asarray(pack_params([params] * 5, range(5), 2)))
    found = jax.jit(kept_tokens)(logits / np.float32(temperature), rows)
    for i in range(5):
        expected = kept_by_oracle(logits[i], temperature, top_k or VOCAB, top_p, min_p)
        np.testing.assert_array_equal(found[i], expected)


def draw(logits, params, seeds, positions):
    rows = unpack_params(jnp.asarray(pack_params(params, seeds, 2)))
    return jax.jit(sample)(
        jnp.asarray(logits, jnp.float32), rows, jnp.asarray(positions, jnp.int32)
    )


def test_frequencies_are_the_filtered_probabilities():
    count = 4000
    logits = np.linspace(0, 3, 8, dtype=np.float32)
    params = SamplingParams(temperature=1.5, top_k=5)
    drawn = draw(
        np.tile(logits, (count, 1)), [params] * count, [11] * count, range(count)
    )
    frequency = np.bincount(drawn.tokens, minlength=8) / count
    weights = np.exp(logits / 1.5) * (np.arange(8) >= 3)
    expected = weights / weights.sum()
    assert np.all(frequency[:3] == 0)
    # Four standard deviations of a share.
    assert np.max(np.abs(frequency - expected)) < 4 * np.sqrt(0.25 / count)


def test_a_row_draws_the_same_in_any_batch():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(9, VOCAB)).astype(np.float32)
    params = [SamplingParams(temperature=0.5 * i, top_p=0.9) for i in range(9)]
    together = draw(logits, params, range(9), range(100, 109))
    order = [4, 8, 1]
    some = draw(
        logits[order], [params[i] for i in order], order, [100 + i for i in order]
    )
    np.testing.assert_array_equal(some.tokens, np.asarray(together.tokens)[order])
    assert together.tokens[0] == np.argmax(logits[0])
    moved = draw(logits, params, range(9), range(200, 209))
    assert np.any(np.asarray(moved.tokens) != np.asarray(together.tokens))


def test_stops_logprobs_and_numbers_that_are_none():
    logits = np.zeros((3, VOCAB), np.float32)
    logits[0, 5] = logits[1, 6] = 2.0
    logits[2, 0] = np.nan
    params = SamplingParams(stop_token_ids=(5,))
    drawn = draw(logits, [params] * 3, [0] * 3, [0] * 3)
    assert np.asarray(drawn.is_stop).tolist()[:2] == [True, False]
    assert np.asarray(drawn.is_finite).tolist() == [True, True, False]
    expected = 2 - np.log(np.exp(2) + VOCAB - 1)
    np.testing.assert_allclose(drawn.logprobs[0], expected, rtol=1e-5)
