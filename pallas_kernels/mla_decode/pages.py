"""Where the tokens of a tile lie, and how they get into shared memory.

The pool is seen as pieces ``[num_pieces, piece, row_dim]``, a piece being a page or,
for pages of more than 64 tokens, 64 tokens of one. A tile of 64 tokens is one piece, or
2 or 4 pieces of small pages.

Example: page size 128, block offset 5. Tile 3 of a row is the second half of its page
1; with block id 40 in the table it is piece (40 + 5) * 2 + 1 = 91.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.mla_decode.config import TILE


def piece_size(page_size: int) -> int:
    """Tokens of a piece."""
    return min(page_size, TILE)


def pieces_per_tile(page_size: int) -> int:
    """Pieces of a tile: the copies that fill one part of it."""
    return TILE // piece_size(page_size)


def pages_per_tile(page_size: int) -> int:
    """Pages that a tile has tokens of."""
    return max(1, TILE // page_size)


def tile_blocks(table_ref, row, kv_len, tile, *, page_size: int):
    """Return the blocks of the pages of a tile of a row.

    Pages past the row's end are replaced by its last: the table holds anything there.

    Args:
      table_ref: Block ids, ``[rows, max_pages]``, a ref or an array.
      row: Row or rows of the batch.
      kv_len: Their tokens.
      tile: Their tile; one past the end gives blocks of the last page.
      page_size: Tokens per page.
    """
    last_page = lax.div(kv_len - 1, page_size)
    first = lax.div(tile * TILE, page_size)
    return tuple(
        table_ref[row, jnp.minimum(first + k, last_page)]
        for k in range(pages_per_tile(page_size))
    )


def tile_pieces(blocks, tile, *, page_size: int, block_offset):
    """Return the pieces of a tile.

    Args:
      blocks: Blocks of its pages.
      tile: Tile of the row.
      page_size: Tokens per page.
      block_offset: The layer's constant, in blocks.
    """
    halves = max(1, page_size // TILE)
    return tuple(
        (block + block_offset) * halves + lax.rem(tile, halves) for block in blocks
    )
