"""The Triton kernel of `pallas_kernels.delta_decode`, and its arithmetic.

A program owns one block of value rows of one head of one row of the batch. It keeps
its part of the state in registers for all tokens of the step:

    S [value, key] <- S * decay
    u              = beta * (v - S k)
    S              <- S + outer(u, k),   o = S q

The convolution of q and k is done again by each program that needs it. Those programs
share windows: they are one cluster of thread blocks, and meet at a barrier between
their last read of a window and the first write. The tile of the state has the shape
[value, J, K / J], so that the sums over the key channels are made in registers but
for the last few shuffles. Norms stay outside of it: with q and k as the convolution
leaves them, S k and S q are scaled once per value row.

Letters: T tokens, H heads, K and V elements of a key and of a value.
"""

import typing

import triton
import triton.language as tl


@triton.jit
@typing.no_type_check
def _sum3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
@typing.no_type_check
def _sum2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
@typing.no_type_check
def _cast_pointer(pointer, DTYPE: tl.constexpr):
    if DTYPE == "float32":
        return pointer.to(tl.pointer_type(tl.float32))
    elif DTYPE == "bfloat16":
        return pointer.to(tl.pointer_type(tl.bfloat16))
    else:
        tl.static_assert(DTYPE == "float16")
        return pointer.to(tl.pointer_type(tl.float16))


