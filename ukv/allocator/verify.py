"""The verifier: every invariant of a pool in one device call.

No check trusts what another one judges: bound pages come from v2p and p2v, never
from a counter, and the counters are compared with them. So one corrupted number
names the invariant it breaks:

    I1   v2p and p2v are inverse on bound pages
    I2   a page of the span is bound, or once in the hole stack; no other page is
    I3   bound pages lie inside the span
    I4   spans lie apart, in their order (an empty one takes no room)
    I5   each virtual id is bound, or once in the free stack; the null page never is
    I6   a window half belongs to a live page of the owner
    I10  exactly the bound ids have holders; as many as ``holders`` says
    I12  the counters agree with the tables, the bytes add up to the buffer

I7 to I9 and I11 compare two states, so they are property tests.
"""

import dataclasses
import functools as ft
import itertools as it
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Int32

from ukv.errors import PoolStateError, SpecError
from ukv.layout import Placement, PoolLayout, SubPoolLayout
from ukv.pool import HI, HOLES, LIVE, LO, PoolState, pool_struct

NUM_COLUMNS = 5
"""Columns of a report: how many are wrong, the first of them, three numbers."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one row of a report means.

    Attributes:
      invariant: ``I1`` to ``I12``, as in the module's docstring.
      sub_pool: The sub-pool, or the two of them, that it is about.
      text: A format string over ``count``, ``first``, ``a``, ``b``, ``c`` (the
        columns) and ``first_bytes`` to ``c_bytes`` (the columns in units, as bytes).
    """

    invariant: str
    sub_pool: str
    text: str


Rows = Iterator[tuple[Finding, jax.Array]]


def _row(is_wrong: Bool[Array, " ids"], *numbers: jax.Array) -> jax.Array:
    """Return a report row; arrays among the numbers are read at the first wrong id."""
    count = jnp.sum(is_wrong, dtype=jnp.int32)
    first = jnp.argmax(is_wrong).astype(jnp.int32)
    values = [number[first] if number.ndim else number for number in numbers]
    values += [jnp.zeros((), jnp.int32)] * (NUM_COLUMNS - 2 - len(values))
    return jnp.stack([count, first, *(value.astype(jnp.int32) for value in values)])


def _is_bound(state: PoolState, sub: SubPoolLayout) -> Bool[Array, " num_virtual"]:
    """Return which virtual ids have a page; without a v2p, those that are held."""
    tables = state.tables[sub.index]
    if sub.is_translating:
        return tables.v2p != sub.num_pages
    return tables.refcounts > 0


def _times_in_stack(
    stack: Int32[Array, " length"], num_entries: jax.Array, num_ids: int
) -> tuple[Int32[Array, " num_ids"], Bool[Array, " length"]]:
    """Return how often each id is in a stack, and which entries are no id at all."""
    is_entry = jnp.arange(stack.shape[0], dtype=jnp.int32) < num_entries
    is_id = (stack >= 0) & (stack < num_ids)
    target = jnp.where(is_entry & is_id, stack, num_ids)
    times = jnp.zeros(num_ids, jnp.int32).at[target].add(1, mode="drop")
    return times, is_entry & ~is_id


def _check_tables(state: PoolState, sub: SubPoolLayout) -> Rows:
    """I1, I2 and I3 of a sub-pool that translates."""
    tables, name = state.tables[sub.index], sub.name
    _, holes, lo, hi = (state.counters[sub.index, c] for c in (LIVE, HOLES, LO, HI))
    ids = jnp.arange(sub.num_virtual, dtype=jnp.int32)
    pages = jnp.arange(sub.num_pages, dtype=jnp.int32)

    in_grid = (tables.v2p >= 0) & (tables.v2p < sub.num_pages)
    back = jnp.where(in_grid, tables.p2v.at[tables.v2p].get(mode="clip"), -1)
    yield (
        Finding(
            "I1",
            name,
            "{count} virtual pages, first {first}: v2p says page {a}, and p2v of that "
            "page says virtual page {b}",
        ),
        _row(_is_bound(state, sub) & (back != ids), tables.v2p, back),
    )
    is_used = tables.p2v != 0
    is_id = (tables.p2v > 0) & (tables.p2v < sub.num_virtual)
    forth = jnp.where(is_id, tables.v2p.at[tables.p2v].get(mode="clip"), -1)
    yield (
        Finding(
            "I1",
            name,
            "{count} pages, first {first}: p2v says virtual page {a}, and v2p of that "
            "virtual page says page {b}",
        ),
        _row(is_used & (forth != pages), tables.p2v, forth),
    )
    times, is_no_page = _times_in_stack(tables.holes, holes, sub.num_pages)
    is_inside = (pages >= lo) & (pages < hi)
    wanted = is_inside.astype(jnp.int32)
    # A bound page outside the span is I3; here it counts as not bound.
    found = times + (is_used & is_inside).astype(jnp.int32)
    yield (
        Finding(
            "I2",
            name,
            "{count} pages, first {first}: {a} times in the hole stack, p2v says "
            "virtual page {b}, inside the span: {c}",
        ),
        _row(found != wanted, times, tables.p2v, wanted),
    )
    yield (
        Finding(
            "I2",
            name,
            "{count} entries of the hole stack, first {first}: {a} is no page in "
            "[0, {b})",
        ),
        _row(is_no_page, tables.holes, jnp.int32(sub.num_pages)),
    )
    yield (
        Finding(
            "I3",
            name,
            "{count} bound pages, first {first} (virtual page {a}): outside the span "
            "[{b}, {c})",
        ),
        _row(is_used & ~is_inside, tables.p2v, lo, hi),
    )


