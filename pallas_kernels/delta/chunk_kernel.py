"""Triton kernel of `pallas_kernels.delta.prefill` that makes chunks independent.

This one has a decay per key channel, `delta_head_chunk_kernel` one per head. With `G`
the running sum of the log2 decays of a chunk of 64 tokens, and everything scaled by
norms, a chunk of a head is

    A[i, j] = beta_i k_i . (k_j 2^(G_i - G_j))      j < i        T = (I + A)^-1
    P[i, j] = q_i . (k_j 2^(G_i - G_j))             j <= i
    w = T (beta k 2^G)     u = T (beta v)     q 2^G     k 2^(G_63 - G)     2^G_63

The products come in pieces, each with a pair of factors that stays finite, see
`pallas_kernels.delta.decays`: the blocks of 16 on the diagonal (own), the two squares
between neighbours in a half (near), and the square between the halves (far).

Source of the chunked form: Kimi Linear (arXiv:2510.26692), section 3.
"""

import typing

import triton
import triton.language as tl

from pallas_kernels.delta.decays import reciprocal, sigmoid, write_decays
from pallas_kernels.delta.inverse import invert


@triton.jit
@typing.no_type_check
def _rounded(x):
    """Rounds to bfloat16. Not called pure, so as not to be done for each layout."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;",
        "=r,f,f",
        [x],
        dtype=tl.bfloat16,
        is_pure=False,
        pack=2,
    )


@triton.jit
@typing.no_type_check
def _load_rows(x_ptr, scales_ptr, token, size, part, STRIDE: tl.constexpr):
    """Rows of q or of k, normalised. Past the last token it is repeated: beta is 0."""
    row = tl.minimum(token, size - 1)
    x = tl.load(x_ptr + row * STRIDE + part).to(tl.float32)
    return x * tl.load(scales_ptr + token)


@triton.jit
@typing.no_type_check
def delta_chunk_kernel(
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
    powers_ptr,
    table_ptr,
    scales_ptr,
    H: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PART: tl.constexpr,
    LOWER_BOUND: tl.constexpr,
):
    """Writes w and q 2^G as one array, u transposed, k 2^(G_63 - G), 2^G_63 and P.

    `PART` channels are in registers at a time. The last three outputs pass what the
    program finds out first to its own later loads: the factors of the decays, the norms
    of k and of q, and beta.
    """
    C: tl.constexpr = 64
    ROW: tl.constexpr = KEY_HEADS * K
    place = tl.program_id(0) // H
    chunk = tl.load(segment_ptr) + place
    head = tl.program_id(0) % H
    size = tl.load(sizes_ptr + chunk)
    if size > 0:
        start = tl.load(starts_ptr + chunk).to(tl.int64)
        tile = (place * H + head).to(tl.int64)
        q_ptr += start * ROW + head // (H // KEY_HEADS) * K
        k_ptr += start * ROW + head // (H // KEY_HEADS) * K
        v_ptr += start * (H * V) + head * V
        beta_logits_ptr += start * H + head
        wq_ptr += tile * (2 * C * K)
        u_ptr += tile * (C * V)
        decayed_k_ptr += tile * (C * K)
        decay_ptr += tile * K
        products_ptr += tile * (C * C)
        powers_ptr += tile * (C * K)
        table_ptr += tile * (15 * K)
        scales_ptr += tile * (3 * C)
        betas_ptr = scales_ptr + 2 * C
        token = tl.arange(0, C)
        i = token[:, None]
        row = tl.minimum(i, size - 1)
        key = tl.arange(0, K)
        keys = tl.load(k_ptr + row * ROW + key[None, :])
        queries = tl.load(q_ptr + row * ROW + key[None, :])
        beta = tl.load(beta_logits_ptr + tl.minimum(token, size - 1) * H)
        decay = write_decays(
            gate_logits_ptr + start * (H * K),
            a_log_ptr,
            dt_bias_ptr,
            powers_ptr,
            table_ptr,
            size,
            head,
            H,
            K,
            LOWER_BOUND,
        )
        tl.store(decay_ptr + key, decay)
        x = keys.to(tl.float32)
        tl.store(scales_ptr + token, tl.rsqrt(tl.sum(x * x, 1) + 1e-6))
        x = queries.to(tl.float32)
        q_scale = tl.rsqrt(tl.sum(x * x, 1) + 1e-6) * (K**-0.5)
        tl.store(scales_ptr + C + token, q_scale)
        beta = tl.where(token < size, sigmoid(beta.to(tl.float32)), 0.0)
        tl.store(betas_ptr + token, beta)
        tl.debug_barrier()
        four = tl.arange(0, 4)[:, None, None]
        two = tl.arange(0, 2)[:, None, None]
        r = tl.arange(0, 16)[None, :, None]
        c = tl.arange(0, 16)[None, None, :]
        own_token = 16 * four + r
        even_token = 32 * two + r
        low_token = tl.arange(0, 32)[:, None]
        low_column = tl.arange(0, 32)[None, :]
        own_q = tl.zeros((4, 16, 16), tl.float32)
        own_k = tl.zeros((4, 16, 16), tl.float32)
        near_q = tl.zeros((2, 16, 16), tl.float32)
        near_k = tl.zeros((2, 16, 16), tl.float32)
        far_q = tl.zeros((32, 32), tl.float32)
        far_k = tl.zeros((32, 32), tl.float32)
        for first in tl.range(0, K, PART, num_stages=1):
            part = first + tl.arange(0, PART)[None, None, :]
            block_ptr = table_ptr + four * K + part
            p = tl.load(powers_ptr + own_token * K + part)
            half = tl.load(block_ptr)
            before = tl.load(block_ptr + 4 * K) * half
            after = tl.load(block_ptr + 8 * K)
            k = _load_rows(k_ptr, scales_ptr, own_token, size, part, ROW)
            q = _load_rows(q_ptr, scales_ptr + C, own_token, size, part, ROW)
            n = k * reciprocal(p)
            k *= p
            q *= p
            columns = tl.trans(_rounded(n), (0, 2, 1))
            own_k = tl.dot(_rounded(k), columns, own_k)
            own_q = tl.dot(_rounded(q), columns, own_q)
            at = own_token * K + part
            tl.store(decayed_k_ptr + at, (n * half * after).to(tl.bfloat16))
            # To be read back below: a tile of it is too much to keep.
            tl.store(wq_ptr + at, (k * before).to(tl.bfloat16))
            tl.store(wq_ptr + C * K + at, (q * before).to(tl.bfloat16))
            block_ptr = table_ptr + 2 * two * K + part
            p = tl.load(powers_ptr + even_token * K + part)
            n = _load_rows(k_ptr, scales_ptr, even_token, size, part, ROW)
            n *= reciprocal(p) * tl.load(block_ptr)
            columns = tl.trans(_rounded(n), (0, 2, 1))
            odd_token = even_token + 16
            p = tl.load(powers_ptr + odd_token * K + part)
            p *= tl.load(block_ptr + K)
            k = _load_rows(k_ptr, scales_ptr, odd_token, size, part, ROW)
            q = _load_rows(q_ptr, scales_ptr + C, odd_token, size, part, ROW)
            near_k = tl.dot(_rounded(k * p), columns, near_k)
            near_q = tl.dot(_rounded(q * p), columns, near_q)
            part = first + tl.arange(0, PART)[None, :]
            block_ptr = table_ptr + low_token // 16 * K + part
            p = tl.load(powers_ptr + low_token * K + part)
            # One after the other: their product may vanish.
            n = _load_rows(k_ptr, scales_ptr, low_token, size, part, ROW)
            n *= reciprocal(p) * tl.load(block_ptr) * tl.load(block_ptr + 12 * K)
            columns = tl.trans(_rounded(n))
            high_token = low_token + 32
            p = tl.load(powers_ptr + high_token * K + part)
            p *= tl.load(block_ptr + 2 * K)
            p *= tl.load(block_ptr + 13 * K)
            k = _load_rows(k_ptr, scales_ptr, high_token, size, part, ROW)
            q = _load_rows(q_ptr, scales_ptr + C, high_token, size, part, ROW)
            far_k = tl.dot(_rounded(k * p), columns, far_k)
            far_q = tl.dot(_rounded(q * p), columns, far_q)
        own_q = tl.where(r >= c, own_q, 0.0)
        zeros = tl.zeros((2, 16, 16), tl.bfloat16)
        to_ptr = products_ptr + own_token * C + 16 * four + c
        tl.store(to_ptr, own_q.to(tl.bfloat16))
        to_ptr = products_ptr + even_token * C + 32 * two + c
        tl.store(to_ptr + 16 * C, near_q.to(tl.bfloat16))
        tl.store(to_ptr + 16, zeros)
        to_ptr = products_ptr + low_token * C + low_column
        tl.store(to_ptr + 32 * C, far_q.to(tl.bfloat16))
        tl.store(to_ptr + 32, tl.zeros((32, 32), tl.bfloat16))
        own_k = tl.where(r > c, own_k * tl.load(betas_ptr + own_token), 0.0)
        near_k *= tl.load(betas_ptr + 16 + even_token)
        far_k *= tl.load(betas_ptr + 32 + low_token)
        # What comes last is asked for now.
        value = tl.arange(0, V)
        v = tl.load(v_ptr + row * (H * V) + value[None, :])
        tl.debug_barrier()
        weighted = tl.load(wq_ptr + i * K + key[None, :])
        inverse = invert(own_k, near_k, far_k) * tl.load(betas_ptr + token)[None, :]
        # Two numbers for one: where keys repeat, its errors would add up in w.
        T = _rounded(inverse)
        rest = _rounded(inverse - T.to(tl.float32))
        v = tl.trans(v)
        u = tl.dot(v, tl.trans(T), tl.dot(v, tl.trans(rest))).to(tl.bfloat16)
        tl.store(u_ptr + value[:, None] * C + token[None, :], u)
        w = tl.dot(T, weighted, tl.dot(rest, weighted)).to(tl.bfloat16)
        tl.debug_barrier()
        tl.store(wq_ptr + i * K + key[None, :], w)
