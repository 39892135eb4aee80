"""What the interpreter makes of Gluon: results, and what must not be seen too early."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from pallas_kernels.bulk_copies import copy, expect, start_barriers, wait
from pallas_kernels.triton_launch import compile_kernel
from tests.gpu_compile import COMPUTE_CAPABILITY, requires_h200_compiler
from tests.triton_interpreter import (
    IS_INTERPRETING,
    assert_passes_in_the_interpreter,
    interpreted_launch,
)

N = gl.constexpr(64)
TILE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
FLAT = gl.constexpr(gl.BlockedLayout([8], [32], [4], [0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
PLAIN_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
SWIZZLED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
WGMMA_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
BATCH = gl.constexpr(gl.BlockedLayout([1, 1, 4], [1, 8, 4], [4, 1, 1], [2, 1, 0]))
MMA_BATCH = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
WGMMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))

interpreted = pytest.mark.skipif(not IS_INTERPRETING, reason="needs its process")


def in_the_interpreter(test):
    return pytest.mark.triton(interpreted(test))


@pytest.mark.skipif(IS_INTERPRETING, reason="this is that process")
@requires_h200_compiler
def test_everything_here_passes_in_the_interpreter():
    assert_passes_in_the_interpreter(__file__)


@gluon.jit
@typing.no_type_check
def tile(pointer, index):
    row = gl.arange(0, N, gl.SliceLayout(1, TILE))
    column = gl.arange(0, N, gl.SliceLayout(0, TILE))
    return pointer + (index * N * N + row[:, None] * N + column[None, :])


@gluon.jit
@typing.no_type_check
def add(a, b):
    return a + b


@gluon.jit
@typing.no_type_check
def multiply_add(a0, b0, a1, b1):
    return a0 * a1, b0 * a1 + b1


@gluon.jit
@typing.no_type_check
def largest(a, i, b, j):
    is_first = a > b
    return gl.where(is_first, a, b), gl.where(is_first, i, j)


@gluon.jit
@typing.no_type_check
def language_kernel(x_ptr, out_ptr):
    x = gl.load(tile(x_ptr, 0))
    _, run = gl.associative_scan((x, x), 0, multiply_add)
    column = gl.arange(0, N, gl.SliceLayout(0, TILE))[None, :]
    best, where = gl.reduce((x, column + gl.zeros_like(x, dtype=gl.int32)), 1, largest)
    even, odd = gl.split(gl.reshape(x, [N, N // 2, 2]))
    swapped = gl.reshape(gl.join(odd, even), [N, N])
    total = gl.zeros([N, N], gl.float32, TILE)
    for i in range(3):
        total += x * i
    rounded = x.to(gl.bfloat16)
    rounded = rounded * rounded + rounded
    gl.store(tile(out_ptr, 0), run)
    gl.store(tile(out_ptr, 1), best[:, None] + gl.zeros_like(x))
    gl.store(tile(out_ptr, 2), where[:, None].to(gl.float32) + gl.zeros_like(x))
    gl.store(tile(out_ptr, 3), gl.convert_layout(swapped, TILE))
    gl.store(tile(out_ptr, 4), total + gl.sum(x, 0)[None, :])
    none = gl.zeros_like(x)
    back = gl.associative_scan(x, 1, add, reverse=True)
    half = gl.load(tile(x_ptr, 0), mask=(column < N // 2) & (none == 0.0))
    gl.store(tile(out_ptr, 5), rounded.to(gl.float32))
    gl.store(tile(out_ptr, 6), back)
    gl.store(tile(out_ptr, 7), none + gl.max(x) + gl.min(x, 1, keep_dims=True))
    gl.store(tile(out_ptr, 8), half)
    gl.store(tile(out_ptr, 9), gl.maximum(half, -9.0))


@gluon.jit
@typing.no_type_check
def assembly_kernel(x_ptr, out_ptr):
    x = gl.load(tile(x_ptr, 0))
    rounded = gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;",
        "=r,r,r",
        [x],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )
    squares = gl.inline_asm_elementwise(
        "{ .reg .b32 t; mul.rn.bf16x2 t, $1, $1; fma.rn.bf16x2 $0, t, $1, $1; }",
        "=r,r",
        [rounded],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )
    low, high = gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
        "=r,=r,r",
        [x.to(gl.int32, bitcast=True)],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    swapped = gl.inline_asm_elementwise(
        "{ .reg .b16 l, h; mov.b32 {l, h}, $1; mov.b32 $0, {h, l}; "
        "xor.b32 $0, $0, 0x1; }",
        "=r,r",
        [x.to(gl.int32, bitcast=True)],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    tiny = gl.inline_asm_elementwise(
        "fma.rn.ftz.f32 $0, $1, 0f00800000, 0f80000000;",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
    power = gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
    gl.store(tile(out_ptr, 0), squares.to(gl.float32))
    gl.store(tile(out_ptr, 1), low.to(gl.float32, bitcast=True))
    gl.store(tile(out_ptr, 2), high.to(gl.float32, bitcast=True))
    gl.store(tile(out_ptr, 3), power)
    gl.store(tile(out_ptr, 4), swapped.to(gl.float32, bitcast=True))
    gl.store(tile(out_ptr, 5), tiny)


@gluon.jit
@typing.no_type_check
def memory_kernel(x_ptr, out_ptr):
    x = gl.load(tile(x_ptr, 0))
    memory = gl.allocate_shared_memory(gl.float32, [2, N, N], SWIZZLED)
    memory.index(1).store(x)
    right = memory.index(1).slice(N // 2, N // 2, 1)
    right.store(right.load(TILE) * 2.0)
    gl.store(tile(out_ptr, 0), memory.index(0).load(TILE))
    gl.store(tile(out_ptr, 1), memory.index(1).load(TILE))
    gl.store(tile(out_ptr, 2), memory.index(1).permute((1, 0)).load(TILE))
    plain = gl.allocate_shared_memory(gl.float32, [N, N], PLAIN, x)
    plain.reshape([N // 2, 2 * N]).slice(0, N // 4).store(
        gl.zeros([N // 4, 2 * N], gl.float32, TILE)
    )
    bits = plain._reinterpret(gl.int32, [N * N], PLAIN_FLAT).load(FLAT)
    flat = gl.arange(0, N * N, FLAT)
    gl.store(out_ptr + 3 * N * N + flat, bits.to(gl.float32, bitcast=True))


@gluon.jit
@typing.no_type_check
def copy_kernel(x_ptr, out_ptr, OUTSTANDING: gl.constexpr):
    memory = gl.allocate_shared_memory(gl.float32, [2, N, N], SWIZZLED)
    is_upper = gl.arange(0, N, gl.SliceLayout(1, TILE))[:, None] < N // 2
    for i in gl.static_range(2):
        memory.index(i).store(gl.full([N, N], 7.0, gl.float32, TILE))
        async_copy.async_copy_global_to_shared(
            memory.index(i), tile(x_ptr, 0), mask=is_upper
        )
        async_copy.commit_group()
    async_copy.wait_group(OUTSTANDING)
    for i in gl.static_range(2):
        gl.store(tile(out_ptr, i), memory.index(i).load(TILE))


@gluon.jit
@typing.no_type_check
def bulk_kernel(x_ptr, out_ptr, WAITS: gl.constexpr, MISSING_BYTES: gl.constexpr):
    """Copies 3 tiles, of which one is overwritten, and as a second phase the first."""
    FIRST: gl.constexpr = 3 * N * N * 2 // 8
    memory = gl.allocate_shared_memory(gl.bfloat16, [4, N, N], WGMMA_SHARED)
    tiles = memory._reinterpret(gl.bfloat16, [4, N, N], WGMMA_SHARED)
    start_barriers(FIRST, 2)
    for phase in gl.static_range(2):
        first, COUNT = (0, 3) if phase == 0 else (1, 1)
        is_wanted = gl.program_id(0) < 1
        num_bytes = COUNT * N * N * 2 - MISSING_BYTES
        expect(FIRST + 1, num_bytes, is_wanted)
        copy(tiles, first, COUNT, x_ptr, FIRST + 1, is_wanted)
        # Of no effect.
        expect(FIRST + 1, num_bytes, is_wanted == 0)
        copy(tiles, 0, 2, x_ptr, FIRST + 1, is_wanted == 0)
        if phase < WAITS:
            wait(FIRST + 1, phase)
            wait(FIRST + 1, phase)
            gl.thread_barrier()
    for i in gl.static_range(3):
        gl.store(tile(out_ptr, i), tiles.index(i).load(TILE).to(gl.float32))


@gluon.jit
@typing.no_type_check
def mma_kernel(x_ptr, y_ptr, out_ptr):
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 1)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 1)
    x = gl.convert_layout(gl.load(tile(x_ptr, 0)), LEFT)
    y = gl.convert_layout(gl.load(tile(y_ptr, 0)), RIGHT)
    product = ampere.mma_v2(x, y, gl.full([N, N], 1.0, gl.float32, MMA))
    gl.store(tile(out_ptr, 0), gl.convert_layout(product, TILE))


@gluon.jit
@typing.no_type_check
def batch_kernel(x_ptr, y_ptr, out_ptr):
    """Four products of 16 by 16."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA_BATCH, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA_BATCH, 2)
    batch = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, BATCH)))
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, BATCH)))
    column = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, BATCH)))
    at = batch[:, None, None] * 256 + row[None, :, None] * 16 + column[None, None, :]
    x = gl.convert_layout(gl.load(x_ptr + at), LEFT)
    y = gl.convert_layout(gl.load(y_ptr + at), RIGHT)
    product = ampere.mma_v2(x, y, gl.zeros([4, 16, 16], gl.float32, MMA_BATCH))
    gl.store(out_ptr + at, gl.convert_layout(product, BATCH))


