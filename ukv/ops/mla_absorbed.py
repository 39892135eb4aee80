"""The kernels of absorbed MLA over the arrays that the ops hold.

The queries have been multiplied with the key expansion, so that a cached row is key and
value of all heads.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import mla_decode as mosaic_mla
from ukv.layout import PartView
from ukv.ops.cached_rows import Buffers
from ukv.ops.gpu_kernels import paged_part, triton_kernels
from ukv.ops.query_tiles import cut_packed, tile_queries

Kernel = Literal["mosaic_gpu", "triton"]

TILE_COLUMNS = 128
"""Query tokens of a tile times heads: two CTAs of the Mosaic GPU kernel share pages."""


def mla_rows(
    kernel: Kernel,
    q: Float[Array, "rows query_len num_heads row_width"],
    buffers: Buffers,
    view: PartView,
    table_ids: Int32[Array, "rows max_pages"],
    *,
    kv_lens: Int32[Array, " rows"],
    latent_dim: int,
    softmax_scale: float,
) -> tuple[
    Float[Array, "rows query_len num_heads latent_dim"],
    Float32[Array, "rows query_len num_heads"],
]:
    """Attend the last query tokens of each row to its latent rows.

    Args:
      kernel: Who.
      q: Absorbed queries.
      buffers: All buffers of the pool.
      view: Where the latent rows of this layer lie.
      table_ids: Read table.
      kv_lens: Tokens of each row, its query tokens included.
      latent_dim: Elements of a row that are also the value.
      softmax_scale: Factor of ``q . k``.

    Returns:
      As ``mla_decode``.
    """
    operands = q, buffers[view.buffer_index], table_ids, kv_lens
    if kernel == "mosaic_gpu":
        return mosaic_mla.mla_decode(
            *operands,
            latent_dim=latent_dim,
            page_size=view.page_size,
            block_offset=view.block_offset,
            softmax_scale=softmax_scale,
            dtype=view.dtype,
        )
    return triton_kernels("mla_decode_triton").mla_decode(
        *operands,
        part=paged_part(view),
        latent_dim=latent_dim,
        softmax_scale=softmax_scale,
    )


def mla_tiles(
    kernel: Kernel,
    q: Float[Array, "num_tokens num_heads row_width"],
    buffers: Buffers,
    view: PartView,
    table_ids: Int32[Array, "rows max_pages"],
    *,
    cu_query_lens: Int32[Array, " bounds"],
    kv_lens: Int32[Array, " rows"],
    max_query_len: int,
    latent_dim: int,
    softmax_scale: float,
) -> tuple[
    Float[Array, "num_tokens num_heads latent_dim"],
    Float32[Array, "num_tokens num_heads"],
]:
    """Attend packed rows to their latent rows: each few query tokens as one decode row.

    A row is cut back from its last token, so every piece ends where a decode row does.

    Args:
      kernel: Who.
      q: Absorbed queries, the rows of the batch one after the other.
      buffers: All buffers of the pool.
      view: Where the latent rows of this layer lie.
      table_ids: Read table.
      cu_query_lens: Exclusive prefix sum of the query lengths.
      kv_lens: Tokens of each row, its query tokens included.
      max_query_len: Bound of the query lengths.
      latent_dim: Elements of a row that are also the value.
      softmax_scale: Factor of ``q . k``.

    Returns:
      As ``mla_extend_absorbed``.
    """
    block_q = max(1, min(TILE_COLUMNS // q.shape[1], max_query_len))
    packed = cut_packed(
        cu_query_lens, kv_lens, num_tokens=q.shape[0], block_q=block_q, from_end=True
    )
    out, lse = mla_rows(
        kernel,
        tile_queries(q, packed),
        buffers,
        view,
        jnp.take(table_ids, packed.tiles.rows, axis=0, mode="clip"),
        kv_lens=packed.tiles.kv_lens(block_q),
        latent_dim=latent_dim,
        softmax_scale=softmax_scale,
    )
    return packed.pack(out, absent=0.0), packed.pack(lse, absent=-float("inf"))
