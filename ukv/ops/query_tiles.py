"""Tiles of query tokens: how a ragged batch becomes equal pieces of work.

A tile is up to ``block_q`` consecutive query tokens of one row of the batch. Rows of
a packed batch are cut from their own first token on, or back from their last, so the
tiles of a row do not depend on its neighbours.

Example: query_lens 5, 0, 1 and block_q 4, packed as tokens 0-4 and 5

    tile            0        1    2        (num_tiles: at most (6 + 3 * 3) // 4 = 3)
    rows            0        0    2
    packed tokens   0 1 2 3  4    5
    from the end    - - - 0  1 2 3 4    - - - 5      (a tile ends with its last query)
"""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Shaped


def steps(start: Int32[Array, " n"], length: int) -> Int32[Array, "n length"]:
    """Return ``start + 0, 1, ...`` for each start."""
    return start[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :]


class QueryTiles(flax.struct.PyTreeNode):
    """Where the queries of each tile stand.

    Attributes:
      rows: int32 ``[tiles]``, row of the batch, which is the row of the read table.
      first_positions: int32 ``[tiles]``, absolute position of the first query;
        negative positions see nothing.
      num_queries: int32 ``[tiles]``, queries of the tile that count; 0 in a tile of
        padding. Cut from the end, those before the row's first token count too:
        nobody asks for them.
    """

    rows: jax.Array
    first_positions: jax.Array
    num_queries: jax.Array

    def positions(self, block_q: int) -> Int32[Array, "tiles block_q"]:
        """Return the absolute position of each query."""
        return steps(self.first_positions, block_q)

    def kv_lens(self, block_q: int) -> Int32[Array, " tiles"]:
        """Return the tokens up to the last query of each tile, cut from the end."""
        end = jnp.maximum(self.first_positions + block_q, 0)
        return jnp.where(self.num_queries > 0, end, 0)

    def counts(self, block_q: int) -> Bool[Array, "tiles block_q"]:
        """Return which queries are not padding."""
        places = jnp.arange(block_q, dtype=jnp.int32)[None, :]
        is_live = places < self.num_queries[:, None]
        return is_live & (self.positions(block_q) >= 0)


class PackedTiles(flax.struct.PyTreeNode):
    """Tiles of a packed batch, and the way there and back.

    Attributes:
      tiles: The tiles.
      tokens: int32 ``[tiles, block_q]``, packed token of each query, clipped.
      places: int32 ``[tokens]``, flat place ``tile * block_q + query`` of each packed
        token, clipped.
      is_token: bool ``[tokens]``, whether a packed token belongs to a row.
    """

    tiles: QueryTiles
    tokens: jax.Array
    places: jax.Array
    is_token: jax.Array

    def pack(
        self, tiled: Shaped[Array, "tiles block_q ..."], *, absent: float
    ) -> Shaped[Array, "tokens ..."]:
        """Return the values of the packed tokens; ``absent`` for padding."""
        found = jnp.take(
            tiled.reshape(-1, *tiled.shape[2:]), self.places, axis=0, mode="clip"
        )
        is_token = self.is_token.reshape(-1, *[1] * (found.ndim - 1))
        return jnp.where(is_token, found, jnp.asarray(absent, found.dtype))


def cut_packed(
    cu_query_lens: Int32[Array, " bounds"],
    kv_lens: Int32[Array, " rows"],
    *,
    num_tokens: int,
    block_q: int,
    from_end: bool = False,
) -> PackedTiles:
    """Cut a packed batch into tiles.

    Args:
      cu_query_lens: Exclusive prefix sum of the query lengths, one more than rows.
      kv_lens: Tokens of each row, its query tokens included.
      num_tokens: Length of the packed axis.
      block_q: Queries of a tile.
      from_end: Whether the last tile of a row is full, and not the first.
    """
    num_rows = kv_lens.shape[0]
    # A row of n > 0 queries has at most (n + block_q - 1) // block_q tiles.
    num_tiles = max((num_tokens + num_rows * (block_q - 1)) // block_q, 1)
    query_lens = cu_query_lens[1:] - cu_query_lens[:-1]
    tiles_of_row = (query_lens + (block_q - 1)) // block_q
    ends = jnp.cumsum(tiles_of_row, dtype=jnp.int32)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    row = jnp.searchsorted(ends, tile, side="right", method="compare_all").astype(
        jnp.int32
    )
    row = jnp.minimum(row, num_rows - 1)
    # Queries that stand in a row's first tile before its first token.
    ahead = jnp.where(from_end, tiles_of_row * block_q - query_lens, 0)
    start = (tile - (ends - tiles_of_row)[row]) * block_q - ahead[row]
    is_live = tile < ends[-1]
    num_queries = jnp.where(is_live, jnp.clip(query_lens[row] - start, 0, block_q), 0)
    first = cu_query_lens[row] + start
    tokens = steps(first, block_q)

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = jnp.searchsorted(
        cu_query_lens[1:], token, side="right", method="compare_all"
    ).astype(jnp.int32)
    is_token = owner < num_rows
    owner = jnp.minimum(owner, num_rows - 1)
    # Tiles of a row follow each other, so its tokens do, in flat places.
    first_place = ((ends - tiles_of_row) * block_q + ahead)[owner]
    places = first_place + token - cu_query_lens[owner]
    return PackedTiles(
        tiles=QueryTiles(
            rows=row,
            first_positions=(kv_lens - query_lens)[row] + start,
            num_queries=num_queries,
        ),
        tokens=jnp.clip(tokens, 0, num_tokens - 1),
        places=jnp.clip(places, 0, num_tiles * block_q - 1),
        is_token=is_token,
    )


def tile_queries(
    q: Shaped[Array, "tokens ..."], packed: PackedTiles
) -> Shaped[Array, "tiles block_q ..."]:
    """Return the packed queries in their tiles; queries of padding hold any other."""
    return jnp.take(q, packed.tokens, axis=0, mode="clip")


def one_tile_per_row(kv_lens: Int32[Array, " rows"], query_len: int) -> QueryTiles:
    """Return the tiles of a dense batch: the last ``query_len`` tokens of each row."""
    num_rows = kv_lens.shape[0]
    return QueryTiles(
        rows=jnp.arange(num_rows, dtype=jnp.int32),
        first_positions=kv_lens - query_len,
        num_queries=jnp.full(num_rows, query_len, jnp.int32),
    )
