"""Any operation with any ids, in any order, against a plain-Python model.

Unlike the fuzzer, whose requests mostly keep to the rules, the machine draws ids
freely: pages in use, free ones, the null page, no ids at all, one id in several lanes.
``scripts/checked_pool.py`` judges every operation: the verifier, the bytes of all live
pages, the model's holders, deaths, refusals and error words, the mirror's counters.
"""

import functools as ft

import hypothesis
import hypothesis.strategies as st
from hypothesis import stateful

from scripts.pool_fuzzing.checked_pool import CheckedPool
from scripts.pool_fuzzing.shapes import SHAPES
from scripts.pool_fuzzing.step import NUM_IDS, NUM_ROWS, TABLE_WIDTH, PoolStep
from ukv.pool import HI, HOLES, LIVE, LO

LANES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 999)), max_size=NUM_IDS)
COUNTS = st.lists(st.integers(0, 6), min_size=3, max_size=3)
PICK = st.integers(0, 2)


@ft.cache
def compiled_step(shape: str, page_size: int) -> PoolStep:
    return PoolStep(SHAPES[shape](page_size))


class PoolMachine(stateful.RuleBasedStateMachine):
    """Rules over one pool; subclasses say which."""

    shape = "swa_full"
    page_size = 1

    def __init__(self):
        super().__init__()
        step = compiled_step(self.shape, self.page_size)
        self.pool = CheckedPool(step.layout, step)
        self.owners = step.owners
        self.windows = [
            (owner, window)
            for owner, found in self.pool.model.windows.items()
            for window in found
        ]
        self.clear_rows()

    def ids(self, owner: str, lanes: list[tuple[int, int]]) -> list[int]:
        """Turn drawn pairs into ids: most of them live, some free, null or no id."""
        counts = self.pool.model.holders[owner]
        live = [page for page, held in enumerate(counts) if held] or [0]
        size = len(counts)
        strange = [0, -1, size, size + 5, 2**31 - 1, -(2**31)]
        return [
            live[n % len(live)]
            if kind < 7
            else strange[n % len(strange)]
            if kind == 7
            else n % size
            for kind, n in lanes
        ]

    def owner(self, pick: int) -> str:
        return self.owners[pick % len(self.owners)]

    def counts(self, drawn: list[int]) -> dict[str, int]:
        return dict(zip(self.owners, drawn, strict=False))

    @stateful.rule(drawn=COUNTS)
    def alloc(self, drawn):
        self.pool.alloc(self.counts(drawn))

    @stateful.rule(drawn=COUNTS)
    def admit(self, drawn):
        counts = self.counts(drawn)
        fits = self.pool.model.bytes_fit(counts)
        assert (self.pool.admit(counts) is not None) == fits

    @stateful.rule(drawn=COUNTS)
    def make_room(self, drawn):
        counts = self.counts(drawn)
        fits = self.pool.model.bytes_fit(counts)
        assert self.pool.make_room(counts) == fits

    @stateful.rule(pick=PICK, bad=st.sampled_from([-1, NUM_IDS + 1, 10**6]))
    def counts_out_of_bounds(self, pick, bad):
        counts = dict.fromkeys(self.owners, 1) | {self.owner(pick): bad}
        assert self.pool.alloc(counts) is None

    @stateful.rule(pick=PICK)
    def exhaust_and_fit_exactly(self, pick):
        """Fill what is left with one kind: to the last page, and not one more."""
        owner, total = self.owner(pick), 0
        while self.pool.model.bytes_fit({owner: total + 1}):
            total += 1
        while total:
            count = min(total, NUM_IDS)
            assert self.pool.admit({owner: count}) is not None
            total -= count
        assert self.pool.admit({owner: 1}) is None
        assert not self.pool.make_room({owner: 1})

    @stateful.rule()
    def compact(self):
        self.pool.compact()
        assert not any(row[HOLES] for row in self.pool.mirror.counters)

    @stateful.rule(pick=PICK, lanes=LANES)
    def free(self, pick, lanes):
        owner = self.owner(pick)
        self.pool.free(owner, self.ids(owner, lanes))

    @stateful.rule(lanes=LANES)
    def free_in_a_grid(self, lanes):
        self.pool.free(self.owners[0], self.ids(self.owners[0], lanes), shape="_grid")

    @stateful.rule()
    def free_no_ids(self):
        self.pool.free(self.owners[0], [], shape="_none")

    @stateful.rule(pick=PICK, lanes=LANES)
    def free_twice(self, pick, lanes):
        owner = self.owner(pick)
        pages = self.ids(owner, lanes)
        for _ in range(2):
            self.pool.free(owner, pages)

    @stateful.rule(pick=PICK, lanes=LANES)
    def free_full(self, pick, lanes):
        owner = self.owner(pick)
        self.pool.free_full(owner, self.ids(owner, lanes))

    @stateful.precondition(lambda self: self.windows)
    @stateful.rule(lanes=LANES)
    def free_window(self, lanes):
        owner, window = self.windows[0]
        self.pool.free_window(window, self.ids(owner, lanes))

    @stateful.rule(pick=PICK, lanes=LANES)
    def share(self, pick, lanes):
        owner = self.owner(pick)
        self.pool.share(owner, self.ids(owner, lanes))

    @stateful.rule(pick=PICK, lanes=LANES)
    def copy_on_write(self, pick, lanes):
        owner = self.owner(pick)
        self.pool.copy(owner, self.ids(owner, lanes[:4]))

    @stateful.rule(
        queries=st.lists(st.integers(0, 200), min_size=NUM_ROWS, max_size=NUM_ROWS)
    )
    def extend(self, queries):
        queries = [n % (3 * self.page_size + 1) for n in queries]
        new = self.pool.extend(self.rows, self.lens, queries)
        if new is not None:
            self.grow(new, queries)

    @stateful.rule(active=st.lists(st.booleans(), min_size=NUM_ROWS, max_size=NUM_ROWS))
    def decode(self, active):
        num_granted, new = self.pool.decode(self.rows, self.lens, active)
        self.grow(new, [num_granted * flag for flag in active])

    def grow(self, new, added):
        self.lens = [old + more for old, more in zip(self.lens, added, strict=True)]
        for name, rows in new.items():
            for table, pages in zip(self.rows[name], rows, strict=True):
                table += pages

    @stateful.rule()
    def clear_rows(self):
        """Forget the page tables; their pages stay, for other rules to free."""
        self.lens = [0] * NUM_ROWS
        self.rows = {
            name: [[] for _ in range(NUM_ROWS)] for name in self.pool.step.growing
        }

    @stateful.invariant()
    def never_refused_what_fits(self):
        assert self.pool.refused_although_bytes_fit == 0
        assert self.pool.granted_although_refused_by_mirror == 0
        assert all(len(row) <= TABLE_WIDTH for t in self.rows.values() for row in t)

    @stateful.rule()
    def free_everything(self):
        """Everything comes back, and the spans are empty as at the start."""
        for owner in self.owners:
            while live := self.ids(owner, [(0, n) for n in range(NUM_IDS)]):
                if live == [0] * NUM_IDS:
                    break
                self.pool.free_full(owner, sorted(set(live)))
        for sub, row in zip(
            self.pool.layout.sub_pools, self.pool.mirror.counters, strict=True
        ):
            assert (row[LIVE], row[HOLES], row[LO]) == (0, 0, row[HI])
            if sub.placement.value != "float":
                assert (row[LO], row[HI]) == (sub.first_page, sub.first_page)
        assert self.pool.mirror.free_bytes() == self.pool.layout.pool_bytes


class FloatMachine(PoolMachine):
    """A state between full attention and its window."""

    shape = "state_swa_full"
    page_size = 64


# Shrinking takes minutes, and the message of a failure has the whole operation.
SETTINGS = hypothesis.settings(
    max_examples=20,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    phases=[hypothesis.Phase.generate],
)
TestTwoEnds = PoolMachine.TestCase
TestTwoEnds.settings = SETTINGS
TestFloat = FloatMachine.TestCase
TestFloat.settings = SETTINGS
