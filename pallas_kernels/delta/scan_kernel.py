"""Triton kernel of `pallas_kernels.delta.prefill` that takes states through chunks.

One program takes a block of value rows of one head of one row of the batch through
those of the row's chunks that lie in the segment, one after the other, with its part
of the state in registers:

    v' = u - w S,   o = (q 2^G) S + P v',   S <- 2^G_63 S + (k 2^(G_63 - G))^T v'

It reads the state from the row's slot, writes checkpoints where a chunk ends that one
is wanted after, and writes the state back. The last row, of the tokens that belong to
none, and rows without a slot have no state: their outputs are 0.
"""

import typing

import triton
import triton.language as tl


@triton.jit
@typing.no_type_check
def _store_checkpoints(
    states_ptr,
    state_at,
    S,
    chunks_ptr,
    slots_ptr,
    row,
    done,
    offset,
    COUNT: tl.constexpr,
    ROW: tl.constexpr,
    LAST_ROW: tl.constexpr,
):
    """Writes the state to the slots that want it after `done` chunks of the row."""
    for n in tl.static_range(COUNT):
        slot = tl.load(slots_ptr + row * COUNT + n)
        is_wanted = tl.load(chunks_ptr + row * COUNT + n) == done
        if is_wanted & (slot >= 0) & (slot.to(tl.int64) + offset <= LAST_ROW):
            to_ptr = states_ptr + (slot.to(tl.int64) + offset) * ROW
            tl.store(to_ptr + state_at, S.to(states_ptr.dtype.element_ty))


@triton.jit
@typing.no_type_check
def delta_scan_kernel(
    wq_ptr,
    u_ptr,
    decayed_k_ptr,
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
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SEGMENT: tl.constexpr,
    CHECKPOINTS: tl.constexpr,
    STATE_IS_BF16: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    LAST_ROW: tl.constexpr,
    STAGES: tl.constexpr,
):
    """See `pallas_kernels.delta.prefill`."""
    C: tl.constexpr = 64
    BLOCKS: tl.constexpr = V // BLOCK_V
    block = tl.program_id(0) % BLOCKS
    head = tl.program_id(0) // BLOCKS % H
    row = tl.program_id(0) // (BLOCKS * H)
    segment = tl.load(segment_ptr)
    row_first = tl.load(first_chunks_ptr + row)
    row_last = row_first + tl.load(num_chunks_ptr + row)
    first = tl.maximum(row_first, segment)
    last = tl.minimum(row_last, segment + SEGMENT)
    slot = tl.load(slots_ptr + row)
    offset = tl.load(offset_ptr)
    # The first segment also takes the rows that have no chunk at all.
    is_first = (first == row_first) & ((first < last) | (segment == 0))
    is_fresh = is_first & (tl.load(is_fresh_ptr + row) != 0)
    token = tl.arange(0, C)
    key = tl.arange(0, K)
    value = block * BLOCK_V + tl.arange(0, BLOCK_V)
    state_at = (head * V + value)[:, None] * K + key[None, :]
    if STATE_IS_BF16:
        states_ptr = pool_ptr.to(tl.pointer_type(tl.bfloat16))
        ROW: tl.constexpr = 2 * ROW_WORDS
    else:
        states_ptr = pool_ptr.to(tl.pointer_type(tl.float32))
        ROW: tl.constexpr = ROW_WORDS
    key_at = token[:, None] * K + key[None, :]
    value_at = value[:, None] * C + token[None, :]
    token_at = token[:, None] * C + token[None, :]
    out_at = token[:, None] * (H * V) + head * V + value[None, :]
    is_present = (slot >= 0) & (slot.to(tl.int64) + offset <= LAST_ROW)
    if is_present & (is_first | (first < last)):
        state_ptr = states_ptr + (slot.to(tl.int64) + offset) * ROW
        S = tl.load(state_ptr + state_at, mask=is_fresh == 0, other=0.0)
        S = S.to(tl.float32)
        if is_first:
            _store_checkpoints(
                states_ptr,
                state_at,
                S,
                checkpoint_chunks_ptr,
                checkpoint_slots_ptr,
                row,
                0,
                offset,
                CHECKPOINTS,
                ROW,
                LAST_ROW,
            )
        for c in tl.range(first, last, num_stages=STAGES):
            tile = ((c - segment) * H + head).to(tl.int64)
            w = tl.load(wq_ptr + tile * (2 * C * K) + key_at)
            q = tl.load(wq_ptr + tile * (2 * C * K) + C * K + key_at)
            u = tl.load(u_ptr + tile * (C * V) + value_at)
            k = tl.load(decayed_k_ptr + tile * (C * K) + key_at)
            decay = tl.load(decay_ptr + tile * K + key)
            products = tl.load(products_ptr + tile * (C * C) + token_at)
            rounded = S.to(tl.bfloat16)
            new = u.to(tl.float32) - tl.dot(rounded, tl.trans(w))
            new = new.to(tl.bfloat16)
            out = tl.dot(rounded, tl.trans(q))
            S = tl.dot(new, k, S * decay[None, :])
            out = tl.dot(new, tl.trans(products), out)
            start = tl.load(starts_ptr + c).to(tl.int64)
            is_token = token < tl.load(sizes_ptr + c)
            tl.store(
                out_ptr + start * (H * V) + out_at,
                tl.trans(out.to(out_ptr.dtype.element_ty)),
                mask=is_token[:, None],
            )
            _store_checkpoints(
                states_ptr,
                state_at,
                S,
                checkpoint_chunks_ptr,
                checkpoint_slots_ptr,
                row,
                c - row_first + 1,
                offset,
                CHECKPOINTS,
                ROW,
                LAST_ROW,
            )
        tl.store(state_ptr + state_at, S.to(states_ptr.dtype.element_ty))
    elif is_present == 0:
        zeros = tl.zeros((C, BLOCK_V), out_ptr.dtype.element_ty)
        for c in range(first, last):
            start = tl.load(starts_ptr + c).to(tl.int64)
            is_token = token < tl.load(sizes_ptr + c)
            tl.store(out_ptr + start * (H * V) + out_at, zeros, mask=is_token[:, None])
