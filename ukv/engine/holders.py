"""The check that every page has as many holders as there are who say they hold it."""

from collections.abc import Iterable

import jax
import numpy as np

from ukv.engine.device_state import DeviceState
from ukv.engine.prefix_cache import PrefixCache
from ukv.engine.sequence import Sequence
from ukv.engine.window import first_half, window_halves
from ukv.errors import PoolStateError


def require_holders(
    state: DeviceState, sequences: Iterable[Sequence], cache: PrefixCache | None
) -> None:
    """Compare what the pool counts with the tables of rows and the cache's names.

    Waits for the device.

    Args:
      state: The device state.
      sequences: Those with a row.
      cache: The prefix cache; None without one.

    Raises:
      PoolStateError: With the first page of each sub-pool whose holders differ.
    """
    layout = state.pool.layout
    tables, cached, refcounts = jax.device_get(
        (
            {name: table.ids for name, table in state.page_tables.items()},
            {name: table.ids for name, table in state.cached.items()},
            [table.refcounts for table in state.pool.tables],
        )
    )
    sequences, found = list(sequences), []
    nodes = [] if cache is None else list(cache.tree.nodes())
    for owner in layout.owners:
        expected = _count(owner.num_virtual, tables[owner.name])
        if cached:
            expected += _count(owner.num_virtual, cached[owner.name])
        found.append((owner.name, expected, refcounts[owner.index]))
    for window, sub in enumerate(window_halves(layout)):
        owner = layout.sub_pools[sub.owner].name
        expected = np.zeros_like(refcounts[sub.index])
        for sequence in sequences:
            first = first_half(
                sub, sequence.context_len, sequence.hit_len, state.kept_tokens, np
            )
            held = tables[owner][sequence.row, int(first) :]
            expected += _count(len(expected), held)
        if cache is not None:
            place = cache.spec.windows[window].owner
            names = [node.ids[place] for node in nodes if node.halves[window]]
            expected += _count(len(expected), cached[owner][names])
        found.append((sub.name, expected, refcounts[sub.index]))
    wrong = [
        f"{name} page {page}: {counts[page]} holders counted, {expected[page]} found"
        for name, expected, counts in found
        for page in np.flatnonzero(expected != counts)[:1]
    ]
    if wrong:
        raise PoolStateError("; ".join(wrong))


def _count(num_virtual: int, ids: np.ndarray) -> np.ndarray:
    counts = np.bincount(ids.reshape(-1), minlength=num_virtual)
    counts[0] = 0  # the null page has no holders
    return counts
