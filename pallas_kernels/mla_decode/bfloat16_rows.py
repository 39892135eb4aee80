"""Rows of bfloat16 in shared memory, and the products with them.

A tile comes in chunks of its 64 rows, through a ring. V is the first part of K, so the
last chunk is value and rope. Rows of 512 + 64 are cut in three chunks of 192, for a
ring of six. (More of them in flight were slower on an H200: 150.5 against 148 us at
batch 64 x 8192.) Other rows come whole: they have no equal parts of multiples of 64
elements but 64 itself, and such small chunks were slower.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_decode.config import (
    ACC,
    NARROW_COLUMNS,
    ROPE_DIM,
    SWIZZLE,
    TILE,
)
from pallas_kernels.mla_decode.rows import Cut, LatentRows
from pallas_kernels.mla_decode.softmax import accumulate, clear_tail


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bfloat16Rows(LatentRows):
    """How rows of bfloat16 are held and multiplied."""

    # One scorer each: weights are relative to the maximum so far, and none hands it on.
    CUTS: ClassVar = {
        128: Cut(chunks=1, ring=6, scorers=1),
        256: Cut(chunks=1, ring=4, scorers=1),
        384: Cut(chunks=1, ring=2, scorers=1),
        512: Cut(chunks=3, ring=6, scorers=1),
    }
    storage_dtype: ClassVar = jnp.bfloat16
    operand_dtype: ClassVar = jnp.bfloat16
    output_dtype: ClassVar = jnp.bfloat16
    output_swizzle: ClassVar = SWIZZLE
    weight_log2: ClassVar = 0
    """Weights are of 0 to this power of two."""

    @property
    def row_width(self) -> int:
        """Elements of a row, of the storage dtype."""
        return self.latent_dim + ROPE_DIM

    @property
    def output_width(self) -> int:
        """Elements of an output, of the output dtype."""
        return self.latent_dim

    @property
    def chunk(self) -> int:
        """Elements of a row in a chunk."""
        return self.row_width // self.chunks

    @property
    def stages(self) -> tuple[tuple[int, int], ...]:
        """Start and width of the pieces in which outputs leave: values of a chunk."""
        starts = range(0, self.row_width, self.chunk)
        return tuple((s, min(self.chunk, self.latent_dim - s)) for s in starts)

    @property
    def part_stages(self) -> tuple[tuple[int, int], ...]:
        """And parts of them."""
        return self.stages

    @property
    def accumulators(self) -> tuple[tuple[int, int, int], ...]:
        """Stage of parts, start in the stage and rows of the accumulators."""
        return tuple((c, 0, width) for c, (_, width) in enumerate(self.stages))

    def prepare_queries(self, q):
        """Return query columns ``[rows, operands, columns, elements]``."""
        return q[:, None]

    def outputs(self, accs, *, interpret):
        """Return what is stored of a row: stage, start in the stage, transposed."""
        del interpret
        return [(c, 0, acc.astype(self.output_dtype)) for c, acc in enumerate(accs)]

    def scratch(self, num_weights: int) -> tuple[Any, Any, Any]:
        """Shared memory of queries, ring and the weights of some tiles."""
        q = (1, NARROW_COLUMNS, self.row_width)
        ring = (self.ring, TILE, self.chunk)
        weights = (num_weights, NARROW_COLUMNS, TILE)
        return (
            plgpu.SMEM(q, self.operand_dtype, transforms=SWIZZLE),
            plgpu.SMEM(ring, self.operand_dtype, transforms=SWIZZLE),
            plgpu.SMEM(weights, self.operand_dtype, transforms=SWIZZLE),
        )

    def chunk_of(self, piece_ref, chunk: int):
        """Return the part of a piece that belongs to a chunk."""
        return piece_ref.at[:, pl.ds(chunk * self.chunk, self.chunk)]

    def score(self, q_smem, ring_smem, slots, wait, zero, *, interpret):
        """Return the products of the keys of a tile with the queries."""
        del interpret

        def multiply(acc_ref):
            for c, slot in enumerate(slots):
                wait(slot)
                q_chunk = q_smem.at[zero, :, pl.ds(c * self.chunk, self.chunk)]
                plgpu.wgmma(acc_ref, ring_smem.at[slot], q_chunk.transpose((1, 0)))
            return acc_ref[...]

        return pl.run_scoped(multiply, ACC((TILE, NARROW_COLUMNS), jnp.float32))

    def clear_values(self, ring_smem, slots, valid):
        """Zero the values of a tile from a token on."""
        for slot, (_, width) in zip(slots, self.stages, strict=True):
            clear_tail(ring_smem.at[slot], valid, width)

    def store_weights(self, p_smem, scale_smem, weights, decay, *, interpret):
        """Store the weights of a tile, and by how much outputs decay."""
        del interpret
        p_smem.transpose((1, 0))[...] = plgpu.layout_cast(
            weights.astype(self.operand_dtype), plgpu.Layout.WGMMA_TRANSPOSED
        )
        scale_smem[...] = decay

    def add_weighted(
        self, accs, ring_smem, slots, p_smem, free, decay, factor, *, interpret
    ):
        """Return decayed ``accs`` plus values of a tile times weights times a factor.

        Args:
          accs: Accumulators, transposed.
          ring_smem: The ring.
          slots: The chunks of the tile, in the ring.
          p_smem: The weights.
          free: Called with each slot once its values are used.
          decay: Factor of ``accs`` for each column.
          factor: Of the products, if there are two scorers.
          interpret: Parameters of the simulator, or False.
        """
        del factor
        accs = tuple(acc * lax.broadcast_in_dim(decay, acc.shape, [1]) for acc in accs)

        def multiply(acc_refs):
            for acc_ref, slot, (_, width) in zip(
                acc_refs, slots, self.stages, strict=True
            ):
                v = ring_smem.at[slot, :, pl.ds(0, width)]
                plgpu.wgmma(acc_ref, v.transpose((1, 0)), p_smem.transpose((1, 0)))
            for c, slot in enumerate(slots):
                plgpu.wgmma_wait(self.chunks - 1 - c)
                free(slot)

        return accumulate(multiply, accs, interpret=interpret)
