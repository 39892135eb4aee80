"""Which pages a sliding window has left behind: one rule for host and device."""

import types
from typing import Any

from ukv.layout import PoolLayout, SubPoolLayout


def window_halves(layout: PoolLayout) -> tuple[SubPoolLayout, ...]:
    """Return the sub-pools whose pages are window halves, released on their own."""
    return tuple(
        sub
        for sub in layout.sub_pools
        if sub.spec.window is not None and not sub.owns_ids
    )


def pages_behind(sub: SubPoolLayout, context_len: Any, xp: types.ModuleType) -> Any:
    """Return how many first pages of a row the next token cannot see.

    Example: window 20, page 16, 52 tokens: token 52 sees tokens 33 to 52, so pages 0
    and 1, which end with token 31, are behind.

    Args:
      sub: A sub-pool with a window.
      context_len: Tokens of the row; an int or an int32 array.
      xp: ``numpy`` or ``jax.numpy``.
    """
    assert sub.spec.window is not None
    return xp.maximum(context_len - sub.spec.window + 1, 0) // sub.page_size
