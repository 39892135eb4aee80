"""The error word: what went wrong on the device, readable without a stop.

Each sub-pool has one uint32 of bits in ``PoolState.error``. Operations only set
bits. A debug build calls :func:`raise_on_error` after each step; a production loop
copies the word back asynchronously and calls :func:`describe_error` on it.
"""

import enum

import jax
import jax.numpy as jnp
import numpy as np

from ukv.errors import PoolStateError
from ukv.layout import PoolLayout
from ukv.pool import PoolState


class ErrorBit(enum.IntFlag):
    """Bits of a sub-pool's error word."""

    OUT_OF_PAGES = 1
    DOUBLE_FREE = 2
    ID_OUT_OF_RANGE = 4
    UNOWNED_ID = 8
    WINDOW_STILL_HELD = 16
    TABLE_OVERFLOW = 32


MESSAGES = {
    ErrorBit.OUT_OF_PAGES: "an allocation was refused: its bytes do not fit",
    ErrorBit.DOUBLE_FREE: "a page was released more often than it was held",
    ErrorBit.ID_OUT_OF_RANGE: "a virtual id is not in the id space",
    ErrorBit.UNOWNED_ID: "a page that nobody holds was shared, copied or translated",
    ErrorBit.WINDOW_STILL_HELD: "a page's last holder left its window half behind",
    ErrorBit.TABLE_OVERFLOW: "a row of a page table, or a batch of ids, is too short",
}


def raise_bit(
    error: jax.Array, index: int, bit: ErrorBit, condition: jax.Array
) -> jax.Array:
    """Return the error words with ``bit`` of one sub-pool set where it applies."""
    # One elementwise expression, which XLA fuses; an indexed update would not.
    words = np.zeros(error.shape, np.uint32)
    words[index] = bit
    return error | jnp.where(condition, words, jnp.zeros_like(words))


def describe_error(layout: PoolLayout, error: np.ndarray) -> list[str]:
    """Return one line for each bit that is set, naming the sub-pool.

    Args:
      layout: The pool's layout.
      error: A host copy of ``PoolState.error``.
    """
    return [
        f"sub-pool {sub.name!r}: {bit.name}: {MESSAGES[bit]}"
        for sub in layout.sub_pools
        for bit in ErrorBit
        if int(error[sub.index]) & bit
    ]


def raise_on_error(state: PoolState) -> None:
    """Raise if any bit of the error word is set. Waits for the device.

    Raises:
      PoolStateError: With a line for each bit.
    """
    lines = describe_error(state.layout, jax.device_get(state.error))
    if lines:
        raise PoolStateError("; ".join(lines))


def clear_error(state: PoolState) -> PoolState:
    """Return the state with no bit set."""
    return state.replace(error=jnp.zeros_like(state.error))
