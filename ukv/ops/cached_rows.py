"""Reads of cached rows through a read table, one block of keys at a time."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped, UInt32

from ukv.ids import KernelBlocks, require_ids
from ukv.layout import PartView
from ukv.ops.query_tiles import steps
from ukv.pool import read_blocks

Buffers = tuple[UInt32[Array, "_ _"], ...]


def require_buffers(buffers: Buffers, *views: PartView) -> None:
    """Check that the buffers are those that the views are of.

    A kernel would read and write wherever a view points.

    Raises:
      ValueError: There is no such buffer, or it has another size.
    """
    if not isinstance(buffers, tuple | list):
        raise ValueError("buffers takes all buffers of the pool, not one array")
    for view in views:
        index, needed = view.buffer_index, view.num_rows * view.row_bytes
        found = [4 * buffer.size for buffer in buffers]
        if index >= len(found) or found[index] != needed:
            raise ValueError(
                f"buffers of {found} bytes are not those of the pool: buffer {index}, "
                f"with {view.sub_pool}.{view.part}, has {needed}; pass its `buffers`"
            )


def table_of(
    table: KernelBlocks,
    views: tuple[PartView, ...],
    buffers: Buffers,
    *,
    q: Float[Array, "..."],
    kv_lens: Int32[Array, " rows"],
    cu_query_lens: Int32[Array, " bounds"] | None = None,
) -> Int32[Array, "rows max_pages"]:
    """Return the ids of a read table, after checking a batch of an attention op.

    Args:
      table: The table.
      views: Whose rows are read.
      buffers: All buffers of the pool.
      q: Queries: packed if there are ``cu_query_lens``, else a decode batch.
      kv_lens: Tokens of each row.
      cu_query_lens: Bounds of packed rows.

    Raises:
      IdSpaceError: ``table`` are not kernel block ids of the views' sub-pool.
      ValueError: The buffers are not those of the pool, or queries, lengths and table
        are not of one batch.
    """
    require_buffers(buffers, *views)
    for view in views:
        require_ids(table, KernelBlocks, owner=view.sub_pool, argument="table")
    axes = ["rows", "query_len", "num_heads", "width"]
    lens = {"kv_lens": kv_lens}
    if cu_query_lens is not None:
        axes = ["num_tokens", *axes[2:]]
        lens["cu_query_lens"] = cu_query_lens
    if q.ndim != len(axes):
        raise ValueError(f"q has shape {q.shape}, the op takes [{', '.join(axes)}]")
    for name, x in lens.items():
        if x.ndim != 1 or x.dtype != jnp.int32:
            raise ValueError(f"{name} is {x.dtype}{x.shape}, must be int32 of one axis")
    num_rows = kv_lens.shape[0]
    if cu_query_lens is None:
        if q.shape[0] != num_rows:
            raise ValueError(f"q has {q.shape[0]} rows, kv_lens has {num_rows}")
    elif cu_query_lens.shape[0] != num_rows + 1:
        raise ValueError(
            f"cu_query_lens has {cu_query_lens.shape[0]} entries, {num_rows} rows "
            f"need {num_rows + 1}"
        )
    ids = table.ids
    if ids.ndim != 2 or ids.shape[0] != num_rows or not ids.shape[1]:
        raise ValueError(
            f"table has shape {ids.shape}, the batch needs [{num_rows}, max_pages]"
        )
    if ids.dtype != jnp.int32:
        raise ValueError(f"table holds {ids.dtype}, must be int32")
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
