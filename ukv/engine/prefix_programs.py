"""Programs of the prefix cache: it takes pages over, gives them to rows, drops them.

As ``row_programs``: each takes the device state, donated, and one packed int32 array
with padding. A page's name is a number that the host chose; ``DeviceState.cached``
has the virtual id behind it. Name 0 is padding, and so is a row id of ``max_rows``.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from ukv.allocator import copy_page, free, free_window, share
from ukv.engine.device_state import DeviceState
from ukv.engine.row_programs import named, rows_of
from ukv.engine.window import window_halves
from ukv.ids import VirtualPages
from ukv.pool import PoolState


def _with_names(
    state: DeviceState,
    pool: PoolState,
    names: Int32[Array, " names"],
    pages: dict[str, VirtualPages],
) -> DeviceState:
    """Return the state with other ids under some names, by owner."""
    cached = dict(state.cached)
    for owner, found in pages.items():
        table = cached[owner]
        target = jnp.where(names > 0, names, table.ids.shape[0])
        cached[owner] = table.replace(
            ids=table.ids.at[target].set(found.ids, mode="drop")
        )
    return state.replace(pool=pool, cached=cached)


def keep(state: DeviceState, packed: Int32[Array, "pages 3"]) -> DeviceState:
    """Let the cache hold pages of rows too.

    Args:
      state: The device state.
      packed: For each page its row, its column in the row, and its name.
    """
    rows, columns, names = packed[:, 0], packed[:, 1], packed[:, 2]
    pool, pages = state.pool, {}
    for owner in pool.layout.owners:
        if owner.spec.grows:
            table = state.page_tables[owner.name]
            ids = table.ids.at[rows, columns].get(mode="fill", fill_value=0)
            pages[owner.name] = table.replace(ids=ids)
            pool = share(pool, pages[owner.name])
    return _with_names(state, pool, names, pages)


def reuse(state: DeviceState, packed: Int32[Array, "pages 3"]) -> DeviceState:
    """Let rows hold cached pages too.

    Args:
      state: The device state.
      packed: For each page its row, its column in the row, and its name.
    """
    rows, columns, names = packed[:, 0], packed[:, 1], packed[:, 2]
    pool, tables = state.pool, dict(state.page_tables)
    for owner in pool.layout.owners:
        if owner.spec.grows:
            pages, table = named(state, owner.name, names), tables[owner.name]
            pool = share(pool, pages)
            ids = table.ids.at[rows, columns].set(pages.ids, mode="drop")
            tables[owner.name] = table.replace(ids=ids)
    return state.replace(pool=pool, page_tables=tables)


def checkpoint(state: DeviceState, packed: Int32[Array, "rows 2"]) -> DeviceState:
    """Copy the states of rows for the cache.

    Args:
      state: The device state.
      packed: For each row its id and the copy's name.
    """
    rows, names = packed[:, 0], packed[:, 1]
    pool, copies = state.pool, {}
    for owner in pool.layout.owners:
        if not owner.spec.grows:
            slots = rows_of(state.page_tables[owner.name], rows)
            pool, copies[owner.name], _ = copy_page(pool, slots)
    return _with_names(state, pool, names, copies)


def drop(state: DeviceState, packed: Int32[Array, "sub_pools names"]) -> DeviceState:
    """Let go of what the cache holds: states, then window halves, then pages.

    Args:
      state: The device state.
      packed: For each sub-pool of the layout the names of what is dropped. A window's
        are names of pages, which keep their other half.
    """
    layout, pool = state.pool.layout, state.pool
    owners = sorted(layout.owners, key=lambda owner: owner.spec.grows)
    dropped = {sub.name: packed[sub.index] for sub in layout.sub_pools}
    for sub in window_halves(layout):
        pages = named(state, layout.sub_pools[sub.owner].name, dropped[sub.name])
        pool = free_window(pool, sub.name, pages)
    for owner in owners:
        pool = free(pool, named(state, owner.name, dropped[owner.name]))
    state = state.replace(pool=pool)
    for owner in owners:
        names = dropped[owner.name]
        null = VirtualPages(ids=jnp.zeros_like(names), space=owner.name)
        state = _with_names(state, state.pool, names, {owner.name: null})
    return state


jitted_keep = jax.jit(keep, donate_argnums=0)
jitted_reuse = jax.jit(reuse, donate_argnums=0)
jitted_checkpoint = jax.jit(checkpoint, donate_argnums=0)
jitted_drop = jax.jit(drop, donate_argnums=0)
