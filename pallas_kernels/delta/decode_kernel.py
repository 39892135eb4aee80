"""The Gluon kernel of `pallas_kernels.delta.decode`.

A program has a block of the value rows that share a key head, of one row of the batch,
and takes it in tiles. The first ones are on their way to registers, or to shared
memory, before anything else is waited for, and the next one as soon as there is room:
in registers when a tile has been stored, in shared memory when all have read it. A tile
goes through all tokens of the step:

    S [value, key] <- S * decay
    u              = beta * (v - S k)
    S              <- S + outer(u, k),   o = S q

The convolution of q and k is done again by each program that needs it. Those programs
share windows: they are one cluster of thread blocks, say at a barrier that they have
read them, and wait there before the first write. A lane has several keys of a value
row, so that the sums over the keys take few shuffles. Norms stay outside of it: with q
and k as the convolution leaves them, S k and S q are scaled once per value row.

Letters: T tokens, H heads, K and V elements of a key and of a value.
"""

import typing

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from pallas_kernels.delta.decode_parts import (
    arrive,
    cast_pointer,
    convolve,
    copy_inputs,
    gate_decay,
    load_inputs,
    load_key,
    load_tile,
    store_window,
    sum2,
    taps,
    through_shared,
    wait,
)


@gluon.jit
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
    T: gl.constexpr,
    H: gl.constexpr,
    KEY_HEADS: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BLOCK_V: gl.constexpr,
    TILE_V: gl.constexpr,
    STAGES: gl.constexpr,
    IS_IN_SHARED: gl.constexpr,
    KEY_LANES: gl.constexpr,
    STATE_DTYPE: gl.constexpr,
    WINDOW_DTYPE: gl.constexpr,
    IS_ONE_POOL: gl.constexpr,
    IS_PER_CHANNEL: gl.constexpr,
    LOWER_BOUND: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    IS_SILU: gl.constexpr,
    STATE_ROW_WORDS: gl.constexpr,
    WINDOW_ROW_WORDS: gl.constexpr,
    LAST_ROW: gl.constexpr,
):
    """With one pool for states and windows, that of the windows is not used."""
    CLUSTER: gl.constexpr = H * V // (KEY_HEADS * BLOCK_V)
    TILES: gl.constexpr = BLOCK_V // TILE_V
    CHANNELS: gl.constexpr = 2 * KEY_HEADS * K + H * V
    WARPS: gl.constexpr = gl.num_warps()
    # 16 bytes to a lane. A warp copies whole value rows, but computes with fewer lanes
    # to a row: that takes fewer shuffles.
    LANE_KEYS: gl.constexpr = 4 if STATE_DTYPE == "float32" else 8
    COPY_LANES: gl.constexpr = min(32, K // LANE_KEYS)
    LANES: gl.constexpr = min(KEY_LANES, COPY_LANES)
    COPY: gl.constexpr = gl.BlockedLayout(
        [1, LANE_KEYS], [32 // COPY_LANES, COPY_LANES], [WARPS, 1], [1, 0]
    )
    TILE: gl.constexpr = gl.BlockedLayout(
        [1, LANE_KEYS], [32 // LANES, LANES], [WARPS, 1], [1, 0]
    )
    VALUE: gl.constexpr = gl.SliceLayout(1, TILE)
    KEY: gl.constexpr = gl.SliceLayout(0, TILE)
    CHANNEL: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SHARED_TILE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    item = gl.program_id(0)
    block = item % CLUSTER
    key_head = item // CLUSTER % KEY_HEADS
    row = item // (CLUSTER * KEY_HEADS)

    slot = gl.load(slots_ptr + row)
    is_fresh = gl.load(is_fresh_ptr + row)
    state_row = gl.load(state_row_ptr)
    window_row = gl.load(window_row_ptr)

    key = gl.arange(0, K, CHANNEL)
    first_value = key_head * (H // KEY_HEADS * V) + block * BLOCK_V
    value = first_value + gl.arange(0, BLOCK_V, CHANNEL)
    first_q = key_head * K
    first_k = KEY_HEADS * K + first_q
    first_v = 2 * KEY_HEADS * K + first_value
    q_at, k_at = first_q + key, first_k + key
    v_at = 2 * KEY_HEADS * K + value
    x_row = x_ptr + row.to(gl.int64) * T * CHANNELS
    wq0, wq1, wq2, wq3 = taps(weight_ptr, first_q, K, CHANNEL)
    wk0, wk1, wk2, wk3 = taps(weight_ptr, first_k, K, CHANNEL)
    wv0, wv1, wv2, wv3 = taps(weight_ptr, first_v, BLOCK_V, CHANNEL)
    bias_q = gl.load(bias_ptr + q_at).to(gl.float32) if HAS_BIAS else 0.0
    bias_k = gl.load(bias_ptr + k_at).to(gl.float32) if HAS_BIAS else 0.0
    bias_v = gl.load(bias_ptr + v_at).to(gl.float32) if HAS_BIAS else 0.0
    # A decay for each key channel (as many heads of keys as of values) or value row.
    GATES: gl.constexpr = H * K if IS_PER_CHANNEL else H
    gate_at = q_at if IS_PER_CHANNEL else value // V
    gate_row = gate_logits_ptr + row.to(gl.int64) * T * GATES + gate_at
    beta_row = beta_logits_ptr + row.to(gl.int64) * T * H + value // V
    gate_logits = gl.load(gate_row)
    beta_logits = gl.load(beta_row)
    dt_bias = gl.load(dt_bias_ptr + gate_at).to(gl.float32)
    a_log_at = key_head if IS_PER_CHANNEL else value // V
    a_log = gl.load(a_log_ptr + a_log_at).to(gl.float32)

    # An absent slot may be any number: nothing behind it is read or written.
    is_present = (slot >= 0) & (slot.to(gl.int64) + state_row <= LAST_ROW)
    has_past = is_present & (is_fresh == 0)
    state_ptr = pool_ptr + (slot.to(gl.int64) + state_row) * STATE_ROW_WORDS
    window_ptr = pool_ptr if IS_ONE_POOL else windows_ptr
    window_ptr += (slot.to(gl.int64) + window_row) * WINDOW_ROW_WORDS
    state_ptr = cast_pointer(state_ptr, STATE_DTYPE) + first_value * K
    window_ptr = cast_pointer(window_ptr, WINDOW_DTYPE)

    q_inputs = copy_inputs(window_ptr + first_q, x_row + first_q, CHANNELS, K, has_past)
    k_inputs = copy_inputs(window_ptr + first_k, x_row + first_k, CHANNELS, K, has_past)
    v_inputs = copy_inputs(
        window_ptr + first_v, x_row + first_v, CHANNELS, BLOCK_V, has_past
    )
    async_copy.commit_group()

    tile_value = gl.arange(0, TILE_V, VALUE)
    tile_ptr = state_ptr + tile_value[:, None] * K + gl.arange(0, K, KEY)[None, :]
    copy_value = gl.arange(0, TILE_V, gl.SliceLayout(1, COPY))
    copy_key = gl.arange(0, K, gl.SliceLayout(0, COPY))
    copy_ptr = state_ptr + (copy_value[:, None] * K + copy_key[None, :])
    # Loads of the state, the most of all bytes, come behind those that are few and are
    # waited for first, and ahead of all that waits. Compilers move loads to no other
    # side of a barrier, but arithmetic they do: it starts from shared memory.
    gl.thread_barrier()
    gl.static_assert((not IS_IN_SHARED) | (STAGES > 1) | (TILES == 1))
    tiles = ()
    for n in gl.static_range(min(STAGES, TILES)):
        if IS_IN_SHARED:
            # An allocation for each tile: of parts of one the compiler would think
            # that they overlap, and wait.
            tile = gl.allocate_shared_memory(
                state_ptr.dtype.element_ty, [TILE_V, K], SHARED_TILE
            )
            # What a masked copy does not bring is 0.
            async_copy.async_copy_global_to_shared(
                tile, copy_ptr + n * TILE_V * K, mask=has_past
            )
            async_copy.commit_group()
            tiles += (tile,)
        else:
            tiles += (load_tile(tile_ptr + n * TILE_V * K, has_past),)
    gl.thread_barrier()

    gate_logits, beta_logits = through_shared(gate_logits, beta_logits, CHANNEL)
    async_copy.wait_group(min(STAGES, TILES) if IS_IN_SHARED else 0)
    q0, q1, q2, xq = load_inputs(q_inputs, CHANNEL)
    k0, k1, k2, xk = load_inputs(k_inputs, CHANNEL)
    v0, v1, v2, xv = load_inputs(v_inputs, CHANNEL)
    q_shared = gl.allocate_shared_memory(gl.float32, [T, K], SHARED)
    k_shared = gl.allocate_shared_memory(gl.float32, [T, K], SHARED)
    decay_shared = gl.allocate_shared_memory(
        gl.float32, [T, K if IS_PER_CHANNEL else BLOCK_V], SHARED
    )
    v_shared = gl.allocate_shared_memory(gl.float32, [T, BLOCK_V], SHARED)
    beta_shared = gl.allocate_shared_memory(gl.float32, [T, BLOCK_V], SHARED)
    for t in gl.static_range(T):
        if t > 0:
            xq = gl.load(x_row + t * CHANNELS + q_at)
            xk = gl.load(x_row + t * CHANNELS + k_at)
            xv = gl.load(x_row + t * CHANNELS + v_at)
            gate_logits = gl.load(gate_row + t * GATES)
            beta_logits = gl.load(beta_row + t * H)
        logits = gate_logits.to(gl.float32) + dt_bias
        decay_shared.index(t).store(gate_decay(logits, a_log, LOWER_BOUND))
        beta = 1.0 / (1.0 + gl.exp(-beta_logits.to(gl.float32)))
        beta_shared.index(t).store(beta)
        q = convolve(q0, q1, q2, xq, wq0, wq1, wq2, wq3, bias_q, IS_SILU)
        k = convolve(k0, k1, k2, xk, wk0, wk1, wk2, wk3, bias_k, IS_SILU)
        v = convolve(v0, v1, v2, xv, wv0, wv1, wv2, wv3, bias_v, IS_SILU)
        q_shared.index(t).store(q)
        k_shared.index(t).store(k)
        v_shared.index(t).store(v)
        q0, q1, q2 = q1, q2, xq
        k0, k1, k2 = k1, k2, xk
        v0, v1, v2 = v1, v2, xv
    q, k, decay, qq, kk, qk = load_key(
        q_shared.index(0),
        k_shared.index(0),
        decay_shared.index(0),
        KEY,
        IS_PER_CHANNEL,
    )
    if CLUSTER > 1:
        # A sum over q and k has waited for the windows that all share.
        arrived = arrive((qk + qq + kk).to(gl.int32, bitcast=True))

    out_row = out_ptr + row.to(gl.int64) * (T * H * V) + first_value + tile_value
    for n in gl.static_range(TILES):
        if IS_IN_SHARED:
            async_copy.wait_group(min(TILES, STAGES + max(0, n - 1)) - n - 1)
            if n > 0 and n - 1 + STAGES < TILES:
                # All have read the tile before this one, since all have waited.
                async_copy.async_copy_global_to_shared(
                    tiles[(n - 1) % STAGES],
                    copy_ptr + (n - 1 + STAGES) * TILE_V * K,
                    mask=has_past,
                )
                async_copy.commit_group()
            S = tiles[n % STAGES].load(TILE).to(gl.float32)
        else:
            S = tiles[n].to(gl.float32)
        for t in range(T):
            if T > 1:
                q, k, decay, qq, kk, qk = load_key(
                    q_shared.index(t),
                    k_shared.index(t),
                    decay_shared.index(t),
                    KEY,
                    IS_PER_CHANNEL,
                )
            v_tile = v_shared.index(t).slice(n * TILE_V, TILE_V).load(VALUE)
            beta_tile = beta_shared.index(t).slice(n * TILE_V, TILE_V).load(VALUE)
            q_scale = gl.rsqrt(qq + 1e-6) * (K**-0.5)
            k_scale = gl.rsqrt(kk + 1e-6)
            if IS_PER_CHANNEL:
                S = S * decay
            else:
                of_rows = decay_shared.index(t).slice(n * TILE_V, TILE_V).load(VALUE)
                S = S * of_rows[:, None]
            sk, sq = gl.reduce((S * k, S * q), 1, sum2)
            u = (v_tile - sk * k_scale) * beta_tile
            S = S + (u * k_scale)[:, None] * k
            out = sq * q_scale + u * (qk * q_scale * k_scale)
            out = gl.where(is_present, out, 0.0).to(out_ptr.dtype.element_ty)
            gl.store(out_row + t * (H * V) + n * TILE_V, out)
        S = S.to(state_ptr.dtype.element_ty)
        gl.store(tile_ptr + n * TILE_V * K, S, mask=is_present)
        if not IS_IN_SHARED and n + STAGES < TILES:
            tiles += (load_tile(tile_ptr + (n + STAGES) * TILE_V * K, has_past),)
    store_window(window_ptr, v_at, CHANNELS, v0, v1, v2, is_present)
    if CLUSTER > 1:
        wait(arrived)
    is_writer = is_present & (block == 0)
    store_window(window_ptr, q_at, CHANNELS, q0, q1, q2, is_writer)
    store_window(window_ptr, k_at, CHANNELS, k0, k1, k2, is_writer)
