"""Random histories of a pool: requests that come, grow, share and go, and misuse.

A history keeps to the rules of the allocator (a holder that released its window half
calls ``free_full``, and so on) but for a few operations that break them on purpose and
must change nothing but the error word.
"""

import dataclasses
import random

from scripts.pool_fuzzing.checked_pool import CheckedPool
from scripts.pool_fuzzing.step import NUM_IDS, NUM_ROWS, TABLE_WIDTH

IMPOSSIBLE = 10**6


@dataclasses.dataclass
class Request:
    """What one request holds.

    Attributes:
      context_len: Tokens so far; None if its pages are no page table.
      pages: By owner, the virtual ids, in table order.
      halves: By window sub-pool, the ids whose half it holds.
    """

    context_len: int | None
    pages: dict[str, list[int]]
    halves: dict[str, set[int]]


class History:
    """A random walk over the operations of one pool.

    Attributes:
      pool: The pool under test.
      requests: Those that hold pages.
    """

    def __init__(self, pool: CheckedPool, rng: random.Random):
        self.pool = pool
        self.rng = rng
        self.requests: list[Request] = []
        self._queue: list = []
        model = pool.model
        self._owners = list(model.windows)
        self._windows = model.windows
        kinds = {
            self._admit: 14,
            self._alloc_loose: 6,
            self._extend: 14,
            self._decode: 14,
            self._finish_request: 22,
            self._share: 5,
            self._copy_on_write: 8,
            self._misuse: 8,
            self._oversized: 3,
        }
        if any(self._windows.values()):
            kinds[self._leave_window] = 12
        if pool.layout.is_unified:
            kinds |= {self._make_room: 3, self._compact: 4}
        self._kinds, self._weights = list(kinds), list(kinds.values())

    def step(self) -> None:
        """Do one operation; its consequences for the requests may take some more."""
        if self._queue:
            self._queue.pop(0)()
            return
        (kind,) = self.rng.choices(self._kinds, self._weights)
        before = self.pool.num_ops
        kind()
        if self.pool.num_ops == before:
            # There was nothing to do it with.
            self._admit()

    def _tokens(self) -> int:
        size = self._page_size()
        if self.rng.random() < 0.3:
            return self.rng.randint(1, 6) * size
        return self.rng.randint(1, 6 * size)

    def _page_size(self) -> int:
        sizes = [self.pool.layout.sub_pool(n).page_size for n in self.pool.step.growing]
        return max(sizes, default=1)

    def _request(self, pages: dict[str, list[int]], context_len: int | None) -> Request:
        pages = {name: pages.get(name, []) for name in self._owners}
        halves = {
            window: {p for p in pages[owner] if self.pool.model.is_live(window, p)}
            for owner, windows in self._windows.items()
            for window in windows
        }
        request = Request(context_len, pages, halves)
        if any(pages.values()):
            self.requests.append(request)
        return request

    def _admit(self) -> None:
        """A request of several id spaces, with compaction if need be."""
        num_tokens = self._tokens()
        counts = {}
        for name in self._owners:
            sub = self.pool.layout.sub_pool(name)
            counts[name] = (
                min(-(-num_tokens // sub.page_size), NUM_IDS)
                if sub.spec.grows
                else self.rng.randint(0, 2)
            )
        do = self.pool.admit if self.rng.random() < 0.7 else self.pool.alloc
        granted = do(counts)
        if granted is not None:
            self._request(granted, num_tokens)

    def _alloc_loose(self) -> None:
        """Any counts, one owner more often than several; no page table."""
        counts = dict.fromkeys(self._owners, 0)
        for name in self.rng.sample(self._owners, self.rng.choice((1, 1, len(counts)))):
            counts[name] = self.rng.randint(0, self.rng.choice((2, 5, NUM_IDS)))
        do = self.pool.admit if self.rng.random() < 0.5 else self.pool.alloc
        granted = do(counts)
        if granted is not None:
            self._request(granted, None)

    def _oversized(self) -> None:
        """A transaction that must fail whole: one of its counts is impossible."""
        counts = {name: self.rng.randint(0, 2) for name in self._owners}
        bad = self.rng.choice((NUM_IDS + 1, IMPOSSIBLE, -1, -IMPOSSIBLE))
        counts[self.rng.choice(self._owners)] = bad
        do = self.pool.admit if bad > 0 and self.rng.random() < 0.5 else self.pool.alloc
        assert do(counts) is None

    def _extendable(self, most: int) -> list[Request]:
        found = [r for r in self.requests if r.context_len is not None]
        return self.rng.sample(found, min(len(found), self.rng.randint(1, most)))

    def _rows(self, rows: list[Request]) -> tuple[dict, list[int]]:
        tables = {
            name: [row.pages[name] for row in rows] for name in self.pool.step.growing
        }
        return tables, [row.context_len or 0 for row in rows]

    def _grow(self, rows: list[Request], new: dict, added: list[int]) -> None:
        for index, (row, tokens) in enumerate(zip(rows, added, strict=True)):
            row.context_len = (row.context_len or 0) + tokens
            for name, columns in new.items():
                row.pages[name] = row.pages[name] + columns[index]
                for window in self._windows[name]:
                    row.halves[window] |= set(columns[index])

    def _extend(self) -> None:
        """Chunks of prompts; now and then a row or a bound that is too short."""
        rows = self._extendable(NUM_ROWS)
        if not rows or not self.pool.step.growing:
            return
        tables, lens = self._rows(rows)
        most = self.rng.choice((1, 1, 2, 2, TABLE_WIDTH)) * self._page_size()
        query_lens = [self.rng.randint(0, most) for _ in rows]
        new = self.pool.extend(tables, lens, query_lens)
        if new is not None:
            self._grow(rows, new, query_lens)

    def _decode(self) -> None:
        """Some steps in one dispatch."""
        rows = self._extendable(NUM_ROWS)
        if not rows or not self.pool.step.growing:
            return
        tables, lens = self._rows(rows)
        is_active = [self.rng.random() < 0.85 for _ in rows]
        num_granted, new = self.pool.decode(tables, lens, is_active)
        self._grow(rows, new, [num_granted * flag for flag in is_active])

    def _finish_request(self) -> None:
        """Free everything that a request holds, as its halves demand."""
        if not self.requests:
            return
        request = self.requests.pop(self.rng.randrange(len(self.requests)))
        for owner, pages in request.pages.items():
            both, full, mixed = [], [], []
            for page in pages:
                held = [page in request.halves[w] for w in self._windows[owner]]
                (both if all(held) else full if not any(held) else mixed).append(page)
            for window in self._windows[owner]:
                halves = [page for page in mixed if page in request.halves[window]]
                self._later(self.pool.free_window, window, halves)
            self._later(self.pool.free, owner, both)
            self._later(self.pool.free_full, owner, full + mixed)
        if self._queue:
            self._queue.pop(0)()

    def _later(self, operation, name: str, pages: list[int]) -> None:
        for start in range(0, len(pages), NUM_IDS):
            part = self._padded(pages[start : start + NUM_IDS])
            is_first = name == self._owners[0] and operation == self.pool.free
            if is_first and self.rng.random() < 0.3:
                self._queue.append(lambda p=part: operation(name, p, shape="_grid"))
            else:
                self._queue.append(lambda p=part: operation(name, p))

    def _padded(self, pages: list[int]) -> list[int]:
        """Return the pages in random order, with null pages strewn in."""
        padded = pages + [0] * self.rng.randint(0, NUM_IDS - len(pages))
        self.rng.shuffle(padded)
        return padded

    def _leave_window(self) -> None:
        """Release the window halves of a request's first pages."""
        window = self.rng.choice([w for found in self._windows.values() for w in found])
        with_half = [r for r in self.requests if r.halves[window]]
        if not with_half:
            return
        request = self.rng.choice(with_half)
        owner = next(o for o, found in self._windows.items() if window in found)
        held = [p for p in request.pages[owner] if p in request.halves[window]]
        gone = held[: self.rng.randint(1, min(len(held), NUM_IDS))]
        request.halves[window] -= set(gone)
        self.pool.free_window(window, self._padded(gone))

    def _share(self) -> None:
        """A second holder of a prefix of one request's pages, in one id space."""
        held = [(r, o) for r in self.requests for o, pages in r.pages.items() if pages]
        if not held:
            return
        request, owner = self.rng.choice(held)
        found = request.pages[owner]
        pages = found[: self.rng.randint(1, min(len(found), NUM_IDS))]
        self.pool.share(owner, self._padded(pages))
        self._request({owner: pages}, None)

    def _copy_on_write(self) -> None:
        """Turn a request to private copies of some of its pages."""
        held = [(r, o) for r in self.requests for o, pages in r.pages.items() if pages]
        if not held:
            return
        request, owner = self.rng.choice(held)
        found = request.pages[owner]
        chosen = self.rng.sample(found, self.rng.randint(1, min(len(found), 4)))
        copies = self.pool.copy(owner, chosen)
        if copies is None:
            return
        gone = self._request({owner: chosen}, None)
        for window in self._windows[owner]:
            gone.halves[window] = request.halves[window] & set(chosen)
            request.halves[window] -= set(chosen)
            # A half may have lived on with another holder: the copy has it too.
            request.halves[window] |= {
                copy for copy in copies if self.pool.model.is_live(window, copy)
            }
        turned = dict(zip(chosen, copies, strict=True))
        request.pages[owner] = [turned.get(page, page) for page in found]

    def _make_room(self) -> None:
        """Room for what may never come."""
        self.pool.make_room({name: self.rng.randint(0, 9) for name in self._owners})

    def _compact(self) -> None:
        self.pool.compact()

    def _misuse(self) -> None:
        """Ids that must change nothing but the error word."""
        owner = self.rng.choice(self._owners)
        size = len(self.pool.model.holders[owner])
        free = self.pool.free_ids(owner)
        dead = self.rng.sample(free, min(len(free), 3))
        outside = [-1, -size, size, size + 7, 2**31 - 1, -(2**31)]
        bad = self.rng.choice((dead, dead * 2, self.rng.sample(outside, 2), [0, 0]))
        bad = self._padded([*bad])
        window = self.rng.choice([*self._windows[owner], ""])
        choice = self.rng.randrange(6)
        if choice == 0:
            self.pool.free(owner, bad)
        elif choice == 1:
            self.pool.free_full(owner, bad)
        elif choice == 2:
            self.pool.share(owner, bad)
        elif choice == 3 and any(bad):
            live = [p for r in self.requests for p in r.pages[owner][:1]]
            assert self.pool.copy(owner, (live + bad)[-NUM_IDS:]) is None
        elif choice == 4 and window:
            self.pool.free_window(window, bad)
        elif choice == 5 and owner == self._owners[0]:
            self.pool.free(owner, [], shape="_none")
        else:
            self._release_twice(owner)

    def _release_twice(self, owner: str) -> None:
        """Release a request's only page twice in one call, or leave its half behind."""
        model = self.pool.model
        for request in self.requests:
            for page in request.pages[owner]:
                if model.holders[owner][page] != 1:
                    continue
                request.pages[owner].remove(page)
                request.context_len = None
                for window in self._windows[owner]:
                    request.halves[window].discard(page)
                if self.rng.random() < 0.5:
                    self.pool.free(owner, self._padded([page] * self.rng.randint(2, 4)))
                else:
                    self.pool.free_full(owner, self._padded([page]))
                return
