"""Prefill of a delta rule layer on what runs it: Triton kernels, or XLA."""

from jaxtyping import Array, Float, Int32

from ukv.implementation import Implementation
from ukv.layout import PartView
from ukv.ops.cached_rows import Buffers
from ukv.ops.delta_states import (
    DeltaTokens,
    LogDecayOf,
    prefill_states,
    require_case,
)
from ukv.ops.gpu_kernels import triton_kernels
from ukv.ops.state_places import checkpoint_ids, place_of, slot_ids
from ukv.ops.state_slots import StateSlots, query_lens_of
from ukv.pytree import Leaf


def prefill_layer(
    op: str,
    buffers: Buffers,
    view: PartView,
    tokens: DeltaTokens,
    a_log: Leaf,
    dt_bias: Leaf,
    cu_query_lens: Int32[Array, " bounds"],
    slots: StateSlots,
    log_decay_of: LogDecayOf,
    *,
    lower_bound: float | None,
    max_query_len: int,
    implementation: Implementation | None,
) -> tuple[Buffers, Float[Array, "tokens heads value_dim"]]:
    """Advance each row's state by its packed tokens.

    Args:
      op: ``kda_prefill`` or ``gdn_prefill``; the rest is as there.
      buffers: All buffers of the pool.
      view: Part ``recurrent`` of the layer.
      tokens: The rows one after the other.
      a_log: Of the gate, ``[heads]``.
      dt_bias: Of the gate, ``[heads]`` or ``[heads, key_dim]``.
      cu_query_lens: Exclusive prefix sum of the query lengths.
      slots: Whose states, and which checkpoints to write.
      log_decay_of: The gate, for the reference.
      lower_bound: Of the bounded gate, for the kernels; None for the softplus gate.
      max_query_len: No row is longer.
      implementation: None for the default device's best.
    """
    chosen = require_case(op, view, tokens, a_log, dt_bias, implementation)
    if chosen != "triton":
        return prefill_states(
            buffers,
            view,
            tokens,
            cu_query_lens,
            slots,
            log_decay_of,
            max_query_len=max_query_len,
        )
    query_lens_of(buffers, view, slots, cu_query_lens)
    num_tokens = tokens.v.shape[0]
    written = list(buffers)
    written[view.buffer_index], out = triton_kernels("delta.prefill").delta_prefill(
        buffers[view.buffer_index],
        tokens.q,
        tokens.k,
        tokens.v,
        tokens.gate_logits.reshape(num_tokens, -1),
        tokens.beta_logits,
        a_log,
        dt_bias.reshape(-1),
        cu_query_lens,
        slot_ids(view, slots.slots, "slots"),
        slots.is_fresh,
        checkpoint_ids(view, slots),
        state=place_of(view),
        lower_bound=lower_bound,
    )
    return tuple(written), out
