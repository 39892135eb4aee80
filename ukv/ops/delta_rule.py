"""The gated delta rule as array maths: one recurrence in two forms.

Per head, with the state ``S`` ``[value_dim, key_dim]`` (V-first), for each token:

    S <- S * exp(log_decay)                  along the key channels
    S <- S + outer(beta * (v - S k), k)
    o  = S q

KDA has one log decay per key channel, Gated DeltaNet one per head: the last axis of
``log_decay`` is ``key_dim`` or 1. Queries and keys arrive as :func:`normalize_qk`
leaves them. Everything is float32, products included; a log decay is at most 0.

Both forms take padded rows with their lengths; what lies past a length, NaN or not,
changes nothing.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

CHUNK_SIZE = 64
"""Tokens per chunk of the chunked form; state checkpoints lie on this grid."""

SUB_BLOCK = 16
"""Tokens between which a decay per channel is formed pair by pair."""

L2_NORM_EPS = 1e-6

# exp of it is 0 in float32, and sums of it stay finite.
_MIN_LOG_DECAY = -1e4


def _dot(subscripts: str, *operands: Array) -> Array:
    return jnp.einsum(subscripts, *operands, precision=jax.lax.Precision.HIGHEST)


def normalize_qk(
    q: Float[Array, "*batch key_heads key_dim"],
    k: Float[Array, "*batch key_heads key_dim"],
    num_heads: int,
) -> tuple[
    Float32[Array, "*batch heads key_dim"], Float32[Array, "*batch heads key_dim"]
]:
    """L2-normalise queries and keys, scale queries, repeat both to the value heads.

    ``x / sqrt(sum(x^2) + 1e-6)``, and q times ``key_dim^-0.5``. Value head ``h`` uses
    query and key head ``h // (heads / key_heads)``.

    Args:
      q: Queries after the convolution.
      k: Keys after the convolution.
      num_heads: Value heads.

    Source: fla-org/flash-linear-attention, fla/modules/l2norm.py.

    Raises:
      ValueError: ``num_heads`` is no multiple of the heads of q and k.
    """
    key_heads, key_dim = q.shape[-2:]
    if num_heads % key_heads:
        raise ValueError(f"{num_heads=} must be a multiple of {key_heads=}")

    def normalize(x: Array) -> Array:
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_NORM_EPS)
        return jnp.repeat(x, num_heads // key_heads, axis=-2)

    return normalize(q) * key_dim**-0.5, normalize(k)


def _select_tokens(is_token: Array, x: Array) -> Array:
    """Zero the padding by select: it may be NaN."""
    mask = jnp.expand_dims(is_token, tuple(range(is_token.ndim, x.ndim)))
    return jnp.where(mask, x.astype(jnp.float32), 0.0)


def _pair_decay(log_decay: Array) -> Array:
    """Return ``exp(sum of log_decay[m], j < m <= i)`` at ``[i, j]``; 0 for i < j.

    The exponent is a sum over the tokens between, not a difference of two running
    sums: it has no cancellation after a strong decay, and is never positive.
    """
    size = log_decay.shape[-2]
    i, j, m = np.ogrid[:size, :size, :size]
    between = jnp.asarray((j < m) & (m <= i), jnp.float32)
    decay = jnp.exp(_dot("ijm,...md->...ijd", between, log_decay))
    return jnp.where(_lower(size)[:, :, None], decay, 0.0)


def _lower(size: int) -> Array:
    return jnp.asarray(np.tril(np.ones((size, size), bool)))


def sums_to(log_decay: Array) -> Array:
    """Sum from the first token of the block to each token, its own included."""
    lower = np.tril(np.ones((log_decay.shape[-2],) * 2, np.float32))
    return _dot("im,...md->...id", jnp.asarray(lower), log_decay)


def sums_after(log_decay: Array) -> Array:
    """Sum over the tokens of the block after each token."""
    upper = np.triu(np.ones((log_decay.shape[-2],) * 2, np.float32), 1)
    return _dot("im,...md->...id", jnp.asarray(upper), log_decay)


def _inside_products(left: Array, right: Array, log_decay: Array) -> Array:
    """Return ``left_i . right_j`` with the decay between them, inside each block."""
    decayed = right[..., None, :, :] * _pair_decay(log_decay)
    return jnp.sum(left[..., :, None, :] * decayed[None], axis=-1)


def decayed_products(
    lefts: tuple[Array, ...],
    right: Array,
    log_decay: Array,
    inside_products: Callable[[Array, Array, Array], Array] = _inside_products,
) -> Array:
    """Return ``left_i . right_j`` with the decay between them; 0 for i < j.

    With a decay per channel the chunk is cut into blocks of 16 tokens. Inside a block
    every pair has its own decay vector. Between block A and an earlier block B it is
    a product of three factors, each at most 1, so that nothing can overflow:

        exp(start of A .. i)  *  exp(blocks between)  *  exp(after j .. end of B)

    Args:
      lefts: Each ``[rows, heads, chunk, key_dim]``.
      right: ``[rows, heads, chunk, key_dim]``.
      log_decay: ``[rows, heads, chunk, key_dim or 1]``.
      inside_products: How a block multiplies its own pairs.

    Returns:
      ``[lefts, rows, heads, chunk, chunk]``.
    """
    left = jnp.stack(lefts)
    if log_decay.shape[-1] == 1:
        products = _dot("xrhid,rhjd->xrhij", left, right)
        return products * _pair_decay(log_decay)[None, ..., 0]
    chunk, key_dim = right.shape[-2:]
    num_blocks = chunk // SUB_BLOCK
    left, right, log_decay = (
        x.reshape(*x.shape[:-2], num_blocks, SUB_BLOCK, key_dim)
        for x in (left, right, log_decay)
    )
    inside = inside_products(left, right, log_decay)

    from_start = left * jnp.exp(sums_to(log_decay))[None]
    to_end = right * jnp.exp(sums_after(log_decay))
    a, b, m = np.ogrid[:num_blocks, :num_blocks, :num_blocks]
    between = jnp.asarray((b < m) & (m < a), jnp.float32)
    between = jnp.exp(_dot("abm,rhmd->rhabd", between, log_decay.sum(axis=-2)))
    decayed = to_end[:, :, None] * between[..., None, :]
    across = _dot("xrhaid,rhabjd->xrhaibj", from_start, decayed)

    def mask(blocks: np.ndarray) -> Array:
        return jnp.asarray(blocks)[None, None, None, :, None, :, None]

    products = jnp.where(mask(np.tri(num_blocks, k=-1, dtype=bool)), across, 0.0)
    is_inside = mask(np.eye(num_blocks, dtype=bool))
    products = jnp.where(is_inside, inside[..., None, :], products)
    return products.reshape(*products.shape[:3], chunk, chunk)


def solve_unit_lower(lower: Array, right: Array) -> Array:
    """Solve ``(I + L) x = right``, L the part of ``lower`` below its diagonal.

    Forward substitution by blocks of 16. A block on the diagonal is inverted by
    halves: with ``T`` the inverses of its two halves and ``C`` the square between
    them, the inverse of both is ``T - T C T``. Unlike a series in powers of L, this
    forms nothing larger than the inverse itself.

    Args:
      lower: ``[rows, heads, chunk, chunk]``.
      right: ``[rows, heads, chunk, value_dim]``.
    """
    starts = range(0, lower.shape[-1], SUB_BLOCK)
    on_diagonal = jnp.stack(
        [lower[..., s : s + SUB_BLOCK, s : s + SUB_BLOCK] for s in starts], axis=2
    )
    i, j = np.ogrid[:SUB_BLOCK, :SUB_BLOCK]
    inverse = jnp.broadcast_to(jnp.eye(SUB_BLOCK, dtype=jnp.float32), on_diagonal.shape)
    half = 1
    while half < SUB_BLOCK:
        is_between = (i // (2 * half) == j // (2 * half)) & (i // half > j // half)
        between = jnp.where(jnp.asarray(is_between), on_diagonal, 0.0)
        between = _dot("rhbij,rhbjk->rhbik", inverse, between)
        inverse = inverse - _dot("rhbij,rhbjk->rhbik", between, inverse)
        half *= 2
    solved = right[..., :0, :]
    for block, start in enumerate(starts):
        rows = slice(start, start + SUB_BLOCK)
        known = _dot("rhij,rhjv->rhiv", lower[..., rows, :start], solved)
        found = _dot(
            "rhij,rhjv->rhiv", inverse[:, :, block], right[..., rows, :] - known
        )
        solved = jnp.concatenate([solved, found], axis=2)
    return solved


def delta_rule_chunk(
    q: Float32[Array, "rows chunk heads key_dim"],
    k: Float32[Array, "rows chunk heads key_dim"],
    v: Float[Array, "rows chunk heads value_dim"],
    log_decay: Float32[Array, "rows chunk heads decay_dim"],
    beta: Float32[Array, "rows chunk heads"],
    state_vk: Float32[Array, "rows heads value_dim key_dim"],
    is_token: Bool[Array, "rows chunk"],
) -> tuple[
    Float32[Array, "rows chunk heads value_dim"],
    Float32[Array, "rows heads value_dim key_dim"],
]:
    """Run one chunk of each row: outputs, and the states after it.

    With ``D(i, j)`` the decay from after token j to token i, ``d_i`` that from the
    start of the chunk to i, and ``e_j`` that from after j to its end:

        A[i, j] = beta_i * (k_i . D(i, j) k_j)             for i > j
        w       = (I + A)^-1 (beta * (v - (k * d) S^T))    what each token writes
        o_i     = S (q_i * d_i) + sum_{j<=i} (q_i . D(i, j) k_j) w_j
        S      <- S * d_last + sum_j outer(w_j, k_j * e_j)

    Args:
      q: Normalised and scaled queries.
      k: Normalised keys.
      v: Values.
      log_decay: Per key channel, or per head with a last axis of 1.
      beta: Writing strength.
      state_vk: States before the chunk.
      is_token: False for padding, which changes nothing and gives zeros.

    Source: Kimi Linear (arXiv:2510.26692); fla-org/flash-linear-attention,
      fla/ops/kda/naive.py. The solve takes the place of their explicit inverse.

    Raises:
      ValueError: The chunk is no multiple of ``SUB_BLOCK``.
    """
    chunk = q.shape[1]
    if chunk % SUB_BLOCK:
        raise ValueError(f"chunk_size={chunk} must be a multiple of {SUB_BLOCK}")
    # [rows, heads, chunk, dim]: heads become a batch axis of every product.
    q, k, v, log_decay, beta = (
        jnp.swapaxes(_select_tokens(is_token, x), 1, 2)
        for x in (q, k, v, log_decay, beta[..., None])
    )
    log_decay = jnp.maximum(log_decay, _MIN_LOG_DECAY)
    from_start = jnp.exp(sums_to(log_decay))
    to_end = jnp.exp(sums_after(log_decay))
    q_k, k_k = decayed_products((q, k), k, log_decay)
    known = _dot("rhik,rhvk->rhiv", k * from_start, state_vk)
    written = solve_unit_lower(beta * k_k, beta * (v - known))
    out = _dot("rhik,rhvk->rhiv", q * from_start, state_vk)
    out = out + _dot("rhij,rhjv->rhiv", q_k, written)
    state_vk = state_vk * from_start[:, :, -1:, :]
    state_vk = state_vk + _dot("rhiv,rhik->rhvk", written, k * to_end)
    return jnp.swapaxes(out, 1, 2), state_vk


def chunked_delta_rule(
    q: Float32[Array, "rows time heads key_dim"],
    k: Float32[Array, "rows time heads key_dim"],
    v: Float[Array, "rows time heads value_dim"],
    log_decay: Float32[Array, "rows time heads decay_dim"],
    beta: Float32[Array, "rows time heads"],
    state_vk: Float32[Array, "rows heads value_dim key_dim"],
    lens: Int32[Array, " rows"],
    *,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[
    Float32[Array, "rows time heads value_dim"],
    Float32[Array, "rows heads value_dim key_dim"],
]:
    """Run whole rows chunk by chunk. Differentiable; the backward pass recomputes.

    Args:
      q: Normalised and scaled queries.
      k: Normalised keys.
      v: Values.
      log_decay: Per key channel, or per head with a last axis of 1.
      beta: Writing strength.
      state_vk: States before the first token.
      lens: Tokens of each row; outputs past it are zero.
      chunk_size: Tokens per chunk, a multiple of ``SUB_BLOCK``; need not divide the
        time.

    Returns:
      Outputs, and the states after ``lens`` tokens.
    """
    time = q.shape[1]
    num_chunks = -(-time // chunk_size)
    is_token = jnp.arange(num_chunks * chunk_size)[None, :] < lens[:, None]

    def cut(x: Array) -> Array:
        padding = [(0, 0)] * x.ndim
        padding[1] = (0, num_chunks * chunk_size - x.shape[1])
        x = jnp.pad(x, padding)
        x = x.reshape(x.shape[0], num_chunks, chunk_size, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    # Without the checkpoint, the backward pass would keep every pair's decay.
    @jax.checkpoint
    def step(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, log_decay, beta, is_token = chunk
        out, state = delta_rule_chunk(q, k, v, log_decay, beta, state, is_token)
        return state, out

    chunks = tuple(cut(x) for x in (q, k, v, log_decay, beta, is_token))
    state_vk, out = jax.lax.scan(step, state_vk, chunks)
    out = jnp.moveaxis(out, 0, 1)
    out = out.reshape(out.shape[0], num_chunks * chunk_size, *out.shape[3:])
    return out[:, :time], state_vk


def recurrent_delta_rule(
    q: Float32[Array, "rows time heads key_dim"],
    k: Float32[Array, "rows time heads key_dim"],
    v: Float[Array, "rows time heads value_dim"],
    log_decay: Float32[Array, "rows time heads decay_dim"],
    beta: Float32[Array, "rows time heads"],
    state_vk: Float32[Array, "rows heads value_dim key_dim"],
    lens: Int32[Array, " rows"],
) -> tuple[
    Float32[Array, "rows time heads value_dim"],
    Float32[Array, "rows heads value_dim key_dim"],
]:
    """Run whole rows token by token: the definition, and the form of a decode step.

    Args:
      q: Normalised and scaled queries.
      k: Normalised keys.
      v: Values.
      log_decay: Per key channel, or per head with a last axis of 1.
      beta: Writing strength.
      state_vk: States before the first token.
      lens: Tokens of each row; outputs past it are zero.

    Returns:
      Outputs, and the states after ``lens`` tokens.

    Source: fla-org/flash-linear-attention, fla/ops/kda/naive.py (K-first there).
    """
    is_token = jnp.arange(q.shape[1])[None, :] < lens[:, None]
    tokens = tuple(
        jnp.moveaxis(_select_tokens(is_token, x), 1, 0)
        for x in (q, k, v, log_decay, beta[..., None])
    )

    def step(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        q_t, k_t, v_t, log_decay_t, beta_t = token
        state = state * jnp.exp(log_decay_t)[:, :, None, :]
        written = beta_t * (v_t - _dot("rhvk,rhk->rhv", state, k_t))
        state = state + written[..., None] * k_t[:, :, None, :]
        return state, _dot("rhvk,rhk->rhv", state, q_t)

    state_vk, out = jax.lax.scan(step, state_vk, tokens)
    return jnp.moveaxis(out, 0, 1), state_vk
