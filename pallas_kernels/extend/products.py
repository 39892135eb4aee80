"""The products of one warpgroup: asynchronous wgmma, or plain products.

On a GPU the product of weights and values and that of queries and keys are in flight
at once. The simulator of the CPU has no accumulators that a loop carries and no
operands in registers, so there the same results come one after the other.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.extend.softmax import Softmax, as_operand

Ref = Any  # what Pallas hands to a kernel

# pyright does not see the export, and takes an accumulator for an array.
ACC: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


class ScoreOperands(NamedTuple):
    """Queries and keys in shared memory: the parts of a score's sum.

    Attributes:
      queries: ``[queries, width]`` for each source of keys.
      keys: ``[keys, width]`` for each of them.
    """

    queries: tuple[Ref, ...]
    keys: tuple[Ref, ...]

    def issue(self, accumulator: Ref) -> None:
        """Start to add the scores to an accumulator."""
        for q, k in zip(self.queries, self.keys, strict=True):
            plgpu.wgmma(accumulator, q, k.transpose((1, 0)))

    @property
    def shape(self) -> tuple[int, int]:
        """Queries and keys."""
        return self.queries[0].shape[0], self.keys[0].shape[0]


def zeros(num_rows: int, num_columns: int) -> jax.Array:
    """Return an accumulator's first value."""
    value = jnp.zeros((num_rows, num_columns), jnp.float32)
    return plgpu.layout_cast(value, plgpu.Layout.WGMMA)


def scores(operands: ScoreOperands, on_issued: Callable[[], None]) -> jax.Array:
    """Return ``q . k`` of a block."""

    def compute(accumulator: Ref) -> jax.Array:
        operands.issue(accumulator)
        on_issued()
        return accumulator[...]

    return pl.run_scoped(compute, ACC(operands.shape, jnp.float32))


def add_values(
    out: jax.Array,
    p: jax.Array,
    values: Ref,
    on_issued: Callable[[], None],
    *,
    interpret: bool,
) -> jax.Array:
    """Return the outputs with a block's weighted values added."""
    if interpret:
        on_issued()
        return out + _plain_product(p, values[...])

    def compute(accumulator: Ref) -> None:
        plgpu.wgmma(accumulator, p, values)
        on_issued()

    return pl.run_state(compute)(ACC.init(out))


def scores_and_values(
    out: jax.Array,
    carried: Softmax,
    operands: ScoreOperands,
    values: Ref,
    update: Callable[[jax.Array], Softmax],
    *,
    on_issued: Callable[[], None],
    on_scores: Callable[[], None],
    interpret: bool,
) -> tuple[jax.Array, Softmax]:
    """Add the last block's weighted values, and turn the next block into weights.

    On a GPU ``update`` runs while the values are being added.

    Args:
      out: Outputs, relative to the maximum before the next block.
      carried: What the last block turned into, its weights as an operand.
      operands: Queries, and keys of the next block.
      values: Values of the last block.
      update: Turns scores of the next block into what is carried, all float32.
      on_issued: Called when both products are in flight.
      on_scores: Called when the keys have been read.
      interpret: Whether the simulator runs this.
    """
    if interpret:
        s = scores(operands, lambda: None)
        out = add_values(out, carried.p, values, on_issued, interpret=True)
        on_scores()
        return out, as_operand(update(s), carried.p.dtype)

    def compute(refs: Any) -> None:
        out_ref, s_ref, *weights_refs = refs
        operands.issue(s_ref)
        plgpu.wgmma(out_ref, carried.p, values)
        on_issued()
        # One group may be in flight, and that is the values'.
        s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
        on_scores()
        for ref, value in zip(weights_refs, update(s), strict=True):
            ref[...] = value

    # The weights are float32 until their predecessors have been multiplied: the
    # registers of an operand in flight must not be written.
    no_scores = zeros(*operands.shape)
    accumulators = ACC.init(out), ACC.init(no_scores)
    weights = no_scores, carried.m, carried.z, carried.rescale
    out, _, p, *rest = pl.run_state(compute)((*accumulators, *weights))
    return out, as_operand(Softmax(p, *rest), carried.p.dtype)


def _plain_product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(
        a.astype(jnp.float32), b.astype(jnp.float32), precision=lax.Precision.HIGHEST
    )
