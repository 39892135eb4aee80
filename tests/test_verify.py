"""The verifier names what is corrupt: one place corrupted, one invariant named."""

import functools as ft
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.pool_fuzzing.shapes import SHAPES
from ukv.allocator import alloc, compact, free, free_window, make_room, share
from ukv.allocator.verify import check, verify
from ukv.errors import PoolStateError, SpecError, UnknownSubPoolError
from ukv.ids import VirtualPages
from ukv.layout import unified_layout
from ukv.pool import HI, HOLES, LIVE, LO, PoolState, create_pool, pool_struct
from ukv.spec import MLASpec

POISON = 0xFFFFFFFF
FAST_COMPILE = {"xla_backend_optimization_level": 0}
EVERY_SUB_POOL = "mla, state, swa, full"


def pages(space, *ids):
    return VirtualPages(ids=jnp.asarray(ids, jnp.int32), space=space)


@ft.cache
def pool_with_holes() -> PoolState:
    """Four sub-pools: 8 latents, 4 states, 6 pages with window halves, less some."""
    layout = SHAPES["four"](1)

    @ft.partial(jax.jit, compiler_options=FAST_COMPILE)
    def fill(state):
        counts = {"mla": 8, "state": 4, "full": 6}
        state, _ = make_room(state, counts)
        state, _ = alloc(state, counts, max_pages=counts)
        state = share(state, pages("mla", 1, 4))
        state = free(state, pages("mla", 2, 3))
        state = free(state, pages("state", 2))
        state = free_window(state, "swa", pages("full", 4))
        return free(state, pages("full", 2))

    return fill(create_pool(layout, fill_word=POISON))


@ft.cache
def pool_without_holes() -> PoolState:
    return jax.jit(compact, compiler_options=FAST_COMPILE)(pool_with_holes())[0]


@ft.cache
def static_pool() -> PoolState:
    @ft.partial(jax.jit, compiler_options=FAST_COMPILE)
    def fill(state):
        counts = {"full": 6, "state": 3}
        state, _ = alloc(state, counts, max_pages=counts)
        return free(state, pages("full", 2))

    return fill(create_pool(SHAPES["static"](1), fill_word=POISON))


def with_table(state, name, field, index, value):
    """Return the state with one entry of one table replaced."""
    sub = state.layout.sub_pool(name)
    tables = list(state.tables)
    table = getattr(tables[sub.index], field).at[index].set(value)
    tables[sub.index] = tables[sub.index].replace(**{field: table})
    return state.replace(tables=tuple(tables))


def with_counter(state, name, column, change):
    index = state.layout.sub_pool(name).index
    return state.replace(counters=state.counters.at[index, column].add(change))


def shifted(state, name, change):
    """Return the state with the whole span of a sub-pool moved by some pages."""
    index = state.layout.sub_pool(name).index
    found, tables = state.tables[index], list(state.tables)
    tables[index] = found.replace(
        v2p=jnp.where(found.v2p < found.p2v.shape[0], found.v2p + change, found.v2p),
        p2v=jnp.roll(found.p2v, change),
        holes=found.holes + change,
    )
    state = state.replace(tables=tuple(tables))
    for column in (LO, HI):
        state = with_counter(state, name, column, change)
    return state


def v2p(state, name, page):
    return int(state.tables[state.layout.sub_pool(name).index].v2p[page])


def half_of_a_dead_page(state):
    """Free a page of the owner, and forget that its window half went with it."""
    after = free(state, pages("full", 1))
    swa = state.layout.sub_pool("swa").index
    tables = list(after.tables)
    tables[swa] = state.tables[swa]
    return after.replace(
        tables=tuple(tables), counters=after.counters.at[swa].set(state.counters[swa])
    )


def violations(state, **arguments) -> set[tuple[str, str]]:
    """Return the invariants that the verifier names, each with its sub-pool."""
    with pytest.raises(PoolStateError, match="sub-pool") as caught:
        verify(state, **arguments)
    lines = str(caught.value).splitlines()
    found = [re.match(r"(I\d+): sub-pool '([^']+)': ", line) for line in lines]
    return {match.groups() for match in found}


@pytest.mark.parametrize(
    "make", [pool_with_holes, pool_without_holes, static_pool], ids=lambda f: f.__name__
)
def test_sound_pool_passes(make):
    state = make()
    verify(state)
    names = state.layout.names
    holders = {
        name: tables.refcounts for name, tables in zip(names, state.tables, strict=True)
    }
    verify(state, holders=holders)
    assert not np.asarray(check(state))[:, 0].any()


