"""Where kernels find cached rows: addresses in elements of the storage type."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedPart:
    """One part of one layer (K, V, ...) in a raw buffer.

    With `b` an entry of the read table and `i` a token's place in its page, the token's
    entry starts at

        ((b + block) * page_size) * row_elements + i * entry_elements

    Attributes:
        dtype: storage type.
        num_heads: heads of an entry.
        width: elements of a head.
        page_size: tokens of a page.
        block: the layer's constant, in blocks of `page_size` rows.
        row_elements: elements of a kernel row.
        entry_elements: elements from one token's entry to the next, padding included.
    """

    dtype: np.dtype
    num_heads: int
    width: int
    page_size: int
    block: int
    row_elements: int
    entry_elements: int


def next_power_of_2(number: int) -> int:
    """Returns the smallest power of two that is no less than a positive number."""
    return 1 << (number - 1).bit_length()
