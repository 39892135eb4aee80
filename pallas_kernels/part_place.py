"""Where one part of one layer lies in the slots of a pool."""

import dataclasses
import math

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartPlace:
    """One part of one layer, in rows of the pool.

    Kernels get slots as numbers of their first rows. A part lies at the same distance
    from it in every slot.

    Attributes:
        shape: elements of the part.
        dtype: name of their dtype.
        row: rows from a slot's start to the part.
        row_words: uint32 words of a row, a multiple of 4.
        num_rows: rows of the pool.
    """

    shape: tuple[int, ...]
    dtype: str
    row: int
    row_words: int
    num_rows: int

    def __post_init__(self):
        """Checks the ranges."""
        if self.row_words % 4:
            raise ValueError(f"{self.row_words=} must be a multiple of 4")

    @property
    def last_row(self) -> int:
        """Last row at which the part fits into the pool."""
        num_bytes = math.prod(self.shape) * jnp.dtype(self.dtype).itemsize
        return self.num_rows - -(-num_bytes // (4 * self.row_words))
