"""Where the tokens of a tile lie, and how they get into shared memory.

The pool is seen as pieces ``[num_pieces, piece, row_dim]``, a piece being a page or,
for pages of more than 64 tokens, 64 tokens of one. A tile of 64 tokens is one piece, or
2 or 4 pieces of small pages.

Example: page size 128, block offset 5. Tile 3 of a row is the second half of its page
1; with block id 40 in the table it is piece (40 + 5) * 2 + 1 = 91.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.mla_decode.plan import TILE


def piece_size(page_size: int) -> int:
    """Tokens of a piece."""
    return min(page_size, TILE)


def pieces_per_tile(page_size: int) -> int:
    """Pieces of a tile: the copies that fill one part of it."""
    return TILE // piece_size(page_size)


def tile_pieces(table_ref, part, tile, *, page_size: int, block_offset):
    """Return the pieces of a tile of the row of ``part``.

    Pages past the row's end are replaced by its last: the table holds anything there.

    Args:
      table_ref: Block ids, ``[rows, max_pages]``.
      part: What is attended; gives row and length.
      tile: Tile of the row; one past the end gives pieces of the last page.
      page_size: Tokens per page.
      block_offset: The layer's constant, in blocks.
    """
    last_page = lax.div(part.kv_len - 1, page_size)
    if page_size < TILE:
        first = tile * pieces_per_tile(page_size)
        pages = (first + k for k in range(pieces_per_tile(page_size)))
        return tuple(
            table_ref[part.row, jnp.minimum(page, last_page)] + block_offset
            for page in pages
        )
    halves = page_size // TILE
    page = jnp.minimum(lax.div(tile, halves), last_page)
    block = table_ref[part.row, page] + block_offset
    return (block * halves + lax.rem(tile, halves),)
