"""Where the states of a batch lie in the pool, and how they are read and written."""

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from ukv.ids import KernelBlocks, require_ids
from ukv.layout import PartView
from ukv.ops.cached_rows import Buffers, require_buffers
from ukv.pool import read_entries, write_entries
from ukv.pytree import Leaf

CHECKPOINT_GRID = 64
"""Checkpoints lie on multiples of this many tokens; chunks of every kind end there."""


class StateCheckpoints(flax.struct.PyTreeNode):
    """Slots that get the state as it is after some of a prefill step's tokens.

    Attributes:
      slots: ``[rows, n]``; block ids of slots, ``ABSENT_BLOCK`` for none.
      lens: int32 ``[rows, n]``; after how many tokens of this step, counted from the
        row's first: a multiple of ``CHECKPOINT_GRID``, at most the row's query
        length. A checkpoint at any other length is not written.
    """

    slots: KernelBlocks
    lens: Leaf


class StateSlots(flax.struct.PyTreeNode):
    """The state slots of one batch: translated once, the same for all layers.

    A slot that is ``ABSENT_BLOCK`` is neither read nor written: its row is padding.
    No two others may be equal, those of the checkpoints included.

    Attributes:
      slots: ``[rows]``; block id of the slot of each row's request.
      is_fresh: bool ``[rows]``; whether the request has no tokens yet
        (``context_len == 0``). It then starts from zeros, whatever its slot holds.
      checkpoints: Read by a prefill only.
    """

    slots: KernelBlocks
    is_fresh: Leaf
    checkpoints: StateCheckpoints | None = None


def slot_rows(
    view: PartView, blocks: KernelBlocks, argument: str
) -> tuple[Int32[Array, "*batch"], Bool[Array, "*batch"]]:
    """Return the kernel row of each slot and whether there is such a slot.

    A slot's page has one entry, so its block is its row. An absent slot gets
    ``view.num_rows``, which a write drops; the sum that would overflow is never made.

    Example: block_offset 5, 3 rows per entry, 40 rows in all. Slot 32 is row 37, the
    last that fits; slot 33 and ``ABSENT_BLOCK`` are row 40.
    """
    ids = require_ids(blocks, KernelBlocks, owner=view.sub_pool, argument=argument).ids
    last_row = view.num_rows - view.rows_per_entry
    is_present = (ids >= 0) & (ids <= last_row - view.block_offset)
    rows = jnp.where(is_present, ids, 0) + view.block_offset
    return jnp.where(is_present, rows, view.num_rows), is_present


def require_shapes(**arrays: tuple[Leaf | None, tuple[int, ...]]) -> None:
    """Check arrays, by name, against the shapes that they must have; None is left out.

    Raises:
      ValueError: One has another shape.
    """
    for name, (array, shape) in arrays.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, must have {shape}")


def require_slots(
    buffers: Buffers, view: PartView, slots: StateSlots, *, num_rows: int | None = None
) -> None:
    """Check that slots and buffers belong to a batch and a pool.

    Args:
      buffers: All buffers of the pool.
      view: The part and layer.
      slots: Of the rows of the batch.
      num_rows: Rows of its tokens; None if the tokens are packed.

    Raises:
      IdSpaceError: The slots are not kernel blocks of the view's sub-pool.
      ValueError: Their number is not that of the rows, or the buffers are not those of
        the pool.
    """
    require_buffers(buffers, view)
    shape = slot_rows(view, slots.slots, "slots")[1].shape
    if slots.is_fresh.shape != shape:
        raise ValueError(
            f"is_fresh has shape {slots.is_fresh.shape}, slots {shape}: "
            "give both for each row"
        )
    if len(shape) != 1 or num_rows not in (None, shape[0]):
        raise ValueError(f"slots has shape {shape}, the tokens have {num_rows} rows")


def present_rows(view: PartView, slots: StateSlots) -> Bool[Array, " rows"]:
    """Return which rows of the batch are requests and not padding."""
    return slot_rows(view, slots.slots, "slots")[1]


