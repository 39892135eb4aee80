"""What the prefix cache hands out: matches, leases, and what an insertion asks for."""

import dataclasses
from collections.abc import Mapping, Sequence

from ukv.engine.prefix_eviction import Dropped
from ukv.engine.radix_tree import Ids, PageNode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Match:
    """What is cached of some tokens.

    Attributes:
      path: The pages of the usable prefix.
      hit_len: Tokens of it.
      full_len: Tokens whose pages are cached, whether a prefix can end there or not.
    """

    path: tuple[PageNode, ...]
    hit_len: int
    full_len: int


@dataclasses.dataclass(eq=False, kw_only=True)
class Lease:
    """What a row holds of the cache.

    Attributes:
      path: The first pages of the row, which the cache holds too.
      half_starts: By window, the first page whose half the row holds.
      source: The node whose state it starts from, until the copy is dispatched.
      is_open: Whether it was not released yet.
    """

    path: list[PageNode]
    half_starts: list[int]
    source: PageNode | None = None
    is_open: bool = True

    @property
    def pages(self) -> list[Ids]:
        """Ids of the cached pages."""
        return [node.ids for node in self.path]

    @property
    def state(self) -> Ids | None:
        """Slots to copy into the row's own; None if there are none to copy."""
        return None if self.source is None else self.source.state


@dataclasses.dataclass(frozen=True, kw_only=True)
class Insertion:
    """What the device has to do after an insertion, in the order of the fields.

    Attributes:
      shares: By owner, pages of the row that the cache holds too from now on.
      dropped: Pages that these took the place of.
      unused_states: Checkpoints that the cache did not take over.
      outlives: By sub-pool, how many pages of the row the cache holds too: they
        outlive it.
    """

    shares: Mapping[str, Sequence[int]]
    dropped: Dropped
    unused_states: Sequence[Ids]
    outlives: Mapping[str, int]
