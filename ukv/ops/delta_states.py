"""The gated delta rule on states in the pool, whatever gives the decay.

KDA and Gated DeltaNet differ in their gate and in the heads of q and k; they share
what is here. ``log_decay_of`` turns a layer's gate logits into float32 log decays
whose last axis is ``key_dim`` or 1.
"""

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from ukv.implementation import Implementation, OpCase, resolve
from ukv.layout import PartView
from ukv.ops.cached_rows import Buffers
from ukv.ops.delta_rule import (
    CHUNK_SIZE,
    SUB_BLOCK,
    delta_rule_chunk,
    normalize_qk,
    recurrent_delta_rule,
)
from ukv.ops.state_slots import (
    StateSlots,
    present_rows,
    query_lens_of,
    read_states,
    require_shapes,
    require_slots,
    write_states,
    write_states_and_checkpoints,
)
from ukv.pytree import Leaf

LogDecayOf = Callable[[Array], Array]


class DeltaTokens(flax.struct.PyTreeNode):
    """What a layer computes for each new token before the recurrence.

    ``*tokens`` is ``[rows, query_len]`` in a decode and ``[tokens]`` (packed rows) in
    a prefill. q, k and v come after the convolution, not normalised.

    Attributes:
      q: ``[*tokens, key_heads, key_dim]``.
      k: ``[*tokens, key_heads, key_dim]``.
      v: ``[*tokens, heads, value_dim]``; its dtype is that of the output.
      gate_logits: KDA ``[*tokens, heads, key_dim]``, GDN ``[*tokens, heads]``.
      beta_logits: ``[*tokens, heads]``, before the sigmoid.
    """

    q: Leaf
    k: Leaf
    v: Leaf
    gate_logits: Leaf
    beta_logits: Leaf


def softplus_gate(
    logits: Float[Array, "*tokens heads width"], a_log: Float[Array, "*ones heads 1"]
) -> Float[Array, "*tokens heads width"]:
    """Return ``-exp(a_log) * softplus(logits)``, a log decay."""
    return -jnp.exp(a_log) * jax.nn.softplus(logits)


def to_tokens(parameter: Float[Array, "..."], ndim: int) -> Float[Array, "..."]:
    """Return a parameter as float32 with leading axes of 1, ``ndim`` in all."""
    leading = tuple(range(ndim - parameter.ndim))
    return jnp.expand_dims(parameter.astype(jnp.float32), leading)


def require_case(
    op: str,
    view: PartView,
    tokens: DeltaTokens,
    a_log: Leaf,
    dt_bias: Leaf,
    implementation: Implementation | None,
) -> Implementation:
    """Check the view's entry, the tokens and the gate, and return who runs the op.

    Args:
      op: Name of the op.
      view: Part ``recurrent`` of the layer.
      tokens: The new tokens.
      a_log: Of the gate.
      dt_bias: Of the gate; its shape without the tokens is that of the gate logits.
      implementation: None for the default device's best.

    Raises:
      ValueError: The view's entry is not ``[heads, value_dim, key_dim]``, or the tokens
        or the gate have other shapes.
      UnsupportedError: ``implementation`` cannot do this.
    """
    heads, value_dim = tokens.v.shape[-2:]
    key_dim = tokens.q.shape[-1]
    if view.shape != (heads, value_dim, key_dim):
        raise ValueError(
            f"{view.sub_pool}.{view.part} has entries {view.shape}; the tokens need "
            f"[heads, value_dim, key_dim] = {(heads, value_dim, key_dim)}"
        )
    leading, key_heads = tokens.v.shape[:-2], tokens.q.shape[-2]
    gate_shape = (heads, key_dim) if dt_bias.ndim == 2 else (heads,)
    require_shapes(
        q=(tokens.q, (*leading, key_heads, key_dim)),
        k=(tokens.k, (*leading, key_heads, key_dim)),
        gate_logits=(tokens.gate_logits, (*leading, *gate_shape)),
        beta_logits=(tokens.beta_logits, (*leading, heads)),
        a_log=(a_log, (heads,)),
        dt_bias=(dt_bias, gate_shape),
    )
    if heads % key_heads:
        raise ValueError(f"num_heads={heads} must be a multiple of {key_heads=}")
    case = OpCase(
        page_size=view.page_size,
        storage_dtype=view.dtype.name,
        compute_dtype=tokens.v.dtype.name,
        widths=(key_dim, value_dim),
    )
    return resolve(op, implementation, case)


