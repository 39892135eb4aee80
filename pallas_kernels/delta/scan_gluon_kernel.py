"""Gluon kernel of `pallas_kernels.delta.prefill` that takes states through chunks.

It does what `delta_scan_kernel` does, with what the chunk kernels in Gluon make. A
warpgroup has 64 value rows of a head in registers, as `[values, keys]`. A chunk is,
with u transposed,

    new = u - S w^T,   out = S q^T + new P^T,   S <- S 2^G_63 + new k

A sum lies in the registers as the left operand of the next product does, so S and
`new` never leave them. Right operands are tiles in shared memory, of three chunks. The
chain from S to S is `S w^T` and `new k`; the tensor cores have `S q^T` to do while
`new` is rounded, and `new P^T` while S is.

Tiles come as they lie in memory, by `pallas_kernels.bulk_copies`: copies that warps
make, 16 bytes a lane, hold up the products behind them. All warps wait for a chunk
once, before its products, and for each other once, while they run: then the chunk
before is done with everywhere, and its memory is to take the next but one.

To keep products running, and their sums whole, the assembler has to see:

* No sum that starts from a value. It would wait for each product before it lets the
  next one's registers be written. So S is multiplied and added to behind the product.
* No branch from the first product to the last wait, and all sums read before the next
  branch. Behind one it has forgotten what is still being written, and may read early.

`tests/test_delta_scan_program.py` looks for both.
"""

import typing

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    warpgroup_mma,
    warpgroup_mma_wait,
)

from pallas_kernels.bulk_copies import (
    copy,
    expect,
    prefetch,
    start_barriers,
    wait,
)
from pallas_kernels.delta.decode_parts import cast_pointer


@gluon.jit
@typing.no_type_check
def _ask_for_chunk(
    views,
    stage,
    arrays,
    tile,
    is_wanted,
    V: gl.constexpr,
    PLACES: gl.constexpr,
):
    """Starts the copies of a chunk of a head to a stage of the ring."""
    key_tiles, value_tiles, tiles, decays = views
    wqk_ptr, u_ptr, decay_ptr, products_ptr = arrays
    C: gl.constexpr = 64
    K: gl.constexpr = decays.shape[1]
    BLOCK_V: gl.constexpr = value_tiles.shape[1]
    FIRST_U: gl.constexpr = PLACES[0]
    FIRST_P: gl.constexpr = PLACES[1]
    FIRST_DECAY: gl.constexpr = PLACES[2]
    FIRST_BARRIER: gl.constexpr = PLACES[3]
    barrier = FIRST_BARRIER + stage
    tile = tile.to(gl.int64)
    expect(barrier, 2 * C * (3 * K + BLOCK_V + C) + 4 * K, is_wanted)
    at = wqk_ptr + tile * (3 * C * K)
    copy(key_tiles, 3 * stage, 3, at, barrier, is_wanted)
    at = u_ptr + tile * (C * V)
    copy(value_tiles, FIRST_U + stage, 1, at, barrier, is_wanted)
    at = products_ptr + tile * (C * C)
    copy(tiles, FIRST_P + stage, 1, at, barrier, is_wanted)
    at = decay_ptr + tile * K
    copy(decays, FIRST_DECAY + stage, 1, at, barrier, is_wanted)


