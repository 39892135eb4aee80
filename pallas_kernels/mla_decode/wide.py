"""MLA decode for 64 query columns a CTA: queries are the rows of the product.

The output of 64 queries is up to 64 x 512 float32, half of which is all that a
warpgroup can hold. So two warpgroups hold half of the latent elements each and take
turns:

    even   scores of tiles 0, 2, 4, ...      first half of the output elements
    odd    scores of tiles 1, 3, 5, ...      second half

A tile's weights are needed by both: each writes its own over the rope part of its tile,
which nobody needs after the scores. The running maximum goes down the chain of tiles,
from the even to the odd warpgroup within a pair of tiles, and back with the next pair,
so that one computes exponentials while the other multiplies.

Shared memory holds one pair of tiles beside the queries, so a load starts only when
its predecessor is used up; the pair after it is fetched into the L2 cache meanwhile.
With 128 columns the two CTAs of a row are a cluster, and each loads half of every
tile for both.

Source: the division of the output is that of FlashMLA's Hopper decode kernel.
"""

import functools
import itertools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_decode.config import (
    ACC,
    NO_MAXIMUM,
    ROPE_DIM,
    SWIZZLE,
    TILE,
    Call,
    store,
    zeros,
)
from pallas_kernels.mla_decode.merge import Results
from pallas_kernels.mla_decode.pages import piece_size, pieces_per_tile
from pallas_kernels.mla_decode.softmax import (
    LOG2E,
    add_products,
    clear_tail,
    inverse_sum,
    log_sum_exp,
)
from pallas_kernels.mla_decode.work import Sources, work_of

ROPE = 2
"""Index of the rope part among the chunks of a tile."""

REGISTERS = {"compute": 232, "loads": 40}

TILE_LAYOUT = plgpu.Layout.WGMMA
ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)


