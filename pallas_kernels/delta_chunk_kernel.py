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
    """G where the two sides of a product meet, `[64, channels]`.

    Inside a block that is 4 below its middle: before the first token no decay of its
    own has come, so the factors are 2^-116 at the least and no normal key is lost.
    """
    s2 = tl.load(sums_ptr + 31 * K)
    if LEVEL == 2:
        return s2 + 0.0 * i
    s1 = tl.load(sums_ptr + 15 * K)
    s3 = tl.load(sums_ptr + 47 * K)
    if LEVEL == 1:
        return tl.where(i < 32, s1, s3)
    s4 = tl.load(sums_ptr + 63 * K)
    first = tl.where(i < 16, s1 - 8.0, s1 + s2 - 8.0)
    last = tl.where(i < 48, s2 + s3 - 8.0, s3 + s4 - 8.0)
    return 0.5 * tl.where(i < 32, first, last)


@triton.jit
@typing.no_type_check
def _merge(T, A, i, j, SIZE: tl.constexpr):
    """Inverses of twice the size, from those of SIZE in T; blocks `[4, 16, 16]`."""
    is_under = (i // SIZE == j // SIZE + 1) & (i // SIZE % 2 == 1)
    under = tl.where(is_under, -A, 0.0)
    product = tl.dot(T, under, input_precision="tf32")
    return tl.dot(product, T, T, input_precision="tf32")


@triton.jit
@typing.no_type_check
def _extend(T, A, is_under):
    """Inverses of twice the size, from those in T and what is under them in -A."""
    under = tl.where(is_under, A, 0.0)
    product = tl.dot(T, under, input_precision="tf32")
    return T + tl.dot(product, T, input_precision="tf32")


@triton.jit
@typing.no_type_check
def _invert(own, A, is_near, is_far):
    """(I + A)^-1 of a strictly lower A: the blocks on its diagonal, and -A elsewhere.

    `own` is `[4, 16, 16]`. `is_near` says where in A the blocks are that lie between
    those of a half of 32 tokens, `is_far` where the square between the halves.
    """
    r = tl.arange(0, 16)[None, :, None]
    c = tl.arange(0, 16)[None, None, :]
    is_pair = (r == c + 1) & (r % 2 == 1)
    T = tl.where(r == c, 1.0, 0.0) - tl.where(is_pair, own, 0.0)
    T = _merge(T, own, r, c, 2)
    T = _merge(T, own, r, c, 4)
    T = _merge(T, own, r, c, 8)
    block = tl.arange(0, 4)
    is_own = block[:, None, None, None] == block[None, None, :, None]
    T = tl.broadcast_to(T[:, :, None, :], (4, 16, 4, 16))
    T = tl.reshape(tl.where(is_own, T, 0.0), (64, 64))
    return _extend(_extend(T, A, is_near), A, is_far)


@triton.jit
@typing.no_type_check
def _diagonal(A):
    """The `[4, 16, 16]` blocks on the diagonal of `[64, 64]`."""
    block = tl.arange(0, 4)
    is_own = block[:, None, None, None] == block[None, None, :, None]
    return tl.sum(tl.where(is_own, tl.reshape(A, (4, 16, 4, 16)), 0.0), 2)


@triton.jit
@typing.no_type_check
def delta_chunk_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    gates_ptr,
    beta_logits_ptr,
    a_log_ptr,
    dt_bias_ptr,
    starts_ptr,
    sizes_ptr,
    segment_ptr,
    wq_ptr,
    u_ptr,
    decayed_k_ptr,
    decay_ptr,
    products_ptr,
    H: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PART: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
    LOWER_BOUND: tl.constexpr,
):
    """Writes w and q 2^G as one array, u transposed, k 2^(G_63 - G), 2^G_63 and P.

    `gates_ptr` is G with decays per channel, and the gate's logits otherwise. `PART`
    channels are in registers at a time. What queries and keys both need is read once
    from memory and found in the cache after that.
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
        queries = tl.load(q_ptr + k_row + key, mask=mask, other=0.0).to(tl.float32)
        q_scale = tl.rsqrt(tl.sum(queries * queries, 1) + 1e-6) * (K**-0.5)
        beta_at = (start + token) * H + head
        beta = tl.load(beta_logits_ptr + beta_at, mask=is_token, other=0.0)
        beta = tl.where(is_token, 1.0 / (1.0 + tl.exp(-beta.to(tl.float32))), 0.0)
        key_row = tile * (C * K) + i * K
        w_row = tile * (2 * C * K) + i * K
        q_row = w_row + C * K
        products_at = tile * (C * C) + i * C + j
        # A row has the far products left of these columns, then the near ones.
        first_near = i // 32 * 32
        first_own = i // 16 * 16
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
                tl.store(wq_ptr + q_row + part, decayed.to(tl.bfloat16))
            lower = tl.where(j < first_near, far, tl.where(j < first_own, near, own))
            products = tl.where(j <= i, lower, 0.0)
            tl.store(products_ptr + products_at, products.to(tl.bfloat16))
            far = tl.zeros((C, C), tl.float32)
            near = tl.zeros((C, C), tl.float32)
            own = tl.zeros((4, 16, 16), tl.float32)
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
                own = tl.dot(
                    tl.reshape(kx, (4, 16, PART)),
                    tl.trans(tl.reshape(kc, (4, 16, PART)), (0, 2, 1)),
                    own,
                )
                decayed = k * tl.exp2(last - G)
                tl.store(decayed_k_ptr + key_row + part, decayed.to(tl.bfloat16))
                # Read back below: a tile of it is too much to keep.
                weighted = k * (tl.exp2(G) * beta[:, None])
                tl.store(wq_ptr + w_row + part, weighted.to(tl.bfloat16))
        else:
            a_log = tl.load(a_log_ptr + head).to(tl.float32)
            sums, last, pairs = _head_sums(
                gates_ptr, a_log, dt_bias_ptr, start, size, head, H, LOWER_BOUND
            )
            all_k = tl.trans((keys * k_scale[:, None]).to(tl.bfloat16))
            all_q = (queries * q_scale[:, None]).to(tl.bfloat16)
            products = tl.dot(all_q, all_k)
            products = tl.where(i >= j, products * pairs, 0.0)
            tl.store(products_ptr + products_at, products.to(tl.bfloat16))
            far = tl.dot(tl.trans(all_k), all_k) * pairs
            near = far
            own = _diagonal(far)
            tl.store(decay_ptr + tile * K + key, tl.exp2(last) + 0.0 * key)
            before = tl.exp2(sums)[:, None]
            after = tl.exp2(last - sums)[:, None]
            for first in tl.range(0, K, PART, num_stages=1):
                part = first + tl.arange(0, PART)[None, :]
                q = tl.load(q_ptr + k_row + part, mask=mask, other=0.0)
                q = q.to(tl.float32) * q_scale[:, None] * before
                tl.store(wq_ptr + q_row + part, q.to(tl.bfloat16))
                k = tl.load(k_ptr + k_row + part, mask=mask, other=0.0)
                k = k.to(tl.float32) * k_scale[:, None]
                decayed = (k * after).to(tl.bfloat16)
                tl.store(decayed_k_ptr + key_row + part, decayed)
                weighted = (k * (before * beta[:, None])).to(tl.bfloat16)
                tl.store(wq_ptr + w_row + part, weighted)
        # Two numbers for one: where keys repeat, its errors would add up in w.
        r = tl.arange(0, 16)[None, :, None]
        is_lower = r > tl.arange(0, 16)[None, None, :]
        own = tl.where(is_lower, own * tl.reshape(beta, (4, 16))[:, :, None], 0.0)
        is_far = j < first_near
        is_near = (j >= first_near) & (j < first_own)
        A = -beta[:, None] * tl.where(is_far, far, near)
        inverse = _invert(own, A, is_near, is_far)
        T = inverse.to(tl.bfloat16)
        rest = (inverse - T.to(tl.float32)).to(tl.bfloat16)
        value = tl.arange(0, V)
        v_at = (start + i) * (H * V) + head * V + value[None, :]
        v = tl.load(v_ptr + v_at, mask=mask, other=0.0).to(tl.float32)
        v = tl.trans((v * beta[:, None]).to(tl.bfloat16))
        u = tl.dot(v, tl.trans(T), tl.dot(v, tl.trans(rest))).to(tl.bfloat16)
        tl.store(u_ptr + tile * (C * V) + value[:, None] * C + j, u)
        # What the block's own stores have left there, then what depends on all of it.
        tl.debug_barrier()
        weighted = tl.load(wq_ptr + w_row + key)
        w = tl.dot(T, weighted, tl.dot(rest, weighted)).to(tl.bfloat16)
        tl.debug_barrier()
        tl.store(wq_ptr + w_row + key, w)