@gluon.jit
@typing.no_type_check
def _prefetch_chunk(
    arrays,
    tile,
    is_wanted,
    K: gl.constexpr,
    V: gl.constexpr,
):
    """Asks for a chunk of a head in L2, for all its programs."""
    wqk_ptr, u_ptr, decay_ptr, products_ptr = arrays
    C: gl.constexpr = 64
    tile = tile.to(gl.int64)
    prefetch(wqk_ptr + tile * (3 * C * K), 6 * C * K, is_wanted)
    prefetch(u_ptr + tile * (C * V), 2 * C * V, is_wanted)
    prefetch(products_ptr + tile * (C * C), 2 * C * C, is_wanted)
    prefetch(decay_ptr + tile * K, 4 * K, is_wanted)


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
def _store_state(S, to_ptr, OF_S: gl.constexpr):
    value = gl.arange(0, S.shape[0], gl.SliceLayout(1, OF_S))[:, None]
    key = gl.arange(0, S.shape[1], gl.SliceLayout(0, OF_S))[None, :]
    # In this order, an address to all: the rest is constant.
    at = to_ptr + value * S.shape[1] + key
    gl.store(at, S.to(to_ptr.dtype.element_ty))


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
    OF_S: gl.constexpr,
):
    """Writes the state to the slots that want it after `done` chunks of the row."""
    for n in range(COUNT):
        slot = gl.load(slots_ptr + n).to(gl.int64)
        is_wanted = gl.load(chunks_ptr + n) == done
        if is_wanted & (slot >= 0) & (slot + offset <= LAST_ROW):
            _store_state(S, states_ptr + (slot + offset) * ROW, OF_S)