def attend(q, pool, sources: Sources, call: Call) -> Results:
    """Attend all rows, of bfloat16.

    Arguments and results are those of `narrow.attend`, with query columns ``[rows, C,
    D]`` in groups of 64.
    """
    interpret, columns = call.interpret, call.group_columns
    groups = call.num_groups
    latent_dim, half = call.latent_dim, call.latent_dim // 2
    # Start and width of the chunks of a tile.
    chunks = ((0, half), (half, half), (latent_dim, ROPE_DIM))
    # The simulator has no clusters.
    is_paired = groups % 2 == 0 and not interpret
    scale2 = call.softmax_scale * LOG2E
    piece = piece_size(call.page_size)

    def body(
        q_ref,
        pool_ref,
        sources,
        *refs,
    ):
        results, refs = Results(*refs[:4]), refs[4:]
        q_smem, latent_smem, rope_smem, max_smem, sum_smem = refs[:5]
        loaded, freed, max_ready, p_ready, both_done, q_ready, q_freed = refs[5:]
        group = lax.axis_index("group")
        if is_paired:
            group = group * 2 + lax.axis_index("peer")
        warpgroup = lax.axis_index("warpgroup")
        work = work_of(call, sources, results, group=group, signals=2)

        def barrier_of(tile, chunk):
            return tile * len(chunks) + chunk

        def spread(per_row, shape):
            return lax.broadcast_in_dim(per_row, shape, [0])

        def compute(me):
            other = 1 - me
            plgpu.set_max_registers(REGISTERS["compute"], action="increase")

            def add_weighted(acc, tiles, zero):
                """Add the products of weights with my half of tiles, and free these."""

                def release():
                    for k, (tile, _) in enumerate(tiles):
                        if not interpret:
                            plgpu.wgmma_wait(len(tiles) - 1 - k)
                        plgpu.barrier_arrive(freed.at[barrier_of(tile, me)])

                products = [(weights, (tile + zero, me)) for tile, weights in tiles]
                return add_products(
                    acc, latent_smem, products, release, interpret=interpret
                )

            def attend_part(_index, part, _):
                plgpu.barrier_wait(q_ready)
                num_pairs = lax.div(part.tiles + 1, 2)
                end = jnp.minimum(part.kv_len, (part.first + part.tiles) * TILE)

                def attend_pair(i, state):
                    acc, maximum, total, zero = state
                    # Always 0, which the compiler cannot know: it would hoist the
                    # descriptors of all operands out of the loop, and spill them.
                    zero = jnp.maximum(zero, i - (1 << 30))

                    def multiply(acc_ref):
                        for c, (start, width) in enumerate(chunks):
                            plgpu.barrier_wait(loaded.at[barrier_of(me, c)])
                            keys = (
                                rope_smem.at[me + zero]
                                if c == ROPE
                                else latent_smem.at[me + zero, c]
                            )
                            plgpu.wgmma(
                                acc_ref,
                                q_smem.at[zero, :, pl.ds(start, width)],
                                keys.transpose((1, 0)),
                            )
                        return acc_ref[...]

                    s = pl.run_scoped(multiply, ACC((columns, TILE), jnp.float32))

                    @pl.when(i == num_pairs - 1)
                    def _():
                        plgpu.barrier_arrive(q_freed)

                    start = (part.first + 2 * i + me) * TILE
                    # An odd number of tiles ends in a pair whose second is not ours.
                    valid = jnp.maximum(end - start, 0)
                    s = work.hide(s, part, start, end, token_axis=1)
                    tile_maximum = s.max(axis=1)
                    if me == 0:
                        before = maximum
                    else:
                        plgpu.barrier_wait(max_ready)
                        before = plgpu.load(max_smem.at[0], layout=ROW_LAYOUT)
                    mine = jnp.maximum(before, tile_maximum)
                    max_smem.at[me][...] = mine
                    if me == 0:
                        plgpu.barrier_arrive(max_ready)
                    p = jnp.exp2(s * scale2 - spread(mine * scale2, s.shape))
                    p_short = p.astype(jnp.bfloat16)

                    @pl.when(valid < TILE)
                    def _():
                        for c in range(ROPE):
                            clear_tail(latent_smem.at[me + zero, c], valid, half)

                    rope_smem.at[me][...] = p_short
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(p_ready.at[me])
                    decay = jnp.exp2((maximum - mine) * scale2)
                    total = total * decay + p.sum(axis=1)
                    acc = acc * spread(decay, acc.shape)

                    def take_weights():
                        plgpu.barrier_wait(p_ready.at[other])
                        weights = plgpu.load(rope_smem.at[other], layout=TILE_LAYOUT)
                        plgpu.barrier_arrive(freed.at[barrier_of(other, ROPE)])
                        return weights

                    if me == 1:
                        theirs = take_weights().astype(jnp.float32)
                        decay = jnp.exp2((before - mine) * scale2)
                        theirs = theirs * spread(decay, theirs.shape)
                        theirs = theirs.astype(jnp.bfloat16)

                        acc = add_weighted(acc, ((0, theirs), (1, p_short)), zero)
                        return acc, mine, total, zero

                    acc = add_weighted(acc, ((0, p_short),), zero)
                    theirs = take_weights()
                    latest = plgpu.load(max_smem.at[1], layout=ROW_LAYOUT)
                    decay = jnp.exp2((mine - latest) * scale2)
                    acc = acc * spread(decay, acc.shape)
                    acc = add_weighted(acc, ((1, theirs),), zero)
                    return acc, latest, total * decay, zero

                def per_row(value):
                    row = jnp.full((columns,), value, jnp.float32)
                    return plgpu.layout_cast(row, ROW_LAYOUT)

                acc, maximum, total, _ = lax.fori_loop(
                    0,
                    num_pairs,
                    attend_pair,
                    (
                        zeros((columns, half), TILE_LAYOUT),
                        per_row(NO_MAXIMUM),
                        per_row(0.0),
                        work.zero(),
                    ),
                )
                sum_smem.at[me][...] = total
                plgpu.barrier_arrive(both_done)
                plgpu.barrier_wait(both_done)
                total = total + plgpu.load(sum_smem.at[other], layout=ROW_LAYOUT)
                acc = acc * spread(inverse_sum(total), acc.shape)
                my_half = pl.ds(me * half, half)

                def store_both(to_ref, to_lse_ref):
                    store(to_ref.at[:, my_half], acc.astype(to_ref.dtype))
                    if me == 0:
                        lse = log_sum_exp(maximum, total, call.softmax_scale)
                        to_lse_ref[...] = lse

                work.store(part, store_both, store_both)

                # The other one has read the sums.
                plgpu.barrier_arrive(both_done)
                plgpu.barrier_wait(both_done)

            ends = work.for_each_part(attend_part, None)[1]
            work.merge(ends, me)

        def loads():
            plgpu.set_max_registers(REGISTERS["loads"], action="decrease")

            def pair_of(part, i):
                # The second tile of the last pair may be none of ours: any will do.
                last = part.tiles - 1
                return tuple(
                    work.pieces(part, part.first + jnp.minimum(2 * i + k, last))
                    for k in range(2)
                )

            def attend_part(index, part, done):
                @pl.when(index > 0)
                def _():
                    plgpu.barrier_wait(q_freed)

                plgpu.copy_gmem_to_smem(
                    q_ref.at[part.row, work.columns], q_smem.at[0], q_ready
                )
                num_pairs = lax.div(part.tiles + 1, 2)

                def load_pair(i, pair):
                    following = pair_of(part, i + 1)
                    for tile, c in itertools.product(range(2), range(len(chunks))):
                        start, width = chunks[c]

                        @pl.when(done + i > 0)
                        def _(tile=tile, c=c):
                            plgpu.barrier_wait(freed.at[barrier_of(tile, c)])

                        for k, source in enumerate(pair[tile]):
                            rows = pl.ds(k * piece, piece)
                            plgpu.copy_gmem_to_smem(
                                pool_ref.at[source, :, pl.ds(start, width)],
                                rope_smem.at[tile, rows]
                                if c == ROPE
                                else latent_smem.at[tile, c, rows],
                                loaded.at[barrier_of(tile, c)],
                                collective_axes="peer" if is_paired else None,
                            )
                    if not interpret:
                        for tile in range(2):
                            for source in following[tile]:
                                for start, width in chunks:
                                    plgpu.async_prefetch(
                                        pool_ref.at[source, :, pl.ds(start, width)],
                                        collective_axes="peer" if is_paired else None,
                                    )
                    return following

                lax.fori_loop(0, num_pairs, load_pair, pair_of(part, 0))
                return done + num_pairs

            done = work.for_each_part(attend_part, jnp.int32(0))[2]
            work.clear_empty_rows()
            # The simulator wants every arrival to be waited for, and a CTA of a
            # cluster must not leave before the last arrival of its peer.
            if interpret or is_paired:

                @pl.when(done > 0)
                def _():
                    plgpu.barrier_wait(q_freed)
                    for k in range(2 * len(chunks)):
                        plgpu.barrier_wait(freed.at[k])

        for me in range(2):
            pl.when(warpgroup == me)(functools.partial(compute, me))
        pl.when(warpgroup == 2)(loads)

    num_chunks = 2 * len(chunks)
    row_dim = latent_dim + ROPE_DIM
    if is_paired:
        grid = {
            "grid": (groups // 2, call.num_ctas),
            "grid_names": ("group", "cta"),
            "cluster": (2,),
            "cluster_names": ("peer",),
        }
        freed = plgpu.ClusterBarrier(collective_axes=("peer",), num_barriers=num_chunks)
    else:
        grid = {"grid": (groups, call.num_ctas), "grid_names": ("group", "cta")}
        freed = plgpu.Barrier(num_barriers=num_chunks)
    return Results(
        *plgpu.kernel(
            body,
            out_type=call.results(jnp.bfloat16, latent_dim),
            **grid,
            num_threads=3,
            thread_name="warpgroup",
            kernel_name="mla_decode_wide",
            scratch_types=[
                plgpu.SMEM((1, columns, row_dim), jnp.bfloat16, transforms=SWIZZLE),
                plgpu.SMEM((2, 2, TILE, half), jnp.bfloat16, transforms=SWIZZLE),
                plgpu.SMEM((2, TILE, ROPE_DIM), jnp.bfloat16, transforms=SWIZZLE),
                plgpu.SMEM((2, columns), jnp.float32),
                plgpu.SMEM((2, columns), jnp.float32),
                plgpu.Barrier(
                    num_barriers=num_chunks,
                    num_arrivals=pieces_per_tile(call.page_size),
                ),
                freed,
                plgpu.Barrier(),
                plgpu.Barrier(num_barriers=2),
                plgpu.Barrier(num_arrivals=2),
                plgpu.Barrier(),
                plgpu.Barrier(num_arrivals=2),
            ],
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=interpret,
        )(q, pool, sources)
    )
