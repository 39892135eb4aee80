"""The kernels of GQA over the arrays that the ops hold."""

import dataclasses
from typing import Literal

from jaxtyping import Array, Float, Float32, Int32

from ukv.layout import PartView
from ukv.ops.cached_rows import Buffers
from ukv.ops.decode_rows import find_decode_rows
from ukv.ops.extend_kernels import gqa_packed
from ukv.ops.gpu_kernels import paged_part, triton_kernels
from ukv.ops.online_softmax import Scoring


def decode_rows(
    q: Float[Array, "rows query_len num_q_heads head_dim"],
    buffers: Buffers,
    k_view: PartView,
    v_view: PartView,
    table_ids: Int32[Array, "rows max_pages"],
    *,
    kv_lens: Int32[Array, " rows"],
    scoring: Scoring,
    sinks: Float[Array, " num_q_heads"] | None,
) -> tuple[
    Float[Array, "rows query_len num_q_heads value_dim"],
    Float32[Array, "rows query_len num_q_heads"],
]:
    """Attend the last query tokens of each row, on Triton.

    Args:
      q: Queries.
      buffers: All buffers of the pool.
      k_view: Where K of this layer lies.
      v_view: Where V of this layer lies.
      table_ids: Read table.
      kv_lens: Tokens of each row, its query tokens included.
      scoring: Scale, window and soft cap.
      sinks: Logits that join the denominator only.

    Returns:
      As ``gqa_decode``.
    """
    return triton_kernels("gqa_decode_triton").gqa_decode(
        q,
        buffers[k_view.buffer_index],
        buffers[v_view.buffer_index],
        table_ids,
        kv_lens,
        k=paged_part(k_view),
        v=paged_part(v_view),
        sinks=sinks,
        **dataclasses.asdict(scoring),
    )


def extend_rows(
    kernel: Literal["mosaic_gpu", "triton"],
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    buffers: Buffers,
    k_view: PartView,
    v_view: PartView,
    table_ids: Int32[Array, "rows max_pages"],
    *,
    cu_query_lens: Int32[Array, " bounds"],
    kv_lens: Int32[Array, " rows"],
    scoring: Scoring,
    sinks: Float[Array, " num_q_heads"] | None,
    has_decode_kernel: bool,
) -> tuple[
    Float[Array, "num_tokens num_q_heads value_dim"],
    Float32[Array, "num_tokens num_q_heads"],
]:
    """Attend packed rows; those of one query token as a decode does, if it can.

    Args:
      kernel: Who attends rows of more query tokens.
      q: Queries, the rows of the batch one after the other.
      buffers: All buffers of the pool.
      k_view: Where K of this layer lies.
      v_view: Where V of this layer lies.
      table_ids: Read table.
      cu_query_lens: Exclusive prefix sum of the query lengths.
      kv_lens: Tokens of each row, its query tokens included.
      scoring: Scale, window and soft cap.
      sinks: Logits that join the denominator only.
      has_decode_kernel: Whether the decode kernel covers these rows.

    Returns:
      As ``gqa_attention``.
    """
    decode = find_decode_rows(cu_query_lens, kv_lens, num_tokens=q.shape[0])
    # A batch of one row is a prompt.
    is_mixed = has_decode_kernel and kv_lens.shape[0] > 1
    extend_lens = decode.other_lens if is_mixed else kv_lens
    if kernel == "mosaic_gpu":
        out, lse = gqa_packed(
            q,
            buffers,
            k_view,
            v_view,
            table_ids,
            cu_query_lens=cu_query_lens,
            kv_lens=extend_lens,
            is_absent=decode.is_decode if is_mixed else None,
            scoring=scoring,
            sinks=sinks,
        )
    else:
        out, lse = triton_kernels("gqa_extend_triton").gqa_extend(
            q,
            buffers[k_view.buffer_index],
            buffers[v_view.buffer_index],
            table_ids,
            cu_query_lens,
            extend_lens,
            k=paged_part(k_view),
            v=paged_part(v_view),
            sinks=sinks,
            **dataclasses.asdict(scoring),
        )
    if not is_mixed:
        return out, lse
    decode_out, decode_lse = decode_rows(
        decode.take(q),
        buffers,
        k_view,
        v_view,
        table_ids,
        kv_lens=decode.kv_lens,
        scoring=scoring,
        sinks=sinks,
    )
    return decode.put(out, decode_out), decode.put(lse, decode_lse)
