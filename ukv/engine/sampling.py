"""Sampling on the device, row by row, each row with its own parameters and seed.

The key of a token is ``fold_in(key(seed), position)``, so what a row draws depends on
nothing but its own logits, seed and position: not on its batch, nor on how often the
request was retracted. Thresholds are found by a search over the bits of the logits
instead of a sort: eight passes that each test sixteen candidates.
"""

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from ukv.engine.request import SamplingParams
from ukv.pytree import Leaf

NO_TOKEN = 2**31 - 1
"""Pads lists of token ids; no vocabulary is as large."""

NUM_SCALARS = 5
BITS_PER_PASS = 4


class SamplingRows(flax.struct.PyTreeNode):
    """The parameters of each row.

    Attributes:
      temperature: float32 ``[rows]``; 0 is greedy.
      top_k: int32 ``[rows]``; ``NO_TOKEN`` keeps all.
      top_p: float32 ``[rows]``.
      min_p: float32 ``[rows]``.
      seed: int32 ``[rows]``.
      stop_ids: int32 ``[rows, max_stop_tokens]``, padded with ``NO_TOKEN``.
    """

    temperature: Leaf
    top_k: Leaf
    top_p: Leaf
    min_p: Leaf
    seed: Leaf
    stop_ids: Leaf


class Sampled(flax.struct.PyTreeNode):
    """What each row drew.

    Attributes:
      tokens: int32 ``[rows]``.
      logprobs: float32 ``[rows]``, under the model's own distribution.
      is_stop: bool ``[rows]``, whether the token is one of the row's stop tokens.
      is_finite: bool ``[rows]``, whether every logit is a number.
    """

    tokens: Leaf
    logprobs: Leaf
    is_stop: Leaf
    is_finite: Leaf


def pack_params(
    params: Sequence[SamplingParams], seeds: Sequence[int], max_stop_tokens: int
) -> np.ndarray:
    """Return parameters as int32 ``[rows, NUM_SCALARS + max_stop_tokens]``.

    Floats keep their bits, so that one array carries all.
    """
    packed = np.full((len(params), NUM_SCALARS + max_stop_tokens), NO_TOKEN, np.int32)
    for row, param, seed in zip(packed, params, seeds, strict=True):
        floats = np.array([param.temperature, param.top_p, param.min_p], np.float32)
        row[:3] = floats.view(np.int32)
        row[3] = NO_TOKEN if param.top_k is None else min(param.top_k, NO_TOKEN)
        row[4] = seed
        row[NUM_SCALARS : NUM_SCALARS + len(param.stop_token_ids)] = (
            param.stop_token_ids
        )
    return packed


def unpack_params(packed: Int32[Array, "rows width"]) -> SamplingRows:
    """Return the parameters that ``pack_params`` packed."""
    floats = jax.lax.bitcast_convert_type(packed[:, :3], jnp.float32)
    return SamplingRows(
        temperature=floats[:, 0],
        top_p=floats[:, 1],
        min_p=floats[:, 2],
        top_k=packed[:, 3],
        seed=packed[:, 4],
        stop_ids=packed[:, NUM_SCALARS:],
    )


def _ordered_bits(values: Float32[Array, "rows vocab"]) -> UInt32[Array, "rows vocab"]:
    """Return integers that compare as the floats do."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    sign = jnp.uint32(0x80000000)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _threshold(
    keys: UInt32[Array, "rows vocab"],
    weights: Float32[Array, "rows vocab"],
    target: Float32[Array, " rows"],
) -> UInt32[Array, "rows 1"]:
    """Return the largest t for which keys of t and more weigh at least ``target``.

    0, which keeps everything, where all keys together weigh less.
    """
    found = jnp.zeros((keys.shape[0], 1), jnp.uint32)
    digits = jnp.arange(1, 1 << BITS_PER_PASS, dtype=jnp.uint32)
    for shift in range(32 - BITS_PER_PASS, -1, -BITS_PER_PASS):
        candidates = found | (digits << shift)[None, :]
        is_above = keys[:, None, :] >= candidates[:, :, None]
        mass = jnp.sum(jnp.where(is_above, weights[:, None, :], 0.0), axis=-1)
        count = jnp.sum(mass >= target[:, None], axis=1, dtype=jnp.uint32)
        found = found | (count << shift)[:, None]
    return found


def kept_tokens(
    scaled: Float32[Array, "rows vocab"], rows: SamplingRows
) -> Bool[Array, "rows vocab"]:
    """Return which tokens the filters of each row leave.

    Args:
      scaled: Logits divided by the temperature.
      rows: The parameters.
    """
    keys = _ordered_bits(scaled)
    vocab = scaled.shape[1]
    top_k = jnp.minimum(rows.top_k, vocab).astype(jnp.float32)
    keep = keys >= _threshold(keys, jnp.ones_like(scaled), top_k)
    probabilities = jax.nn.softmax(jnp.where(keep, scaled, -jnp.inf), axis=-1)
    border = _threshold(keys, probabilities, rows.top_p)
    keep &= (keys >= border) | (rows.top_p >= 1.0)[:, None]
    largest = jnp.max(scaled, axis=-1, keepdims=True)
    return keep & (scaled >= largest + jnp.log(rows.min_p)[:, None])


def _drawn(
    logits: Float32[Array, "rows vocab"],
    rows: SamplingRows,
    positions: Int32[Array, " rows"],
) -> Int32[Array, " rows"]:
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    scaled = logits / temperature[:, None]
    keep = kept_tokens(scaled, rows)

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, (logits.shape[1],), jnp.float32)

    noisy = scaled + jax.vmap(noise)(rows.seed, positions)
    return jnp.argmax(jnp.where(keep, noisy, -jnp.inf), axis=-1).astype(jnp.int32)


def sample(
    logits: Float32[Array, "rows vocab"],
    rows: SamplingRows,
    positions: Int32[Array, " rows"],
) -> Sampled:
    """Choose one token for each row.

    Args:
      logits: Of the last token of each row.
      rows: The parameters of each row.
      positions: Place of the new token in its sequence.
    """
    is_greedy = rows.temperature <= 0
    largest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # A batch that is all greedy pays for neither filters nor noise.
    tokens = jax.lax.cond(
        jnp.all(is_greedy),
        lambda: largest,
        lambda: jnp.where(is_greedy, largest, _drawn(logits, rows, positions)),
    )
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return Sampled(
        tokens=tokens,
        logprobs=chosen - jax.nn.logsumexp(logits, axis=-1),
        is_stop=jnp.any(rows.stop_ids == tokens[:, None], axis=-1),
        is_finite=jnp.all(jnp.isfinite(logits), axis=-1),
    )
