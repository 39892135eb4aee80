"""Gluon kernel of `pallas_kernels.delta.prefill` that makes chunks independent.

It makes of a chunk what `pallas_kernels.delta.chunk_kernel` does, for keys and values
of 64 or 128 channels. There, operands change layouts through shared memory between all
products; here they stay in registers, see `pallas_kernels.delta.fragments`.

Each of 4 warps has a block of 16 tokens. Per key channel, with `G` the running sum of
the log2 decays (cut at -15), block b has whole numbers `R_b`, at most 1/2 from G where
it begins, and `M_b`, near the middle between that and where it ends. With

    p_i = 2^(G_i - M_b)     x_i p_i,  k_i / p_i  in bfloat16

all else is the product of those with powers of two, which round nothing, so that a
register with two of them is multiplied at once:

    products of the block itself          x_i p_i . k_j / p_j
    rows decayed from the block's start   x_i p_i 2^(M_b - R_b)
    columns decayed to its end            k_j / p_j 2^(R_b+1 - M_b)
    from the chunk's start                the rows' 2^(R_b)
    rows of block i, columns of block j   the columns' 2^(R_i - R_j+1)

Factors of products are 2^+-124 at most, and between blocks at most 1.
"""

import typing

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma_wait,
)

from pallas_kernels.delta.fragments import (
    BLOCKS,
    FLAT_TOKENS,
    SHARED_COLUMNS,
    SHARED_ROWS,
    SWIZZLED,
    TOKENS,
    WIDE_LEFT,
    WIDE_TOKENS,
    add,
    block_places,
    exp2,
    gate,
    gate_scale,
    invert,
    last,
    multiply_tokens,
    norms,
    of_block,
    of_rows,
    own_warps,
    pointers_to_tile,
    reciprocal,
    rounded,
    rows_to_mma_order,
    side_by_side,
    stack,
    stack_rows,
    start_u,
    start_values,
    start_w,
    store_rows,
    times,
    to_mma_order,
    token_places,
)

# A thread has a channel of 16 tokens.
_WALK = gl.constexpr(gl.BlockedLayout([16, 1], [1, 32], [1, 4], [0, 1]))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_FACTORS = gl.constexpr(gl.SliceLayout(1, TOKENS.value))


@gluon.jit
@typing.no_type_check
def _factors(table, n):
    """Those of 32 channels, `[4, 1, 32]`: of each block, for all its tokens."""
    return table.slice(32 * n, 32, 1).load(_FACTORS)[:, None, :]


@gluon.jit
@typing.no_type_check
def _start_product(inverse, rest, keys, values, n: gl.constexpr, K: gl.constexpr):
    """64 columns of w, then 64 rows of u."""
    if n < K // 64:
        return start_w(inverse, rest, keys[n])
    else:
        return start_u(inverse, rest, values, 64 * n - K)


