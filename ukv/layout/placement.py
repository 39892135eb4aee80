"""Where sub-pools may lie beside each other: one rule for host and device.

The functions take ``xp``, ``numpy`` on the host and ``jax.numpy`` inside ``jit``, so
that admission on the host and allocation on the device decide by the same lines.
Lengths are counted in units of ``layout.unit_bytes``; a pool has fewer than 2^31
units, and sums saturate, so int32 is enough.
"""

import types
from typing import Any

from ukv.layout.pool import PoolLayout
from ukv.layout.sub_pool import Placement

Integers = Any
"""int32 ``[num_sub_pools]``: a NumPy or a JAX array."""


def spans_fit(
    layout: PoolLayout, lo: Integers, hi: Integers, xp: types.ModuleType
) -> Any:
    """Return whether the spans ``[lo, hi)`` in pages lie apart and inside the grid.

    An empty span takes no room, wherever it is.

    Args:
      layout: The pool's layout.
      lo: First page of each span.
      hi: First page past each span.
      xp: ``numpy`` or ``jax.numpy``.
    """
    fits = xp.asarray(True)
    border = xp.asarray(0, "int32")
    for sub in layout.sub_pools:
        i = sub.index
        fits &= (lo[i] >= 0) & (hi[i] <= sub.num_pages)
        if sub.placement is Placement.OWN:
            continue
        page, base = layout.page_units[i], layout.base_units[i]
        # Clipping keeps the product below 2^31 when a span is out of its grid.
        start = base + xp.clip(lo[i], 0, sub.num_pages) * page
        end = base + xp.clip(hi[i], 0, sub.num_pages) * page
        is_empty = lo[i] >= hi[i]
        fits &= is_empty | (start >= border)
        border = xp.where(is_empty, border, xp.maximum(border, end))
    return fits


def _grid_start(border: Integers, page: int, total: int, xp: types.ModuleType) -> Any:
    """Return the first multiple of ``page`` from ``border`` on, ``total`` if past it.

    A page never fits at ``total``; the multiple itself could be past 2^31.
    """
    index = -(-border // page)
    last = total // page
    return xp.where(index > last, total, xp.minimum(index, last) * page)


def place(
    layout: PoolLayout, lo: Integers, pages: Integers, xp: types.ModuleType
) -> tuple[Any, Any]:
    """Return first pages at which sub-pools of ``pages`` pages lie side by side.

    Feasibility is the linear inequality of the packed placement: the low end, each
    float at the first page of its grid past its predecessor, the high end last. A
    float stays where it is if it can; one that must move leaves an equal share of
    the free bytes below it, so that its neighbours can grow before the next move.

    Args:
      layout: The pool's layout.
      lo: Present first page of each sub-pool.
      pages: Pages that each sub-pool must have room for.
      xp: ``numpy`` or ``jax.numpy``.

    Returns:
      ``(new_lo, fits)``; ``new_lo`` means nothing where ``fits`` is false.
    """
    total = layout.total_units
    fits = xp.asarray(True)
    sizes = []
    for sub in layout.sub_pools:
        fits &= (pages[sub.index] >= 0) & (pages[sub.index] <= sub.num_pages)
        clipped = xp.clip(pages[sub.index], 0, sub.num_pages)
        sizes.append(clipped * layout.page_units[sub.index])
    new_lo = [xp.asarray(lo[sub.index], "int32") for sub in layout.sub_pools]
    shared = [sub for sub in layout.sub_pools if sub.placement is not Placement.OWN]
    floats = [sub for sub in shared if sub.placement is Placement.FLOAT]

    # Packed from the left: is there room at all?
    border = xp.asarray(0, "int32")
    for sub in shared:
        page, size = layout.page_units[sub.index], sizes[sub.index]
        start = border
        if sub.placement is Placement.FLOAT:
            start = _grid_start(border, page, total, xp)
        fits &= (size == 0) | (start <= total - size)
        border = xp.where(size == 0, border, xp.minimum(start, total - size) + size)

    # The rightmost start of each float that still leaves room for all above it.
    limit = xp.asarray(total, "int32")
    latest = {}
    for sub in reversed(shared):
        page, size = layout.page_units[sub.index], sizes[sub.index]
        if sub.placement is Placement.HIGH:
            limit = xp.maximum(limit - size, 0)
            new_lo[sub.index] = xp.asarray(sub.num_pages - pages[sub.index], "int32")
        elif sub.placement is Placement.FLOAT:
            latest[sub.index] = xp.maximum(limit - size, 0) // page * page
            limit = xp.where(size == 0, limit, latest[sub.index])
        else:
            new_lo[sub.index] = xp.asarray(0, "int32")

    free = xp.asarray(total, "int32")
    for sub in shared:
        free = xp.maximum(free - sizes[sub.index], 0)
    share = free // (len(floats) + 1)
    border = sizes[shared[0].index] if shared else border
    for sub in floats:
        i, page, size = sub.index, layout.page_units[sub.index], sizes[sub.index]
        first = _grid_start(border, page, total, xp)
        present = xp.clip(lo[i], 0, sub.num_pages) * page
        stays = (present >= first) & (present <= latest[i])
        shared_start = border + xp.minimum(share, total - border)
        moved = xp.minimum(_grid_start(shared_start, page, total, xp), latest[i])
        start = xp.where(size == 0, present, xp.where(stays, present, moved))
        new_lo[i] = start // page
        border = xp.where(size == 0, border, xp.minimum(start, total - size) + size)
    return xp.stack(new_lo).astype("int32"), fits
