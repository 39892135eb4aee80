"""The bytes of every sequence, counted on the host, exactly as the device will.

The mirror follows each program that is dispatched. What a step allocates depends on
lengths that the host planned, also for a row that turns out to have stopped: it keeps
its pages until it is released. So nothing read from the device changes a count.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from ukv.allocator import PoolMirror
from ukv.engine.prefix_spec import PrefixSpec
from ukv.engine.window import first_half, window_halves
from ukv.errors import BudgetError
from ukv.layout import PoolLayout, RequestShape, SubPoolLayout, pages_of_request
from ukv.layout.capacity import pages_fit

Pages = dict[str, int]


def add_pages(*counts: Mapping[str, int]) -> Pages:
    """Return the sum of page counts by name."""
    total: Pages = {}
    for pages in counts:
        for name, count in pages.items():
            total[name] = total.get(name, 0) + count
    return total


@dataclasses.dataclass(frozen=True)
class Advance:
    """New tokens of a row in one pass.

    Attributes:
      context_len: Tokens that it has.
      query_len: New ones.
      hit_len: Tokens that it found when it was admitted.
      num_cached: Its first pages, those that the prefix cache holds too.
    """

    context_len: int
    query_len: int
    hit_len: int = 0
    num_cached: int = 0


class Ledger:
    """Counts of one pool: what is held, what a step adds, what would fit.

    Attributes:
      layout: The pool's layout.
      prefix_spec: What a cached prefix consists of; None without a prefix cache.
      kept_tokens: Tokens for which rows hold window halves longer than they see them.
      mirror: The device's counters after all that was dispatched.
    """

    def __init__(
        self, layout: PoolLayout, prefix_spec: PrefixSpec | None = None
    ) -> None:
        """Start with an empty pool."""
        self.layout = layout
        self.prefix_spec = prefix_spec
        self.kept_tokens = 0 if prefix_spec is None else prefix_spec.kept_tokens
        self.mirror = PoolMirror.create(layout)
        self._growing = [sub for sub in layout.owners if sub.spec.grows]
        self._windows = window_halves(layout)
        self.state_pages: Pages = {
            sub.name: 1 for sub in layout.owners if not sub.spec.grows
        }

    def growth(self, context_len: int, query_len: int) -> Pages:
        """Return the pages by owner that ``query_len`` new tokens of a row need."""
        kv_len = context_len + query_len
        return {
            sub.name: -(-kv_len // sub.page_size) - -(-context_len // sub.page_size)
            for sub in self._growing
        }

    def _first_half(self, sub: SubPoolLayout, context_len: int, hit_len: int) -> int:
        return int(first_half(sub, context_len, hit_len, self.kept_tokens, np))

    def held(self, context_len: int, hit_len: int = 0) -> Pages:
        """Return the pages by sub-pool that a row of this length holds."""
        pages = {}
        for sub in self.layout.sub_pools:
            pages[sub.name] = -(-context_len // sub.page_size) if sub.spec.grows else 1
        for sub in self._windows:
            pages[sub.name] -= self._first_half(sub, context_len, hit_len)
        return pages

    def most_held(self, num_tokens: int, chunk_len: int) -> Pages:
        """Return the most pages by sub-pool that a row holds on its way.

        Args:
          num_tokens: Its length at the end.
          chunk_len: Most tokens of a step.
        """
        # Tokens that are held for the cache count as if the chunk were longer.
        shape = RequestShape(
            num_tokens=num_tokens,
            chunk_len=min(chunk_len + self.kept_tokens, num_tokens),
        )
        whole = RequestShape(num_tokens=num_tokens, chunk_len=num_tokens)
        return {
            # Pages of a window that owns its ids live as long as the row.
            sub.name: pages_of_request(sub, whole if sub.owns_ids else shape)
            for sub in self.layout.sub_pools
        }

    def fits(self, pages: Mapping[str, int]) -> bool:
        """Return whether a pool without anything else holds ``pages`` by sub-pool."""
        return pages_fit(self.layout, pages)

    def bytes_of(self, pages: Mapping[str, int]) -> int:
        """Return the bytes of pages by sub-pool."""
        return sum(
            count * self.layout.sub_pool(name).page_bytes
            for name, count in pages.items()
        )

    def require_fits(self, request_id: str, pages: Mapping[str, int]) -> None:
        """Refuse a request that could not run even if it were alone.

        Raises:
          BudgetError: With the bytes and pages of both sides.
        """
        if self.fits(pages):
            return
        wanted = ", ".join(
            f"{name} {count} x {self.layout.sub_pool(name).page_bytes:,}"
            for name, count in pages.items()
        )
        limits = ", ".join(
            f"{sub.name} {sub.num_pages - (not self.layout.is_unified)}"
            for sub in self.layout.sub_pools
        )
        raise BudgetError(
            f"request {request_id!r} can never run: it needs "
            f"{self.bytes_of(pages):,} bytes at once (pages: {wanted}), the pool has "
            f"{self.layout.pool_bytes:,} (at most, each alone: {limits}); shorten the "
            "prompt, ask for fewer tokens, or give the pool more bytes"
        )

    def can_serve(self, needs: Mapping[str, int]) -> bool:
        """Return whether ``needs`` by owner can be allocated now, moving if need be."""
        return self.mirror.can_allocate(needs)

    def would_serve(self, needs: Mapping[str, int], freed: Mapping[str, int]) -> bool:
        """Return whether ``needs`` by owner fit once ``freed`` by sub-pool are free.

        Eviction asks this for every page, so what cannot fit is told by bytes alone.
        """
        missing = -self.mirror.free_bytes() - self.bytes_of(freed)
        for name, count in needs.items():
            for sub in self.layout.members(self.layout.owner(name)):
                missing += count * sub.page_bytes
                gone = freed.get(sub.name, 0)
                if self.mirror.live(sub.name) - gone + count > sub.num_pages:
                    return False
        if missing > 0:
            return False
        return self.mirror.release(freed).can_allocate(needs)

    def release(
        self,
        context_len: int,
        hit_len: int = 0,
        outlives: Mapping[str, int] | None = None,
    ) -> None:
        """Follow the release of a row.

        Args:
          context_len: Its length.
          hit_len: Tokens that it found when it was admitted.
          outlives: By sub-pool, how many of its pages the cache holds too.
        """
        outlives = outlives or {}
        held = self.held(context_len, hit_len)
        self.drop({name: n - outlives.get(name, 0) for name, n in held.items()})

    def alloc(self, needs: Mapping[str, int]) -> None:
        """Follow an allocation of pages by owner, which fits as it is."""
        self.mirror = self.mirror.alloc(needs)

    def drop(self, pages: Mapping[str, int]) -> None:
        """Follow the death of pages by sub-pool."""
        self.mirror = self.mirror.release(pages)

    def make_room(self, needs: Mapping[str, int]) -> Pages | None:
        """Follow the move that ``needs`` by owner wait for; None if they fit as is."""
        needs = add_pages(dict.fromkeys(self.state_pages, 0), needs)
        if self.mirror.fits_in_place(needs):
            return None
        self.mirror = self.mirror.make_room(needs)
        return needs

    def spend(
        self,
        states: Mapping[str, int],
        advances: Iterable[Iterable[Advance]],
    ) -> Pages | None:
        """Follow a step: room if need be, states, then pages pass by pass.

        Args:
          states: Slots by owner for rows that begin.
          advances: For each pass on the device every row in it.

        Returns:
          What to make room for before the step, or None if all fits as it is.
        """
        passes = [list(rows) for rows in advances]
        growths = [
            add_pages(*(self.growth(row.context_len, row.query_len) for row in rows))
            for rows in passes
        ]
        room = self.make_room(add_pages(states, *growths))
        self.mirror = self.mirror.alloc(states)
        for rows, growth in zip(passes, growths, strict=True):
            self.mirror = self.mirror.alloc(growth)
            self.drop(
                {
                    sub.name: sum(self._num_left_behind(sub, row) for row in rows)
                    for sub in self._windows
                }
            )
        return room

    def _num_left_behind(self, sub: SubPoolLayout, row: Advance) -> int:
        """Return how many halves die with a row's new tokens: not the cached ones."""
        end = row.context_len + row.query_len
        first = self._first_half(sub, row.context_len, row.hit_len)
        last = self._first_half(sub, end, row.hit_len)
        return max(last - max(first, row.num_cached), 0)
