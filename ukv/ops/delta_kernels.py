"""The ops of delta rule layers on their Triton kernels."""

from jaxtyping import Array, Float, Int32

from pallas_kernels.part_place import PartPlace
from ukv.ids import KernelBlocks, require_ids
from ukv.layout import PartView
from ukv.ops.cached_rows import Buffers
from ukv.ops.delta_states import DeltaTokens
from ukv.ops.gpu_kernels import triton_kernels
from ukv.ops.state_slots import StateSlots, query_lens_of
from ukv.pytree import Leaf


def slot_ids(
    view: PartView, blocks: KernelBlocks, argument: str
) -> Int32[Array, "*batch"]:
    """Return block ids of slots: a slot has one entry, so they are kernel rows."""
    return require_ids(blocks, KernelBlocks, owner=view.sub_pool, argument=argument).ids


def place_of(view: PartView) -> PartPlace:
    """Return what a kernel needs to know of a part."""
    return PartPlace(
        shape=view.shape,
        dtype=view.dtype.name,
        row=view.row_offset,
        row_words=view.row_words,
        num_rows=view.num_rows,
    )


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
    checkpoints = None
    if slots.checkpoints is not None:
        to, lens = slots.checkpoints.slots, slots.checkpoints.lens
        checkpoints = slot_ids(view, to, "checkpoints.slots"), lens
        if to.ids.shape != lens.shape:
            raise ValueError(
                f"checkpoints.lens has shape {lens.shape}, checkpoints.slots "
                f"{to.ids.shape}: give a length for each slot"
            )
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
        checkpoints,
        state=place_of(view),
        lower_bound=lower_bound,
    )
    return tuple(written), out