@triton.jit
@typing.no_type_check
def _taps(weight_ptr, channel, SIZE: tl.constexpr):
    """The four taps of each channel."""
    w = tl.load(weight_ptr + channel[:, None] * 4 + tl.arange(0, 4)[None, :])
    even, odd = tl.split(tl.reshape(w.to(tl.float32), [SIZE, 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
@typing.no_type_check
def _window(window_ptr, channel, CHANNELS: tl.constexpr, mask):
    u0 = tl.load(window_ptr + channel, mask=mask, other=0.0)
    u1 = tl.load(window_ptr + CHANNELS + channel, mask=mask, other=0.0)
    u2 = tl.load(window_ptr + 2 * CHANNELS + channel, mask=mask, other=0.0)
    return u0, u1, u2


@triton.jit
@typing.no_type_check
def _store_window(window_ptr, channel, CHANNELS: tl.constexpr, u0, u1, u2, mask):
    tl.store(window_ptr + channel, u0, mask=mask)
    tl.store(window_ptr + CHANNELS + channel, u1, mask=mask)
    tl.store(window_ptr + 2 * CHANNELS + channel, u2, mask=mask)


@triton.jit
@typing.no_type_check
def _convolve(u0, u1, u2, x, w0, w1, w2, w3, bias, IS_SILU: tl.constexpr):
    y = u0.to(tl.float32) * w0 + u1.to(tl.float32) * w1
    y += u2.to(tl.float32) * w2 + x.to(tl.float32) * w3 + bias
    if IS_SILU:
        y = y / (1.0 + tl.exp(-y))
    return y


@triton.jit
@typing.no_type_check
def _decay(logits, a_log, LOWER_BOUND: tl.constexpr):
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
def _meet(after):
    """Joins the cluster's barrier; nobody passes before all have come.

    The operand is what must be computed before: it ties the barrier to its place.
    """
    tl.inline_asm_elementwise(
        "barrier.cluster.arrive.release; barrier.cluster.wait.acquire; mov.b32 $0, $1;",
        "=r,r",
        [after],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
@typing.no_type_check
def delta_decode_kernel(
    x_ptr,
    gate_logits_ptr,
    beta_logits_ptr,
    weight_ptr,
    bias_ptr,
    a_log_ptr,
    dt_bias_ptr,
    slots_ptr,
    is_fresh_ptr,
    offsets_ptr,
    _pool_in_ptr,
    pool_ptr,
    out_ptr,
    T: tl.constexpr,
    H: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LANE_KEYS: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    WINDOW_DTYPE: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
    LOWER_BOUND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SILU: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    LAST_ROW: tl.constexpr,
):
    """See `pallas_kernels.delta_decode.delta_decode`."""
    NUM_BLOCKS: tl.constexpr = V // BLOCK_V
    J: tl.constexpr = K // LANE_KEYS
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * K + H * V
    IS_CLUSTER: tl.constexpr = NUM_BLOCKS * H > KEY_HEADS
    item = tl.program_id(0)
    block = item % NUM_BLOCKS
    head = item // NUM_BLOCKS % H
    row = item // (NUM_BLOCKS * H)
    is_first = (block == 0) & (head % (H // KEY_HEADS) == 0)

    slot = tl.load(slots_ptr + row)
    is_fresh = tl.load(is_fresh_ptr + row)
    state_row = tl.load(offsets_ptr)
    window_row = tl.load(offsets_ptr + 1)

    key = tl.arange(0, K)
    value = block * BLOCK_V + tl.arange(0, BLOCK_V)
    q_at = head // (H // KEY_HEADS) * K + key
    k_at = KEY_HEADS * K + q_at
    v_at = 2 * KEY_HEADS * K + head * V + value
    x_row = x_ptr + row.to(tl.int64) * T * CHANNELS
    xq = tl.load(x_row + q_at)
    xk = tl.load(x_row + k_at)
    xv = tl.load(x_row + v_at)
    wq0, wq1, wq2, wq3 = _taps(weight_ptr, q_at, K)
    wk0, wk1, wk2, wk3 = _taps(weight_ptr, k_at, K)
    wv0 = tl.load(weight_ptr + v_at * 4).to(tl.float32)
    wv1 = tl.load(weight_ptr + v_at * 4 + 1).to(tl.float32)
    wv2 = tl.load(weight_ptr + v_at * 4 + 2).to(tl.float32)
    wv3 = tl.load(weight_ptr + v_at * 4 + 3).to(tl.float32)
    if HAS_BIAS:
        bias_q = tl.load(bias_ptr + q_at).to(tl.float32)
        bias_k = tl.load(bias_ptr + k_at).to(tl.float32)
        bias_v = tl.load(bias_ptr + v_at).to(tl.float32)
    else:
        bias_q = 0.0
        bias_k = 0.0
        bias_v = 0.0
    if IS_PER_CHANNEL:
        GATES: tl.constexpr = H * K
        gate_at = head * K + key
    else:
        GATES: tl.constexpr = H
        gate_at = head
    gate_row = gate_logits_ptr + row.to(tl.int64) * T * GATES
    gate_logits = tl.load(gate_row + gate_at).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + gate_at).to(tl.float32)
    a_log = tl.load(a_log_ptr + head).to(tl.float32)
    beta_logits = tl.load(beta_logits_ptr + row * T * H + head).to(tl.float32)

    # An absent slot may be any number: nothing behind it is read or written.
    is_present = (slot >= 0) & (slot.to(tl.int64) + state_row <= LAST_ROW)
    has_past = is_present & (is_fresh == 0)
    state_ptr = pool_ptr + (slot.to(tl.int64) + state_row) * ROW_WORDS
    window_ptr = pool_ptr + (slot.to(tl.int64) + window_row) * ROW_WORDS
    state_ptr = _cast_pointer(state_ptr, STATE_DTYPE)
    window_ptr = _cast_pointer(window_ptr, WINDOW_DTYPE)

    state_at = (
        (head * V + value)[:, None, None] * K
        + (tl.arange(0, J) * LANE_KEYS)[None, :, None]
        + tl.arange(0, LANE_KEYS)[None, None, :]
    )
    S = tl.load(state_ptr + state_at, mask=has_past, other=0.0)
    # The window is loaded behind a barrier: else the compiler moves the loads of the
    # state, the most of all bytes, behind the convolution, which waits for the window.
    tl.debug_barrier()
    q0, q1, q2 = _window(window_ptr, q_at, CHANNELS, has_past)
    k0, k1, k2 = _window(window_ptr, k_at, CHANNELS, has_past)
    v0, v1, v2 = _window(window_ptr, v_at, CHANNELS, has_past)
    S = S.to(tl.float32)

    out_row = out_ptr + row.to(tl.int64) * (T * H * V) + head * V + value
    for t in tl.static_range(T):
        if t > 0:
            xq = tl.load(x_row + t * CHANNELS + q_at)
            xk = tl.load(x_row + t * CHANNELS + k_at)
            xv = tl.load(x_row + t * CHANNELS + v_at)
            gate_logits = tl.load(gate_row + t * GATES + gate_at).to(tl.float32)
            beta_logits = tl.load(beta_logits_ptr + (row * T + t) * H + head).to(
                tl.float32
            )
        q = _convolve(q0, q1, q2, xq, wq0, wq1, wq2, wq3, bias_q, IS_SILU)
        k = _convolve(k0, k1, k2, xk, wk0, wk1, wk2, wk3, bias_k, IS_SILU)
        v = _convolve(v0, v1, v2, xv, wv0, wv1, wv2, wv3, bias_v, IS_SILU)
        q0, q1, q2 = q1, q2, xq.to(q0.dtype)
        k0, k1, k2 = k1, k2, xk.to(k0.dtype)
        v0, v1, v2 = v1, v2, xv.to(v0.dtype)
        decay = _decay(gate_logits + dt_bias, a_log, LOWER_BOUND)
        beta = 1.0 / (1.0 + tl.exp(-beta_logits))

        qq, kk, qk = tl.reduce((q * q, k * k, q * k), 0, _sum3)
        q = tl.reshape(q, [J, LANE_KEYS])[None, :, :]
        k = tl.reshape(k, [J, LANE_KEYS])[None, :, :]
        if IS_PER_CHANNEL:
            S = S * tl.reshape(decay, [J, LANE_KEYS])[None, :, :]
        else:
            S = S * decay
        q_scale = tl.rsqrt(qq + 1e-6) * (K**-0.5)
        k_scale = tl.rsqrt(kk + 1e-6)
        sk, sq = tl.reduce(tl.reduce((S * k, S * q), 1, _sum2), 1, _sum2)
        u = (v - sk * k_scale) * beta
        S = S + (u * k_scale)[:, None, None] * k
        out = tl.where(is_present, sq * q_scale + u * (qk * q_scale * k_scale), 0.0)
        if t + 1 < T:
            tl.store(out_row + t * (H * V), out.to(out_ptr.dtype.element_ty))

    # The state goes out first: what follows it needs barriers.
    S = S.to(state_ptr.dtype.element_ty)
    tl.store(state_ptr + state_at, S, mask=is_present)
    tl.store(out_row + (T - 1) * (H * V), out.to(out_ptr.dtype.element_ty))
    if IS_CLUSTER:
        _meet(is_present.to(tl.int32))
    else:
        tl.debug_barrier()
    _store_window(window_ptr, v_at, CHANNELS, v0, v1, v2, is_present)
    is_writer = is_present & is_first
    _store_window(window_ptr, q_at, CHANNELS, q0, q1, q2, is_writer)
    _store_window(window_ptr, k_at, CHANNELS, k0, k1, k2, is_writer)
