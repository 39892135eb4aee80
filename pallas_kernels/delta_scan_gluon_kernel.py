"""Gluon kernel of `pallas_kernels.delta_prefill` that takes states through chunks.

It does what `delta_scan_kernel` does, with the same parameters. A warpgroup has 64
value rows of a head in registers, as `[values, keys]`. A chunk is, with u transposed,

    new = u - S w^T,   out = S q^T + new P^T,   S <- S 2^G_63 + new k

A sum lies in the registers as the left operand of the next product does, so S and
`new` never leave them. Right operands are tiles in shared memory, three of each. The
chain from S to S is `S w^T` and `new k`; the tensor cores have `S q^T` to do while
`new` is rounded, and `new P^T` while S is.

Warps wait for each other twice in a chunk, both times while products run. The tiles
come in two groups, each asked for one and a half chunks ahead:

    first barrier:   q, k and P are there; w, u and decays are asked for
    second barrier:  w, u and decays are there; q, k and P are asked for

So a group is read in the half of the chunk in which the other is asked for: Triton,
which does not tell the tiles of an array apart, sees a barrier between, and adds none.

To keep products running, and their sums whole, the assembler has to see:

* No sum that starts from a value. It would wait for each product before it lets the
  next one's registers be written. So S is multiplied and added to behind the product,
  64 keys at a time.
* No branch from the first product to the last wait, and all sums read before the next
  branch. Behind one it has forgotten what is still being written, and may read early.

`tests/test_delta_scan_program.py` looks for both.
"""

import typing

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from pallas_kernels.delta_decode_parts import cast_pointer


@gluon.jit
@typing.no_type_check
def _copy(tile, from_ptr, is_wanted):
    """Starts the copy of rows that lie one behind the other, 16 bytes to a lane."""
    COLUMNS: gl.constexpr = tile.shape[1]
    LANES: gl.constexpr = COLUMNS // 8
    COPY: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0]
    )
    row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, COPY))[:, None]
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, COPY))[None, :]
    async_copy.async_copy_global_to_shared(
        tile, from_ptr + (row * COLUMNS + column), mask=is_wanted
    )


@gluon.jit
@typing.no_type_check
def _copy_for_new(
    w_tile, u_tile, decays, wq_ptr, u_ptr, decay_ptr, tile, is_wanted, V: gl.constexpr
):
    """Starts the copies of w, u and the decays of a chunk of a head."""
    C: gl.constexpr = w_tile.shape[0]
    K: gl.constexpr = w_tile.shape[1]
    _copy(w_tile, wq_ptr + tile * (2 * C * K), is_wanted)
    _copy(u_tile, u_ptr + tile * (C * V), is_wanted)
    # Repeated until each thread has one to copy: the others would branch.
    COPY: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    key = gl.arange(0, decays.shape[0], COPY) % K
    async_copy.async_copy_global_to_shared(
        decays, decay_ptr + tile * K + key, mask=is_wanted
    )
    async_copy.commit_group()


@gluon.jit
@typing.no_type_check
def _copy_for_sums(
    q_tile, k_tile, p_tile, wq_ptr, decayed_k_ptr, products_ptr, tile, is_wanted
):
    """Starts the copies of q, k and P of a chunk of a head."""
    C: gl.constexpr = q_tile.shape[0]
    K: gl.constexpr = q_tile.shape[1]
    _copy(q_tile, wq_ptr + tile * (2 * C * K) + C * K, is_wanted)
    _copy(k_tile, decayed_k_ptr + tile * (C * K), is_wanted)
    _copy(p_tile, products_ptr + tile * (C * C), is_wanted)
    async_copy.commit_group()


@gluon.jit
@typing.no_type_check
def _store_out(out, to_ptr, size, STRIDE: gl.constexpr):
    """Stores `[values, tokens]` as rows of tokens. It turns around inside of warps."""
    V: gl.constexpr = out.shape[0]
    C: gl.constexpr = out.shape[1]
    OUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [16, 0], [32, 0]],
        [[0, 8], [1, 0], [2, 0], [4, 0], [8, 0]],
        [[0, 16], [0, 32]] if V == 64 else [[0, 16], [0, 32], [0, 64]],
        [],
        [C, V],
    )
    token = gl.arange(0, C, gl.SliceLayout(1, OUT))[:, None]
    value = gl.arange(0, V, gl.SliceLayout(0, OUT))[None, :]
    out = gl.convert_layout(gl.permute(out, (1, 0)), OUT)
    gl.store(to_ptr + token * STRIDE + value, out, mask=token < size)


@gluon.jit
@typing.no_type_check
def _pairs(x):
    """Rounds to bfloat16, two neighbours to a word: apart they take twice as many."""
    low, high = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;",
        "=r,f,f",
        [low, high],
        dtype=gl.uint32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
@typing.no_type_check
def _of_pairs(x, SUM: gl.constexpr):
    """The bfloat16 numbers that `_pairs` has put into words."""
    low = (x & 0xFFFF).to(gl.uint16).to(gl.bfloat16, bitcast=True)
    high = (x >> 16).to(gl.uint16).to(gl.bfloat16, bitcast=True)
    x = gl.reshape(gl.join(low, high), [x.shape[0], 2 * x.shape[1]])
    return gl.convert_layout(x, SUM, assert_trivial=True)


