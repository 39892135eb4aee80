"""Gluon kernel of `pallas_kernels.delta.prefill` for one decay per head and token.

It makes of a chunk what `pallas_kernels.delta.head_chunk_kernel` does, for keys and
values of 64 or 128 channels, with operands in registers as in
`pallas_kernels.delta.fragments`.

Keys and values are multiplied as they come. With `G` the running sum of the log2 decays
and `s_i = 1 / |k_i|`, all else is a factor of a row or of a column of 64 x 64:

    A_ij = beta_i s_i (k_i . k_j) 2^(G_i - G_j) s_j     i > j
    T = (I + A)^-1     w = (T_ij beta_j s_j 2^G_j) k     u = (T_ij beta_j) v
"""

import typing

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from pallas_kernels.delta.fragments import (
    BLOCKS,
    SWIZZLED,
    TOKENS,
    WIDE,
    WIDE_LEFT,
    WIDE_TOKENS,
    add,
    block_places,
    exp2,
    gate,
    gate_scale,
    invert,
    log2,
    norms,
    of_rows,
    own_warps,
    pointers_to_tile,
    reciprocal,
    rounded,
    rounding,
    side_by_side,
    start_u,
    start_values,
    start_w,
    store_rows,
    times,
    to_mma_order,
    token_places,
)

# Each warp has all tokens of the chunk, a thread two of them.
_ALL = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_ROWS = gl.constexpr(gl.SliceLayout(1, WIDE.value))
_COLUMNS = gl.constexpr(gl.SliceLayout(0, WIDE.value))


@gluon.jit
@typing.no_type_check
def _wide_rows(x):
    """`[4, 16, 1]` in the layout `TOKENS` as `[64, 1]` of a product of 64 x 64."""
    x = gl.convert_layout(gl.reshape(x, [64]), _ROWS, assert_trivial=True)
    return x[:, None]


@gluon.jit
@typing.no_type_check
def _two_numbers(x):
    """Two in bfloat16 whose sum is x."""
    high = rounded(x)
    return high, rounding(x, high)


@gluon.jit
@typing.no_type_check
def _to_tokens(x):
    """A product of 64 x 64 in bfloat16, with 8 neighbours of a row to a lane."""
    x = to_mma_order(rounded(x))
    return gl.convert_layout(x, WIDE_TOKENS, assert_trivial=True)


@gluon.jit
@typing.no_type_check
def _times(x, y):
    """The product with a number in two, rounded once."""
    return gl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;",
        "=r,r,r,r",
        [x, y[0], times(x, y[1])],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
@typing.no_type_check
def _share(parts):
    """Parts of 32 channels to shared memory, two of them side by side."""
    shared = ()
    for n in gl.static_range(len(parts) // 2):
        to = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SWIZZLED)
        to.store(side_by_side(parts[2 * n], parts[2 * n + 1]))
        shared += (to,)
    return shared


@gluon.jit
@typing.no_type_check
def _start_products(x, y):
    """Starts x y^T of 64 tokens, in parts of 64 channels."""
    acc = gl.zeros([64, 64], gl.float32, WIDE)
    for n in gl.static_range(len(x)):
        right = y[n].permute([1, 0])
        acc = warpgroup_mma(x[n], right, acc, use_acc=n > 0, is_async=True)
    return acc


@gluon.jit
@typing.no_type_check
def _column_blocks(x):
    """The columns of a product of 64 x 64 as four of `[4, 16, 16]`, blocks of rows."""
    x = gl.permute(gl.reshape(x, [4, 16, 2, 2, 16]), [0, 1, 4, 2, 3])
    even, odd = gl.split(x)
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    x0 = gl.convert_layout(x0, BLOCKS, assert_trivial=True)
    x1 = gl.convert_layout(x1, BLOCKS, assert_trivial=True)
    x2 = gl.convert_layout(x2, BLOCKS, assert_trivial=True)
    x3 = gl.convert_layout(x3, BLOCKS, assert_trivial=True)
    return x0, x1, x2, x3


