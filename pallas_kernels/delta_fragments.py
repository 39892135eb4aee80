"""Device functions in Gluon for `pallas_kernels.delta_fragment_chunk_kernel`.

Each of 4 warps has a block of 16 tokens. Of rows `g` and `g + 8` of it, lane `4 g + c`
has channels `8 c` to `8 c + 7` of every 32: so they are loaded, 16 bytes at a time, and
so the tensor core takes them, if its sum over the channels goes in an order of ours.
Its left operand (rows g and g + 8) and its right one (columns g and g + 8) are the same
elements of a lane, and an accumulator is both as well. So what a warp multiplies of its
own never moves: layouts only give registers other names, and `assert_trivial` says so.
"""

import typing

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

# Products of 16 x 16, one to a warp.
BLOCKS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
# 32 channels of 4 blocks of 16 tokens, and of 64 tokens.
TOKENS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 8, 0]],
        [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1, 0, 0], [2, 0, 0]],
        [],
        [4, 16, 32],
    )
)
FLAT_TOKENS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 32],
    )
)
# Shared memory where the 16 bytes of neighbouring lanes are neighbours: as loaded, in
# the order of a left operand, and those of an accumulator.
SHARED_COLUMNS = gl.constexpr(
    gl.SharedLinearLayout(
        [
            *([0, 0, 1], [0, 0, 2], [0, 0, 4]),
            *([0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]),
            *([0, 8, 0], [1, 0, 0], [2, 0, 0]),
        ]
    )
)
SHARED_ROWS = gl.constexpr(
    gl.SharedLinearLayout(
        [
            *([0, 0, 1], [0, 8, 0], [0, 0, 2]),
            *([0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]),
            *([0, 0, 4], [1, 0, 0], [2, 0, 0]),
        ]
    )
)
SHARED_LEFTS = gl.constexpr(
    gl.SharedLinearLayout(
        [
            *([0, 8, 0], [0, 0, 1]),
            *([0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]),
            *([0, 0, 8], [1, 0, 0], [2, 0, 0]),
        ]
    )
)
SHARED_BLOCKS = gl.constexpr(
    gl.SharedLinearLayout(
        [
            *([0, 0, 1], [0, 8, 0]),
            *([0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]),
            *([0, 0, 8], [1, 0, 0], [2, 0, 0]),
        ]
    )
)


