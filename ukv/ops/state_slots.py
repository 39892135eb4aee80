"""Where the states of a batch lie in the pool, and how they are read and written."""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from ukv.ids import KernelBlocks, require_ids
from ukv.layout import PartView
from ukv.ops.kv_write import Buffers
from ukv.pool import read_entries, write_entries


@flax.struct.dataclass
class StateSlots:
    """The state slots of one batch: translated once, the same for all layers.

    A slot that is ``ABSENT_BLOCK`` is neither read nor written: a padded row, or a
    checkpoint that is not wanted. No two others may be equal.

    Attributes:
      slots: ``[rows]``; block id of the slot of each row's request.
      is_fresh: bool ``[rows]``; whether the request has no tokens yet
        (``context_len == 0``). It then starts from zeros, whatever its slot holds.
      checkpoint_slots: ``[rows, n]``; slots that get the state as it is after some
        of this step's tokens, or None. Prefill only.
      checkpoint_lens: int32 ``[rows, n]``; after how many tokens of this step, a
        multiple of ``CHUNK_SIZE``, at most the row's query length. A checkpoint at
        any other length is not written.
    """

    slots: KernelBlocks
    is_fresh: jax.Array
    checkpoint_slots: KernelBlocks | None = None
    checkpoint_lens: jax.Array | None = None


def _first_rows(
    view: PartView, blocks: KernelBlocks, argument: str
) -> tuple[Int32[Array, "*batch"], Bool[Array, "*batch"]]:
    """Return the kernel row of each slot and whether there is such a slot.

    A slot's page has one entry, so its block is its row. An absent slot gets
    ``view.num_rows``, which a write drops; the sum that would overflow is never made.
    """
    ids = require_ids(blocks, KernelBlocks, owner=view.sub_pool, argument=argument).ids
    last_row = view.num_rows - view.rows_per_entry
    is_present = (ids >= 0) & (ids <= last_row - view.block_offset)
    rows = jnp.where(is_present, ids, 0) + view.block_offset
    return jnp.where(is_present, rows, view.num_rows), is_present


def present_rows(view: PartView, slots: StateSlots) -> Bool[Array, " rows"]:
    """Return which rows of the batch are requests and not padding."""
    return _first_rows(view, slots.slots, "slots")[1]


def read_states(
    buffers: Buffers, view: PartView, slots: StateSlots
) -> Float32[Array, "rows ..."]:
    """Read the state of each row as float32: zeros if it is fresh or padded.

    Raises:
      IdSpaceError: The slots are not kernel blocks of the view's sub-pool.
      ValueError: ``is_fresh`` has not one entry for each slot.
    """
    first_rows, is_present = _first_rows(view, slots.slots, "slots")
    if slots.is_fresh.shape != first_rows.shape:
        raise ValueError(
            f"is_fresh has shape {slots.is_fresh.shape}, slots {first_rows.shape}: "
            "give both for each row"
        )
    states = read_entries(buffers[view.buffer_index], view, first_rows)
    has_past = is_present & ~slots.is_fresh
    has_past = jnp.expand_dims(has_past, tuple(range(1, states.ndim)))
    return jnp.where(has_past, states.astype(jnp.float32), 0.0)


def write_states(
    buffers: Buffers,
    view: PartView,
    slots: StateSlots,
    states: Float[Array, "rows ..."],
    out: Float[Array, "..."],
    checkpoints: tuple[Float[Array, "rows n ..."], Bool[Array, "rows n"]] | None = None,
) -> tuple[Buffers, Float[Array, "..."]]:
    """Write the states of all rows, and the checkpoints that were reached.

    Args:
      buffers: All buffers of the pool.
      view: The part and layer.
      slots: Where to.
      states: After this step's tokens.
      out: What the op returns beside the buffers. It is tied to the write: reads of
        a later layer that XLA could move behind this write and fuse with others
        would make it copy the pool.
      checkpoints: A state for each checkpoint slot, and which of them were reached.

    Returns:
      The buffers and ``out``.
    """
    first_rows, _ = _first_rows(view, slots.slots, "slots")
    if checkpoints is not None:
        more_states, is_reached = checkpoints
        more_rows, _ = _first_rows(view, slots.checkpoint_slots, "checkpoint_slots")
        more_rows = jnp.where(is_reached, more_rows, view.num_rows)
        first_rows = jnp.concatenate([first_rows, more_rows.reshape(-1)])
        more_states = more_states.reshape(-1, *view.shape)
        states = jnp.concatenate([states, more_states])
    written = list(buffers)
    written[view.buffer_index], out = jax.lax.optimization_barrier(
        (write_entries(buffers[view.buffer_index], view, first_rows, states), out)
    )
    return tuple(written), out
