"""Programs between steps: rows begin, rows give their pages back, pages move.

Each takes the device state, donated, and one packed int32 array, and returns the next
state. A row id of ``max_rows`` is padding: it reads null pages and writes nothing.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from ukv.allocator import alloc, copy_page, free, free_full, free_window, make_room
from ukv.engine.device_state import DeviceState
from ukv.engine.window import first_half, window_halves
from ukv.ids import VirtualPages
from ukv.pool import PoolState

ADMIT_COLUMNS = 3
"""Row, tokens of its hit, name of its state: the parameters follow."""


def rows_of(table: VirtualPages, rows: Int32[Array, " rows"]) -> VirtualPages:
    """Return some rows of a page table, null where padded."""
    return table.replace(ids=table.ids.at[rows].get(mode="fill", fill_value=0))


def named(
    state: DeviceState, owner: str, names: Int32[Array, " names"]
) -> VirtualPages:
    """Return what the prefix cache holds under some names, null under name 0."""
    cached = state.cached[owner]
    return cached.replace(ids=cached.ids.at[names].get(mode="fill", fill_value=0))


def admit(state: DeviceState, packed: Int32[Array, "rows width"]) -> DeviceState:
    """Give new rows their sampling parameters and a slot of each state.

    A row that begins with a cached state gets a copy of it. The slot of another holds
    anything: the state ops start from zeros where there are no tokens yet.

    Args:
      state: The device state.
      packed: For each row its id, the tokens of its hit, the name of its cached state
        or 0, and its packed parameters; padding comes last.
    """
    rows, hit_lens, names = packed[:, 0], packed[:, 1], packed[:, 2]
    params = packed[:, ADMIT_COLUMNS:]
    max_rows = state.is_stopped.shape[0]
    is_fresh = (rows < max_rows) & (names == 0)
    count = jnp.sum(is_fresh, dtype=jnp.int32)
    rank = jnp.cumsum(is_fresh, dtype=jnp.int32) - 1
    tables, pool = dict(state.page_tables), state.pool
    states = [owner.name for owner in pool.layout.owners if not owner.spec.grows]
    if states:
        pool, grant = alloc(
            pool,
            dict.fromkeys(states, count),
            max_pages=dict.fromkeys(states, rows.shape[0]),
        )
        for name in states:
            new = jnp.where(is_fresh, grant.pages[name].ids[jnp.maximum(rank, 0)], 0)
            if state.cached:
                pool, copies, _ = copy_page(pool, named(state, name, names))
                new = jnp.where(is_fresh, new, copies.ids)
            ids = tables[name].ids.at[rows].set(new, mode="drop")
            tables[name] = tables[name].replace(ids=ids)
    return state.replace(
        pool=pool,
        page_tables=tables,
        hit_lens=state.hit_lens.at[rows].set(hit_lens, mode="drop"),
        is_stopped=state.is_stopped.at[rows].set(False, mode="drop"),
        params=state.params.at[rows].set(params, mode="drop"),
    )


def release(state: DeviceState, packed: Int32[Array, "rows 2"]) -> DeviceState:
    """Give back every page of some rows and forget their tables.

    Args:
      state: The device state.
      packed: For each row its id and its length.
    """
    rows, context_lens = packed[:, 0], packed[:, 1]
    tables, pool = dict(state.page_tables), state.pool
    hit_lens = state.hit_lens.at[rows].get(mode="fill", fill_value=0)
    halves = window_halves(pool.layout)
    for name, table in tables.items():
        pages = rows_of(table, rows)
        windows = [sub for sub in halves if sub.spec.id_space == name]
        for sub in windows:
            # The row let go of the earlier halves as its window passed them.
            column = jnp.arange(pages.ids.shape[1], dtype=jnp.int32)
            first = first_half(sub, context_lens, hit_lens, state.kept_tokens, jnp)
            ids = jnp.where(column[None, :] >= first[:, None], pages.ids, 0)
            pool = free_window(pool, sub.name, pages.replace(ids=ids))
        pool = free_full(pool, pages) if windows else free(pool, pages)
        tables[name] = table.replace(ids=table.ids.at[rows].set(0, mode="drop"))
    stopped = state.is_stopped.at[rows].set(True, mode="drop")
    return state.replace(pool=pool, page_tables=tables, is_stopped=stopped)


def move_pages(state: DeviceState, counts: Int32[Array, " owners"]) -> DeviceState:
    """Make room for some pages of each owner, in the order of the layout."""
    owners = state.pool.layout.owners
    num_pages = {owner.name: counts[i] for i, owner in enumerate(owners)}
    pool, _ = make_room(state.pool, num_pages)
    return state.replace(pool=pool)


def release_behind_windows(
    pool: PoolState,
    state: DeviceState,
    rows: Int32[Array, " rows"],
    tables: dict[str, VirtualPages],
    context_lens: Int32[Array, " rows"],
    query_lens: Int32[Array, " rows"],
    max_query_len: int,
) -> PoolState:
    """Let go of the window halves that the new tokens of each row left behind.

    Args:
      pool: The pool, after the tokens were computed.
      state: What the device knows of each row.
      rows: Their ids; ``max_rows`` where padded.
      tables: By owner, the page table of these rows.
      context_lens: Tokens of each row before them.
      query_lens: New tokens; 0 for a padded row.
      max_query_len: Static bound of the new tokens of a row.
    """
    hit_lens = state.hit_lens.at[rows].get(mode="fill", fill_value=0)
    end_lens, kept = context_lens + query_lens, state.kept_tokens
    for sub in window_halves(pool.layout):
        table = tables[sub.spec.id_space]
        first = first_half(sub, context_lens, hit_lens, kept, jnp)
        last = first_half(sub, end_lens, hit_lens, kept, jnp)
        most = -(-max_query_len // sub.page_size)
        column = first[:, None] + jnp.arange(most, dtype=jnp.int32)[None, :]
        ids = jnp.take_along_axis(
            table.ids, jnp.minimum(column, table.ids.shape[1] - 1), axis=1
        )
        ids = jnp.where(column < last[:, None], ids, 0)
        pool = free_window(pool, sub.name, table.replace(ids=ids))
    return pool


jitted_admit = jax.jit(admit, donate_argnums=0)
jitted_release = jax.jit(release, donate_argnums=0)
jitted_move_pages = jax.jit(move_pages, donate_argnums=0)
