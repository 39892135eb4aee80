"""Moves the pages of a small pool to the far end of one that int32 cannot count.

The small pool is written by NumPy; its pages go to the last pages of a pool of many
gigabytes, most of which stays poison, NaN in every dtype.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ukv.layout import PoolLayout, unified_layout
from ukv.pool import create_pool

FAR_BYTES = 9 << 30
"""More than 2**31 elements of bfloat16, and of every address in 4 GiB."""

POISON = 0xFFFFFFFF


def far_layout(near: PoolLayout, name: str, pool_bytes: int = FAR_BYTES) -> PoolLayout:
    """A large pool for one sub-pool of a small one."""
    return unified_layout([near.sub_pool(name).spec], pool_bytes=pool_bytes)


@functools.partial(jax.jit, donate_argnums=0)
def _put(buffer: jax.Array, first_row: jax.Array, rows: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(buffer, rows, (first_row, 0))


def page_words(layout: PoolLayout, buffers, name: str, page: int) -> np.ndarray:
    """The words of one page of a unified pool, on the host."""
    first, count = _rows_of(layout, name, page)
    rows = jax.lax.dynamic_slice_in_dim(buffers[0], first, count)
    return np.asarray(rows).reshape(-1)


def _rows_of(layout: PoolLayout, name: str, page: int) -> tuple[int, int]:
    sub, row_bytes = layout.sub_pool(name), 4 * layout.buffer_words[0]
    first = (sub.base_bytes + page * sub.page_bytes) // row_bytes
    return first, sub.page_bytes // row_bytes


def far_buffers(
    near: PoolLayout, buffers, far: PoolLayout, name: str, pages: dict[int, int]
) -> tuple[jax.Array]:
    """A poisoned pool that holds some pages of a small one.

    Args:
      near: Layout of the small pool, unified.
      buffers: Its buffers.
      far: Layout of the large pool.
      name: The sub-pool.
      pages: Where each page of the small pool goes.
    """
    (buffer,) = create_pool(far, fill_word=POISON).buffers
    for page, to in pages.items():
        words = page_words(near, buffers, name, page)
        first, count = _rows_of(far, name, to)
        buffer = _put(buffer, jnp.int32(first), jnp.asarray(words.reshape(count, -1)))
    return (buffer,)