@pytest.mark.parametrize("shape", ["alone", "four", "static"])
def test_empty_pool_passes(shape):
    verify(create_pool(SHAPES[shape](1)))


ONE_PLACE = {
    "I1-v2p-of-another": (
        lambda s: with_table(s, "mla", "v2p", 1, v2p(s, "mla", 4)),
        "I1",
        "mla",
        "1 virtual pages, first 1: v2p says page 3, and p2v of that page says virtual "
        "page 4",
    ),
    "I1-v2p-negative": (
        lambda s: with_table(s, "state", "v2p", 1, -1),
        "I1",
        "state",
        "first 1: v2p says page -1",
    ),
    "I1-p2v-of-another": (
        lambda s: with_table(s, "swa", "p2v", v2p(s, "swa", 5), 6),
        "I1",
        "swa",
        "p2v says virtual page 6, and v2p of that virtual page says page",
    ),
    "I2-hole-is-bound": (
        lambda s: with_table(s, "mla", "holes", 0, v2p(s, "mla", 1)),
        "I2",
        "mla",
        "2 pages, first 0: 1 times in the hole stack, p2v says virtual page 1",
    ),
    "I2-hole-twice": (
        lambda s: with_table(s, "mla", "holes", 1, 1),
        "I2",
        "mla",
        "2 pages, first 1: 2 times in the hole stack",
    ),
    "I2-hole-beyond-the-span": (
        lambda s: with_table(s, "full", "holes", 0, 0),
        "I2",
        "full",
        "first 0: 1 times in the hole stack, p2v says virtual page 0, inside the "
        "span: 0",
    ),
    "I2-hole-is-no-page": (
        lambda s: with_table(s, "state", "holes", 0, -7),
        "I2",
        "state",
        "1 entries of the hole stack, first 0: -7 is no page in [0, 18)",
    ),
    "I4-float-in-its-neighbour": (
        lambda s: shifted(s, "state", -v2p(s, "state", 1)),
        "I4",
        "mla, state",
        "the span of 'state' begins at byte 0, that of 'mla' below it ends at 384",
    ),
    "I5-free-twice": (
        lambda s: with_table(s, "full", "free_ids", 0, 9),
        "I5",
        "full",
        "2 virtual pages, first 9: 2 times in the free stack, bound: 0",
    ),
    "I5-bound-and-free": (
        lambda s: with_table(s, "mla", "free_ids", 0, 1),
        "I5",
        "mla",
        "first 1: 1 times in the free stack, bound: 1",
    ),
    "I5-null-page-is-free": (
        lambda s: with_table(s, "mla", "free_ids", 0, 0),
        "I5",
        "mla",
        "first 0: 1 times in the free stack, bound: 0",
    ),
    "I5-no-id": (
        lambda s: with_table(s, "state", "free_ids", 0, 19),
        "I5",
        "state",
        "1 entries of the free stack, first 0: 19 is no id in [1, 19)",
    ),
    "I6-half-of-a-dead-page": (
        half_of_a_dead_page,
        "I6",
        "swa",
        "1 window halves, first of virtual page 1 (1 holders): the page is not bound "
        "in 'full'",
    ),
    "I10-bound-without-a-holder": (
        lambda s: with_table(s, "full", "refcounts", 1, 0),
        "I10",
        "full",
        "1 virtual pages, first 1: 0 holders, bound: 1",
    ),
    "I10-held-but-not-bound": (
        lambda s: with_table(s, "swa", "refcounts", 4, 1),
        "I10",
        "swa",
        "first 4: 1 holders, bound: 0",
    ),
    "I10-negative": (
        lambda s: with_table(s, "mla", "refcounts", 2, -1),
        "I10",
        "mla",
        "first 2: -1 holders, bound: 0",
    ),
}


@pytest.mark.parametrize("case", ONE_PLACE)
def test_one_place_names_one_invariant(case):
    corrupt, invariant, sub_pool, text = ONE_PLACE[case]
    state = corrupt(pool_with_holes())
    assert violations(state) == {(invariant, sub_pool)}
    with pytest.raises(PoolStateError, match=re.escape(text)):
        verify(state)


def test_bound_page_outside_its_span():
    # A span without holes cannot lose a page without losing count.
    state = with_counter(pool_without_holes(), "mla", HI, -1)
    assert violations(state) == {
        ("I3", "mla"),
        ("I12", "mla"),
        ("I12", EVERY_SUB_POOL),
    }
    with pytest.raises(
        PoolStateError, match=r"1 bound pages, first 5 .* outside the span \[0, 5\)"
    ):
        verify(state)


