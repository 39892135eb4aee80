"""Triton kernels of `pallas_kernels.delta_prefill` that make chunks independent.

With `G` the running sum of the log2 decays of a chunk of 64 tokens, per key channel or
per head, and everything scaled by norms, a chunk of a head is

    A[i, j] = beta_i k_i . (k_j 2^(G_i - G_j))      j < i        T = (I + A)^-1
    P[i, j] = q_i . (k_j 2^(G_i - G_j))             j <= i
    w = T (beta k 2^G)     u = T (beta v)     q 2^G     k 2^(G_63 - G)     2^G_63

`delta_gate_kernel` makes G for decays per channel, `delta_keys_kernel` all that has no
q in it, `delta_queries_kernel` the rest. Products of decayed keys are made of two
factors that stay finite whatever the gate does:

* between the halves of 32 tokens, and between the blocks of 16 in a half, both sides
  decay towards the border between them, so both factors are at most 1;
* inside a block of 16 they decay towards its middle. A token's log2 decay is cut at
  -15, so that the factors lie in 2^+-120; what the cut changes is below 2^-15.

The inverse grows from blocks of 1 to 64 by

    [I + A1  0; A21  I + A2]^-1 = [T1  0; -T2 A21 T1  T2]

No factor is larger than the inverse itself, so products in tf32 are enough; the
series in powers of A overflows on repeated keys.

Source of the chunked form: Kimi Linear (arXiv:2510.26692), section 3.
"""

import typing

import triton
import triton.language as tl


@triton.jit
@typing.no_type_check
def _log2(x):
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
@typing.no_type_check
def _log2_decay(logits, a_log, LOWER_BOUND: tl.constexpr):
    """The gate in log2 units, cut at -15."""
    LOG2E: tl.constexpr = 1.4426950408889634
    if LOWER_BOUND is None:
        # log2(1 + 2^x), exact for the small 2^x of a decay near 1.
        x = logits * LOG2E
        e = tl.exp2(tl.minimum(x, 30.0))
        small = e * (LOG2E - (0.5 * LOG2E) * e)
        softplus = tl.where(e < 1e-3, small, _log2(1.0 + e))
        decay = -tl.exp(a_log) * tl.where(x > 30.0, x, softplus)
    else:
        decay = (LOWER_BOUND * LOG2E) / (1.0 + tl.exp(-tl.exp(a_log) * logits))
    return tl.maximum(decay, -15.0)


