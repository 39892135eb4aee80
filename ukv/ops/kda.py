"""Kimi Delta Attention on states in the pool: gate, normalisation and recurrence.

    log_decay = -exp(a_log) * softplus(gate_logits + dt_bias)    per key channel
    beta      = sigmoid(beta_logits)
    q, k      = l2norm(q) * key_dim^-0.5, l2norm(k)
    then the gated delta rule (``ukv.ops.delta_rule``)

The convolution before it is ``ukv.ops.short_conv``; the output norm and its gate are
the model's.

Source: Kimi Linear (arXiv:2510.26692).
"""

import functools as ft

import flax.struct
import jax
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


class KdaGate(flax.struct.PyTreeNode):
    """Gate parameters of one KDA layer.

    Attributes:
      a_log: ``[heads]``.
      dt_bias: ``[heads, key_dim]``.
      lower_bound: Smallest log decay of the bounded gate, below 0; None for the
        standard gate.
    """

    a_log: Leaf
    dt_bias: Leaf
    lower_bound: float | None = flax.struct.field(pytree_node=False, default=None)


def kda_log_decay(
    gate_logits: Float[Array, "*tokens heads key_dim"], gate: KdaGate
) -> Float32[Array, "*tokens heads key_dim"]:
    """Return the log decay of each key channel, at most 0.

    Standard gate: ``-exp(a_log) * softplus(gate_logits + dt_bias)``. With a lower
    bound: ``lower_bound * sigmoid(exp(a_log) * (gate_logits + dt_bias))``.

    Args:
      gate_logits: Raw gate of each token.
      gate: Parameters of the layer.

    Source: fla-org/flash-linear-attention, fla/ops/kda/gate.py.

    Raises:
      ValueError: ``lower_bound`` is not below 0.
    """
    ndim = gate_logits.ndim
    logits = gate_logits.astype(jnp.float32) + to_tokens(gate.dt_bias, ndim)
    a_log = to_tokens(gate.a_log[:, None], ndim)
    if gate.lower_bound is None:
        return softplus_gate(logits, a_log)
    require_bound(gate)
    return gate.lower_bound * jax.nn.sigmoid(jnp.exp(a_log) * logits)


def require_bound(gate: KdaGate) -> None:
    """Check the gate's bound.

    Raises:
      ValueError: It is not below 0.
    """
    if gate.lower_bound is not None and gate.lower_bound >= 0:
        raise ValueError(f"lower_bound={gate.lower_bound} must be below 0")


def kda_decode(
    buffers: Buffers,
    view: PartView,
    tokens: DeltaTokens,
    gate: KdaGate,
    slots: StateSlots,
    *,
    implementation: Implementation | None = None,
) -> tuple[Buffers, Float[Array, "rows query_len heads value_dim"]]:
    """Advance the states of a decode batch by 1 to 4 tokens each, in place.

    Args:
      buffers: All buffers of the pool.
      view: Part ``recurrent`` of the layer, ``[heads, value_dim, key_dim]``.
      tokens: ``[rows, query_len, ...]``.
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
    require_case("kda_decode", view, tokens, gate.a_log, gate.dt_bias, implementation)
    log_decay_of = ft.partial(kda_log_decay, gate=gate)
    return decode_states(buffers, view, tokens, slots, log_decay_of)


def kda_prefill(
    buffers: Buffers,
    view: PartView,
    tokens: DeltaTokens,
    gate: KdaGate,
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
      tokens: ``[tokens, ...]``, the rows one after the other.
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
    require_bound(gate)
    return prefill_layer(
        "kda_prefill",
        buffers,
        view,
        tokens,
        gate.a_log,
        gate.dt_bias,
        cu_query_lens,
        slots,
        ft.partial(kda_log_decay, gate=gate),
        lower_bound=gate.lower_bound,
        max_query_len=max_query_len,
        implementation=implementation,
    )