def test_live_counter_off_by_one_is_only_a_matter_of_counting():
    state = with_counter(pool_with_holes(), "state", LIVE, 1)
    assert violations(state) == {("I12", "state"), ("I12", EVERY_SUB_POOL)}
    with pytest.raises(
        PoolStateError, match="the counter says 4 live pages, the tables bind 3"
    ):
        verify(state)
    with pytest.raises(
        PoolStateError,
        match=r"bytes in use and .* free are not the 4,608 of the buffer",
    ):
        verify(state)


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("column", [LIVE, HOLES, LO, HI])
@pytest.mark.parametrize("name", ["mla", "state", "swa", "full"])
def test_scenario_6_one_counter_off_by_a_page_names_the_sub_pool(name, column, change):
    found = violations(with_counter(pool_with_holes(), name, column, change))
    assert ("I12", name) in found
    # Nothing else is blamed, except as the neighbour of an overlap.
    assert all(name in sub_pool.split(", ") for _, sub_pool in found)


def test_all_violations_are_listed():
    state = with_table(
        pool_with_holes(), "mla", "v2p", 1, v2p(pool_with_holes(), "mla", 4)
    )
    state = with_table(state, "full", "free_ids", 0, 9)
    state = with_table(state, "swa", "refcounts", 4, 1)
    assert violations(state) == {("I1", "mla"), ("I5", "full"), ("I10", "swa")}


def test_holders_are_compared():
    state = pool_with_holes()
    right = np.asarray(state.tables[0].refcounts)
    assert right[[1, 2, 4]].tolist() == [2, 0, 2]
    wrong = right.copy()
    wrong[4] = 1
    verify(state, holders={"mla": right})
    assert violations(state, holders={"mla": wrong}) == {("I10", "mla")}
    with pytest.raises(PoolStateError, match="first 4: 2 holders, expected 1"):
        verify(state, holders={"mla": wrong})


STATIC = {
    "window-tables": (
        lambda s: with_table(s, "swa", "v2p", 1, v2p(s, "swa", 3)),
        {("I1", "swa")},
    ),
    "window-holes": (
        lambda s: with_table(s, "swa", "holes", 0, v2p(s, "swa", 3)),
        {("I2", "swa")},
    ),
    "free-stack": (
        lambda s: with_table(s, "full", "free_ids", 0, 1),
        {("I5", "full")},
    ),
    "half-of-a-dead-page": (half_of_a_dead_page, {("I6", "swa")}),
    "negative-holders": (
        lambda s: with_table(s, "state", "refcounts", 5, -1),
        {("I10", "state")},
    ),
    "live": (lambda s: with_counter(s, "full", LIVE, 1), {("I12", "full")}),
    "span": (lambda s: with_counter(s, "state", HI, 1), {("I12", "state")}),
}


@pytest.mark.parametrize("case", STATIC)
def test_static_pool_is_verified_too(case):
    corrupt, expected = STATIC[case]
    assert violations(corrupt(static_pool())) == expected


def test_error_word_is_not_part_of_it():
    verify(pool_with_holes().replace(error=jnp.full(4, 2, jnp.uint32)))


def test_refusals_of_holders():
    state = pool_with_holes()
    with pytest.raises(
        UnknownSubPoolError, match="no sub-pool 'kv'; this pool has mla"
    ):
        verify(state, holders={"kv": np.zeros(97, np.int32)})
    with pytest.raises(
        SpecError, match=r"is int32\[5\], must be int32\[97\]: one count"
    ):
        verify(state, holders={"mla": np.zeros(5, np.int32)})
    with pytest.raises(SpecError, match=r"is bool\[97\], must be int32\[97\]"):
        verify(state, holders={"mla": np.zeros(97, np.bool_)})


def test_a_report_is_small_and_the_buffer_is_not_read():
    spec = MLASpec(name="mla", num_layers=27, page_size=64, latent_dim=512, rope_dim=64)
    layout = unified_layout([spec], pool_bytes=64 * 2**30)
    compiled = jax.jit(check).lower(pool_struct(layout)).compile()
    memory = compiled.memory_analysis()
    assert memory.output_size_in_bytes < 1000
    num_ids = layout.sub_pools[0].num_virtual
    assert memory.temp_size_in_bytes < 64 * num_ids
    # An argument that is not read is dropped.
    assert memory.argument_size_in_bytes < 64 * num_ids
