"""Gated DeltaNet on states in the pool: gate, normalisation and recurrence.

    log_decay = -exp(a_log) * softplus(gate_logits + dt_bias)    per value head
    beta      = sigmoid(beta_logits)
    q, k      = l2norm(q) * key_dim^-0.5, l2norm(k), repeated to the value heads
    then the gated delta rule (``ukv.ops.delta_rule``)

The convolution before it is ``ukv.ops.short_conv``; the output norm and its gate are
the model's.

Source: Gated Delta Networks (arXiv:2412.06464).
"""

import functools as ft

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from ukv.implementation import Implementation
from ukv.layout import PartView
from ukv.ops.cached_rows import Buffers
from ukv.ops.delta_kernels import prefill_layer
from ukv.ops.delta_states import (
    DeltaTokens,
    decode_states,
    require_case,
    softplus_gate,
    to_tokens,
)
from ukv.ops.state_slots import StateSlots
from ukv.pytree import Leaf


class GdnGate(flax.struct.PyTreeNode):
    """Gate parameters of one GDN layer.

    Attributes:
      a_log: ``[heads]``, of the value heads.
      dt_bias: ``[heads]``.
    """

    a_log: Leaf
    dt_bias: Leaf


def gdn_log_decay(
    gate_logits: Float[Array, "*tokens heads"], gate: GdnGate
) -> Float32[Array, "*tokens heads 1"]:
    """Return the log decay of each head, at most 0, for all its key channels.

    Args:
      gate_logits: Raw gate of each token.
      gate: Parameters of the layer.

    Source: huggingface/transformers,
      src/transformers/models/qwen3_next/modeling_qwen3_next.py.
    """
    ndim = gate_logits.ndim
    logits = gate_logits.astype(jnp.float32) + to_tokens(gate.dt_bias, ndim)
    a_log = to_tokens(gate.a_log[:, None], ndim + 1)
    return softplus_gate(logits[..., None], a_log)


def gdn_decode(
    buffers: Buffers,
    view: PartView,
    tokens: DeltaTokens,
    gate: GdnGate,
    slots: StateSlots,
    *,
    implementation: Implementation | None = None,
) -> tuple[Buffers, Float[Array, "rows query_len heads value_dim"]]:
    """Advance the states of a decode batch by 1 to 4 tokens each, in place.

    Args:
      buffers: All buffers of the pool.
      view: Part ``recurrent`` of the layer, ``[heads, value_dim, key_dim]``.
      tokens: ``[rows, query_len, ...]``; the heads of v are a multiple of those of q.
      gate: Parameters of the layer.
      slots: Whose states; checkpoints are not written here.
      implementation: None for the default device's best.

    Returns:
      The buffers, in place when they are donated, and the outputs in the dtype of
      ``tokens.v``; zeros for a padded row.

    Raises:
      IdSpaceError: The slots are not kernel blocks of the view's sub-pool.
      ValueError: Shapes disagree.
      UnsupportedError: ``implementation`` cannot do this.
    """
    require_case("gdn_decode", view, tokens, gate.a_log, gate.dt_bias, implementation)
    log_decay_of = ft.partial(gdn_log_decay, gate=gate)
    return decode_states(buffers, view, tokens, slots, log_decay_of)


def gdn_prefill(
    buffers: Buffers,
    view: PartView,
    tokens: DeltaTokens,
    gate: GdnGate,
    cu_query_lens: Int32[Array, " bounds"],
    slots: StateSlots,
    *,
    max_query_len: int,
    implementation: Implementation | None = None,
) -> tuple[Buffers, Float[Array, "tokens heads value_dim"]]:
    """Advance the states of packed rows of unequal length, in place.

    Args:
      buffers: All buffers of the pool.
      view: Part ``recurrent`` of the layer, ``[heads, value_dim, key_dim]``.
      tokens: ``[tokens, ...]``, the rows one after the other; the heads of v are a
        multiple of those of q.
      gate: Parameters of the layer.
      cu_query_lens: Exclusive prefix sum of the query lengths, one more than rows.
      slots: Whose states, and which checkpoints to write.
      max_query_len: No row is longer.
      implementation: None for the default device's best.

    Returns:
      The buffers, in place when they are donated, and the outputs in the dtype of
      ``tokens.v``; zeros for a token of no row or of a padded row.

    Raises:
      IdSpaceError: The slots are not kernel blocks of the view's sub-pool.
      ValueError: Shapes disagree.
      UnsupportedError: ``implementation`` cannot do this.
    """
    return prefill_layer(
        "gdn_prefill",
        buffers,
        view,
        tokens,
        gate.a_log,
        gate.dt_bias,
        cu_query_lens,
        slots,
        ft.partial(gdn_log_decay, gate=gate),
        lower_bound=None,
        max_query_len=max_query_len,
        implementation=implementation,
    )