def _check_ids(state: PoolState, sub: SubPoolLayout) -> Rows:
    """I5 of an owner."""
    tables, is_bound = state.tables[sub.index], _is_bound(state, sub)
    ids = jnp.arange(sub.num_virtual, dtype=jnp.int32)
    num_free = sub.num_virtual - 1 - jnp.sum(is_bound, dtype=jnp.int32)
    times, is_no_id = _times_in_stack(tables.free_ids, num_free, sub.num_virtual)
    found = times + is_bound.astype(jnp.int32)
    yield (
        Finding(
            "I5",
            sub.name,
            "{count} virtual pages, first {first}: {a} times in the free stack, "
            "bound: {b}",
        ),
        _row(found != (ids > 0).astype(jnp.int32), times, is_bound),
    )
    yield (
        Finding(
            "I5",
            sub.name,
            "{count} entries of the free stack, first {first}: {a} is no id in "
            "[1, {b})",
        ),
        _row(is_no_id, tables.free_ids, jnp.int32(sub.num_virtual)),
    )


def _check_window(state: PoolState, sub: SubPoolLayout) -> Rows:
    """I6 of a sub-pool that uses another one's ids."""
    owner = state.layout.sub_pools[sub.owner]
    is_left = _is_bound(state, sub) & ~_is_bound(state, owner)
    holders = state.tables[sub.index].refcounts
    yield (
        Finding(
            "I6",
            sub.name,
            "{count} window halves, first of virtual page {first} ({a} holders): "
            f"the page is not bound in {owner.name!r}",
        ),
        _row(is_left, holders),
    )


def _check_holders(
    state: PoolState, sub: SubPoolLayout, holders: jax.Array | None
) -> Rows:
    """I10."""
    found, is_bound = state.tables[sub.index].refcounts, _is_bound(state, sub)
    yield (
        Finding(
            "I10",
            sub.name,
            "{count} virtual pages, first {first}: {a} holders, bound: {b}",
        ),
        _row(((found > 0) != is_bound) | (found < 0), found, is_bound),
    )
    if holders is not None:
        yield (
            Finding(
                "I10",
                sub.name,
                "{count} virtual pages, first {first}: {a} holders, expected {b}",
            ),
            _row(found != holders, found, holders),
        )


def _check_counters(state: PoolState, sub: SubPoolLayout) -> Rows:
    """I12 of one sub-pool."""
    tables = state.tables[sub.index]
    live, holes, lo, hi = (state.counters[sub.index, c] for c in (LIVE, HOLES, LO, HI))
    is_used = tables.p2v != 0 if sub.is_translating else _is_bound(state, sub)
    num_used = jnp.sum(is_used, dtype=jnp.int32)
    yield (
        Finding(
            "I12", sub.name, "the counter says {a} live pages, the tables bind {b}"
        ),
        _row((live != num_used)[None], live, num_used),
    )
    if sub.is_translating:
        is_wrong = (hi - lo != live + holes) | (holes < 0)
        is_wrong |= (lo < 0) | (lo > hi) | (hi > sub.num_pages)
        if sub.placement is Placement.HIGH:
            is_wrong |= hi != sub.num_pages
        elif sub.placement is not Placement.FLOAT:
            is_wrong |= lo != 0
    else:
        is_wrong = (holes != 0) | (lo != 0) | (hi != 0)
    text = "its {first} live pages and {a} holes are not its span [{b}, {c}) of "
    row = _row(is_wrong[None], holes, lo, hi)
    yield (
        Finding("I12", sub.name, text + f"[0, {sub.num_pages})"),
        row.at[1].set(live),
    )


