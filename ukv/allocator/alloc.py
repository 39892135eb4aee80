"""Allocation: one transaction over several sub-pools, all or nothing.

Free virtual ids and the holes inside a span are stacks, so granting n pages reads n
entries: first the top holes, then pages next to the span. Whether the spans still
fit beside each other is the rule of ``ukv.layout.placement``.
"""

from collections.abc import Mapping

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from ukv.allocator.error_word import ErrorBit, raise_bit
from ukv.errors import SpecError
from ukv.ids import VirtualPages, require_ids
from ukv.layout import PoolLayout, SubPoolLayout, spans_fit
from ukv.pool import HI, HOLES, LIVE, LO, PoolState, SubPoolTables
from ukv.pytree import Leaf


class Grant(flax.struct.PyTreeNode):
    """What a transaction got.

    Attributes:
      pages: By owner, the new ids ``[max_pages]``: granted ones first, then null.
      granted: Whether all of it was granted; if not, nothing was.
    """

    pages: Mapping[str, VirtualPages]
    granted: Leaf


def needs_of(
    layout: PoolLayout, num_pages: Mapping[str, int | jax.Array]
) -> Int32[Array, " sub_pools"]:
    """Return the pages that each sub-pool must bind for these counts by owner.

    A page of an owner has a half in every sub-pool that shares its ids.

    Raises:
      UnknownSubPoolError: A name is no sub-pool's, or not an owner's.
    """
    needs = [jnp.zeros((), jnp.int32)] * len(layout.sub_pools)
    for name, count in num_pages.items():
        for sub in layout.members(layout.owner(name)):
            needs[sub.index] = jnp.asarray(count, jnp.int32)
    return jnp.stack(needs)


def free_id_counts(state: PoolState) -> Int32[Array, " sub_pools"]:
    """Return the free virtual ids of each id space, by sub-pool."""
    usable = jnp.asarray([sub.num_virtual - 1 for sub in state.layout.sub_pools])
    owners = jnp.asarray([sub.owner for sub in state.layout.sub_pools])
    return usable.astype(jnp.int32) - state.counters[:, LIVE][owners]


def grown_spans(
    state: PoolState, needs: Int32[Array, " sub_pools"]
) -> tuple[jax.Array, jax.Array]:
    """Return ``(lo, hi)`` of the spans after binding ``needs`` more pages each."""
    counters = state.counters
    growth = jnp.maximum(needs - counters[:, HOLES], 0)
    # A sub-pool without translation has no span: its ids are its pages.
    moves = jnp.asarray([sub.is_translating for sub in state.layout.sub_pools])
    up = jnp.asarray([sub.grows_up for sub in state.layout.sub_pools])
    lo = counters[:, LO] - jnp.where(moves & ~up, growth, 0)
    hi = counters[:, HI] + jnp.where(moves & up, growth, 0)
    return lo, hi


def fits_in_place(
    state: PoolState, needs: Int32[Array, " sub_pools"]
) -> Bool[Array, ""]:
    """Return whether ``needs`` more pages can be bound without moving a page."""
    lo, hi = grown_spans(state, needs)
    # Halves share their owner's ids: one page takes one id, not one for each half.
    enough_ids = (needs >= 0) & (needs <= free_id_counts(state))
    owns = jnp.asarray([sub.owns_ids for sub in state.layout.sub_pools])
    return spans_fit(state.layout, lo, hi, jnp) & jnp.all(enough_ids | ~owns)


def take_ids(
    tables: SubPoolTables,
    num_free: jax.Array,
    is_taken: Bool[Array, " max_pages"],
) -> Int32[Array, " max_pages"]:
    """Return the top free ids, one for each marked lane in order; null elsewhere."""
    rank = jnp.cumsum(is_taken, dtype=jnp.int32) - 1
    ids = tables.free_ids.at[num_free - 1 - rank].get(mode="clip")
    return jnp.where(is_taken, ids, 0)


def bind(
    state: PoolState,
    sub: SubPoolLayout,
    ids: Int32[Array, " max_pages"],
    is_bound: Bool[Array, " max_pages"],
) -> PoolState:
    """Bind a physical page of ``sub`` to each id; the caller checked that they fit.

    Args:
      state: The pool.
      sub: The sub-pool.
      ids: Virtual ids.
      is_bound: Which of them get a page.
    """
    tables, counters = state.tables[sub.index], state.counters[sub.index]
    target = jnp.where(is_bound, ids, sub.num_virtual)
    tables = tables.replace(
        refcounts=tables.refcounts.at[target].set(1, mode="drop"),
    )
    count = jnp.sum(is_bound, dtype=jnp.int32)
    live, holes, lo, hi = (counters[column] for column in (LIVE, HOLES, LO, HI))
    if sub.is_translating:
        rank = jnp.cumsum(is_bound, dtype=jnp.int32) - 1
        from_hole = tables.holes.at[holes - 1 - rank].get(mode="clip")
        past = rank - holes
        fresh = hi + past if sub.grows_up else lo - 1 - past
        physical = jnp.where(rank < holes, from_hole, fresh)
        tables = tables.replace(
            v2p=tables.v2p.at[target].set(physical, mode="drop"),
            p2v=tables.p2v.at[jnp.where(is_bound, physical, sub.num_pages)].set(
                ids, mode="drop"
            ),
        )
        growth = jnp.maximum(count - holes, 0)
        holes = jnp.maximum(holes - count, 0)
        lo, hi = (lo, hi + growth) if sub.grows_up else (lo - growth, hi)
    row = jnp.stack([live + count, holes, lo, hi])
    return replace_tables(state, sub, tables).replace(
        counters=with_row(state.counters, sub.index, row)
    )


