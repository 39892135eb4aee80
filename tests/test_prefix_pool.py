"""The prefix cache's actions on a real pool: holders, counts and bytes stay right."""

import numpy as np
import pytest

from tests import tagged_pools as pools
from tests.prefix_rows import CachedRows, HolderPool
from tests.tagged_pools import full_spec, latent_spec, state_spec, window_spec
from ukv.allocator import PoolMirror, verify
from ukv.engine.prefix_spec import PrefixSpec
from ukv.layout import packed_bytes, static_layout, unified_layout

SPECS = {
    "states": [latent_spec(page_size=32), state_spec()],
    "window": [full_spec(), window_spec(window_size=7)],
    "hybrid": [full_spec(page_size=32), state_spec(), window_spec(page_size=32)],
}
PAGES = {
    "states": {"latent": 13, "state": 5},
    "window": {"full": 16, "window": 9},
    "hybrid": {"full": 14, "state": 4, "window": 9},
}


class DevicePool(HolderPool):
    """Holders on a device, and the host's mirror of its counts beside them."""

    def __init__(self, layout):
        super().__init__(
            PrefixSpec.of(layout), {sub.name: 10**6 for sub in layout.sub_pools}
        )
        self.owners = [owner.name for owner in layout.owners]
        self.state = pools.poisoned(layout)
        self.mirror = PoolMirror.create(layout)

    def fits(self, needs):
        owned = {name: count for name, count in needs.items() if name in self.owners}
        return lambda freed: self.mirror.release(freed).can_allocate(owned)

    def make_room(self, num_pages):
        if not self.mirror.fits_in_place(num_pages):
            self.mirror = self.mirror.make_room(num_pages)
            self.state, made = pools.make_room(self.state, num_pages)
            assert bool(made.fits)

    def _alloc(self, num_pages):
        self.make_room(num_pages)
        self.mirror = self.mirror.alloc(num_pages)
        self.state, ids = pools.take(self.state, **num_pages)
        for name, (page,) in ids.items():
            for sub in self.state.layout.members(self.state.layout.owner(name)):
                self.state = pools.write_tags(self.state, sub.name, [page])
                self.hold(sub.name, page)
        return tuple(page for (page,) in ids.values())

    def new_page(self):
        return self._alloc(dict.fromkeys(self.spec.owners, 1))

    def new_state(self):
        states = dict.fromkeys(self.spec.states, 1)
        return self._alloc(states) if states else ()

    def copy_state(self, ids):
        copies = []
        for name, slot in zip(self.spec.states, ids, strict=True):
            self.make_room({name: 1})
            self.mirror = self.mirror.bind({name: 1})
            before = pools.read_pages(self.state, name, [slot])[slot]
            self.state, found, granted = pools.copy_page(
                self.state, pools.pages(name, slot)
            )
            assert bool(granted)
            (copy,) = pools.held(found)
            assert pools.read_pages(self.state, name, [copy])[copy] == before
            self.hold(name, copy)
            # The row writes its own state from here on, never the cached one.
            self.state = pools.write_tags(self.state, name, [copy])
            assert pools.read_pages(self.state, name, [slot])[slot] == before
            copies.append(copy)
        return tuple(copies)

    def _follow(self, before):
        died = {name: before[name] - len(self.holders[name]) for name in before}
        self.mirror = self.mirror.release(died)

    def _live(self):
        return {name: len(held) for name, held in self.holders.items()}

    def share(self, name, page):
        super().share(name, page)
        self.state = pools.share(self.state, pools.pages(name, page))

    def free_page(self, name, page):
        before = self._live()
        super().free_page(name, page)
        self.state = pools.free(self.state, pools.pages(name, page))
        self._follow(before)

    def free_full(self, name, page):
        before = self._live()
        super().free_full(name, page)
        self.state = pools.free_full(self.state, pools.pages(name, page))
        self._follow(before)

    def free_window(self, name, page):
        before = self._live()
        super().free_window(name, page)
        owner = self.state.layout.sub_pool(name).spec.id_space
        self.state = pools.free_window(self.state, name, pools.pages(owner, page))
        self._follow(before)

    def check(self):
        verify(self.state)
        assert not pools.errors(self.state)
        assert PoolMirror.read(self.state) == self.mirror
        for sub, tables in zip(
            self.state.layout.sub_pools, self.state.tables, strict=True
        ):
            counts = np.asarray(tables.refcounts)
            found = {int(page): int(counts[page]) for page in np.flatnonzero(counts)}
            assert found == self.holders[sub.name]


def layout_of(kind, is_unified):
    specs, num_pages = SPECS[kind], PAGES[kind]
    if not is_unified:
        return static_layout(specs, num_pages=num_pages)
    return unified_layout(specs, pool_bytes=packed_bytes(specs, num_pages))


@pytest.mark.parametrize("is_unified", [True, False], ids=["unified", "static"])
@pytest.mark.parametrize("kind", SPECS)
def test_actions_on_a_pool_that_is_too_small(kind, is_unified):
    pool = DevicePool(layout_of(kind, is_unified))
    rows = CachedRows(pool.spec, pool.limits)
    rows.pool = pool
    rng = np.random.default_rng(7)
    num_hits = num_dropped = 0
    drop = pool.drop

    def count_and_drop(dropped):
        nonlocal num_dropped
        num_dropped += sum(dropped.num_pages.values())
        drop(dropped)

    pool.drop = count_and_drop
    for step in range(28):
        symbols = [0, 0, *rng.integers(0, 2, rng.integers(1, 4))]
        tokens = [*np.repeat(symbols, pool.spec.page_size).tolist(), 9]
        row = rows.start(tokens)
        if row is not None:
            num_hits += row.hit_len > 0
            if step % 3 == 0:
                rows.insert(row)
        if row is not None and step % 4:
            rows.finish(row, is_kept=step % 7 > 0)
        elif len(rows.rows) > 1 or row is None:
            rows.finish(rows.rows[0], is_kept=bool(step % 2))
        rows.check()
        pool.check()
    assert num_hits
    assert num_dropped
    for row in list(rows.rows):
        rows.finish(row)
    pool.drop(rows.cache.clear())
    pool.check()
    assert pool.mirror.bytes_in_use() == 0
