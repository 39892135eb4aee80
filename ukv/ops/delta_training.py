"""The gated delta rule over whole rows from empty states, made for training.

It computes what ``chunked_delta_rule`` does with a decay per channel, in an order that
suits a gradient of many rows: all that does not need the state is computed for all
chunks at once, and no decay of a pair of tokens is ever stored. The price is exactness
where tokens decay by much: exponents are differences of running sums.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from ukv.ops.delta_rule import (
    CHUNK_SIZE,
    SUB_BLOCK,
    decayed_products,
    solve_unit_lower,
    sums_after,
    sums_to,
)

MIN_LOG_DECAY = -40.0
"""Nothing is left of a state that decays so far; sums of it stay precise."""


def delta_rule_rows(
    q: Float32[Array, "rows time heads key_dim"],
    k: Float32[Array, "rows time heads key_dim"],
    v: Float32[Array, "rows time heads value_dim"],
    log_decay: Float32[Array, "rows time heads key_dim"],
    beta: Float32[Array, "rows time heads"],
) -> Float32[Array, "rows time heads value_dim"]:
    """Run whole rows. Differentiable; the backward pass recomputes all but the states.

    Args:
      q: Normalised and scaled queries.
      k: Normalised keys.
      v: Values.
      log_decay: Per key channel; below ``MIN_LOG_DECAY`` it makes no difference.
      beta: Writing strength.

    Source: Kimi Linear (arXiv:2510.26692), section 3: with ``T = (I + A)^-1`` of
      ``delta_rule_chunk``, a chunk writes ``T (beta v) - T (beta k d) S^T``.
    """
    rows, time, heads, value_dim = v.shape
    num_chunks = -(-time // CHUNK_SIZE)

    def cut(x: Array) -> Array:
        """Return ``[rows * chunks, heads, chunk, dim]``, padded behind."""
        x = jnp.pad(x, ((0, 0), (0, num_chunks * CHUNK_SIZE - time), (0, 0), (0, 0)))
        x = x.reshape(rows * num_chunks, CHUNK_SIZE, heads, x.shape[-1])
        return x.swapaxes(1, 2)

    def by_chunk(x: Array) -> Array:
        return x.reshape(rows, num_chunks, *x.shape[1:]).swapaxes(0, 1)

    parts = _state_free(*map(cut, (q, k, v, log_decay, beta[..., None])))

    def step(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        written, unwritten, q_k, q, k, decay = chunk
        written = written - jnp.einsum("rhik,rhvk->rhiv", unwritten, state)
        out = jnp.einsum("rhik,rhvk->rhiv", q, state)
        out = out + jnp.einsum("rhij,rhjv->rhiv", q_k, written)
        state = state * decay + jnp.einsum("rhiv,rhik->rhvk", written, k)
        return state, out

    state = jnp.zeros((rows, heads, value_dim, q.shape[-1]), jnp.float32)
    _, out = jax.lax.scan(step, state, tuple(map(by_chunk, parts)))
    # [chunks, rows, heads, chunk, dim] to rows of tokens.
    out = out.transpose(1, 0, 3, 2, 4).reshape(rows, -1, heads, value_dim)
    return out[:, :time]


@jax.checkpoint
def _state_free(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array
) -> tuple[Array, ...]:
    """Compute for each chunk, ``[chunks, heads, chunk, dim]``, all but its state."""
    log_decay = jnp.maximum(log_decay, MIN_LOG_DECAY)
    from_start = jnp.exp(sums_to(log_decay))
    to_end = jnp.exp(sums_after(log_decay))
    q_k, k_k = decayed_products((q, k), k, log_decay, _inside_products)
    right = jnp.concatenate([beta * v, beta * k * from_start], axis=-1)
    solved = solve_unit_lower(beta * k_k, right)
    written, unwritten = jnp.split(solved, [v.shape[-1]], axis=-1)
    decay = from_start[:, :, -1:, :]
    return written, unwritten, q_k, q * from_start, k * to_end, decay


def _inside_products(left: Array, right: Array, log_decay: Array) -> Array:
    """Return ``left_i . right_j`` with the decay between them, inside each block."""
    return _products(left, right, sums_to(log_decay))


@jax.custom_vjp
def _products(left: Array, right: Array, sums: Array) -> Array:
    """Return ``sum_d left[i, d] right[j, d] exp(sums[i, d] - sums[j, d])``, i >= j.

    Written so that each result is one reduction over what is computed on the way;
    automatic differentiation would store every pair's decay.

    Args:
      left: ``[lefts, ..., block, dim]``.
      right: ``[..., block, dim]``.
      sums: Running sums of the log decays, as ``right``.
    """
    decayed = right[..., None, :, :] * _decay(sums)
    return jnp.sum(left[..., :, None, :] * decayed[None], axis=-1)


def _decay(sums: Array) -> Array:
    """Return the decay from after token j to token i, ``[..., i, j, dim]``."""
    lower = jnp.asarray(np.tri(SUB_BLOCK, dtype=bool))[:, :, None]
    # The barrier keeps the users of the decay apart: each computes its own.
    sums = jax.lax.optimization_barrier(sums)
    between = sums[..., :, None, :] - sums[..., None, :, :]
    return jnp.where(lower, jnp.exp(jnp.minimum(between, 0.0)), 0.0)


def _products_forward(
    left: Array, right: Array, sums: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    return _products(left, right, sums), (left, right, sums)


def _products_backward(
    saved: tuple[Array, Array, Array], slope: Array
) -> tuple[Array, Array, Array]:
    left, right, sums = saved
    of_left = jnp.stack(
        [
            jnp.sum(slope[x][..., None] * right[..., None, :, :] * _decay(sums), -2)
            for x in range(left.shape[0])
        ]
    )
    pulled = jnp.sum(slope[..., None] * left[..., :, None, :], axis=0)
    of_right = jnp.sum(pulled * _decay(sums), axis=-3)
    # A sum enters with its own sign as token i and with the other as token j.
    of_sums = jnp.sum(left * of_left, axis=0) - right * of_right
    return of_left, of_right, of_sums


_products.defvjp(_products_forward, _products_backward)
