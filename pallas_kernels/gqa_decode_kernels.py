"""Kernels of `gqa_decode_triton`: chunks of rows, their merge, and whole rows."""

import dataclasses
import typing

import triton
import triton.language as tl

from pallas_kernels.paged_triton import cap, entry_pointers, finish, pages_of, weigh


@dataclasses.dataclass(frozen=True, kw_only=True)
class Queries:
    """Constants of the queries, and of the tiles that they are cut into.

    Attributes:
        query_len: query tokens of a row.
        num_kv_heads: K/V heads.
        group: query heads of each.
        heads: K/V heads of a tile.
        block_m: query rows of a tile.
        num_tiles: tiles of a row and its K/V heads.
    """

    query_len: int
    num_kv_heads: int
    group: int
    heads: int
    block_m: int
    num_tiles: int

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.num_kv_heads * self.group


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunks:
    """Constants by which rows are cut into chunks of keys.

    Attributes:
        block_kv: keys of a block; chunks are whole ones.
        even_chunks: chunks of a row, unless they would be too short or too long.
        least_chunk: keys of a chunk, at least, unless the row ends.
        most_chunk: the most, unless there would be more than `max_chunks`.
        max_chunks: chunks of a long row.
        part_chunks: the most that a row of the table can have.
    """

    block_kv: int
    even_chunks: int
    least_chunk: int
    most_chunk: int
    max_chunks: int
    part_chunks: int


