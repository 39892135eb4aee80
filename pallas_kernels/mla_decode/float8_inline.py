"""What the PTX for rows of e4m3 has in common: addresses and registers."""

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.mla_decode.config import NARROW_COLUMNS

COLUMNS = NARROW_COLUMNS
LAYOUT = plgpu.Layout.WGMMA
COLUMN_LAYOUT = plgpu.Layout.WGMMA.reduce(0)

PAIR_SWIZZLE = (
    plgpu.TilingTransform((8, 32)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(64),  # pyright: ignore[reportAbstractUsage]
)
"""How shared memory holds rows of 16 bits: 288 are no multiple of 64."""

BLOCK_BYTES = 512
"""Bytes of 8 rows of 64 bytes, which the swizzle permutes among themselves."""


def i32(x: int):
    """Return a constant of 32 bits."""
    return utils.c(x, ir.IntegerType.get_signless(32))


def shared_address(ref):
    """Return the address of a ref in shared memory, 32 bits."""
    word = ir.IntegerType.get_signless(32)
    return llvm.ptrtoint(word, utils.memref_ptr(ref))


def warp_and_lane():
    """Return the warp of its warpgroup, and the lane, of this thread."""
    thread = arith.remui(utils.thread_idx(), i32(128))
    return arith.divui(thread, i32(32)), arith.remui(thread, i32(32))


def total_of(*terms):
    """Return the sum of integers."""
    total = terms[0]
    for term in terms[1:]:
        total = arith.addi(total, term)
    return total


def times(x, factor: int):
    """Return an integer times a constant."""
    return arith.muli(x, i32(factor))


def row_bytes(v_ref) -> int:
    """Return the bytes of a row of a tile that is held with `PAIR_SWIZZLE`."""
    # Tiles of rows, tiles of pairs, 8, 32.
    return ir.MemRefType(v_ref.type).shape[1] * 64


def descriptor_of(address, stride: int):
    """Return the descriptor of swizzled rows of 64 bytes, 8 of them each ``stride``."""
    long = ir.IntegerType.get_signless(64)
    start = llvm.and_(llvm.zext(long, address), utils.c(0x3FFFF, long))
    start = llvm.lshr(start, utils.c(4, long))
    # The stride that is 1 is not used with a swizzle; the last number says which it is.
    constants = 1 << 16 | (stride >> 4) << 32 | 2 << 62
    return llvm.or_(start, utils.c(constants - (1 << 64), long))  # signed


def pair_of(low, high):
    """Return two numbers as a thread of `LAYOUT` holds them."""
    pair = llvm.mlir_undef(ir.VectorType.get((2,), low.type))
    return llvm.insertelement(llvm.insertelement(pair, low, i32(0)), high, i32(1))


def assemble(ptx: str, operands, constraints: str, *, results: int):
    """Return the float32 registers that PTX gives, the first of its constraints."""
    number = ir.F32Type.get()
    found = llvm.inline_asm(
        llvm.StructType.get_literal([number] * results),
        operands,
        ptx,
        constraints,
        has_side_effects=True,
    )
    return [llvm.extractvalue(number, found, [i]) for i in range(results)]


def numbers_of(array):
    """Return the elements that a thread holds, one by one."""
    return [
        llvm.extractelement(pair, i32(c))
        for pair in array.registers.flat
        for c in (0, 1)
    ]


def like(array, registers):
    """Return an array like another one, with other registers."""
    found = np.empty_like(array.registers)
    found.reshape(-1)[:] = registers
    return mgpu.FragmentedArray(_registers=found, _layout=array.layout, _is_signed=None)
