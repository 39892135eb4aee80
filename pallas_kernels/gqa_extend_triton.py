"""GQA and MHA of packed rows: prefill, chunked prefill, mixed batches (Triton).

A *tile* is some consecutive query tokens of one row, all query heads of one K/V head:
the rows of one product. One program attends a tile to all keys that it sees, those of
the step's own tokens included, which are in the pool by then. Tiles are cut from each
row's own first token; tokens behind the last row are one more row, without keys.

    rows     0 0 0 0 0 | 1 1 | padding      5 and 2 tokens, 2 of padding, tiles of 4
    tiles    0 0 0 0 1 | 2 2 | 3 3

Importing this module imports Triton.

Source: Dao, FlashAttention-2 (arXiv:2307.08691).
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Float32, Int32, UInt32

from pallas_kernels.card import has_large_shared_memory
from pallas_kernels.paged_rows import PagedPart, next_power_of_2
from pallas_kernels.paged_triton import (
    KvParts,
    Scoring,
    cap,
    entry_pointers,
    finish,
    layer_blocks,
    pages_of,
)
from pallas_kernels.triton_launch import launch


@dataclasses.dataclass(frozen=True, kw_only=True)
class GqaExtendTritonConfig:
    """Tuning of the extend kernel.

    Attributes:
        block_m: query rows of a tile, tokens times query heads of a K/V head.
        block_kv: keys of a block.
        num_warps: warps of a program.
        num_stages: blocks of keys in flight.
    """

    block_m: int = 128
    block_kv: int = 64
    num_warps: int = 8
    num_stages: int = 3

    def __post_init__(self):
        """Checks the ranges."""
        for name in ("block_m", "block_kv"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two from 16 up")


# Triton compiles the source: a checking wrapper would hide the module's names from it.
@triton.jit
@typing.no_type_check
def _attend_blocks(
    acc,
    m,
    z,
    q,
    k_ptr,
    v_ptr,
    table_ptr,
    k_block,
    v_block,
    position,
    first_seen,
    start,
    stop,
    limit,
    SCORING: tl.constexpr,
    KV: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Visits the blocks from start to stop; keys from first_seen to limit are read."""
    d = tl.arange(0, KV.block_d)
    e = tl.arange(0, KV.block_e)
    step = tl.arange(0, BLOCK_KV)
    # Blocks lie on a grid from position 0: a page of whole blocks has one address.
    PAGE_SIZE: tl.constexpr = KV.page_size
    ONE_PAGE: tl.constexpr = PAGE_SIZE % BLOCK_KV == 0
    # Block ids are read one block ahead: the copies of K and V wait for no address.
    ahead = pages_of(table_ptr, start, step, limit, PAGE_SIZE, ONE_PAGE)
    for at in range(start, stop, BLOCK_KV):
        key = at + step
        pages = ahead
        ahead = pages_of(table_ptr, at + BLOCK_KV, step, limit, PAGE_SIZE, ONE_PAGE)
        k_rows = entry_pointers(
            k_ptr, pages, k_block, at, step, PAGE_SIZE, KV.k_row, KV.k_entry, ONE_PAGE
        )
        v_rows = entry_pointers(
            v_ptr, pages, v_block, at, step, PAGE_SIZE, KV.v_row, KV.v_entry, ONE_PAGE
        )
        k_ptrs = k_rows[:, None] + d[None, :]
        v_ptrs = v_rows[:, None] + e[None, :]
        # A product with zero keeps NaN, so keys that nobody sees are not read.
        if IS_MASKED:
            is_key = (key < limit)[:, None]
            is_key &= (key >= first_seen)[:, None]
            k = tl.load(k_ptrs, mask=is_key & (d < KV.key_dim)[None, :], other=0.0)
        elif KV.block_d == KV.key_dim:
            k = tl.load(k_ptrs)
        else:
            k = tl.load(k_ptrs, mask=(d < KV.key_dim)[None, :], other=0.0)
        s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        if SCORING.soft_cap > 0.0:
            s = cap(s, SCORING.scale, SCORING.soft_cap)
            FACTOR: tl.constexpr = 1.0
        else:
            FACTOR: tl.constexpr = SCORING.scale * 1.4426950408889634
        if IS_MASKED:
            is_seen = key[None, :] <= position[:, None]
            if SCORING.window > 0:
                is_seen &= key[None, :] > position[:, None] - SCORING.window
            s = tl.where(is_seen, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1) * FACTOR)
        origin = m_new
        if IS_MASKED:
            # A query that has seen nothing yet has m = -inf; exp2(-inf - 0) is zero.
            origin = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.exp2(s * FACTOR - origin[:, None])
        rescale = tl.exp2(m - origin)
        z = z * rescale + tl.sum(p, axis=1)
        acc = acc * rescale[:, None]
        m = m_new
        if IS_MASKED:
            v = tl.load(v_ptrs, mask=is_key & (e < KV.value_dim)[None, :], other=0.0)
        elif KV.block_e == KV.value_dim:
            v = tl.load(v_ptrs)
        else:
            v = tl.load(v_ptrs, mask=(e < KV.value_dim)[None, :], other=0.0)
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
    return acc, m, z


