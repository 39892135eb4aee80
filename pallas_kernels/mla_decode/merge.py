"""Sums the parts of rows that several CTAs attended, in the order of the CTAs.

A part is normalised and has a log-sum-exp of its own, so with weights
``w = exp(lse - max lse)`` the row is ``sum(w * part) / sum(w)``. Rows of one part are
left alone; rows of none, which have no tokens, get zeros and ``-inf``.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_decode.config import LATENT_DIM, NO_MAXIMUM
from pallas_kernels.mla_decode.plan import merge_record
from pallas_kernels.mla_decode.softmax import LOG2E, inverse_sum

WARPGROUPS = 4


def merge(out, lse, part_out, part_lse, plan, *, width: int, unroll: int, interpret):
    """Write the merged rows over ``out`` and ``lse``.

    Args:
      out: ``[rows, columns, latent_dim]``, right where a row has one part.
      lse: ``[rows, columns]``, likewise.
      part_out: Partial outputs by part id, float32.
      part_lse: Their natural log-sum-exps.
      plan: The plan of the batch.
      width: Elements of one output that a warpgroup sums.
      unroll: Parts that are loaded at once.
      interpret: Parameters of the simulator, or False.
    """
    num_rows, columns, _ = out.shape
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=width // 128)

    def body(part_out_ref, part_lse_ref, rows_ref, out_ref, lse_ref):
        row = lax.axis_index("row")
        column = lax.axis_index("column") * WARPGROUPS + lax.axis_index("warpgroup")
        start = lax.axis_index("slice") * width
        count, first = merge_record(rows_ref, row)

        def add_parts(step, carry):
            acc, total, maximum = carry
            parts, lses = [], []
            for k in range(unroll):
                index = step * unroll + k
                part = first + jnp.minimum(index, count - 1)
                part_ref = part_out_ref.at[part, column, pl.ds(start, width)]
                parts.append(plgpu.load(part_ref, layout=layout, optimized=False))
                part_lse = part_lse_ref[part, column]
                lses.append(jnp.where(index < count, part_lse, -jnp.inf))
            new_maximum = functools.reduce(jnp.maximum, lses, maximum)
            decay = jnp.exp2((maximum - new_maximum) * LOG2E)
            acc, total = acc * decay, total * decay
            for part, part_lse in zip(parts, lses, strict=True):
                weight = jnp.exp2((part_lse - new_maximum) * LOG2E)
                acc, total = acc + part * weight, total + weight
            return acc, total, new_maximum

        @pl.when(count != 1)
        def _():
            acc, total, maximum = lax.fori_loop(
                0,
                lax.div(count + (unroll - 1), unroll),
                add_parts,
                (
                    plgpu.layout_cast(jnp.zeros((width,), jnp.float32), layout),
                    jnp.float32(0),
                    jnp.float32(NO_MAXIMUM),
                ),
            )
            merged = acc * inverse_sum(total)
            out_ref[row, column, pl.ds(start, width)] = merged.astype(out.dtype)

            @pl.when(start == 0)
            def _():
                lse_ref[row, column] = jnp.where(
                    total == 0.0, -jnp.inf, maximum + jnp.log(total)
                )

    out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
    plgpu.kernel(
        body,
        out_type=(),
        grid=(num_rows, columns // WARPGROUPS, LATENT_DIM // width),
        grid_names=("row", "column", "slice"),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        kernel_name="mla_decode_merge",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(part_out, part_lse, plan.rows, out_ref, lse_ref)
    return jax.freeze(out_ref), jax.freeze(lse_ref)