@gluon.jit
@typing.no_type_check
def delta_fragment_chunk_kernel(
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
    GATES: gl.constexpr = H * K
    PARTS: gl.constexpr = K // 32
    # Registers do not reach for all keys: the last part is asked for again. What the
    # assembler spills says so.
    KEPT: gl.constexpr = 3
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
        gate_logits_ptr += start * GATES + head * K
        beta_logits_ptr += start * H + head
        w_ptr = wqk_ptr + tile * (3 * C * K)
        u_ptr += tile * (C * V)
        products_ptr += tile * (C * C)

        # Everything but the values is asked for first. A logit that is not there is
        # one of no decay.
        channel = gl.arange(0, K, gl.SliceLayout(0, _WALK))
        t = gl.arange(0, 16, gl.SliceLayout(1, _WALK))[:, None]
        logits_ptr = gate_logits_ptr + (t * GATES + channel[None, :])
        if size == C:
            logits_0 = gl.load(logits_ptr)
            logits_1 = gl.load(logits_ptr + 16 * GATES)
            logits_2 = gl.load(logits_ptr + 32 * GATES)
            logits_3 = gl.load(logits_ptr + 48 * GATES)
        else:
            logits_0 = gl.load(logits_ptr, mask=t < size, other=-3e38)
            logits_1 = gl.load(logits_ptr + 16 * GATES, mask=t + 16 < size, other=-3e38)
            logits_2 = gl.load(logits_ptr + 32 * GATES, mask=t + 32 < size, other=-3e38)
            logits_3 = gl.load(logits_ptr + 48 * GATES, mask=t + 48 < size, other=-3e38)
        logits = (logits_0, logits_1, logits_2, logits_3)
        bias = gl.load(dt_bias_ptr + head * K + channel).to(gl.float32)
        a_log = gl.load(a_log_ptr + head).to(gl.float32)
        token = gl.arange(0, C, gl.BlockedLayout([1], [32], [4], [0]))
        beta = gl.load(beta_logits_ptr + gl.minimum(token, size - 1) * H)
        row, key, from_at = token_places(size, ROW)
        keys = ()
        queries = ()
        for n in gl.static_range(PARTS):
            keys += (gl.load(k_ptr + 32 * n + from_at),)

        powers = gl.allocate_shared_memory(
            gl.float32, [C, K], gl.SwizzledSharedLayout(4, 1, 2, [1, 0])
        )
        columns = ()
        query_rows = ()
        for _ in gl.static_range(PARTS):
            columns += (
                gl.allocate_shared_memory(gl.bfloat16, [4, 16, 32], SHARED_COLUMNS),
            )
        for _ in gl.static_range(PARTS):
            query_rows += (
                gl.allocate_shared_memory(gl.bfloat16, [4, 16, 32], SHARED_ROWS),
            )
        to_start = gl.allocate_shared_memory(gl.bfloat16, [4, K], _PLAIN)
        to_end = gl.allocate_shared_memory(gl.bfloat16, [4, K], _PLAIN)
        from_first = gl.allocate_shared_memory(gl.bfloat16, [4, K], _PLAIN)
        to_last = gl.allocate_shared_memory(gl.float32, [4, K], _PLAIN)
        after_0 = gl.allocate_shared_memory(gl.bfloat16, [4, K], _PLAIN)
        after_1 = gl.allocate_shared_memory(gl.bfloat16, [4, K], _PLAIN)
        betas = gl.allocate_shared_memory(
            gl.float32, [C], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )

        # A thread walks down the chunk with its channel. `total` is G from R_b on.
        scale, per_logit, cut = gate_scale(a_log, LOWER_BOUND)
        bias *= per_logit
        total = gl.zeros([K], gl.float32, gl.SliceLayout(0, _WALK))
        none = total - 1e4
        zero = total
        border = total
        borders = ()
        middles = ()
        steps = ()
        p = ()
        for b in gl.static_range(4):
            if b == 2:
                # By now the first of the logits' registers are free.
                for n in gl.static_range(PARTS):
                    queries += (gl.load(q_ptr + 32 * n + from_at),)
            x = logits[b].to(gl.float32) * per_logit + bias[None, :]
            sums = gl.associative_scan(gate(gl.minimum(x, cut), LOWER_BOUND), 0, add)
            end = total + scale * gl.reduce(sums, 0, last)
            # 4 below the middle: before the first token no decay of its own has come,
            # so factors are 2^-116 at the least and no normal key is lost.
            middle = gl.floor(0.5 * end - 3.5)
            step = gl.floor(end + 0.5)
            p += (exp2(sums * scale + (total - middle)[None, :]),)
            borders += (border,)
            middles += (middle,)
            steps += (step,)
            border += step
            total = end - step
        powers.store(stack_rows(p))
        middle = stack(middles)
        to_start.store(exp2(middle).to(gl.bfloat16))
        to_end.store(exp2(stack(steps) - middle).to(gl.bfloat16))
        first = stack(borders)
        from_first.store(exp2(first).to(gl.bfloat16))
        # It multiplies up to 2^116: what is below 2^-126 must not be lost before.
        end = stack((border + total,) * 4) - first - middle
        to_last.store(exp2(end + 64.0) * 2.0**-64)
        gl.store(decay_ptr + tile * K + channel, exp2(border + total))
        # Above the diagonal 0.
        step_0 = stack((none, zero, steps[1], steps[1] + steps[2]))
        after_0.store(exp2(step_0).to(gl.bfloat16))
        after_1.store(exp2(stack((none, none, zero, steps[2]))).to(gl.bfloat16))
        beta = reciprocal(1.0 + gl.exp(-beta.to(gl.float32)))
        betas.store(gl.where(token < size, beta, 0.0))

        zeros = gl.zeros([4, 16, 16], gl.float32, BLOCKS)
        i, r, c = block_places()
        kk, qq = norms(keys, queries, r, c, K**-0.5)

        own_k = zeros
        own_q = zeros
        key_rows = ()
        for n in gl.static_range(PARTS):
            p = gl.reshape(powers.slice(32 * n, 32, 1).load(FLAT_TOKENS), [4, 16, 32])
            p = gl.convert_layout(p, TOKENS, assert_trivial=True)
            k = keys[n] if n < KEPT else gl.load(k_ptr + 32 * n + from_at)
            k = k.to(gl.float32) * kk
            column = k * reciprocal(p)
            decayed = rounded(column * _factors(to_last, n))
            to_ptr = w_ptr + 2 * C * K + n // 2 * (C * C)
            gl.store(pointers_to_tile(to_ptr, row, key, n % 2 * 32, 8), decayed)
            column = rounded(column)
            k = rounded(k * p)
            q = rounded(queries[n].to(gl.float32) * qq * p)
            own_k = multiply_tokens(k, column, own_k)
            own_q = multiply_tokens(q, column, own_q)
            columns[n].store(times(column, _factors(to_end, n)))
            key_rows += (times(k, _factors(to_start, n)),)
            q = times(q, _factors(to_start, n))
            query_rows[n].store(q)
            q = times(q, _factors(from_first, n))
            to_ptr = w_ptr + C * K + n // 2 * (C * C)
            gl.store(pointers_to_tile(to_ptr, row, key, n % 2 * 32, 8), q)
        powers._keep_alive()

        # From here on its memory is that of the values, which are asked for now, and
        # of the keys that the inverse multiplies.
        gl.thread_barrier()
        from_start = ()
        for _ in gl.static_range(K // 64):
            from_start += (gl.allocate_shared_memory(gl.bfloat16, [C, 64], SWIZZLED),)
        values = start_values(v_ptr, size, V, H * V)

        A0 = zeros
        A1 = zeros
        A2 = zeros
        P0 = zeros
        P1 = zeros
        P2 = zeros
        for n in gl.static_range(PARTS):
            k = key_rows[n]
            q = query_rows[n].load(TOKENS)
            c0 = times(of_block(columns[n], 0, TOKENS), _factors(after_0, n))
            c1 = times(of_block(columns[n], 1, TOKENS), _factors(after_1, n))
            c2 = of_block(columns[n], 2, TOKENS)
            A0 = multiply_tokens(k, c0, A0)
            P0 = multiply_tokens(q, c0, P0)
            A1 = multiply_tokens(k, c1, A1)
            P1 = multiply_tokens(q, c1, P1)
            A2 = multiply_tokens(k, c2, A2)
            P2 = multiply_tokens(q, c2, P2)
            k = times(k, _factors(from_first, n))
            if n % 2 == 0:
                half = k
            else:
                from_start[n // 2].store(side_by_side(half, k))
        warps = own_warps(i)
        is_element = (r >= 0) & (c >= 0)
        to_ptr = pointers_to_tile(products_ptr, 16 * i | r, c, 16 * i, 2)
        gl.store(to_ptr, rounded(gl.where(r >= c, own_q, 0.0)))
        P2 *= warps[3]
        others = (rounded(P0), rounded(P1), rounded(P2), zeros.to(gl.bfloat16))
        for b in gl.static_range(4):
            to_ptr = pointers_to_tile(products_ptr, 16 * i | r, c, 16 * b, 2)
            gl.store(to_ptr, others[b], mask=(i != b) & is_element)

        row_betas = of_rows(betas, BLOCKS)
        inverse = gl.allocate_shared_memory(gl.bfloat16, [C, C], SWIZZLED)
        rest = gl.allocate_shared_memory(gl.bfloat16, [C, C], SWIZZLED)
        T = invert(own_k * row_betas, A0, A1, A2, row_betas, warps, r, c)
        T *= betas.load(gl.SliceLayout(0, WIDE_LEFT))[None, :]
        store_rows(T, inverse, rest)
        fence_async_shared()
        gl.thread_barrier()
        # Rows and columns come in the order of the tensor core, in which a lane has 8
        # neighbours.
        W: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [2, 0], [0, 32]],
            [[0, 8], [0, 16], [1, 0], [8, 0], [16, 0]],
            [[4, 0], [32, 0]],
            [],
            [C, 64],
        )
        w_row = gl.arange(0, C, gl.SliceLayout(1, W))[:, None]
        w_column = gl.arange(0, 64, gl.SliceLayout(0, W))[None, :]
        u_row = gl.arange(0, 64, gl.SliceLayout(1, WIDE_TOKENS))[:, None]
        u_column = gl.arange(0, C, gl.SliceLayout(0, WIDE_TOKENS))[None, :]
        PRODUCTS: gl.constexpr = (K + V) // 64
        now = _start_product(inverse, rest, from_start, values, 0, K)
        after = _start_product(inverse, rest, from_start, values, 1, K)
        for n in gl.static_range(PRODUCTS):
            done = warpgroup_mma_wait(2 if n + 1 < PRODUCTS else 0, deps=[now])
            now = after
            if n + 2 < PRODUCTS:
                after = _start_product(inverse, rest, from_start, values, n + 2, K)
            done = to_mma_order(rounded(done))
            if n < K // 64:
                done = rows_to_mma_order(done)
                done = gl.convert_layout(done, W, assert_trivial=True)
                to_ptr = w_ptr + n * (C * C)
                gl.store(pointers_to_tile(to_ptr, w_row, w_column, 0, 8), done)
            else:
                done = gl.convert_layout(done, WIDE_TOKENS, assert_trivial=True)
                to_ptr = u_ptr + (n - K // 64) * (C * C)
                gl.store(pointers_to_tile(to_ptr, u_row, u_column, 0, 8), done)
