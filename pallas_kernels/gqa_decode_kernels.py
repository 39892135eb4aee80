"""Kernels of `gqa_decode_triton`: chunks of rows, their merge, and whole rows."""

import typing

import triton
import triton.language as tl

from pallas_kernels.paged_triton import cap, entry_pointers, finish, pages_of, weigh


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
def chunk_length(
    num_seen,
    BLOCK_KV: tl.constexpr,
    EVEN_CHUNKS: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    LEAST_CHUNK: tl.constexpr,
    MOST_CHUNK: tl.constexpr,
):
    """Returns the keys of a chunk of a row of which `num_seen` keys are seen."""
    most = tl.maximum(tl.cdiv(num_seen, MAX_CHUNKS), MOST_CHUNK)
    length = tl.minimum(tl.cdiv(num_seen, EVEN_CHUNKS), most)
    length = tl.maximum(length, LEAST_CHUNK)
    return tl.cdiv(length, BLOCK_KV) * BLOCK_KV


@triton.jit
@typing.no_type_check
def _tile_rows(
    row,
    head,
    tile,
    QUERY_LEN: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Returns what the rows of a product are: row of q, head in the tile, if any."""
    place = tl.arange(0, BLOCK_M)
    in_tile = place // (BLOCK_M // HEADS)
    place = tile * (BLOCK_M // HEADS) + place % (BLOCK_M // HEADS)
    query = place // GROUP
    q_row = (row * QUERY_LEN + query) * NUM_KV_HEADS + head + in_tile
    return q_row * GROUP + place % GROUP, in_tile, place < QUERY_LEN * GROUP


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
    HEADS: tl.constexpr,
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
    head *= HEADS
    k_ptr = k_pool_ptr.to(tl.pointer_type(tl.dtype(K_DTYPE))) + head * KEY_DIM
    v_ptr = v_pool_ptr.to(tl.pointer_type(tl.dtype(V_DTYPE))) + head * VALUE_DIM
    q_row, in_tile, is_query = _tile_rows(
        row, head, tile, QUERY_LEN, NUM_KV_HEADS, GROUP, HEADS, BLOCK_M
    )
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    step = tl.arange(0, BLOCK_KV)
    # A row of q is zero but for its own head's part: one product serves all heads.
    q = tl.load(
        q_ptr + q_row[:, None] * KEY_DIM + (d % KEY_DIM)[None, :],
        mask=is_query[:, None] & ((d // KEY_DIM)[None, :] == in_tile[:, None]),
        other=0.0,
    )
    last_seen = kv_len - QUERY_LEN + q_row // (NUM_KV_HEADS * GROUP) - row * QUERY_LEN
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    z = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    # Without a window blocks lie on a grid from position 0.
    ONE_PAGE: tl.constexpr = WINDOW == 0 and PAGE_SIZE % BLOCK_KV == 0
    table_ptr += row * MAX_PAGES
    # Block ids are read one block ahead: the copies of K and V wait for no address.
    ahead = pages_of(table_ptr, start, step, stop, PAGE_SIZE, ONE_PAGE)
    for at in range(start, stop, BLOCK_KV):
        key = at + step
        pages = ahead
        ahead = pages_of(table_ptr, at + BLOCK_KV, step, stop, PAGE_SIZE, ONE_PAGE)
        # A key that no query sees is not read: its page may be another's by now.
        is_key = key < stop
        k_rows = entry_pointers(
            k_ptr, pages, k_block, at, step, PAGE_SIZE, K_ROW, K_ENTRY, ONE_PAGE
        )
        k = tl.load(
            k_rows[:, None] + d[None, :],
            mask=is_key[:, None] & (d < HEADS * KEY_DIM)[None, :],
            other=0.0,
        ).to(q.dtype)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SOFT_CAP > 0.0:
            s = cap(s, SCALE, SOFT_CAP)
        else:
            s = s * (SCALE * 1.4426950408889634)
        if QUERY_LEN > 1:
            is_seen = is_key[None, :] & (key[None, :] <= last_seen[:, None])
            if WINDOW > 0:
                is_seen &= key[None, :] > last_seen[:, None] - WINDOW
        else:
            is_seen = is_key[None, :]
        s = tl.where(is_seen, s, -float("inf"))
        p, rescale, m, z = weigh(s, m, z)
        acc = acc * rescale[:, None]
        v_rows = entry_pointers(
            v_ptr, pages, v_block, at, step, PAGE_SIZE, V_ROW, V_ENTRY, ONE_PAGE
        )
        v = tl.load(
            v_rows[:, None] + e[None, :],
            mask=is_key[:, None] & (e < HEADS * VALUE_DIM)[None, :],
            other=0.0,
        ).to(q.dtype)
        acc = tl.dot(p.to(q.dtype), v, acc, input_precision=PRECISION)
    return acc, m, z, q_row, in_tile, is_query


@triton.jit
@typing.no_type_check
def whole_rows_kernel(
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
    HEADS: tl.constexpr,
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
    HEAD_TILES: tl.constexpr = NUM_KV_HEADS // HEADS
    head = item % HEAD_TILES
    tile = item // HEAD_TILES % NUM_TILES
    row = item // (HEAD_TILES * NUM_TILES)
    kv_len = tl.load(kv_lens_ptr + row)
    k_block = tl.load(blocks_ptr)
    v_block = tl.load(blocks_ptr + 1)
    acc, m, z, q_row, in_tile, is_query = _attend(
        q_ptr, k_pool_ptr, v_pool_ptr, table_ptr, k_block, v_block, row, head, tile,
        _first_seen(kv_len, QUERY_LEN, WINDOW), kv_len, kv_len,
        SCALE, SOFT_CAP, WINDOW, QUERY_LEN, NUM_KV_HEADS, GROUP, HEADS, KEY_DIM,
        VALUE_DIM, K_DTYPE, V_DTYPE, K_ROW, V_ROW, K_ENTRY, V_ENTRY, PAGE_SIZE,
        MAX_PAGES, BLOCK_M, BLOCK_KV, BLOCK_D, BLOCK_E, PRECISION,
    )  # fmt: skip
    q_head = q_row % (NUM_KV_HEADS * GROUP)
    sink = 0.0
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + q_head, mask=is_query, other=0.0).to(tl.float32)
        sink = sink * 1.4426950408889634
    out, lse = finish(acc, m, z, sink, HAS_SINKS)
    e = tl.arange(0, BLOCK_E)
    tl.store(
        out_ptr + q_row[:, None] * VALUE_DIM + (e % VALUE_DIM)[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_query[:, None] & ((e // VALUE_DIM)[None, :] == in_tile[:, None]),
    )
    tl.store(lse_ptr + q_row, lse * 0.6931471805599453, mask=is_query)


@triton.jit
@typing.no_type_check
def chunks_kernel(
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
    HEADS: tl.constexpr,
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
    chunk_lens = chunk_length(
        seen, BLOCK_KV, EVEN_CHUNKS, MAX_CHUNKS, LEAST_CHUNK, MOST_CHUNK
    )
    # No row has more chunks than planned, even if its length is not its table's.
    counts = tl.minimum(tl.maximum(tl.cdiv(seen, chunk_lens), 1), PART_CHUNKS)
    counts = tl.where(rows < NUM_ROWS, counts, 0)
    ends = tl.cumsum(counts, 0)
    HEAD_TILES: tl.constexpr = NUM_KV_HEADS // HEADS
    num_items = tl.sum(counts, 0) * (HEAD_TILES * NUM_TILES)
    for item in range(tl.program_id(0), num_items, NUM_PROGRAMS):
        head = item % HEAD_TILES
        tile = item // HEAD_TILES % NUM_TILES
        work = item // (HEAD_TILES * NUM_TILES)
        row = tl.sum((ends <= work).to(tl.int32), 0)
        chunk = work - tl.sum(tl.where(rows < row, counts, 0), 0)
        kv_len = tl.sum(tl.where(rows == row, lens, 0), 0)
        first = _first_seen(kv_len, QUERY_LEN, WINDOW)
        chunk_len = chunk_length(
            kv_len - first, BLOCK_KV, EVEN_CHUNKS, MAX_CHUNKS, LEAST_CHUNK, MOST_CHUNK
        )
        start = first + chunk * chunk_len
        stop = tl.minimum(start + chunk_len, kv_len)
        acc, m, z, q_row, in_tile, is_query = _attend(
            q_ptr, k_pool_ptr, v_pool_ptr, table_ptr, k_block, v_block, row, head,
            tile, start, stop, kv_len,
            SCALE, SOFT_CAP, WINDOW, QUERY_LEN, NUM_KV_HEADS, GROUP, HEADS, KEY_DIM,
            VALUE_DIM, K_DTYPE, V_DTYPE, K_ROW, V_ROW, K_ENTRY, V_ENTRY, PAGE_SIZE,
            MAX_PAGES, BLOCK_M, BLOCK_KV, BLOCK_D, BLOCK_E, PRECISION,
        )  # fmt: skip
        out, lse = finish(acc, m, z, 0.0, False)
        # [rows, chunks, query heads, value]
        ROW: tl.constexpr = QUERY_LEN * NUM_KV_HEADS * GROUP
        part = q_row + (row * (PART_CHUNKS - 1) + chunk) * ROW
        e = tl.arange(0, BLOCK_E)
        tl.store(
            part_ptr + part[:, None] * VALUE_DIM + (e % VALUE_DIM)[None, :],
            out,
            mask=is_query[:, None] & ((e // VALUE_DIM)[None, :] == in_tile[:, None]),
        )
        tl.store(part_lse_ptr + part, lse, mask=is_query)


@triton.jit
@typing.no_type_check
def merge_kernel(
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
    chunk_len = chunk_length(
        seen, BLOCK_KV, EVEN_CHUNKS, MAX_CHUNKS, LEAST_CHUNK, MOST_CHUNK
    )
    count = tl.minimum(tl.maximum(tl.cdiv(seen, chunk_len), 1), PART_CHUNKS)
    e = tl.arange(0, BLOCK_E)
    m = tl.full([1], -float("inf"), tl.float32)
    z = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_E], tl.float32)
    # Few chunks are loaded before it is known how many there are.
    EAGER: tl.constexpr = PART_CHUNKS <= BLOCK_CHUNKS and PART_CHUNKS <= 8
    for at in range(0, PART_CHUNKS if EAGER else count, BLOCK_CHUNKS):
        chunk = at + tl.arange(0, BLOCK_CHUNKS)
        is_chunk = chunk < count
        is_loaded = chunk < PART_CHUNKS if EAGER else is_chunk
        part = first_part + chunk * ROW
        lse = tl.load(part_lse_ptr + part, mask=is_loaded, other=-float("inf"))
        out = tl.load(
            part_ptr + part[:, None] * VALUE_DIM + e[None, :],
            mask=is_loaded[:, None] & (e < VALUE_DIM)[None, :],
            other=0.0,
        )
        if EAGER:
            lse = tl.where(is_chunk, lse, -float("inf"))
            out = tl.where(is_chunk[:, None], out, 0.0)
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