def with_row(
    counters: Int32[Array, "sub_pools columns"],
    index: int,
    row: Int32[Array, " columns"],
) -> Int32[Array, "sub_pools columns"]:
    """Return the counters with the row of one sub-pool replaced."""
    is_row = np.arange(counters.shape[0]) == index
    return jnp.where(is_row[:, None], row[None, :], counters)


def replace_tables(
    state: PoolState, sub: SubPoolLayout, tables: SubPoolTables
) -> PoolState:
    """Return the state with the tables of one sub-pool replaced."""
    all_tables = list(state.tables)
    all_tables[sub.index] = tables
    return state.replace(tables=tuple(all_tables))


def flag_refusal(
    state: PoolState, needs: Int32[Array, " sub_pools"], granted: jax.Array
) -> PoolState:
    """Set OUT_OF_PAGES for every sub-pool that a refused transaction asked."""
    is_short = ~granted & (needs != 0)
    bit = jnp.where(is_short, jnp.uint32(ErrorBit.OUT_OF_PAGES), jnp.uint32(0))
    return state.replace(error=state.error | bit)


def alloc(
    state: PoolState,
    num_pages: Mapping[str, int | jax.Array],
    *,
    max_pages: Mapping[str, int],
) -> tuple[PoolState, Grant]:
    """Allocate pages from several id spaces at once, all or nothing.

    Moves nothing: where bytes are free but scattered, call ``make_room`` first.
    A refusal sets OUT_OF_PAGES in the error word and changes nothing else.

    Args:
      state: The pool; donate it.
      num_pages: Pages by owner, from 0 to its ``max_pages``; ints or int32 scalars.
      max_pages: Static bound by owner: the length of the returned ids.

    Raises:
      UnknownSubPoolError: A name is no sub-pool's, or not an owner's.
      SpecError: The two mappings differ, a count is no integer, or an int is out of
        its bounds.
    """
    if num_pages.keys() != max_pages.keys():
        raise SpecError(
            f"num_pages has {sorted(num_pages)}, max_pages {sorted(max_pages)}: "
            "name the same sub-pools in both"
        )
    for name, count in num_pages.items():
        is_known = isinstance(count, int)
        if is_known and not 0 <= count <= max_pages[name]:
            raise SpecError(
                f"num_pages[{name!r}]={count} must be in [0, {max_pages[name]}]"
            )
        if not is_known and not jnp.issubdtype(jnp.result_type(count), jnp.integer):
            raise SpecError(f"num_pages[{name!r}]={count} must be an integer")
    layout = state.layout
    needs = needs_of(layout, num_pages)
    in_bounds = jnp.asarray(True)
    for name, count in num_pages.items():
        in_bounds &= jnp.asarray(count, jnp.int32) <= max_pages[name]
    granted = fits_in_place(state, needs) & in_bounds
    state = flag_refusal(state, needs, granted)
    free_ids = free_id_counts(state)
    pages = {}
    for name, count in num_pages.items():
        owner = layout.owner(name)
        lane = jnp.arange(max_pages[name], dtype=jnp.int32)
        is_taken = granted & (lane < jnp.asarray(count, jnp.int32))
        ids = take_ids(state.tables[owner.index], free_ids[owner.index], is_taken)
        for sub in layout.members(owner):
            state = bind(state, sub, ids, ids > 0)
        pages[name] = VirtualPages(ids=ids, space=name)
    return state, Grant(pages=pages, granted=granted)


