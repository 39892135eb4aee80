"""Which CTA does which tiles, for which heads.

A piece is a tile for the heads of a CTA. All pieces, from the longest to the shortest,
are dealt out like cards, forth and back: with 3 CTAs and lengths 9 9 8 8 7 7 2 2 1

    CTA 0   9   7   2   (18)
    CTA 1   9   7   2   (18)
    CTA 2   8   8   1   (17)

A CTA then does its pieces head after head. As the pieces of one length are those of
all heads, every CTA has about the same heads, and at any time all of them read the
keys and values of a few, which stay in the L2 cache.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels.extend.tiles import Tiles

# Fields of a piece: those of its tile, the tile's number and its group of heads.
ROW, BASE, FIRST, END, POSITION, KEY_START, KEY_END, TILE, HEADS = range(9)


def costs(tiles: Tiles, *, block_kv: int, window: int | None) -> jax.Array:
    """Return the cost of each tile, in blocks of keys; 0 for one that does not exist.

    Starting and ending a tile takes about as long as a block does.
    """
    end = jnp.minimum(tiles.position + tiles.end, tiles.key_end)
    first = tiles.key_start
    if window is not None:
        first = jnp.maximum(first, tiles.position + tiles.first - (window - 1))
    last = jnp.maximum(end - 1, 0)
    blocks = jnp.maximum(last // block_kv - first // block_kv + 1, 1)
    return jnp.where(tiles.first < tiles.end, blocks + 1, 0)


def _ranks(keys: Int32[Array, "*batch n"]) -> Int32[Array, "*batch n"]:
    """Return where each key goes when they are sorted, equal ones in their order.

    The keys are few: comparing all pairs is one small kernel, a sort is many.
    """
    mine, other = keys[..., :, None], keys[..., None, :]
    shape = (*keys.shape, keys.shape[-1])
    my_place, other_place = (
        jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 2 + i) for i in (0, 1)
    )
    is_before = (other < mine) | ((other == mine) & (other_place < my_place))
    return is_before.sum(axis=-1, dtype=jnp.int32)


def deal(
    tiles: Tiles, cost: Int32[Array, " tiles"], *, num_groups: int, num_ctas: int
) -> tuple[Int32[Array, "ctas rounds fields"], Int32[Array, " ctas"]]:
    """Deal the pieces out.

    Args:
      tiles: All tiles, those that do not exist included.
      cost: What each of them costs; 0 if it does not exist.
      num_groups: Groups of heads, each of which makes a piece of every tile.
      num_ctas: CTAs.

    Returns:
      The pieces of each CTA in their order, and how many it has.
    """
    num_tiles = cost.shape[0]
    rounds = -(-num_tiles * num_groups // num_ctas)
    by_cost = (
        jnp.zeros(num_tiles, jnp.int32)
        .at[_ranks(-cost)]
        .set(jnp.arange(num_tiles, dtype=jnp.int32), unique_indices=True)
    )
    turn = jnp.arange(rounds, dtype=jnp.int32)[None, :]
    cta = jnp.arange(num_ctas, dtype=jnp.int32)[:, None]
    place = turn * num_ctas + jnp.where(turn % 2 == 0, cta, num_ctas - 1 - cta)
    tile = by_cost[jnp.minimum(place // num_groups, num_tiles - 1)]
    group = place % num_groups
    is_piece = (place < num_tiles * num_groups) & (cost[tile] > 0)
    order = _ranks(jnp.where(is_piece, group, num_groups))
    fields = [*[field[tile] for field in tiles], tile, group]
    pieces = jnp.stack(fields, axis=-1)
    pieces = jnp.zeros_like(pieces).at[cta, order].set(pieces, unique_indices=True)
    return pieces, is_piece.sum(axis=1, dtype=jnp.int32)
