"""The prefix cache against a dict of prefixes, and one method at a time."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest
from hypothesis import stateful

from tests.pools import kda_mla_specs, window_specs
from tests.prefix_rows import CachedRows
from ukv.engine.prefix_cache import PrefixCache
from ukv.engine.prefix_spec import PrefixSpec, WindowHalf
from ukv.errors import SpecError
from ukv.layout import packed_bytes, unified_layout
from ukv.spec import SlidingWindowSpec, kda_state_spec

FULL = PrefixSpec(page_size=4, owners=("full",))
STATES = PrefixSpec(page_size=32, owners=("mla",), states=("kda",))
WINDOW = PrefixSpec(
    page_size=4, owners=("full",), windows=(WindowHalf(name="swa", size=6),)
)
WIDE_PAGES = PrefixSpec(
    page_size=8,
    owners=("full",),
    windows=(WindowHalf(name="swa", size=3), WindowHalf(name="wide", size=10)),
)
HYBRID = PrefixSpec(
    page_size=32,
    owners=("full", "mla"),
    windows=(WindowHalf(name="swa", size=40, owner=1),),
    states=("kda", "conv"),
)


def limits_of(spec, pages, states):
    names = [*spec.owners, *(half.name for half in spec.windows)]
    return {**dict.fromkeys(names, pages), **dict.fromkeys(spec.states, states)}


def new_rows(spec, pages=1000, states=1000):
    return CachedRows(spec, limits_of(spec, pages, states))


def tokens_of(spec, symbols, more=0):
    """Tokens with one symbol for each page, and some more of the next page."""
    size = spec.page_size
    return [symbol for symbol in symbols for _ in range(size)] + [9] * more


@dataclasses.dataclass
class Entry:
    """What the model knows of one cached page."""

    page: int
    halves: set[str]
    has_state: bool


class PrefixMachine(stateful.RuleBasedStateMachine):
    """Any order of requests; the model is a dict from tokens to what is cached.

    The dict is kept by ids, from what the cache tells the device alone.
    """

    spec = FULL
    pages, states = 20, 7

    def __init__(self):
        super().__init__()
        self.rows = new_rows(self.spec, self.pages, self.states)
        self.model: dict[tuple[int, ...], Entry] = {}
        drop = self.rows.pool.drop

        def drop_and_note(dropped):
            self.note_drop(dropped)
            drop(dropped)

        self.rows.pool.drop = drop_and_note
        self.carry_out_on_pool = self.rows.carry_out
        self.rows.carry_out = self.carry_out
        self.slots: dict[int, tuple[int, ...]] = {}

    def note_drop(self, dropped):
        owner, windows = self.spec.owners[0], self.spec.windows
        gone = set(dropped.pages.get(owner, ()))
        self.model = {k: e for k, e in self.model.items() if e.page not in gone}
        ids = {half.name: set(dropped.halves.get(half.name, ())) for half in windows}
        for key, entry in self.model.items():
            node = self.rows.cache.tree.path(key)[-1]
            for half in windows:
                if node.ids[half.owner] in ids[half.name]:
                    entry.halves.remove(half.name)
        for slot in dropped.states.get((self.spec.states or ("",))[0], ()):
            key = self.slots.pop(slot)
            if key in self.model:
                self.model[key].has_state = False

    def best(self, tokens, most):
        """The longest usable prefix, by looking at every length."""
        size = self.spec.page_size
        for depth in range(most // size, 0, -1):
            found = [
                self.model.get(tuple(tokens[: n * size])) for n in range(1, depth + 1)
            ]
            if any(entry is None for entry in found):
                continue
            tails = all(
                half.name in entry.halves
                for half in self.spec.windows
                for n, entry in enumerate(found)
                if (n + 1) * size > depth * size - half.size + 1
            )
            if tails and (found[-1].has_state or not self.spec.states):
                return depth * size
        return 0

    @stateful.rule(
        symbols=st.lists(st.integers(0, 1), max_size=7),
        more=st.integers(0, 3),
        has_checkpoints=st.sampled_from([True, True, False]),
        is_over=st.booleans(),
    )
    def start(self, symbols, more, has_checkpoints, is_over):
        if len(self.rows.rows) == 3:
            self.rows.finish(self.rows.rows[0], is_kept=False)
        tokens = tokens_of(self.spec, symbols, more) or [9]
        expected = self.best(tokens, len(tokens) - 1)
        row = self.rows.start(tokens, has_checkpoints=has_checkpoints)
        if row is not None:
            assert row.hit_len == expected
            path = self.rows.cache.tree.path(tokens[:expected])
            assert row.lease.path[: len(path)] == path
            if is_over:
                self.rows.finish(row)

    @stateful.rule(which=st.integers(0, 9), symbols=st.lists(st.integers(0, 1)))
    def grow(self, which, symbols):
        if self.rows.rows and symbols:
            row = self.rows.rows[which % len(self.rows.rows)]
            fill = -len(row.tokens) % self.spec.page_size
            self.rows.grow(row, [9] * fill + tokens_of(self.spec, symbols[:3]))

    @stateful.rule(which=st.integers(0, 9), is_over=st.booleans())
    def insert(self, which, is_over):
        if self.rows.rows:
            row = self.rows.rows[which % len(self.rows.rows)]
            _ = self.rows.finish(row) if is_over else self.rows.insert(row)

    def carry_out(self, row, done):
        """Note an insertion before the device hears of it."""
        self.note_drop(done.dropped)
        size, before = self.spec.page_size, set(self.model)
        owner = self.spec.owners[0]
        columns = {ids[0]: column for column, ids in enumerate(row.pages)}
        for page in done.shares.get(owner, ()):
            key = tuple(row.tokens[: (columns[page] + 1) * size])
            halves = {
                half.name
                for half, start in zip(self.spec.windows, row.half_starts, strict=True)
                if columns[page] >= start
            }
            had = key in self.slots.values()
            self.model[key] = Entry(page, halves, had)
        for end, ids in row.checkpoints.items():
            if ids not in done.unused_states:
                key = tuple(row.tokens[:end])
                assert not self.model[key].has_state
                self.model[key].has_state = True
                self.slots[ids[0]] = key
        # Nothing new lies beyond what a match can use.
        added = max(map(len, set(self.model) - before), default=0)
        assert self.best(row.tokens, len(row.tokens)) >= added
        self.carry_out_on_pool(row, done)

    @stateful.rule(which=st.integers(0, 9))
    def lose(self, which):
        if self.rows.rows:
            row = self.rows.rows[which % len(self.rows.rows)]
            self.rows.finish(row, is_kept=False)

    @stateful.rule(
        pages=st.integers(-1, 4), halves=st.integers(-1, 4), states=st.integers(-1, 3)
    )
    def evict(self, pages, halves, states):
        spec, cache, pool = self.spec, self.rows.cache, self.rows.pool
        more = {
            **dict.fromkeys(spec.owners, pages),
            **{half.name: halves for half in spec.windows},
            **dict.fromkeys(spec.states, states),
        }
        needs = {name: max(pool.free(name) + n, 0) for name, n in more.items()}
        short = {n: max(need - pool.free(n), 0) for n, need in needs.items()}
        evictable = self.evictable()
        assert cache.evictable_pages() == evictable
        dropped = cache.evict(pool.fits(needs))
        if dropped is None:
            assert any(evictable[name] < count for name, count in short.items())
            return
        num_pages = {name: dropped.num_pages.get(name, 0) for name in short}
        assert all(num_pages[name] >= count for name, count in short.items())
        # Of no component goes more than is short; a page takes along what it has.
        most = max(short[name] for name in spec.owners)
        assert num_pages[spec.owners[0]] == most
        for name in [*spec.states, *(half.name for half in spec.windows)]:
            same = spec.states if name in spec.states else (name,)
            wanted = max(short[other] for other in same)
            assert wanted <= num_pages[name] <= max(wanted, most)
        pool.drop(dropped)

    def evictable(self):
        """Pages that only the cache holds."""
        spec, pool = self.spec, self.rows.pool
        nodes = list(self.rows.cache.tree.nodes())
        counts = {
            name: sum(pool.holders[name][node.ids[place]] == 1 for node in nodes)
            for place, name in enumerate(spec.owners)
        }
        for window, half in enumerate(spec.windows):
            counts[half.name] = sum(
                node.halves[window]
                and pool.holders[half.name][node.ids[half.owner]] == 1
                for node in nodes
            )
        for name in spec.states:
            counts[name] = sum(node.state is not None for node in nodes)
        return counts

    @stateful.rule(chance=st.integers(0, 5))
    def clear(self, chance):
        if chance:
            return
        self.rows.pool.drop(self.rows.cache.clear())
        assert not any(self.rows.cache.evictable_pages().values())

    @stateful.invariant()
    def holders_are_those_who_hold(self):
        self.rows.check()

    @stateful.invariant()
    def the_tree_is_the_dict(self):
        size, tree = self.spec.page_size, self.rows.cache.tree
        for key in self.model:
            assert len(tree.path(key)) * size == len(key)
            assert len(key) == size or key[:-size] in self.model
        assert sum(1 for _ in tree.nodes()) == len(self.model)

    @stateful.invariant()
    def counts_are_those_of_a_search(self):
        tree, windows = self.rows.cache.tree, range(len(self.spec.windows))
        nodes = [tree.root, *tree.nodes()]
        anchors = [node for node in nodes if node.is_anchor]
        assert all(tree.is_usable(anchor) for anchor in anchors)
        uses = {id(node): [0] * len(windows) for node in nodes}
        for anchor in anchors:
            for window in windows:
                for node in tree.tail(anchor, window):
                    uses[id(node)][window] += 1
        for node in nodes:
            children = node.children.values()
            needed = sum(child.num_needed > 0 for child in children)
            assert node.num_needed == needed + node.is_anchor
            assert node.tail_uses == uses[id(node)]
        pages = nodes[1:]
        loose = [
            {n for n in pages if n.state and not (n.state_pins or n.is_anchor)},
            *(
                {
                    n
                    for n in pages
                    if n.halves[w] and not (n.half_pins[w] or n.tail_uses[w])
                }
                for w in windows
            ),
            {n for n in pages if not (n.pins or n.num_needed or n.children)},
        ]
        assert [set(found) for found in tree.loose] == loose
        assert self.rows.cache.evictable_pages() == self.evictable()

    def teardown(self):
        for row in list(self.rows.rows):
            self.rows.finish(row, is_kept=False)
        self.rows.pool.drop(self.rows.cache.clear())
        assert not any(self.rows.pool.holders.values())
        tree = self.rows.cache.tree
        assert not any(tree.num_held + tree.num_evictable)
        assert not any(tree.loose)
        assert not tree.root.children
        assert tree.root.num_needed == 0


SETTINGS = hypothesis.settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True
)


def machine_of(spec):
    found = type("Machine", (PrefixMachine,), {"spec": spec})
    found.TestCase.settings = SETTINGS
    return found.TestCase


TestFull = machine_of(FULL)
TestStates = machine_of(STATES)
TestWindow = machine_of(WINDOW)
TestWidePages = machine_of(WIDE_PAGES)
TestHybrid = machine_of(HYBRID)


def test_the_spec_follows_the_layout():
    specs = window_specs(16)
    layout = unified_layout(specs, pool_bytes=packed_bytes(specs, {"full": 9}))
    assert PrefixSpec.of(layout) == PrefixSpec(
        page_size=16,
        owners=("full",),
        windows=(WindowHalf(name="swa", size=20),),
        states=("state",),
    )
    assert PrefixSpec.of(layout).grid == 64
    specs = kda_mla_specs(48)
    layout = unified_layout(specs, pool_bytes=packed_bytes(specs, {"mla": 9}))
    assert PrefixSpec.of(layout).grid == 192


@pytest.mark.parametrize("page_size", [1, 4, 7])
def test_a_tail_is_what_the_next_token_sees(page_size):
    for size in range(1, 20):
        half = WindowHalf(name="swa", size=size)
        spec = PrefixSpec(page_size=page_size, owners=("full",), windows=(half,))
        for num_pages in range(9):
            seen = range(
                max(num_pages * page_size - size + 1, 0), num_pages * page_size
            )
            first = min((token // page_size for token in seen), default=num_pages)
            assert spec.tail_start(half, num_pages) == first


def test_a_window_with_ids_of_its_own_is_a_page():
    swa = SlidingWindowSpec(
        name="swa", num_layers=1, page_size=8, num_kv_heads=1, head_dim=8, window_size=9
    )
    layout = unified_layout([swa], pool_bytes=packed_bytes([swa], {"swa": 5}))
    assert PrefixSpec.of(layout) == PrefixSpec(page_size=8, owners=("swa",))


def test_a_pool_of_states_has_no_prefix():
    state = kda_state_spec(
        name="kda", num_layers=1, num_heads=1, key_dim=8, value_dim=8, conv_width=2
    )
    layout = unified_layout([state], pool_bytes=packed_bytes([state], {"kda": 5}))
    with pytest.raises(SpecError, match="no sub-pool grows"):
        PrefixSpec.of(layout)


def test_one_page_size_for_all_owners():
    specs = [kda_mla_specs(16)[0], window_specs(32)[0]]
    layout = unified_layout(
        specs, pool_bytes=packed_bytes(specs, {"mla": 4, "full": 4})
    )
    with pytest.raises(SpecError, match=r"one page size, got .*16.*32"):
        PrefixSpec.of(layout)


def test_a_stale_match_is_refused():
    rows = new_rows(FULL)
    rows.run(tokens_of(FULL, [1, 2]))
    match = rows.cache.match(tokens_of(FULL, [1, 2, 3]))
    rows.pool.drop(rows.cache.clear())
    with pytest.raises(ValueError, match="stale"):
        rows.cache.pin(match)


def test_a_lease_is_released_once():
    cache = PrefixCache(FULL)
    lease = cache.pin(cache.match([1, 2]))
    cache.release(lease)
    with pytest.raises(ValueError, match="released before"):
        cache.release(lease)
    with pytest.raises(ValueError, match="released before"):
        cache.insert(lease, [1, 2], [])


def test_pages_and_checkpoints_of_an_insertion_are_checked():
    cache = PrefixCache(STATES)
    lease = cache.pin(cache.match([1]))
    tokens = tokens_of(STATES, [1, 2])
    with pytest.raises(ValueError, match="64 tokens fill 2 pages, got 1"):
        cache.insert(lease, tokens, [(1,)])
    for place in (32, 128, 0):
        with pytest.raises(ValueError, match=f"after {place} tokens.*grid of 64"):
            cache.insert(lease, tokens, [(1,), (2,)], {place: (7,)})


def test_the_oldest_prefix_goes_first_and_from_its_end():
    rows = new_rows(FULL)
    for symbols in ([1, 2, 3], [1, 2, 4], [5, 6]):
        rows.run(tokens_of(FULL, symbols))
    rows.run(tokens_of(FULL, [1, 2, 3], more=1))
    order = []
    for _ in range(6):
        rows.pool.limits["full"] -= rows.pool.free("full")
        dropped = rows.cache.evict(rows.pool.fits({"full": 1}))
        assert dropped is not None
        (page,) = dropped.pages["full"]
        order.append(page)
        rows.pool.drop(dropped)
    # [1, 2, 4] was used before [5, 6], and what it shares is newer.
    assert order == [4, 6, 5, 3, 2, 1]


def test_a_branch_that_others_hit_outlives_those_that_do_not():
    rows = new_rows(STATES, states=20)
    rows.run(tokens_of(STATES, [1, 2], more=1))
    for session in (3, 4, 5, 6):
        rows.run(tokens_of(STATES, [session, session], more=1))
    row = rows.start(tokens_of(STATES, [1, 2, 7]), has_checkpoints=False)
    assert row is not None
    rows.finish(row, is_kept=False)
    pool, cache = rows.pool, rows.cache
    for lost in range(1, 5):
        dropped = cache.evict(pool.fits({"kda": pool.free("kda") + 1}))
        assert dropped is not None
        pool.drop(dropped)
        hits = [
            cache.match(tokens_of(STATES, [session, session + (session == 1)], 1))
            for session in (3, 4, 5, 6, 1)
        ]
        assert [match.hit_len for match in hits] == [0] * lost + [64] * (5 - lost)


def test_of_one_row_the_branch_outlives_the_end():
    rows = new_rows(STATES)
    tokens = tokens_of(STATES, [1, 2, 3, 4, 5, 6], more=1)
    row = rows.start(tokens, has_checkpoints=False)
    assert row is not None
    row.checkpoints = {end: rows.pool.new_state() for end in (64, 192)}
    rows.finish(row)
    assert rows.cache.match(tokens).hit_len == 192
    pool = rows.pool
    dropped = rows.cache.evict(pool.fits({"kda": pool.free("kda") + 1}))
    assert dropped is not None
    assert rows.cache.match(tokens).hit_len == 64


def test_nothing_goes_when_all_would_not_be_enough():
    rows = new_rows(STATES, pages=10, states=3)
    rows.run(tokens_of(STATES, [1, 2, 3, 4], more=1))
    before = rows.cache.held_pages()
    assert rows.cache.evict(rows.pool.fits({"mla": 11})) is None
    assert rows.cache.held_pages() == before
    assert rows.cache.match(tokens_of(STATES, [1, 2, 3, 4, 5])).hit_len == 128


def test_a_prefix_that_lost_nothing_after_all_stays():
    # Both prefixes end in the same half, so one of them alone frees none.
    rows = new_rows(WINDOW, pages=20)
    rows.run(tokens_of(WINDOW, [1, 2, 3]))
    rows.run(tokens_of(WINDOW, [4]))
    pool, cache = rows.pool, rows.cache
    dropped = cache.evict(pool.fits({"swa": pool.free("swa") + 1}))
    assert dropped is not None
    assert dropped.num_pages == {"swa": 1}
    pool.drop(dropped)
    assert cache.match(tokens_of(WINDOW, [4], more=1)).hit_len == 4


def test_a_page_with_more_halves_takes_the_place_of_a_tombstone():
    rows = new_rows(WINDOW)
    tokens = tokens_of(WINDOW, [1, 2, 3, 4, 5])
    rows.run(tokens)
    assert rows.cache.match(tokens[:9]).hit_len == 0
    # The short prompt computes the first pages again, with their halves.
    rows.run(tokens[:9])
    assert rows.cache.match(tokens[:9]).hit_len == 8
    assert rows.cache.match([*tokens, 1]).hit_len == 20
    rows.check()


def count_updates(spec, num_sessions):
    """Nodes counted anew in 20 evictions of a page each, out of many sessions."""
    rows = new_rows(spec, pages=20 * num_sessions + 1, states=3 * num_sessions)
    for session in range(num_sessions):
        rows.run(tokens_of(spec, [session, *range(19)], more=1))
    rows.pool.new_page()
    assert rows.pool.free(spec.owners[0]) == 0
    update, calls = rows.cache.tree.update, []
    rows.cache.tree.update = lambda node: (calls.append(node), update(node))
    for _ in range(20):
        assert rows.make_room(rows.needs(1, 0))
        rows.pool.new_page()
    return len(calls)


@pytest.mark.parametrize(
    "spec", [FULL, WINDOW, STATES], ids=["full", "window", "states"]
)
def test_the_work_does_not_grow_with_the_tree(spec):
    assert count_updates(spec, 10) == count_updates(spec, 80) < 400