def _check_bytes(state: PoolState) -> Rows:
    """I4 of each pair of neighbours, and I12 of the whole buffer."""
    layout = state.layout
    start, end, is_empty = {}, {}, {}
    used = free = border = jnp.zeros((), jnp.int32)
    overlaps = jnp.asarray(False)
    for sub in layout.sub_pools:
        i, page = sub.index, layout.page_units[sub.index]
        live, holes, lo, hi = (state.counters[i, c] for c in (LIVE, HOLES, LO, HI))
        # Clipping keeps the products below 2^31 when a counter is corrupt.
        start[i] = layout.base_units[i] + jnp.clip(lo, 0, sub.num_pages) * page
        end[i] = layout.base_units[i] + jnp.clip(hi, 0, sub.num_pages) * page
        is_empty[i] = lo >= hi
        used += jnp.clip(live, 0, sub.num_pages) * page
        gap = jnp.maximum(start[i] - border, 0)
        free += jnp.clip(holes, 0, sub.num_pages) * page
        free += jnp.where(is_empty[i], 0, gap)
        border = jnp.where(is_empty[i], border, jnp.maximum(border, end[i]))
    free += layout.total_units - border
    for low, high in it.combinations(layout.sub_pools, 2):
        i, j = low.index, high.index
        is_wrong = ~is_empty[i] & ~is_empty[j] & (start[j] < end[i])
        overlaps |= is_wrong
        yield (
            Finding(
                "I4",
                f"{low.name}, {high.name}",
                f"the span of {high.name!r} begins at byte {{b_bytes:,}}, that of "
                f"{low.name!r} below it ends at {{a_bytes:,}}",
            ),
            _row(is_wrong[None], end[i], start[j]),
        )
    total = jnp.int32(layout.total_units)
    yield (
        Finding(
            "I12",
            ", ".join(layout.names),
            "{a_bytes:,} bytes in use and {b_bytes:,} free are not the {c_bytes:,} "
            "of the buffer",
        ),
        # Spans that overlap are told above.
        _row((~overlaps & (used + free != total))[None], used, free, total),
    )


def _rows(state: PoolState, holders: Mapping[str, jax.Array]) -> Rows:
    for sub in state.layout.sub_pools:
        if sub.is_translating:
            yield from _check_tables(state, sub)
        if sub.owns_ids:
            yield from _check_ids(state, sub)
        else:
            yield from _check_window(state, sub)
        yield from _check_holders(state, sub, holders.get(sub.name))
        yield from _check_counters(state, sub)
    if state.layout.is_unified:
        yield from _check_bytes(state)


def check(
    state: PoolState, holders: Mapping[str, jax.Array] | None = None
) -> Int32[Array, "findings columns"]:
    """Return a report of every invariant; a row of a sound pool begins with 0.

    Belongs inside a jitted step: it reads the tables once and returns a few hundred
    bytes. ``describe_violations`` turns a host copy into words.

    Args:
      state: The pool.
      holders: As in ``verify``; device arrays.
    """
    return jnp.stack([row for _, row in _rows(state, holders or {})])


@ft.lru_cache(maxsize=64)
def _findings(layout: PoolLayout, with_holders: frozenset[str]) -> tuple[Finding, ...]:
    """Return what the rows of ``check`` mean, by tracing it."""
    found: list[Finding] = []

    def trace(state: PoolState) -> None:
        holders = {name: _refcounts_of(state, name) for name in with_holders}
        found.extend(finding for finding, _ in _rows(state, holders))

    jax.eval_shape(trace, pool_struct(layout))
    return tuple(found)


def _refcounts_of(state: PoolState, name: str) -> jax.Array:
    return state.tables[state.layout.sub_pool(name).index].refcounts


def describe_violations(
    layout: PoolLayout,
    report: np.ndarray,
    *,
    with_holders: frozenset[str] = frozenset(),
) -> list[str]:
    """Return one line for each row of a report that found something.

    Args:
      layout: The pool's layout.
      report: A host copy of what ``check`` returned.
      with_holders: Names of the sub-pools whose holders ``check`` was given.
    """
    if not report[:, 0].any():
        return []
    lines = []
    for finding, row in zip(
        _findings(layout, with_holders), report.tolist(), strict=True
    ):
        if not row[0]:
            continue
        numbers = dict(zip(("count", "first", "a", "b", "c"), row, strict=True))
        in_bytes = {f"{k}_bytes": n * layout.unit_bytes for k, n in numbers.items()}
        text = finding.text.format(**numbers, **in_bytes)
        lines.append(f"{finding.invariant}: sub-pool {finding.sub_pool!r}: {text}")
    return lines


_jitted_check = jax.jit(check)


def verify(state: PoolState, *, holders: Mapping[str, ArrayLike] | None = None) -> None:
    """Check every invariant of a pool: one launch, one read of the device.

    The error word is not part of it: see ``raise_on_error``.

    Args:
      state: The pool; it is not donated.
      holders: By sub-pool, int32 ``[num_virtual]``: how many holders each virtual
        page (each window half) should have. Sub-pools left out are not compared.

    Raises:
      PoolStateError: With a line for each broken invariant of each sub-pool: how
        many pages break it, the first of them, and its numbers.
      UnknownSubPoolError: ``holders`` names no sub-pool.
      SpecError: ``holders`` is of another length or dtype.
    """
    expected = {}
    for name, counts in (holders or {}).items():
        sub = state.layout.sub_pool(name)
        found = jnp.asarray(counts)
        if found.shape != (sub.num_virtual,) or found.dtype != jnp.int32:
            raise SpecError(
                f"holders[{name!r}] is {found.dtype}{list(found.shape)}, must be "
                f"int32[{sub.num_virtual}]: one count for each virtual id"
            )
        expected[name] = found
    report = jax.device_get(_jitted_check(state, expected))
    lines = describe_violations(state.layout, report, with_holders=frozenset(expected))
    if lines:
        raise PoolStateError("\n".join(lines))
