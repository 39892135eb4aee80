"""Rows of bfloat16 in shared memory, and the products with them.

A tile comes in three chunks of 192 elements of its 64 rows, through a ring of six.
(More of them in flight were slower on an H200: 150.5 against 148 us at batch 64 x
8192.) V is the first 512 elements of K, so the last chunk is value and rope.
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_decode.config import (
    ACC,
    LATENT_DIM,
    NARROW_COLUMNS,
    ROW_DIM,
    SWIZZLE,
    TILE,
)
from pallas_kernels.mla_decode.softmax import accumulate, clear_tail

STORAGE_DTYPE = OPERAND_DTYPE = jnp.bfloat16
ROW_WIDTH = ROW_DIM
CHUNK = 192
CHUNKS = ROW_DIM // CHUNK
RING = 6
VALUE_SCALE = 1.0
SCORERS = 1
REGISTERS = {"scores": 160, "values": 240, "loads": 40}
"""Of a thread, by role; the three warpgroups share 512."""
# Latent elements in each chunk.
WIDTHS = tuple(min(CHUNK, LATENT_DIM - c * CHUNK) for c in range(CHUNKS))
OUTPUT_DTYPE, OUTPUT_WIDTH = jnp.bfloat16, LATENT_DIM
STAGES = PART_STAGES = tuple((c * CHUNK, width) for c, width in enumerate(WIDTHS))
"""Start and width of the pieces in which outputs leave, and parts of them."""
OUTPUT_SWIZZLE = SWIZZLE
ACCUMULATORS = tuple((c, 0, width) for c, width in enumerate(WIDTHS))
"""Stage of parts, start in the stage and rows of the accumulators of outputs."""


def prepare_queries(q):
    """Return query columns ``[rows, operands, columns, elements]``."""
    return q[:, None]


def outputs(accs, *, interpret):
    """Return what is stored of a row: stage, start in the stage, transposed."""
    del interpret
    return [(c, 0, acc.astype(OUTPUT_DTYPE)) for c, acc in enumerate(accs)]


def scratch():
    """Shared memory of queries, ring and queries' arrivals."""
    q = plgpu.SMEM((1, NARROW_COLUMNS, ROW_DIM), OPERAND_DTYPE, transforms=SWIZZLE)
    ring = plgpu.SMEM((RING, TILE, CHUNK), OPERAND_DTYPE, transforms=SWIZZLE)
    return q, ring


def chunk_of(piece_ref, chunk: int):
    """Return the part of a piece that belongs to a chunk."""
    return piece_ref.at[:, pl.ds(chunk * CHUNK, CHUNK)]


def score(q_smem, ring_smem, slots, wait, zero, *, interpret):
    """Return the products of the keys of a tile with the queries."""
    del interpret

    def multiply(acc_ref):
        for c, slot in enumerate(slots):
            wait(slot)
            q_chunk = q_smem.at[zero, :, pl.ds(c * CHUNK, CHUNK)]
            plgpu.wgmma(acc_ref, ring_smem.at[slot], q_chunk.transpose((1, 0)))
        return acc_ref[...]

    return pl.run_scoped(multiply, ACC((TILE, NARROW_COLUMNS), jnp.float32))


def clear_values(ring_smem, slots, valid):
    """Zero the values of a tile from a token on."""
    for slot, width in zip(slots, WIDTHS, strict=True):
        clear_tail(ring_smem.at[slot], valid, width)


def add_weighted(accs, ring_smem, slots, p_smem, free, *, interpret):
    """Return ``accs`` plus the products of the values of a tile with the weights."""

    def multiply(acc_refs):
        for acc_ref, slot, width in zip(acc_refs, slots, WIDTHS, strict=True):
            v = ring_smem.at[slot, :, pl.ds(0, width)]
            plgpu.wgmma(acc_ref, v.transpose((1, 0)), p_smem.transpose((1, 0)))
        for c, slot in enumerate(slots):
            plgpu.wgmma_wait(CHUNKS - 1 - c)
            free(slot)

    return accumulate(multiply, accs, interpret=interpret)
