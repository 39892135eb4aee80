"""Latent rows of a batch, expanded into keys and values of every head.

The expanded form of MLA attends to keys and values that exist only for the call. They
take ``2 * num_heads * (nope_dim + value_dim)`` bytes for each cached token, so a batch
is expanded in pieces of bounded size: all its cached tokens one row after the other,
each row from a multiple of ``ALIGNMENT`` on, cut every ``piece_len``.

    kv_lens 300, 0, 130; ALIGNMENT 128; piece_len 256

    place         0 ...     256 ...       384 ...      640
    row           0         0             2
    positions     0 - 255   256 - 299     0 - 129
    piece         0         1 (and row 2's first 128)   2
"""

import flax.struct
import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.extend import expand_heads
from ukv.layout import PartView
from ukv.ops.cached_rows import Buffers
from ukv.pool import read_blocks

ALIGNMENT = 128
"""Places that a row starts at a multiple of: the rows of one copy of the kernel."""

WORKSPACE_BYTES = 512 << 20
"""Most bytes of a piece's keys and values."""

MIN_PIECE = 8192
"""Places of a piece at least, so that a step of few tokens takes few pieces."""


class Packing(flax.struct.PyTreeNode):
    """Where the cached tokens of a batch lie in the packed order.

    Attributes:
      starts: int32 ``[rows]``, place of each row's first token.
      kv_lens: int32 ``[rows]``, its tokens.
      num_places: int32 scalar, places of the whole batch.
    """

    starts: jax.Array
    kv_lens: jax.Array
    num_places: jax.Array


class ExpandedPiece(flax.struct.PyTreeNode):
    """Keys and values of the places of one piece.

    Attributes:
      heads: ``[num_heads, piece_len, nope_dim + value_dim]``, a key's part without
        position and then a value.
      latents: ``[piece_len, row_width]``, the cached rows, whose end is the rest of a
        key.
    """

    heads: jax.Array
    latents: jax.Array


def pack_rows(kv_lens: Int32[Array, " rows"]) -> Packing:
    """Give every row its places."""
    aligned = (kv_lens + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
    ends = jnp.cumsum(aligned, dtype=jnp.int32)
    return Packing(starts=ends - aligned, kv_lens=kv_lens, num_places=ends[-1])


def piece_len_for(
    num_tokens: int,
    num_rows: int,
    max_places: int,
    *,
    place_bytes: int,
) -> int:
    """Return the places of a piece, a multiple of ``ALIGNMENT``.

    All latent rows of a piece are gathered, used or not, and take memory. The tokens
    of the step are cached too, so that many places are used in any case; a batch whose
    prefix is as long is one piece.

    Args:
      num_tokens: Packed tokens of the step.
      num_rows: Rows of the batch.
      max_places: Most places that a batch of this shape can have.
      place_bytes: Bytes of the keys and values of one place.
    """
    fits = max(WORKSPACE_BYTES // (place_bytes * ALIGNMENT), 1) * ALIGNMENT
    tokens = -(-num_tokens // ALIGNMENT) * ALIGNMENT + (num_rows - 1) * ALIGNMENT
    return min(max(2 * tokens, MIN_PIECE), fits, max_places)


def expand_piece(
    buffers: Buffers,
    view: PartView,
    table_ids: Int32[Array, "rows max_pages"],
    packing: Packing,
    first_place: Int32[Array, ""],
    weights: Float[Array, "num_heads width latent_dim"],
    *,
    piece_len: int,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> ExpandedPiece:
    """Read and expand the rows of some places; those of no token may hold anything.

    Args:
      buffers: All buffers of the pool.
      view: Where the latent rows of this layer lie.
      table_ids: Read table.
      packing: Places of the rows.
      first_place: First place of the piece.
      weights: Expansion of keys and of values, one below the other.
      piece_len: Places.
      interpret: Simulate the kernel on the CPU, for tests.
    """
    # Pages and the grid of places have this much in common.
    run = min(view.page_size, ALIGNMENT)
    reader = view.with_page_size(run) if run != view.page_size else view
    pieces = view.page_size // run
    places = first_place + jnp.arange(piece_len // run, dtype=jnp.int32) * run
    row = jnp.searchsorted(packing.starts, places, side="right", method="compare_all")
    row = row.astype(jnp.int32) - 1
    position = places - packing.starts[row]
    # Past the end of a row its last page is read again.
    position = jnp.clip(position, 0, jnp.maximum(packing.kv_lens[row] - 1, 0))
    page = table_ids.at[row, position // view.page_size].get(mode="clip")
    block = page * pieces + position % view.page_size // run
    latents = read_blocks(buffers[view.buffer_index], reader, block)
    latents = latents.reshape(piece_len, view.shape[0]).astype(weights.dtype)
    num_places = jnp.clip(packing.num_places - first_place, 0, piece_len)
    heads = expand_heads(latents, weights, num_places, interpret=interpret)
    return ExpandedPiece(heads=heads, latents=latents)


def table_of_piece(
    packing: Packing, first_place: Int32[Array, ""], max_blocks: int
) -> Int32[Array, "rows max_blocks"]:
    """Return where the tokens of each row lie in a piece, in blocks of ``ALIGNMENT``.

    Entries of tokens in other pieces are out of range.
    """
    first = (packing.starts - first_place) // ALIGNMENT
    return first[:, None] + jnp.arange(max_blocks, dtype=jnp.int32)[None, :]


def keys_of_piece(
    packing: Packing, first_place: Int32[Array, ""], piece_len: int
) -> tuple[Int32[Array, " rows"], Int32[Array, " rows"]]:
    """Return the first position of each row that is in a piece, and the end of them."""
    start = jnp.clip(first_place - packing.starts, 0, packing.kv_lens)
    end = jnp.clip(first_place + piece_len - packing.starts, 0, packing.kv_lens)
    return start, end


def merge_pieces(
    first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Merge outputs and log-sum-exps over two sets of keys.

    A token that saw no key of either set keeps zeros and ``-inf``.
    """
    (out_a, lse_a), (out_b, lse_b) = first, second
    lse = jnp.logaddexp(lse_a, lse_b)
    origin = jnp.where(lse == -jnp.inf, 0.0, lse)
    merged = sum(
        jnp.exp(part - origin)[..., None] * out.astype(jnp.float32)
        for out, part in ((out_a, lse_a), (out_b, lse_b))
    )
    return jnp.asarray(merged, jnp.float32).astype(out_a.dtype), lse
