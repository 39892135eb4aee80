"""Rows that use a prefix cache, and the holders that a device would count.

The pool knows no tree: it counts holders by id, does what the cache's actions say, in
the way of ``ukv.allocator``, and refuses what sets an error bit there.
"""

import dataclasses

from ukv.engine.prefix_cache import PrefixCache
from ukv.engine.prefix_eviction import Dropped
from ukv.engine.prefix_lease import Lease
from ukv.engine.prefix_spec import PrefixSpec


class HolderPool:
    """Holders of every page, half and state slot, by sub-pool and id."""

    def __init__(self, spec: PrefixSpec, limits: dict[str, int]):
        self.spec, self.limits = spec, limits
        self.holders = {name: {} for name in limits}
        self.ids = {name: iter(range(1, 10**9)) for name in limits}

    def free(self, name):
        return self.limits[name] - len(self.holders[name])

    def fits(self, needs):
        def ask(freed):
            return all(
                self.free(name) + freed.get(name, 0) >= need
                for name, need in needs.items()
            )

        return ask

    def hold(self, name, page, count=1):
        held = self.holders[name]
        assert held.get(page, 0) + count >= 0, f"double free of {name} {page}"
        held[page] = held.get(page, 0) + count
        if not held[page]:
            del held[page]

    def new_page(self):
        ids = tuple(next(self.ids[name]) for name in self.spec.owners)
        for name, page in zip(self.spec.owners, ids, strict=True):
            self.hold(name, page)
        for half in self.spec.windows:
            self.hold(half.name, ids[half.owner])
        assert all(self.free(name) >= 0 for name in self.limits)
        return ids

    def free_full(self, name, page):
        """Let go of a page alone."""
        self.hold(name, page, -1)

    def free_window(self, name, page):
        """Let go of a half."""
        self.hold(name, page, -1)

    def copy_state(self, ids):
        """Return a copy of the slots of a state."""
        assert all(
            self.holders[n][s] for n, s in zip(self.spec.states, ids, strict=True)
        )
        return self.new_state()

    def new_state(self):
        ids = tuple(next(self.ids[name]) for name in self.spec.states)
        for name, slot in zip(self.spec.states, ids, strict=True):
            self.hold(name, slot)
        assert all(self.free(name) >= 0 for name in self.limits)
        return ids

    def share(self, name, page):
        """Add a holder to a page and to each half that is there."""
        assert self.holders[name].get(page, 0) > 0, f"{name} {page} is free"
        self.hold(name, page)
        for half in self._halves(name):
            if page in self.holders[half.name]:
                self.hold(half.name, page)

    def free_page(self, name, page):
        """Let go of a page and of each half that is there."""
        for half in self._halves(name):
            if page in self.holders[half.name]:
                self.hold(half.name, page, -1)
        self.hold(name, page, -1)

    def free_state(self, ids):
        for name, slot in zip(self.spec.states, ids, strict=True):
            self.free_full(name, slot)

    def _halves(self, name):
        place = self.spec.owners.index(name)
        return [half for half in self.spec.windows if half.owner == place]

    def drop(self, dropped: Dropped):
        """Free what the cache let go of; each page of it dies."""
        before = {name: len(held) for name, held in self.holders.items()}
        for name, slots in dropped.states.items():
            for slot in slots:
                self.free_full(name, slot)
        for name, pages in dropped.halves.items():
            for page in pages:
                self.free_window(name, page)
        for name, pages in dropped.pages.items():
            for page in pages:
                self.free_page(name, page)
        died = {n: before[n] - len(held) for n, held in self.holders.items()}
        assert {n: count for n, count in died.items() if count} == dropped.num_pages


@dataclasses.dataclass(eq=False, kw_only=True)
class Row:
    """A request: its tokens, pages and states."""

    tokens: list[int]
    lease: Lease
    hit_len: int
    pages: list[tuple[int, ...]]
    half_starts: list[int]
    state: tuple[int, ...]
    checkpoints: dict[int, tuple[int, ...]]


