"""MLA decode for 32 query columns: keys are the rows of the product.

A query column is one head of one query token. With few of them a product that has
queries as its rows would leave most of a 64-row wgmma empty, so everything is
transposed: a tile of 64 tokens gives the 64 rows, the columns are the queries.

    S^T = K q^T      [64 tokens, 32]      warpgroup `scores`, and the softmax
    O^T += V^T P^T   [512, 32]            warpgroup `values`, O^T in registers
    TMA                                   warpgroup `loads`

A tile comes in three chunks of 192 elements of its 64 rows, through a ring of six
chunks in shared memory: the loads run up to two tiles ahead. (More of them in flight
were slower on an H200: 150.5 against 148 us at batch 64 x 8192.) `values` frees the
chunks. V is the first 512 elements of K, so the last chunk is value and rope.

Legend: C columns, D elements of a row, E of its latent part.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_decode.config import (
    ACC,
    LATENT_DIM,
    NO_MAXIMUM,
    ROW_DIM,
    SWIZZLE,
    SWIZZLE_FLOAT32,
    zeros,
)
from pallas_kernels.mla_decode.pages import piece_size, pieces_per_tile, tile_pieces
from pallas_kernels.mla_decode.plan import TILE, for_each_part
from pallas_kernels.mla_decode.softmax import (
    LOG2E,
    accumulate,
    clear_tail,
    inverse_sum,
    log_sum_exp,
    visible_len,
)

CHUNK = 192
NUM_CHUNKS = ROW_DIM // CHUNK
RING = 6
NUM_P = 2
# Latent elements in each chunk.
VALUE_WIDTHS = tuple(min(CHUNK, LATENT_DIM - c * CHUNK) for c in range(NUM_CHUNKS))
# Registers of a thread, by warpgroup; the three of them share 512.
REGISTERS = {"scores": 160, "values": 240, "loads": 40}

TILE_LAYOUT = plgpu.Layout.WGMMA
COLUMN_LAYOUT = plgpu.Layout.WGMMA.reduce(0)


def attend(
    q,
    pool,
    table,
    plan,
    block_offset,
    *,
    query_len: int,
    num_heads: int,
    page_size: int,
    softmax_scale: float,
    num_ctas: int,
    interpret,
):
    """Attend all rows; rows of several parts are left to the merge.

    Args:
      q: Query columns ``[rows, C, D]``, bfloat16, 32 of them.
      pool: Pieces ``[num_pieces, piece, D]``, bfloat16.
      table: Block ids ``[rows, max_pages]``.
      plan: The plan of the batch, for ``num_ctas``.
      block_offset: The layer's constant, int32 ``[1]``.
      query_len: Query tokens of a row.
      num_heads: Heads of a query token; columns past all of them are padding.
      page_size: Tokens per page.
      softmax_scale: Factor of ``q . k``.
      num_ctas: CTAs of the grid.
      interpret: Parameters of the simulator, or False.

    Returns:
      For rows of one part ``out [rows, C, E]`` and ``lse [rows, C]``; for the others,
      by part id, ``[num_ctas + rows, C, E]`` float32 and ``[num_ctas + rows, C]``.
    """
    num_rows, columns, _ = q.shape
    scale2 = softmax_scale * LOG2E
    num_pieces = pieces_per_tile(page_size)
    piece = piece_size(page_size)

    def body(
        q_ref,
        pool_ref,
        table_ref,
        ctas_ref,
        rows_ref,
        offset_ref,
        out_ref,
        lse_ref,
        part_out_ref,
        part_lse_ref,
        q_smem,
        ring_union,
        p_smem,
        decay_smem,
        sum_smem,
        max_smem,
        loaded,
        freed,
        p_ready,
        p_freed,
        sums_ready,
        sums_freed,
        q_ready,
        q_freed,
    ):
        ring_smem, stage_smems, part_stage_smems = ring_union
        cta = lax.axis_index("cta")
        warpgroup = lax.axis_index("warpgroup")

        my_parts = functools.partial(for_each_part, ctas_ref, rows_ref, cta)

        def slot_of(tile, chunk):
            return lax.rem(tile * NUM_CHUNKS + chunk, RING)

        def scores():
            plgpu.set_max_registers(REGISTERS["scores"], action="decrease")

            def attend_part(index, part, done):
                plgpu.barrier_wait(q_ready)
                column = plgpu.broadcasted_iota(
                    jnp.int32, (TILE, columns), 1, layout=TILE_LAYOUT
                )
                limit = visible_len(
                    part.kv_len, column, query_len=query_len, num_heads=num_heads
                )

                def attend_tile(i, state):
                    maximum, total, zero = state
                    # Always 0, which the compiler cannot know: it would hoist the
                    # descriptors of all operands out of the loop, and spill them.
                    zero = jnp.maximum(zero, i - (1 << 30))
                    tile = done + i

                    def multiply(acc_ref):
                        for c in range(NUM_CHUNKS):
                            slot = slot_of(tile, c)
                            plgpu.barrier_wait(loaded.at[slot])
                            q_chunk = q_smem.at[zero, :, pl.ds(c * CHUNK, CHUNK)]
                            plgpu.wgmma(
                                acc_ref, ring_smem.at[slot], q_chunk.transpose((1, 0))
                            )
                        return acc_ref[...]

                    s = pl.run_scoped(multiply, ACC((TILE, columns), jnp.float32))
                    start = (part.first + i) * TILE
                    token = plgpu.broadcasted_iota(
                        jnp.int32, (TILE, columns), 0, layout=TILE_LAYOUT
                    )
                    s = jnp.where(token + start < limit, s, -jnp.inf)
                    new_maximum = jnp.maximum(maximum, s.max(axis=0))
                    decay = jnp.exp2((maximum - new_maximum) * scale2)
                    shift = lax.broadcast_in_dim(new_maximum * scale2, s.shape, [1])
                    p = jnp.exp2(s * scale2 - shift)
                    valid = part.kv_len - start

                    @pl.when(valid < TILE)
                    def _():
                        for c, width in enumerate(VALUE_WIDTHS):
                            clear_tail(ring_smem.at[slot_of(tile, c)], valid, width)

                    p_slot = lax.rem(tile, NUM_P)

                    @pl.when(tile >= NUM_P)
                    def _():
                        plgpu.barrier_wait(p_freed.at[p_slot])

                    p_smem.at[p_slot].transpose((1, 0))[...] = plgpu.layout_cast(
                        p.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED
                    )
                    decay_smem.at[p_slot][...] = decay
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(p_ready.at[p_slot])
                    total = total * lax.broadcast_in_dim(decay, s.shape, [1]) + p
                    return new_maximum, total, zero

                no_maximum = jnp.full((columns,), NO_MAXIMUM, jnp.float32)
                maximum, total, _ = lax.fori_loop(
                    0,
                    part.tiles,
                    attend_tile,
                    (
                        plgpu.layout_cast(no_maximum, COLUMN_LAYOUT),
                        zeros((TILE, columns), TILE_LAYOUT),
                        ctas_ref[cta, 7],
                    ),
                )
                plgpu.barrier_arrive(q_freed)

                @pl.when(index > 0)
                def _():
                    plgpu.barrier_wait(sums_freed)

                sum_smem[...] = total.sum(axis=0)
                max_smem[...] = maximum
                plgpu.barrier_arrive(sums_ready)
                return done + part.tiles

            count, done = my_parts(attend_part, jnp.int32(0))
            if interpret:  # the simulator wants every arrival to be waited for

                @pl.when(count > 0)
                def _():
                    plgpu.barrier_wait(sums_freed)

                for ago in range(NUM_P, 0, -1):

                    @pl.when(done >= ago)
                    def _(ago=ago):
                        plgpu.barrier_wait(p_freed.at[lax.rem(done - ago, NUM_P)])

        def values():
            plgpu.set_max_registers(REGISTERS["values"], action="increase")

            count = ctas_ref[cta, 0]

            def attend_part(index, part, done):
                def attend_tile(i, accs):
                    tile = done + i
                    p_slot = lax.rem(tile, NUM_P)
                    plgpu.barrier_wait(p_ready.at[p_slot])
                    decay = plgpu.load(decay_smem.at[p_slot], layout=COLUMN_LAYOUT)
                    accs = tuple(
                        acc * lax.broadcast_in_dim(decay, acc.shape, [1])
                        for acc in accs
                    )

                    def multiply(acc_refs):
                        for c, width in enumerate(VALUE_WIDTHS):
                            v = ring_smem.at[slot_of(tile, c), :, pl.ds(0, width)]
                            plgpu.wgmma(
                                acc_refs[c],
                                v.transpose((1, 0)),
                                p_smem.at[p_slot].transpose((1, 0)),
                            )
                        for c in range(NUM_CHUNKS):
                            plgpu.wgmma_wait(NUM_CHUNKS - 1 - c)
                            plgpu.barrier_arrive(freed.at[slot_of(tile, c)])

                    accs = accumulate(multiply, accs, interpret=interpret)
                    plgpu.barrier_arrive(p_freed.at[p_slot])
                    return accs

                accs = lax.fori_loop(
                    0,
                    part.tiles,
                    attend_tile,
                    tuple(zeros((w, columns), TILE_LAYOUT) for w in VALUE_WIDTHS),
                )
                plgpu.barrier_wait(sums_ready)
                total = plgpu.load(sum_smem, layout=COLUMN_LAYOUT)
                maximum = plgpu.load(max_smem, layout=COLUMN_LAYOUT)
                plgpu.barrier_arrive(sums_freed)
                inverse = inverse_sum(total)
                lse = log_sum_exp(maximum, total, softmax_scale)
                accs = tuple(
                    acc * lax.broadcast_in_dim(inverse, acc.shape, [1]) for acc in accs
                )

                def store(to_out_ref, to_lse_ref, stage_refs):
                    to_lse_ref[...] = lse
                    for c, acc in enumerate(accs):
                        width = acc.shape[0]
                        to = to_out_ref.at[:, pl.ds(c * CHUNK, width)]
                        acc = plgpu.layout_cast(
                            acc.astype(to.dtype), plgpu.Layout.WGMMA_TRANSPOSED
                        )
                        # Rows of a few bytes make slow stores. After the last part
                        # the ring is free, and they go through it.
                        staged = stage_refs[c]

                        @pl.when(is_last)
                        def _(staged=staged, to=to, acc=acc):
                            staged.transpose((1, 0))[...] = acc
                            plgpu.commit_smem()
                            plgpu.copy_smem_to_gmem(staged, to)

                        @pl.when(~is_last)
                        def _(to=to, acc=acc):
                            to.transpose((1, 0))[...] = acc

                is_last = index == count - 1
                is_whole = part.tiles == part.row_tiles

                @pl.when(is_whole)
                def _():
                    store(out_ref.at[part.row], lse_ref.at[part.row], stage_smems)

                @pl.when(~is_whole)
                def _():
                    part_id = cta + part.row
                    store(
                        part_out_ref.at[part_id],
                        part_lse_ref.at[part_id],
                        part_stage_smems,
                    )

                return done + part.tiles

            my_parts(attend_part, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        def loads():
            plgpu.set_max_registers(REGISTERS["loads"], action="decrease")
            block_offset = offset_ref[0]

            def pieces_of(part, tile):
                return tile_pieces(
                    table_ref,
                    part,
                    tile,
                    page_size=page_size,
                    block_offset=block_offset,
                )

            def attend_part(index, part, done):
                @pl.when(index > 0)
                def _():
                    plgpu.barrier_wait(q_freed)

                plgpu.copy_gmem_to_smem(q_ref.at[part.row], q_smem.at[0], q_ready)

                def load_tile(i, pieces):
                    # The ids of the next tile arrive while this one is loaded.
                    following = pieces_of(part, part.first + i + 1)
                    for c in range(NUM_CHUNKS):
                        slot = slot_of(done + i, c)

                        @pl.when((done + i) * NUM_CHUNKS + c >= RING)
                        def _(slot=slot):
                            plgpu.barrier_wait(freed.at[slot])

                        for k, source in enumerate(pieces):
                            plgpu.copy_gmem_to_smem(
                                pool_ref.at[source, :, pl.ds(c * CHUNK, CHUNK)],
                                ring_smem.at[slot, pl.ds(k * piece, piece)],
                                loaded.at[slot],
                            )
                    return following

                lax.fori_loop(0, part.tiles, load_tile, pieces_of(part, part.first))
                return done + part.tiles

            count, done = my_parts(attend_part, jnp.int32(0))
            if interpret:  # the simulator wants every arrival to be waited for

                @pl.when(count > 0)
                def _():
                    plgpu.barrier_wait(q_freed)

                for ago in range(RING, 0, -1):

                    @pl.when(done * NUM_CHUNKS >= ago)
                    def _(ago=ago):
                        chunk = done * NUM_CHUNKS - ago
                        plgpu.barrier_wait(freed.at[lax.rem(chunk, RING)])

        for index, role in enumerate((scores, values, loads)):
            pl.when(warpgroup == index)(role)

    num_parts = num_ctas + num_rows
    # The simulator has no unions; nothing is written as one type and read as another.
    union = (lambda *refs: refs) if interpret else plgpu.RefUnion

    def stages(dtype, transforms):
        return [
            plgpu.SMEM((columns, width), dtype, transforms=transforms)
            for width in VALUE_WIDTHS
        ]

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((num_rows, columns, LATENT_DIM), q.dtype),
            jax.ShapeDtypeStruct((num_rows, columns), jnp.float32),
            jax.ShapeDtypeStruct((num_parts, columns, LATENT_DIM), jnp.float32),
            jax.ShapeDtypeStruct((num_parts, columns), jnp.float32),
        ),
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="mla_decode_narrow",
        scratch_types=[
            plgpu.SMEM((1, columns, ROW_DIM), jnp.bfloat16, transforms=SWIZZLE),
            union(
                plgpu.SMEM((RING, TILE, CHUNK), jnp.bfloat16, transforms=SWIZZLE),
                stages(jnp.bfloat16, SWIZZLE),
                stages(jnp.float32, SWIZZLE_FLOAT32),
            ),
            plgpu.SMEM((NUM_P, columns, TILE), jnp.bfloat16, transforms=SWIZZLE),
            plgpu.SMEM((NUM_P, columns), jnp.float32),
            plgpu.SMEM((columns,), jnp.float32),
            plgpu.SMEM((columns,), jnp.float32),
            plgpu.Barrier(num_barriers=RING, num_arrivals=num_pieces),
            plgpu.Barrier(num_barriers=RING),
            plgpu.Barrier(num_barriers=NUM_P),
            plgpu.Barrier(num_barriers=NUM_P),
            plgpu.Barrier(),
            plgpu.Barrier(),
            plgpu.Barrier(),
            plgpu.Barrier(),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(q, pool, table, plan.ctas, plan.rows, block_offset)
