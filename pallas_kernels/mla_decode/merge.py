"""Sums the parts of rows that several CTAs attended, in the order of the CTAs.

A part is normalised and has a log-sum-exp of its own, so with weights
``w = exp(lse - max lse)`` the row is ``sum(w * part) / sum(w)``.

The CTAs of a row do it themselves. Each writes its part, counts it on the semaphore of
the row, and once all parts are counted sums its share of the columns of the row. The
semaphores start at zero with every call. How long a CTA waits for the others, and what
becomes of its share when it does not, is in `arrivals.py`.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_decode.config import NO_MAXIMUM, Call
from pallas_kernels.mla_decode.plan import Plan, merge_record
from pallas_kernels.mla_decode.softmax import LOG2E, inverse_sum
from pallas_kernels.mla_decode.words import pack_bfloat16


class Results(NamedTuple):
    """Where results stand in device memory: arrays, or refs in a kernel.

    Attributes:
      out: ``[rows, columns, latent_dim]`` of bfloat16, or words of two of them. Rows
        of several parts are right once they are merged.
      lse: Natural log-sum-exps ``[rows, columns]``, likewise.
      part_out: Partial outputs by part id, float32; in the case of words the even
        elements, then the odd ones.
      part_lse: Their natural log-sum-exps.
    """

    out: Any
    lse: Any
    part_out: Any
    part_lse: Any


LANES = 128
"""Threads of a warpgroup."""


def run_of(width: int) -> int:
    """Return how many elements of ``width`` a warpgroup has at once: 128, 256, 512."""
    return LANES * math.gcd(width // LANES, 4)


def piece_shape(parts: int, latent_dim: int) -> tuple[int, int, int]:
    """What a warpgroup has in flight at once: columns, elements, parts.

    With two parts or so for a row there are many rows, and work for everybody; with
    many parts there are few rows, and their columns must be cut.
    """
    if parts <= 3:
        return 4, run_of(latent_dim), 2
    if parts <= 12:
        return 1, run_of(latent_dim), 8
    return 1, LANES, 64


def steps_of(total, first, stride):
    """Number of items ``first, first + stride, ...`` below ``total``."""
    return lax.div(jnp.maximum(total - first + (stride - 1), 0), stride)


def merge_row(
    refs: Results,
    row,
    count,
    first,
    *,
    columns,
    worker,
    workers,
    num_parts: int,
    interpret,
):
    """Sum a share of the columns of one row; all its parts are there.

    Args:
      refs: Where the parts are, and the row goes.
      row: The row.
      count: How many parts it has.
      first: The id of the first of them; the others follow.
      columns: First of the columns to merge, and how many.
      worker: This warpgroup among those that share the columns.
      workers: How many they are.
      num_parts: How many parts a row is expected to have.
      interpret: Parameters of the simulator, or False.
    """
    first_column, num_columns = columns
    out_width = refs.out.shape[-1]
    latent_dim = refs.part_out.shape[-1]
    halves = latent_dim // out_width
    piece_columns, width, unroll = piece_shape(num_parts, latent_dim)
    width, unroll = min(width, out_width), unroll // halves
    slices = out_width // width
    pieces = num_columns // piece_columns * slices
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=width // LANES)

    def load_part(part, column, start):
        part_ref = refs.part_out.at[part, column, pl.ds(start, width)]
        return plgpu.load(part_ref, layout=layout, optimized=False)

    def merge_piece(piece):
        start_column = first_column + lax.div(piece, slices) * piece_columns
        start = lax.rem(piece, slices) * width
        starts = [start + half * out_width for half in range(halves)]

        def add_to(sums, column, ids, parts):
            accs, total, maximum = sums
            values, lses = [], []
            for index, part in zip(ids, parts, strict=True):
                values.append([load_part(part, column, at) for at in starts])
                part_lse = refs.part_lse[part, column]
                lses.append(jnp.where(index < count, part_lse, -jnp.inf))
            new_maximum = functools.reduce(jnp.maximum, lses, maximum)
            decay = jnp.exp2((maximum - new_maximum) * LOG2E)
            accs, total = [acc * decay for acc in accs], total * decay
            for value, part_lse in zip(values, lses, strict=True):
                weight = jnp.exp2((part_lse - new_maximum) * LOG2E)
                accs = [a + v * weight for a, v in zip(accs, value, strict=True)]
                total = total + weight
            return accs, total, new_maximum

        def add_parts(step, sums):
            ids = [step * unroll + k for k in range(unroll)]
            parts = [first + jnp.minimum(i, count - 1) for i in ids]
            return [
                add_to(sums[k], start_column + k, ids, parts)
                for k in range(piece_columns)
            ]

        zero = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), layout)
        no_sums = ([zero] * halves, jnp.float32(0), jnp.float32(NO_MAXIMUM))
        sums = lax.fori_loop(
            0, steps_of(count, 0, unroll), add_parts, [no_sums] * piece_columns
        )
        for k, (accs, total, maximum) in enumerate(sums):
            column = start_column + k
            accs = [acc * inverse_sum(total) for acc in accs]
            if halves == 2:
                merged = pack_bfloat16(accs[0], accs[1], layout, interpret=interpret)
            else:
                merged = accs[0].astype(refs.out.dtype)
            refs.out[row, column, pl.ds(start, width)] = merged

            @pl.when(start == 0)
            def _(column=column, total=total, maximum=maximum):
                refs.lse[row, column] = jnp.where(
                    total == 0.0, -jnp.inf, maximum + jnp.log(total)
                )

    lax.fori_loop(
        0,
        steps_of(pieces, worker, workers),
        lambda i, _: merge_piece(worker + i * workers),
        None,
    )


def clear_row(refs: Results, row, columns):
    """Write zeros and ``-inf`` to some columns of a row: their first, and how many."""
    first_column, num_columns = columns
    out_width = refs.out.shape[-1]
    width = run_of(out_width)
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=width // LANES)

    def clear_column(k, _):
        zeros = plgpu.layout_cast(jnp.zeros((width,), refs.out.dtype), layout)
        for start in range(0, out_width, width):
            refs.out[row, first_column + k, pl.ds(start, width)] = zeros
        refs.lse[row, first_column + k] = -jnp.inf

    lax.fori_loop(0, num_columns, clear_column, None)


def merge_apart(results: Results, plan: Plan, call: Call):
    """Sum the parts in a kernel of its own: the simulator has no semaphores."""
    num_rows, columns, _ = results.out.shape

    def body(part_out_ref, part_lse_ref, rows_ref, out_ref, lse_ref):
        cta = lax.axis_index("cta")
        refs = Results(out_ref, lse_ref, part_out_ref, part_lse_ref)

        def merge_if_split(row, _):
            count, first = merge_record(rows_ref, row)

            @pl.when(count > 1)
            def _():
                merge_row(
                    refs,
                    row,
                    count,
                    first,
                    columns=(0, columns),
                    worker=cta,
                    workers=call.num_ctas,
                    num_parts=call.num_parts,
                    interpret=call.interpret,
                )

        lax.fori_loop(0, num_rows, merge_if_split, None)

    out_ref, lse_ref = jax.new_ref(results.out), jax.new_ref(results.lse)
    plgpu.kernel(
        body,
        out_type=(),
        grid=(call.num_ctas,),
        grid_names=("cta",),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="mla_decode_merge",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=call.interpret,
    )(results.part_out, results.part_lse, plan.rows, out_ref, lse_ref)
    return jax.freeze(out_ref), jax.freeze(lse_ref)
