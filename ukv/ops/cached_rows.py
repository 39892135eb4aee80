"""Reads of cached rows through a read table, one block of keys at a time."""

from jaxtyping import Array, Int32, Shaped, UInt32

from ukv.ids import KernelBlocks, require_ids
from ukv.layout import PartView
from ukv.ops.query_tiles import steps
from ukv.pool import read_blocks

Buffers = tuple[UInt32[Array, "_ _"], ...]


def table_of(
    table: KernelBlocks, views: tuple[PartView, ...], *, num_rows: int
) -> Int32[Array, "rows max_pages"]:
    """Return the ids of a read table that belongs to the batch and to all views.

    Raises:
      IdSpaceError: ``table`` are not kernel block ids of the views' sub-pool.
      ValueError: The table has another number of rows than the batch.
    """
    for view in views:
        require_ids(table, KernelBlocks, owner=view.sub_pool, argument="table")
    ids = table.ids
    if ids.ndim != 2 or ids.shape[0] != num_rows:
        raise ValueError(
            f"table has shape {ids.shape}, the batch needs [{num_rows}, max_pages]"
        )
    return ids


def blocks_of_pages(
    table_ids: Int32[Array, "rows max_pages"],
    rows: Int32[Array, " tiles"],
    block: Int32[Array, " tiles"],
    num_pages: int,
) -> Int32[Array, "tiles num_pages"]:
    """Return the block ids of the pages ``block * num_pages`` and up of some rows.

    Pages past the table's end give one of its last: the caller does not see them.
    """
    pages = steps(block * num_pages, num_pages)
    return table_ids.at[rows[:, None], pages].get(mode="clip")


def read_keys(
    buffers: Buffers, view: PartView, blocks: Int32[Array, "tiles num_pages"]
) -> Shaped[Array, "tiles block_kv ..."]:
    """Read the entries of all tokens of some pages, in the storage dtype."""
    entries = read_blocks(buffers[view.buffer_index], view, blocks)
    return entries.reshape(blocks.shape[0], -1, *view.shape)
