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


def first_half(
    sub: SubPoolLayout,
    context_len: Any,
    hit_len: Any,
    kept_tokens: int,
    xp: types.ModuleType,
) -> Any:
    """Return the first page whose half a row holds: it let go of those before.

    Example: window 20, page 16, 52 tokens: token 52 sees tokens 33 to 52, so pages 0
    and 1, which end with token 31, are behind. With 16 kept tokens the row holds
    page 1 too, unless it began with a hit of 48 tokens, whose token 48 sees 29 to 48.

    Args:
      sub: A sub-pool with a window.
      context_len: Tokens of the row; an int or an int32 array.
      hit_len: Tokens that it found in the prefix cache; it never held halves before
        those that the first token after them sees.
      kept_tokens: Tokens for which it holds halves longer than its window does, so
        that the prefix cache can take them over.
      xp: ``numpy`` or ``jax.numpy``.
    """
    assert sub.spec.window is not None
    behind = xp.maximum(context_len - sub.spec.window - kept_tokens + 1, 0)
    unseen = xp.maximum(hit_len - sub.spec.window + 1, 0)
    return xp.maximum(behind, unseen) // sub.page_size
