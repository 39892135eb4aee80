"""A pool in plain Python: who holds what, and whether bytes fit.

Knows nothing of tables, holes or spans, and shares no code with the allocator: it
counts holders in lists and bytes in ints, and says what an operation must do.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from ukv.allocator import ErrorBit
from ukv.layout import Placement, PoolLayout


class PoolModel:
    """Holders of every page and window half of a pool.

    Attributes:
      layout: The pool's layout.
      holders: By sub-pool, the holders of each virtual id; index 0 is the null page.
      errors: By sub-pool, the error bits that the last operations must have set.
    """

    def __init__(self, layout: PoolLayout):
        self.layout = layout
        self.holders = {sub.name: [0] * sub.num_virtual for sub in layout.sub_pools}
        self.windows = {
            owner.name: [sub.name for sub in layout.members(owner)[1:]]
            for owner in layout.owners
        }
        self.errors = dict.fromkeys(layout.names, ErrorBit(0))

    def live(self, name: str) -> int:
        """Return the pages (the window halves) that somebody holds."""
        return sum(count > 0 for count in self.holders[name])

    def is_live(self, name: str, page: int) -> bool:
        """Return whether somebody holds a page; false for ids out of range."""
        counts = self.holders[name]
        return 0 < page < len(counts) and counts[page] > 0

    def bytes_fit(self, num_pages: Mapping[str, int]) -> bool:
        """Return whether pages by owner fit after ideal packing, in bytes."""
        wanted = {name: self.live(name) for name in self.layout.names}
        for name, count in num_pages.items():
            for member in (name, *self.windows[name]):
                wanted[member] += count
        if not self.layout.is_unified:
            # Borders are fixed; page 0 of an owner is the null page.
            return all(
                wanted[sub.name] <= sub.num_pages - sub.owns_ids
                for sub in self.layout.sub_pools
            )
        end = 0
        for sub in self.layout.sub_pools:
            size = wanted[sub.name] * sub.page_bytes
            if size and sub.placement is Placement.FLOAT:
                # A float starts on its own page grid.
                end += -end % sub.page_bytes
            end += size
        return end <= self.layout.pool_bytes

    def granted(self, name: str, pages: Sequence[int]) -> list[str]:
        """Bind new pages of an owner, all halves; return what is wrong with the ids."""
        wrong = []
        for page in pages:
            if not 0 < page < len(self.holders[name]):
                wrong.append(f"granted id {page} of {name!r} is out of range")
                continue
            for member in (name, *self.windows[name]):
                if self.holders[member][page]:
                    wrong.append(f"granted page {page} of {member!r} is held already")
                self.holders[member][page] = 1
        return wrong

    def share(self, name: str, pages: Sequence[int]) -> None:
        """Add a holder to each page and each half that exists."""
        for page in self._in_range(name, pages):
            if not self.is_live(name, page):
                self.errors[name] |= ErrorBit.UNOWNED_ID
                continue
            for member in (name, *self.windows[name]):
                self.holders[member][page] += self.holders[member][page] > 0

    def free(self, name: str, pages: Sequence[int]) -> dict[str, int]:
        """Drop a holder of both halves; return the deaths by sub-pool."""
        found = self._in_range(name, pages)
        deaths = {
            window: self._drop(window, self._with_half(window, found))
            for window in self.windows[name]
        }
        return self._drop_owner(name, found, deaths)

    def free_full(self, name: str, pages: Sequence[int]) -> dict[str, int]:
        """Drop a holder of the full half; return the deaths by sub-pool."""
        found = self._in_range(name, pages)
        return self._drop_owner(name, found, dict.fromkeys(self.windows[name], 0))

    def free_window(self, name: str, pages: Sequence[int]) -> dict[str, int]:
        """Drop a holder of the window half; return the deaths by sub-pool."""
        owner = self.layout.sub_pools[self.layout.sub_pool(name).owner].name
        return {name: self._drop(name, self._in_range(owner, pages))}

    def copy_needs(self, name: str, pages: Sequence[int]) -> dict[str, int]:
        """Return by sub-pool the halves that copies of the live pages need."""
        if any(page and not self.is_live(name, page) for page in pages):
            self.errors[name] |= ErrorBit.UNOWNED_ID
        live = [page for page in pages if self.is_live(name, page)]
        return {
            member: sum(self.is_live(member, page) for page in live)
            for member in (name, *self.windows[name])
        }

    def copied(
        self, name: str, pages: Sequence[int], copies: Sequence[int]
    ) -> list[str]:
        """Bind copies as their sources are bound; return what is wrong with them."""
        wrong = []
        for page, copy in zip(pages, copies, strict=True):
            if not page:
                if copy:
                    wrong.append(f"the null page got a copy {copy} of {name!r}")
                continue
            if not 0 < copy < len(self.holders[name]):
                wrong.append(f"copy {copy} of page {page} of {name!r} is out of range")
                continue
            for member in (name, *self.windows[name]):
                if self.holders[member][copy]:
                    wrong.append(f"copy {copy} of {member!r} is held already")
                self.holders[member][copy] = int(self.is_live(member, page))
        return wrong

    def take_errors(self) -> list[int]:
        """Return the error words expected since the last call, and forget them."""
        words = [int(self.errors[name]) for name in self.layout.names]
        self.errors = dict.fromkeys(self.layout.names, ErrorBit(0))
        return words

    def _in_range(self, name: str, pages: Sequence[int]) -> list[int]:
        """Return the pages that are ids and not null; others set their bit."""
        size = len(self.holders[name])
        if any(not 0 <= page < size for page in pages):
            self.errors[name] |= ErrorBit.ID_OUT_OF_RANGE
        return [page for page in pages if 0 < page < size]

    def _with_half(self, window: str, pages: Sequence[int]) -> list[int]:
        return [page for page in pages if self.holders[window][page]]

    def _drop(self, name: str, pages: Sequence[int]) -> int:
        deaths = 0
        for page, times in Counter(pages).items():
            before = self.holders[name][page]
            if times > before:
                self.errors[name] |= ErrorBit.DOUBLE_FREE
            self.holders[name][page] = max(before - times, 0)
            deaths += before > 0 and times >= before
        return deaths

    def _drop_owner(
        self, name: str, pages: Sequence[int], deaths: dict[str, int]
    ) -> dict[str, int]:
        was_live = {page for page in pages if self.holders[name][page]}
        deaths[name] = self._drop(name, pages)
        for page in was_live:
            if self.holders[name][page]:
                continue
            for window in self.windows[name]:
                if self.holders[window][page]:
                    self.holders[window][page] = 0
                    self.errors[window] |= ErrorBit.WINDOW_STILL_HELD
                    deaths[window] += 1
        return deaths
