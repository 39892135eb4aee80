"""MLA decode for 32 query columns a CTA: keys are the rows of the product.

A query column is one head of one query token. With few of them a product that has
queries as its rows would leave most of a 64-row wgmma empty, so everything is
transposed: a tile of 64 tokens gives the 64 rows, the columns are the queries.

    S^T = K q^T      [64 tokens, 32]      warpgroup `scores`, and the softmax; or two
    O^T += V^T P^T   [E, 32]              warpgroup `values`, O^T in registers
    TMA                                   warpgroup `loads`

A tile comes in chunks through a ring in shared memory, so that the loads run tiles
ahead; `values` frees the chunks. What a chunk is, and how it is multiplied, depends on
the rows: `bfloat16_rows.py` and `float8_rows.py`, the argument `rows`.

Legend: C columns, D elements of a row, E of its latent part.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_decode.bfloat16_rows import Bfloat16Rows
from pallas_kernels.mla_decode.config import (
    NO_MAXIMUM,
    SWIZZLE_32_BITS,
    TILE,
    Call,
    zeros,
)
from pallas_kernels.mla_decode.float8_rows import Float8Rows
from pallas_kernels.mla_decode.merge import Results
from pallas_kernels.mla_decode.pages import piece_size, pieces_per_tile
from pallas_kernels.mla_decode.softmax import LOG2E, inverse_sum, log_sum_exp
from pallas_kernels.mla_decode.words import reduce_tokens
from pallas_kernels.mla_decode.work import Sources, work_of

NUM_P = 2
# Numbers that a reduction over the tokens of a tile needs at hand: the least, and so
# many that it is done in one go.
MIN_SCRATCH, SCRATCH = 256, 1024

Rows = Bfloat16Rows | Float8Rows

TILE_LAYOUT = plgpu.Layout.WGMMA
COLUMN_LAYOUT = plgpu.Layout.WGMMA.reduce(0)


def attend(q, pool, sources: Sources, call: Call, rows: Rows) -> Results:
    """Attend all rows.

    Args:
      q: Query columns ``[rows, operands, C, D]``, as ``rows`` prepares them.
      pool: Pieces ``[num_pieces, piece, D]``, of the storage dtype of ``rows``.
      sources: What says where to find the tokens of rows.
      call: What is fixed.
      rows: What holds and multiplies rows of their dtype and sizes.

    Returns:
      Outputs ``[rows, C, E]`` of the output dtype of ``rows``, and log-sum-exps. In the
      simulator, rows of several parts are left to be merged.
    """
    interpret, columns = call.interpret, call.group_columns
    scorers = rows.scorers
    scale2 = call.softmax_scale * LOG2E
    # Of maxima, in base 2: two scorers keep powers of two.
    unit = scale2 if scorers == 1 else 1.0
    piece = piece_size(call.page_size)

    def body(
        q_ref,
        pool_ref,
        sources,
        *refs,
    ):
        results, refs = Results(*refs[:4]), refs[4:]
        q_smem, ring_union, stage_smems, (p_smem, p_scratch) = refs[:4]
        scale_smem, sum_smem, max_smem, scratch_smem = refs[4:8]
        loaded, freed, p_ready, p_freed = refs[8:12]
        sums_ready, sums_freed, q_ready, q_freed = refs[12:]
        ring_smem, part_stage_smems = ring_union
        warpgroup = lax.axis_index("warpgroup")
        work = work_of(call, sources, results, group=lax.axis_index("group"), signals=1)

        def no_maximum():
            maximum = jnp.full((columns,), NO_MAXIMUM, jnp.float32)
            return plgpu.layout_cast(maximum, COLUMN_LAYOUT)

        def slots_of(tile):
            first = tile * rows.chunks
            return tuple(lax.rem(first + c, rows.ring) for c in range(rows.chunks))

        def over_columns(x, shape):
            return lax.broadcast_in_dim(x, shape, [1])

        def over_tokens(kind, x, scratch):
            if interpret:
                return x.max(axis=0) if kind == "max" else x.sum(axis=0)
            return reduce_tokens(kind, x, scratch)

        def scores(me):
            """Attend every tile, or every second one if there are two of this role."""
            plgpu.set_max_registers(rows.registers["scores"], action="decrease")

            def attend_part(index, part, done):
                plgpu.barrier_wait(q_ready)
                skipped = lax.rem(done + me, scorers)

                def attend_tile(step, state):
                    maximum, total, zero = state
                    i = step * scorers + skipped
                    # Always 0, which the compiler cannot know: it would hoist the
                    # descriptors of all operands out of the loop, and spill them.
                    zero = jnp.maximum(zero, i - (1 << 30))
                    tile = done + i
                    slots = slots_of(tile)
                    s = rows.score(
                        q_smem,
                        ring_smem,
                        slots,
                        lambda slot: plgpu.barrier_wait(loaded.at[slot]),
                        zero,
                        interpret=interpret,
                    )
                    start = (part.first + i) * TILE
                    s = work.hide(s, part, start, part.kv_len, token_axis=0)
                    p_slot = lax.rem(tile, NUM_P)

                    def wait_for_slot():
                        @pl.when(tile >= NUM_P)
                        def _():
                            plgpu.barrier_wait(p_freed.at[p_slot])

                    if isinstance(rows, Bfloat16Rows):
                        wait_for_slot()
                        tile_maximum = over_tokens("max", s, p_scratch.at[p_slot])
                        new_maximum = jnp.maximum(maximum, tile_maximum)
                        reference = new_maximum * scale2
                    else:
                        reference = rows.references(
                            s, scale2, scratch_smem.at[me], interpret=interpret
                        )
                        new_maximum = jnp.maximum(maximum, reference)
                    shift = reference - rows.weight_log2
                    p = jnp.exp2(s * scale2 - over_columns(shift, s.shape))
                    valid = part.kv_len - start

                    @pl.when(valid < TILE)
                    def _():
                        rows.clear_values(ring_smem, slots, valid)

                    if scorers == 2:
                        wait_for_slot()
                    decay = jnp.exp2((maximum - new_maximum) * unit)
                    rows.store_weights(
                        p_smem.at[p_slot],
                        scale_smem.at[p_slot],
                        p,
                        decay if scorers == 1 else reference,
                        interpret=interpret,
                    )
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(p_ready.at[p_slot])
                    if scorers == 2:
                        factor = jnp.exp2(reference - new_maximum)
                        p = p * over_columns(factor, s.shape)
                    total = total * over_columns(decay, s.shape) + p
                    return new_maximum, total, zero

                steps = lax.div(part.tiles - skipped + (scorers - 1), scorers)
                maximum, total, _ = lax.fori_loop(
                    0,
                    steps,
                    attend_tile,
                    (no_maximum(), zeros((TILE, columns), TILE_LAYOUT), work.zero()),
                )
                plgpu.barrier_arrive(q_freed)

                @pl.when(index > 0)
                def _():
                    plgpu.barrier_wait(sums_freed)

                total = over_tokens("add", total, scratch_smem.at[me])
                sum_smem.at[me][...] = total * 2.0**-rows.weight_log2
                max_smem.at[me][...] = maximum
                plgpu.barrier_arrive(sums_ready)
                return done + part.tiles

            count, ends, done = work.for_each_part(attend_part, jnp.int32(0))
            if me == 0:
                work.merge(ends, 0)
            if interpret:  # the simulator wants every arrival to be waited for

                @pl.when(count > 0)
                def _():
                    plgpu.barrier_wait(sums_freed)

                for ago in range(NUM_P, 0, -1):

                    @pl.when((done >= ago) & (lax.rem(done - ago + me, scorers) == 0))
                    def _(ago=ago):
                        plgpu.barrier_wait(p_freed.at[lax.rem(done - ago, NUM_P)])

        def sums_of_scorers():
            totals, maxima = (
                [plgpu.load(x.at[k], layout=COLUMN_LAYOUT) for k in range(scorers)]
                for x in (sum_smem, max_smem)
            )
            if scorers == 1:
                return totals[0], maxima[0]
            maximum = jnp.maximum(*maxima)
            decays = [jnp.exp2(x - maximum) for x in maxima]
            total = totals[0] * decays[0] + totals[1] * decays[1]
            return total, maximum * (1.0 / scale2)

        def values():
            plgpu.set_max_registers(rows.registers["values"], action="increase")
            count = work.num_parts()

            def attend_part(index, part, done):
                def attend_tile(i, state):
                    accs, maximum = state
                    tile = done + i
                    p_slot = lax.rem(tile, NUM_P)
                    plgpu.barrier_wait(p_ready.at[p_slot])
                    decay = plgpu.load(scale_smem.at[p_slot], layout=COLUMN_LAYOUT)
                    factor = None
                    if scorers == 2:
                        reference, before = decay, maximum
                        maximum = jnp.maximum(before, reference)
                        decay = jnp.exp2(before - maximum)
                        factor = jnp.exp2(reference - maximum - rows.weight_log2)
                    accs = rows.add_weighted(
                        accs,
                        ring_smem,
                        slots_of(tile),
                        p_smem.at[p_slot],
                        lambda slot: plgpu.barrier_arrive(freed.at[slot]),
                        decay,
                        factor,
                        interpret=interpret,
                    )
                    plgpu.barrier_arrive(p_freed.at[p_slot])
                    return accs, maximum

                no_sums = tuple(
                    zeros((width, columns), TILE_LAYOUT)
                    for _, _, width in rows.accumulators
                )
                accs, _ = lax.fori_loop(
                    0, part.tiles, attend_tile, (no_sums, no_maximum())
                )
                plgpu.barrier_wait(sums_ready)
                total, maximum = sums_of_scorers()
                plgpu.barrier_arrive(sums_freed)
                inverse = inverse_sum(total)
                lse = log_sum_exp(maximum, total, call.softmax_scale)
                accs = tuple(
                    acc * lax.broadcast_in_dim(inverse, acc.shape, [1]) for acc in accs
                )

                def turned(x):
                    return plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)

                def copy_out(pieces, stages, staged_smems, to_ref):
                    """Through shared memory: rows of a few bytes make slow stores."""
                    for k, (first, width) in enumerate(stages):
                        for stage, start, x in pieces:
                            if stage == k:
                                at = pl.ds(start, x.shape[0])
                                to = staged_smems[k].at[:, at].transpose((1, 0))
                                to[...] = turned(x)
                        plgpu.commit_smem()
                        to = to_ref.at[:, pl.ds(first, width)]
                        plgpu.copy_smem_to_gmem(staged_smems[k], to)

                pieces = [
                    (stage, start, acc)
                    for (stage, start, _), acc in zip(
                        rows.accumulators, accs, strict=True
                    )
                ]

                def store_row(to_ref, to_lse_ref):
                    to_lse_ref[...] = lse
                    # The row before has left.
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    outputs = rows.outputs(accs, interpret=interpret)
                    copy_out(outputs, rows.stages, stage_smems, to_ref)

                def store_part(to_ref, to_lse_ref):
                    to_lse_ref[...] = lse

                    # The ring is free after the last part.
                    @pl.when(index == count - 1)
                    def _():
                        copy_out(pieces, rows.part_stages, part_stage_smems, to_ref)
                        plgpu.wait_smem_to_gmem(0)

                    @pl.when(index < count - 1)
                    def _():
                        for stage, start, acc in pieces:
                            start += rows.part_stages[stage][0]
                            to = to_ref.at[:, pl.ds(start, acc.shape[0])]
                            to.transpose((1, 0))[...] = turned(acc)

                work.store(part, store_row, store_part)
                return done + part.tiles

            ends = work.for_each_part(attend_part, jnp.int32(0))[1]
            plgpu.wait_smem_to_gmem(0)
            work.merge(ends, 1)

        def loads():
            plgpu.set_max_registers(rows.registers["loads"], action="decrease")
            starts = work.starts()

            def attend_part(index, part, done):
                def load_queries():
                    @pl.when(index > 0)
                    def _():
                        plgpu.barrier_wait(q_freed)

                    for k in range(q.shape[1]):
                        plgpu.copy_gmem_to_smem(
                            q_ref.at[part.row, k, work.columns], q_smem.at[k], q_ready
                        )

                def load_tile(i, pieces):
                    # The ids of the next tile arrive while this one is loaded.
                    following = work.pieces(part, part.first + i + 1)
                    for c, slot in enumerate(slots_of(done + i)):

                        @pl.when((done + i) * rows.chunks + c >= rows.ring)
                        def _(slot=slot):
                            plgpu.barrier_wait(freed.at[slot])

                        for k, source in enumerate(pieces):
                            plgpu.copy_gmem_to_smem(
                                rows.chunk_of(pool_ref.at[source], c),
                                ring_smem.at[slot, pl.ds(k * piece, piece)],
                                loaded.at[slot],
                            )
                    # Behind a tile, which need not wait for the part before.
                    pl.when(i == 0)(load_queries)
                    return following

                pieces = work.first_pieces(index, part, starts)
                lax.fori_loop(0, part.tiles, load_tile, pieces)
                return done + part.tiles

            state = work.for_each_part(attend_part, jnp.int32(0))
            count, done = state[0], state[2]
            work.clear_empty_rows()
            if interpret:  # the simulator wants every arrival to be waited for

                @pl.when(count > 0)
                def _():
                    plgpu.barrier_wait(q_freed)

                for ago in range(rows.ring, 0, -1):

                    @pl.when(done * rows.chunks >= ago)
                    def _(ago=ago):
                        chunk = done * rows.chunks - ago
                        plgpu.barrier_wait(freed.at[lax.rem(chunk, rows.ring)])

        roles = [functools.partial(scores, me) for me in range(scorers)]
        for index, role in enumerate((*roles, values, loads)):
            pl.when(warpgroup == index)(role)

    # The simulator has no unions; nothing is written as one type and read as another.
    union = (lambda *refs: refs) if interpret else plgpu.RefUnion

    def stage_smems(stages, dtype, transforms):
        return [
            plgpu.SMEM((columns, width), dtype, transforms=transforms)
            for _, width in stages
        ]

    q_smem, ring_smem, p_smem = rows.scratch(NUM_P)
    return Results(
        *plgpu.kernel(
            body,
            out_type=call.results(rows.output_dtype, rows.output_width),
            grid=(call.num_groups, call.num_ctas),
            grid_names=("group", "cta"),
            num_threads=scorers + 2,
            thread_name="warpgroup",
            kernel_name="mla_decode_narrow",
            scratch_types=[
                q_smem,
                union(
                    ring_smem,
                    stage_smems(rows.part_stages, jnp.float32, SWIZZLE_32_BITS),
                ),
                stage_smems(rows.stages, rows.output_dtype, rows.output_swizzle),
                union(
                    p_smem,
                    plgpu.SMEM((NUM_P, SCRATCH), jnp.float32),
                ),
                plgpu.SMEM((NUM_P, columns), jnp.float32),
                plgpu.SMEM((scorers, columns), jnp.float32),
                plgpu.SMEM((scorers, columns), jnp.float32),
                plgpu.SMEM((scorers, MIN_SCRATCH), jnp.float32),
                plgpu.Barrier(
                    num_barriers=rows.ring,
                    num_arrivals=pieces_per_tile(call.page_size),
                ),
                plgpu.Barrier(num_barriers=rows.ring),
                plgpu.Barrier(num_barriers=NUM_P),
                plgpu.Barrier(num_barriers=NUM_P),
                plgpu.Barrier(num_arrivals=scorers),
                plgpu.Barrier(),
                plgpu.Barrier(num_arrivals=q.shape[1]),
                plgpu.Barrier(num_arrivals=scorers),
            ],
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=interpret,
        )(q, pool, sources)
    )
