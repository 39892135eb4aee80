"""Products of values of e4m3 with weights that are a sum of two e4m3.

wgmma takes 8-bit operands if both are, and each with the reduced dimension, the tokens,
contiguous in a register or in shared memory. Values do not come so: their elements are
contiguous. Both sides are therefore brought into another order of the 16 tokens of a
warp, which the product does not depend on. Token ``8 h + 2 j + b`` of them, with h and
b of 0 and 1, stands at ``4 j + 2 b + h``:

    values    ldmatrix, transposed, gives a thread elements 2 r and 2 r + 1 of tokens
              2 j and 2 j + 1, and of those 8 further on: from two such registers a
              permutation of bytes makes one of element 2 r of the four tokens, and one
              of element 2 r + 1
    weights   a thread has scores of tokens r and r + 8 of a warp and column, which
              stand side by side: it stores 16 bits

A weight, of 0 to 256, is the sum of its nearest e4m3 and of what that left, again as
e4m3: within ``2**-9`` of itself, or ``2**-10`` where it is small.

The tensor cores add products of 8 bits with fewer digits than float32 has. So a sum
goes over the 64 tokens of a tile only, and is added to the outputs outside.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf

from pallas_kernels.mla_decode.float8_inline import (
    BLOCK_BYTES,
    COLUMN_LAYOUT,
    COLUMNS,
    LAYOUT,
    PAIR_SWIZZLE,
    assemble,
    descriptor_of,
    i32,
    like,
    numbers_of,
    row_bytes,
    shared_address,
    times,
    total_of,
    warp_and_lane,
)

MAX_WEIGHT_LOG2 = 8
"""Weights are stored times this power of two, at most e4m3's 448."""

WEIGHT_SWIZZLE = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(64),  # pyright: ignore[reportAbstractUsage]
)
"""How shared memory holds weights ``[columns, 64 tokens]`` of 8 bits."""

_WEIGHT_BYTES = COLUMNS * 64

# A weight of two tokens: nearest e4m3, what is left of it, and both stored.
_STORE_WEIGHTS = """{{
.reg .b16 near, left, x, y;
.reg .b32 pair;
.reg .f32 f, g;
cvt.rn.satfinite.e4m3x2.f32 near, $1, $0;
cvt.rn.f16x2.e4m3x2 pair, near;
mov.b32 {{x, y}}, pair;
cvt.f32.f16 f, x;
cvt.f32.f16 g, y;
sub.f32 f, $0, f;
sub.f32 g, $1, g;
cvt.rn.satfinite.e4m3x2.f32 left, g, f;
st.shared.b16 [$2+{near}], near;
st.shared.b16 [$2+{left}], left;
}}"""


def store_weights(p_smem, scale_smem, weights, references):
    """Store weights ``[64 tokens, columns]``, in two parts, for `add_weighted`.

    Args:
      p_smem: ``[2, columns, 64 tokens]`` of e4m3: nearest, and what was left.
      scale_smem: Gets the references.
      weights: Float32 of 0 to 256.
      references: Of each column.
    """

    def store(_ctx, p_ref, scale_ref, array, references):
        warp, lane = warp_and_lane()
        column, row = arith.remui(lane, i32(4)), arith.divui(lane, i32(4))
        chunk = arith.xori(warp, column)
        address = total_of(
            shared_address(p_ref),
            times(column, 2 * 64),
            times(chunk, 16),
            times(row, 2),
        )
        registers = array.registers.reshape(-1, 2)
        number = ir.F32Type.get()
        for n, halves in enumerate(registers):
            for c in range(2):
                values = [llvm.extractelement(half, i32(c)) for half in halves]
                at = n * BLOCK_BYTES + c * 64
                ptx = _STORE_WEIGHTS.format(near=at, left=at + _WEIGHT_BYTES)
                assert values[0].type == number
                utils.inline_ptx(ptx, *values, address, has_side_effects=True)

        _store_once(scale_ref, references)

    arg_types = plgpu.RefType(WEIGHT_SWIZZLE), plgpu.RefType(), LAYOUT, COLUMN_LAYOUT
    inline: Any = plgpu.inline_mgpu(arg_types=arg_types)
    inline(store)(p_smem, scale_smem, weights, references)