@gluon.jit
@typing.no_type_check
def _store_state(S, to_ptr, SUM: gl.constexpr):
    PARTS: gl.constexpr = len(S)
    PART: gl.constexpr = S[0].shape[1]
    value = gl.arange(0, S[0].shape[0], gl.SliceLayout(1, SUM))[:, None]
    key = gl.arange(0, PART, gl.SliceLayout(0, SUM))[None, :]
    for p in gl.static_range(PARTS):
        # In this order, an address to all: the rest is constant.
        at = to_ptr + p * PART + value * (PARTS * PART) + key
        gl.store(at, S[p].to(to_ptr.dtype.element_ty))


@gluon.jit
@typing.no_type_check
def _store_checkpoints(
    S,
    states_ptr,
    chunks_ptr,
    slots_ptr,
    done,
    offset,
    COUNT: gl.constexpr,
    ROW: gl.constexpr,
    LAST_ROW: gl.constexpr,
    SUM: gl.constexpr,
):
    """Writes the state to the slots that want it after `done` chunks of the row."""
    for n in range(COUNT):
        slot = gl.load(slots_ptr + n).to(gl.int64)
        is_wanted = gl.load(chunks_ptr + n) == done
        if is_wanted & (slot >= 0) & (slot + offset <= LAST_ROW):
            _store_state(S, states_ptr + (slot + offset) * ROW, SUM)


