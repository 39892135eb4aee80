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


def piece_shape(parts: int) -> tuple[int, int, int]:
    """What a warpgroup has in flight at once: columns, elements, parts.

    With two parts or so for a row there are many rows, and work for everybody; with
    many parts there are few rows, and their columns must be cut.
    """
    if parts <= 3:
        return 4, LATENT_DIM, 2
    if parts <= 12:
        return 1, LATENT_DIM, 8
    return 1, 128, 16


def merge(
    out, lse, part_out, part_lse, plan, *, num_parts: int, num_ctas: int, interpret
):
    """Write the merged rows over ``out`` and ``lse``.

    Each row is shared by a fixed number of warpgroups, which read its number of parts
    and mostly find that there is nothing to do.

    Args:
      out: ``[rows, columns, latent_dim]``, right where a row has one part.
      lse: ``[rows, columns]``, likewise.
      part_out: Partial outputs by part id, float32.
      part_lse: Their natural log-sum-exps.
      plan: The plan of the batch.
      num_parts: How many parts a row is expected to have.
      num_ctas: CTAs that share the work.
      interpret: Parameters of the simulator, or False.
    """
    num_rows, columns, _ = out.shape
    piece_columns, width, unroll = piece_shape(num_parts)
    slices = LATENT_DIM // width
    pieces = columns // piece_columns * slices
    workers = num_ctas * WARPGROUPS
    sharers = max(1, min(workers // num_rows, pieces))
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=width // 128)

    def body(part_out_ref, part_lse_ref, rows_ref, out_ref, lse_ref):
        worker = lax.axis_index("cta") * WARPGROUPS + lax.axis_index("warpgroup")

        def steps_of(total, first, stride):
            return lax.div(jnp.maximum(total - first + (stride - 1), 0), stride)

        def merge_piece(row, count, first, piece):
            first_column = lax.div(piece, slices) * piece_columns
            start = lax.rem(piece, slices) * width

            def add_to(sums, column, ids, parts):
                acc, total, maximum = sums
                values, lses = [], []
                for index, part in zip(ids, parts, strict=True):
                    part_ref = part_out_ref.at[part, column, pl.ds(start, width)]
                    values.append(plgpu.load(part_ref, layout=layout, optimized=False))
                    part_lse = part_lse_ref[part, column]
                    lses.append(jnp.where(index < count, part_lse, -jnp.inf))
                new_maximum = functools.reduce(jnp.maximum, lses, maximum)
                decay = jnp.exp2((maximum - new_maximum) * LOG2E)
                acc, total = acc * decay, total * decay
                for value, part_lse in zip(values, lses, strict=True):
                    weight = jnp.exp2((part_lse - new_maximum) * LOG2E)
                    acc, total = acc + value * weight, total + weight
                return acc, total, new_maximum

            def add_parts(step, sums):
                ids = [step * unroll + k for k in range(unroll)]
                parts = [first + jnp.minimum(i, count - 1) for i in ids]
                return tuple(
                    add_to(sums[k], first_column + k, ids, parts)
                    for k in range(piece_columns)
                )

            zero = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), layout)
            sums = lax.fori_loop(
                0,
                steps_of(count, 0, unroll),
                add_parts,
                ((zero, jnp.float32(0), jnp.float32(NO_MAXIMUM)),) * piece_columns,
            )
            for k, (acc, total, maximum) in enumerate(sums):
                column = first_column + k
                merged = (acc * inverse_sum(total)).astype(out.dtype)
                out_ref[row, column, pl.ds(start, width)] = merged

                @pl.when(start == 0)
                def _(column=column, total=total, maximum=maximum):
                    lse_ref[row, column] = jnp.where(
                        total == 0.0, -jnp.inf, maximum + jnp.log(total)
                    )

        def merge_share(step, _):
            item = worker + step * workers
            row, share = lax.div(item, sharers), lax.rem(item, sharers)
            count, first = merge_record(rows_ref, row)

            @pl.when(count != 1)
            def _():
                lax.fori_loop(
                    0,
                    steps_of(pieces, share, sharers),
                    lambda i, _: merge_piece(row, count, first, share + i * sharers),
                    None,
                )

        steps = steps_of(num_rows * sharers, worker, workers)
        lax.fori_loop(0, steps, merge_share, None)

    out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
    plgpu.kernel(
        body,
        out_type=(),
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        kernel_name="mla_decode_merge",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(part_out, part_lse, plan.rows, out_ref, lse_ref)
    return jax.freeze(out_ref), jax.freeze(lse_ref)