@gluon.jit
@typing.no_type_check
def delta_head_fragment_chunk_kernel(
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
    wqk_ptr,
    u_ptr,
    decay_ptr,
    products_ptr,
    H: gl.constexpr,
    KEY_HEADS: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    LOWER_BOUND: gl.constexpr,
):
    """Writes w, q 2^G and k 2^(G_63 - G) as one array, u transposed, 2^G_63 and P.

    All but 2^G_63 in tiles of 64 rows and columns, see `pointers_to_tile`: those of w
    come one after the other, then those of q and of k.
    """
    C: gl.constexpr = 64
    ROW: gl.constexpr = KEY_HEADS * K
    PARTS: gl.constexpr = K // 32
    gl.static_assert((K == 64) | (K == 128))
    gl.static_assert((V == 64) | (V == 128))
    place = gl.program_id(0) // H
    head = gl.program_id(0) % H
    chunk = gl.load(segment_ptr) + place
    size = gl.load(sizes_ptr + chunk)
    start = gl.load(starts_ptr + chunk).to(gl.int64)
    if size > 0:
        tile = (place * H + head).to(gl.int64)
        q_ptr += start * ROW + head // (H // KEY_HEADS) * K
        k_ptr += start * ROW + head // (H // KEY_HEADS) * K
        v_ptr += start * (H * V) + head * V
        w_ptr = wqk_ptr + tile * (3 * C * K)
        u_ptr += tile * (C * V)
        products_ptr += tile * (C * C)

        # Everything is asked for first. Past the last token it is repeated: its beta
        # is 0, and there is no decay.
        token = gl.arange(0, C, _ALL)
        is_token = token < size
        at = start * H + head + gl.minimum(token, size - 1) * H
        logits = gl.load(gate_logits_ptr + at)
        beta = gl.load(beta_logits_ptr + at)
        a_log = gl.load(a_log_ptr + head).to(gl.float32)
        bias = gl.load(dt_bias_ptr + head).to(gl.float32)
        row, key, from_at = token_places(size, ROW)
        keys = ()
        queries = ()
        for n in gl.static_range(PARTS):
            keys += (gl.load(k_ptr + 32 * n + from_at),)
        for n in gl.static_range(PARTS):
            queries += (gl.load(q_ptr + 32 * n + from_at),)
        values = start_values(v_ptr, size, V, H * V)

        scale, per_logit, cut = gate_scale(a_log, LOWER_BOUND)
        x = gl.minimum((logits.to(gl.float32) + bias) * per_logit, cut)
        decays = gl.where(is_token, gate(x, LOWER_BOUND) * scale, 0.0)
        sums = gl.allocate_shared_memory(gl.float32, [C], _PLAIN)
        betas = gl.allocate_shared_memory(gl.float32, [C], _PLAIN)
        sums.store(gl.associative_scan(decays, 0, add))
        beta = reciprocal(1.0 + gl.exp(-beta.to(gl.float32)))
        betas.store(gl.where(is_token, beta, 0.0))

        i, r, c = block_places()
        k_scale, q_scale = norms(keys, queries, r, c, K**-0.5)
        G = of_rows(sums, TOKENS)
        end = sums.slice(C - 1, 1).load(gl.SliceLayout(1, gl.SliceLayout(2, TOKENS)))
        from_start = exp2(G)
        to_end = _two_numbers(k_scale * exp2(end[:, None, None] - G))
        of_q = _two_numbers(q_scale * from_start)
        for n in gl.static_range(PARTS):
            to_ptr = w_ptr + 2 * C * K + n // 2 * (C * C)
            to_ptr = pointers_to_tile(to_ptr, row, key, n % 2 * 32, 8)
            gl.store(to_ptr, _times(keys[n], to_end))
            to_ptr = w_ptr + C * K + n // 2 * (C * C)
            to_ptr = pointers_to_tile(to_ptr, row, key, n % 2 * 32, 8)
            gl.store(to_ptr, _times(queries[n], of_q))
        shared_keys = _share(keys)
        shared_queries = _share(queries)
        beta = of_rows(betas, TOKENS)
        # Of columns: the logarithm of s_j 2^-G_j, which may be large, and what is
        # left of a key in w, beta_j s_j 2^G_j.
        ends = gl.allocate_shared_memory(gl.float32, [C], _PLAIN)
        weights = gl.allocate_shared_memory(gl.float32, [C], _PLAIN)
        ends.store(gl.reshape(log2(k_scale) - G, [C]))
        weights.store(gl.reshape(beta * k_scale * from_start, [C]))
        fence_async_shared()
        gl.thread_barrier()

        qk = _start_products(shared_queries, shared_keys)
        kk = _start_products(shared_keys, shared_keys)
        token = gl.arange(0, C, _ROWS)[:, None]
        before = gl.arange(0, C, _COLUMNS)[None, :]
        # 2^(G_i - G_j) s_j
        pairs = exp2(_wide_rows(G) + ends.load(_COLUMNS)[None, :])
        pairs = gl.where(token >= before, pairs, 0.0)
        channel = gl.arange(0, K, gl.BlockedLayout([1], [32], [4], [0]))
        last = sums.slice(C - 1, 1).load(gl.BlockedLayout([1], [32], [4], [0]))
        gl.store(decay_ptr + tile * K + channel, exp2(last))
        qk = warpgroup_mma_wait(K // 64, deps=[qk])
        P = rounded(qk * pairs * _wide_rows(q_scale))
        row = gl.arange(0, C, gl.SliceLayout(1, WIDE_TOKENS))[:, None]
        column = gl.arange(0, C, gl.SliceLayout(0, WIDE_TOKENS))[None, :]
        P = gl.convert_layout(P, WIDE_TOKENS)
        gl.store(pointers_to_tile(products_ptr, row, column, 0, 8), P)
        kk = warpgroup_mma_wait(0, deps=[kk])
        # From here on the memory of the queries is that of the inverse.
        for n in gl.static_range(K // 64):
            shared_queries[n]._keep_alive()
        A = kk * pairs * _wide_rows(beta * k_scale)
        A0, A1, A2, A3 = _column_blocks(A)
        own = gl.where(i == 0, A0, gl.where(i == 1, A1, gl.where(i == 2, A2, A3)))
        A0 = gl.where(i > 0, A0, 0.0)
        A1 = gl.where(i > 1, A1, 0.0)
        T = invert(own, A0, A1, A2, 1.0, own_warps(i), r, c)
        inverse = gl.allocate_shared_memory(gl.bfloat16, [C, C], SWIZZLED)
        rest = gl.allocate_shared_memory(gl.bfloat16, [C, C], SWIZZLED)
        COLUMNS: gl.constexpr = gl.SliceLayout(0, WIDE_LEFT)
        store_rows(T * betas.load(COLUMNS)[None, :], inverse, rest)
        high, low = _two_numbers(T * weights.load(COLUMNS)[None, :])
        fence_async_shared()

        # w needs only what its own warps have. Its registers are those of u, then.
        now = ()
        for n in gl.static_range(K // 64):
            now += (start_w(high, low, shared_keys[n]),)
        for n in gl.static_range(K // 64):
            w = warpgroup_mma_wait(2 * (K // 64 - 1 - n), deps=[now[n]])
            to_ptr = pointers_to_tile(w_ptr + n * (C * C), row, column, 0, 8)
            gl.store(to_ptr, _to_tokens(w))
        gl.thread_barrier()
        now = ()
        for n in gl.static_range(V // 64):
            now += (start_u(inverse, rest, values, 64 * n),)
        for n in gl.static_range(V // 64):
            u = warpgroup_mma_wait(2 * (V // 64 - 1 - n), deps=[now[n]])
            to_ptr = pointers_to_tile(u_ptr + n * (C * C), row, column, 0, 8)
            gl.store(to_ptr, _to_tokens(u))
