"""Where one array of one layer lies: all that an op needs to address it."""

import dataclasses
import math

import numpy as np

from ukv.errors import SpecError


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartView:
    """Addresses of one part of one layer, in kernel rows of its buffer.

    The buffer is seen as ``[num_rows, row_bytes]``. One entry (a token, or a state
    slot) takes ``rows_per_entry`` rows in a row. With ``b`` an entry of the read table
    and ``i`` a token's place in its page:

        first row = (b + block_offset) * page_size + i * rows_per_entry

    Example: MHA, 2 layers, page 16, K and V rows of 256 bytes each. A page has
    B = 4 blocks of 16 rows. Page 3 is block 12 in the table; V of layer 1 has
    block_offset 3, so its token 5 is row (12 + 3) * 16 + 5 = 245.

    Attributes:
      sub_pool: Name of the sub-pool.
      part: Name of the part.
      layer: Index of the layer among the layers of this sub-pool.
      shape: Elements of one entry.
      dtype: Storage dtype.
      page_size: Entries per page.
      row_bytes: Bytes of a kernel row, a multiple of 16.
      rows_per_entry: Kernel rows of one entry, padding included.
      block_offset: The layer's constant, in blocks of ``page_size`` rows.
      buffer_index: Which of the pool's buffers (0 when there is one).
      num_rows: Kernel rows of that whole buffer.
    """

    sub_pool: str
    part: str
    layer: int
    shape: tuple[int, ...]
    dtype: np.dtype
    page_size: int
    row_bytes: int
    rows_per_entry: int
    block_offset: int
    buffer_index: int
    num_rows: int

    @property
    def row_words(self) -> int:
        """uint32 words of a kernel row."""
        return self.row_bytes // 4

    @property
    def num_elements(self) -> int:
        """Elements of one entry, padding excluded."""
        return math.prod(self.shape)

    @property
    def row_offset(self) -> int:
        """The layer's constant, in kernel rows."""
        return self.block_offset * self.page_size

    @property
    def byte_offset(self) -> int:
        """The layer's constant, in bytes."""
        return self.row_offset * self.row_bytes

    def with_page_size(self, page_size: int) -> "PartView":
        """Return the view for a table whose entries hold fewer tokens.

        Raises:
          SpecError: The size does not divide, or an entry takes several rows.
        """
        if self.page_size % page_size or self.rows_per_entry != 1:
            raise SpecError(
                f"{self.sub_pool}.{self.part} cannot be read in pages of {page_size}: "
                f"that must divide page_size={self.page_size}, and its entries must "
                f"take one row, not {self.rows_per_entry}"
            )
        pieces = self.page_size // page_size
        return dataclasses.replace(
            self, page_size=page_size, block_offset=self.block_offset * pieces
        )