@triton.jit
@typing.no_type_check
def _extend_kernel(
    q_ptr,
    k_pool_ptr,
    v_pool_ptr,
    table_ptr,
    bounds_ptr,
    kv_lens_ptr,
    sinks_ptr,
    blocks_ptr,
    out_ptr,
    lse_ptr,
    HAS_SINKS: tl.constexpr,
    SCORING: tl.constexpr,
    KV: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_TILES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    head = tl.program_id(0) % NUM_KV_HEADS
    # The last tiles of a row see most keys: they come first.
    tile = NUM_TILES - 1 - tl.program_id(0) // NUM_KV_HEADS
    rows = tl.arange(0, BLOCK_ROWS)
    first_tokens = tl.load(bounds_ptr + rows, mask=rows <= NUM_ROWS, other=NUM_TOKENS)
    last_tokens = tl.load(bounds_ptr + rows + 1, mask=rows < NUM_ROWS, other=NUM_TOKENS)
    counts = tl.cdiv(last_tokens - first_tokens, BLOCK_Q)
    ends = tl.cumsum(counts, 0)
    if tile >= tl.sum(counts, 0):
        return
    row = tl.sum((ends <= tile).to(tl.int32), 0)
    is_row = rows == row
    first_token = tl.sum(tl.where(is_row, first_tokens, 0), 0)
    query_len = tl.sum(tl.where(is_row, last_tokens, 0), 0) - first_token
    kv_len = tl.load(kv_lens_ptr + row, mask=row < NUM_ROWS, other=0)
    offset = (tile - tl.sum(tl.where(rows < row, counts, 0), 0)) * BLOCK_Q

    place = tl.arange(0, BLOCK_M)
    query = offset + place // GROUP
    is_query = (place < BLOCK_Q * GROUP) & (query < query_len)
    position = kv_len - query_len + query
    first_position = kv_len - query_len + offset
    stop = tl.minimum(first_position + BLOCK_Q, kv_len)
    d = tl.arange(0, KV.block_d)
    # A shape is made of constants that stand alone.
    BLOCK_E: tl.constexpr = KV.block_e
    e = tl.arange(0, BLOCK_E)
    q_row = (first_token + query) * NUM_KV_HEADS + head
    q_row = q_row * GROUP + place % GROUP
    q = tl.load(
        q_ptr + q_row.to(tl.int64)[:, None] * KV.key_dim + d[None, :],
        mask=is_query[:, None] & (d < KV.key_dim)[None, :],
        other=0.0,
    )
    k_ptr = k_pool_ptr.to(tl.pointer_type(tl.dtype(KV.k_dtype))) + head * KV.key_dim
    v_ptr = v_pool_ptr.to(tl.pointer_type(tl.dtype(KV.v_dtype))) + head * KV.value_dim
    table_ptr += row * MAX_PAGES
    k_block = tl.load(blocks_ptr)
    v_block = tl.load(blocks_ptr + 1)

    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    z = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    if SCORING.window > 0:
        first_seen = tl.maximum(first_position - (SCORING.window - 1), 0)
        start = first_seen // BLOCK_KV * BLOCK_KV
    else:
        first_seen = 0
        # Every query of the tile sees all keys of these blocks.
        start = tl.maximum(first_position + 1, 0) // BLOCK_KV * BLOCK_KV
        acc, m, z = _attend_blocks(
            acc, m, z, q, k_ptr, v_ptr, table_ptr, k_block, v_block, position,
            0, 0, start, start, SCORING, KV, BLOCK_KV, PRECISION, False,
        )  # fmt: skip
    acc, m, z = _attend_blocks(
        acc, m, z, q, k_ptr, v_ptr, table_ptr, k_block, v_block, position,
        first_seen, start, stop, stop, SCORING, KV, BLOCK_KV, PRECISION, True,
    )  # fmt: skip
    sink = 0.0
    if HAS_SINKS:
        q_head = q_row % (NUM_KV_HEADS * GROUP)
        sink = tl.load(sinks_ptr + q_head, mask=is_query, other=0.0).to(tl.float32)
        sink = sink * 1.4426950408889634
    out, lse = finish(acc, m, z, sink, HAS_SINKS)
    tl.store(
        out_ptr + q_row.to(tl.int64)[:, None] * KV.value_dim + e[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_query[:, None] & (e < KV.value_dim)[None, :],
    )
    tl.store(lse_ptr + q_row, lse * 0.6931471805599453, mask=is_query)


def gqa_extend(
    q: Float[Array, "num_tokens num_q_heads key_dim"],
    k_pool: UInt32[Array, "_ _"],
    v_pool: UInt32[Array, "_ _"],
    table: Int32[Array, "rows max_pages"],
    cu_query_lens: Int32[Array, " bounds"],
    kv_lens: Int32[Array, " rows"],
    *,
    k: PagedPart,
    v: PagedPart,
    softmax_scale: float,
    window: int | None = None,
    sinks: Float[Array, " num_q_heads"] | None = None,
    soft_cap: float | None = None,
    config: GqaExtendTritonConfig | None = None,
) -> tuple[
    Float[Array, "num_tokens num_q_heads value_dim"],
    Float32[Array, "num_tokens num_q_heads"],
]:
    """Attends packed rows of any query length to their cached tokens.

    Args:
        q: queries, the rows of the batch one after the other.
        k_pool: buffer with K.
        v_pool: buffer with V, the same one in a unified pool.
        table: kernel block ids of each row's pages.
        cu_query_lens: exclusive prefix sum of the query lengths; tokens at or past its
            last entry are padding.
        kv_lens: tokens of each row, its query tokens included; 0 for a padded row.
        k: where K lies.
        v: where V lies.
        softmax_scale: factor of `q . k`.
        window: tokens a query sees, its own included; None sees all.
        sinks: logits that join the denominator only.
        soft_cap: `c` in `c * tanh(s / c)`, applied to scaled scores.
        config: tuning; the default suits a Hopper card.

    Returns:
        Outputs of the type of `q`, and the natural log-sum-exp; zeros and `-inf` for a
        token of padding and for a query that sees no key.
    """
    num_tokens, num_q_heads, _ = q.shape
    num_rows, max_pages = table.shape
    group = num_q_heads // k.num_heads
    parts = KvParts.of(k, v)
    if config is None:
        widest = max(parts.block_d, parts.block_e)
        config = default_config(widest, window, q.dtype)
    if softmax_scale < 0:
        # The kernel takes the maximum before it scales.
        q, softmax_scale = -q, -softmax_scale
    block_m = max(config.block_m, next_power_of_2(group))
    block_q = block_m // group
    # Every row, and the padding behind them, may end inside a tile.
    num_tiles = (num_tokens + (num_rows + 1) * (block_q - 1)) // block_q
    out, lse = launch(
        _extend_kernel,
        q,
        k_pool,
        v_pool,
        table,
        cu_query_lens,
        kv_lens,
        kv_lens if sinks is None else sinks,
        layer_blocks(k, v),
        outputs=[
            jax.ShapeDtypeStruct((num_tokens, num_q_heads, v.width), q.dtype),
            jax.ShapeDtypeStruct((num_tokens, num_q_heads), jnp.float32),
        ],
        grid=(num_tiles * k.num_heads,),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        HAS_SINKS=sinks is not None,
        NUM_TOKENS=num_tokens,
        NUM_ROWS=num_rows,
        NUM_TILES=num_tiles,
        NUM_KV_HEADS=k.num_heads,
        GROUP=group,
        MAX_PAGES=max_pages,
        BLOCK_M=block_m,
        BLOCK_KV=config.block_kv,
        BLOCK_ROWS=next_power_of_2(num_rows + 1),
        PRECISION="tf32x3",
        SCORING=Scoring.of(softmax_scale, window=window, soft_cap=soft_cap),
        KV=parts,
    )
    return out, lse


def default_config(
    widest: int,
    window: int | None,
    dtype: typing.Any,
    *,
    capability: str | None = None,
) -> GqaExtendTritonConfig:
    """Returns a tile that fits the registers and the shared memory of a card.

    Args:
        widest: columns of the wider of the tiles of K and V.
        window: tokens a query sees, or None.
        dtype: of the queries.
        capability: compute capability such as "9.0"; None means the first device's.
    """
    is_large = has_large_shared_memory(capability)
    if jnp.dtype(dtype).itemsize == 4:
        if widest <= 128:
            return GqaExtendTritonConfig(
                block_m=32, block_kv=32, num_warps=4, num_stages=2
            )
        return GqaExtendTritonConfig(
            block_m=32 if is_large else 16, block_kv=16, num_warps=4, num_stages=2
        )
    if widest > 128:
        return GqaExtendTritonConfig(
            block_m=128 if is_large else 64,
            block_kv=32,
            num_stages=3 if is_large else 2,
        )
    if window is not None and window < 512:
        # The larger the tile, the more of its blocks are cut by a window's ends.
        return GqaExtendTritonConfig(block_m=64, block_kv=32, num_warps=4)
    return GqaExtendTritonConfig()
