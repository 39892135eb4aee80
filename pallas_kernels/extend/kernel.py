"""Attention of packed rows over cached rows, for Hopper (Pallas Mosaic GPU).

A CTA has three warpgroups. Two consume: each holds 64 query tokens of one head, their
outputs and their softmax in registers. The third produces: it brings tiles of queries,
and keys and values page by page, into rings in shared memory by asynchronous copies.

The consumers take turns at issuing products, so that while one of them turns scores
into weights, the products of the other keep the tensor cores busy; and each issues its
product of weights and values together with the scores of the next block.

CTAs are persistent: each goes through the pieces that `schedule` gave it.

What a page holds past the end of its row may be anything, NaN included. Scores are
masked by select; of the values, the rows that no query of the tile sees are zeroed in
shared memory, in the one block where they may be.

Source: Shah et al., FlashAttention-3 (arXiv:2407.08608): warp specialisation,
alternating warpgroups and the order of products within one.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.extend.config import (
    COLUMN_TILE,
    NUM_CONSUMERS,
    WARPGROUP_ROWS,
    Plan,
)
from pallas_kernels.extend.consumer import Consumer
from pallas_kernels.extend.producer import Producer
from pallas_kernels.extend.tile import Ref, Tile

PRODUCER = NUM_CONSUMERS
PRODUCER_REGISTERS = 24
CONSUMER_REGISTERS = 240

# pyright does not see the base class's hook.
SWIZZLED = (
    plgpu.TilingTransform((8, COLUMN_TILE)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)


def attend(
    q: jax.Array,
    sources: tuple[jax.Array, ...],
    offsets: jax.Array,
    table: jax.Array,
    pieces: jax.Array,
    counts: jax.Array,
    sinks: jax.Array,
    *,
    plan: Plan,
    num_tiles: int,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Run the kernel.

    Args:
      q: ``[num_tokens, num_q_heads, key_width]``, at least 64 tokens.
      sources: Arrays of the key sources, then that of the values.
      offsets: int32, for each of them what is added to a table entry, and then a 0.
      table: int32 ``[rows, max_pages]``.
      pieces: What each CTA does, see `pallas_kernels.extend.schedule`.
      counts: How many pieces it has.
      sinks: float32 ``[num_q_heads]``; not read without sinks.
      plan: What is computed, and how.
      num_tiles: Tiles, those that do not exist included.
      interpret: Parameters of the simulator, or False.

    Returns:
      Outputs ``[num_tokens, num_q_heads, value_width]``, and the log-sum-exp by head
      and place, ``[num_q_heads, tiles * block_q]``.
    """
    problem, config = plan.problem, plan.config
    dtype, value_width = q.dtype, problem.value.width
    stages, q_stages = config.stages, config.q_stages

    def smem(*shape: int, transforms: tuple[Any, ...] = SWIZZLED) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    scratch = {
        "q": [
            smem(q_stages, NUM_CONSUMERS, WARPGROUP_ROWS, source.width)
            for source in problem.keys
        ],
        "keys": [
            smem(stages, config.block_kv, source.width) for source in problem.keys
        ],
        "values": smem(stages, config.block_kv, value_width),
        "rows": smem(WARPGROUP_ROWS, value_width, transforms=()),
        "q_full": plgpu.Barrier(
            num_barriers=q_stages, num_arrivals=NUM_CONSUMERS * len(problem.keys)
        ),
        "q_empty": plgpu.Barrier(num_barriers=q_stages, num_arrivals=NUM_CONSUMERS),
        "k_full": plgpu.Barrier(
            num_barriers=stages, num_arrivals=plan.copies * len(problem.keys)
        ),
        "v_full": plgpu.Barrier(num_barriers=stages, num_arrivals=plan.copies),
        "k_empty": plgpu.Barrier(num_barriers=stages, num_arrivals=NUM_CONSUMERS),
        "v_empty": plgpu.Barrier(num_barriers=stages, num_arrivals=NUM_CONSUMERS),
        "turn": plgpu.Barrier(num_barriers=NUM_CONSUMERS),
        "rows_turn": plgpu.Barrier(num_barriers=NUM_CONSUMERS),
        "zeroed": plgpu.Barrier(num_arrivals=NUM_CONSUMERS),
    }
    leaves, structure = jax.tree.flatten(scratch)
    num_sources = len(sources)

    def body(*refs: Ref) -> None:
        q_ref, *source_refs = refs[: 1 + num_sources]
        offsets_ref, table_ref, pieces_ref, counts_ref, sinks_ref, out_ref, lse_ref = (
            refs[1 + num_sources : 8 + num_sources]
        )
        shared = structure.unflatten(refs[8 + num_sources :])
        warpgroup = lax.axis_index("warpgroup")
        cta = lax.axis_index("cta")

        def for_each_tile(visit: Callable[[Tile, Any], Any], carry: Any) -> Any:
            def step(i: jax.Array, carry: Any) -> Any:
                return visit(Tile(plan, pieces_ref, cta, i), carry)

            return lax.fori_loop(0, counts_ref[cta], step, carry)

        @pl.when(warpgroup == PRODUCER)
        def _():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            producer = Producer(
                plan, shared, q_ref, source_refs, offsets_ref, table_ref
            )
            producer.drain(*for_each_tile(producer.visit, producer.start))

        @pl.when(warpgroup != PRODUCER)
        def _():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            consumer = Consumer(
                plan,
                shared,
                warpgroup,
                sinks_ref,
                out_ref,
                lse_ref,
                opaque_zero=offsets_ref[num_sources],
                interpret=bool(interpret),
            )
            consumer.begin()
            for_each_tile(consumer.visit, (jnp.int32(0), jnp.int32(0)))
            consumer.end()

    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((*q.shape[:2], value_width), dtype),
            jax.ShapeDtypeStruct(
                (problem.num_q_heads, num_tiles * plan.block_q), jnp.float32
            ),
        ),
        grid=(pieces.shape[0],),
        grid_names=("cta",),
        num_threads=NUM_CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="extend_attention",
        scratch_types=leaves,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return kernel(q, *sources, offsets, table, pieces, counts, sinks)
