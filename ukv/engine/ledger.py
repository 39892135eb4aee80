"""The bytes of every sequence, counted on the host, exactly as the device will.

The mirror follows each program that is dispatched. What a step allocates depends on
lengths that the host planned, also for a row that turns out to have stopped: it keeps
its pages until it is released. So nothing read from the device changes a count.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ukv.allocator import PoolMirror
from ukv.engine.window import pages_behind, window_halves
from ukv.errors import BudgetError
from ukv.layout import PoolLayout, RequestShape, pages_of_request
from ukv.layout.capacity import pages_fit

Pages = dict[str, int]


def add_pages(*counts: Mapping[str, int]) -> Pages:
    """Return the sum of page counts by name."""
    total: Pages = {}
    for pages in counts:
        for name, count in pages.items():
            total[name] = total.get(name, 0) + count
    return total


class Ledger:
    """Counts of one pool: what is held, what a step adds, what would fit.

    Attributes:
      layout: The pool's layout.
      mirror: The device's counters after all that was dispatched.
    """

    def __init__(self, layout: PoolLayout) -> None:
        """Start with an empty pool."""
        self.layout = layout
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

    def held(self, context_len: int) -> Pages:
        """Return the pages by sub-pool that a row of this length holds."""
        pages = {}
        for sub in self.layout.sub_pools:
            pages[sub.name] = -(-context_len // sub.page_size) if sub.spec.grows else 1
        for sub in self._windows:
            pages[sub.name] -= int(pages_behind(sub, context_len, np))
        return pages

    def most_held(self, num_tokens: int, chunk_len: int) -> Pages:
        """Return the most pages by sub-pool that a row holds on its way.

        Args:
          num_tokens: Its length at the end.
          chunk_len: Most tokens of a step.
        """
        shape = RequestShape(
            num_tokens=num_tokens, chunk_len=min(chunk_len, num_tokens)
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

    def release(self, context_len: int) -> None:
        """Follow the release of a row of this length."""
        self.mirror = self.mirror.release(self.held(context_len))

    def spend(
        self,
        states: Mapping[str, int],
        advances: Iterable[Sequence[tuple[int, int]]],
    ) -> Pages | None:
        """Follow a step: room if need be, states, then pages pass by pass.

        Args:
          states: Slots by owner for rows that begin.
          advances: For each pass on the device the ``(context_len, query_len)`` of
            every row in it.

        Returns:
          What to make room for before the step, or None if all fits as it is.
        """
        passes = [list(rows) for rows in advances]
        growths = [add_pages(*(self.growth(*row) for row in rows)) for rows in passes]
        needs = add_pages(dict.fromkeys(self.state_pages, 0), states, *growths)
        room = None
        if not self.mirror.fits_in_place(needs):
            self.mirror = self.mirror.make_room(needs)
            room = needs
        self.mirror = self.mirror.alloc(states)
        for rows, growth in zip(passes, growths, strict=True):
            self.mirror = self.mirror.alloc(growth)
            gone = {
                sub.name: sum(
                    int(pages_behind(sub, context + query, np))
                    - int(pages_behind(sub, context, np))
                    for context, query in rows
                )
                for sub in self._windows
            }
            self.mirror = self.mirror.release(gone)
        return room
