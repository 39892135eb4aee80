"""Triton kernel of `pallas_kernels.delta.prefill` for one decay per head and token.

It makes of a chunk what `pallas_kernels.delta.chunk_kernel` does, with decays that
multiply whole products: the pairs `2^(G_i - G_j)` need no factors.
"""

import typing

import triton
import triton.language as tl

from pallas_kernels.delta.decays import log2_decay


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
    decays = tl.where(is_token, log2_decay(logits, a_log, LOWER_BOUND), 0.0)
    sums = tl.cumsum(decays, 0)
    # Of the same sums: their difference is exactly 0 for i = j.
    pairs = tl.exp2(tl.minimum(sums[:, None] - sums[None, :], 0.0))
    return sums, tl.sum(decays, 0), pairs


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
def delta_head_chunk_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    gate_logits_ptr,
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
    LOWER_BOUND: tl.constexpr,
):
    """Writes w and q 2^G as one array, u transposed, k 2^(G_63 - G), 2^G_63 and P.

    `PART` channels are scaled at a time.
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
        a_log = tl.load(a_log_ptr + head).to(tl.float32)
        sums, last, pairs = _head_sums(
            gate_logits_ptr, a_log, dt_bias_ptr, start, size, head, H, LOWER_BOUND
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
