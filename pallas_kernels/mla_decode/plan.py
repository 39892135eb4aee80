"""Which CTA attends which tokens of which row: a balanced split of the whole batch.

The tiles (64 tokens) of all rows are put one after the other and cut into equal
pieces, one for each CTA, so that rows of unequal length are balanced to one tile. A
row that two or more CTAs share has several *parts*; each part is a partial result,
and the merge sums the parts in the order of their CTAs.

Example: rows of 3, 0 and 4 tiles on 2 CTAs are cut into pieces of 4 tiles:

    CTA 0   row 0, tiles 0 1 2   row 2, tile 0
    CTA 1   row 2, tiles 1 2 3

Row 2 has two parts. Part ids are ``cta + row``: a step along the cut increases one of
them, so no two parts share an id, and ids stay below ``num_ctas + rows``.

Only lengths decide, never where a page lies.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from pallas_kernels.mla_decode.config import TILE
from pallas_kernels.mla_decode.pages import tile_blocks

RECORD = 8
"""int32 of a record: 32 bytes, one sector of the cache."""


class Plan(NamedTuple):
    """The work of every CTA; one plan serves all layers of a step.

    Attributes:
      ctas: For each CTA: number of its parts; row, first tile, tiles, kv_len and
        tiles of the whole row of its first part; tiles of all its parts; 0.
      rows: For each row: the next row that is not empty; its tiles; its kv_len; its
        first CTA; number of its parts; 0, 0, 0.
      starts: For each CTA the blocks of the pages of its first tile.
    """

    ctas: Int32[Array, "num_ctas record"]
    rows: Int32[Array, "rows record"]
    starts: Int32[Array, "num_ctas pages"]


class Part(NamedTuple):
    """The tiles of one row that one CTA attends: int32 scalars in a kernel.

    Attributes:
      row: Row of the batch.
      first: First tile of the row.
      tiles: Number of tiles.
      kv_len: Tokens of the whole row.
      row_tiles: Tiles of the whole row; more than ``tiles`` if the row is split.
    """

    row: jax.Array
    first: jax.Array
    tiles: jax.Array
    kv_len: jax.Array
    row_tiles: jax.Array


def plan_work(
    table: Int32[Array, "rows max_pages"],
    kv_lens: Int32[Array, " rows"],
    *,
    page_size: int,
    num_ctas: int,
    min_tiles: int,
) -> Plan:
    """Cut a batch into one piece of work for each CTA.

    Args:
      table: Block ids of the pages of each row.
      kv_lens: Tokens of each row, 0 or more.
      page_size: Tokens per page.
      num_ctas: CTAs that share the batch.
      min_tiles: Tiles below which a piece is not cut further: a short batch then
        leaves CTAs without work and has fewer parts to merge.
    """
    row = jnp.arange(kv_lens.shape[0], dtype=jnp.int32)
    tiles = (kv_lens + (TILE - 1)) // TILE
    is_before = row[None, :] < row[:, None]
    start = jnp.sum(jnp.where(is_before, tiles[None, :], 0), axis=1, dtype=jnp.int32)
    end, total = start + tiles, jnp.sum(tiles, dtype=jnp.int32)
    piece = jnp.maximum(-(-total // num_ctas), min_tiles)

    is_empty = tiles == 0
    is_next = (row[None, :] > row[:, None]) & ~is_empty[None, :]
    following = jnp.min(jnp.where(is_next, row[None, :], row[-1]), axis=1)
    first_cta = start // piece
    parts = jnp.where(is_empty, 0, (end - 1) // piece - first_cta + 1)
    zero = jnp.zeros_like(row)
    rows = jnp.stack([following, tiles, kv_lens, first_cta, parts, zero, zero, zero], 1)

    cut = jnp.arange(num_ctas, dtype=jnp.int32)[:, None] * piece
    is_mine = (start[None, :] < cut + piece) & (end[None, :] > cut)
    is_mine &= ~is_empty[None, :]
    num_parts = jnp.sum(is_mine, axis=1, dtype=jnp.int32)
    own = jnp.min(jnp.where(is_mine, row[None, :], row[-1]), axis=1)
    cut = cut[:, 0]
    first = cut - start[own]
    held = jnp.where(num_parts > 0, jnp.minimum(end[own], cut + piece) - cut, 0)
    budget = jnp.clip(total - cut, 0, piece)
    ctas = [num_parts, own, first, held, kv_lens[own], tiles[own], budget]
    blocks = tile_blocks(table, own, kv_lens[own], first, page_size=page_size)
    return Plan(
        ctas=jnp.stack([*ctas, jnp.zeros_like(cut)], 1),
        rows=rows,
        starts=jnp.stack(blocks, 1),
    )


def for_each_part(
    ctas_ref, rows_ref, cta, attend_part, carry: Any
) -> tuple[jax.Array, tuple[Part, Part], Any]:
    """Go through the parts of a CTA, in a kernel.

    Args:
      ctas_ref: The plan's records of CTAs.
      rows_ref: Its records of rows.
      cta: The CTA.
      attend_part: Called as ``attend_part(index, part, carry)``, returns the carry.
      carry: What the first part gets.

    Returns:
      The number of parts, the first and the last of them, and the last carry.
    """
    count, first, budget = _first_part(ctas_ref, cta)

    def step(index, state):
        part, _, budget, carry = state
        # Read before the part is attended, so that the next one need not wait for it.
        following, left = _next_part(rows_ref, part, budget)
        return following, part, left, attend_part(index, part, carry)

    state = first, first, budget, carry
    _, last, _, carry = lax.fori_loop(0, count, step, state)
    return count, (first, last), carry


def _first_part(ctas_ref, cta) -> tuple[jax.Array, Part, jax.Array]:
    """Read the record of a CTA: number of parts, its first part, tiles of them all."""
    count, row, first, tiles, kv_len, row_tiles, budget = (
        ctas_ref[cta, j] for j in range(7)
    )
    part = Part(row=row, first=first, tiles=tiles, kv_len=kv_len, row_tiles=row_tiles)
    return count, part, budget


def _next_part(rows_ref, part: Part, budget) -> tuple[Part, jax.Array]:
    """Return the part after ``part``, and the tiles left from it on.

    After the last part it returns one of some row; nobody attends it.
    """
    row = rows_ref[part.row, 0]
    row_tiles, kv_len = rows_ref[row, 1], rows_ref[row, 2]
    left = budget - part.tiles
    following = Part(
        row=row,
        first=jnp.int32(0),
        tiles=jnp.minimum(row_tiles, left),
        kv_len=kv_len,
        row_tiles=row_tiles,
    )
    return following, left


def merge_record(rows_ref, row) -> tuple[jax.Array, jax.Array]:
    """Read how many parts a row has, and the id of the first; the others follow."""
    return rows_ref[row, 4], rows_ref[row, 3] + row