def even_chunks(num_items: int, num_programs: int, *, start: float) -> int:
    """Returns into how many chunks to cut rows that are equally long.

    The programs take as many rounds as the items need. A round costs its share of a
    row and a start.

    Args:
        num_items: items of work, if each row is one chunk.
        num_programs: programs that share them.
        start: what a start costs, as a share of a row.
    """

    def cost(chunks: int) -> float:
        rounds = -(-num_items * chunks // num_programs)
        return rounds * (1 / chunks + start)

    return min(range(1, -(-4 * num_programs // num_items) + 1), key=cost)


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
def chunk_length(num_seen, CHUNKS: tl.constexpr):
    """Returns the keys of a chunk of a row of which `num_seen` keys are seen."""
    most = tl.maximum(tl.cdiv(num_seen, CHUNKS.max_chunks), CHUNKS.most_chunk)
    length = tl.minimum(tl.cdiv(num_seen, CHUNKS.even_chunks), most)
    length = tl.maximum(length, CHUNKS.least_chunk)
    return tl.cdiv(length, CHUNKS.block_kv) * CHUNKS.block_kv


@triton.jit
@typing.no_type_check
def _tile_rows(row, head, tile, QUERIES: tl.constexpr):
    """Returns what the rows of a product are: row of q, head in the tile, if any."""
    HEAD_ROWS: tl.constexpr = QUERIES.block_m // QUERIES.heads
    place = tl.arange(0, QUERIES.block_m)
    in_tile = place // HEAD_ROWS
    place = tile * HEAD_ROWS + place % HEAD_ROWS
    query = place // QUERIES.group
    q_row = (row * QUERIES.query_len + query) * QUERIES.num_kv_heads + head + in_tile
    q_row = q_row * QUERIES.group + place % QUERIES.group
    return q_row, in_tile, place < QUERIES.query_len * QUERIES.group


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
    SCORING: tl.constexpr,
    QUERIES: tl.constexpr,
    KV: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attends one tile to the keys from start to stop: sums, maximum, denominator."""
    # A shape is made of constants that stand alone.
    BLOCK_M: tl.constexpr = QUERIES.block_m
    BLOCK_E: tl.constexpr = KV.block_e
    head *= QUERIES.heads
    k_ptr = k_pool_ptr.to(tl.pointer_type(tl.dtype(KV.k_dtype))) + head * KV.key_dim
    v_ptr = v_pool_ptr.to(tl.pointer_type(tl.dtype(KV.v_dtype))) + head * KV.value_dim
    q_row, in_tile, is_query = _tile_rows(row, head, tile, QUERIES)
    d = tl.arange(0, KV.block_d)
    e = tl.arange(0, BLOCK_E)
    step = tl.arange(0, BLOCK_KV)
    # A row of q is zero but for its own head's part: one product serves all heads.
    q = tl.load(
        q_ptr + q_row[:, None] * KV.key_dim + (d % KV.key_dim)[None, :],
        mask=is_query[:, None] & ((d // KV.key_dim)[None, :] == in_tile[:, None]),
        other=0.0,
    )
    last_seen = kv_len - QUERIES.query_len + q_row // QUERIES.num_heads
    last_seen -= row * QUERIES.query_len
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    z = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    # Without a window blocks lie on a grid from position 0.
    PAGE_SIZE: tl.constexpr = KV.page_size
    ONE_PAGE: tl.constexpr = SCORING.window == 0 and PAGE_SIZE % BLOCK_KV == 0
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
            k_ptr, pages, k_block, at, step, PAGE_SIZE, KV.k_row, KV.k_entry, ONE_PAGE
        )
        k = tl.load(
            k_rows[:, None] + d[None, :],
            mask=is_key[:, None] & (d < QUERIES.heads * KV.key_dim)[None, :],
            other=0.0,
        ).to(q.dtype)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SCORING.soft_cap > 0.0:
            s = cap(s, SCORING.scale, SCORING.soft_cap)
        else:
            s = s * (SCORING.scale * 1.4426950408889634)
        if QUERIES.query_len > 1:
            is_seen = is_key[None, :] & (key[None, :] <= last_seen[:, None])
            if SCORING.window > 0:
                is_seen &= key[None, :] > last_seen[:, None] - SCORING.window
        else:
            is_seen = is_key[None, :]
        s = tl.where(is_seen, s, -float("inf"))
        p, rescale, m, z = weigh(s, m, z)
        acc = acc * rescale[:, None]
        v_rows = entry_pointers(
            v_ptr, pages, v_block, at, step, PAGE_SIZE, KV.v_row, KV.v_entry, ONE_PAGE
        )
        v = tl.load(
            v_rows[:, None] + e[None, :],
            mask=is_key[:, None] & (e < QUERIES.heads * KV.value_dim)[None, :],
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
    SCORING: tl.constexpr,
    QUERIES: tl.constexpr,
    KV: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program attends a tile to all of its keys."""
    item = tl.program_id(0)
    HEAD_TILES: tl.constexpr = QUERIES.num_kv_heads // QUERIES.heads
    head = item % HEAD_TILES
    tile = item // HEAD_TILES % QUERIES.num_tiles
    row = item // (HEAD_TILES * QUERIES.num_tiles)
    kv_len = tl.load(kv_lens_ptr + row)
    k_block = tl.load(blocks_ptr)
    v_block = tl.load(blocks_ptr + 1)
    acc, m, z, q_row, in_tile, is_query = _attend(
        q_ptr, k_pool_ptr, v_pool_ptr, table_ptr, k_block, v_block, row, head, tile,
        _first_seen(kv_len, QUERIES.query_len, SCORING.window), kv_len, kv_len,
        SCORING, QUERIES, KV, MAX_PAGES, BLOCK_KV, PRECISION,
    )  # fmt: skip
    q_head = q_row % QUERIES.num_heads
    sink = 0.0
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + q_head, mask=is_query, other=0.0).to(tl.float32)
        sink = sink * 1.4426950408889634
    out, lse = finish(acc, m, z, sink, HAS_SINKS)
    e = tl.arange(0, KV.block_e)
    tl.store(
        out_ptr + q_row[:, None] * KV.value_dim + (e % KV.value_dim)[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_query[:, None] & ((e // KV.value_dim)[None, :] == in_tile[:, None]),
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
    SCORING: tl.constexpr,
    QUERIES: tl.constexpr,
    KV: tl.constexpr,
    CHUNKS: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
):
    """Programs attend tiles to chunks of their keys, item after item."""
    k_block = tl.load(blocks_ptr)
    v_block = tl.load(blocks_ptr + 1)
    rows = tl.arange(0, BLOCK_ROWS)
    lens = tl.load(kv_lens_ptr + rows, mask=rows < NUM_ROWS, other=0)
    seen = lens - _first_seen(lens, QUERIES.query_len, SCORING.window)
    chunk_lens = chunk_length(seen, CHUNKS)
    # No row has more chunks than planned, even if its length is not its table's.
    counts = tl.minimum(tl.maximum(tl.cdiv(seen, chunk_lens), 1), CHUNKS.part_chunks)
    counts = tl.where(rows < NUM_ROWS, counts, 0)
    ends = tl.cumsum(counts, 0)
    HEAD_TILES: tl.constexpr = QUERIES.num_kv_heads // QUERIES.heads
    num_items = tl.sum(counts, 0) * (HEAD_TILES * QUERIES.num_tiles)
    for item in range(tl.program_id(0), num_items, NUM_PROGRAMS):
        head = item % HEAD_TILES
        tile = item // HEAD_TILES % QUERIES.num_tiles
        work = item // (HEAD_TILES * QUERIES.num_tiles)
        row = tl.sum((ends <= work).to(tl.int32), 0)
        chunk = work - tl.sum(tl.where(rows < row, counts, 0), 0)
        kv_len = tl.sum(tl.where(rows == row, lens, 0), 0)
        first = _first_seen(kv_len, QUERIES.query_len, SCORING.window)
        chunk_len = chunk_length(kv_len - first, CHUNKS)
        start = first + chunk * chunk_len
        stop = tl.minimum(start + chunk_len, kv_len)
        acc, m, z, q_row, in_tile, is_query = _attend(
            q_ptr, k_pool_ptr, v_pool_ptr, table_ptr, k_block, v_block, row, head,
            tile, start, stop, kv_len,
            SCORING, QUERIES, KV, MAX_PAGES, CHUNKS.block_kv, PRECISION,
        )  # fmt: skip
        out, lse = finish(acc, m, z, 0.0, False)
        # [rows, chunks, query heads, value]
        ROW: tl.constexpr = QUERIES.query_len * QUERIES.num_heads
        part = q_row + (row * (CHUNKS.part_chunks - 1) + chunk) * ROW
        e = tl.arange(0, KV.block_e)
        tl.store(
            part_ptr + part[:, None] * KV.value_dim + (e % KV.value_dim)[None, :],
            out,
            mask=is_query[:, None] & ((e // KV.value_dim)[None, :] == in_tile[:, None]),
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
    BLOCK_E: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """Merges the chunks of one query head, in their order."""
    q_row = tl.program_id(0)
    ROW: tl.constexpr = QUERY_LEN * NUM_HEADS
    row = q_row // ROW
    first_part = q_row + row * (CHUNKS.part_chunks - 1) * ROW
    kv_len = tl.load(kv_lens_ptr + row)
    seen = kv_len - _first_seen(kv_len, QUERY_LEN, WINDOW)
    chunk_len = chunk_length(seen, CHUNKS)
    count = tl.minimum(tl.maximum(tl.cdiv(seen, chunk_len), 1), CHUNKS.part_chunks)
    e = tl.arange(0, BLOCK_E)
    m = tl.full([1], -float("inf"), tl.float32)
    z = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_E], tl.float32)
    # Few chunks are loaded before it is known how many there are.
    EAGER: tl.constexpr = CHUNKS.part_chunks <= BLOCK_CHUNKS and CHUNKS.part_chunks <= 8
    for at in range(0, CHUNKS.part_chunks if EAGER else count, BLOCK_CHUNKS):
        chunk = at + tl.arange(0, BLOCK_CHUNKS)
        is_chunk = chunk < count
        is_loaded = chunk < CHUNKS.part_chunks if EAGER else is_chunk
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