def _store_once(ref, array):
    """Store what all eighths of all warps hold, from one of them."""
    word = ir.IntegerType.get_signless(32)
    thread = arith.remui(utils.thread_idx(), i32(128))
    is_first = arith.cmpi(arith.CmpIPredicate.ult, thread, i32(4))
    first = arith.extui(word, is_first)
    at = total_of(shared_address(ref), times(thread, 8))
    for n, pair in enumerate(array.registers.flat):
        numbers = [llvm.extractelement(pair, i32(c)) for c in range(2)]
        ptx = (
            "{\n.reg .pred on;\nsetp.ne.u32 on, $0, 0;\n"
            f"@on st.shared.v2.f32 [$1+{32 * n}], {{$2, $3}};\n}}"
        )
        utils.inline_ptx(ptx, first, at, *numbers, has_side_effects=True)


def add_weighted(accs, v_smem, p_smem, decay, factor) -> Any:
    """Return ``accs * decay + factor * values^T weights``.

    Args:
      accs: For even elements, then for odd ones, blocks of 64: ``[64, columns]``.
      v_smem: Pairs of elements ``[64 tokens, pairs]``, 16 bits; the first are values.
      p_smem: Weights, as `store_weights` left them.
      decay: For each column.
      factor: For each column.
    """
    blocks = len(accs) // 2
    result = plgpu.ShapeDtypeStruct(accs[0].shape, jnp.float32, layout=LAYOUT)

    def add(_ctx, v_ref, p_ref, decay, factor, *accs):
        accs = _decayed(accs, decay)
        load = _value_loader(v_ref)
        descriptors = _weight_descriptors(p_ref)
        pending = []

        def settle(outstanding: int):
            nvvm.wgmma_wait_group_sync_aligned(outstanding)
            index, products = pending.pop(0)
            accs[index] = _scaled_sum(accs[index], _fenced(products), factor)

        for block in range(blocks):
            words = load(block)
            for parity in range(2):
                products = _multiply(words[parity], descriptors)
                pending.append((parity * blocks + block, products))
                if len(pending) > 1:
                    settle(1)
        settle(0)
        return tuple(accs)

    arg_types = (
        plgpu.RefType(PAIR_SWIZZLE),
        plgpu.RefType(WEIGHT_SWIZZLE),
        COLUMN_LAYOUT,
        COLUMN_LAYOUT,
        *[LAYOUT] * len(accs),
    )
    inline: Any = plgpu.inline_mgpu(
        arg_types=arg_types, return_type=(result,) * len(accs)
    )
    return inline(add)(v_smem, p_smem, decay, factor, *accs)


def _value_loader(v_ref):
    """Return a function of a block of 64 pairs: words of even and of odd elements.

    The words of one parity are those of the left operand of two wgmma, of 32 tokens
    each, in the order of its registers.
    """
    row_blocks = row_bytes(v_ref) // 64
    warp, lane = warp_and_lane()
    matrix, row = arith.divui(lane, i32(8)), arith.remui(lane, i32(8))
    tokens, half = arith.remui(matrix, i32(2)), arith.divui(matrix, i32(2))
    chunk = total_of(times(arith.remui(warp, i32(2)), 2), half)
    chunk = arith.xori(chunk, arith.divui(row, i32(2)))
    address = total_of(
        shared_address(v_ref),
        times(tokens, row_blocks * BLOCK_BYTES),
        times(arith.divui(warp, i32(2)), BLOCK_BYTES),
        times(row, 64),
        times(chunk, 16),
    )
    word = ir.IntegerType.get_signless(32)

    def load(block: int):
        evens, odds = [], []
        for m in range(4):
            at = 2 * m * row_blocks * BLOCK_BYTES + 2 * block * BLOCK_BYTES
            ptx = (
                "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 "
                f"{{$0, $1, $2, $3}}, [$4+{at}];"
            )
            found = utils.inline_ptx(
                ptx, address, result_types=[word] * 4, has_side_effects=True
            )
            for pair in (found[:2], found[2:]):
                for words, order in ((evens, "0x6240"), (odds, "0x7351")):
                    ptx = f"prmt.b32 $0, $1, $2, {order};"
                    words.append(utils.inline_ptx(ptx, *pair, result_types=word))
        return evens, odds

    return load