class CachedRows:
    """What an engine does with a prefix cache."""

    def __init__(self, spec: PrefixSpec, limits: dict[str, int]):
        self.spec = spec
        self.cache = PrefixCache(spec)
        self.pool = HolderPool(spec, limits)
        self.rows: list[Row] = []

    def needs(self, num_pages, num_states):
        names = [*self.spec.owners, *(half.name for half in self.spec.windows)]
        states = dict.fromkeys(self.spec.states, num_states)
        return {**dict.fromkeys(names, num_pages), **states}

    def make_room(self, needs):
        dropped = self.cache.evict(self.pool.fits(needs))
        if dropped is None:
            return False
        self.pool.drop(dropped)
        assert self.pool.fits(needs)({})
        return True

    def start(self, tokens, *, has_checkpoints=True):
        """Look up, pin, allocate, in this order; None if there is no room."""
        spec, pool = self.spec, self.pool
        match = self.cache.match(tokens)
        lease = self.cache.pin(match)
        hit_pages = len(match.path)
        num_new = -(-len(tokens) // spec.page_size) - hit_pages
        if not self.make_room(self.needs(num_new, 1)):
            self.cache.release(lease)
            return None
        pages = lease.pages
        for ids in pages:
            for name, page in zip(spec.owners, ids, strict=True):
                pool.share(name, page)
        source = lease.state
        row = Row(
            tokens=list(tokens[: match.hit_len]),
            lease=lease,
            hit_len=match.hit_len,
            pages=pages,
            half_starts=[0] * len(spec.windows),
            state=pool.new_state() if source is None else pool.copy_state(source),
            checkpoints={},
        )
        # A row holds no half that its window does not see.
        for window, half in enumerate(spec.windows):
            start = lease.half_starts[window]
            for column in range(start):
                if lease.path[column].halves[window]:
                    pool.free_window(half.name, pages[column][half.owner])
            row.half_starts[window] = start
        self.cache.finish_copy(lease)
        row.pages += [pool.new_page() for _ in range(num_new)]
        self.rows.append(row)
        ends = spec.chunk_ends(len(tokens), match.full_len) if has_checkpoints else ()
        for end in [end for end in ends if end > match.hit_len]:
            row.tokens = list(tokens[:end])
            self._advance(row)
            if spec.states and self.make_room(self.needs(0, 1)):
                row.checkpoints[end] = pool.new_state()
            self.insert(row)
        row.tokens = list(tokens)
        self._advance(row)
        return row

    def grow(self, row, tokens):
        """Decode these tokens; False if there is no room."""
        size = self.spec.page_size
        num_pages = -(-(len(row.tokens) + len(tokens)) // size) - len(row.pages)
        if not self.make_room(self.needs(num_pages, 0)):
            return False
        row.tokens += tokens
        row.pages += [self.pool.new_page() for _ in range(num_pages)]
        self._advance(row)
        return True

    def _advance(self, row):
        self.cache.advance(row.lease, len(row.tokens))
        for window, half in enumerate(self.spec.windows):
            stop = self.spec.kept_start(half, len(row.tokens))
            for ids in row.pages[row.half_starts[window] : stop]:
                self.pool.free_window(half.name, ids[half.owner])
            row.half_starts[window] = max(row.half_starts[window], stop)

    def insert(self, row):
        done = self.cache.insert(row.lease, row.tokens, row.pages, row.checkpoints)
        self.carry_out(row, done)
        return done

    def carry_out(self, row, done):
        """Do what the cache asks for after an insertion."""
        for name, pages in done.shares.items():
            for page in pages:
                self.pool.share(name, page)
        self.pool.drop(done.dropped)
        for ids in done.unused_states:
            self.pool.free_state(ids)
        row.checkpoints = {}

    def finish(self, row, *, is_kept=True):
        """End a row: keep what it computed, or not."""
        spec, pool, lease = self.spec, self.pool, row.lease
        done = None
        if is_kept:
            done = self.cache.finish(lease, row.tokens, row.pages, row.checkpoints)
            outlives = done.outlives
            self.carry_out(row, done)
        else:
            outlives = self.cache.shared_pages(lease)
            self.cache.release(lease)
        before = {name: len(held) for name, held in pool.holders.items()}
        for window, half in enumerate(spec.windows):
            for ids in row.pages[row.half_starts[window] :]:
                pool.free_window(half.name, ids[half.owner])
        for ids in row.pages:
            for name, page in zip(spec.owners, ids, strict=True):
                pool.free_full(name, page)
        # The count that a host ledger would use is the device's.
        held = dict.fromkeys(spec.owners, len(row.pages))
        for half, start in zip(spec.windows, row.half_starts, strict=True):
            held[half.name] = len(row.pages) - start
        for name, count in held.items():
            died = before[name] - len(pool.holders[name])
            assert died == count - outlives[name], name
        pool.free_state(row.state)
        for ids in row.checkpoints.values():
            pool.free_state(ids)
        self.rows.remove(row)
        return done

    def run(self, tokens, **kwargs):
        """Start and finish a row at once; return how many tokens hit."""
        row = self.start(tokens, **kwargs)
        assert row is not None
        self.finish(row)
        return row.hit_len

    def check(self):
        """Compare every holder with those who say they hold, by component."""
        spec, cache = self.spec, self.cache
        expected = {name: {} for name in self.pool.limits}

        def add(name, page):
            expected[name][page] = expected[name].get(page, 0) + 1

        for node in cache.tree.nodes():
            for name, page in zip(spec.owners, node.ids, strict=True):
                add(name, page)
            for half, is_there in zip(spec.windows, node.halves, strict=True):
                if is_there:
                    add(half.name, node.ids[half.owner])
            for name, slot in zip(spec.states, node.state or (), strict=False):
                add(name, slot)
        assert cache.held_pages() == {n: len(held) for n, held in expected.items()}
        for row in self.rows:
            for ids in row.pages:
                for name, page in zip(spec.owners, ids, strict=True):
                    add(name, page)
            for half, start in zip(spec.windows, row.half_starts, strict=True):
                for ids in row.pages[start:]:
                    add(half.name, ids[half.owner])
            for ids in [row.state, *row.checkpoints.values()]:
                for name, slot in zip(spec.states, ids, strict=True):
                    add(name, slot)
        assert expected == self.pool.holders
        # What is pinned is what rows hold, so the rest can go.
        mine = {ids for row in self.rows for ids in row.pages}
        pinned = {node.ids for node in cache.tree.nodes() if node.pins}
        assert pinned <= mine