@triton.jit
@typing.no_type_check
def delta_gate_kernel(
    gate_logits_ptr,
    a_log_ptr,
    dt_bias_ptr,
    starts_ptr,
    sizes_ptr,
    segment_ptr,
    sums_ptr,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    LOWER_BOUND: tl.constexpr,
):
    """Writes G: a thread walks down the chunk with a few channels of its own."""
    C: tl.constexpr = 64
    BLOCKS: tl.constexpr = H * K // BLOCK
    place = tl.program_id(0) // BLOCKS
    chunk = tl.load(segment_ptr) + place
    channel = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    size = tl.load(sizes_ptr + chunk)
    if size > 0:
        start = tl.load(starts_ptr + chunk).to(tl.int64)
        a_log = tl.load(a_log_ptr + channel // K).to(tl.float32)
        dt_bias = tl.load(dt_bias_ptr + channel).to(tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        tile = (place * H + channel // K).to(tl.int64)
        to_ptr = sums_ptr + tile * (C * K) + channel % K
        for t0 in tl.range(0, C, UNROLL):
            for dt in tl.static_range(UNROLL):
                t = t0 + dt
                # The second term keeps the mask a vector, and the access wide.
                is_token = (t < size) & (channel >= 0)
                from_ptr = gate_logits_ptr + (start + t) * (H * K) + channel
                logits = tl.load(from_ptr, mask=is_token, other=0.0).to(tl.float32)
                decay = _log2_decay(logits + dt_bias, a_log, LOWER_BOUND)
                total += tl.where(is_token, decay, 0.0)
                tl.store(to_ptr + t * K, total)


@triton.jit
@typing.no_type_check
def _head_sums(
    gate_logits_ptr,
    a_log,
    dt_bias_ptr,
    start,
    size,
    head,
    H: tl.constexpr,
    LOWER_BOUND: tl.constexpr,
):
    """G of a head with one decay per token: `[64]`, and 2^(G_i - G_j) `[64, 64]`."""
    token = tl.arange(0, 64)
    is_token = token < size
    logits = tl.load(
        gate_logits_ptr + (start + token) * H + head, mask=is_token, other=0.0
    )
    logits = logits.to(tl.float32) + tl.load(dt_bias_ptr + head).to(tl.float32)
    decays = tl.where(is_token, _log2_decay(logits, a_log, LOWER_BOUND), 0.0)
    sums = tl.cumsum(decays, 0)
    # Of the same sums: their difference is exactly 0 for i = j.
    pairs = tl.exp2(tl.minimum(sums[:, None] - sums[None, :], 0.0))
    return sums, tl.sum(decays, 0), pairs


@triton.jit
@typing.no_type_check
def _border_sums(sums_ptr, LEVEL: tl.constexpr, K: tl.constexpr, i):
    """G where the two sides of a product meet, `[64, channels]`."""
    s2 = tl.load(sums_ptr + 31 * K)
    if LEVEL == 2:
        return s2 + 0.0 * i
    s1 = tl.load(sums_ptr + 15 * K)
    s3 = tl.load(sums_ptr + 47 * K)
    if LEVEL == 1:
        return tl.where(i < 32, s1, s3)
    s4 = tl.load(sums_ptr + 63 * K)
    first = tl.where(i < 16, s1, s1 + s2)
    last = tl.where(i < 48, s2 + s3, s3 + s4)
    return 0.5 * tl.where(i < 32, first, last)


@triton.jit
@typing.no_type_check
def _merge_levels(far, near, own, i, j):
    """Of the products at each level, those of the pairs that it is for."""
    is_near = (i // 16 == j // 16 + 1) & (i // 16 % 2 == 1)
    is_own = (i // 16 == j // 16) & (i >= j)
    lower = tl.where(is_near, near, tl.where(is_own, own, 0.0))
    return tl.where((i >= 32) & (j < 32), far, lower)


@triton.jit
@typing.no_type_check
def _merge(T, A, i, j, SIZE: tl.constexpr):
    """Inverses of twice the size, from those of SIZE in T."""
    is_under = (i // SIZE == j // SIZE + 1) & (i // SIZE % 2 == 1)
    under = tl.where(is_under, A, 0.0)
    product = tl.dot(T, under, input_precision="tf32")
    return T - tl.dot(product, T, input_precision="tf32")


@triton.jit
@typing.no_type_check
def _invert(A, C: tl.constexpr):
    """(I + A)^-1 of a strictly lower A."""
    B: tl.constexpr = 16
    N: tl.constexpr = C // B
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    block = tl.arange(0, N)
    row = tl.arange(0, B)
    is_own = block[:, None, None, None] == block[None, None, :, None]
    blocks = tl.reshape(tl.where(i // B == j // B, A, 0.0), (N, B, N, B))
    blocks = tl.sum(tl.where(is_own, blocks, 0.0), 2)
    r = row[None, :, None]
    c = row[None, None, :]
    is_pair = (r == c + 1) & (r % 2 == 1)
    T = tl.where(r == c, 1.0, 0.0) - tl.where(is_pair, blocks, 0.0)
    T = _merge(T, blocks, r, c, 2)
    T = _merge(T, blocks, r, c, 4)
    T = _merge(T, blocks, r, c, 8)
    T = tl.broadcast_to(T[:, :, None, :], (N, B, N, B))
    T = tl.reshape(tl.where(is_own, T, 0.0), (C, C))
    T = _merge(T, A, i, j, 16)
    return _merge(T, A, i, j, 32)


@triton.jit
@typing.no_type_check
def delta_keys_kernel(
    k_ptr,
    v_ptr,
    gates_ptr,
    beta_logits_ptr,
    a_log_ptr,
    dt_bias_ptr,
    starts_ptr,
    sizes_ptr,
    segment_ptr,
    w_ptr,
    u_ptr,
    decayed_k_ptr,
    decay_ptr,
    H: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PART: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
    LOWER_BOUND: tl.constexpr,
):
    """Writes w, u, k 2^(G_63 - G) and 2^G_63.

    `gates_ptr` is G with decays per channel, and the gate's logits otherwise. `PART`
    channels are in registers at a time.
    """
    C: tl.constexpr = 64
    place = tl.program_id(0) // H
    chunk = tl.load(segment_ptr) + place
    head = tl.program_id(0) % H
    size = tl.load(sizes_ptr + chunk)
    if size > 0:
        start = tl.load(starts_ptr + chunk).to(tl.int64)
        tile = (place * H + head).to(tl.int64)
        token = tl.arange(0, C)
        i = token[:, None]
        j = token[None, :]
        is_token = token < size
        mask = is_token[:, None]
        k_row = (start + i) * (KEY_HEADS * K) + head // (H // KEY_HEADS) * K
        key = tl.arange(0, K)[None, :]
        keys = tl.load(k_ptr + k_row + key, mask=mask, other=0.0).to(tl.float32)
        k_scale = tl.rsqrt(tl.sum(keys * keys, 1) + 1e-6)
        beta_at = (start + token) * H + head
        beta = tl.load(beta_logits_ptr + beta_at, mask=is_token, other=0.0)
        beta = tl.where(is_token, 1.0 / (1.0 + tl.exp(-beta.to(tl.float32))), 0.0)
        key_row = tile * (C * K) + i * K
        if IS_PER_CHANNEL:
            far = tl.zeros((C, C), tl.float32)
            near = tl.zeros((C, C), tl.float32)
            own = tl.zeros((C, C), tl.float32)
            for first in tl.range(0, K, PART, num_stages=1):
                part = first + tl.arange(0, PART)[None, :]
                sums_ptr = gates_ptr + tile * (C * K) + part
                G = tl.load(sums_ptr + i * K)
                last = tl.load(sums_ptr + (C - 1) * K)
                tl.store(decay_ptr + tile * K + part, tl.exp2(last))
                k = tl.load(k_ptr + k_row + part, mask=mask, other=0.0)
                k = k.to(tl.float32) * k_scale[:, None]
                y = G - _border_sums(sums_ptr, 2, K, i)
                kx = (k * tl.exp2(tl.where(i >= 32, y, -y))).to(tl.bfloat16)
                far = tl.dot(kx, tl.trans(kx), far)
                y = G - _border_sums(sums_ptr, 1, K, i)
                kx = (k * tl.exp2(tl.where(i // 16 % 2 == 1, y, -y))).to(tl.bfloat16)
                near = tl.dot(kx, tl.trans(kx), near)
                y = G - _border_sums(sums_ptr, 0, K, i)
                kc = (k * tl.exp2(-y)).to(tl.bfloat16)
                kx = (k * tl.exp2(y)).to(tl.bfloat16)
                own = tl.dot(kx, tl.trans(kc), own)
                decayed = k * tl.exp2(last - G)
                tl.store(decayed_k_ptr + key_row + part, decayed.to(tl.bfloat16))
                # Read back below: a tile of it is too much to keep.
                weighted = k * (tl.exp2(G) * beta[:, None])
                tl.store(w_ptr + key_row + part, weighted.to(tl.bfloat16))
            products = _merge_levels(far, near, own, i, j)
        else:
            a_log = tl.load(a_log_ptr + head).to(tl.float32)
            sums, last, pairs = _head_sums(
                gates_ptr, a_log, dt_bias_ptr, start, size, head, H, LOWER_BOUND
            )
            k = keys * k_scale[:, None]
            rounded = k.to(tl.bfloat16)
            products = tl.dot(rounded, tl.trans(rounded)) * pairs
            tl.store(decay_ptr + tile * K + key, tl.exp2(last) + 0.0 * key)
            decayed = k * tl.exp2(last - sums)[:, None]
            tl.store(decayed_k_ptr + key_row + key, decayed.to(tl.bfloat16))
            weighted = k * (tl.exp2(sums) * beta)[:, None]
            tl.store(w_ptr + key_row + key, weighted.to(tl.bfloat16))
        T = _invert(tl.where(i > j, products * beta[:, None], 0.0), C).to(tl.bfloat16)
        value = tl.arange(0, V)[None, :]
        v_at = (start + i) * (H * V) + head * V + value
        v = tl.load(v_ptr + v_at, mask=mask, other=0.0).to(tl.float32)
        u = tl.dot(T, (v * beta[:, None]).to(tl.bfloat16)).to(tl.bfloat16)
        tl.store(u_ptr + tile * (C * V) + i * V + value, u)
        # What the block's own stores have left there, then what depends on all of it.
        tl.debug_barrier()
        weighted = tl.load(w_ptr + key_row + key)
        w = tl.dot(T, weighted).to(tl.bfloat16)
        tl.debug_barrier()
        tl.store(w_ptr + key_row + key, w)


@triton.jit
@typing.no_type_check
def delta_queries_kernel(
    q_ptr,
    k_ptr,
    gates_ptr,
    a_log_ptr,
    dt_bias_ptr,
    starts_ptr,
    sizes_ptr,
    segment_ptr,
    decayed_q_ptr,
    products_ptr,
    H: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
    PART: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
    LOWER_BOUND: tl.constexpr,
):
    """Writes q 2^G and P; see `delta_keys_kernel`."""
    C: tl.constexpr = 64
    place = tl.program_id(0) // H
    chunk = tl.load(segment_ptr) + place
    head = tl.program_id(0) % H
    size = tl.load(sizes_ptr + chunk)
    if size > 0:
        start = tl.load(starts_ptr + chunk).to(tl.int64)
        tile = (place * H + head).to(tl.int64)
        token = tl.arange(0, C)
        i = token[:, None]
        j = token[None, :]
        mask = (token < size)[:, None]
        k_row = (start + i) * (KEY_HEADS * K) + head // (H // KEY_HEADS) * K
        key = tl.arange(0, K)[None, :]
        keys = tl.load(k_ptr + k_row + key, mask=mask, other=0.0).to(tl.float32)
        k_scale = tl.rsqrt(tl.sum(keys * keys, 1) + 1e-6)
        queries = tl.load(q_ptr + k_row + key, mask=mask, other=0.0).to(tl.float32)
        q_scale = tl.rsqrt(tl.sum(queries * queries, 1) + 1e-6) * (K**-0.5)
        key_row = tile * (C * K) + i * K
        if IS_PER_CHANNEL:
            far = tl.zeros((C, C), tl.float32)
            near = tl.zeros((C, C), tl.float32)
            own = tl.zeros((C, C), tl.float32)
            for first in tl.range(0, K, PART, num_stages=1):
                part = first + tl.arange(0, PART)[None, :]
                sums_ptr = gates_ptr + tile * (C * K) + part
                G = tl.load(sums_ptr + i * K)
                k = tl.load(k_ptr + k_row + part, mask=mask, other=0.0)
                k = k.to(tl.float32) * k_scale[:, None]
                q = tl.load(q_ptr + k_row + part, mask=mask, other=0.0)
                q = q.to(tl.float32) * q_scale[:, None]
                y = G - _border_sums(sums_ptr, 2, K, i)
                x = tl.exp2(tl.where(i >= 32, y, -y))
                kx = (k * x).to(tl.bfloat16)
                far = tl.dot((q * x).to(tl.bfloat16), tl.trans(kx), far)
                y = G - _border_sums(sums_ptr, 1, K, i)
                x = tl.exp2(tl.where(i // 16 % 2 == 1, y, -y))
                kx = (k * x).to(tl.bfloat16)
                near = tl.dot((q * x).to(tl.bfloat16), tl.trans(kx), near)
                y = G - _border_sums(sums_ptr, 0, K, i)
                kx = (k * tl.exp2(-y)).to(tl.bfloat16)
                own = tl.dot((q * tl.exp2(y)).to(tl.bfloat16), tl.trans(kx), own)
                decayed = q * tl.exp2(G)
                tl.store(decayed_q_ptr + key_row + part, decayed.to(tl.bfloat16))
            products = _merge_levels(far, near, own, i, j)
        else:
            a_log = tl.load(a_log_ptr + head).to(tl.float32)
            sums, _, pairs = _head_sums(
                gates_ptr, a_log, dt_bias_ptr, start, size, head, H, LOWER_BOUND
            )
            q = queries * q_scale[:, None]
            k = (keys * k_scale[:, None]).to(tl.bfloat16)
            products = tl.dot(q.to(tl.bfloat16), tl.trans(k))
            products = tl.where(i >= j, products * pairs, 0.0)
            decayed = q * tl.exp2(sums)[:, None]
            tl.store(decayed_q_ptr + key_row + key, decayed.to(tl.bfloat16))
        tl.store(products_ptr + tile * (C * C) + i * C + j, products.to(tl.bfloat16))
