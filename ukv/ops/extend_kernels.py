"""The extend kernels for Hopper over the arrays that the ops hold."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.extend import ExtendConfig, Problem, Source, attend_packed
from ukv.layout import PartView
from ukv.ops.cached_rows import Buffers
from ukv.ops.expanded_rows import (
    ALIGNMENT,
    expand_piece,
    keys_of_piece,
    merge_pieces,
    pack_rows,
    piece_len_for,
    table_of_piece,
)
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
    is_absent: Bool[Array, " rows"] | None = None,
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
      is_absent: Rows that somebody else attends; they have no tokens here.
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
        is_absent=is_absent,
        sinks=sinks,
        problem=problem,
        config=config,
        interpret=interpret,
    )


def mla_packed(
    q: Float[Array, "num_tokens num_heads key_dim"],
    w_kc: Float[Array, "num_heads nope_dim latent_dim"],
    w_vc: Float[Array, "num_heads value_dim latent_dim"],
    buffers: Buffers,
    view: PartView,
    table_ids: Int32[Array, "rows max_pages"],
    *,
    cu_query_lens: Int32[Array, " bounds"],
    kv_lens: Int32[Array, " rows"],
    is_absent: Bool[Array, " rows"] | None = None,
    softmax_scale: float,
    config: ExtendConfig | None = None,
    piece_len: int | None = None,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> tuple[
    Float[Array, "num_tokens num_heads value_dim"],
    Float32[Array, "num_tokens num_heads"],
]:
    """Attend packed rows to latent rows, expanded.

    The cached rows are expanded once for all query tokens, a piece at a time if they
    are many, and the results of the pieces are merged by their log-sum-exps.

    Args:
      q: Queries, the part without position and then the rope part.
      w_kc: Key expansion; keys without position are as wide as values.
      w_vc: Value expansion.
      buffers: All buffers of the pool.
      view: Where the latent rows of this layer lie.
      table_ids: Read table.
      cu_query_lens: Exclusive prefix sum of the query lengths.
      kv_lens: Tokens of each row, its query tokens included.
      is_absent: Rows that somebody else attends; they have no tokens here.
      softmax_scale: Factor of ``q . k``.
      config: Tuning of the kernel; None is the default.
      piece_len: Cached tokens of a piece, a multiple of 128; None is as many as fit
        the workspace.
      interpret: Simulate the kernel on the CPU, for tests.

    Returns:
      As ``mla_extend``.
    """
    num_heads, nope_dim, latent_dim = w_kc.shape
    weights = jnp.concatenate([w_kc, w_vc], axis=1).astype(q.dtype)
    num_rows, max_pages = table_ids.shape
    row_places = -(-max_pages * view.page_size // ALIGNMENT) * ALIGNMENT
    max_places = num_rows * row_places
    if piece_len is None:
        piece_len = piece_len_for(
            q.shape[0],
            num_rows,
            max_places,
            place_bytes=num_heads * weights.shape[1] * q.dtype.itemsize,
        )
    problem = Problem(
        num_q_heads=num_heads,
        num_kv_heads=num_heads,
        keys=(
            Source(column=0, width=nope_dim, head_axis=0),
            Source(column=latent_dim, width=q.shape[2] - nope_dim, head_axis=None),
        ),
        value=Source(column=nope_dim, width=w_vc.shape[1], head_axis=0),
        page_size=ALIGNMENT,
        softmax_scale=softmax_scale,
        window=None,
        soft_cap=None,
        has_sinks=False,
    )
    packing = pack_rows(kv_lens)

    def attend(number: jax.Array) -> tuple[jax.Array, jax.Array]:
        first_place = number * piece_len
        piece = expand_piece(
            buffers,
            view,
            table_ids,
            packing,
            first_place,
            weights,
            piece_len=piece_len,
            interpret=interpret,
        )
        return attend_packed(
            q,
            (piece.heads, piece.latents, piece.heads),
            table_of_piece(packing, first_place, row_places // ALIGNMENT),
            offsets=jnp.zeros(3, jnp.int32),
            cu_query_lens=cu_query_lens,
            kv_lens=kv_lens,
            is_absent=is_absent,
            key_ranges=keys_of_piece(packing, first_place, piece_len),
            problem=problem,
            config=config,
            interpret=interpret,
        )

    first = attend(jnp.int32(0))
    if max_places <= piece_len:
        return first
    num_pieces = (packing.num_places + (piece_len - 1)) // piece_len
    return jax.lax.fori_loop(
        1, num_pieces, lambda i, found: merge_pieces(found, attend(i)), first
    )
