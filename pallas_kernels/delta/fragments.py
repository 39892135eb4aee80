"""Device functions in Gluon for the kernels that make chunks independent.

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
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

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
# A warpgroup's product of 64 x 64, its left operand, and 64 x 64 in the order of its
# columns; shared memory that it reads.
WIDE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
WIDE_LEFT = gl.constexpr(gl.DotOperandLayout(0, WIDE.value, 2))
WIDE_TOKENS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
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
def side_by_side(x, y):
    """Two parts of 32 channels, layout `TOKENS`, as `[64, 64]` in mma order."""
    x = gl.permute(gl.join(to_mma_order(x), to_mma_order(y)), [0, 1, 3, 2])
    return gl.reshape(x, [64, 64])


@gluon.jit
@typing.no_type_check
def token_places(size, ROW: gl.constexpr):
    """Rows and columns of 32 channels, layout `TOKENS`, and places of the tokens.

    Past the last of `size` tokens it is repeated.
    """
    block = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, TOKENS)))
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, TOKENS)))
    row = (16 * block)[:, None] | row[None, :]
    key = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, TOKENS)))[None, None, :]
    return row[:, :, None], key, gl.minimum(row, size - 1)[:, :, None] * ROW + key


@gluon.jit
@typing.no_type_check
def start_values(v_ptr, size, V: gl.constexpr, ROW: gl.constexpr):
    """Starts to copy values to shared memory, `[64, V]`. The last one is repeated."""
    values = gl.allocate_shared_memory(gl.bfloat16, [64, V], SWIZZLED)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V, V // 8], [4, 1], [1, 0])
    row = gl.minimum(gl.arange(0, 64, gl.SliceLayout(1, COPY)), size - 1)[:, None]
    value = gl.arange(0, V, gl.SliceLayout(0, COPY))[None, :]
    async_copy.async_copy_global_to_shared(values, v_ptr + (row * ROW + value))
    async_copy.commit_group()
    return values


@gluon.jit
@typing.no_type_check
def of_rows(shared, LAYOUT: gl.constexpr):
    """A number for each of 64 tokens, `[4, 16, 1]` for blocks of this layout."""
    x = gl.reshape(shared.load(gl.SliceLayout(1, WIDE)), [4, 16])
    x = gl.convert_layout(x, gl.SliceLayout(2, LAYOUT), assert_trivial=True)
    return x[:, :, None]


@gluon.jit
@typing.no_type_check
def block_places():
    """Which block, row and column it is that an element of `BLOCKS` has."""
    i = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, BLOCKS)))[:, None, None]
    r = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, BLOCKS)))
    c = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, BLOCKS)))
    return i, r[None, :, None], c[None, None, :]


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

    As `pallas_kernels.delta.inverse` does it, from blocks of 1 to 16:

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
def of_block(blocks, b, layout):
    """One of 4 blocks, for every warp."""
    found = blocks.slice(b, 1, 0).load(layout)
    return found.broadcast_to([4, found.shape[1], found.shape[2]])


@gluon.jit
@typing.no_type_check
def own_warps(i):
    """Four numbers for rows i of blocks: each is 1 in its own row, and else 0."""
    is_0 = gl.where(i == 0, 1.0, 0.0)
    is_1 = gl.where(i == 1, 1.0, 0.0)
    is_2 = gl.where(i == 2, 1.0, 0.0)
    is_3 = gl.where(i == 3, 1.0, 0.0)
    return is_0, is_1, is_2, is_3


@gluon.jit
@typing.no_type_check
def invert(own, A0, A1, A2, factor, warps, r, c):
    """(I + A)^-1 of a strictly lower A `[64, 64]`, as a left operand.

    Of A and T with blocks A_ij and T_ij, each warp has row i. Blocks 0 and 1 make a
    half, and 2 and 3, and then the halves the whole:

        T_10 = -T_1 A_10 T_0    T_ij = -sum T_ik (A_kl T_lj)   k >= 2 > l, j

    `own` is A_ii, of which what is below the diagonal counts. A0, A1 and A2 times
    `factor` are A_ij, and 0 where j >= i; of A2 only A_32 counts. `warps` are those of
    `own_warps`. Copies in flight are waited for where barriers are that threads need.
    """
    zeros = gl.zeros([4, 16, 16], gl.float32, BLOCKS)
    is_0, is_1, is_2, is_3 = warps
    T, transposed = invert_blocks(own, r, c)
    inverses = gl.allocate_shared_memory(gl.float32, [4, 16, 16], SHARED_LEFTS)
    lefts = gl.allocate_shared_memory(gl.float32, [4, 16, 16], SHARED_LEFTS)
    shared_0 = gl.allocate_shared_memory(gl.float32, [4, 16, 16], SHARED_BLOCKS)
    shared_1 = gl.allocate_shared_memory(gl.float32, [4, 16, 16], SHARED_BLOCKS)
    A0 *= -factor
    A1 *= -factor
    A2 *= -factor * is_3
    inverses.store(transposed)
    shared_0.store(A0)
    shared_1.store(A1)
    T0 = of_block(inverses, 0, BLOCKS)
    even = T0 * is_1 + of_block(inverses, 2, BLOCKS) * is_3
    left = multiply_blocks(even, A0 * is_1 + A2, zeros)
    lefts.store(multiply_blocks(left, T, zeros))
    left = multiply_blocks(T, left, zeros) * is_3
    async_copy.wait_group(0)
    T1 = of_block(inverses, 1, BLOCKS)
    T10 = of_block(lefts, 1, BLOCKS)
    A20 = of_block(shared_0, 2, BLOCKS)
    A21 = of_block(shared_1, 2, BLOCKS)
    of_2 = multiply_blocks(T0, A20, multiply_blocks(T10, A21, zeros))
    of_i = multiply_blocks(T0, A0, multiply_blocks(T10, A1, zeros))
    acc = multiply_blocks(left, of_2, T * is_0)
    column_0 = multiply_blocks(T, of_i, acc)
    of_2 = multiply_blocks(T1, A21, zeros)
    of_i = multiply_blocks(T1, A1, zeros)
    acc = multiply_blocks(left, of_2, T * is_1)
    column_1 = multiply_blocks(T, of_i, acc)
    T = stack_columns((column_0, column_1, T * is_2 + left, T * is_3))
    return gl.convert_layout(T, WIDE_LEFT, assert_trivial=True)


@gluon.jit
@typing.no_type_check
def rounding(x, high):
    """What is lost of x in bfloat16, itself in bfloat16."""
    return rounded(x - high.to(gl.float32))


@gluon.jit
@typing.no_type_check
def store_rows(x, high, low):
    """Stores `[64, 64]` as the sum of two numbers in bfloat16, rows in mma order.

    One would not do: where keys repeat, its errors would add up in w.
    """
    rows = rounded(x)
    high.store(rows_to_mma_order(rows))
    low.store(rows_to_mma_order(rounding(x, rows)))


@gluon.jit
@typing.no_type_check
def start_w(high, low, keys):
    """Starts (high + low) keys: 64 tokens and 64 channels."""
    acc = gl.zeros([64, 64], gl.float32, WIDE)
    acc = warpgroup_mma(low, keys, acc, use_acc=False, is_async=True)
    return warpgroup_mma(high, keys, acc, is_async=True)


@gluon.jit
@typing.no_type_check
def start_u(high, low, values, first: gl.constexpr):
    """Starts ((high + low) values)^T: 64 channels from `first` on, and 64 tokens."""
    acc = gl.zeros([64, 64], gl.float32, WIDE)
    v = values.slice(first, 64, 1).permute([1, 0])
    low = low.permute([1, 0])
    acc = warpgroup_mma(v, low, acc, use_acc=False, is_async=True)
    return warpgroup_mma(v, high.permute([1, 0]), acc, is_async=True)


@gluon.jit
@typing.no_type_check
def norms(x, y, r, c, SCALE: gl.constexpr):
    """1 / |x| and SCALE / |y| of the rows of parts of 32 channels, layout `TOKENS`."""
    ROWS: gl.constexpr = gl.SliceLayout(2, TOKENS)
    xx = gl.zeros([4, 16, 16], gl.float32, BLOCKS)
    yy = xx
    for n in gl.static_range(len(x)):
        xx = multiply_tokens(x[n], x[n], xx)
        yy = multiply_tokens(y[n], y[n], yy)
    xx = gl.rsqrt(gl.sum(gl.where(r == c, xx, 0.0), 2) + 1e-6)
    yy = gl.rsqrt(gl.sum(gl.where(r == c, yy, 0.0), 2) + 1e-6) * SCALE
    xx = gl.convert_layout(xx, ROWS, assert_trivial=True)[:, :, None]
    yy = gl.convert_layout(yy, ROWS, assert_trivial=True)[:, :, None]
    return xx, yy


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


@gluon.jit
@typing.no_type_check
def pointers_to_tile(to_ptr, row, column, flipped, TOGETHER: gl.constexpr):
    """Pointers to a tile of 64 columns of bfloat16, in the order that products read.

    In a row, pieces of 8 columns change places: number p of row r is number p ^ r % 8.

    Args:
        to_ptr: first element of the tile.
        row: of each element.
        column: of each element.
        flipped: bits that change in `column`: multiples of 8.
        TOGETHER: columns that come as neighbours.
    """
    # In this order: rows 8 apart, and neighbours, are a constant to one address.
    piece = (column >> 3) ^ (row & 7)
    lane_row = (row >> 4 << 4) + (row & 7)
    to_ptr = to_ptr + ((lane_row << 6) + ((piece << 3) ^ flipped))
    to_ptr = to_ptr + ((row & 8) << 6)
    to_ptr = to_ptr + (column & 7)
    if len(to_ptr.shape) == 2:
        to_ptr = gl.multiple_of(to_ptr, [1, 2 * TOGETHER])
        return gl.max_contiguous(to_ptr, [1, TOGETHER])
    else:
        to_ptr = gl.multiple_of(to_ptr, [1, 1, 2 * TOGETHER])
        return gl.max_contiguous(to_ptr, [1, 1, TOGETHER])