@gluon.jit
@typing.no_type_check
def delta_scan_gluon_kernel(
    wq_ptr,
    u_ptr,
    decayed_k_ptr,
    products_ptr,
    decay_ptr,
    starts_ptr,
    sizes_ptr,
    segment_ptr,
    first_chunks_ptr,
    num_chunks_ptr,
    slots_ptr,
    is_fresh_ptr,
    checkpoint_slots_ptr,
    checkpoint_chunks_ptr,
    offset_ptr,
    _pool_in_ptr,
    _out_in_ptr,
    pool_ptr,
    out_ptr,
    H: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BLOCK_V: gl.constexpr,
    SEGMENT: gl.constexpr,
    CHECKPOINTS: gl.constexpr,
    STATE_IS_BF16: gl.constexpr,
    ROW_WORDS: gl.constexpr,
    LAST_ROW: gl.constexpr,
):
    """See `pallas_kernels.delta_prefill`. K is 64 or 128, BLOCK_V 16 for each warp."""
    C: gl.constexpr = 64
    PART: gl.constexpr = 64
    PARTS: gl.constexpr = K // PART
    STAGES: gl.constexpr = 3
    BLOCKS: gl.constexpr = V // BLOCK_V
    ROW: gl.constexpr = 2 * ROW_WORDS if STATE_IS_BF16 else ROW_WORDS
    SUM: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, 64, 16]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    RIGHT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    item = gl.program_id(0)
    block = item % BLOCKS
    head = item // BLOCKS % H
    row = item // (BLOCKS * H)

    segment = gl.load(segment_ptr)
    row_first = gl.load(first_chunks_ptr + row)
    row_last = row_first + gl.load(num_chunks_ptr + row)
    slot = gl.load(slots_ptr + row).to(gl.int64)
    is_fresh = gl.load(is_fresh_ptr + row) != 0
    offset = gl.load(offset_ptr)
    first = gl.maximum(row_first, segment)
    last = gl.minimum(row_last, segment + SEGMENT)
    # The first segment also takes the rows that have no chunk at all.
    is_first = (first == row_first) & ((first < last) | (segment == 0))
    is_fresh &= is_first
    is_present = (slot >= 0) & (slot + offset <= LAST_ROW)
    first_value = head * V + block * BLOCK_V
    states_ptr = cast_pointer(pool_ptr, "bfloat16" if STATE_IS_BF16 else "float32")
    states_ptr += first_value * K
    out_ptr += first_value
    u_ptr += block * BLOCK_V * C
    checkpoint_slots_ptr += row * CHECKPOINTS
    checkpoint_chunks_ptr += row * CHECKPOINTS
    zeros = gl.zeros([BLOCK_V, C], gl.float32, SUM)

    if is_present & (is_first | (first < last)):
        w_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], RIGHT)
        u_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_V, C], RIGHT)
        decays = gl.allocate_shared_memory(
            gl.float32, [STAGES, max(K, 32 * gl.num_warps())], LINE
        )
        q_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], RIGHT)
        k_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], RIGHT)
        p_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], RIGHT)
        for n in gl.static_range(STAGES - 1):
            tile = ((first + n - segment) * H + head).to(gl.int64)
            _copy_for_new(
                w_tiles.index(n),
                u_tiles.index(n),
                decays.index(n),
                wq_ptr,
                u_ptr,
                decay_ptr,
                tile,
                first + n < last,
                V,
            )
            _copy_for_sums(
                q_tiles.index(n),
                k_tiles.index(n),
                p_tiles.index(n),
                wq_ptr,
                decayed_k_ptr,
                products_ptr,
                tile,
                first + n < last,
            )
        state_ptr = states_ptr + (slot + offset) * ROW
        value = gl.arange(0, BLOCK_V, gl.SliceLayout(1, SUM))[:, None]
        key = gl.arange(0, PART, gl.SliceLayout(0, SUM))[None, :]
        S = ()
        for p in gl.static_range(PARTS):
            at = state_ptr + p * PART + value * K + key
            loaded = gl.load(at, mask=is_fresh == 0, other=0.0)
            S += (loaded.to(gl.float32),)
        if is_first:
            _store_checkpoints(
                S,
                states_ptr,
                checkpoint_chunks_ptr,
                checkpoint_slots_ptr,
                0,
                offset,
                CHECKPOINTS,
                ROW,
                LAST_ROW,
                SUM,
            )
        async_copy.wait_group(2 * STAGES - 3)
        fence_async_shared()
        # Of the chunk before: its outputs, where they go and how many.
        out = _pairs(zeros)
        to_ptr = out_ptr
        size = 0
        stage = 0
        for c in range(first, last):
            free = gl.where(stage == 0, STAGES - 1, stage - 1)
            is_wanted = c + STAGES - 1 < last
            tile = ((c + STAGES - 1 - segment) * H + head).to(gl.int64)
            rounded = ()
            for p in gl.static_range(PARTS):
                part = S[p].to(gl.bfloat16)
                rounded += (gl.convert_layout(part, LEFT, assert_trivial=True),)
            seen = warpgroup_mma_init(zeros)
            for p in gl.static_range(PARTS):
                w = w_tiles.index(stage).slice(p * PART, PART, 1).permute((1, 0))
                seen = warpgroup_mma(rounded[p], w, seen, use_acc=p > 0, is_async=True)
            u = u_tiles.index(stage).load(SUM)
            _store_out(_of_pairs(out, SUM), to_ptr, size, H * V)
            async_copy.wait_group(2 * STAGES - 4)
            fence_async_shared()
            _copy_for_new(
                w_tiles.index(free),
                u_tiles.index(free),
                decays.index(free),
                wq_ptr,
                u_ptr,
                decay_ptr,
                tile,
                is_wanted,
                V,
            )
            sums = warpgroup_mma_init(zeros)
            for p in gl.static_range(PARTS):
                q = q_tiles.index(stage).slice(p * PART, PART, 1).permute((1, 0))
                sums = warpgroup_mma(rounded[p], q, sums, use_acc=p > 0, is_async=True)
            seen = warpgroup_mma_wait(PARTS, deps=[seen])
            new = (u.to(gl.float32) - seen).to(gl.bfloat16)
            new = gl.convert_layout(new, LEFT, assert_trivial=True)
            added = ()
            for p in gl.static_range(PARTS):
                k = k_tiles.index(stage).slice(p * PART, PART, 1)
                added += (warpgroup_mma(new, k, zeros, use_acc=False, is_async=True),)
            products = p_tiles.index(stage).permute((1, 0))
            sums = warpgroup_mma(new, products, sums, is_async=True)
            async_copy.wait_group(2 * STAGES - 4)
            fence_async_shared()
            # The registers of the left operand of the past products are free again.
            warpgroup_mma_wait(PARTS + 1, deps=rounded)
            _copy_for_sums(
                q_tiles.index(free),
                k_tiles.index(free),
                p_tiles.index(free),
                wq_ptr,
                decayed_k_ptr,
                products_ptr,
                tile,
                is_wanted,
            )
            to_ptr = out_ptr + gl.load(starts_ptr + c).to(gl.int64) * (H * V)
            size = gl.load(sizes_ptr + c)
            done = c - row_first + 1
            is_checkpoint = done < 0
            for n in gl.static_range(CHECKPOINTS):
                is_checkpoint |= gl.load(checkpoint_chunks_ptr + n) == done
            before = S
            S = ()
            for p in gl.static_range(PARTS):
                of_part = warpgroup_mma_wait(PARTS - p, deps=[added[p]])
                line = decays.index(stage).slice(p * PART, PART)
                decay = line.load(gl.SliceLayout(0, SUM))
                S += (before[p] * decay[None, :] + of_part,)
            out = _pairs(warpgroup_mma_wait(0, deps=[sums]))
            if is_checkpoint:
                _store_checkpoints(
                    S,
                    states_ptr,
                    checkpoint_chunks_ptr,
                    checkpoint_slots_ptr,
                    done,
                    offset,
                    CHECKPOINTS,
                    ROW,
                    LAST_ROW,
                    SUM,
                )
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        # The last copies bring zeros only, but to memory that from here on is that in
        # which the outputs turn around.
        async_copy.wait_group(0)
        _store_out(_of_pairs(out, SUM), to_ptr, size, H * V)
        _store_state(S, state_ptr, SUM)
    elif is_present == 0:
        for c in range(first, last):
            to_ptr = out_ptr + gl.load(starts_ptr + c).to(gl.int64) * (H * V)
            nothing = zeros.to(out_ptr.dtype.element_ty)
            _store_out(nothing, to_ptr, gl.load(sizes_ptr + c), H * V)
