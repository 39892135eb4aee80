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
from jaxtyping import Array, Float, Float32, Int32, UInt32

from pallas_kernels.card import has_large_shared_memory, num_multiprocessors
from pallas_kernels.gqa_decode_kernels import (
    Chunks,
    Queries,
    chunks_kernel,
    even_chunks,
    merge_kernel,
    whole_rows_kernel,
)
from pallas_kernels.paged_rows import PagedPart, next_power_of_2
from pallas_kernels.paged_triton import KvParts, Scoring, layer_blocks
from pallas_kernels.triton_launch import launch
from pallas_kernels.tuning import tuned_config

# Rows of the smallest product.
_TILE_ROWS = 16
# Rows of so few keys are not cut.
_SHORT = 256
# Memory that the partial results of chunks may take, for all rows together.
_PARTIAL_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class GqaDecodeTritonConfig:
    """Tuning of the decode kernel.

    Attributes:
        tile_bytes: bytes of K and V that a program reads at a time; it sets the keys
            of a block, a power of two between 16 and 128.
        head_width: elements of K, or of V, that a program reads of each token, all
            its heads together, unless one head has more.
        num_warps: warps of a program.
        num_stages: blocks of keys in flight, and one.
        num_programs: programs that share the work, all at once; None means 4 for each
            multiprocessor, 2 if it has little shared memory.
        most_chunk: rows are cut into chunks of no more keys, up to `max_chunks`.
        max_chunks: pieces of a row, however long, unless programs would idle.
    """

    tile_bytes: int = 16384
    head_width: int = 128
    num_warps: int = 4
    num_stages: int = 3
    num_programs: int | None = None
    most_chunk: int = 2048
    max_chunks: int = 32

    def __post_init__(self):
        """Checks the ranges."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 1:
                raise ValueError(f"{field.name}={value} is below 1")
        if self.tile_bytes & (self.tile_bytes - 1):
            raise ValueError(f"tile_bytes={self.tile_bytes} must be a power of two")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """How the work of a call is cut; it follows from static sizes alone.

    Attributes:
        heads: K/V heads of a tile.
        block_m: query rows of a tile.
        block_kv: keys of a block.
        num_tiles: tiles of a row and its group of heads, more than one only for very
            many query tokens.
        num_items: tiles of all rows, and so the items if every row is one chunk.
        even_chunks: chunks of every row that give the programs equal work, if all
            rows are equally long.
        least_chunk: keys of a chunk, at least, unless the row ends.
        max_chunks: pieces of a row, however long, if `even_chunks` are fewer.
        part_chunks: the most that a row can have; 1 needs no merge.
        num_stages: stages of the loop over blocks.
        num_programs: programs that share the work.
    """

    heads: int
    block_m: int
    block_kv: int
    num_tiles: int
    num_items: int
    even_chunks: int
    least_chunk: int
    max_chunks: int
    part_chunks: int
    num_stages: int
    num_programs: int


def plan_decode(
    *,
    num_rows: int,
    query_len: int,
    group: int,
    most_seen: int,
    window: int | None,
    k: PagedPart,
    v: PagedPart,
    config: GqaDecodeTritonConfig,
) -> DecodePlan:
    """Cuts the work of a call.

    Args:
        num_rows: rows of the batch.
        query_len: query tokens of each row.
        group: query heads of a K/V head.
        most_seen: tokens that a row can have.
        window: tokens a query sees, or None.
        k: where K lies.
        v: where V lies.
        config: tuning.
    """
    tile_bytes, num_stages = config.tile_bytes, config.num_stages
    num_programs = config.num_programs
    if num_programs is None:
        num_programs = (4 if has_large_shared_memory() else 2) * num_multiprocessors()
    if window is not None:
        most_seen = min(most_seen, window + query_len - 1)
    is_short = most_seen <= _SHORT
    if is_short:
        # All loads of a short row are in flight at once; there is nothing to hide.
        tile_bytes, num_stages = 2 * tile_bytes, 2
    head_rows = next_power_of_2(query_len * group)
    heads = 1
    while (
        k.num_heads % (2 * heads) == 0
        and 2 * heads * head_rows <= _TILE_ROWS
        and 2 * heads * max(k.width, v.width) <= config.head_width
        and not (is_short and num_rows * k.num_heads < heads * num_programs)
    ):
        heads *= 2
    block_m = min(64, max(_TILE_ROWS, heads * head_rows))
    num_tiles = -(-query_len * group * heads // block_m)
    key_bytes = next_power_of_2(heads * k.width) * k.dtype.itemsize
    key_bytes += next_power_of_2(heads * v.width) * v.dtype.itemsize
    block_kv = max(16, min(128, tile_bytes // next_power_of_2(key_bytes)))
    if is_short:
        block_kv = min(block_kv, max(16, next_power_of_2(most_seen)))
    num_items = num_rows * k.num_heads // heads * num_tiles
    chunks = even_chunks(num_items, num_programs, start=0.004)
    row_bytes = 4 * num_rows * query_len * group * k.num_heads * v.width
    max_chunks = max(1, min(config.max_chunks, _PARTIAL_BYTES // row_bytes))
    # The more items there are anyway, the less a short chunk is worth its start.
    least_chunk = min(1024, max(128, next_power_of_2(2 * num_items)))
    long_chunks = min(max_chunks, -(-most_seen // config.most_chunk))
    part_chunks = min(max(chunks, long_chunks), -(-most_seen // least_chunk))
    part_chunks = 1 if is_short else part_chunks
    follow = part_chunks == 1 and num_items > num_programs
    if follow and not is_short and has_large_shared_memory():
        # Fewer programs at a time, with more in flight, come to their end together.
        num_stages += 1
    return DecodePlan(
        heads=heads,
        block_m=block_m,
        block_kv=block_kv,
        num_tiles=num_tiles,
        num_items=num_items,
        even_chunks=chunks,
        least_chunk=least_chunk,
        max_chunks=max_chunks,
        part_chunks=part_chunks,
        num_stages=num_stages,
        num_programs=num_programs,
    )


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
        config: tuning; None takes what was measured for the card, or else what suits
            an H200.

    Returns:
        Outputs of the type of `q`, and the natural log-sum-exp; zeros and `-inf` for a
        query that sees no key.
    """
    num_rows, query_len, num_q_heads, _ = q.shape
    max_pages = table.shape[1]
    if config is None:
        key = {
            "q_heads": num_q_heads,
            "kv_heads": k.num_heads,
            "head_dim": k.width if k.width == v.width else (k.width, v.width),
            "query": query_len,
            "page_size": k.page_size,
            "window": window or 0,
            "dtype": k.dtype.name,
        }
        tuned = tuned_config("gqa_decode", "triton", key=key, batch=num_rows)
        config = GqaDecodeTritonConfig(**(tuned or {}))
    plan = plan_decode(
        num_rows=num_rows,
        query_len=query_len,
        group=num_q_heads // k.num_heads,
        most_seen=max_pages * k.page_size,
        window=window,
        k=k,
        v=v,
        config=config,
    )
    statics: dict[str, typing.Any] = {
        "SCORING": Scoring.of(softmax_scale, window=window, soft_cap=soft_cap),
        "QUERIES": Queries(
            query_len=query_len,
            num_kv_heads=k.num_heads,
            group=num_q_heads // k.num_heads,
            heads=plan.heads,
            block_m=plan.block_m,
            num_tiles=plan.num_tiles,
        ),
        "KV": KvParts.of(k, v, heads=plan.heads),
        "MAX_PAGES": max_pages,
        "PRECISION": "tf32x3",
    }
    blocks = layer_blocks(k, v)
    outputs = [
        jax.ShapeDtypeStruct((*q.shape[:3], v.width), q.dtype),
        jax.ShapeDtypeStruct(q.shape[:3], jnp.float32),
    ]
    sink_logits = kv_lens if sinks is None else sinks
    if plan.part_chunks == 1:
        out, lse = launch(
            whole_rows_kernel,
            q,
            k_pool,
            v_pool,
            table,
            kv_lens,
            sink_logits,
            blocks,
            outputs=outputs,
            grid=(plan.num_items,),
            num_warps=config.num_warps,
            num_stages=plan.num_stages,
            HAS_SINKS=sinks is not None,
            BLOCK_KV=plan.block_kv,
            **statics,
        )
        return out, lse
    chunks = Chunks(
        block_kv=plan.block_kv,
        even_chunks=plan.even_chunks,
        least_chunk=plan.least_chunk,
        most_chunk=config.most_chunk,
        max_chunks=plan.max_chunks,
        part_chunks=plan.part_chunks,
    )
    parts = (num_rows, plan.part_chunks, *q.shape[1:3])
    num_programs = min(plan.num_programs, plan.num_items * plan.part_chunks)
    part, part_lse = launch(
        chunks_kernel,
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
        num_stages=plan.num_stages,
        NUM_ROWS=num_rows,
        BLOCK_ROWS=next_power_of_2(num_rows),
        NUM_PROGRAMS=num_programs,
        CHUNKS=chunks,
        **statics,
    )
    out, lse = launch(
        merge_kernel,
        part,
        part_lse,
        kv_lens,
        sink_logits,
        outputs=outputs,
        grid=(num_rows * query_len * num_q_heads,),
        num_warps=4 if plan.part_chunks > 8 else 1,
        HAS_SINKS=sinks is not None,
        WINDOW=statics["SCORING"].window,
        QUERY_LEN=query_len,
        NUM_HEADS=num_q_heads,
        VALUE_DIM=v.width,
        BLOCK_E=next_power_of_2(v.width),
        CHUNKS=chunks,
        BLOCK_CHUNKS=min(64, next_power_of_2(plan.part_chunks)),
    )
    return out, lse
