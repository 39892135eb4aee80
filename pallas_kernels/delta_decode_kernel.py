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

from pallas_kernels.delta_decode_parts import (
    cast_pointer,
    convolve,
    gate_decay,
    load_window,
    meet,
    store_window,
    sum2,
    sum3,
    taps,
)


@triton.jit
@typing.no_type_check
def _delta_decode(
    x_ptr,
    gate_logits_ptr,
    beta_logits_ptr,
    weight_ptr,
    bias_ptr,
    a_log_ptr,
    dt_bias_ptr,
    slots_ptr,
    is_fresh_ptr,
    state_row_ptr,
    window_row_ptr,
    pool_ptr,
    windows_ptr,
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
    STATE_ROW_WORDS: tl.constexpr,
    WINDOW_ROW_WORDS: tl.constexpr,
    LAST_ROW: tl.constexpr,
):
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
    state_row = tl.load(state_row_ptr)
    window_row = tl.load(window_row_ptr)

    key = tl.arange(0, K)
    value = block * BLOCK_V + tl.arange(0, BLOCK_V)
    q_at = head // (H // KEY_HEADS) * K + key
    k_at = KEY_HEADS * K + q_at
    v_at = 2 * KEY_HEADS * K + head * V + value
    x_row = x_ptr + row.to(tl.int64) * T * CHANNELS
    xq = tl.load(x_row + q_at)
    xk = tl.load(x_row + k_at)
    xv = tl.load(x_row + v_at)
    wq0, wq1, wq2, wq3 = taps(weight_ptr, q_at, K)
    wk0, wk1, wk2, wk3 = taps(weight_ptr, k_at, K)
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
    state_ptr = pool_ptr + (slot.to(tl.int64) + state_row) * STATE_ROW_WORDS
    window_ptr = windows_ptr + (slot.to(tl.int64) + window_row) * WINDOW_ROW_WORDS
    state_ptr = cast_pointer(state_ptr, STATE_DTYPE)
    window_ptr = cast_pointer(window_ptr, WINDOW_DTYPE)

    state_at = (
        (head * V + value)[:, None, None] * K
        + (tl.arange(0, J) * LANE_KEYS)[None, :, None]
        + tl.arange(0, LANE_KEYS)[None, None, :]
    )
    S = tl.load(state_ptr + state_at, mask=has_past, other=0.0)
    # The window is loaded behind a barrier: else the compiler moves the loads of the
    # state, the most of all bytes, behind the convolution, which waits for the window.
    tl.debug_barrier()
    q0, q1, q2 = load_window(window_ptr, q_at, CHANNELS, has_past)
    k0, k1, k2 = load_window(window_ptr, k_at, CHANNELS, has_past)
    v0, v1, v2 = load_window(window_ptr, v_at, CHANNELS, has_past)
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
        q = convolve(q0, q1, q2, xq, wq0, wq1, wq2, wq3, bias_q, IS_SILU)
        k = convolve(k0, k1, k2, xk, wk0, wk1, wk2, wk3, bias_k, IS_SILU)
        v = convolve(v0, v1, v2, xv, wv0, wv1, wv2, wv3, bias_v, IS_SILU)
        q0, q1, q2 = q1, q2, xq
        k0, k1, k2 = k1, k2, xk
        v0, v1, v2 = v1, v2, xv
        decay = gate_decay(gate_logits + dt_bias, a_log, LOWER_BOUND)
        beta = 1.0 / (1.0 + tl.exp(-beta_logits))

        qq, kk, qk = tl.reduce((q * q, k * k, q * k), 0, sum3)
        q = tl.reshape(q, [J, LANE_KEYS])[None, :, :]
        k = tl.reshape(k, [J, LANE_KEYS])[None, :, :]
        if IS_PER_CHANNEL:
            S = S * tl.reshape(decay, [J, LANE_KEYS])[None, :, :]
        else:
            S = S * decay
        q_scale = tl.rsqrt(qq + 1e-6) * (K**-0.5)
        k_scale = tl.rsqrt(kk + 1e-6)
        sk, sq = tl.reduce(tl.reduce((S * k, S * q), 1, sum2), 1, sum2)
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
        meet(is_present.to(tl.int32))
    else:
        tl.debug_barrier()
    store_window(window_ptr, v_at, CHANNELS, v0, v1, v2, is_present)
    is_writer = is_present & is_first
    store_window(window_ptr, q_at, CHANNELS, q0, q1, q2, is_writer)
    store_window(window_ptr, k_at, CHANNELS, k0, k1, k2, is_writer)


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
    state_row_ptr,
    window_row_ptr,
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
    STATE_ROW_WORDS: tl.constexpr,
    WINDOW_ROW_WORDS: tl.constexpr,
    LAST_ROW: tl.constexpr,
):
    """States and windows lie in one pool."""
    _delta_decode(
        x_ptr,
        gate_logits_ptr,
        beta_logits_ptr,
        weight_ptr,
        bias_ptr,
        a_log_ptr,
        dt_bias_ptr,
        slots_ptr,
        is_fresh_ptr,
        state_row_ptr,
        window_row_ptr,
        pool_ptr,
        pool_ptr,
        out_ptr,
        T,
        H,
        KEY_HEADS,
        K,
        V,
        BLOCK_V,
        LANE_KEYS,
        STATE_DTYPE,
        WINDOW_DTYPE,
        IS_PER_CHANNEL,
        LOWER_BOUND,
        HAS_BIAS,
        IS_SILU,
        STATE_ROW_WORDS,
        WINDOW_ROW_WORDS,
        LAST_ROW,
    )


@triton.jit
@typing.no_type_check
def delta_decode_two_pools_kernel(
    x_ptr,
    gate_logits_ptr,
    beta_logits_ptr,
    weight_ptr,
    bias_ptr,
    a_log_ptr,
    dt_bias_ptr,
    slots_ptr,
    is_fresh_ptr,
    state_row_ptr,
    window_row_ptr,
    _pool_in_ptr,
    _windows_in_ptr,
    pool_ptr,
    windows_ptr,
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
    STATE_ROW_WORDS: tl.constexpr,
    WINDOW_ROW_WORDS: tl.constexpr,
    LAST_ROW: tl.constexpr,
):
    """States lie in one pool, windows in another."""
    _delta_decode(
        x_ptr,
        gate_logits_ptr,
        beta_logits_ptr,
        weight_ptr,
        bias_ptr,
        a_log_ptr,
        dt_bias_ptr,
        slots_ptr,
        is_fresh_ptr,
        state_row_ptr,
        window_row_ptr,
        pool_ptr,
        windows_ptr,
        out_ptr,
        T,
        H,
        KEY_HEADS,
        K,
        V,
        BLOCK_V,
        LANE_KEYS,
        STATE_DTYPE,
        WINDOW_DTYPE,
        IS_PER_CHANNEL,
        LOWER_BOUND,
        HAS_BIAS,
        IS_SILU,
        STATE_ROW_WORDS,
        WINDOW_ROW_WORDS,
        LAST_ROW,
    )
