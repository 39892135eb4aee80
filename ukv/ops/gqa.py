"""Softmax attention over cached K and V (MHA, GQA), with an optional window.

A query token ``j`` of a row stands at position ``kv_len - query_len + j`` and sees
the positions up to its own, or the last ``window`` of them. The K and V of the step's
tokens are in the pool before the call. Pages behind the window may have been
released: their table entries, like those past a row's live pages, may hold anything.
"""

import jax
from jaxtyping import Array, Float, Float32, Int32

from ukv.ids import KernelBlocks
from ukv.implementation import Implementation, OpCase, resolve
from ukv.layout import PartView
from ukv.ops.cached_rows import Buffers, blocks_of_pages, read_keys, table_of
from ukv.ops.gqa_kernels import decode_rows, extend_rows
from ukv.ops.online_softmax import (
    BlockShape,
    ReadBlock,
    Scoring,
    attend_tiles,
    pages_per_block,
    select_seen,
)
from ukv.ops.query_tiles import cut_packed, one_tile_per_row, tile_queries

# Query tokens of a tile of a packed batch.
BLOCK_Q = 64


def gqa_attention(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    buffers: Buffers,
    k_view: PartView,
    v_view: PartView,
    table: KernelBlocks,
    *,
    cu_query_lens: Int32[Array, " bounds"],
    kv_lens: Int32[Array, " rows"],
    max_query_len: int,
    softmax_scale: float,
    window: int | None = None,
    sinks: Float[Array, " num_q_heads"] | None = None,
    soft_cap: float | None = None,
    implementation: Implementation | None = None,
) -> tuple[
    Float[Array, "num_tokens num_q_heads value_dim"],
    Float32[Array, "num_tokens num_q_heads"],
]:
    """Attend packed rows of any query length: extend, chunked prefill, mixed.

    Args:
      q: Queries, the rows of the batch one after the other.
      buffers: All buffers of the pool.
      k_view: Where K of this layer lies.
      v_view: Where V of this layer lies.
      table: Read table, one row for each row of the batch.
      cu_query_lens: Exclusive prefix sum of the query lengths, one more entry than
        rows. Tokens at or past its last entry are padding.
      kv_lens: Tokens of each row, its query tokens included; 0 for a padded row.
      max_query_len: Bound of the query lengths. It sizes the work, never the result.
      softmax_scale: Factor of ``q . k``.
      window: Tokens a query sees, its own included; None sees all.
      sinks: Logits that join the denominator only, neither scaled nor capped.
      soft_cap: ``c`` in ``c * tanh(s / c)``, applied to scaled scores.
      implementation: None for the default device's best.

    Returns:
      Outputs of the dtype of ``q``, and the natural log-sum-exp, sinks included. A
      token of padding, or of a row without keys, gets zeros and ``-inf``.

    Raises:
      IdSpaceError: ``table`` is no read table of the views' sub-pool.
      ValueError: Sizes contradict each other.
      UnsupportedError: ``implementation`` cannot do this.

    Source: Ainslie et al., GQA (arXiv:2305.13245). Sinks and window bounds:
    openai/gpt-oss, gpt_oss/torch/model.py. Soft cap: Gemma 2 (arXiv:2408.00118).
    """
    case = _case(q, k_view, v_view, window)
    chosen = resolve("gqa_attention", implementation, case)
    _require_heads(q, k_view, v_view, sinks)
    table_ids = table_of(
        table,
        (k_view, v_view),
        buffers,
        q=q,
        kv_lens=kv_lens,
        cu_query_lens=cu_query_lens,
    )
    scoring = Scoring(softmax_scale=softmax_scale, window=window, soft_cap=soft_cap)
    if chosen != "xla":
        return extend_rows(
            chosen,
            q,
            buffers,
            k_view,
            v_view,
            table_ids,
            cu_query_lens=cu_query_lens,
            kv_lens=kv_lens,
            scoring=scoring,
            sinks=sinks,
            has_decode_kernel=resolve("gqa_decode", None, case) == "triton",
        )
    shape, read_block = _reader(q, buffers, k_view, v_view, table_ids)
    block_q = max(1, min(max_query_len, BLOCK_Q))
    packed = cut_packed(cu_query_lens, kv_lens, num_tokens=q.shape[0], block_q=block_q)
    out, lse = attend_tiles(
        tile_queries(q, packed),
        packed.tiles,
        read_block,
        scoring,
        shape,
        sinks=sinks,
    )
    return packed.pack(out, absent=0.0), packed.pack(lse, absent=-float("inf"))


