"""The host's copy of the pool's integer counts: admission without the device.

Which pages are live depends on the device, but how many are live, how many holes
there are and where each span ends depend only on counts that the host knows. The
mirror repeats the device's arithmetic on these, through the same functions, so its
answer is the device's answer.
"""

import dataclasses
import numbers
from collections.abc import Mapping

import jax
import numpy as np

from ukv.errors import BudgetError, SpecError
from ukv.layout import Placement, PoolLayout, place, spans_fit
from ukv.pool import HI, HOLES, LIVE, LO, PoolState


@dataclasses.dataclass(frozen=True)
class PoolMirror:
    """Counts of a pool, immutable: each method returns the next mirror.

    Attributes:
      layout: The pool's layout.
      counters: As ``PoolState.counters``, as nested tuples of ints.
    """

    layout: PoolLayout
    counters: tuple[tuple[int, int, int, int], ...]

    @classmethod
    def create(cls, layout: PoolLayout) -> "PoolMirror":
        """Return the mirror of an empty pool."""
        return cls(
            layout, tuple((0, 0, s.first_page, s.first_page) for s in layout.sub_pools)
        )

    @classmethod
    def read(cls, state: PoolState) -> "PoolMirror":
        """Return the mirror of a pool as it is now. Waits for the device."""
        rows = jax.device_get(state.counters).tolist()
        return cls(state.layout, tuple(tuple(row) for row in rows))

    def live(self, name: str) -> int:
        """Return the bound pages of a sub-pool."""
        return self.counters[self.layout.sub_pool(name).index][LIVE]

    def bytes_in_use(self) -> int:
        """Return the bytes of all bound pages."""
        return sum(
            row[LIVE] * sub.page_bytes
            for row, sub in zip(self.counters, self.layout.sub_pools, strict=True)
        )

    def free_bytes(self) -> int:
        """Return the bytes of the pool that no bound page occupies."""
        return self.layout.pool_bytes - self.bytes_in_use()

    def _needs(self, num_pages: Mapping[str, int]) -> np.ndarray:
        needs = np.zeros(len(self.layout.sub_pools), np.int64)
        for name, count in num_pages.items():
            if not isinstance(count, numbers.Integral) or count < 0:
                raise SpecError(
                    f"num_pages[{name!r}]={count} must be an integer of 0 or more"
                )
            for sub in self.layout.members(self.layout.owner(name)):
                needs[sub.index] = count
        return needs

    def _has_ids(self, needs: np.ndarray) -> bool:
        return all(
            needs[sub.index] <= sub.num_virtual - 1 - self.counters[sub.index][LIVE]
            for sub in self.layout.owners
        )

    def _grown(self, needs: np.ndarray) -> np.ndarray:
        """Return the counters after binding ``needs`` pages without a move."""
        grown = np.asarray(self.counters, np.int64)
        for sub in self.layout.sub_pools:
            row, need = grown[sub.index], needs[sub.index]
            growth = max(need - row[HOLES], 0)
            row[LIVE] += need
            row[HOLES] = max(row[HOLES] - need, 0)
            if sub.is_translating:
                row[HI if sub.grows_up else LO] += growth if sub.grows_up else -growth
        return grown

    def fits_in_place(self, num_pages: Mapping[str, int]) -> bool:
        """Return whether ``alloc`` would grant these counts as the pool is now.

        Args:
          num_pages: Pages by owner.
        """
        needs = self._needs(num_pages)
        if not self._has_ids(needs):
            return False
        grown = self._grown(needs)
        return bool(spans_fit(self.layout, grown[:, LO], grown[:, HI], np))

    def can_allocate(
        self, num_pages: Mapping[str, int], *, may_move: bool = True
    ) -> bool:
        """Return whether an allocation of these counts would succeed.

        Args:
          num_pages: Pages by owner.
          may_move: Whether pages may be compacted for it; False while something
            outside the pool, such as a transfer, relies on where pages lie.
        """
        if self.fits_in_place(num_pages):
            return True
        needs = self._needs(num_pages)
        if not (may_move and self.layout.is_unified and self._has_ids(needs)):
            return False
        _, fits = self._place(needs)
        return fits

    def _place(self, needs: np.ndarray) -> tuple[np.ndarray, bool]:
        counters = np.asarray(self.counters, np.int64)
        wanted = counters[:, LIVE] + needs
        if any(wanted[sub.index] > sub.num_pages for sub in self.layout.sub_pools):
            return counters[:, LO], False
        new_lo, fits = place(self.layout, counters[:, LO], wanted, np)
        return np.asarray(new_lo), bool(fits)

    def make_room(self, num_pages: Mapping[str, int]) -> "PoolMirror":
        """Return the mirror after ``make_room`` with the same counts."""
        if self.fits_in_place(num_pages):
            return self
        needs = self._needs(num_pages)
        new_lo, fits = self._place(needs)
        if not (fits and self._has_ids(needs)):
            return self
        return self._compacted(new_lo)

    def compact(self) -> "PoolMirror":
        """Return the mirror after ``compact``."""
        if not any(row[HOLES] for row in self.counters):
            return self
        new_lo, fits = self._place(np.zeros(len(self.counters), np.int64))
        return self._compacted(new_lo) if fits else self

    def _compacted(self, new_lo: np.ndarray) -> "PoolMirror":
        rows = []
        for sub, (live, _, _, _) in zip(
            self.layout.sub_pools, self.counters, strict=True
        ):
            lo = int(new_lo[sub.index])
            if sub.placement is Placement.HIGH:
                lo = sub.num_pages - live
            rows.append((live, 0, lo, lo + live))
        return dataclasses.replace(self, counters=tuple(rows))

    def alloc(self, num_pages: Mapping[str, int]) -> "PoolMirror":
        """Return the mirror after ``alloc`` of these counts.

        Raises:
          BudgetError: They do not fit without a move; ask ``can_allocate`` and, if
            it says so, ``make_room`` first.
        """
        if not self.fits_in_place(num_pages):
            raise BudgetError(
                f"{dict(num_pages)} pages do not fit in place: "
                f"{self.free_bytes():,} of {self.layout.pool_bytes:,} bytes are free, "
                f"counters {self.counters}"
            )
        grown = self._grown(self._needs(num_pages))
        return self._with(grown)

    def bind(self, num_pages: Mapping[str, int]) -> "PoolMirror":
        """Return the mirror after binding these counts by sub-pool, half by half.

        For ``copy_page``, whose tombstones have no window half.
        """
        needs = np.zeros(len(self.counters), np.int64)
        for name, count in num_pages.items():
            needs[self.layout.sub_pool(name).index] = count
        return self._with(self._grown(needs))

    def release(self, num_pages: Mapping[str, int]) -> "PoolMirror":
        """Return the mirror after these counts of pages died, by sub-pool.

        Args:
          num_pages: Pages that lost their last holder; a window sub-pool's count is
            that of its halves.

        Raises:
          BudgetError: More pages would die than live.
        """
        rows = [list(row) for row in self.counters]
        for name, count in num_pages.items():
            sub = self.layout.sub_pool(name)
            row = rows[sub.index]
            if not 0 <= count <= row[LIVE]:
                raise BudgetError(
                    f"{count} pages of {name!r} cannot be released: {row[LIVE]} live"
                )
            row[LIVE] -= count
            if not sub.is_translating:
                continue
            row[HOLES] += count
            if row[LIVE] == 0:
                row[HOLES] = 0
                if sub.placement is not Placement.FLOAT:
                    row[LO] = sub.first_page
                row[HI] = row[LO]
        return dataclasses.replace(self, counters=tuple(tuple(row) for row in rows))

    def _with(self, counters: np.ndarray) -> "PoolMirror":
        rows = tuple(tuple(int(n) for n in row) for row in counters)
        return dataclasses.replace(self, counters=rows)
