"""Parts of the Triton kernel of `pallas_kernels.delta_decode`."""

import typing

import triton
import triton.language as tl


@triton.jit
@typing.no_type_check
def sum3(a0, a1, a2, b0, b1, b2):
    """Adds triples, for a reduction."""
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
@typing.no_type_check
def sum2(a0, a1, b0, b1):
    """Adds pairs, for a reduction."""
    return a0 + b0, a1 + b1


@triton.jit
@typing.no_type_check
def cast_pointer(pointer, DTYPE: tl.constexpr):
    """Points to elements of another dtype."""
    if DTYPE == "float32":
        return pointer.to(tl.pointer_type(tl.float32))
    elif DTYPE == "bfloat16":
        return pointer.to(tl.pointer_type(tl.bfloat16))
    else:
        tl.static_assert(DTYPE == "float16")
        return pointer.to(tl.pointer_type(tl.float16))


@triton.jit
@typing.no_type_check
def taps(weight_ptr, channel, SIZE: tl.constexpr):
    """The four taps of each channel."""
    w = tl.load(weight_ptr + channel[:, None] * 4 + tl.arange(0, 4)[None, :])
    even, odd = tl.split(tl.reshape(w.to(tl.float32), [SIZE, 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
@typing.no_type_check
def load_window(window_ptr, channel, CHANNELS: tl.constexpr, mask):
    """The window of some channels, oldest first."""
    u0 = tl.load(window_ptr + channel, mask=mask, other=0.0)
    u1 = tl.load(window_ptr + CHANNELS + channel, mask=mask, other=0.0)
    u2 = tl.load(window_ptr + 2 * CHANNELS + channel, mask=mask, other=0.0)
    return u0, u1, u2


@triton.jit
@typing.no_type_check
def store_window(window_ptr, channel, CHANNELS: tl.constexpr, u0, u1, u2, mask):
    """Stores the window of some channels, oldest first."""
    tl.store(window_ptr + channel, u0, mask=mask)
    tl.store(window_ptr + CHANNELS + channel, u1, mask=mask)
    tl.store(window_ptr + 2 * CHANNELS + channel, u2, mask=mask)


@triton.jit
@typing.no_type_check
def convolve(u0, u1, u2, x, w0, w1, w2, w3, bias, IS_SILU: tl.constexpr):
    """The convolution of one token, from its taps and inputs."""
    y = u0.to(tl.float32) * w0 + u1.to(tl.float32) * w1
    y += u2.to(tl.float32) * w2 + x.to(tl.float32) * w3 + bias
    if IS_SILU:
        y = y / (1.0 + tl.exp(-y))
    return y


@triton.jit
@typing.no_type_check
def gate_decay(logits, a_log, LOWER_BOUND: tl.constexpr):
    """The decay of a token: the softplus gate, or the bounded one."""
    if LOWER_BOUND is None:
        # log(1 + e), exact for the small e of a decay near 1 and for large logits.
        e = tl.exp(tl.minimum(logits, 20.0))
        log1p = tl.where(e < 1e-3, e * (1.0 - 0.5 * e), tl.log(1.0 + e))
        softplus = tl.where(logits > 20.0, logits, log1p)
        log_decay = -tl.exp(a_log) * softplus
    else:
        log_decay = LOWER_BOUND / (1.0 + tl.exp(-tl.exp(a_log) * logits))
    return tl.exp(log_decay)


@triton.jit
@typing.no_type_check
def arrive(after):
    """Says at the cluster's barrier that `after` is computed; waits for nobody.

    The operand, the same in all threads, ties the instruction to its place.
    """
    return tl.inline_asm_elementwise(
        "barrier.cluster.arrive.release; mov.b32 $0, $1;",
        "=r,r",
        [after],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
@typing.no_type_check
def wait(after):
    """Waits until all programs of the cluster have arrived; `after` as in `arrive`."""
    return tl.inline_asm_elementwise(
        "barrier.cluster.wait.acquire; mov.b32 $0, $1;",
        "=r,r",
        [after],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