def activate(
    tokens: DeltaTokens, log_decay_of: LogDecayOf
) -> tuple[Array, Array, Array, Array, Array]:
    """Return q, k, v, log_decay and beta as the recurrence takes them."""
    q, k = normalize_qk(tokens.q, tokens.k, tokens.v.shape[-2])
    log_decay = log_decay_of(tokens.gate_logits.astype(jnp.float32))
    beta = jax.nn.sigmoid(tokens.beta_logits.astype(jnp.float32))
    return q, k, tokens.v, log_decay, beta


def decode_states(
    buffers: Buffers,
    view: PartView,
    tokens: DeltaTokens,
    slots: StateSlots,
    log_decay_of: LogDecayOf,
) -> tuple[Buffers, Float[Array, "rows query_len heads value_dim"]]:
    """Advance each row's state by its ``query_len`` tokens, one after the other."""
    rows, query_len = tokens.v.shape[:2]
    require_slots(buffers, view, slots, num_rows=rows)
    lens = jnp.where(present_rows(view, slots), jnp.int32(query_len), 0)
    states = read_states(buffers, view, slots)
    activated = activate(tokens, log_decay_of)
    out, states = recurrent_delta_rule(*activated, states, lens)
    return write_states(buffers, view, slots, states), out.astype(tokens.v.dtype)


def prefill_states(
    buffers: Buffers,
    view: PartView,
    tokens: DeltaTokens,
    cu_query_lens: Int32[Array, " bounds"],
    slots: StateSlots,
    log_decay_of: LogDecayOf,
    *,
    max_query_len: int,
) -> tuple[Buffers, Float[Array, "tokens heads value_dim"]]:
    """Advance each row's state by its packed tokens, a chunk of each row at a time.

    Only the tokens of one chunk of each row are unpacked at once, so no intermediate
    grows with the longest row.
    """
    # Short batches take smaller chunks; the grid of checkpoints stays.
    chunk_size = min(CHUNK_SIZE, -(-max_query_len // SUB_BLOCK) * SUB_BLOCK)
    num_tokens = tokens.v.shape[0]
    starts = cu_query_lens[:-1]
    lens = query_lens_of(buffers, view, slots, cu_query_lens)
    states = read_states(buffers, view, slots)
    checkpoints, wanted = slots.checkpoints, None
    if checkpoints is not None:
        # A checkpoint after no token is the state before the first.
        shape = (*checkpoints.lens.shape, *view.shape)
        wanted = jnp.broadcast_to(states[:, None], shape)

    def step(chunk: Array, carry: tuple) -> tuple:
        out, states, wanted = carry
        places = chunk * chunk_size + jnp.arange(chunk_size, dtype=jnp.int32)
        is_token = places[None, :] < lens[:, None]
        # Past the last token: a gather fills with zeros, a scatter drops.
        at = jnp.where(is_token, starts[:, None] + places[None, :], num_tokens)
        unpacked = jax.tree.map(
            lambda x: x.at[at].get(mode="fill", fill_value=0), tokens
        )
        activated = activate(unpacked, log_decay_of)
        chunk_out, states = delta_rule_chunk(*activated, states, is_token)
        out = out.at[at].set(chunk_out.astype(out.dtype), mode="drop")
        if checkpoints is not None:
            is_here = checkpoints.lens == (chunk + 1) * chunk_size
            wanted = jnp.where(is_here[..., None, None, None], states[:, None], wanted)
        return out, states, wanted

    num_chunks = -(-max_query_len // chunk_size)
    carry = (jnp.zeros_like(tokens.v), states, wanted)
    out, states, wanted = jax.lax.fori_loop(0, num_chunks, step, carry)
    buffers = write_states_and_checkpoints(buffers, view, slots, lens, states, wanted)
    return buffers, out
