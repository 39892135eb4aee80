"""Scores of rows of e4m3: exact products, and what weights are relative to.

Every e4m3 is a float16. A register holds two pairs of elements of a row, and an
instruction makes two float16 of a pair, so two left operands come of it; the queries
are ordered to match (`Float8Rows.prepare_queries`), and nothing moves between threads.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.mla_decode.config import NO_MAXIMUM
from pallas_kernels.mla_decode.float8_inline import (
    BLOCK_BYTES,
    COLUMN_LAYOUT,
    COLUMNS,
    LAYOUT,
    PAIR_SWIZZLE,
    assemble,
    descriptor_of,
    i32,
    pair_of,
    row_bytes,
    shared_address,
    times,
    total_of,
    warp_and_lane,
)


def score(q_smem, k_smem) -> Any:
    """Return the products of keys and queries, ``[64 tokens, columns]``.

    Args:
      q_smem: Queries, float16 ``[columns, pairs]``: the first of two operands, of
        elements with ``element % 4 < 2``; the other one lies behind it.
      k_smem: Pairs of elements ``[64 tokens, pairs]``, 16 bits.
    """

    def multiply(_ctx, q_ref, k_ref):
        blocks = row_bytes(k_ref) // 64
        warp, lane = warp_and_lane()
        matrix, row = arith.divui(lane, i32(8)), arith.remui(lane, i32(8))
        half, group = arith.remui(matrix, i32(2)), arith.divui(matrix, i32(2))
        chunk = arith.xori(group, arith.divui(row, i32(2)))
        address = total_of(
            shared_address(k_ref),
            times(total_of(times(warp, 2), half), blocks * BLOCK_BYTES),
            times(row, 64),
            times(chunk, 16),
        )
        descriptor = descriptor_of(shared_address(q_ref), blocks * BLOCK_BYTES)
        registers = _score_registers(address, descriptor, blocks)
        pairs = [
            pair_of(*two) for two in zip(registers[::2], registers[1::2], strict=True)
        ]
        layout = LAYOUT.to_mgpu()
        found = np.empty(layout.registers_shape((64, COLUMNS)), dtype=object)
        found.reshape(-1)[:] = pairs
        return mgpu.FragmentedArray(_registers=found, _layout=layout, _is_signed=None)

    result = plgpu.ShapeDtypeStruct((64, COLUMNS), jnp.float32, layout=LAYOUT)
    arg_types = plgpu.RefType(PAIR_SWIZZLE), plgpu.RefType(PAIR_SWIZZLE)
    inline: Any = plgpu.inline_mgpu(arg_types=arg_types, return_type=result)
    return inline(multiply)(q_smem, k_smem)


def _score_registers(address, descriptor, blocks: int):
    """Return the registers of a product over blocks of 32 pairs."""
    count = COLUMNS // 2
    sums = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
    at, base = f"${count}", f"${count + 1}"
    operand_bytes = COLUMNS * blocks * 64
    lines = [
        ".reg .pred yes, no;",
        ".reg .b32 other;",
        ".reg .b64 right;",
        ".reg .b16 low, high;",
        f".reg .b32 pairs<{8 * blocks}>, keys<{16 * blocks}>;",
        "setp.eq.u32 yes, 0, 0;",
        "setp.ne.u32 no, 0, 0;",
        f"xor.b32 other, {at}, 32;",
    ]

    def load(block: int):
        for step, address in enumerate((at, "other")):
            first = 8 * block + 4 * step
            into = ", ".join(f"pairs{first + i}" for i in range(4))
            lines.append(
                "ldmatrix.sync.aligned.m8n8.x4.shared.b16 "
                f"{{{into}}}, [{address}+{block * BLOCK_BYTES}];"
            )

    load(0)
    for block in range(blocks):
        if block + 1 < blocks:
            load(block + 1)
        for i in range(8):
            key = 16 * block + i
            lines += [
                f"mov.b32 {{low, high}}, pairs{8 * block + i};",
                f"cvt.rn.f16x2.e4m3x2 keys{key}, low;",
                f"cvt.rn.f16x2.e4m3x2 keys{key + 8}, high;",
            ]
        lines.append("wgmma.fence.sync.aligned;")
        for operand in range(2):
            for step in range(2):
                first = 16 * block + 8 * operand + 4 * step
                left = ", ".join(f"keys{first + i}" for i in range(4))
                offset = operand * operand_bytes + block * BLOCK_BYTES + step * 32
                added = "yes" if block + operand + step > 0 else "no"
                lines += [
                    f"add.s64 right, {base}, {offset >> 4};",
                    f"wgmma.mma_async.sync.aligned.m64n{COLUMNS}k16.f32.f16.f16 "
                    f"{sums}, {{{left}}}, right, {added}, 1, 1, 0;",
                ]
        lines += [
            "wgmma.commit_group.sync.aligned;",
            f"wgmma.wait_group.sync.aligned {int(block + 1 < blocks)};",
        ]
    constraints = ",".join(["=&f"] * count + ["r", "l"])
    ptx = "{\n" + "\n".join(lines) + "\n}"
    return assemble(ptx, [address, descriptor], constraints, results=count)


def column_references(scores, scale: float, scratch_smem) -> Any:
    """Return what weights of a tile are relative to, for each column: an even integer.

    That is, in base 2, at most 1 from the largest of ``scores * scale``, and no less
    than `NO_MAXIMUM`.

    Each step of the reduction halves what a thread holds: it ends with one column for
    each of the 32 threads of a warp.

    Args:
      scores: ``[64 tokens, 32 columns]``.
      scale: Of scores, to base 2.
      scratch_smem: 256 float32, free again at the next barrier of the warpgroup.
    """

    def reduce(_ctx, array, scratch):
        warp, lane = warp_and_lane()
        number = ir.F32Type.get()
        values = [
            _maximum(*(llvm.extractelement(half, i32(c)) for half in halves))
            for halves in array.registers.reshape(-1, 2)
            for c in range(2)
        ]
        for distance in (16, 8, 4):
            bit = arith.andi(lane, i32(distance))
            is_upper = arith.cmpi(arith.CmpIPredicate.ne, bit, i32(0))
            half = len(values) // 2
            kept = []
            for lower, upper in zip(values[:half], values[half:], strict=True):
                sent = arith.select(is_upper, lower, upper)
                ptx = f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;"
                other = utils.inline_ptx(
                    ptx,
                    sent,
                    result_types=number,
                    has_side_effects=True,
                    convergent=True,
                )
                kept.append(_maximum(arith.select(is_upper, upper, lower), other))
            values = kept
        # Bits 4 and 3 of a lane say which 8 columns, 1 and 0 which 2 and 2 which.
        column = total_of(
            times(arith.divui(lane, i32(8)), 8),
            times(arith.remui(lane, i32(4)), 2),
            arith.remui(arith.divui(lane, i32(4)), i32(2)),
        )
        base = shared_address(scratch)
        mine = total_of(base, times(column, 16))
        ptx = "st.shared.f32 [$0], $1;"
        at = total_of(mine, times(warp, 4))
        utils.inline_ptx(ptx, at, values[0], has_side_effects=True)
        utils.warpgroup_barrier()
        found = utils.inline_ptx(
            "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];",
            mine,
            result_types=[number] * 4,
            has_side_effects=True,
        )
        own = total_of(base, i32(128 * 4), times(warp, 32 * 4))
        reference = utils.inline_ptx(
            "{\n.reg .f32 x;\n"
            "max.f32 x, $1, $2;\nmax.f32 x, x, $3;\nmax.f32 x, x, $4;\n"
            "mul.f32 x, x, $5;\ncvt.rni.f32.f32 x, x;\nadd.f32 x, x, x;\n"
            "max.f32 $0, x, $6;\n}",
            *found,
            utils.c(scale / 2, number),
            utils.c(NO_MAXIMUM, number),
            result_types=number,
        )
        at = total_of(own, times(column, 4))
        utils.inline_ptx(ptx, at, reference, has_side_effects=True)
        utils.warp_barrier()
        at = total_of(own, times(arith.remui(lane, i32(4)), 8))
        pairs = np.empty((COLUMNS // 8,), dtype=object)
        for n in range(COLUMNS // 8):
            low, high = utils.inline_ptx(
                f"ld.shared.v2.f32 {{$0, $1}}, [$2+{32 * n}];",
                at,
                result_types=[number] * 2,
                has_side_effects=True,
            )
            pairs[n] = pair_of(low, high)
        layout = COLUMN_LAYOUT.to_mgpu()
        shape = layout.registers_shape((COLUMNS,))
        return mgpu.FragmentedArray(
            _registers=pairs.reshape(shape), _layout=layout, _is_signed=None
        )

    result = plgpu.ShapeDtypeStruct((COLUMNS,), jnp.float32, layout=COLUMN_LAYOUT)
    arg_types = LAYOUT, plgpu.RefType()
    inline: Any = plgpu.inline_mgpu(arg_types=arg_types, return_type=result)
    return inline(reduce)(scores, scratch_smem)


def _maximum(x, y):
    return utils.inline_ptx("max.f32 $0, $1, $2;", x, y, result_types=ir.F32Type.get())
