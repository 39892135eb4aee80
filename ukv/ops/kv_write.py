"""Writes of new tokens' entries into the pool, at locations translated before."""

import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped

from ukv.ids import WriteLocations, require_ids
from ukv.implementation import Implementation, OpCase, resolve
from ukv.layout import PartView
from ukv.ops.cached_rows import Buffers
from ukv.pool import write_entries


def first_rows(locations: WriteLocations, view: PartView) -> Int32[Array, "*batch"]:
    """Return the first kernel row of each token's entry in one part of one layer.

    A location outside the buffer, ``ABSENT_BLOCK`` above all, becomes
    ``view.num_rows``, where a write is dropped. It is replaced before the
    multiplication, so nothing leaves int32: a block that is kept satisfies
    ``(block + block_offset + 1) * page_size <= num_rows < 2**31``.

    Example: page_size 16, block_offset 3, one row per entry; block 12, offset 5 is
    row (12 + 3) * 16 + 5 = 245.
    """
    num_blocks = view.num_rows // view.page_size - view.block_offset
    blocks, offsets = locations.blocks, locations.offsets
    is_present = (blocks >= 0) & (blocks < num_blocks)
    is_present &= (offsets >= 0) & (offsets < view.page_size)
    blocks = jnp.where(is_present, blocks, 0)
    offsets = jnp.where(is_present, offsets, 0)
    rows = (blocks + view.block_offset) * view.page_size
    rows = rows + offsets * view.rows_per_entry
    return jnp.where(is_present, rows, view.num_rows)


def write_kv(
    buffers: Buffers,
    views: tuple[PartView, ...],
    locations: WriteLocations,
    values: tuple[Shaped[Array, "..."], ...],
    *,
    implementation: Implementation | None = None,
) -> Buffers:
    """Write the entries of new tokens: K and V, or the latent, of one layer.

    A value of another dtype is converted to the storage dtype of its part; one that
    has it keeps its bits. A token whose location is absent writes nothing.

    Args:
      buffers: All buffers of the pool.
      views: Where each part lies, all of one sub-pool.
      locations: Distinct locations, or absent ones, of any shape.
      values: For each view, ``[*shape of the locations, *view.shape]``.
      implementation: None for the default device's best.

    Returns:
      The buffers, in their order; in place when they are donated.

    Raises:
      IdSpaceError: ``locations`` are not write locations of the views' sub-pool.
      ValueError: There is not one array of values for each view, or its shape is
        another one.
      UnsupportedError: ``implementation`` cannot do this.
    """
    if len(views) != len(values):
        raise ValueError(f"{len(views)} views take as many values, not {len(values)}")
    written = list(buffers)
    for view, value in zip(views, values, strict=True):
        checked = require_ids(
            locations, WriteLocations, owner=view.sub_pool, argument="locations"
        )
        shape = (*checked.blocks.shape, *view.shape)
        if value.shape != shape:
            raise ValueError(
                f"values of {view.sub_pool}.{view.part} have shape {value.shape}, "
                f"the locations need {shape}"
            )
        case = OpCase(
            page_size=view.page_size,
            storage_dtype=view.dtype.name,
            compute_dtype=value.dtype.name,
            widths=(view.num_elements,),
        )
        resolve("write_kv", implementation, case)
        written[view.buffer_index] = write_entries(
            written[view.buffer_index],
            view,
            first_rows(checked, view).reshape(-1),
            value.reshape(-1, *view.shape),
        )
    return tuple(written)
