"""Tiles of a packed batch on the grid of packed tokens.

The packed tokens are cut every ``block_q``, and again where a row ends, so that a
tile starts where an asynchronous copy may and holds queries of one row:

    query_lens 5, 0, 3 of 10 packed tokens, block_q 4

    tile            0        1    2        3
    row             0        0    2        padding
    packed tokens   0 1 2 3  4    5 6 7    8 9

Tokens of padding make one more row without keys: its outputs are zeros.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


class Tiles(NamedTuple):
    """The tiles of a packed batch, int32 ``[tiles]`` each.

    Attributes:
      row: Row of the read table.
      base: Packed token of the tile's first place, a multiple of ``block_q``.
      first: First place that belongs to the row.
      end: End of those places; 0 like ``first`` in a tile that does not exist.
      position: Position in the row of the token at place 0; it may be negative.
      key_start: First position of the row whose key there is.
      key_end: End of those positions.
    """

    row: jax.Array
    base: jax.Array
    first: jax.Array
    end: jax.Array
    position: jax.Array
    key_start: jax.Array
    key_end: jax.Array


def cut_on_grid(
    cu_query_lens: Int32[Array, " bounds"],
    kv_lens: Int32[Array, " rows"],
    key_starts: Int32[Array, " rows"],
    key_ends: Int32[Array, " rows"],
    *,
    num_tokens: int,
    block_q: int,
) -> tuple[Tiles, Int32[Array, " num_tokens"]]:
    """Cut a packed batch.

    Args:
      cu_query_lens: Exclusive prefix sum of the query lengths, one more than rows.
      kv_lens: Tokens of each row, its query tokens included; 0 for a padded row.
      key_starts: First position of each row whose key there is.
      key_ends: End of those positions, at most ``kv_lens``.
      num_tokens: Length of the packed axis.
      block_q: Places of a tile.

    Returns:
      The tiles, and for each token its flat place ``tile * block_q + place``.
    """
    num_rows = kv_lens.shape[0]
    starts = cu_query_lens
    ends = jnp.concatenate([cu_query_lens[1:], jnp.full(1, num_tokens, jnp.int32)])
    lens = ends - starts
    kv_lens, key_starts, key_ends = (
        jnp.concatenate([x, jnp.zeros(1, jnp.int32)])
        for x in (kv_lens, key_starts, key_ends)
    )
    first_blocks = starts // block_q
    tiles_of_row = jnp.where(lens > 0, (ends - 1) // block_q + 1 - first_blocks, 0)
    tile_ends = jnp.cumsum(tiles_of_row, dtype=jnp.int32)
    first_tiles = tile_ends - tiles_of_row

    # A border between rows cuts one block of the grid into one more tile.
    num_tiles = min(-(-num_tokens // block_q) + num_rows, num_tokens)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    row = jnp.searchsorted(tile_ends, tile, side="right", method="compare_all")
    row = jnp.minimum(row.astype(jnp.int32), num_rows)
    is_tile = tile < tile_ends[-1]
    base = (first_blocks[row] + tile - first_tiles[row]) * block_q
    fields = Tiles(
        row=jnp.minimum(row, num_rows - 1),
        base=base,
        first=jnp.clip(starts[row] - base, 0, block_q),
        end=jnp.clip(ends[row] - base, 0, block_q),
        position=(kv_lens - lens)[row] + base - starts[row],
        key_start=key_starts[row],
        key_end=key_ends[row],
    )
    tiles = Tiles(*[jnp.where(is_tile, field, 0) for field in fields])

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = jnp.searchsorted(
        cu_query_lens[1:], token, side="right", method="compare_all"
    ).astype(jnp.int32)
    tile_of_token = first_tiles[owner] + token // block_q - first_blocks[owner]
    return tiles, tile_of_token * block_q + token % block_q
