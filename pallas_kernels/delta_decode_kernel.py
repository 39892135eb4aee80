"""The Triton kernel of `pallas_kernels.delta_decode`.

A program has a block of the value rows that share a key head, of one row of the batch,
and takes it in tiles that fit its registers. A tile goes through all tokens of the
step:

    S [value, key] <- S * decay
    u              = beta * (v - S k)
    S              <- S + outer(u, k),   o = S q

While one tile is computed, the next one is on its way. The convolution of q and k is
done again by each program that needs it. Those programs share windows: they are one
cluster of thread blocks, say at a barrier that they have read them, and wait there
before the first write. The tile has the shape [value, J, K / J], so that the sums over
the key channels are made in registers but for the last few shuffles. Norms stay
outside of it: with q and k as the convolution leaves them, S k and S q are scaled once
per value row.

Letters: T tokens, H heads, K and V elements of a key and of a value.
"""

import typing

import triton
import triton.language as tl

from pallas_kernels.delta_decode_parts import (
    arrive,
    cast_pointer,
    convolve,
    gate_decay,
    load_window,
    store_window,
    sum2,
    sum3,
    taps,
    wait,
)


@triton.jit
@typing.no_type_check
def _load_values(
    x_row,
    weight_ptr,
    bias_ptr,
    beta_row,
    gate_row,
    a_log_ptr,
    dt_bias_ptr,
    v_at,
    head,
    HAS_BIAS: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
):
    """What some value rows of a head need beside their states and windows.

    Input, taps and bias of the convolution, beta's logits, and the gate's parameters
    if they are the head's.
    """
    x = tl.load(x_row + v_at)
    w0 = tl.load(weight_ptr + v_at * 4).to(tl.float32)
    w1 = tl.load(weight_ptr + v_at * 4 + 1).to(tl.float32)
    w2 = tl.load(weight_ptr + v_at * 4 + 2).to(tl.float32)
    w3 = tl.load(weight_ptr + v_at * 4 + 3).to(tl.float32)
    bias = tl.load(bias_ptr + v_at).to(tl.float32) if HAS_BIAS else 0.0
    beta = tl.load(beta_row + head).to(tl.float32)
    if IS_PER_CHANNEL:
        return x, w0, w1, w2, w3, bias, beta, 0.0, 0.0, 0.0
    else:
        logits = tl.load(gate_row + head).to(tl.float32)
        a_log = tl.load(a_log_ptr + head).to(tl.float32)
        dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
        return x, w0, w1, w2, w3, bias, beta, logits, a_log, dt_bias


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
    TILE_V: tl.constexpr,
    LANE_KEYS: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    WINDOW_DTYPE: tl.constexpr,
    IS_ONE_POOL: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
    LOWER_BOUND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SILU: tl.constexpr,
    STATE_ROW_WORDS: tl.constexpr,
    WINDOW_ROW_WORDS: tl.constexpr,
    LAST_ROW: tl.constexpr,
):
    """With one pool for states and windows, that of the windows is not used.

    A tile lies in one head, and is the block if there is more than one token.
    """
    CLUSTER: tl.constexpr = H * V // (KEY_HEADS * BLOCK_V)
    TILES: tl.constexpr = BLOCK_V // TILE_V
    J: tl.constexpr = K // LANE_KEYS
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * K + H * V
    tl.static_assert((T == 1) | (TILES == 1))
    item = tl.program_id(0)
    block = item % CLUSTER
    key_head = item // CLUSTER % KEY_HEADS
    row = item // (CLUSTER * KEY_HEADS)

    slot = tl.load(slots_ptr + row)
    is_fresh = tl.load(is_fresh_ptr + row)
    state_row = tl.load(state_row_ptr)
    window_row = tl.load(window_row_ptr)

    key = tl.arange(0, K)
    first_value = key_head * (H // KEY_HEADS * V) + block * BLOCK_V
    tile_value = tl.arange(0, TILE_V)
    q_at = key_head * K + key
    k_at = KEY_HEADS * K + q_at
    x_row = x_ptr + row.to(tl.int64) * T * CHANNELS
    xq = tl.load(x_row + q_at)
    xk = tl.load(x_row + k_at)
    wq0, wq1, wq2, wq3 = taps(weight_ptr, q_at, K)
    wk0, wk1, wk2, wk3 = taps(weight_ptr, k_at, K)
    bias_q = tl.load(bias_ptr + q_at).to(tl.float32) if HAS_BIAS else 0.0
    bias_k = tl.load(bias_ptr + k_at).to(tl.float32) if HAS_BIAS else 0.0
    GATES: tl.constexpr = H * K if IS_PER_CHANNEL else H
    gate_row = gate_logits_ptr + row.to(tl.int64) * T * GATES
    beta_row = beta_logits_ptr + row * T * H
    if IS_PER_CHANNEL:
        # As many heads of keys as of values.
        gate_logits = tl.load(gate_row + q_at).to(tl.float32)
        dt_bias = tl.load(dt_bias_ptr + q_at).to(tl.float32)
        a_log = tl.load(a_log_ptr + key_head).to(tl.float32)
    next_values = _load_values(
        x_row,
        weight_ptr,
        bias_ptr,
        beta_row,
        gate_row,
        a_log_ptr,
        dt_bias_ptr,
        2 * KEY_HEADS * K + first_value + tile_value,
        first_value // V,
        HAS_BIAS,
        IS_PER_CHANNEL,
    )

    # An absent slot may be any number: nothing behind it is read or written.
    is_present = (slot >= 0) & (slot.to(tl.int64) + state_row <= LAST_ROW)
    has_past = is_present & (is_fresh == 0)
    state_ptr = pool_ptr + (slot.to(tl.int64) + state_row) * STATE_ROW_WORDS
    window_ptr = pool_ptr if IS_ONE_POOL else windows_ptr
    window_ptr += (slot.to(tl.int64) + window_row) * WINDOW_ROW_WORDS
    state_ptr = cast_pointer(state_ptr, STATE_DTYPE) + first_value * K
    window_ptr = cast_pointer(window_ptr, WINDOW_DTYPE)

    state_at = (
        tile_value[:, None, None] * K
        + (tl.arange(0, J) * LANE_KEYS)[None, :, None]
        + tl.arange(0, LANE_KEYS)[None, None, :]
    )
    next_state = tl.load(state_ptr + state_at, mask=has_past, other=0.0)
    # The window is loaded behind a barrier: else the compiler moves the loads of the
    # state, the most of all bytes, behind the convolution, which waits for the window.
    tl.debug_barrier()
    q0, q1, q2 = load_window(window_ptr, q_at, CHANNELS, has_past)
    k0, k1, k2 = load_window(window_ptr, k_at, CHANNELS, has_past)
    next_v0, next_v1, next_v2 = load_window(
        window_ptr,
        2 * KEY_HEADS * K + first_value + tile_value,
        CHANNELS,
        has_past,
    )

    for n in tl.static_range(TILES):
        value = first_value + n * TILE_V + tile_value
        head = (first_value + n * TILE_V) // V
        v_at = 2 * KEY_HEADS * K + value
        S = next_state.to(tl.float32)
        v0, v1, v2 = next_v0, next_v1, next_v2
        xv, wv0, wv1, wv2, wv3, bias_v, beta_logits, g0, g1, g2 = next_values
        if not IS_PER_CHANNEL:
            gate_logits, a_log, dt_bias = g0, g1, g2
        if n + 1 < TILES:
            at = (n + 1) * (TILE_V * K) + state_at
            next_state = tl.load(state_ptr + at, mask=has_past, other=0.0)
            next_values = _load_values(
                x_row,
                weight_ptr,
                bias_ptr,
                beta_row,
                gate_row,
                a_log_ptr,
                dt_bias_ptr,
                v_at + TILE_V,
                (first_value + (n + 1) * TILE_V) // V,
                HAS_BIAS,
                IS_PER_CHANNEL,
            )
            next_v0, next_v1, next_v2 = load_window(
                window_ptr, v_at + TILE_V, CHANNELS, has_past
            )
            tl.debug_barrier()
        out_row = out_ptr + row.to(tl.int64) * (T * H * V) + value
        for t in tl.static_range(T):
            if t > 0:
                x_t = x_row + t * CHANNELS
                xq = tl.load(x_t + q_at)
                xk = tl.load(x_t + k_at)
                xv = tl.load(x_t + v_at)
                gate_at = q_at if IS_PER_CHANNEL else head
                gate_logits = tl.load(gate_row + t * GATES + gate_at).to(tl.float32)
                beta_logits = tl.load(beta_row + t * H + head).to(tl.float32)
            if n == 0:
                q = convolve(q0, q1, q2, xq, wq0, wq1, wq2, wq3, bias_q, IS_SILU)
                k = convolve(k0, k1, k2, xk, wk0, wk1, wk2, wk3, bias_k, IS_SILU)
                q0, q1, q2 = q1, q2, xq
                k0, k1, k2 = k1, k2, xk
                qq, kk, qk = tl.reduce((q * q, k * k, q * k), 0, sum3)
                if (t == 0) & (CLUSTER > 1):
                    # A sum over q and k has waited for the windows that all share.
                    arrived = arrive((qk + qq + kk).to(tl.int32, bitcast=True))
                q = tl.reshape(q, [J, LANE_KEYS])[None, :, :]
                k = tl.reshape(k, [J, LANE_KEYS])[None, :, :]
                q_scale = tl.rsqrt(qq + 1e-6) * (K**-0.5)
                k_scale = tl.rsqrt(kk + 1e-6)
            v = convolve(v0, v1, v2, xv, wv0, wv1, wv2, wv3, bias_v, IS_SILU)
            v0, v1, v2 = v1, v2, xv
            beta = 1.0 / (1.0 + tl.exp(-beta_logits))
            if (n == 0) | (not IS_PER_CHANNEL):
                decay = gate_decay(gate_logits + dt_bias, a_log, LOWER_BOUND)
                if IS_PER_CHANNEL:
                    decay = tl.reshape(decay, [J, LANE_KEYS])[None, :, :]
            S = S * decay
            sk, sq = tl.reduce(tl.reduce((S * k, S * q), 1, sum2), 1, sum2)
            u = (v - sk * k_scale) * beta
            S = S + (u * k_scale)[:, None, None] * k
            out = sq * q_scale + u * (qk * q_scale * k_scale)
            out = tl.where(is_present, out, 0.0).to(out_ptr.dtype.element_ty)
            if t + 1 < T:
                tl.store(out_row + t * (H * V), out)
        # The state goes out first: what follows it needs barriers.
        S = S.to(state_ptr.dtype.element_ty)
        tl.store(state_ptr + n * (TILE_V * K) + state_at, S, mask=is_present)
        tl.store(out_row + (T - 1) * (H * V), out)
        store_window(window_ptr, v_at, CHANNELS, v0, v1, v2, is_present)
    if CLUSTER > 1:
        wait(arrived)
    else:
        tl.debug_barrier()
    is_writer = is_present & (block == 0)
    store_window(window_ptr, q_at, CHANNELS, q0, q1, q2, is_writer)
    store_window(window_ptr, k_at, CHANNELS, k0, k1, k2, is_writer)
