"""GQA and MHA decode over cached rows, read from the pool in place (Triton).

The work is cut twice. The query tokens of a row that share a K/V head are the rows of
one product, a *tile*. The keys that a row sees are cut into *chunks* of equal length,
each attended by one program with an online softmax; a second kernel merges the chunks
in their order. How a row is cut follows from its own length and from static sizes, so
its bits depend neither on where its pages lie nor on its neighbours. When no row can
have more than one chunk, as in a short window, one kernel does all.

Work items, heads fastest, so that the heads of the same tokens are read together:

    item    0      1      2      3      4      5      6 ...
    row     0      0      0      0      1      1      1      (row 0 has 2 chunks)
    chunk   0      0      1      1      0      0      1
    head    0      1      0      1      0      1      0      (2 K/V heads, 1 tile)

A fixed number of programs goes through the items of the rows as long as they are.

Importing this module imports Triton.

Source: Dao et al., Flash-Decoding (2023); Milakov and Gimelshein (arXiv:1805.02867).
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Float32, Int32, UInt32

from pallas_kernels.paged_rows import PagedPart, next_power_of_2
from pallas_kernels.paged_triton import addresses, finish
from pallas_kernels.triton_launch import launch

# Memory that the partial results of chunks may take, for all rows together.
_PARTIAL_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class GqaDecodeTritonConfig:
    """Tuning of the decode kernel.

    Attributes:
        tile_bytes: bytes of K and V that a program reads at a time; it sets the keys
            of a block, a power of two between 16 and 128.
        num_warps: warps of a program.
        num_stages: blocks of keys in flight.
        num_programs: programs that share the work; 4 per multiprocessor here.
        rounds: items per program when all rows are equally long.
        least_chunk: a chunk has as many keys, unless the row ends.
        most_chunk: rows are cut into chunks of no more, up to `max_chunks`.
        max_chunks: pieces of a row, however long.
    """

    tile_bytes: int = 16384
    num_warps: int = 4
    num_stages: int = 3
    num_programs: int = 528
    rounds: int = 4
    least_chunk: int = 128
    most_chunk: int = 1024
    max_chunks: int = 32

    def __post_init__(self):
        """Checks the ranges."""
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name}={getattr(self, field.name)} is below 1")
        for name in ("tile_bytes", "least_chunk"):
            value = getattr(self, name)
            if value & (value - 1) or value < 128:
                raise ValueError(f"{name}={value} must be a power of two from 128 up")


# Triton compiles the source: a checking wrapper would hide the module's names from it.
@triton.jit
@typing.no_type_check
def _first_seen(kv_lens, QUERY_LEN: tl.constexpr, WINDOW: tl.constexpr):
    if WINDOW > 0:
        first = tl.maximum(kv_lens - (QUERY_LEN - 1) - WINDOW, 0)
    else:
        first = kv_lens * 0
    return first


@triton.jit
@typing.no_type_check
def _chunk_len(
    num_seen,
    BLOCK_KV: tl.constexpr,
    EVEN_CHUNKS: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    LEAST_CHUNK: tl.constexpr,
    MOST_CHUNK: tl.constexpr,
):
    most = tl.maximum(tl.cdiv(num_seen, MAX_CHUNKS), MOST_CHUNK)
    length = tl.minimum(tl.cdiv(num_seen, EVEN_CHUNKS), most)
    length = tl.maximum(length, LEAST_CHUNK)
    return tl.cdiv(length, BLOCK_KV) * BLOCK_KV


@triton.jit
@typing.no_type_check
def _attend(
    q_ptr,
    k_pool_ptr,
    v_pool_ptr,
    table_ptr,
    k_block,
    v_block,
    row,
    head,
    tile,
    start,
    stop,
    kv_len,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    K_DTYPE: tl.constexpr,
    V_DTYPE: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    K_ENTRY: tl.constexpr,
    V_ENTRY: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attends one tile to the keys from start to stop: sums, maximum, denominator."""
    k_ptr = k_pool_ptr.to(tl.pointer_type(tl.dtype(K_DTYPE)))
    v_ptr = v_pool_ptr.to(tl.pointer_type(tl.dtype(V_DTYPE)))
    place = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = place // GROUP
    is_query = place < QUERY_LEN * GROUP
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    q_row = (row * QUERY_LEN + query) * NUM_KV_HEADS + head
    q_row = q_row * GROUP + place % GROUP
    q = tl.load(
        q_ptr + q_row[:, None] * KEY_DIM + d[None, :],
        mask=is_query[:, None] & (d < KEY_DIM)[None, :],
        other=0.0,
    )
    last_seen = kv_len - QUERY_LEN + query
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    z = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    # Block ids are read one block ahead: the copies of K and V wait for no address.
    key = start + tl.arange(0, BLOCK_KV)
    table_ptr += row * MAX_PAGES
    next_page = tl.load(table_ptr + key // PAGE_SIZE, mask=key < stop, other=0)
    for at in range(start, stop, BLOCK_KV):
        key = at + tl.arange(0, BLOCK_KV)
        # A key that no query sees is not read: its page may be another's by now.
        is_key = key < stop
        page = next_page.to(tl.int64)
        ahead = key + BLOCK_KV
        next_page = tl.load(table_ptr + ahead // PAGE_SIZE, mask=ahead < stop, other=0)
        in_page = key % PAGE_SIZE
        k_row = (page + k_block) * (PAGE_SIZE * K_ROW) + in_page * K_ENTRY
        k = tl.load(
            k_ptr + (k_row + head * KEY_DIM)[:, None] + d[None, :],
            mask=is_key[:, None] & (d < KEY_DIM)[None, :],
            other=0.0,
        ).to(q.dtype)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SOFT_CAP > 0.0:
            # c * tanh(s / c), in base 2 afterwards: tanh(x) = 1 - 2 / (exp(2x) + 1)
            x = tl.exp2(s * (2.0 * SCALE / SOFT_CAP * 1.4426950408889634))
            s = (SOFT_CAP * 1.4426950408889634) * (1.0 - 2.0 / (x + 1.0))
        else:
            s = s * (SCALE * 1.4426950408889634)
        if QUERY_LEN > 1:
            is_seen = is_key[None, :] & (key[None, :] <= last_seen[:, None])
            if WINDOW > 0:
                is_seen &= key[None, :] > last_seen[:, None] - WINDOW
        else:
            is_seen = is_key[None, :]
        s = tl.where(is_seen, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        # A query that has seen nothing yet has m = -inf; exp2(-inf - 0) is zero.
        origin = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.exp2(s - origin[:, None])
        rescale = tl.exp2(m - origin)
        z = z * rescale + tl.sum(p, axis=1)
        acc = acc * rescale[:, None]
        m = m_new
        v_row = (page + v_block) * (PAGE_SIZE * V_ROW) + in_page * V_ENTRY
        v = tl.load(
            v_ptr + (v_row + head * VALUE_DIM)[:, None] + e[None, :],
            mask=is_key[:, None] & (e < VALUE_DIM)[None, :],
            other=0.0,
        ).to(q.dtype)
        acc = tl.dot(p.to(q.dtype), v, acc, input_precision=PRECISION)
    return acc, m, z, q_row, is_query


@triton.jit
@typing.no_type_check
def _whole_rows_kernel(
    q_ptr,
    k_pool_ptr,
    v_pool_ptr,
    table_ptr,
    kv_lens_ptr,
    sinks_ptr,
    blocks_ptr,
    out_ptr,
    lse_ptr,
    HAS_SINKS: tl.constexpr,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    K_DTYPE: tl.constexpr,
    V_DTYPE: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    K_ENTRY: tl.constexpr,
    V_ENTRY: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    """One program attends a tile to all of its keys."""
    item = tl.program_id(0)
    head = item % NUM_KV_HEADS
    tile = item // NUM_KV_HEADS % NUM_TILES
    row = item // (NUM_KV_HEADS * NUM_TILES)
    kv_len = tl.load(kv_lens_ptr + row)
    k_block = tl.load(blocks_ptr)
    v_block = tl.load(blocks_ptr + 1)
    acc, m, z, q_row, is_query = _attend(
        q_ptr, k_pool_ptr, v_pool_ptr, table_ptr, k_block, v_block, row, head, tile,
        _first_seen(kv_len, QUERY_LEN, WINDOW), kv_len, kv_len,
        SCALE, SOFT_CAP, WINDOW, QUERY_LEN, NUM_KV_HEADS, GROUP, KEY_DIM, VALUE_DIM,
        K_DTYPE, V_DTYPE, K_ROW, V_ROW, K_ENTRY, V_ENTRY, PAGE_SIZE, MAX_PAGES,
        BLOCK_M, BLOCK_KV, BLOCK_D, BLOCK_E, PRECISION,
    )  # fmt: skip
    q_head = q_row % (NUM_KV_HEADS * GROUP)
    sink = 0.0
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + q_head, mask=is_query, other=0.0).to(tl.float32)
        sink = sink * 1.4426950408889634
    out, lse = finish(acc, m, z, sink, HAS_SINKS)
    e = tl.arange(0, BLOCK_E)
    tl.store(
        out_ptr + q_row[:, None] * VALUE_DIM + e[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_query[:, None] & (e < VALUE_DIM)[None, :],
    )
    tl.store(lse_ptr + q_row, lse * 0.6931471805599453, mask=is_query)


@triton.jit
@typing.no_type_check
def _chunks_kernel(
    q_ptr,
    k_pool_ptr,
    v_pool_ptr,
    table_ptr,
    kv_lens_ptr,
    blocks_ptr,
    part_ptr,
    part_lse_ptr,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    K_DTYPE: tl.constexpr,
    V_DTYPE: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    K_ENTRY: tl.constexpr,
    V_ENTRY: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_TILES: tl.constexpr,
    EVEN_CHUNKS: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    LEAST_CHUNK: tl.constexpr,
    MOST_CHUNK: tl.constexpr,
    PART_CHUNKS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
):
    """Programs attend tiles to chunks of their keys, item after item."""
    k_block = tl.load(blocks_ptr)
    v_block = tl.load(blocks_ptr + 1)
    rows = tl.arange(0, BLOCK_ROWS)
    lens = tl.load(kv_lens_ptr + rows, mask=rows < NUM_ROWS, other=0)
    seen = lens - _first_seen(lens, QUERY_LEN, WINDOW)
    chunk_lens = _chunk_len(
        seen, BLOCK_KV, EVEN_CHUNKS, MAX_CHUNKS, LEAST_CHUNK, MOST_CHUNK
    )
    counts = tl.where(rows < NUM_ROWS, tl.maximum(tl.cdiv(seen, chunk_lens), 1), 0)
    ends = tl.cumsum(counts, 0)
    num_items = tl.sum(counts, 0) * (NUM_KV_HEADS * NUM_TILES)
    for item in range(tl.program_id(0), num_items, NUM_PROGRAMS):
        head = item % NUM_KV_HEADS
        tile = item // NUM_KV_HEADS % NUM_TILES
        work = item // (NUM_KV_HEADS * NUM_TILES)
        row = tl.sum((ends <= work).to(tl.int32), 0)
        chunk = work - tl.sum(tl.where(rows < row, counts, 0), 0)
        kv_len = tl.sum(tl.where(rows == row, lens, 0), 0)
        first = _first_seen(kv_len, QUERY_LEN, WINDOW)
        chunk_len = _chunk_len(
            kv_len - first, BLOCK_KV, EVEN_CHUNKS, MAX_CHUNKS, LEAST_CHUNK, MOST_CHUNK
        )
        start = first + chunk * chunk_len
        stop = tl.minimum(start + chunk_len, kv_len)
        acc, m, z, q_row, is_query = _attend(
            q_ptr, k_pool_ptr, v_pool_ptr, table_ptr, k_block, v_block, row, head,
            tile, start, stop, kv_len,
            SCALE, SOFT_CAP, WINDOW, QUERY_LEN, NUM_KV_HEADS, GROUP, KEY_DIM,
            VALUE_DIM, K_DTYPE, V_DTYPE, K_ROW, V_ROW, K_ENTRY, V_ENTRY, PAGE_SIZE,
            MAX_PAGES, BLOCK_M, BLOCK_KV, BLOCK_D, BLOCK_E, PRECISION,
        )  # fmt: skip
        out, lse = finish(acc, m, z, 0.0, False)
        # [rows, chunks, query heads, value]
        ROW: tl.constexpr = QUERY_LEN * NUM_KV_HEADS * GROUP
        part = q_row + (row * (PART_CHUNKS - 1) + chunk) * ROW
        e = tl.arange(0, BLOCK_E)
        tl.store(
            part_ptr + part[:, None] * VALUE_DIM + e[None, :],
            out,
            mask=is_query[:, None] & (e < VALUE_DIM)[None, :],
        )
        tl.store(part_lse_ptr + part, lse, mask=is_query)


@triton.jit
@typing.no_type_check
def _merge_kernel(
    part_ptr,
    part_lse_ptr,
    kv_lens_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    HAS_SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_E: tl.constexpr,
    EVEN_CHUNKS: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    LEAST_CHUNK: tl.constexpr,
    MOST_CHUNK: tl.constexpr,
    PART_CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """Merges the chunks of one query head, in their order."""
    q_row = tl.program_id(0)
    ROW: tl.constexpr = QUERY_LEN * NUM_HEADS
    row = q_row // ROW
    first_part = q_row + row * (PART_CHUNKS - 1) * ROW
    kv_len = tl.load(kv_lens_ptr + row)
    seen = kv_len - _first_seen(kv_len, QUERY_LEN, WINDOW)
    chunk_len = _chunk_len(
        seen, BLOCK_KV, EVEN_CHUNKS, MAX_CHUNKS, LEAST_CHUNK, MOST_CHUNK
    )
    count = tl.maximum(tl.cdiv(seen, chunk_len), 1)
    e = tl.arange(0, BLOCK_E)
    m = tl.full([1], -float("inf"), tl.float32)
    z = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_E], tl.float32)
    for at in range(0, count, BLOCK_CHUNKS):
        chunk = at + tl.arange(0, BLOCK_CHUNKS)
        is_chunk = chunk < count
        part = first_part + chunk * ROW
        lse = tl.load(part_lse_ptr + part, mask=is_chunk, other=-float("inf"))
        out = tl.load(
            part_ptr + part[:, None] * VALUE_DIM + e[None, :],
            mask=is_chunk[:, None] & (e < VALUE_DIM)[None, :],
            other=0.0,
        )
        m_new = tl.maximum(m, tl.max(lse, axis=0))
        origin = tl.where(m_new == -float("inf"), 0.0, m_new)
        weight = tl.exp2(lse - origin)
        rescale = tl.exp2(m - origin)
        z = z * rescale + tl.sum(weight, axis=0)
        acc = acc * rescale[:, None] + tl.sum(out * weight[:, None], axis=0)[None, :]
        m = m_new
    sink = 0.0
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + q_row % NUM_HEADS).to(tl.float32)
        sink = sink * 1.4426950408889634
    out, lse = finish(acc, m, z, sink, HAS_SINKS)
    at = q_row + tl.zeros([1], tl.int32)
    tl.store(
        out_ptr + at[:, None] * VALUE_DIM + e[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=(e < VALUE_DIM)[None, :],
    )
    tl.store(lse_ptr + at, lse * 0.6931471805599453)


def gqa_decode(
    q: Float[Array, "rows query_len num_q_heads key_dim"],
    k_pool: UInt32[Array, "_ _"],
    v_pool: UInt32[Array, "_ _"],
    table: Int32[Array, "rows max_pages"],
    kv_lens: Int32[Array, " rows"],
    *,
    k: PagedPart,
    v: PagedPart,
    softmax_scale: float,
    window: int | None = None,
    sinks: Float[Array, " num_q_heads"] | None = None,
    soft_cap: float | None = None,
    config: GqaDecodeTritonConfig | None = None,
) -> tuple[
    Float[Array, "rows query_len num_q_heads value_dim"],
    Float32[Array, "rows query_len num_q_heads"],
]:
    """Attends the last `query_len` tokens of each row to the row's cached tokens.

    Args:
        q: queries.
        k_pool: buffer with K.
        v_pool: buffer with V, the same one in a unified pool.
        table: kernel block ids of each row's pages.
        kv_lens: tokens of each row, its query tokens included; 0 for a padded row.
        k: where K lies.
        v: where V lies.
        softmax_scale: factor of `q . k`.
        window: tokens a query sees, its own included; None sees all.
        sinks: logits that join the denominator only.
        soft_cap: `c` in `c * tanh(s / c)`, applied to scaled scores.
        config: tuning; the default suits a Hopper card of 132 multiprocessors.

    Returns:
        Outputs of the type of `q`, and the natural log-sum-exp; zeros and `-inf` for a
        query that sees no key.
    """
    config = GqaDecodeTritonConfig() if config is None else config
    num_rows, query_len, num_q_heads, _ = q.shape
    max_pages = table.shape[1]
    group = num_q_heads // k.num_heads
    block_m = min(64, max(16, next_power_of_2(query_len * group)))
    places = addresses(k, v)
    key_bytes = places["BLOCK_D"] * k.dtype.itemsize
    key_bytes += places["BLOCK_E"] * v.dtype.itemsize
    block_kv = max(16, min(128, config.tile_bytes // next_power_of_2(key_bytes)))
    num_tiles = -(-query_len * group // block_m)
    most_seen = max_pages * k.page_size
    if window is not None:
        most_seen = min(most_seen, window + query_len - 1)
        # A window is rarely longer than a block, and often shorter.
        block_kv = min(block_kv, max(16, next_power_of_2(most_seen)))
    num_items = num_rows * k.num_heads * num_tiles
    even_chunks = max(1, config.num_programs * config.rounds // num_items)
    row_bytes = 4 * num_rows * query_len * num_q_heads * v.width
    max_chunks = max(1, min(config.max_chunks, _PARTIAL_BYTES // row_bytes))
    least_chunk = max(config.least_chunk, block_kv)
    part_chunks = min(max(even_chunks, max_chunks), -(-most_seen // least_chunk))
    statics: dict[str, typing.Any] = {
        **places,
        "MAX_PAGES": max_pages,
        "SCALE": float(softmax_scale),
        "SOFT_CAP": 0.0 if soft_cap is None else float(soft_cap),
        "WINDOW": 0 if window is None else min(window, 2**30),
        "QUERY_LEN": query_len,
        "NUM_KV_HEADS": k.num_heads,
        "GROUP": group,
        "BLOCK_M": block_m,
        "BLOCK_KV": block_kv,
        "PRECISION": "tf32x3",
        "NUM_TILES": num_tiles,
    }
    blocks = jnp.asarray([k.block, v.block], jnp.int32)
    outputs = [
        jax.ShapeDtypeStruct((*q.shape[:3], v.width), q.dtype),
        jax.ShapeDtypeStruct(q.shape[:3], jnp.float32),
    ]
    sink_logits = kv_lens if sinks is None else sinks
    if part_chunks == 1:
        out, lse = launch(
            _whole_rows_kernel,
            q,
            k_pool,
            v_pool,
            table,
            kv_lens,
            sink_logits,
            blocks,
            outputs=outputs,
            grid=(num_items,),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            HAS_SINKS=sinks is not None,
            **statics,
        )
        return out, lse
    cut: dict[str, typing.Any] = {
        "EVEN_CHUNKS": even_chunks,
        "MAX_CHUNKS": max_chunks,
        "LEAST_CHUNK": least_chunk,
        "MOST_CHUNK": config.most_chunk,
        "PART_CHUNKS": part_chunks,
    }
    parts = (num_rows, part_chunks, *q.shape[1:3])
    num_programs = min(config.num_programs, num_items * part_chunks)
    part, part_lse = launch(
        _chunks_kernel,
        q,
        k_pool,
        v_pool,
        table,
        kv_lens,
        blocks,
        outputs=[
            jax.ShapeDtypeStruct((*parts, v.width), jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
        ],
        grid=(num_programs,),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        NUM_ROWS=num_rows,
        BLOCK_ROWS=next_power_of_2(num_rows),
        NUM_PROGRAMS=num_programs,
        **statics,
        **cut,
    )
    out, lse = launch(
        _merge_kernel,
        part,
        part_lse,
        kv_lens,
        sink_logits,
        outputs=outputs,
        grid=(num_rows * query_len * num_q_heads,),
        num_warps=1,
        num_stages=2,
        HAS_SINKS=sinks is not None,
        WINDOW=statics["WINDOW"],
        QUERY_LEN=query_len,
        NUM_HEADS=num_q_heads,
        VALUE_DIM=v.width,
        BLOCK_KV=block_kv,
        BLOCK_E=places["BLOCK_E"],
        BLOCK_CHUNKS=min(8, next_power_of_2(part_chunks)),
        **cut,
    )
    return out, lse
