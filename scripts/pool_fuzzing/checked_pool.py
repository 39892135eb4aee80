"""A pool that is checked after every operation, against three judges.

The verifier looks at the state, the tags at the bytes of every live page, and a
plain-Python model at the holders, the error word, the grants and the refusals. The host
mirror runs along and must have the device's counters.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from scripts.pool_fuzzing.model import PoolModel
from scripts.pool_fuzzing.step import (
    MAX_NEW_PAGES,
    NUM_DECODE_STEPS,
    NUM_IDS,
    NUM_ROWS,
    TABLE_WIDTH,
    Op,
    PoolStep,
)
from ukv.allocator import ErrorBit, PoolMirror
from ukv.allocator.verify import describe_violations
from ukv.layout import PoolLayout, spans_fit
from ukv.pool import HI, LO

Counts = Mapping[str, int]


class PoolViolationError(AssertionError):
    """The pool did what it must not; the message says what, and the operation."""

    def __init__(self, op: Op, values: Mapping[str, object], lines: Sequence[str]):
        super().__init__(f"{op} {dict(values)}:\n  " + "\n  ".join(lines))
        self.lines = list(lines)


class CheckedPool:
    """A pool, its mirror and its model; each method is one operation on all three.

    Attributes:
      step: The jitted program.
      model: Holders in plain Python.
      mirror: Counts on the host.
      num_ops: Operations so far.
      kinds: Operations so far by name; those refused under ``NAME refused``.
      pages_moved: Pages that compaction has moved so far.
      refused_although_bytes_fit: Refusals of what fits after ideal packing.
      granted_although_refused_by_mirror: Grants that the mirror had ruled out.
    """

    def __init__(self, layout: PoolLayout, step: PoolStep | None = None):
        self.layout = layout
        self.step = step or PoolStep(layout)
        self.model = PoolModel(layout)
        self.mirror = PoolMirror.create(layout)
        self.num_ops = self.pages_moved = 0
        self.kinds: Counter[str] = Counter()
        self.refused_although_bytes_fit = 0
        self.granted_although_refused_by_mirror = 0
        self._state, self._tags = self.step.create()

    def free_ids(self, name: str) -> list[int]:
        """Return the ids of an owner that nobody holds."""
        counts = self.model.holders[name]
        return [page for page in range(1, len(counts)) if not counts[page]]

    def alloc(self, counts: Counts) -> dict[str, list[int]] | None:
        """Allocate without a move; return the new ids by owner, None if refused."""
        return self._allocated(("alloc", ""), counts, must_fit=False)

    def admit(self, counts: Counts) -> dict[str, list[int]] | None:
        """Make room, then allocate; the same as ``alloc`` in a static pool."""
        op = ("make_room" if self.layout.is_unified else "alloc", "")
        return self._allocated(op, counts, must_fit=True)

    def make_room(self, counts: Counts) -> bool:
        """Make room and allocate nothing; return whether the counts fit."""
        can = self.mirror.can_allocate(counts)
        self.mirror = self.mirror.make_room(counts)
        values = {"counts": self._counts(counts), "then_alloc": 0}
        out, lines = self._run(("make_room", ""), values)
        fits = bool(out["fits"])
        lines += self._judge(counts, granted=fits, promised=can, must_fit=True)
        self._finish(("make_room", ""), values, out, lines)
        return fits

    def compact(self) -> None:
        """Close every hole."""
        self.mirror = self.mirror.compact()
        out, lines = self._run(("compact", ""), {})
        if not out["fits"]:
            lines.append("compact says that what lies in the pool does not fit")
        self._finish(("compact", ""), {}, out, lines)

    def extend(
        self,
        tables: Mapping[str, Sequence[Sequence[int]]],
        context_lens: Sequence[int],
        query_lens: Sequence[int],
    ) -> dict[str, list[list[int]]] | None:
        """Extend rows; return the new ids by owner and row, None if refused."""
        counts, overflows = {}, False
        for name in self.step.growing:
            size = self.layout.sub_pool(name).page_size
            ends = [
                -(-(old + new) // size)
                for old, new in zip(context_lens, query_lens, strict=True)
            ]
            firsts = [-(-old // size) for old in context_lens]
            counts[name] = sum(
                max(end - first, 0) for end, first in zip(ends, firsts, strict=True)
            )
            if counts[name] > MAX_NEW_PAGES or any(end > TABLE_WIDTH for end in ends):
                self.model.errors[name] |= ErrorBit.TABLE_OVERFLOW
                overflows = True
        promised = not overflows and self.mirror.fits_in_place(counts)
        if not promised and not overflows:
            self._expect_refusal(counts)
        values = self._rows(tables, context_lens, query_lens)
        out, lines = self._run(("extend", ""), values)
        granted = bool(out["granted"][0])
        lines += self._judge(counts, granted=granted, promised=promised)
        new = None
        if granted:
            self.mirror = self.mirror.alloc(counts) if promised else self.mirror
            new = self._new_columns(tables, context_lens, query_lens, out, lines)
        elif not np.array_equal(out["tables"], values["tables"]):
            lines.append("a refused extension changed the page tables")
        self._finish(("extend", ""), values, out, lines)
        return new

    def decode(
        self,
        tables: Mapping[str, Sequence[Sequence[int]]],
        context_lens: Sequence[int],
        is_active: Sequence[bool],
    ) -> tuple[int, dict[str, list[list[int]]]]:
        """Run some decode steps; return how many were granted, and the new ids."""
        active = [int(flag) for flag in is_active]
        num_granted = 0
        promises = []
        for _ in range(NUM_DECODE_STEPS):
            lens = [
                old + num_granted * new
                for old, new in zip(context_lens, active, strict=True)
            ]
            counts, overflows = {}, False
            for name in self.step.growing:
                size = self.layout.sub_pool(name).page_size
                counts[name] = sum(
                    new and old % size == 0
                    for old, new in zip(lens, active, strict=True)
                )
                if any(
                    new and old // size >= TABLE_WIDTH
                    for old, new in zip(lens, active, strict=True)
                ):
                    self.model.errors[name] |= ErrorBit.TABLE_OVERFLOW
                    overflows = True
            fits = self.mirror.fits_in_place(counts)
            if not fits:
                self._expect_refusal(counts)
            promises.append(fits and not overflows)
            if promises[-1]:
                self.mirror = self.mirror.alloc(counts)
                num_granted += 1
        values = self._rows(tables, context_lens, active)
        out, lines = self._run(("decode", ""), values)
        if out["granted"].astype(bool).tolist() != promises:
            lines.append(f"steps granted {out['granted'].tolist()}, mirror {promises}")
            self.granted_although_refused_by_mirror += int(
                out["granted"].sum() > num_granted
            )
        added = [num_granted * new for new in active]
        new = self._new_columns(tables, context_lens, added, out, lines)
        self._finish(("decode", ""), values, out, lines)
        return num_granted, new

    def free(self, name: str, pages: Sequence[int], *, shape: str = "") -> None:
        """Free both halves; ``shape`` is ``_grid`` or ``_none`` for the first owner."""
        self._release((f"free{shape}", name), pages, self.model.free(name, pages))

    def free_full(self, name: str, pages: Sequence[int]) -> None:
        """Free the full half; without window halves that is ``free``."""
        if not self.model.windows[name]:
            self.free(name, pages)
            return
        deaths = self.model.free_full(name, pages)
        self._release(("free_full", name), pages, deaths)

    def free_window(self, name: str, pages: Sequence[int]) -> None:
        """Free the window half."""
        deaths = self.model.free_window(name, pages)
        self._release(("free_window", name), pages, deaths)

    def share(self, name: str, pages: Sequence[int]) -> None:
        """Add a holder."""
        self.model.share(name, pages)
        self._release(("share", name), pages, {})

    def copy(self, name: str, pages: Sequence[int]) -> list[int] | None:
        """Copy pages; return the copies, None if refused."""
        needs = self.model.copy_needs(name, pages)
        grown = self.mirror.bind(needs)
        rows = np.asarray(grown.counters)
        free = len(self.model.holders[name]) - 1 - self.mirror.live(name)
        fits = needs[name] <= free and bool(
            spans_fit(self.layout, rows[:, LO], rows[:, HI], np)
        )
        if not fits:
            self._expect_refusal(needs, by_sub_pool=True)
        promised = fits and not self.model.errors[name] & ErrorBit.UNOWNED_ID
        values = {"ids": self._ids(pages)}
        out, lines = self._run(("copy", name), values)
        granted = bool(out["granted"][0])
        if granted != promised:
            lines.append(f"copy granted: {granted}, by the mirror: {promised}")
            self.granted_although_refused_by_mirror += granted
        ids = out["ids"][self.step.owners.index(name)].tolist()
        if granted:
            self.mirror = grown
            lines += self.model.copied(name, pages, ids[: len(pages)])
        if any(ids[len(pages) if granted else 0 :]):
            lines.append(f"copy returned ids that nobody asked for: {ids}")
        self._finish(("copy", name), values, out, lines)
        return ids[: len(pages)] if granted else None

    def _allocated(
        self, op: Op, counts: Counts, *, must_fit: bool
    ) -> dict[str, list[int]] | None:
        may_move = op[0] == "make_room"
        in_bounds = all(0 <= count <= NUM_IDS for count in counts.values())
        is_count = min(counts.values()) >= 0
        has_room = is_count and self.mirror.can_allocate(counts, may_move=may_move)
        if may_move:
            self.mirror = self.mirror.make_room(counts)
        promised = has_room and in_bounds
        if not promised:
            self._expect_refusal(counts)
        values = {"counts": self._counts(counts), "then_alloc": 1}
        out, lines = self._run(op, values)
        granted = bool(out["granted"][0])
        if may_move and bool(out["fits"]) != has_room:
            lines.append(f"make_room fits: {bool(out['fits'])}, mirror: {has_room}")
        if in_bounds:
            lines += self._judge(
                counts, granted=granted, promised=promised, must_fit=must_fit
            )
        elif granted:
            lines.append("granted counts that are out of bounds")
        ids = dict(zip(self.step.owners, out["ids"].tolist(), strict=True))
        wanted = {name: counts.get(name, 0) if granted else 0 for name in ids}
        for name, count in wanted.items():
            if any(ids[name][count:]) or not all(ids[name][:count]):
                lines.append(f"{count} pages of {name!r} are the ids {ids[name]}")
        new = {name: ids[name][:count] for name, count in wanted.items()}
        if granted:
            self.mirror = self.mirror.alloc(counts) if promised else self.mirror
            for name, pages in new.items():
                lines += self.model.granted(name, pages)
        self._finish(op, values, out, lines)
        return new if granted else None

    def _judge(
        self, counts: Counts, *, granted: bool, promised: bool, must_fit: bool = False
    ) -> list[str]:
        """Compare a grant with the mirror's promise and with the model's bytes."""
        lines = []
        fits = self.model.bytes_fit(counts)
        if must_fit and fits and not (granted and promised):
            self.refused_although_bytes_fit += 1
        if granted and not promised:
            self.granted_although_refused_by_mirror += 1
            lines.append(f"granted {dict(counts)}, which the mirror had refused")
        if promised and not granted:
            lines.append(f"refused {dict(counts)}, which the mirror had promised")
        if granted and not fits:
            lines.append(f"granted {dict(counts)}, whose bytes do not fit")
        return lines

    def _expect_refusal(self, counts: Counts, *, by_sub_pool: bool = False) -> None:
        for name, count in counts.items():
            if count:
                members = () if by_sub_pool else self.model.windows[name]
                for member in (name, *members):
                    self.model.errors[member] |= ErrorBit.OUT_OF_PAGES

    def _counts(self, counts: Counts) -> list[int]:
        return [counts.get(name, 0) for name in self.step.owners]

    @staticmethod
    def _ids(pages: Sequence[int]) -> list[int]:
        return [*pages, *[0] * (NUM_IDS - len(pages))]

    def _rows(
        self,
        tables: Mapping[str, Sequence[Sequence[int]]],
        context_lens: Sequence[int],
        query_lens: Sequence[int],
    ) -> dict[str, np.ndarray]:
        padding = NUM_ROWS - len(context_lens)
        stacked = np.zeros((len(self.step.growing), NUM_ROWS, TABLE_WIDTH), np.int32)
        for index, name in enumerate(self.step.growing):
            for row, pages in enumerate(tables[name]):
                stacked[index, row, : len(pages)] = pages
        return {
            "tables": stacked,
            "context_lens": np.pad(np.asarray(context_lens, np.int32), (0, padding)),
            "query_lens": np.pad(np.asarray(query_lens, np.int32), (0, padding)),
        }

    def _new_columns(
        self,
        tables: Mapping[str, Sequence[Sequence[int]]],
        context_lens: Sequence[int],
        added: Sequence[int],
        out: Mapping[str, np.ndarray],
        lines: list[str],
    ) -> dict[str, list[list[int]]]:
        """Return the pages that rows got; the rest of the tables must be as before."""
        new = {}
        for name, found in zip(self.step.growing, out["tables"].tolist(), strict=True):
            size = self.layout.sub_pool(name).page_size
            new[name] = []
            for row, pages in enumerate(found):
                if row >= len(context_lens):
                    old, first, last = [], 0, 0
                else:
                    old = list(tables[name][row])
                    first = -(-context_lens[row] // size)
                    last = -(-(context_lens[row] + added[row]) // size)
                    last = max(first, last)
                    new[name].append(pages[first:last])
                before = [*old, *[0] * (TABLE_WIDTH - len(old))]
                before[first:last] = pages[first:last]
                if pages != before:
                    lines.append(f"row {row} of {name!r} is {pages}, was {old}")
            lines += self.model.granted(name, [p for row in new[name] for p in row])
        return new

    def _release(self, op: Op, pages: Sequence[int], deaths: Counts) -> None:
        self.mirror = self.mirror.release(deaths)
        values = {"ids": self._ids(pages)}
        out, lines = self._run(op, values)
        self._finish(op, values, out, lines)

    def _run(self, op: Op, values: Mapping[str, object]):
        self.num_ops += 1
        self._state, self._tags, out = self.step.run(
            self._state, self._tags, op, {"serial": self.num_ops, **values}
        )
        return out, []

    def _finish(
        self,
        op: Op,
        values: Mapping[str, object],
        out: Mapping[str, np.ndarray],
        lines: list[str],
    ) -> None:
        """Judge the state after an operation.

        Raises:
          PoolViolationError: With everything that is wrong.
        """
        self.pages_moved += int(out["moved"].sum())
        is_refused = not out["granted"].all() or not out["fits"]
        self.kinds[f"{op[0]} refused" if is_refused else op[0]] += 1
        lines += describe_violations(self.layout, out["report"])
        for name, bad, copies in zip(
            self.layout.names, out["bad_tags"], out["bad_copies"], strict=True
        ):
            if bad:
                lines.append(f"I7, I8: {bad} live pages of {name!r} lost their bytes")
            if copies:
                lines.append(f"{copies} copies of {name!r} differ from their source")
        counters = tuple(tuple(row) for row in out["counters"].tolist())
        if counters != self.mirror.counters:
            lines.append(f"counters {counters}, mirror {self.mirror.counters}")
        errors, expected = out["error"].tolist(), self.model.take_errors()
        if errors != expected:
            lines.append(f"error words {errors}, expected {expected}")
        for name, wanted in self.model.holders.items():
            found = out[f"holders_{name}"].tolist()
            if found != wanted:
                differ = [
                    (page, a, b)
                    for page, (a, b) in enumerate(zip(found, wanted, strict=True))
                    if a != b
                ]
                lines.append(f"I10: {name!r}: (page, holders, expected) {differ[:8]}")
        if lines:
            raise PoolViolationError(op, values, lines)
