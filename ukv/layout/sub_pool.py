"""Bytes and blocks of the pages of one sub-pool."""

import dataclasses
import enum
import math

from ukv.spec import Part, StateSpec, SubPoolSpec

# TMA wants rows that start on 16 bytes; a state slot is large, so a coarser
# alignment costs it nothing and keeps the common row of its parts long.
TOKEN_ALIGNMENT = 16
STATE_ALIGNMENT = 128


class Placement(enum.Enum):
    """Where a sub-pool lives in the buffer, and which way it grows.

    LOW grows up from byte 0, HIGH grows down from the last byte, FLOAT lives between
    them, grows up and can be relocated. OWN has a buffer of its own (static pool).
    """

    LOW = "low"
    FLOAT = "float"
    HIGH = "high"
    OWN = "own"


def padded_entry_bytes(spec: SubPoolSpec, part: Part) -> int:
    """Bytes of one entry of one layer, padded to the alignment of its kind."""
    align = STATE_ALIGNMENT if isinstance(spec, StateSpec) else TOKEN_ALIGNMENT
    return -(-part.entry_bytes // align) * align


def row_bytes_of(spec: SubPoolSpec) -> int:
    """Bytes of a kernel row: the longest row that divides the entry of every part."""
    return math.gcd(*(padded_entry_bytes(spec, part) for part in spec.parts))


def page_bytes_of(spec: SubPoolSpec) -> int:
    """Bytes of one page: ``page_size`` entries of all parts of all layers."""
    entry = sum(padded_entry_bytes(spec, part) for part in spec.parts)
    return spec.num_layers * spec.page_size * entry


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubPoolLayout:
    """Static facts of one sub-pool: its page grid and its id space.

    Physical page ``p`` occupies the bytes ``base_bytes + p * page_bytes`` and up.

    Attributes:
      spec: What the sub-pool stores.
      index: Its position among the sub-pools, from the low end.
      owner: Index of the sub-pool that owns the virtual ids it uses.
      placement: Where it lives.
      page_bytes: Bytes of a page.
      row_bytes: Bytes of a kernel row.
      base_bytes: First byte of physical page 0.
      num_pages: Physical pages of the grid.
      first_page: Where the span begins while the sub-pool is empty: 0 for the low
        end, ``num_pages`` for the high end, in between for a float.
      num_virtual: Virtual ids of the id space, the null page included.
      is_translating: Whether virtual and physical ids differ.
    """

    spec: SubPoolSpec
    index: int
    owner: int
    placement: Placement
    page_bytes: int
    row_bytes: int
    base_bytes: int
    num_pages: int
    first_page: int
    num_virtual: int
    is_translating: bool

    @property
    def name(self) -> str:
        """Name of the sub-pool."""
        return self.spec.name

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.spec.page_size

    @property
    def owns_ids(self) -> bool:
        """Whether the virtual ids are its own."""
        return self.owner == self.index

    @property
    def grows_up(self) -> bool:
        """Whether new pages come above the span (False for the HIGH end)."""
        return self.placement is not Placement.HIGH

    @property
    def blocks_per_page(self) -> int:
        """Row blocks of a page (``B``): block id of page p is ``p * B``."""
        if self.placement is Placement.OWN:
            return 1
        return self.page_bytes // (self.page_size * self.row_bytes)
