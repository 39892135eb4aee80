"""Writes of new tokens' entries into the pool, at locations translated before."""

import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped

from ukv.ids import WriteLocations, require_ids
from ukv.implementation import Implementation, OpCase, resolve
from ukv.layout import PartView
from ukv.ops.cached_rows import Buffers, require_buffers
from ukv.ops.gpu_kernels import triton_kernels
from ukv.pool import entries_to_words, write_entries

_Write = tuple[PartView, jax.Array]


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
      ValueError: The buffers are not those of the pool, there is not one array of
        values for each view, or its shape is another one.
      UnsupportedError: ``implementation`` cannot do this.
    """
    if len(views) != len(values):
        raise ValueError(f"{len(views)} views take as many values, not {len(values)}")
    require_buffers(buffers, *views)
    written = list(buffers)
    by_buffer: dict[int, list[_Write]] = {}
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
        chosen = resolve("write_kv", implementation, case)
        entries = value.reshape(-1, *view.shape)
        if chosen == "triton":
            by_buffer.setdefault(view.buffer_index, []).append((view, entries))
        else:
            written[view.buffer_index] = write_entries(
                written[view.buffer_index],
                view,
                first_rows(checked, view).reshape(-1),
                entries,
            )
    for index, writes in by_buffer.items():
        written[index] = _write_with_triton(written[index], locations, writes)
    return tuple(written)


def _write_with_triton(
    buffer: jax.Array, locations: WriteLocations, writes: list[_Write]
) -> jax.Array:
    """Write entries of some parts, two at a time, in the storage dtype."""
    kernels = triton_kernels("kv_write_triton")
    blocks, offsets = locations.blocks.reshape(-1), locations.offsets.reshape(-1)
    for parts in itertools.batched(writes, 2):
        buffer = kernels.write_entries(
            buffer,
            blocks,
            offsets,
            tuple(entries_to_words(entries, view) for view, entries in parts),
            tuple(
                kernels.EntryPlace(
                    block=view.block_offset,
                    block_words=view.page_size * view.row_words,
                    entry_words=view.rows_per_entry * view.row_words,
                )
                for view, _ in parts
            ),
            page_size=parts[0][0].page_size,
        )
    return buffer
