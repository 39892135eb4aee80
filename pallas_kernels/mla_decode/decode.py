"""MLA decode over the pages of a pool, absorbed (Pallas Mosaic GPU, Hopper).

Three steps: a plan that cuts the batch into equal pieces (XLA), the attention of the
pieces, and the merge of rows that were cut.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32, UInt32

from pallas_kernels.mla_decode import narrow, wide
from pallas_kernels.mla_decode.config import (
    LATENT_DIM,
    NARROW_COLUMNS,
    PAGE_SIZES,
    ROW_DIM,
    WIDE_COLUMNS,
    MlaDecodeConfig,
)
from pallas_kernels.mla_decode.merge import merge
from pallas_kernels.mla_decode.pages import piece_size
from pallas_kernels.mla_decode.plan import plan_work
from pallas_kernels.tuning import tuned_config


def mla_decode(
    q: Float[Array, "rows query_len num_heads row_dim"],
    buffer: UInt32[Array, "buffer_rows words"],
    table: Int32[Array, "rows max_pages"],
    kv_lens: Int32[Array, " rows"],
    *,
    page_size: int,
    block_offset: int,
    softmax_scale: float,
    config: MlaDecodeConfig | None = None,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> tuple[
    Float[Array, "rows query_len num_heads latent_dim"],
    Float32[Array, "rows query_len num_heads"],
]:
    """Attend the same few query tokens for each row of a batch.

    A token of the pool is 576 bfloat16 in a row: 512 of them are key and value, the
    last 64 only key. Token i of block b is row ``(b + block_offset) * page_size + i``
    of the buffer seen as rows of 1152 bytes.

    The caller guarantees what would need a device read to check: that the pages of
    the first ``kv_lens`` tokens of each row are in the pool. Other table entries, and
    the bytes behind a row's last token, may be anything.

    Args:
        q: Absorbed queries, bfloat16: latent part, then rope part.
        buffer: The whole pool; it is read in place.
        table: Block ids of the pages of each row.
        kv_lens: Tokens of each row, its query tokens included; 0 for a padded row.
        page_size: Tokens per page: 16, 32, 64 or 128.
        block_offset: The layer's constant, in blocks.
        softmax_scale: Factor of ``q . k``, positive.
        config: Tuning; None takes what was measured for the card, or else what suits
            an H200.
        interpret: Simulate the kernels on the CPU, for tests.

    Returns:
        Outputs, bfloat16, and the natural log-sum-exp. A query that sees no key gets
        zeros and ``-inf``.

    Raises:
        ValueError: Sizes or dtypes that the kernels do not have.
    """
    num_rows, query_len, num_heads, row_dim = q.shape
    if q.dtype != jnp.bfloat16 or row_dim != ROW_DIM:
        raise ValueError(f"q must be bfloat16[..., {ROW_DIM}], not {q.dtype}{q.shape}")
    if page_size not in PAGE_SIZES:
        raise ValueError(f"{page_size=} must be one of {PAGE_SIZES}")
    if buffer.size % (page_size * ROW_DIM // 2):
        raise ValueError(f"{buffer.shape=} must hold whole blocks of {page_size=}")
    if softmax_scale <= 0.0:
        raise ValueError(f"{softmax_scale=} must be positive")
    if q.size == 0:
        return q[..., :LATENT_DIM], jnp.zeros(q.shape[:3], jnp.float32)
    if config is None:
        key = {
            "heads": num_heads,
            "head_dim": row_dim,
            "query": query_len,
            "page_size": page_size,
            "dtype": q.dtype.name,
        }
        tuned = tuned_config("mla_decode", "mosaic_gpu", key=key, batch=num_rows)
        config = MlaDecodeConfig(**(tuned or {}))
    return _mla_decode(
        q,
        buffer,
        table,
        kv_lens,
        # An array, so that all layers share one program.
        jnp.full((1,), block_offset, jnp.int32),
        page_size=page_size,
        softmax_scale=softmax_scale,
        config=config,
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret,
    )


@functools.partial(
    jax.jit, static_argnames=("page_size", "softmax_scale", "config", "interpret")
)
def _mla_decode(
    q,
    buffer,
    table,
    kv_lens,
    block_offset,
    *,
    page_size,
    softmax_scale,
    config,
    interpret,
):
    num_rows, query_len, num_heads, _ = q.shape
    used = query_len * num_heads
    columns = q.reshape(num_rows, used, ROW_DIM)
    if used <= NARROW_COLUMNS:
        kernel, groups, width = narrow, 1, NARROW_COLUMNS
    else:
        groups = -(-used // WIDE_COLUMNS)
        groups += groups % 2 if groups > 1 else 0  # two are a cluster
        kernel, width = wide, WIDE_COLUMNS
    padding = groups * width - used
    if padding:
        columns = jnp.pad(columns, ((0, 0), (0, padding), (0, 0)))
    num_ctas = max(1, config.num_ctas // groups)
    plan = plan_work(kv_lens, num_ctas=num_ctas, min_tiles=config.min_tiles)
    pool = lax.bitcast_convert_type(buffer.reshape(-1, ROW_DIM // 2), jnp.bfloat16)
    out, lse, part_out, part_lse = kernel.attend(
        columns,
        pool.reshape(-1, piece_size(page_size), ROW_DIM),
        table,
        plan,
        block_offset,
        query_len=query_len,
        num_heads=num_heads,
        page_size=page_size,
        softmax_scale=softmax_scale,
        num_ctas=num_ctas,
        interpret=interpret,
    )
    out, lse = merge(
        out,
        lse,
        part_out,
        part_lse,
        plan,
        num_parts=-(-num_ctas // num_rows) + 1,
        num_ctas=config.num_ctas,
        interpret=interpret,
    )
    return (
        out[:, :used].reshape(num_rows, query_len, num_heads, LATENT_DIM),
        lse[:, :used].reshape(num_rows, query_len, num_heads),
    )
