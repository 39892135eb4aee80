"""Compaction: live pages move into holes, so that free bytes lie together.

Each sub-pool keeps a band of exactly its live pages. The k-th live page outside the
band moves to the k-th hole inside it, so a page moves at most once and pages inside
the band stay. Sources and destinations of one sub-pool never overlap.

Order matters between sub-pools, since a float's band may reach into the old span of
a neighbour. Spans keep their order in the buffer, hence:

    1. sub-pools whose band lies inside their own span (ends, shrinking floats)
    2. floats that move down, lowest first
    3. floats that move up, highest first
"""

from collections.abc import Mapping

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from ukv.allocator.alloc import (
    fits_in_place,
    free_id_counts,
    needs_of,
    replace_tables,
    with_row,
)
from ukv.errors import SpecError
from ukv.ids import PhysicalPages
from ukv.implementation import Implementation
from ukv.layout import Placement, SubPoolLayout, place
from ukv.pool import HI, HOLES, LIVE, LO, PoolState, copy_pages
from ukv.pytree import Leaf


class Compaction(flax.struct.PyTreeNode):
    """What a compaction did.

    Attributes:
      fits: Whether the pages asked for fit now.
      moved: int32 ``[num_sub_pools]``, pages moved.
    """

    fits: Leaf
    moved: Leaf


def _kth(mask: Bool[Array, " pages"]) -> Int32[Array, " pages"]:
    """Return the indices where ``mask`` holds, in order, packed to the front."""
    size = mask.shape[0]
    rank = jnp.cumsum(mask, dtype=jnp.int32) - 1
    ids = jnp.arange(size, dtype=jnp.int32)
    return jnp.zeros_like(ids).at[jnp.where(mask, rank, size)].set(ids, mode="drop")


def _move_into_band(
    state: PoolState,
    sub: SubPoolLayout,
    band_lo: Int32[Array, ""],
    is_enabled: Bool[Array, ""],
    implementation: Implementation | None,
) -> tuple[PoolState, Int32[Array, ""]]:
    """Move the live pages of one sub-pool into ``[band_lo, band_lo + live)``."""
    tables, counters = state.tables[sub.index], state.counters[sub.index]
    live = counters[LIVE]
    ids = jnp.arange(sub.num_pages, dtype=jnp.int32)
    is_inside = (ids >= band_lo) & (ids < band_lo + live)
    is_bound = tables.p2v > 0
    is_source = is_bound & ~is_inside & is_enabled
    count = jnp.sum(is_source, dtype=jnp.int32)
    src, dst = _kth(is_source), _kth(is_inside & ~is_bound)
    buffers = copy_pages(
        state.buffers,
        state.layout,
        sub,
        PhysicalPages(ids=src, sub_pool=sub.name),
        PhysicalPages(ids=dst, sub_pool=sub.name),
        count,
        implementation=implementation,
    )
    is_move = ids < count
    absent = jnp.int32(sub.num_pages)
    moved = jnp.where(is_move, tables.p2v[src], sub.num_virtual)
    p2v = tables.p2v.at[jnp.where(is_move, src, absent)].set(0, mode="drop")
    p2v = p2v.at[jnp.where(is_move, dst, absent)].set(moved, mode="drop")
    v2p = tables.v2p.at[moved].set(dst, mode="drop")
    row = jnp.stack([live, jnp.zeros_like(live), band_lo, band_lo + live])
    state = replace_tables(state, sub, tables.replace(v2p=v2p, p2v=p2v)).replace(
        buffers=buffers,
        counters=with_row(
            state.counters, sub.index, jnp.where(is_enabled, row, counters)
        ),
    )
    return state, count


def _compact_to(
    state: PoolState,
    new_lo: Int32[Array, " sub_pools"],
    is_enabled: Bool[Array, ""],
    implementation: Implementation | None,
) -> tuple[PoolState, Int32[Array, " sub_pools"]]:
    moved = [jnp.zeros((), jnp.int32)] * len(state.layout.sub_pools)
    old = state.counters
    goes_down, goes_up = {}, {}
    for sub in state.layout.sub_pools:
        i = sub.index
        goes_down[i] = (new_lo[i] < old[i, LO]) & (sub.placement is Placement.FLOAT)
        goes_up[i] = (new_lo[i] + old[i, LIVE] > old[i, HI]) & (
            sub.placement is Placement.FLOAT
        )
    floats = [s for s in state.layout.sub_pools if s.placement is Placement.FLOAT]
    passes = [
        (sub, ~goes_down[sub.index] & ~goes_up[sub.index])
        for sub in state.layout.sub_pools
    ]
    passes += [(sub, goes_down[sub.index]) for sub in floats]
    passes += [
        (sub, goes_up[sub.index] & ~goes_down[sub.index]) for sub in reversed(floats)
    ]
    for sub, is_turn in passes:
        lo = new_lo[sub.index]
        if sub.placement is Placement.HIGH:
            # The band ends where the grid ends: room is left below it.
            lo = sub.num_pages - old[sub.index, LIVE]
        state, count = _move_into_band(
            state, sub, lo, is_turn & is_enabled, implementation
        )
        moved[sub.index] = moved[sub.index] + count
    return state, jnp.stack(moved)


def _require_unified(state: PoolState) -> None:
    if not state.layout.is_unified:
        raise SpecError(
            "a static pool has fixed borders and nothing to compact: use a "
            "unified_layout, or leave the call out"
        )


def make_room(
    state: PoolState,
    num_pages: Mapping[str, int | jax.Array],
    *,
    implementation: Implementation | None = None,
) -> tuple[PoolState, Compaction]:
    """Make ``num_pages`` allocatable without a move; move pages only if it must.

    After it, ``alloc`` of these counts succeeds exactly when ``Compaction.fits``.

    Args:
      state: The pool; donate it.
      num_pages: Pages by owner that the next allocation asks for.
      implementation: How pages are copied; None for the device's best.

    Raises:
      SpecError: The pool is static.
      UnknownSubPoolError: A name is no sub-pool's, or not an owner's.
    """
    _require_unified(state)
    needs = needs_of(state.layout, num_pages)
    in_place = fits_in_place(state, needs)
    wanted = state.counters[:, LIVE] + needs
    new_lo, can_fit = place(state.layout, state.counters[:, LO], wanted, jnp)
    owns = jnp.asarray([sub.owns_ids for sub in state.layout.sub_pools])
    enough_ids = (needs >= 0) & (needs <= free_id_counts(state))
    can_fit = can_fit & jnp.all(enough_ids | ~owns)
    state, moved = _compact_to(state, new_lo, can_fit & ~in_place, implementation)
    return state, Compaction(fits=in_place | can_fit, moved=moved)


def compact(
    state: PoolState, *, implementation: Implementation | None = None
) -> tuple[PoolState, Compaction]:
    """Close every hole of every sub-pool.

    Args:
      state: The pool; donate it.
      implementation: How pages are copied; None for the device's best.

    Raises:
      SpecError: The pool is static.
    """
    _require_unified(state)
    lo, live = state.counters[:, LO], state.counters[:, LIVE]
    new_lo, fits = place(state.layout, lo, live, jnp)
    has_holes = jnp.any(state.counters[:, HOLES] > 0)
    state, moved = _compact_to(state, new_lo, fits & has_holes, implementation)
    return state, Compaction(fits=fits, moved=moved)
