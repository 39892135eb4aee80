"""Typed reads and writes of entries in a raw buffer, for XLA.

Rows are gathered as uint32 words and then reinterpreted: a bitcast of a few rows
costs nothing anywhere, while a bitcast of the whole buffer copies it on the CPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped, UInt32

from ukv.layout import PartView

Buffer = UInt32[Array, "rows words"]


def _bits_dtype(view: PartView) -> np.dtype:
    # Entries are cut and padded as integers: moving 8-bit floats goes through a wider
    # float on some backends, which changes the bits of NaNs.
    return np.dtype(f"uint{8 * view.dtype.itemsize}")


def _saturated(values: jax.Array, view: PartView) -> jax.Array:
    if view.dtype.itemsize > 1 or values.dtype == view.dtype:
        return values
    largest = float(jnp.finfo(view.dtype).max)
    return jnp.clip(values, -largest, largest)


def words_to_entries(
    words: UInt32[Array, "*batch entry_words"], view: PartView
) -> Shaped[Array, "..."]:
    """Reinterpret the words of entries as ``[*batch, *view.shape]``."""
    batch = words.shape[:-1]
    bits = jax.lax.bitcast_convert_type(words, _bits_dtype(view))
    bits = bits.reshape(*batch, -1)[..., : view.num_elements]
    return jax.lax.bitcast_convert_type(bits.reshape(*batch, *view.shape), view.dtype)


def entries_to_words(
    values: Shaped[Array, "..."], view: PartView
) -> UInt32[Array, "*batch entry_words"]:
    """Convert ``[*batch, *view.shape]`` to the storage dtype and then to words.

    Values that already have the storage dtype keep their bits. A value beyond an
    8-bit float becomes its largest, since a plain conversion would store NaN; NaN
    stays NaN. The padding of an entry becomes zero.

    Raises:
      ValueError: The values do not end in ``view.shape``.
    """
    batch = values.shape[: values.ndim - len(view.shape)]
    if values.shape[len(batch) :] != view.shape:
        raise ValueError(
            f"values of {view.sub_pool}.{view.part} have shape {values.shape}, "
            f"the last dimensions must be {view.shape}"
        )
    stored = _saturated(values, view).astype(view.dtype)
    bits = jax.lax.bitcast_convert_type(stored, _bits_dtype(view))
    bits = bits.reshape(*batch, view.num_elements)
    per_word = 4 // view.dtype.itemsize
    total = view.rows_per_entry * view.row_words * per_word
    padding = [(0, 0)] * len(batch) + [(0, total - view.num_elements)]
    bits = jnp.pad(bits, padding)
    if per_word > 1:
        bits = bits.reshape(*batch, -1, per_word)
    return jax.lax.bitcast_convert_type(bits, jnp.uint32)


def _row_dimensions(batch_rank: int) -> jax.lax.GatherDimensionNumbers:
    return jax.lax.GatherDimensionNumbers(
        offset_dims=(batch_rank, batch_rank + 1),
        collapsed_slice_dims=(),
        start_index_map=(0,),
    )


def read_rows(
    buffer: Buffer, view: PartView, first_rows: Int[Array, "*batch"], num_rows: int
) -> UInt32[Array, "*batch entry_words"]:
    """Read ``num_rows`` kernel rows from each first row on, as words.

    A first row out of range is clamped: the caller masks what it did not mean.
    """
    rows = buffer.reshape(view.num_rows, view.row_words)
    batch = first_rows.shape
    found = jax.lax.gather(
        rows,
        first_rows[..., None],
        _row_dimensions(len(batch)),
        slice_sizes=(num_rows, view.row_words),
        mode=jax.lax.GatherScatterMode.CLIP,
    )
    return found.reshape(*batch, num_rows * view.row_words)


def read_entries(
    buffer: Buffer, view: PartView, first_rows: Int[Array, "*batch"]
) -> Shaped[Array, "..."]:
    """Read the entry at each first row: ``[*batch, *view.shape]``."""
    words = read_rows(buffer, view, first_rows, view.rows_per_entry)
    return words_to_entries(words, view)


def read_blocks(
    buffer: Buffer, view: PartView, blocks: Int[Array, "*batch"]
) -> Shaped[Array, "..."]:
    """Read whole row blocks: ``[*batch, page_size, *view.shape]``.

    Args:
      buffer: The buffer ``view.buffer_index`` of the pool.
      view: The part and layer.
      blocks: Entries of a read table, without the layer's constant.
    """
    first_rows = (blocks + view.block_offset) * view.page_size
    num_rows = view.page_size * view.rows_per_entry
    words = read_rows(buffer, view, first_rows, num_rows)
    words = words.reshape(*blocks.shape, view.page_size, -1)
    return words_to_entries(words, view)


def write_entries(
    buffer: Buffer,
    view: PartView,
    first_rows: Int[Array, " entries"],
    values: Shaped[Array, "..."],
) -> Buffer:
    """Write one entry at each first row; one out of range is dropped whole.

    Args:
      buffer: The buffer ``view.buffer_index`` of the pool.
      view: The part and layer.
      first_rows: Distinct rows, the layer's constant included.
      values: ``[entries, *view.shape]``.
    """
    words = entries_to_words(values, view)
    words = words.reshape(-1, view.rows_per_entry, view.row_words)
    rows = buffer.reshape(view.num_rows, view.row_words)
    rows = jax.lax.scatter(
        rows,
        first_rows[:, None],
        words,
        jax.lax.ScatterDimensionNumbers(
            update_window_dims=(1, 2),
            inserted_window_dims=(),
            scatter_dims_to_operand_dims=(0,),
        ),
        mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
    )
    return rows.reshape(buffer.shape)