def _weight_descriptors(p_ref):
    """Return descriptors of weights: for each 32 tokens the nearest, and the left."""
    long = ir.IntegerType.get_signless(64)
    base = descriptor_of(shared_address(p_ref), BLOCK_BYTES)
    return [
        llvm.add(
            base,
            utils.c(step * 2 + part * (_WEIGHT_BYTES >> 4), long),
            overflow_flags=llvm.IntegerOverflowFlags.none,
        )
        for step in range(2)
        for part in range(2)
    ]


def _multiply(words, descriptors):
    """Issue the products of 64 elements of one parity; return their registers."""
    count = COLUMNS // 2
    sums = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
    lines = ["wgmma.fence.sync.aligned;"]
    for step in range(2):
        left = ", ".join(f"${count + 4 * step + i}" for i in range(4))
        for part in range(2):
            right = f"${count + 8 + 2 * step + part}"
            added = int(step + part > 0)
            lines.append(
                f"wgmma.mma_async.sync.aligned.m64n{COLUMNS}k32.f32.e4m3.e4m3 "
                f"{sums}, {{{left}}}, {right}, {'yes' if added else 'no'}, 1, 1;"
            )
    lines.append("wgmma.commit_group.sync.aligned;")
    ptx = (
        "{\n.reg .pred yes, no;\nsetp.eq.u32 yes, 0, 0;\nsetp.ne.u32 no, 0, 0;\n"
        + "\n".join(lines)
        + "\n}"
    )
    constraints = ",".join(["=&f"] * count + ["r"] * 8 + ["l"] * 4)
    return assemble(ptx, [*words, *descriptors], constraints, results=count)


def _fenced(registers):
    """Return registers that are not read before this point."""
    count = len(registers)
    constraints = ",".join(["=f"] * count + [str(i) for i in range(count)])
    return assemble("", registers, constraints, results=count)


def _decayed(accs, decay):
    """Return ``accs * decay``; where no column of a warp decays that costs nothing."""
    factors = numbers_of(decay)
    word = ir.IntegerType.get_signless(32)
    tests = ["setp.eq.f32 all, $1, 0f3F800000;"] + [
        f"setp.eq.and.f32 all, ${i}, 0f3F800000, all;"
        for i in range(2, len(factors) + 1)
    ]
    ptx = (
        "{\n.reg .pred all;\n"
        + "\n".join(tests)
        + "\nvote.sync.all.pred all, all, 0xffffffff;\nselp.u32 $0, 0, 1, all;\n}"
    )
    some = utils.inline_ptx(
        ptx, *factors, result_types=word, has_side_effects=True, convergent=True
    )
    condition = arith.cmpi(arith.CmpIPredicate.ne, some, utils.c(0, word))
    registers = [r for acc in accs for r in acc.registers.flat]
    branches = scf.IfOp(condition, [r.type for r in registers], has_else=True)
    with ir.InsertionPoint(branches.regions[0].blocks[0]):
        columns = [r for pair in decay.registers.flat for r in (pair, pair)]
        scf.yield_(
            [arith.mulf(r, columns[i % len(columns)]) for i, r in enumerate(registers)]
        )
    with ir.InsertionPoint(branches.regions[1].blocks[0]):
        scf.yield_(registers)
    results = iter(branches.results)
    return [like(acc, [next(results) for _ in acc.registers.flat]) for acc in accs]


def _scaled_sum(acc, products, factor):
    """Return ``acc + products * factor``."""
    factors = numbers_of(factor)
    number = ir.F32Type.get()
    registers, products = [], iter(products)
    for i, pair in enumerate(acc.registers.flat):
        new = pair
        for c in range(2):
            found = utils.inline_ptx(
                "fma.rn.f32 $0, $1, $2, $3;",
                next(products),
                factors[i // 2 * 2 + c],
                llvm.extractelement(pair, i32(c)),
                result_types=number,
            )
            new = llvm.insertelement(new, found, i32(c))
        registers.append(new)
    return like(acc, registers)
