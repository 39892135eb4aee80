"""Parts of the Gluon kernel of `pallas_kernels.delta.decode`."""

import typing

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from pallas_kernels import triton_pointers

cast_pointer = gluon.jit(triton_pointers.cast_pointer.fn)


@gluon.jit
@typing.no_type_check
def sum3(a0, a1, a2, b0, b1, b2):
    """Adds triples, for a reduction."""
    return a0 + b0, a1 + b1, a2 + b2


@gluon.jit
@typing.no_type_check
def sum2(a0, a1, b0, b1):
    """Adds pairs, for a reduction."""
    return a0 + b0, a1 + b1


@gluon.jit
@typing.no_type_check
def taps(weight_ptr, first, SIZE: gl.constexpr, CHANNEL: gl.constexpr):
    """The four taps of `SIZE` channels from `first` on, in the layout `CHANNEL`."""
    WARPS: gl.constexpr = gl.num_warps()
    FOUR: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    channel = first + gl.arange(0, SIZE, gl.SliceLayout(1, FOUR))
    tap = gl.arange(0, 4, gl.SliceLayout(0, FOUR))
    w = gl.load(weight_ptr + channel[:, None] * 4 + tap[None, :]).to(gl.float32)
    even, odd = gl.split(gl.reshape(w, [SIZE, 2, 2]))
    w0, w2 = gl.split(even)
    w1, w3 = gl.split(odd)
    return (
        gl.convert_layout(w0, CHANNEL, assert_trivial=True),
        gl.convert_layout(w1, CHANNEL, assert_trivial=True),
        gl.convert_layout(w2, CHANNEL, assert_trivial=True),
        gl.convert_layout(w3, CHANNEL, assert_trivial=True),
    )


@gluon.jit
@typing.no_type_check
def copy_channels(ptr, SIZE: gl.constexpr, mask):
    """Starts to copy `SIZE` numbers to shared memory; zeros where the mask is off."""
    WARPS: gl.constexpr = gl.num_warps()
    LANE: gl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    COPY: gl.constexpr = gl.BlockedLayout([LANE], [32], [WARPS], [0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    channels = gl.allocate_shared_memory(ptr.dtype.element_ty, [SIZE], SHARED)
    async_copy.async_copy_global_to_shared(
        channels, ptr + gl.arange(0, SIZE, COPY), mask=mask
    )
    return channels


@gluon.jit
@typing.no_type_check
def copy_inputs(
    window_ptr, x_ptr, CHANNELS: gl.constexpr, SIZE: gl.constexpr, has_past
):
    """Starts to copy a window, oldest first, and the inputs of a token behind it."""
    return (
        copy_channels(window_ptr, SIZE, has_past),
        copy_channels(window_ptr + CHANNELS, SIZE, has_past),
        copy_channels(window_ptr + 2 * CHANNELS, SIZE, has_past),
        copy_channels(x_ptr, SIZE, None),
    )


@gluon.jit
@typing.no_type_check
def load_inputs(inputs, CHANNEL: gl.constexpr):
    """What `copy_inputs` brought to shared memory."""
    u0, u1, u2, x = inputs
    return u0.load(CHANNEL), u1.load(CHANNEL), u2.load(CHANNEL), x.load(CHANNEL)


@gluon.jit
@typing.no_type_check
def store_window(window_ptr, channel, CHANNELS: gl.constexpr, u0, u1, u2, mask):
    """Stores the window of some channels, oldest first."""
    gl.store(window_ptr + channel, u0, mask=mask)
    gl.store(window_ptr + CHANNELS + channel, u1, mask=mask)
    gl.store(window_ptr + 2 * CHANNELS + channel, u2, mask=mask)


@gluon.jit
@typing.no_type_check
def through_shared(a, b, CHANNEL: gl.constexpr):
    """The same numbers; nothing is computed from them ahead of a barrier before it."""
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared_a = gl.allocate_shared_memory(a.dtype, a.shape, SHARED, a)
    shared_b = gl.allocate_shared_memory(b.dtype, b.shape, SHARED, b)
    return shared_a.load(CHANNEL), shared_b.load(CHANNEL)


@gluon.jit
@typing.no_type_check
def convolve(u0, u1, u2, x, w0, w1, w2, w3, bias, IS_SILU: gl.constexpr):
    """The convolution of one token, from its taps and inputs."""
    y = u0.to(gl.float32) * w0 + u1.to(gl.float32) * w1
    y += u2.to(gl.float32) * w2 + x.to(gl.float32) * w3 + bias
    if IS_SILU:
        y = y / (1.0 + gl.exp(-y))
    return y


@gluon.jit
@typing.no_type_check
def gate_decay(logits, a_log, LOWER_BOUND: gl.constexpr):
    """The decay of a token: the softplus gate, or the bounded one."""
    if LOWER_BOUND is None:
        # log(1 + e), exact for the small e of a decay near 1 and for large logits.
        e = gl.exp(gl.minimum(logits, 20.0))
        log1p = gl.where(e < 1e-3, e * (1.0 - 0.5 * e), gl.log(1.0 + e))
        softplus = gl.where(logits > 20.0, logits, log1p)
        log_decay = -gl.exp(a_log) * softplus
    else:
        log_decay = LOWER_BOUND / (1.0 + gl.exp(-gl.exp(a_log) * logits))
    return gl.exp(log_decay)


@gluon.jit
@typing.no_type_check
def load_tile(ptr, mask):
    """Loads a tile of the state; zeros where the mask is off.

    Its lines stay in L2 until they are stored again: 3 to 4 % at 256 rows.
    """
    return gl.load(ptr, mask=mask, other=0.0, eviction_policy="evict_last")


@gluon.jit
@typing.no_type_check
def load_key(q_shared, k_shared, decay_shared, KEY: gl.constexpr, HAS_DECAY):
    """q, k and decay of one token along the keys, and the sums of qq, kk and qk."""
    q = q_shared.load(KEY)
    k = k_shared.load(KEY)
    qq, kk, qk = gl.reduce((q * q, k * k, q * k), 0, sum3)
    decay = decay_shared.load(KEY)[None, :] if HAS_DECAY else 0.0
    return q[None, :], k[None, :], decay, qq, kk, qk


@gluon.jit
@typing.no_type_check
def arrive(after):
    """Says at the cluster's barrier that `after` is computed; waits for nobody.

    The operand, the same in all threads, ties the instruction to its place. Nothing is
    released: that would be a fence of the whole card, which waits for the loads of the
    state, and what was loaded to compute `after` can no longer change.
    """
    return gl.inline_asm_elementwise(
        "barrier.cluster.arrive.relaxed; mov.b32 $0, $1;",
        "=r,r",
        [after],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
@typing.no_type_check
def wait(after):
    """Waits until all programs of the cluster have arrived; `after` as in `arrive`."""
    return gl.inline_asm_elementwise(
        "barrier.cluster.wait.acquire; mov.b32 $0, $1;",
        "=r,r",
        [after],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
