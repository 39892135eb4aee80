"""Copy on write: a private copy of pages that others hold too."""

import jax.numpy as jnp
from jaxtyping import Array, Bool

from ukv.allocator.alloc import (
    bind,
    fits_in_place,
    flag_refusal,
    free_id_counts,
    take_ids,
)
from ukv.allocator.error_word import ErrorBit, raise_bit
from ukv.ids import PhysicalPages, VirtualPages, require_ids, virtual_space
from ukv.implementation import Implementation
from ukv.pool import PoolState, copy_pages


def copy_page(
    state: PoolState,
    pages: VirtualPages,
    *,
    implementation: Implementation | None = None,
) -> tuple[PoolState, VirtualPages, Bool[Array, ""]]:
    """Allocate a copy of each page, all or nothing.

    A tombstone's copy is a tombstone. The holders of the source do not change: the
    caller frees its own hold when it turns to the copy.

    Args:
      state: The pool; donate it.
      pages: Virtual ids ``[n]``; null ids are skipped.
      implementation: How pages are copied; None for the device's best.

    Returns:
      ``(state, copies, granted)``; ``copies`` ``[n]`` holds null where the source is
      null, and everywhere if the copy was refused. A refusal for want of pages sets
      OUT_OF_PAGES; a source that nobody holds sets UNOWNED_ID.

    Raises:
      IdSpaceError: ``pages`` are no virtual ids.
      UnknownSubPoolError: The space is no owner's.
    """
    layout = state.layout
    owner = layout.owner(virtual_space(pages, argument="pages"))
    ids = require_ids(pages, VirtualPages, owner=owner.name, argument="pages").ids
    refcounts = state.tables[owner.index].refcounts
    is_page = ids != 0
    is_live = (
        (ids > 0) & (ids < owner.num_virtual) & (refcounts.at[ids].get(mode="clip") > 0)
    )
    all_live = ~jnp.any(is_page & ~is_live)
    members = layout.members(owner)
    halves = {
        sub.index: is_live
        & (state.tables[sub.index].refcounts.at[ids].get(mode="clip") > 0)
        for sub in members
    }
    needs = jnp.zeros(len(layout.sub_pools), jnp.int32)
    for index, is_half in halves.items():
        needs = needs.at[index].set(jnp.sum(is_half, dtype=jnp.int32))
    fits = fits_in_place(state, needs)
    granted = fits & all_live
    state = flag_refusal(state, needs, fits)
    error = raise_bit(state.error, owner.index, ErrorBit.UNOWNED_ID, ~all_live)
    state = state.replace(error=error)

    new_ids = take_ids(
        state.tables[owner.index],
        free_id_counts(state)[owner.index],
        is_live & granted,
    )
    for sub in members:
        is_half = halves[sub.index] & granted
        state = bind(state, sub, new_ids, is_half)
        physical = state.tables[sub.index].v2p if sub.is_translating else None
        order = jnp.argsort(~is_half, stable=True)
        src, dst = ids[order], new_ids[order]
        if physical is not None:
            src = physical.at[src].get(mode="clip")
            dst = physical.at[dst].get(mode="clip")
        buffers = copy_pages(
            state.buffers,
            layout,
            sub,
            PhysicalPages(ids=src, sub_pool=sub.name),
            PhysicalPages(ids=dst, sub_pool=sub.name),
            jnp.sum(is_half, dtype=jnp.int32),
            implementation=implementation,
        )
        state = state.replace(buffers=buffers)
    return state, VirtualPages(ids=new_ids, space=owner.name), granted
