"""The extend kernels for Hopper over the arrays that the ops hold."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.extend import ExtendConfig, Problem, Source, attend_packed
from ukv.layout import PartView
from ukv.ops.cached_rows import Buffers
from ukv.ops.online_softmax import Scoring


def rows_by_head(buffers: Buffers, view: PartView) -> Float[Array, "rows heads width"]:
    """Return the whole buffer of a part as its kernel rows, without a copy on GPUs.

    Args:
      buffers: All buffers of the pool.
      view: A part whose entries take one kernel row without padding.
    """
    num_heads, width = view.shape
    words = buffers[view.buffer_index].reshape(view.num_rows, view.row_words)
    elements = jax.lax.bitcast_convert_type(words, view.dtype)
    return elements.reshape(view.num_rows, num_heads, width)


def gqa_packed(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    buffers: Buffers,
    k_view: PartView,
    v_view: PartView,
    table_ids: Int32[Array, "rows max_pages"],
    *,
    cu_query_lens: Int32[Array, " bounds"],
    kv_lens: Int32[Array, " rows"],
    scoring: Scoring,
    sinks: Float[Array, " num_q_heads"] | None = None,
    config: ExtendConfig | None = None,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> tuple[
    Float[Array, "num_tokens num_q_heads value_dim"],
    Float32[Array, "num_tokens num_q_heads"],
]:
    """Attend packed rows to cached K and V.

    Args:
      q: Queries, of the storage dtype.
      buffers: All buffers of the pool.
      k_view: Where K of this layer lies; its heads have 64 or 128 elements.
      v_view: Where V of this layer lies, as wide as K.
      table_ids: Read table.
      cu_query_lens: Exclusive prefix sum of the query lengths.
      kv_lens: Tokens of each row, its query tokens included.
      scoring: Scale, window and soft cap.
      sinks: Logits that join the denominator only.
      config: Tuning of the kernel; None is the default for the width.
      interpret: Simulate the kernel on the CPU, for tests.

    Returns:
      As ``gqa_attention``.
    """
    num_kv_heads, width = k_view.shape
    problem = Problem(
        num_q_heads=q.shape[1],
        num_kv_heads=num_kv_heads,
        keys=(Source(column=0, width=width, head_axis=1),),
        value=Source(column=0, width=v_view.shape[1], head_axis=1),
        page_size=k_view.page_size,
        softmax_scale=scoring.softmax_scale,
        window=scoring.window,
        soft_cap=scoring.soft_cap,
        has_sinks=sinks is not None,
    )
    return attend_packed(
        q,
        (rows_by_head(buffers, k_view), rows_by_head(buffers, v_view)),
        table_ids,
        offsets=jnp.asarray([k_view.block_offset, v_view.block_offset], jnp.int32),
        cu_query_lens=cu_query_lens,
        kv_lens=kv_lens,
        sinks=sinks,
        problem=problem,
        config=config,
        interpret=interpret,
    )
