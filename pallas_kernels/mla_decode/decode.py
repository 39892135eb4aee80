"""MLA decode over the pages of a pool, absorbed (Pallas Mosaic GPU, Hopper).

A plan cuts the batch into equal pieces (XLA, shared by the layers of a step); one
kernel attends the pieces and merges the rows that were cut.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32, UInt32

from pallas_kernels.card import num_multiprocessors
from pallas_kernels.mla_decode import narrow, wide
from pallas_kernels.mla_decode.bfloat16_rows import Bfloat16Rows
from pallas_kernels.mla_decode.config import (
    NARROW_COLUMNS,
    PAGE_SIZES,
    ROPE_DIM,
    WIDE_COLUMNS,
    Call,
    MlaDecodeConfig,
)
from pallas_kernels.mla_decode.float8_rows import Float8Rows
from pallas_kernels.mla_decode.merge import merge_apart
from pallas_kernels.mla_decode.pages import piece_size
from pallas_kernels.mla_decode.plan import plan_work
from pallas_kernels.mla_decode.work import Sources
from pallas_kernels.tuning import tuned_config

ROWS = {
    np.dtype(jnp.bfloat16): Bfloat16Rows,
    np.dtype(jnp.float8_e4m3fn): Float8Rows,
}


def mla_decode(
    q: Float[Array, "rows query_len num_heads row_dim"],
    buffer: UInt32[Array, "buffer_rows words"],
    table: Int32[Array, "rows max_pages"],
    kv_lens: Int32[Array, " rows"],
    *,
    latent_dim: int,
    page_size: int,
    block_offset: int,
    softmax_scale: float,
    dtype: np.dtype,
    config: MlaDecodeConfig | None = None,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> tuple[
    Float[Array, "rows query_len num_heads latent_dim"],
    Float32[Array, "rows query_len num_heads"],
]:
    """Attend the same few query tokens for each row of a batch.

    A token of the pool is a row of elements: most of them are key and value, the last
    64 only key. Token i of block b is row ``(b + block_offset) * page_size + i``
    of the buffer seen as such rows.

    Keys of float8_e4m3fn become float16, which is exact, and so do the queries, which
    is exact but for numbers above 65504 or below 2**-14 in magnitude: a score is off
    by at most ``2**-25 * softmax_scale`` times the sum of the magnitudes of a row. A
    weight is the sum of two float8_e4m3fn, within ``2**-9`` of itself or ``2**-16`` of
    the largest weight of its 64 tokens (bfloat16: within ``2**-8`` of itself). Tensor
    cores add such products with about 14 bits; such a sum goes over 64 tokens and is
    added to others in float32. So for given rows the output is about as good as that
    from bfloat16; what it cost to write the rows as e4m3, up to ``2**-4`` of an
    element, is not undone.

    The caller guarantees what would need a device read to check: that the pages of
    the first ``kv_lens`` tokens of each row are in the pool. Other table entries, and
    the bytes behind a row's last token, may be anything.

    Args:
        q: Absorbed queries, bfloat16: latent part, then rope part.
        buffer: The whole pool; it is read in place.
        table: Block ids of the pages of each row.
        kv_lens: Tokens of each row, its query tokens included; 0 for a padded row.
        latent_dim: Elements of a row that are also the value: 128, 256, 384 or 512 in
            bfloat16, 256 or 512 in float8_e4m3fn.
        page_size: Tokens per page: 16, 32, 64 or 128.
        block_offset: The layer's constant, in blocks.
        softmax_scale: Factor of ``q . k``, positive.
        dtype: Of the rows: bfloat16 or float8_e4m3fn.
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
    if dtype not in ROWS:
        raise ValueError(f"rows must be {' or '.join(map(str, ROWS))}, not {dtype}")
    if latent_dim not in ROWS[dtype].CUTS:
        allowed = ", ".join(map(str, ROWS[dtype].CUTS))
        raise ValueError(f"{latent_dim=} of {dtype} must be one of {allowed}")
    if q.dtype != jnp.bfloat16 or row_dim != latent_dim + ROPE_DIM:
        raise ValueError(
            f"q must be bfloat16[..., {latent_dim + ROPE_DIM}], not {q.dtype}{q.shape}"
        )
    if page_size not in PAGE_SIZES:
        raise ValueError(f"{page_size=} must be one of {PAGE_SIZES}")
    if buffer.size % (page_size * row_dim * dtype.itemsize // 4):
        raise ValueError(f"{buffer.shape=} must hold whole blocks of {page_size=}")
    if softmax_scale <= 0.0:
        raise ValueError(f"{softmax_scale=} must be positive")
    if q.size == 0:
        return q[..., :latent_dim], jnp.zeros(q.shape[:3], jnp.float32)
    if config is None:
        key = {
            "heads": num_heads,
            "head_dim": row_dim,
            "query": query_len,
            "page_size": page_size,
            "dtype": dtype.name,
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
        latent_dim=latent_dim,
        page_size=page_size,
        softmax_scale=softmax_scale,
        dtype=dtype,
        config=config,
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret,
    )


@functools.partial(
    jax.jit,
    static_argnames=(
        "latent_dim",
        "page_size",
        "softmax_scale",
        "dtype",
        "config",
        "interpret",
    ),
)
def _mla_decode(
    q,
    buffer,
    table,
    kv_lens,
    block_offset,
    *,
    latent_dim,
    page_size,
    softmax_scale,
    dtype,
    config,
    interpret,
):
    num_rows, query_len, num_heads, row_dim = q.shape
    used = query_len * num_heads
    columns = q.reshape(num_rows, used, row_dim)
    rows = ROWS[dtype](latent_dim=latent_dim)
    is_wide = used > NARROW_COLUMNS and isinstance(rows, Bfloat16Rows)
    width = WIDE_COLUMNS if is_wide else NARROW_COLUMNS
    groups = -(-used // width)
    if is_wide and groups > 1:
        groups += groups % 2  # two are a cluster
    padding = groups * width - used
    if padding:
        columns = jnp.pad(columns, ((0, 0), (0, padding), (0, 0)))
    call = Call(
        latent_dim=latent_dim,
        num_rows=num_rows,
        query_len=query_len,
        num_heads=num_heads,
        num_groups=groups,
        group_columns=width,
        page_size=page_size,
        softmax_scale=softmax_scale,
        # They wait for each other's parts, so it is best if all are there at once.
        num_ctas=max(1, min(config.num_ctas, num_multiprocessors()) // groups),
        interpret=interpret,
    )
    plan = plan_work(
        table,
        kv_lens,
        page_size=page_size,
        num_ctas=call.num_ctas,
        min_tiles=config.min_tiles,
    )
    words = row_dim * dtype.itemsize // 4
    pool = lax.bitcast_convert_type(buffer.reshape(-1, words), rows.storage_dtype)
    pool = pool.reshape(-1, piece_size(page_size), rows.row_width)
    sources = Sources(plan=plan, table=table, block_offset=block_offset)
    if is_wide:
        results = wide.attend(columns, pool, sources, call)
    else:
        q = rows.prepare_queries(columns)
        results = narrow.attend(q, pool, sources, call, rows)
    out, lse = merge_apart(results, plan, call) if interpret else results[:2]
    if out.dtype != jnp.bfloat16:  # words of two
        out = lax.bitcast_convert_type(out, jnp.bfloat16)
        out = out.reshape(*out.shape[:2], latent_dim)
    return (
        out[:, :used].reshape(num_rows, query_len, num_heads, latent_dim),
        lse[:, :used].reshape(num_rows, query_len, num_heads),
    )