def query_lens_of(
    buffers: Buffers,
    view: PartView,
    slots: StateSlots,
    cu_query_lens: Int32[Array, " bounds"],
) -> Int32[Array, " rows"]:
    """Return the tokens of each packed row: none for a padded one.

    Raises:
      IdSpaceError: The slots are not kernel blocks of the view's sub-pool.
      ValueError: ``cu_query_lens`` has not one entry more than there are rows, or is
        not int32, or the slots or the buffers are wrong as in ``require_slots``.
    """
    require_slots(buffers, view, slots)
    is_present = present_rows(view, slots)
    num_rows = is_present.shape[0]
    if cu_query_lens.shape[0] != num_rows + 1:
        raise ValueError(
            f"cu_query_lens has {cu_query_lens.shape[0]} entries, {num_rows} rows "
            f"need {num_rows + 1}"
        )
    if cu_query_lens.dtype != jnp.int32:
        raise ValueError(f"cu_query_lens holds {cu_query_lens.dtype}, must be int32")
    return jnp.where(is_present, jnp.diff(cu_query_lens), 0)


def read_states(
    buffers: Buffers, view: PartView, slots: StateSlots
) -> Float32[Array, "rows ..."]:
    """Read the state of each row as float32: zeros if it is fresh or padded."""
    first_rows, is_present = slot_rows(view, slots.slots, "slots")
    states = read_entries(buffers[view.buffer_index], view, first_rows)
    has_past = is_present & ~slots.is_fresh
    has_past = jnp.expand_dims(has_past, tuple(range(1, states.ndim)))
    return jnp.where(has_past, states.astype(jnp.float32), 0.0)


def write_states(
    buffers: Buffers,
    view: PartView,
    slots: StateSlots,
    states: Float[Array, "rows ..."],
) -> Buffers:
    """Write the state of each row.

    The states come from those that were read, so a write never overtakes its read,
    and XLA updates a donated pool in place.

    Args:
      buffers: All buffers of the pool.
      view: The part and layer.
      slots: Where to.
      states: After this step's tokens.
    """
    first_rows, _ = slot_rows(view, slots.slots, "slots")
    return _write(buffers, view, first_rows, states)


def write_states_and_checkpoints(
    buffers: Buffers,
    view: PartView,
    slots: StateSlots,
    query_lens: Int32[Array, " rows"],
    states: Float[Array, "rows ..."],
    checkpoint_states: Float[Array, "rows n ..."] | None,
) -> Buffers:
    """Write the state of each row and the checkpoints inside it, all in one scatter.

    Args:
      buffers: All buffers of the pool.
      view: The part and layer.
      slots: Where to.
      query_lens: Tokens of each row.
      states: After this step's tokens.
      checkpoint_states: The state for each checkpoint; None if there are none.

    Raises:
      ValueError: The checkpoints' slots and lengths differ in shape.
    """
    checkpoints = slots.checkpoints
    if checkpoints is None or checkpoint_states is None:
        return write_states(buffers, view, slots, states)
    lens = checkpoints.lens
    more_rows, _ = slot_rows(view, checkpoints.slots, "checkpoints.slots")
    if lens.shape != more_rows.shape:
        raise ValueError(
            f"checkpoints.lens has shape {lens.shape}, checkpoints.slots "
            f"{more_rows.shape}: give a length for each slot"
        )
    is_reached = (lens >= 0) & (lens <= query_lens[:, None])
    is_reached &= lens % CHECKPOINT_GRID == 0
    more_rows = jnp.where(is_reached, more_rows, view.num_rows)
    first_rows, _ = slot_rows(view, slots.slots, "slots")
    return _write(
        buffers,
        view,
        jnp.concatenate([first_rows, more_rows.reshape(-1)]),
        jnp.concatenate([states, checkpoint_states.reshape(-1, *view.shape)]),
    )


def _write(
    buffers: Buffers, view: PartView, first_rows: Array, states: Array
) -> Buffers:
    written = list(buffers)
    written[view.buffer_index] = write_entries(
        buffers[view.buffer_index], view, first_rows, states
    )
    return tuple(written)