def gqa_decode(
    q: Float[Array, "rows query_len num_q_heads head_dim"],
    buffers: Buffers,
    k_view: PartView,
    v_view: PartView,
    table: KernelBlocks,
    *,
    kv_lens: Int32[Array, " rows"],
    softmax_scale: float,
    window: int | None = None,
    sinks: Float[Array, " num_q_heads"] | None = None,
    soft_cap: float | None = None,
    implementation: Implementation | None = None,
) -> tuple[
    Float[Array, "rows query_len num_q_heads value_dim"],
    Float32[Array, "rows query_len num_q_heads"],
]:
    """Attend a decode batch: the same few query tokens for each row.

    Args:
      q: Queries, the last ``query_len`` tokens of each row.
      buffers: All buffers of the pool.
      k_view: Where K of this layer lies.
      v_view: Where V of this layer lies.
      table: Read table, one row for each row of the batch.
      kv_lens: Tokens of each row, its query tokens included; 0 for a padded row.
      softmax_scale: Factor of ``q . k``.
      window: Tokens a query sees, its own included; None sees all.
      sinks: Logits that join the denominator only, neither scaled nor capped.
      soft_cap: ``c`` in ``c * tanh(s / c)``, applied to scaled scores.
      implementation: None for the default device's best.

    Returns:
      As ``gqa_attention``.

    Raises:
      IdSpaceError: ``table`` is no read table of the views' sub-pool.
      ValueError: Sizes contradict each other.
      UnsupportedError: ``implementation`` cannot do this.

    Source: as ``gqa_attention``.
    """
    chosen = resolve("gqa_decode", implementation, _case(q, k_view, v_view, window))
    _require_heads(q, k_view, v_view, sinks)
    table_ids = table_of(table, (k_view, v_view), buffers, q=q, kv_lens=kv_lens)
    scoring = Scoring(softmax_scale=softmax_scale, window=window, soft_cap=soft_cap)
    if chosen == "triton":
        return decode_rows(
            q,
            buffers,
            k_view,
            v_view,
            table_ids,
            kv_lens=kv_lens,
            scoring=scoring,
            sinks=sinks,
        )
    shape, read_block = _reader(q, buffers, k_view, v_view, table_ids)
    return attend_tiles(
        q,
        one_tile_per_row(kv_lens, q.shape[1]),
        read_block,
        scoring,
        shape,
        sinks=sinks,
    )


def _case(
    q: jax.Array, k_view: PartView, v_view: PartView, window: int | None
) -> OpCase:
    return OpCase(
        page_size=k_view.page_size,
        storage_dtype=k_view.dtype.name,
        compute_dtype=q.dtype.name,
        widths=(k_view.shape[-1], v_view.shape[-1]),
        has_window=window is not None,
    )


def _require_heads(
    q: jax.Array, k_view: PartView, v_view: PartView, sinks: jax.Array | None
) -> None:
    """Check the heads of the queries, of K, of V and of the sinks."""
    if (len(k_view.shape), len(v_view.shape)) != (2, 2):
        raise ValueError(
            f"k_view and v_view have entries {k_view.shape} and {v_view.shape}: K and "
            "V have [num_kv_heads, head_dim]"
        )
    num_kv_heads, key_dim = k_view.shape
    if v_view.shape[0] != num_kv_heads or q.shape[-2] % num_kv_heads:
        raise ValueError(
            f"{q.shape[-2]} query heads must be a multiple of the {num_kv_heads} heads "
            f"of K and the {v_view.shape[0]} of V, which must be equal"
        )
    if q.shape[-1] != key_dim:
        raise ValueError(f"q has heads of {q.shape[-1]}, K has heads of {key_dim}")
    if sinks is not None and sinks.shape != q.shape[-2:-1]:
        raise ValueError(
            f"sinks has shape {sinks.shape}, must have one for each of the "
            f"{q.shape[-2]} query heads"
        )


def _reader(
    q: jax.Array,
    buffers: Buffers,
    k_view: PartView,
    v_view: PartView,
    table_ids: jax.Array,
) -> tuple[BlockShape, ReadBlock]:
    """Return how blocks of K and V are read."""
    num_pages = pages_per_block(k_view.page_size, table_ids.shape[1])

    def read_block(
        rows: jax.Array, block: jax.Array, is_seen: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        blocks = blocks_of_pages(table_ids, rows, block, num_pages)
        k = read_keys(buffers, k_view, blocks).astype(q.dtype)
        v = read_keys(buffers, v_view, blocks).astype(q.dtype)
        return k, select_seen(v, is_seen)

    shape = BlockShape(
        block_kv=num_pages * k_view.page_size,
        num_kv_heads=k_view.shape[0],
        value_width=v_view.shape[1],
    )
    return shape, read_block