def page_growth(
    page_size: int,
    context_lens: Int32[Array, " rows"],
    query_lens: Int32[Array, " rows"],
) -> tuple[jax.Array, jax.Array]:
    """Return ``(first, count)``: the table columns that the new tokens add per row.

    Example: page 16, 20 tokens before and 15 new: pages 0 and 1 exist, the new end
    is token 35, so column 2 is added: first 2, count 1.
    """
    first = -(-context_lens // page_size)
    last = -(-(context_lens + query_lens) // page_size)
    return first, jnp.maximum(last - first, 0)


def append_pages(
    table: VirtualPages,
    pages: VirtualPages,
    first: Int32[Array, " rows"],
    count: Int32[Array, " rows"],
) -> VirtualPages:
    """Write new pages into the rows of a page table, row after row.

    Args:
      table: Virtual ids ``[rows, max_pages]``.
      pages: New ids ``[max_new]``, of the same space; as many as ``count`` sums to.
      first: First column to fill in each row.
      count: Columns to fill in each row.
    """
    new = require_ids(pages, VirtualPages, owner=table.space, argument="pages").ids
    rows, width = table.ids.shape
    ends = jnp.cumsum(count, dtype=jnp.int32)
    lane = jnp.arange(new.shape[0], dtype=jnp.int32)
    row = jnp.searchsorted(ends, lane, side="right", method="compare_all")
    row = row.astype(jnp.int32)
    inside = jnp.minimum(row, rows - 1)
    column = first[inside] + lane - (ends[inside] - count[inside])
    row = jnp.where((new > 0) & (column < width), row, rows)
    return table.replace(ids=table.ids.at[row, column].set(new, mode="drop"))


def alloc_extend(
    state: PoolState,
    tables: Mapping[str, VirtualPages],
    context_lens: Int32[Array, " rows"],
    query_lens: Int32[Array, " rows"],
    *,
    max_new_pages: int,
) -> tuple[PoolState, Mapping[str, VirtualPages], Bool[Array, ""]]:
    """Give every row the pages that its new tokens need, all or nothing.

    Args:
      state: The pool; donate it.
      tables: By owner, the page table ``[rows, max_pages]`` of virtual ids.
      context_lens: Tokens that each row holds already.
      query_lens: New tokens of each row; 0 for a padded row.
      max_new_pages: Static bound on the new pages of all rows together.

    Returns:
      ``(state, tables, granted)``; a refusal sets OUT_OF_PAGES, a row or bound that
      is too short TABLE_OVERFLOW, and neither changes anything else.

    Raises:
      UnknownSubPoolError: A name is no sub-pool's, or not an owner's.
      IdSpaceError: A table holds ids of another space.
    """
    growth, wanted = {}, {}
    fits_table = {}
    for name, table in tables.items():
        owner = state.layout.owner(name)
        ids = require_ids(table, VirtualPages, owner=name, argument=f"tables[{name!r}]")
        first, count = page_growth(owner.page_size, context_lens, query_lens)
        total = jnp.sum(count, dtype=jnp.int32)
        fits_table[name] = (total <= max_new_pages) & jnp.all(
            first + count <= ids.ids.shape[1]
        )
        growth[name], wanted[name] = (first, count), total
    all_fit = jnp.all(jnp.stack(list(fits_table.values())))
    error = state.error
    for name, fits in fits_table.items():
        index = state.layout.owner(name).index
        error = raise_bit(error, index, ErrorBit.TABLE_OVERFLOW, ~fits)
    state, grant = alloc(
        state.replace(error=error),
        {name: jnp.where(all_fit, total, 0) for name, total in wanted.items()},
        max_pages=dict.fromkeys(wanted, max_new_pages),
    )
    granted = grant.granted & all_fit
    tables = {
        name: append_pages(table, grant.pages[name], *growth[name])
        for name, table in tables.items()
    }
    return state, tables, granted


def alloc_decode(
    state: PoolState,
    tables: Mapping[str, VirtualPages],
    context_lens: Int32[Array, " rows"],
    is_active: Bool[Array, " rows"],
) -> tuple[PoolState, Mapping[str, VirtualPages], Bool[Array, ""]]:
    """Give every active row the page that its next token needs, all or nothing.

    A row needs one when ``context_len`` is a multiple of the page size. Runs inside
    a jitted step, so that several decode steps can run in one dispatch; the host
    has made sure of the room beforehand.

    Args:
      state: The pool; donate it.
      tables: By owner, the page table ``[rows, max_pages]`` of virtual ids.
      context_lens: Tokens that each row holds already.
      is_active: False for padded and finished rows.

    Returns:
      ``(state, tables, granted)``, as ``alloc_extend``.
    """
    grows, needed = {}, {}
    fits_table = jnp.asarray(True)
    error = state.error
    for name, table in tables.items():
        owner = state.layout.owner(name)
        ids = require_ids(table, VirtualPages, owner=name, argument=f"tables[{name!r}]")
        grows[name] = is_active & (context_lens % owner.page_size == 0)
        needed[name] = jnp.sum(grows[name], dtype=jnp.int32)
        column = context_lens // owner.page_size
        fits = jnp.all(~grows[name] | (column < ids.ids.shape[1]))
        error = raise_bit(error, owner.index, ErrorBit.TABLE_OVERFLOW, ~fits)
        fits_table &= fits
    needs = needs_of(state.layout, needed)
    fits = fits_in_place(state, needs)
    state = flag_refusal(state.replace(error=error), needs, fits)
    granted = fits & fits_table
    free_ids = free_id_counts(state)
    new_tables = {}
    for name, table in tables.items():
        owner = state.layout.owner(name)
        is_taken = granted & grows[name]
        new = take_ids(state.tables[owner.index], free_ids[owner.index], is_taken)
        for sub in state.layout.members(owner):
            state = bind(state, sub, new, is_taken)
        row = jnp.arange(new.shape[0], dtype=jnp.int32)
        column = jnp.where(is_taken, context_lens // owner.page_size, 2**31 - 1)
        new_tables[name] = table.replace(
            ids=table.ids.at[row, column].set(new, mode="drop", unique_indices=True)
        )
    return state, new_tables, granted
