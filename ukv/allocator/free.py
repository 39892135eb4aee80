"""Holders of pages: sharing, releasing, and the window half of a page.

Every page, and every window half of a page, counts its holders. A page dies with its
last holder; its virtual id and its physical pages become free. A page that lives on
without its window half is a tombstone.

    operation     full half                 window half
    share         +1 holder                 +1 holder, where there is one
    free          -1 holder                 -1 holder, where there is one
    free_full     -1 holder                 (the caller released it before)
    free_window                             -1 holder
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from ukv.allocator.alloc import replace_tables, with_row
from ukv.allocator.error_word import ErrorBit, raise_bit
from ukv.errors import SpecError
from ukv.ids import VirtualPages, require_ids, virtual_space
from ukv.layout import Placement, SubPoolLayout
from ukv.pool import HI, HOLES, LIVE, LO, PoolState


def _checked_ids(
    state: PoolState, owner: SubPoolLayout, pages: VirtualPages
) -> tuple[PoolState, Int32[Array, " ids"], Bool[Array, " ids"]]:
    """Return flat ids and which of them name a page; flags those out of range."""
    found = require_ids(pages, VirtualPages, owner=owner.name, argument="pages")
    ids = found.ids.reshape(-1)
    is_outside = (ids < 0) | (ids >= owner.num_virtual)
    error = raise_bit(
        state.error, owner.index, ErrorBit.ID_OUT_OF_RANGE, jnp.any(is_outside)
    )
    return state.replace(error=error), ids, (ids > 0) & ~is_outside


def _drop_holders(
    state: PoolState,
    sub: SubPoolLayout,
    ids: Int32[Array, " ids"],
    is_held: Bool[Array, " ids"],
    is_orphan: Bool[Array, " ids"] | None = None,
) -> tuple[PoolState, Bool[Array, " ids"]]:
    """Take one holder off each id, and say which lanes let a page die.

    An id may stand in several lanes: several holders let go at once. Exactly one
    lane of a page that dies is marked.

    Args:
      state: The pool.
      sub: The sub-pool whose holders are counted.
      ids: Virtual ids.
      is_held: Lanes that let go of a holder.
      is_orphan: Lanes whose page dies whatever its holders: its owner died.
    """
    refcounts = state.tables[sub.index].refcounts
    target = jnp.where(is_held, ids, sub.num_virtual)
    before = refcounts.at[ids].get(mode="clip")
    refcounts = refcounts.at[target].add(-1, mode="drop")
    after = refcounts.at[ids].get(mode="clip")
    is_double = is_held & (after < 0)
    is_last = is_held & (before > 0) & (after <= 0)
    # Lanes with the same id compete: the last one wins. A count that fell to -k did
    # so through more than k lanes, so the winner's mark is always below it.
    lane = jnp.arange(ids.shape[0], dtype=jnp.int32)
    refcounts = refcounts.at[jnp.where(is_last, ids, sub.num_virtual)].min(
        -(lane + 1), mode="drop"
    )
    dies = is_last & (refcounts.at[ids].get(mode="clip") == -(lane + 1))
    error = raise_bit(state.error, sub.index, ErrorBit.DOUBLE_FREE, jnp.any(is_double))
    is_gone = is_held & (after <= 0)
    if is_orphan is not None:
        left_behind = is_orphan & (after > 0)
        error = raise_bit(
            error, sub.index, ErrorBit.WINDOW_STILL_HELD, jnp.any(left_behind)
        )
        dies |= left_behind
        is_gone |= left_behind
    refcounts = refcounts.at[jnp.where(is_gone, ids, sub.num_virtual)].set(
        0, mode="drop"
    )
    tables = state.tables[sub.index].replace(refcounts=refcounts)
    return replace_tables(state, sub, tables).replace(error=error), dies


def _unbind(
    state: PoolState,
    sub: SubPoolLayout,
    ids: Int32[Array, " ids"],
    dies: Bool[Array, " ids"],
) -> PoolState:
    """Turn the physical pages of the marked ids into holes."""
    tables, counters = state.tables[sub.index], state.counters[sub.index]
    rank = jnp.cumsum(dies, dtype=jnp.int32) - 1
    count = jnp.sum(dies, dtype=jnp.int32)
    live, holes, lo, hi = (counters[column] for column in (LIVE, HOLES, LO, HI))
    if sub.owns_ids:
        num_free = sub.num_virtual - 1 - live
        slot = jnp.where(dies, num_free + rank, sub.num_virtual)
        tables = tables.replace(free_ids=tables.free_ids.at[slot].set(ids, mode="drop"))
    live = live - count
    if sub.is_translating:
        physical = tables.v2p.at[ids].get(mode="clip")
        slot = jnp.where(dies, holes + rank, sub.num_pages)
        page = jnp.where(dies, physical, sub.num_pages)
        target = jnp.where(dies, ids, sub.num_virtual)
        tables = tables.replace(
            holes=tables.holes.at[slot].set(physical, mode="drop"),
            p2v=tables.p2v.at[page].set(0, mode="drop"),
            v2p=tables.v2p.at[target].set(sub.num_pages, mode="drop"),
        )
        # An empty sub-pool gives its whole span back without any move.
        is_empty = live == 0
        holes = jnp.where(is_empty, 0, holes + count)
        if sub.placement is not Placement.FLOAT:
            lo = jnp.where(is_empty, sub.first_page, lo)
        hi = jnp.where(is_empty, lo, hi)
    row = jnp.stack([live, holes, lo, hi])
    return replace_tables(state, sub, tables).replace(
        counters=with_row(state.counters, sub.index, row)
    )


def _has_half(
    state: PoolState, sub: SubPoolLayout, ids: Int32[Array, " ids"]
) -> Bool[Array, " ids"]:
    return state.tables[sub.index].refcounts.at[ids].get(mode="clip") > 0


def _free(state: PoolState, pages: VirtualPages, *, with_window: bool) -> PoolState:
    owner = state.layout.owner(virtual_space(pages, argument="pages"))
    state, ids, is_page = _checked_ids(state, owner, pages)
    state, dies = _drop_holders(state, owner, ids, is_page)
    for sub in state.layout.members(owner)[1:]:
        has_half = _has_half(state, sub, ids)
        is_held = is_page & has_half if with_window else jnp.zeros_like(is_page)
        state, half_dies = _drop_holders(state, sub, ids, is_held, dies & has_half)
        state = _unbind(state, sub, ids, half_dies)
    return _unbind(state, owner, ids, dies)


def free(state: PoolState, pages: VirtualPages) -> PoolState:
    """Let go of both halves of pages; those without another holder become free.

    Null ids are skipped, so a padded table row can be passed as it is. A window half
    that is gone (a tombstone) is skipped too. A holder that released its window half
    itself calls ``free_full`` instead, so that it takes no other holder's half.

    Args:
      state: The pool; donate it.
      pages: Virtual ids of any shape; an id may appear once for each holder.

    Returns:
      The state. A page released too often sets DOUBLE_FREE, an id outside the id
      space ID_OUT_OF_RANGE; such lanes change nothing.

    Raises:
      IdSpaceError: ``pages`` are no virtual ids.
      UnknownSubPoolError: They are of no owner's space.
    """
    return _free(state, pages, with_window=True)


def free_full(state: PoolState, pages: VirtualPages) -> PoolState:
    """Let go of the full half only: the caller released the window half before.

    If the last holder of a page leaves a window half behind, it is released and
    WINDOW_STILL_HELD is set.

    Args:
      state: The pool; donate it.
      pages: Virtual ids of any shape.

    Raises:
      IdSpaceError: ``pages`` are no virtual ids.
      UnknownSubPoolError: They are of no owner's space.
    """
    return _free(state, pages, with_window=False)


def free_window(state: PoolState, name: str, pages: VirtualPages) -> PoolState:
    """Let go of the window half of pages that a window has left behind.

    Args:
      state: The pool; donate it.
      name: The sliding-window sub-pool; it must share another sub-pool's ids.
      pages: Virtual ids of any shape, of the owner's space.

    Raises:
      IdSpaceError: ``pages`` are no virtual ids of the owner.
      SpecError: The sub-pool owns its ids: free its pages with ``free``.
      UnknownSubPoolError: No sub-pool has that name.
    """
    sub = state.layout.sub_pool(name)
    if sub.owns_ids:
        raise SpecError(
            f"sub-pool {name!r} owns its ids, so its pages have no second half: "
            "call free"
        )
    owner = state.layout.sub_pools[sub.owner]
    state, ids, is_page = _checked_ids(state, owner, pages)
    state, dies = _drop_holders(state, sub, ids, is_page)
    return _unbind(state, sub, ids, dies)


def share(state: PoolState, pages: VirtualPages) -> PoolState:
    """Add a holder to each page, and to its window half where there is one.

    Args:
      state: The pool; donate it.
      pages: Virtual ids of any shape; null ids are skipped.

    Returns:
      The state. A page that nobody holds sets UNOWNED_ID and stays free.

    Raises:
      IdSpaceError: ``pages`` are no virtual ids.
      UnknownSubPoolError: They are of no owner's space.
    """
    owner = state.layout.owner(virtual_space(pages, argument="pages"))
    state, ids, is_page = _checked_ids(state, owner, pages)
    is_live = is_page & _has_half(state, owner, ids)
    error = raise_bit(
        state.error, owner.index, ErrorBit.UNOWNED_ID, jnp.any(is_page & ~is_live)
    )
    state = state.replace(error=error)
    for sub in state.layout.members(owner):
        is_shared = is_live & _has_half(state, sub, ids)
        tables = state.tables[sub.index]
        target = jnp.where(is_shared, ids, sub.num_virtual)
        refcounts = tables.refcounts.at[target].add(1, mode="drop")
        state = replace_tables(state, sub, tables.replace(refcounts=refcounts))
    return state
