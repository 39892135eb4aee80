"""Expansion of latent rows into keys and values, head by head (Pallas Mosaic GPU).

The product ``[places, latent] x [heads, width, latent]``, written as ``[heads, places,
width]``: the rows of one head lie next to each other, as the attention reads them.
XLA's products would write all heads of a place next to each other.

A CTA computes 128 places of one head at a time, a warpgroup 64 of them; a third
warpgroup brings the operands, 64 latent columns at a time. CTAs are persistent. Two
that share the weights of a head as a cluster are no faster on an H200.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int32

from pallas_kernels.extend.config import COLUMN_TILE, NUM_CONSUMERS, WARPGROUP_ROWS
from pallas_kernels.extend.kernel import SWIZZLED
from pallas_kernels.extend.products import ACC

TILE = WARPGROUP_ROWS * NUM_CONSUMERS
"""Places that a CTA expands at a time."""

MAX_WIDTH = 256
"""Columns of a product."""

STAGES = 3
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232


def expand_heads(
    latents: Float[Array, "places row_width"],
    weights: Float[Array, "heads width latent_dim"],
    num_places: Int32[Array, ""],
    *,
    num_ctas: int = 132,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> Float[Array, "heads places width"]:
    """Expand the first places of some latent rows.

    Args:
      latents: Rows, bfloat16, a multiple of 128 of them; their first ``latent_dim``
        columns are expanded.
      weights: What they are multiplied with, bfloat16; ``width`` is a multiple of 64
        up to 256, ``latent_dim`` one of 64.
      num_places: Places that are expanded, and up to 127 more, of those that there
        are; what the others get is not defined.
      num_ctas: Persistent CTAs, one per multiprocessor.
      interpret: Simulate the kernel on the CPU, for tests.

    Returns:
      Keys and values, bfloat16.

    Raises:
      ValueError: Sizes that the kernel does not have.
    """
    max_places, row_width = latents.shape
    _, width, latent_dim = weights.shape
    if max_places % TILE or width % COLUMN_TILE or latent_dim % COLUMN_TILE:
        raise ValueError(
            f"{max_places=} must be a multiple of {TILE}, {width=} and {latent_dim=} "
            f"of {COLUMN_TILE}"
        )
    if width > MAX_WIDTH or latent_dim > row_width:
        raise ValueError(
            f"{width=} must be up to {MAX_WIDTH}, {latent_dim=} up to {row_width}"
        )
    simulator = plgpu.InterpretGPUParams() if interpret is True else interpret
    return _expand(latents, weights, num_places, num_ctas, simulator)


# One function for all layers: it is lowered once.
@functools.partial(jax.jit, static_argnums=(3, 4))
def _expand(
    latents: jax.Array,
    weights: jax.Array,
    num_places: jax.Array,
    num_ctas: int,
    interpret: Any,
) -> jax.Array:
    max_places = latents.shape[0]
    num_heads, width, latent_dim = weights.shape
    steps = latent_dim // COLUMN_TILE
    dtype = latents.dtype

    def body(
        latents_ref,
        weights_ref,
        places_ref,
        out_ref,
        latents_smem,
        weights_smem,
        out_smem,
        full,
        empty,
    ):
        warpgroup = lax.axis_index("warpgroup")
        cta = lax.axis_index("cta")
        wanted = jnp.minimum(places_ref[0], max_places)
        items = lax.div(wanted + (TILE - 1), TILE) * num_heads
        count = lax.div(jnp.maximum(items - cta + (num_ctas - 1), 0), num_ctas)

        def place_of(i):
            """Return the head and the first place of the i-th tile of this CTA."""
            item = cta + i * num_ctas
            place = pl.multiple_of(lax.div(item, num_heads) * TILE, TILE)
            return lax.rem(item, num_heads), place

        @pl.when(warpgroup == NUM_CONSUMERS)
        def _():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def bring(n, _):
                head, place = place_of(lax.div(n, steps))
                column = pl.multiple_of(lax.rem(n, steps) * COLUMN_TILE, COLUMN_TILE)
                columns = pl.ds(column, COLUMN_TILE)
                slot = lax.rem(n, STAGES)
                pl.when(n >= STAGES)(lambda: plgpu.barrier_wait(empty.at[slot]))
                plgpu.copy_gmem_to_smem(
                    latents_ref.at[pl.ds(place, TILE), columns],
                    latents_smem.at[slot],
                    full.at[slot],
                )
                plgpu.copy_gmem_to_smem(
                    weights_ref.at[head, :, columns],
                    weights_smem.at[slot],
                    full.at[slot],
                )

            total = count * steps
            lax.fori_loop(0, total, bring, None)
            # The simulator wants every arrival to be waited for.
            for back in range(STAGES, 0, -1):
                slot = lax.rem(jnp.maximum(total - back, 0), STAGES)
                pl.when(total >= back)(
                    lambda slot=slot: plgpu.barrier_wait(empty.at[slot])
                )

        @pl.when(warpgroup != NUM_CONSUMERS)
        def _():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            my_rows = pl.ds(
                pl.multiple_of(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS),
                WARPGROUP_ROWS,
            )

            def expand(i, _):
                head, place = place_of(i)

                def multiply(acc_ref):
                    def step(k, _):
                        n = i * steps + k
                        slot = lax.rem(n, STAGES)
                        plgpu.barrier_wait(full.at[slot])
                        plgpu.wgmma(
                            acc_ref,
                            latents_smem.at[slot, my_rows],
                            weights_smem.at[slot].transpose((1, 0)),
                        )
                        if not interpret:
                            plgpu.wgmma_wait(1)

                        @pl.when(k > 0)
                        def _():
                            plgpu.barrier_arrive(empty.at[lax.rem(n - 1, STAGES)])

                    lax.fori_loop(0, steps, step, None)
                    found = acc_ref[...]
                    last = lax.rem(i * steps + (steps - 1), STAGES)
                    plgpu.barrier_arrive(empty.at[last])
                    return found

                acc = ACC((WARPGROUP_ROWS, width), jnp.float32)
                found = pl.run_scoped(multiply, acc).astype(dtype)
                # The last tile has left the shared memory.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_smem.at[warpgroup][...] = found
                plgpu.commit_smem()
                rows = pl.ds(
                    pl.multiple_of(place + warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS),
                    WARPGROUP_ROWS,
                )
                plgpu.copy_smem_to_gmem(out_smem.at[warpgroup], out_ref.at[head, rows])

            lax.fori_loop(0, count, expand, None)
            plgpu.wait_smem_to_gmem(0, wait_read_only=False)

    def smem(*shape):
        return plgpu.SMEM(shape, dtype, transforms=SWIZZLED)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_heads, max_places, width), dtype),
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=NUM_CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="expand_heads",
        scratch_types=[
            smem(STAGES, TILE, COLUMN_TILE),
            smem(STAGES, width, COLUMN_TILE),
            smem(NUM_CONSUMERS, WARPGROUP_ROWS, width),
            plgpu.Barrier(num_barriers=STAGES, num_arrivals=2),
            plgpu.Barrier(num_barriers=STAGES, num_arrivals=NUM_CONSUMERS),
        ],
        compiler_params=plgpu.CompilerParams(),
        interpret=interpret,
    )(latents, weights, num_places.reshape(1))