@gluon.jit
@typing.no_type_check
def _approximate(x, ASM: gl.constexpr):
    return gl.inline_asm_elementwise(
        ASM, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
@typing.no_type_check
def reciprocal(x):
    """1 / x of the hardware, off by one unit in the last place."""
    return _approximate(x, "rcp.approx.ftz.f32 $0, $1;")


@gluon.jit
@typing.no_type_check
def log2(x):
    """The hardware's logarithm."""
    return _approximate(x, "lg2.approx.ftz.f32 $0, $1;")


@gluon.jit
@typing.no_type_check
def exp2(x):
    """The hardware's exponential; 0 of less than -126."""
    return _approximate(x, "ex2.approx.ftz.f32 $0, $1;")


@gluon.jit
@typing.no_type_check
def rounded(x):
    """Rounds to bfloat16, two at a time."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;",
        "=r,f,f",
        [x],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
@typing.no_type_check
def times(x, y):
    """The product in bfloat16, two at a time; exact if y is a power of two."""
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;",
        "=r,r,r",
        [x, y],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
@typing.no_type_check
def add(a, b):
    """The sum, for a scan."""
    return a + b


@gluon.jit
@typing.no_type_check
def last(a, b):
    """The last of a row, for a reduction."""
    return b


@gluon.jit
@typing.no_type_check
def stack(x):
    """Four of `[n]` as `[4, n]`."""
    x = gl.join(gl.join(x[0], x[2]), gl.join(x[1], x[3]))
    return gl.reshape(gl.permute(x, [1, 2, 0]), [4, x.shape[0]])


@gluon.jit
@typing.no_type_check
def stack_rows(x):
    """Four of `[16, n]` as `[64, n]`."""
    x = gl.join(gl.join(x[0], x[2]), gl.join(x[1], x[3]))
    return gl.reshape(gl.permute(x, [2, 3, 0, 1]), [64, x.shape[1]])


@gluon.jit
@typing.no_type_check
def stack_columns(x):
    """Four of `[4, 16, 16]`, blocks of rows, as `[64, 64]`."""
    x = gl.join(gl.join(x[0], x[2]), gl.join(x[1], x[3]))
    return gl.reshape(gl.permute(x, [0, 1, 3, 4, 2]), [64, 64])


@gluon.jit
@typing.no_type_check
def to_mma_order(x):
    """Puts `[..., n]`, n a multiple of 32, in the order of the tensor core.

    It has columns 2 c, 2 c + 1, 2 c + 8, ... 2 c + 25 in lane c of 4, where we have
    8 c to 8 c + 7.
    """
    ROWS: gl.constexpr = x.numel // x.shape[-1]
    y = gl.reshape(x, [ROWS, x.shape[-1] // 32, 4, 4, 2])
    return gl.reshape(gl.permute(y, [0, 1, 3, 2, 4]), x.shape)


@gluon.jit
@typing.no_type_check
def rows_to_mma_order(x):
    """As `to_mma_order`, for the rows of `[64, n]`."""
    y = gl.reshape(x, [2, 4, 4, 2, x.shape[1]])
    return gl.reshape(gl.permute(y, [0, 2, 1, 3, 4]), x.shape)


@gluon.jit
@typing.no_type_check
def multiply_tokens(x, y, acc):
    """Returns x y^T + acc of blocks, x and y in the layout `TOKENS`."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, BLOCKS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, BLOCKS, 2)
    x = gl.convert_layout(to_mma_order(x), LEFT, assert_trivial=True)
    y = gl.permute(to_mma_order(y), [0, 2, 1])
    y = gl.convert_layout(y, RIGHT, assert_trivial=True)
    return mma_v2(x, y, acc)


@gluon.jit
@typing.no_type_check
def _pairs_apart(x):
    """Columns of an accumulator in an order in which a lane's pairs are one step."""
    y = gl.permute(gl.reshape(x, [64, 2, 4, 2]), [0, 1, 3, 2])
    return gl.reshape(y, [4, 16, 16])


@gluon.jit
@typing.no_type_check
def multiply_blocks(x, y, acc):
    """Returns x y^T + acc of blocks in tf32, all of them accumulators."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, BLOCKS, 1)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, BLOCKS, 1)
    x = gl.convert_layout(_pairs_apart(x), LEFT, assert_trivial=True)
    y = gl.permute(_pairs_apart(y), [0, 2, 1])
    y = gl.convert_layout(y, RIGHT, assert_trivial=True)
    return mma_v2(x, y, acc, input_precision="tf32")


@gluon.jit
@typing.no_type_check
def invert_blocks(A, r, c):
    """(I + A)^-1 and its transpose, for strictly lower blocks with rows r, columns c.

    As `pallas_kernels.delta_inverse` does it, from blocks of 1 to 16:

        [I + A1  0; A21  I + A2]^-1 = [T1  0; -T2 A21 T1  T2]

    An accumulator multiplies from the right as its transpose: hence both.
    """
    zeros = gl.zeros([4, 16, 16], gl.float32, BLOCKS)
    # The size of the blocks that the element is between.
    level = gl.where(r > c, r ^ c, 0)
    T = gl.where(r == c, 1.0, zeros)
    under = gl.where(level == 1, -A, 0.0)
    transposed = multiply_blocks(T, under, T)
    T += under
    for n in gl.static_range(1, 4):
        under = gl.where(level // (1 << n) == 1, -A, 0.0)
        left = multiply_blocks(transposed, under, zeros)
        transposed = multiply_blocks(left, T, transposed)
        T = multiply_blocks(T, left, T)
    return T, transposed


@gluon.jit
@typing.no_type_check
def gate_scale(a_log, LOWER_BOUND: gl.constexpr):
    """Of a gate: its factor, what a logit is multiplied by, and where that is cut.

    Of the softplus gate the factor is `-exp(a_log)`; the cut is where the product is
    -15, or at 2^126, a logit of 87.
    """
    LOG2E: gl.constexpr = 1.4426950408889634
    a = gl.exp(a_log)
    if LOWER_BOUND is None:
        most = gl.minimum(15.0 / a, 126.0)
        near_0 = most * (1.0 / LOG2E)
        cut = log2(gl.where(most < 1e-3, near_0, exp2(most) - 1.0))
        return -a, LOG2E, cut
    else:
        # Odds at which the gate is -15; below 0 it never is.
        odds: gl.constexpr = 15.0 / (-LOWER_BOUND * LOG2E - 15.0)
        cut = log2(odds + 0.0 * a) if odds > 0.0 else 126.0
        return LOWER_BOUND * LOG2E, a * LOG2E, cut


@gluon.jit
@typing.no_type_check
def gate(x, LOWER_BOUND: gl.constexpr):
    """log2(1 + 2^x), exact for the small 2^x of a decay near 1; or 1 / (1 + 2^-x)."""
    LOG2E: gl.constexpr = 1.4426950408889634
    if LOWER_BOUND is None:
        e = exp2(x)
        near_0 = e * (LOG2E - (0.5 * LOG2E) * e)
        return gl.where(e < 1e-3, near_0, log2(1.0 + e))
    else:
        return reciprocal(1.0 + exp2(-x))
