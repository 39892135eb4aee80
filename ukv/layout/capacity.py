"""Closed-form capacity: how much a layout holds, without running the allocator."""

from collections.abc import Mapping

import numpy as np

from ukv.errors import SpecError
from ukv.layout.placement import place, spans_fit
from ukv.layout.pool import PoolLayout
from ukv.layout.request import RequestShape, pages_of_spec
from ukv.layout.sub_pool import SubPoolLayout


def pages_of_request(sub: SubPoolLayout, shape: RequestShape) -> int:
    """Return the most pages of ``sub`` that such a request holds at once."""
    return pages_of_spec(sub.spec, shape)


def pages_fit(layout: PoolLayout, pages: Mapping[str, int]) -> bool:
    """Return whether a pool of this layout can hold ``pages`` at once.

    Raises:
      UnknownSubPoolError: A name is no sub-pool's.
    """
    for name in pages:
        layout.sub_pool(name)
    counts = [pages.get(sub.name, 0) for sub in layout.sub_pools]
    if not layout.is_unified:
        return all(
            count <= sub.num_pages - sub.owns_ids
            for sub, count in zip(layout.sub_pools, counts, strict=True)
        )
    if any(
        count > sub.num_pages
        for sub, count in zip(layout.sub_pools, counts, strict=True)
    ):
        return False
    wanted = np.asarray(counts, np.int32)
    lo, fits = place(layout, np.zeros_like(wanted), wanted, np)
    return bool(fits) and bool(spans_fit(layout, lo, lo + wanted, np))


def _largest(fits, upper: int) -> int:
    """Return the largest ``n`` in ``[0, upper]`` for which ``fits(n)`` holds."""
    low, high = 0, upper
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def max_pages(
    layout: PoolLayout, name: str, held: Mapping[str, int] | None = None
) -> int:
    """Return the most pages of one sub-pool beside the ``held`` pages of others."""
    sub = layout.sub_pool(name)
    others = {key: n for key, n in (held or {}).items() if key != name}
    return _largest(lambda n: pages_fit(layout, {**others, name: n}), sub.num_pages)


def max_requests(layout: PoolLayout, shape: RequestShape) -> int:
    """Return how many requests of this shape the pool holds at once."""
    each = {sub.name: pages_of_request(sub, shape) for sub in layout.sub_pools}
    upper = min(
        sub.num_pages // each[sub.name] for sub in layout.sub_pools if each[sub.name]
    )
    return _largest(
        lambda n: pages_fit(layout, {name: n * p for name, p in each.items()}), upper
    )


def max_tokens(layout: PoolLayout, *, num_requests: int = 1) -> int:
    """Return the most tokens that ``num_requests`` requests hold together.

    Each holds its states and one window, and the tokens lie in full pages.

    Raises:
      SpecError: No sub-pool keeps every token, or there is no request.
    """
    if num_requests < 1:
        raise SpecError(f"{num_requests=} must be 1 or more")
    grows = [sub for sub in layout.sub_pools if sub.spec.grows]
    full = [sub for sub in grows if sub.spec.window is None]
    if not full:
        raise SpecError(
            "no sub-pool keeps every token: a pool of windows and states has no "
            "token capacity, ask max_requests instead"
        )

    def fits(num_tokens: int) -> bool:
        shape = RequestShape(num_tokens=max(num_tokens, 1))
        held = {}
        for sub in layout.sub_pools:
            pages = -(-num_tokens // sub.page_size)
            if not sub.spec.grows:
                held[sub.name] = num_requests
            elif sub.spec.window is None:
                held[sub.name] = pages
            else:
                window_pages = pages_of_request(sub, shape)
                held[sub.name] = min(pages, num_requests * window_pages)
        return pages_fit(layout, held)

    return _largest(fits, min(sub.num_pages * sub.page_size for sub in full))
