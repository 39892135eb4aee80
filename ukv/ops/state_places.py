"""What kernels on states take: plain numbers of where parts and slots lie."""

from jaxtyping import Array, Int32

from pallas_kernels.part_place import PartPlace
from ukv.ids import KernelBlocks, require_ids
from ukv.layout import PartView
from ukv.ops.state_slots import StateSlots


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


def checkpoint_ids(
    view: PartView, slots: StateSlots
) -> tuple[Int32[Array, "rows n"], Int32[Array, "rows n"]] | None:
    """Return the slots of checkpoints and after how many tokens each is wanted.

    Raises:
      IdSpaceError: The slots are not kernel blocks of the view's sub-pool.
      ValueError: The checkpoints' slots and lengths differ in shape.
    """
    if slots.checkpoints is None:
        return None
    to, lens = slots.checkpoints.slots, slots.checkpoints.lens
    ids = slot_ids(view, to, "checkpoints.slots")
    if ids.shape != lens.shape:
        raise ValueError(
            f"checkpoints.lens has shape {lens.shape}, checkpoints.slots "
            f"{ids.shape}: give a length for each slot"
        )
    return ids, lens
