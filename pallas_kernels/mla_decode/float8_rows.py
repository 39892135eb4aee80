"""Rows of e4m3 in shared memory, and the products with them.

Rows are read as pairs of elements, 16 bits. Scores are to be exact, so keys become
float16, which every e4m3 is: a register holds two pairs, and an instruction makes two
float16 of a pair. Two operands come of it, and the queries are ordered to match, so
nothing moves between threads.

    keys     a register is 4 elements of one token     element % 4 < 2, and the others

Such operands stay in registers. Values stay e4m3, `float8_values.py` says how; their
even elements and the odd ones stay apart until they are packed in words.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_decode import float8_scores, float8_values
from pallas_kernels.mla_decode.config import (
    ACC,
    NARROW_COLUMNS,
    NO_MAXIMUM,
    ROPE_DIM,
    SWIZZLE_32_BITS,
    TILE,
    zeros,
)
from pallas_kernels.mla_decode.float8_inline import PAIR_SWIZZLE
from pallas_kernels.mla_decode.rows import Cut, LatentRows
from pallas_kernels.mla_decode.softmax import clear_tail
from pallas_kernels.mla_decode.words import (
    elements_of,
    pack_bfloat16,
    split_pairs,
)

KEY_STEP = 32
BLOCK = 64
"""Pairs that are made operands at a time: of keys, and of values."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8Rows(LatentRows):
    """How rows of e4m3 are held and multiplied."""

    CUTS: ClassVar = {
        256: Cut(chunks=1, ring=6, scorers=2),
        512: Cut(chunks=1, ring=4, scorers=2),
    }
    storage_dtype: ClassVar = jnp.uint16
    operand_dtype: ClassVar = jnp.float16
    output_dtype: ClassVar = jnp.uint32
    output_swizzle: ClassVar = SWIZZLE_32_BITS
    weight_dtype: ClassVar = jnp.float8_e4m3fn
    weight_log2: ClassVar = float8_values.MAX_WEIGHT_LOG2 - 1
    """Weights are relative to this power of two, and up to twice as large."""

    @property
    def row_width(self) -> int:
        """Pairs of a row."""
        return (self.latent_dim + ROPE_DIM) // 2

    @property
    def output_width(self) -> int:
        """Words of an output, which has as many as a row has pairs of values."""
        return self.latent_dim // 2

    @property
    def blocks(self) -> int:
        """Blocks of the values of a row."""
        return self.output_width // BLOCK

    @property
    def stages(self) -> tuple[tuple[int, int], ...]:
        """Start and width of the pieces in which outputs leave."""
        return ((0, self.output_width),)

    @property
    def part_stages(self) -> tuple[tuple[int, int], ...]:
        """And parts of them: even elements, then odd ones."""
        width = self.output_width
        return (0, width), (width, width)

    @property
    def accumulators(self) -> tuple[tuple[int, int, int], ...]:
        """Stage of parts, start in the stage and rows of the accumulators."""
        blocks = range(self.blocks)
        return tuple((k, c * BLOCK, BLOCK) for k in range(2) for c in blocks)

    def prepare_queries(self, q):
        """Return query columns ``[rows, operands, columns, elements]``.

        Float16 has more digits than bfloat16, but a smaller range: what is above it
        becomes its largest number.
        """
        largest = float(jnp.finfo(self.operand_dtype).max)
        q = jnp.clip(q.astype(jnp.float32), -largest, largest)
        q = q.astype(self.operand_dtype)
        q = jnp.moveaxis(q.reshape(*q.shape[:2], -1, 2, 2), 3, 1)
        return q.reshape(*q.shape[:3], -1)

    def outputs(self, accs, *, interpret):
        """Return what is stored of a row: stage, start, transposed words."""
        pack = functools.partial(
            pack_bfloat16, layout=plgpu.Layout.WGMMA, interpret=interpret
        )
        evens, odds = accs[: self.blocks], accs[self.blocks :]
        words = [pack(*pair) for pair in zip(evens, odds, strict=True)]
        return [(0, c * BLOCK, x) for c, x in enumerate(words)]

    def scratch(self, num_weights: int) -> tuple[Any, Any, Any]:
        """Shared memory of queries, ring and the weights of some tiles."""
        q = (2, NARROW_COLUMNS, self.row_width)
        ring = (self.ring, TILE, self.row_width)
        weights = (num_weights, 2, NARROW_COLUMNS, TILE)
        return (
            plgpu.SMEM(q, self.operand_dtype, transforms=PAIR_SWIZZLE),
            plgpu.SMEM(ring, self.storage_dtype, transforms=PAIR_SWIZZLE),
            plgpu.SMEM(
                weights, self.weight_dtype, transforms=float8_values.WEIGHT_SWIZZLE
            ),
        )

    def chunk_of(self, piece_ref, chunk: int):
        """Return the part of a piece that belongs to a chunk: all of it."""
        del chunk
        return piece_ref

    def score(self, q_smem, ring_smem, slots, wait, zero, *, interpret):
        """Return the products of the keys of a tile with the queries."""
        (slot,) = slots
        wait(slot)
        if not interpret:
            return float8_scores.score(q_smem.at[zero], ring_smem.at[slot])

        def products_of(start):
            at = pl.ds(start, KEY_STEP)
            pairs = plgpu.load(ring_smem.at[slot, :, at], layout=plgpu.Layout.WGMMA)
            return [
                (0, keys, q_smem.at[k + zero, :, at].transpose((1, 0)))
                for k, keys in enumerate(split_pairs(pairs, interpret=interpret))
            ]

        no_scores = zeros((TILE, NARROW_COLUMNS), plgpu.Layout.WGMMA)
        starts = range(0, self.row_width, KEY_STEP)
        return _add_products((no_scores,), products_of, starts, interpret=interpret)[0]

    def references(self, scores, scale2: float, scratch_smem, *, interpret):
        """Return what weights of a tile are relative to, for each column, in base 2.

        It is near their maximum, and coarse, so that it seldom changes from tile to
        tile: the largest weight is between ``2**-1`` and 2 times ``2**weight_log2``.
        """
        if not interpret:
            return float8_scores.column_references(scores, scale2, scratch_smem)
        half = scores.max(axis=0) * (scale2 / 2)
        reference = lax.round(half, lax.RoundingMethod.TO_NEAREST_EVEN) * 2.0
        return jnp.maximum(reference, NO_MAXIMUM)

    def clear_values(self, ring_smem, slots, valid):
        """Zero the values of a tile from a token on."""
        (slot,) = slots
        clear_tail(ring_smem.at[slot], valid, self.output_width)

    def store_weights(self, p_smem, scale_smem, weights, references, *, interpret):
        """Store the weights of a tile, and what they are relative to, if it is free."""
        if not interpret:
            float8_values.store_weights(p_smem, scale_smem, weights, references)
            return
        scale_smem[...] = references
        near = weights.astype(self.weight_dtype)
        left = (weights - near.astype(jnp.float32)).astype(self.weight_dtype)
        for k, part in enumerate((near, left)):
            p_smem.at[k].transpose((1, 0))[...] = part

    def add_weighted(
        self, accs, ring_smem, slots, p_smem, free, decay, factor, *, interpret
    ):
        """Return decayed ``accs`` plus values of a tile times weights times a factor.

        Arguments are those of `Bfloat16Rows.add_weighted`.
        """
        (slot,) = slots
        if interpret:
            pairs = ring_smem[slot, :, : self.output_width]
            weights = p_smem[0].astype(jnp.float32) + p_smem[1].astype(jnp.float32)
            products = [
                jnp.dot(values.T.astype(jnp.float32), weights.T, precision="highest")
                for values in elements_of(pairs)
            ]
            accs = tuple(
                acc * decay[None] + products[k][start : start + rows] * factor[None]
                for acc, (k, start, rows) in zip(accs, self.accumulators, strict=True)
            )
        else:
            accs = float8_values.add_weighted(
                accs, ring_smem.at[slot], p_smem, decay, factor
            )
        free(slot)
        return accs


def _add_products(accs, products_of, steps, *, interpret) -> Any:
    """Return ``accs`` plus products whose left operands are made on the way.

    Args:
      accs: Accumulators.
      products_of: Function of a step that returns two triples of an index of
        ``accs``, the left operand and a ref of the right one.
      steps: Arguments of ``products_of``.
      interpret: Parameters of the simulator, or False.
    """
    if interpret:  # the simulator takes no left operand from registers
        accs = list(accs)
        for step in steps:
            for index, left, right in products_of(step):
                left, right = (x.astype(jnp.float32) for x in (left, right[...]))
                accs[index] += jnp.dot(left, right, precision="highest")
        return tuple(accs)

    def multiply(acc_refs):
        for step in steps:
            for index, left, right in products_of(step):
                plgpu.wgmma(acc_refs[index], left, right)
            # The registers of all operands but the last two can be used again.
            plgpu.wgmma_wait(2)
        plgpu.wgmma_wait(0)

    return pl.run_state(multiply)(tuple(ACC.init(acc) for acc in accs))
