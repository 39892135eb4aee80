"""The ops of delta rule layers on their Triton kernels."""

from jaxtyping import Array, Float, Int32

from ukv.layout import PartView
from ukv.ops.cached_rows import Buffers
from ukv.ops.delta_states import DeltaTokens
from ukv.ops.gpu_kernels import triton_kernels
from ukv.ops.state_places import checkpoint_ids, place_of, slot_ids
from ukv.ops.state_slots import StateSlots, query_lens_of
from ukv.pytree import Leaf


def prefill_states_triton(
    buffers: Buffers,
    view: PartView,
    tokens: DeltaTokens,
    a_log: Leaf,
    dt_bias: Leaf,
    cu_query_lens: Int32[Array, " bounds"],
    slots: StateSlots,
    *,
    lower_bound: float | None = None,
) -> tuple[Buffers, Float[Array, "tokens heads value_dim"]]:
    """Advance each row's state by its packed tokens, as ``prefill_states`` does."""
    query_lens_of(view, slots, cu_query_lens)
    num_tokens = tokens.v.shape[0]
    written = list(buffers)
    written[view.buffer_index], out = triton_kernels("delta_prefill").delta_prefill(
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
