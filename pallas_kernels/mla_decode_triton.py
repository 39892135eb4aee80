"""MLA decode over cached latent rows, absorbed, read from the pool in place (Triton).

A row of the pool is key and value of all heads, so all query tokens and heads of a
batch row are the rows of one product, in *tiles* of 64: each tile reads every key once
and uses it twice. Rows of the batch are cut into *chunks* as in `gqa_decode_triton`,
whose merge sums them; the tiles of a chunk are neighbours in the order of the work, so
that all but one of them find its keys in the L2 cache.

Importing this module imports Triton.

Source: DeepSeek-V2 (arXiv:2405.04434); Dao et al., Flash-Decoding (2023).
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Float32, Int32, UInt32

from pallas_kernels.gqa_decode_kernels import (
    Chunks,
    chunk_length,
    even_chunks,
    merge_kernel,
)
from pallas_kernels.paged_rows import PagedPart, next_power_of_2
from pallas_kernels.paged_triton import (
    TYPES,
    entry_pointers,
    finish,
    pages_of,
    tile_width,
    weigh,
)
from pallas_kernels.triton_launch import launch
from pallas_kernels.tuning import tuned_config

# Columns of a tile: the rows of the smallest product of a whole warpgroup.
_TILE = 64
# Memory that the partial results of chunks may take, for all rows together.
_PARTIAL_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlaDecodeTritonConfig:
    """Tuning of the decode kernel.

    Attributes:
        tile_bytes: bytes of the pool that a program reads at a time; it sets the keys
            of a block, a power of two between 16 and 64.
        num_warps: warps of a program.
        num_stages: blocks of keys in flight, and one.
        num_programs: programs that share the work; one fits a multiprocessor.
        least_chunk: keys of a chunk, at least, unless the row ends.
        most_chunk: rows are cut into chunks of no more keys, up to `max_chunks`.
        max_chunks: pieces of a row, however long, unless programs would idle.
    """

    tile_bytes: int = 65536
    num_warps: int = 8
    num_stages: int = 2
    num_programs: int = 132
    least_chunk: int = 256
    most_chunk: int = 4096
    max_chunks: int = 32

    def __post_init__(self):
        """Checks the ranges."""
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name}={getattr(self, field.name)} is below 1")
        if self.tile_bytes & (self.tile_bytes - 1):
            raise ValueError(f"tile_bytes={self.tile_bytes} must be a power of two")


# Triton compiles the source: a checking wrapper would hide the module's names from it.
@triton.jit
@typing.no_type_check
def chunks_kernel(
    q_ptr,
    pool_ptr,
    table_ptr,
    kv_lens_ptr,
    block_ptr,
    part_ptr,
    part_lse_ptr,
    SCALE: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    DTYPE: tl.constexpr,
    ROW: tl.constexpr,
    ENTRY: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_TILES: tl.constexpr,
    CHUNKS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
):
    """Programs attend tiles to chunks of their keys, item after item."""
    COLUMNS: tl.constexpr = QUERY_LEN * NUM_HEADS
    BLOCK_KV: tl.constexpr = CHUNKS.block_kv
    ONE_PAGE: tl.constexpr = PAGE_SIZE % BLOCK_KV == 0
    block = tl.load(block_ptr)
    pool_ptr = pool_ptr.to(tl.pointer_type(tl.dtype(DTYPE)))
    rows = tl.arange(0, BLOCK_ROWS)
    lens = tl.load(kv_lens_ptr + rows, mask=rows < NUM_ROWS, other=0)
    lengths = chunk_length(lens, CHUNKS)
    counts = tl.where(rows < NUM_ROWS, tl.maximum(tl.cdiv(lens, lengths), 1), 0)
    ends = tl.cumsum(counts, 0)
    e = tl.arange(0, BLOCK_E)
    r = tl.arange(0, BLOCK_R)
    step = tl.arange(0, BLOCK_KV)
    for item in range(tl.program_id(0), tl.sum(counts, 0) * NUM_TILES, NUM_PROGRAMS):
        tile = item % NUM_TILES
        work = item // NUM_TILES
        row = tl.sum((ends <= work).to(tl.int32), 0)
        chunk = work - tl.sum(tl.where(rows < row, counts, 0), 0)
        kv_len = tl.sum(tl.where(rows == row, lens, 0), 0)
        length = chunk_length(kv_len, CHUNKS)
        start = chunk * length
        stop = tl.minimum(start + length, kv_len)
        column = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        is_query = column < COLUMNS
        last_seen = kv_len - QUERY_LEN + column // NUM_HEADS
        q_rows = q_ptr + (row * COLUMNS + column)[:, None] * (LATENT + ROPE)
        q_latent = tl.load(
            q_rows + e[None, :],
            mask=is_query[:, None] & (e < LATENT)[None, :],
            other=0.0,
        )
        q_rope = tl.load(
            q_rows + LATENT + r[None, :],
            mask=is_query[:, None] & (r < ROPE)[None, :],
            other=0.0,
        )
        m = tl.full([BLOCK_M], -float("inf"), tl.float32)
        z = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
        pages_ptr = table_ptr + row * MAX_PAGES
        # Block ids are read one block ahead: the copies of keys wait for no address.
        ahead = pages_of(pages_ptr, start, step, stop, PAGE_SIZE, ONE_PAGE)
        for at in range(start, stop, BLOCK_KV):
            key = at + step
            pages = ahead
            ahead = pages_of(pages_ptr, at + BLOCK_KV, step, stop, PAGE_SIZE, ONE_PAGE)
            is_key = key < stop
            k_rows = entry_pointers(
                pool_ptr, pages, block, at, step, PAGE_SIZE, ROW, ENTRY, ONE_PAGE
            )[:, None]
            latent = tl.load(
                k_rows + e[None, :],
                mask=is_key[:, None] & (e < LATENT)[None, :],
                other=0.0,
            ).to(q_latent.dtype)
            rope = tl.load(
                k_rows + LATENT + r[None, :],
                mask=is_key[:, None] & (r < ROPE)[None, :],
                other=0.0,
            ).to(q_latent.dtype)
            s = tl.dot(q_latent, tl.trans(latent), input_precision=PRECISION)
            s = tl.dot(q_rope, tl.trans(rope), s, input_precision=PRECISION)
            s = s * (SCALE * 1.4426950408889634)
            is_seen = is_key[None, :]
            if QUERY_LEN > 1:
                is_seen &= key[None, :] <= last_seen[:, None]
            s = tl.where(is_seen, s, -float("inf"))
            p, rescale, m, z = weigh(s, m, z)
            acc = acc * rescale[:, None]
            acc = tl.dot(p.to(latent.dtype), latent, acc, input_precision=PRECISION)
        out, lse = finish(acc, m, z, 0.0, False)
        # Parts lie in the order of rows, chunks and columns.
        part = (row * CHUNKS.part_chunks + chunk) * COLUMNS + column
        tl.store(
            part_ptr + part.to(tl.int64)[:, None] * LATENT + e[None, :],
            out,
            mask=is_query[:, None] & (e < LATENT)[None, :],
        )
        tl.store(part_lse_ptr + part, lse, mask=is_query)


def mla_decode(
    q: Float[Array, "rows query_len num_heads row_width"],
    pool: UInt32[Array, "_ _"],
    table: Int32[Array, "rows max_pages"],
    kv_lens: Int32[Array, " rows"],
    *,
    part: PagedPart,
    latent_dim: int,
    softmax_scale: float,
    config: MlaDecodeTritonConfig | None = None,
) -> tuple[
    Float[Array, "rows query_len num_heads latent_dim"],
    Float32[Array, "rows query_len num_heads"],
]:
    """Attends the last `query_len` tokens of each row to the row's cached tokens.

    Args:
        q: absorbed queries: latent part, then rope part.
        pool: buffer with the latent rows.
        table: kernel block ids of each row's pages.
        kv_lens: tokens of each row, its query tokens included; 0 for a padded row.
        part: where the latent rows lie.
        latent_dim: elements of a row that are also the value.
        softmax_scale: factor of `q . k`.
        config: tuning; None takes what was measured for the card, or else what suits
            a Hopper card of 132 multiprocessors.

    Returns:
        Outputs of the type of `q`, and the natural log-sum-exp; zeros and `-inf` for a
        query that sees no key.
    """
    num_rows, query_len, num_heads, row_width = q.shape
    if config is None:
        key = {
            "heads": num_heads,
            "head_dim": row_width,
            "query": query_len,
            "page_size": part.page_size,
            "dtype": part.dtype.name,
        }
        tuned = tuned_config("mla_decode", "triton", key=key, batch=num_rows)
        config = MlaDecodeTritonConfig(**(tuned or {}))
    columns = query_len * num_heads
    num_tiles = -(-columns // _TILE)
    # Products are of the type of the queries, whatever the pool holds.
    itemsize = max(part.dtype.itemsize, q.dtype.itemsize)
    key_bytes = next_power_of_2(latent_dim) * itemsize
    block_kv = max(16, min(64, config.tile_bytes // key_bytes))
    even = even_chunks(num_rows * num_tiles, config.num_programs, start=0.01)
    row_bytes = 4 * num_rows * columns * latent_dim
    max_chunks = max(1, min(config.max_chunks, _PARTIAL_BYTES // row_bytes))
    most_seen = table.shape[1] * part.page_size
    part_chunks = min(max(even, max_chunks), -(-most_seen // config.least_chunk))
    chunks = Chunks(
        block_kv=block_kv,
        even_chunks=even,
        least_chunk=config.least_chunk,
        most_chunk=config.most_chunk,
        max_chunks=max_chunks,
        part_chunks=part_chunks,
    )
    num_programs = min(config.num_programs, num_rows * num_tiles * part_chunks)
    parts, part_lse = launch(
        chunks_kernel,
        q,
        pool,
        table,
        kv_lens,
        jnp.full((1,), part.block, jnp.int32),
        outputs=[
            jax.ShapeDtypeStruct(
                (num_rows, part_chunks, columns, latent_dim), jnp.float32
            ),
            jax.ShapeDtypeStruct((num_rows, part_chunks, columns), jnp.float32),
        ],
        grid=(num_programs,),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        SCALE=float(softmax_scale),
        QUERY_LEN=query_len,
        NUM_HEADS=num_heads,
        LATENT=latent_dim,
        ROPE=row_width - latent_dim,
        DTYPE=TYPES[part.dtype.name],
        ROW=part.row_elements,
        ENTRY=part.entry_elements,
        PAGE_SIZE=part.page_size,
        MAX_PAGES=table.shape[1],
        BLOCK_M=_TILE,
        BLOCK_E=tile_width(latent_dim),
        BLOCK_R=tile_width(max(row_width - latent_dim, 1)),
        PRECISION="tf32x3",
        NUM_TILES=num_tiles,
        NUM_ROWS=num_rows,
        BLOCK_ROWS=next_power_of_2(num_rows),
        NUM_PROGRAMS=num_programs,
        CHUNKS=chunks,
    )
    out, lse = launch(
        merge_kernel,
        parts,
        part_lse,
        kv_lens,
        kv_lens,
        outputs=[
            jax.ShapeDtypeStruct((*q.shape[:3], latent_dim), q.dtype),
            jax.ShapeDtypeStruct(q.shape[:3], jnp.float32),
        ],
        grid=(num_rows * columns,),
        num_warps=4,
        HAS_SINKS=False,
        WINDOW=0,
        QUERY_LEN=query_len,
        NUM_HEADS=num_heads,
        VALUE_DIM=latent_dim,
        BLOCK_E=next_power_of_2(latent_dim),
        CHUNKS=chunks,
        BLOCK_CHUNKS=min(16, next_power_of_2(part_chunks)),
    )
    return out, lse