@gluon.jit
@typing.no_type_check
def register_wgmma_kernel(x_ptr, y_ptr, out_ptr):
    """Products whose left side is in registers, and the second of which sums anew."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, WGMMA, 2)
    x = gl.convert_layout(gl.load(tile(x_ptr, 0)), LEFT)
    y = gl.allocate_shared_memory(gl.bfloat16, [N, N], WGMMA_SHARED)
    y.store(gl.load(tile(y_ptr, 0)))
    hopper.fence_async_shared()
    acc = hopper.warpgroup_mma_init(gl.full([N, N], 1.0, gl.float32, WGMMA))
    acc = hopper.warpgroup_mma(x, y.permute((1, 0)), acc, is_async=True)
    acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    gl.store(tile(out_ptr, 0), gl.convert_layout(acc, TILE))
    acc = hopper.warpgroup_mma(x, y, acc, use_acc=False)
    gl.store(tile(out_ptr, 1), gl.convert_layout(acc, TILE))


@gluon.jit
@typing.no_type_check
def wgmma_kernel(
    x_ptr,
    y_ptr,
    out_ptr,
    OUTSTANDING: gl.constexpr,
    FENCE: gl.constexpr,
    IS_OVERWRITTEN: gl.constexpr,
):
    """X y, then x y + x y with only `OUTSTANDING` products waited for."""
    x = gl.allocate_shared_memory(gl.bfloat16, [N, N], WGMMA_SHARED)
    y = gl.allocate_shared_memory(gl.bfloat16, [N, N], WGMMA_SHARED)
    x.store(gl.load(tile(x_ptr, 0)))
    async_copy.async_copy_global_to_shared(y, tile(y_ptr, 0))
    async_copy.commit_group()
    if FENCE == "before the wait":
        hopper.fence_async_shared()
    async_copy.wait_group(0)
    if FENCE == "after the wait":
        hopper.fence_async_shared()
    none = gl.zeros([N, N], gl.float32, WGMMA)
    once = hopper.warpgroup_mma(x, y, none, is_async=True)
    once = hopper.warpgroup_mma_wait(1, deps=(once,))
    twice = hopper.warpgroup_mma(x, y, once, is_async=True)
    if IS_OVERWRITTEN:
        y.store(gl.zeros([N, N], gl.bfloat16, TILE))
    twice = hopper.warpgroup_mma_wait(OUTSTANDING, deps=(twice,))
    gl.store(tile(out_ptr, 0), gl.convert_layout(twice, TILE))


def draw(dtype="float32", count=1):
    rng = np.random.default_rng(0)
    found = [rng.standard_normal((N.value, N.value)) for _ in range(count)]
    return [jnp.asarray(x, dtype) for x in found]


def run(kernel, *operands, num_tiles, **constants):
    """The tiles that a program writes, as NumPy arrays."""
    shape = jax.ShapeDtypeStruct((num_tiles, N.value, N.value), "float32")
    (out,) = interpreted_launch(
        kernel, *operands, outputs=[shape], grid=(1,), **constants
    )
    return np.asarray(out)


def round_bfloat16(x):
    return np.asarray(x, jnp.bfloat16).astype(np.float32)


@in_the_interpreter
def test_the_language_matches_numpy():
    (x,) = draw()
    out = run(language_kernel, x, num_tiles=10)
    x = np.asarray(x)
    row = np.zeros(N.value)
    for i in range(N.value):
        row = row * x[i] + x[i]
        np.testing.assert_allclose(out[0, i], row, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(out[1, :, 0], x.max(1))
    np.testing.assert_array_equal(out[2, :, 0], x.argmax(1))
    pairs = x.reshape(N.value, -1, 2)[..., ::-1]
    np.testing.assert_array_equal(out[3], pairs.reshape(x.shape))
    np.testing.assert_allclose(out[4], 3 * x + x.sum(0), rtol=1e-5, atol=1e-5)
    b = round_bfloat16(x)
    expected = round_bfloat16(round_bfloat16(b * b) + b)
    np.testing.assert_array_equal(out[5], expected)
    back = np.cumsum(x[:, ::-1], 1)[:, ::-1]
    np.testing.assert_allclose(out[6], back, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(
        out[7], np.broadcast_to(x.max() + x.min(1)[:, None], x.shape)
    )


@in_the_interpreter
def test_what_a_masked_load_leaves_out_is_nan():
    (x,) = draw()
    out = run(language_kernel, x, num_tiles=10)[8:]
    middle = N.value // 2
    np.testing.assert_array_equal(out[0, :, :middle], x[:, :middle])
    assert np.all(np.isnan(out[0, :, middle:]))
    # Of a NaN and a number the larger is the number.
    assert np.all(out[1, :, middle:] == -9)


@in_the_interpreter
def test_inline_assembly_matches_numpy():
    (x,) = draw()
    out = run(assembly_kernel, x, num_tiles=6)
    x = np.asarray(x)
    b = round_bfloat16(x)
    np.testing.assert_array_equal(out[0], round_bfloat16(round_bfloat16(b * b) * b + b))
    low, high = x.view(np.uint32) << 16, x.view(np.uint32) & 0xFFFF0000
    np.testing.assert_array_equal(out[1].view(np.uint32), low)
    np.testing.assert_array_equal(out[2].view(np.uint32), high)
    np.testing.assert_allclose(out[3], np.exp2(x), rtol=1e-6)
    halves = x.view(np.uint16).reshape(*x.shape, 2)[..., ::-1]
    halves = np.ascontiguousarray(halves).view(np.uint32)[..., 0]
    np.testing.assert_array_equal(out[4].view(np.uint32), halves ^ 1)
    # Too small for a normal number is 0.
    smallest = np.finfo(np.float32).tiny
    expected = np.where(np.abs(x) < 1, 0, x * smallest)
    np.testing.assert_array_equal(out[5], expected)
    assert np.any(out[5])


@in_the_interpreter
def test_views_share_memory_and_what_nobody_stored_is_nan():
    (x,) = draw()
    out = run(memory_kernel, x, num_tiles=4)
    expected = np.array(x)
    expected[:, N.value // 2 :] *= 2
    assert np.all(np.isnan(out[0]))
    np.testing.assert_array_equal(out[1], expected)
    np.testing.assert_array_equal(out[2], expected.T)
    assert not np.any(out[3, : N.value // 2])
    np.testing.assert_array_equal(out[3, N.value // 2 :], x[N.value // 2 :])


@in_the_interpreter
@pytest.mark.parametrize("outstanding", [0, 1, 2])
def test_a_copy_shows_at_the_wait_for_its_group(outstanding):
    (x,) = draw()
    out = run(copy_kernel, x, num_tiles=2, OUTSTANDING=outstanding)
    expected = np.array(x)
    expected[N.value // 2 :] = 0
    for i in range(2):
        if i < 2 - outstanding:
            np.testing.assert_array_equal(out[i], expected)
        else:
            assert np.all(np.isnan(out[i]))


def in_order_of_products(x):
    """The tile that copies in bulk bring, as indices find it."""
    row, piece = np.ogrid[:64, :8]
    return x.reshape(64, 8, 8)[row, piece ^ row % 8].reshape(64, 64)


@in_the_interpreter
def test_copies_in_bulk_show_at_the_wait_for_their_phase():
    x = jnp.stack(draw("bfloat16", count=3))
    tiles = [in_order_of_products(y) for y in np.asarray(x, np.float32)]
    out = run(bulk_kernel, x, num_tiles=3, WAITS=2, MISSING_BYTES=0)
    np.testing.assert_array_equal(out, [tiles[0], tiles[0], tiles[2]])
    out = run(bulk_kernel, x, num_tiles=3, WAITS=1, MISSING_BYTES=0)
    assert np.all(np.isnan(out[1]))
    np.testing.assert_array_equal(out[::2], tiles[::2])


@in_the_interpreter
def test_a_phase_of_other_bytes_than_expected_is_refused():
    x = jnp.stack(draw("bfloat16", count=3))
    with pytest.raises(Exception, match="24576 bytes are copied of 24560 expected"):
        run(bulk_kernel, x, num_tiles=3, WAITS=2, MISSING_BYTES=16)
    with pytest.raises(Exception, match="a barrier's phase is expected twice"):
        run(bulk_kernel, x, num_tiles=3, WAITS=0, MISSING_BYTES=0)


@in_the_interpreter
def test_products_of_float32_have_the_bits_of_tf32():
    x, y = draw(count=2)
    (out,) = run(mma_kernel, x, y, num_tiles=1)
    cut = [
        (np.asarray(z).view(np.uint32) & 0xFFFFE000).view(np.float32) for z in (x, y)
    ]
    np.testing.assert_allclose(out, cut[0] @ cut[1] + 1, rtol=1e-5, atol=1e-5)
    assert np.abs(out - np.asarray(x) @ np.asarray(y) - 1).max() > 1e-4


@in_the_interpreter
def test_products_of_a_batch():
    x, y = draw("bfloat16", count=2)
    out = run(batch_kernel, x, y, num_tiles=1).reshape(-1)[: 4 * 256]
    x, y = (np.asarray(z, np.float32).reshape(-1)[: 4 * 256] for z in (x, y))
    product = x.reshape(4, 16, 16) @ y.reshape(4, 16, 16)
    np.testing.assert_allclose(out.reshape(4, 16, 16), product, rtol=1e-5, atol=1e-5)


@in_the_interpreter
def test_products_with_one_side_in_registers():
    x, y = draw("bfloat16", count=2)
    out = run(register_wgmma_kernel, x, y, num_tiles=2)
    x, y = (np.asarray(z, np.float32) for z in (x, y))
    np.testing.assert_allclose(out[0], x @ y.T + 1, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out[1], x @ y, rtol=1e-5, atol=1e-5)


WGMMA_CONSTANTS = {
    "OUTSTANDING": 0,
    "FENCE": "after the wait",
    "IS_OVERWRITTEN": False,
}


def run_wgmma(**changes):
    x, y = draw("bfloat16", count=2)
    (out,) = run(wgmma_kernel, x, y, num_tiles=1, **(WGMMA_CONSTANTS | changes))
    return out, np.asarray(x, np.float32) @ np.asarray(y, np.float32)


@in_the_interpreter
def test_a_product_shows_at_its_wait():
    out, product = run_wgmma()
    np.testing.assert_allclose(out, 2 * product, rtol=1e-5, atol=1e-5)
    out, _ = run_wgmma(OUTSTANDING=1)
    assert np.all(np.isnan(out))


@in_the_interpreter
def test_an_operand_overwritten_before_the_wait_shows():
    out, product = run_wgmma(IS_OVERWRITTEN=True)
    assert np.all(np.isnan(out))
    assert np.all(product)


@in_the_interpreter
@pytest.mark.parametrize("fence", ["none", "before the wait"])
def test_a_store_or_a_copy_without_a_fence_is_refused(fence):
    with pytest.raises(Exception, match="no fence_async_shared since a write"):
        run_wgmma(FENCE=fence)


@gluon.jit
@typing.no_type_check
def missing_function_kernel(out_ptr):
    barrier = gl.allocate_shared_memory(gl.int64, [1], hopper.mbarrier.MBarrierLayout())
    hopper.mbarrier.init(barrier, count=1)


@gluon.jit
@typing.no_type_check
def missing_instruction_kernel(out_ptr):
    gl.inline_asm_elementwise(
        "popc.b32 $0, $1;",
        "=r,r",
        [gl.program_id(0)],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
@typing.no_type_check
def truth_kernel(out_ptr):
    row = gl.arange(0, N, gl.SliceLayout(1, TILE))
    if row > 2 and row < 4:
        gl.store(out_ptr, 1.0)


@gluon.jit
@typing.no_type_check
def ranks_kernel(out_ptr):
    column = gl.arange(0, N, gl.SliceLayout(0, TILE))
    gl.store(out_ptr + column, column[None, :] + column)


@in_the_interpreter
@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (missing_function_kernel, r"the interpreter has no .*mbarrier\.init"),
        (missing_instruction_kernel, r"the interpreter has no popc\.b32"),
        (truth_kernel, r"a tensor of shape \[64\] has no truth"),
        (ranks_kernel, r"cannot broadcast \[1, 64\] with \[64\]"),
    ],
)
def test_what_is_not_known_is_refused_by_name(kernel, message):
    with pytest.raises(Exception, match=message):
        run(kernel, num_tiles=1)


@in_the_interpreter
def test_a_cluster_is_refused():
    with pytest.raises(NotImplementedError, match="a cluster of 2"):
        run(language_kernel, *draw(), num_tiles=10, cluster_size=2)


@requires_h200_compiler
@pytest.mark.parametrize(
    ("kernel", "dtype", "constants"),
    [
        (language_kernel, "float32", {}),
        (assembly_kernel, "float32", {}),
        (memory_kernel, "float32", {}),
        (copy_kernel, "float32", {"OUTSTANDING": 0}),
        (bulk_kernel, "bfloat16", {"WAITS": 2, "MISSING_BYTES": 0}),
        (mma_kernel, "float32", {}),
        (batch_kernel, "bfloat16", {}),
        (register_wgmma_kernel, "bfloat16", {}),
        (wgmma_kernel, "bfloat16", WGMMA_CONSTANTS),
    ],
)
def test_the_compiler_takes_these_kernels(kernel, dtype, constants):
    num_operands = len(kernel.arg_names) - len(constants) - 1
    dtypes = (*[dtype] * num_operands, "float32")
    compile_kernel(kernel, dtypes, tuple(constants.items()), 4, 1, COMPUTE_CAPABILITY)
