"""Multi-head latent attention over cached latent rows.

A row of the pool is ``latent_dim`` elements of compressed K and V, then ``rope_dim``
of the key that all heads share. It is read in two ways:

    absorbed   q . W_kc is taken before, so a row is key and value of all heads at
               once; the caller multiplies the result with W_vc
    expanded   every row becomes one K and one V head per query head, which costs less
               for each query token once a row has many

Positions, tables and padding are as in ``ukv.ops.gqa``. The rope parts come rotated,
if the model rotates them at all.

Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1 and appendix C.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from ukv.ids import KernelBlocks
from ukv.implementation import Implementation, OpCase, resolve
from ukv.layout import PartView
from ukv.ops.cached_rows import Buffers, blocks_of_pages, read_keys, table_of
from ukv.ops.mla_absorbed import mla_rows, mla_tiles
from ukv.ops.mla_kernels import extend_heads
from ukv.ops.online_softmax import (
    BlockShape,
    ReadBlock,
    Scoring,
    attend_tiles,
    multiply,
    pages_per_block,
    select_seen,
)
from ukv.ops.query_tiles import cut_packed, one_tile_per_row, tile_queries

# Query tokens of a tile of a packed batch. Every tile expands the rows that it sees,
# so the tiles of the expanded form are longer.
BLOCK_Q_ABSORBED = 64
BLOCK_Q_EXPANDED = 256


def mla_decode(
    q: Float[Array, "rows query_len num_heads row_width"],
    buffers: Buffers,
    view: PartView,
    table: KernelBlocks,
    *,
    kv_lens: Int32[Array, " rows"],
    latent_dim: int,
    softmax_scale: float,
    implementation: Implementation | None = None,
) -> tuple[
    Float[Array, "rows query_len num_heads latent_dim"],
    Float32[Array, "rows query_len num_heads"],
]:
    """Attend a decode batch, absorbed: the same few query tokens for each row.

    Args:
      q: Absorbed queries, ``q_nope . W_kc`` and then the rope part.
      buffers: All buffers of the pool.
      view: Where the latent rows of this layer lie.
      table: Read table, one row for each row of the batch.
      kv_lens: Tokens of each row, its query tokens included; 0 for a padded row.
      latent_dim: Elements of a row that are also the value.
      softmax_scale: Factor of ``q . k``, ``1 / sqrt(nope_dim + rope_dim)`` as a rule.
      implementation: None for the default device's best.

    Returns:
      Outputs of the dtype of ``q``, before ``W_vc``, and the natural log-sum-exp. A
      query that sees no key gets zeros and ``-inf``.

    Raises:
      IdSpaceError: ``table`` is no read table of the view's sub-pool.
      ValueError: Sizes contradict each other.
      UnsupportedError: ``implementation`` cannot do this.
    """
    chosen = resolve("mla_decode", implementation, _case(q, view, latent_dim))
    _require_widths(q, view, latent_dim)
    table_ids = table_of(table, (view,), buffers, q=q, kv_lens=kv_lens)
    if chosen != "xla":
        return mla_rows(
            chosen,
            q,
            buffers,
            view,
            table_ids,
            kv_lens=kv_lens,
            latent_dim=latent_dim,
            softmax_scale=softmax_scale,
        )
    shape, read_block = _absorbed_reader(q, buffers, view, table_ids, latent_dim)
    return attend_tiles(
        q,
        one_tile_per_row(kv_lens, q.shape[1]),
        read_block,
        Scoring(softmax_scale=softmax_scale),
        shape,
    )


def mla_extend_absorbed(
    q: Float[Array, "num_tokens num_heads row_width"],
    buffers: Buffers,
    view: PartView,
    table: KernelBlocks,
    *,
    cu_query_lens: Int32[Array, " bounds"],
    kv_lens: Int32[Array, " rows"],
    max_query_len: int,
    latent_dim: int,
    softmax_scale: float,
    implementation: Implementation | None = None,
) -> tuple[
    Float[Array, "num_tokens num_heads latent_dim"],
    Float32[Array, "num_tokens num_heads"],
]:
    """Attend packed rows of any query length, absorbed.

    Args:
      q: Absorbed queries, the rows of the batch one after the other.
      buffers: All buffers of the pool.
      view: Where the latent rows of this layer lie.
      table: Read table, one row for each row of the batch.
      cu_query_lens: Exclusive prefix sum of the query lengths, one more entry than
        rows. Tokens at or past its last entry are padding.
      kv_lens: Tokens of each row, its query tokens included; 0 for a padded row.
      max_query_len: Bound of the query lengths. It sizes the work, never the result.
      latent_dim: Elements of a row that are also the value.
      softmax_scale: Factor of ``q . k``.
      implementation: None for the default device's best.

    Returns:
      As ``mla_decode``.

    Raises:
      IdSpaceError: ``table`` is no read table of the view's sub-pool.
      ValueError: Sizes contradict each other.
      UnsupportedError: ``implementation`` cannot do this.
    """
    case = _case(q, view, latent_dim)
    chosen = resolve("mla_extend_absorbed", implementation, case)
    _require_widths(q, view, latent_dim)
    table_ids = table_of(
        table, (view,), buffers, q=q, kv_lens=kv_lens, cu_query_lens=cu_query_lens
    )
    if chosen != "xla":
        return mla_tiles(
            chosen,
            q,
            buffers,
            view,
            table_ids,
            cu_query_lens=cu_query_lens,
            kv_lens=kv_lens,
            max_query_len=max_query_len,
            latent_dim=latent_dim,
            softmax_scale=softmax_scale,
        )
    shape, read_block = _absorbed_reader(q, buffers, view, table_ids, latent_dim)
    packed = cut_packed(
        cu_query_lens,
        kv_lens,
        num_tokens=q.shape[0],
        block_q=max(1, min(max_query_len, BLOCK_Q_ABSORBED)),
    )
    out, lse = attend_tiles(
        tile_queries(q, packed),
        packed.tiles,
        read_block,
        Scoring(softmax_scale=softmax_scale),
        shape,
    )
    return packed.pack(out, absent=0.0), packed.pack(lse, absent=-float("inf"))


def mla_extend(
    q: Float[Array, "num_tokens num_heads key_dim"],
    w_kc: Float[Array, "num_heads nope_dim latent_dim"],
    w_vc: Float[Array, "num_heads value_dim latent_dim"],
    buffers: Buffers,
    view: PartView,
    table: KernelBlocks,
    *,
    cu_query_lens: Int32[Array, " bounds"],
    kv_lens: Int32[Array, " rows"],
    max_query_len: int,
    softmax_scale: float,
    implementation: Implementation | None = None,
) -> tuple[
    Float[Array, "num_tokens num_heads value_dim"],
    Float32[Array, "num_tokens num_heads"],
]:
    """Attend packed rows of any query length, expanded or absorbed, whichever is less.

    Cached rows and those of the step's tokens are read from the pool alike. The XLA
    implementation expands one block of rows at a time.

    Args:
      q: Queries, the part without position and then the rope part.
      w_kc: Key expansion.
      w_vc: Value expansion.
      buffers: All buffers of the pool.
      view: Where the latent rows of this layer lie.
      table: Read table, one row for each row of the batch.
      cu_query_lens: Exclusive prefix sum of the query lengths, one more entry than
        rows. Tokens at or past its last entry are padding.
      kv_lens: Tokens of each row, its query tokens included; 0 for a padded row.
      max_query_len: Bound of the query lengths. It sizes the work, never the result.
      softmax_scale: Factor of ``q . k``, ``1 / sqrt(nope_dim + rope_dim)`` as a rule.
      implementation: None for the default device's best.

    Returns:
      Outputs of the dtype of ``q``, and the natural log-sum-exp. A query that sees no
      key gets zeros and ``-inf``.

    Raises:
      IdSpaceError: ``table`` is no read table of the view's sub-pool.
      ValueError: Sizes contradict each other.
      UnsupportedError: ``implementation`` cannot do this.
    """
    latent_dim = w_kc.shape[2]
    case = _case(q, view, latent_dim)
    widths = (*case.widths, w_kc.shape[1], w_vc.shape[1])
    case = dataclasses.replace(case, widths=widths)
    chosen = resolve("mla_extend", implementation, case)
    _require_parts(q, w_kc, w_vc, view)
    table_ids = table_of(
        table, (view,), buffers, q=q, kv_lens=kv_lens, cu_query_lens=cu_query_lens
    )
    if chosen != "xla":
        return extend_heads(
            chosen,
            q,
            w_kc,
            w_vc,
            buffers,
            view,
            table_ids,
            cu_query_lens=cu_query_lens,
            kv_lens=kv_lens,
            max_query_len=max_query_len,
            softmax_scale=softmax_scale,
        )
    shape, read_block = _expanded_reader(q, w_kc, w_vc, buffers, view, table_ids)
    packed = cut_packed(
        cu_query_lens,
        kv_lens,
        num_tokens=q.shape[0],
        block_q=max(1, min(max_query_len, BLOCK_Q_EXPANDED)),
    )
    out, lse = attend_tiles(
        tile_queries(q, packed),
        packed.tiles,
        read_block,
        Scoring(softmax_scale=softmax_scale),
        shape,
    )
    return packed.pack(out, absent=0.0), packed.pack(lse, absent=-float("inf"))


def _case(q: jax.Array, view: PartView, latent_dim: int) -> OpCase:
    return OpCase(
        page_size=view.page_size,
        storage_dtype=view.dtype.name,
        compute_dtype=q.dtype.name,
        widths=(view.num_elements, latent_dim),
    )


def _row_width(view: PartView) -> int:
    """Return the elements of a latent row."""
    if len(view.shape) != 1:
        raise ValueError(
            f"{view.sub_pool}.{view.part} has entries {view.shape}: a latent row has "
            "one axis"
        )
    return view.num_elements


def _require_parts(
    q: jax.Array, w_kc: jax.Array, w_vc: jax.Array, view: PartView
) -> None:
    """Check the heads of a model against its expansions and the cached rows."""
    num_heads, nope_dim, latent_dim = w_kc.shape
    row_width = _row_width(view)
    rope_dim = row_width - latent_dim
    if rope_dim < 0 or q.shape[-1] != nope_dim + rope_dim:
        raise ValueError(
            f"rows of {view.sub_pool!r} have {row_width} elements, {latent_dim} of "
            f"them latent in w_kc: q has {q.shape[-1]}, the parts {nope_dim} without "
            f"position and {rope_dim} with it"
        )
    if q.shape[-2] != num_heads or (w_vc.shape[0], w_vc.shape[2]) != (
        num_heads,
        latent_dim,
    ):
        raise ValueError(
            f"q has {q.shape[-2]} heads, w_kc {w_kc.shape} and w_vc {w_vc.shape}: both "
            "are [num_heads, width, latent_dim] with the same heads and latents"
        )


def _require_widths(q: jax.Array, view: PartView, latent_dim: int) -> None:
    row_width = _row_width(view)
    if q.shape[-1] != row_width or not 0 < latent_dim <= row_width:
        raise ValueError(
            f"rows of {view.sub_pool!r} have {row_width} elements: q has "
            f"{q.shape[-1]}, and {latent_dim=} must be positive and no more"
        )


def _absorbed_reader(
    q: jax.Array,
    buffers: Buffers,
    view: PartView,
    table_ids: jax.Array,
    latent_dim: int,
) -> tuple[BlockShape, ReadBlock]:
    """Return how blocks of rows are read as keys and values."""
    num_pages = pages_per_block(view.page_size, table_ids.shape[1])

    def read_block(
        rows: jax.Array, block: jax.Array, is_seen: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        blocks = blocks_of_pages(table_ids, rows, block, num_pages)
        cached = read_keys(buffers, view, blocks).astype(q.dtype)
        cached = select_seen(cached, is_seen)[:, :, None, :]
        return cached, cached[..., :latent_dim]

    shape = BlockShape(
        block_kv=num_pages * view.page_size, num_kv_heads=1, value_width=latent_dim
    )
    return shape, read_block


def _expanded_reader(
    q: jax.Array,
    w_kc: jax.Array,
    w_vc: jax.Array,
    buffers: Buffers,
    view: PartView,
    table_ids: jax.Array,
) -> tuple[BlockShape, ReadBlock]:
    """Return how blocks of rows are expanded per head."""
    num_heads, _, latent_dim = w_kc.shape
    rope_dim = view.num_elements - latent_dim
    num_pages = pages_per_block(view.page_size, table_ids.shape[1])
    w_kc, w_vc = w_kc.astype(q.dtype), w_vc.astype(q.dtype)

    def read_block(
        rows: jax.Array, block: jax.Array, is_seen: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        blocks = blocks_of_pages(table_ids, rows, block, num_pages)
        cached = read_keys(buffers, view, blocks).astype(q.dtype)
        cached = select_seen(cached, is_seen)
        latent, rope = cached[..., :latent_dim], cached[..., latent_dim:]
        # [tiles, keys, latent] x [heads, width, latent] -> [tiles, keys, heads, width]
        expand = (((2,), (2,)), ((), ()))
        k_nope = multiply(latent, w_kc, expand).astype(q.dtype)
        v = multiply(latent, w_vc, expand).astype(q.dtype)
        k_rope = jnp.broadcast_to(rope[:, :, None, :], (*k_nope.shape[:3], rope_dim))
        return jnp.concatenate([k_nope, k_rope], axis=-1), v

    shape = BlockShape(
        block_kv=num_pages * view.page_size,
        num_kv_heads=num_heads,
        value_width=w_vc.shape[1],
    )
    return shape, read_block