@gluon.jit
@typing.no_type_check
def delta_scan_gluon_kernel(
    wqk_ptr,
    u_ptr,
    decay_ptr,
    products_ptr,
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
    AHEAD: gl.constexpr,
):
    """See `pallas_kernels.delta.prefill`. K is 64 or 128, BLOCK_V 16 for each warp.

    L2 is asked for a chunk when the one `AHEAD` before it is copied; never if it is 0.
    """
    C: gl.constexpr = 64
    STAGES: gl.constexpr = 3
    # Shared memory in tiles of 64 x 64: w, q and k of all stages, u, P. Then decays,
    # and the barriers. What has two tiles begins at an even one.
    OF_KEYS: gl.constexpr = K // C
    OF_VALUES: gl.constexpr = BLOCK_V // C
    FIRST_U: gl.constexpr = -(-3 * STAGES * OF_KEYS // OF_VALUES)
    FIRST_P: gl.constexpr = (FIRST_U + STAGES) * OF_VALUES
    TILES: gl.constexpr = FIRST_P + STAGES
    KILOBYTES: gl.constexpr = 8 * TILES + 2
    FIRST_DECAY: gl.constexpr = 2048 * TILES // K
    FIRST_BARRIER: gl.constexpr = 1024 * TILES + STAGES * K // 2
    PLACES: gl.constexpr = (FIRST_U, FIRST_P, FIRST_DECAY, FIRST_BARRIER)
    BLOCKS: gl.constexpr = V // BLOCK_V
    ROW: gl.constexpr = 2 * ROW_WORDS if STATE_IS_BF16 else ROW_WORDS
    SUM: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, 64, 16]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    OF_S: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, K, 16]
    )
    LEFT_OF_S: gl.constexpr = gl.DotOperandLayout(0, OF_S, 2)
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
    arrays = (wqk_ptr, u_ptr, decay_ptr, products_ptr)
    checkpoint_slots_ptr += row * CHECKPOINTS
    checkpoint_chunks_ptr += row * CHECKPOINTS
    zeros = gl.zeros([BLOCK_V, C], gl.float32, SUM)
    of_s = gl.zeros([BLOCK_V, K], gl.float32, OF_S)

    if is_present & (is_first | (first < last)):
        ring = gl.allocate_shared_memory(gl.bfloat16, [KILOBYTES, 8, C], RIGHT)
        key_tiles = ring._reinterpret(gl.bfloat16, [TILES // OF_KEYS, C, K], RIGHT)
        value_tiles = ring._reinterpret(
            gl.bfloat16, [TILES // OF_VALUES, BLOCK_V, C], RIGHT
        )
        tiles = ring._reinterpret(gl.bfloat16, [TILES, C, C], RIGHT)
        decays = ring._reinterpret(gl.float32, [256 * KILOBYTES // K, K], LINE)
        views = (key_tiles, value_tiles, tiles, decays)
        start_barriers(FIRST_BARRIER, STAGES)
        for n in gl.static_range(STAGES - 1):
            _ask_for_chunk(
                views,
                n,
                arrays,
                (first + n - segment) * H + head,
                first + n < last,
                V,
                PLACES,
            )
        for later in range(STAGES - 1, STAGES - 1 + AHEAD):
            _prefetch_chunk(
                arrays,
                (first + later - segment) * H + head,
                (first + later < last) & (block == 0),
                K,
                V,
            )
        state_ptr = states_ptr + (slot + offset) * ROW
        value = gl.arange(0, BLOCK_V, gl.SliceLayout(1, OF_S))[:, None]
        key = gl.arange(0, K, gl.SliceLayout(0, OF_S))[None, :]
        S = gl.load(state_ptr + value * K + key, mask=is_fresh == 0, other=0.0)
        S = S.to(gl.float32)
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
                OF_S,
            )
        # Of the chunk before: its outputs, where they go and how many.
        out = _pairs(zeros)
        to_ptr = out_ptr
        size = 0
        stage = 0
        phase = 0
        for c in range(first, last):
            free = gl.where(stage == 0, STAGES - 1, stage - 1)
            is_wanted = c + STAGES - 1 < last
            next_tile = (c + STAGES - 1 - segment) * H + head
            wait(FIRST_BARRIER + stage, phase)
            rounded = gl.convert_layout(S.to(gl.bfloat16), LEFT, assert_trivial=True)
            w = key_tiles.index(3 * stage).permute((1, 0))
            seen = warpgroup_mma(rounded, w, zeros, use_acc=False, is_async=True)
            u = value_tiles.index(FIRST_U + stage).load(SUM)
            _store_out(_of_pairs(out, SUM), to_ptr, size, H * V)
            q = key_tiles.index(3 * stage + 1).permute((1, 0))
            sums = warpgroup_mma(rounded, q, zeros, use_acc=False, is_async=True)
            # All warps are through with the chunk before: its memory takes the next.
            gl.thread_barrier()
            _ask_for_chunk(views, free, arrays, next_tile, is_wanted, V, PLACES)
            if AHEAD > 0:
                _prefetch_chunk(
                    arrays,
                    next_tile + AHEAD * H,
                    (c + STAGES - 1 + AHEAD < last) & (block == 0),
                    K,
                    V,
                )
            seen = warpgroup_mma_wait(1, deps=[seen])
            new = (u.to(gl.float32) - seen).to(gl.bfloat16)
            left = gl.convert_layout(new, LEFT_OF_S, assert_trivial=True)
            k = key_tiles.index(3 * stage + 2)
            added = warpgroup_mma(left, k, of_s, use_acc=False, is_async=True)
            left = gl.convert_layout(new, LEFT, assert_trivial=True)
            products = tiles.index(FIRST_P + stage).permute((1, 0))
            sums = warpgroup_mma(left, products, sums, is_async=True)
            # The registers of the left operand of the past products are free again.
            warpgroup_mma_wait(2, deps=[rounded])
            to_ptr = out_ptr + gl.load(starts_ptr + c).to(gl.int64) * (H * V)
            size = gl.load(sizes_ptr + c)
            done = c - row_first + 1
            is_checkpoint = done < 0
            for n in gl.static_range(CHECKPOINTS):
                is_checkpoint |= gl.load(checkpoint_chunks_ptr + n) == done
            decay = decays.index(FIRST_DECAY + stage).load(gl.SliceLayout(0, OF_S))
            added = warpgroup_mma_wait(1, deps=[added])
            S = S * decay[None, :] + added
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
                    OF_S,
                )
            phase = gl.where(stage == STAGES - 1, 1 - phase, phase)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        _store_out(_of_pairs(out, SUM), to_ptr, size, H * V)
        _store_state(S, state_ptr, OF_S)
    elif is_present == 0:
        for c in range(first, last):
            to_ptr = out_ptr + gl.load(starts_ptr + c).to(gl.int64) * (H * V)
            nothing = zeros.to(out_ptr.dtype.element_ty)
            _store_out(nothing, to_ptr, gl.load(sizes_ptr + c), H * V)
