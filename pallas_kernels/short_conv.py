"""Short convolution of packed rows on windows in the pool (Triton).

    y[t, c] = act(bias[c] + sum_j weight[c, j] u[t + j, c])

with `u` a row's window, the last inputs before this step, followed by its inputs. Rows
are cut into chunks of 64 tokens, and a program has a chunk of some channels. That of a
row's first chunk reads the old window and, once it has, writes the new one and those
of the checkpoints, so nobody else touches a window. Rows without tokens have programs
of their own behind the chunks.

Letters in the kernel: C tokens of a chunk, W taps. Importing this module imports
Triton.
"""

import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from jaxtyping import Array, Bool, Float, Int32, UInt32

from pallas_kernels.delta_decode_parts import cast_pointer
from pallas_kernels.part_place import PartPlace
from pallas_kernels.row_chunks import Checkpoints, cut_into_chunks
from pallas_kernels.triton_launch import launch


@triton.jit
@typing.no_type_check
def _store_window(
    to_ptr,
    from_ptr,
    x_row,
    channel,
    done,
    mask,
    has_past,
    CHANNELS: tl.constexpr,
    W: tl.constexpr,
):
    """Writes the window after `done` tokens of a row, that before them in `from_ptr`.

    The two may be one: a value is stored after the last that is loaded from there.
    """
    for m in tl.static_range(W - 1):
        place = done - (W - 1) + m
        x = tl.load(x_row + place.to(tl.int64) * CHANNELS, mask & (place >= 0), 0.0)
        at = (W - 1 + place) * CHANNELS + channel
        old = tl.load(from_ptr + at, mask & has_past & (place < 0), 0.0)
        window = tl.where(place < 0, old.to(tl.float32), x.to(tl.float32))
        window = window.to(to_ptr.dtype.element_ty)
        tl.store(to_ptr + m * CHANNELS + channel, window, mask)


@triton.jit
@typing.no_type_check
def _short_conv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    starts_ptr,
    sizes_ptr,
    rows_ptr,
    cu_query_lens_ptr,
    slots_ptr,
    is_fresh_ptr,
    checkpoint_slots_ptr,
    checkpoint_lens_ptr,
    window_row_ptr,
    _pool_in_ptr,
    pool_ptr,
    first_ptr,
    second_ptr,
    third_ptr,
    W: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    END1: tl.constexpr,
    END2: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHECKPOINTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SILU: tl.constexpr,
    WINDOW_DTYPE: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    LAST_ROW: tl.constexpr,
):
    """The first END1 channels of a result go to one output, up to END2 to the next."""
    C: tl.constexpr = 64
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    chunk = tl.program_id(0) // BLOCKS
    first_channel = tl.program_id(0) % BLOCKS * BLOCK
    channel = first_channel + tl.arange(0, BLOCK)
    is_channel = channel < CHANNELS
    if chunk < CHUNKS:
        row = tl.load(rows_ptr + chunk)
        size = tl.load(sizes_ptr + chunk)
    else:
        row = chunk - CHUNKS
        size = 0
    row_start = tl.load(cu_query_lens_ptr + row)
    row_len = tl.load(cu_query_lens_ptr + row + 1) - row_start
    slot = tl.load(slots_ptr + row).to(tl.int64)
    window_row = tl.load(window_row_ptr)
    # An absent slot may be any number: nothing behind it is read or written.
    is_present = (slot >= 0) & (slot + window_row <= LAST_ROW)
    has_past = is_present & (tl.load(is_fresh_ptr + row) == 0)
    window_ptr = cast_pointer(pool_ptr + (slot + window_row) * ROW_WORDS, WINDOW_DTYPE)
    is_first = (chunk >= CHUNKS) & (row_len == 0)
    if size > 0:
        start = tl.load(starts_ptr + chunk)
        done = start - row_start
        is_first = done == 0
        token = tl.arange(0, C)
        is_token = (token < size)[:, None] & is_channel[None, :]
        x_at = (start.to(tl.int64) + token)[:, None] * CHANNELS + channel[None, :]
        y = tl.zeros((C, BLOCK), tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + channel, is_channel, 0.0).to(tl.float32)
            y += bias[None, :]
        for j in tl.static_range(W):
            back = W - 1 - j
            weight = tl.load(weight_ptr + channel * W + j, is_channel, 0.0)
            weight = weight.to(tl.float32)[None, :]
            is_here = is_token & (done + token >= back)[:, None] & is_present
            u = tl.load(x_ptr + x_at - back * CHANNELS, is_here, 0.0)
            y += weight * u.to(tl.float32)
            if is_first & (back > 0):
                at = (token + j)[:, None] * CHANNELS + channel[None, :]
                is_old = is_token & (token < back)[:, None] & has_past
                old = tl.load(window_ptr + at, is_old, 0.0)
                y += weight * old.to(tl.float32)
        if IS_SILU:
            y = y / (1.0 + tl.exp(-y))
        y = tl.where(is_present, y, 0.0).to(first_ptr.dtype.element_ty)
        to = start.to(tl.int64) + token
        if first_channel < END1:
            tl.store(first_ptr + to[:, None] * END1 + channel[None, :], y, is_token)
        elif first_channel < END2:
            at = to[:, None] * (END2 - END1) + (channel - END1)[None, :]
            tl.store(second_ptr + at, y, is_token)
        else:
            at = to[:, None] * (CHANNELS - END2) + (channel - END2)[None, :]
            tl.store(third_ptr + at, y, is_token)
    if is_first & is_present:
        x_row = x_ptr + row_start.to(tl.int64) * CHANNELS + channel
        for n in tl.static_range(CHECKPOINTS):
            at = row * CHECKPOINTS + n
            wanted = tl.load(checkpoint_lens_ptr + at)
            to_slot = tl.load(checkpoint_slots_ptr + at).to(tl.int64)
            is_wanted = (wanted >= 0) & (wanted <= row_len) & (wanted % C == 0)
            is_wanted &= (to_slot >= 0) & (to_slot + window_row <= LAST_ROW)
            to_ptr = pool_ptr + (to_slot + window_row) * ROW_WORDS
            _store_window(
                cast_pointer(to_ptr, WINDOW_DTYPE),
                window_ptr,
                x_row,
                channel,
                wanted,
                is_channel & is_wanted,
                has_past,
                CHANNELS,
                W,
            )
        # All of the block have read the old window.
        tl.debug_barrier()
        _store_window(
            window_ptr,
            window_ptr,
            x_row,
            channel,
            row_len,
            is_channel,
            has_past,
            CHANNELS,
            W,
        )


def short_conv_prefill(
    buffer: UInt32[Array, "pool_rows words"],
    x: Float[Array, "tokens channels"],
    weight: Float[Array, "channels taps"],
    bias: Float[Array, " channels"] | None,
    cu_query_lens: Int32[Array, " bounds"],
    slots: Int32[Array, " rows"],
    is_fresh: Bool[Array, " rows"],
    checkpoints: Checkpoints | None,
    *,
    window: PartPlace,
    is_silu: bool = True,
    widths: tuple[int, ...] | None = None,
) -> tuple[UInt32[Array, "pool_rows words"], list[Float[Array, "tokens width"]]]:
    """Convolves packed rows and moves their windows on, in place.

    Args:
        buffer: the whole pool.
        x: raw inputs, the rows one after the other.
        weight: taps, the last for the current token.
        bias: of each channel, or None.
        cu_query_lens: exclusive prefix sum of the rows' lengths.
        slots: first row of each slot. One that does not lie in the pool is absent: its
            row reads and writes nothing and its outputs are 0.
        is_fresh: whether a row starts from zeros, whatever its slot holds.
        checkpoints: slots that get a window from inside a row, absent ones for none,
            and after how many tokens of the row: a multiple of 64 up to its length. At
            any other number nothing is written.
        window: where the windows lie, `[taps - 1, channels]`.
        is_silu: whether the result goes through SiLU.
        widths: channels of up to three outputs; None for one of all channels.

    Returns:
        The pool, and the outputs in the dtype of `x`; 0 for tokens of no row.

    Raises:
        ValueError: the widths do not add up, or have no common divisor that is a power
            of two of at least 16.
    """
    num_tokens, channels = x.shape
    num_rows = slots.shape[0]
    widths = (channels,) if widths is None else widths
    if sum(widths) != channels or not 1 <= len(widths) <= 3:
        raise ValueError(f"{widths=} must be up to 3 that add up to {channels}")
    block = 64
    if len(widths) > 1:
        shared = math.gcd(*widths)
        block = min(block, shared & -shared)
        if block < 16:
            raise ValueError(f"{widths=} must be multiples of 16")
    starts, sizes, rows, _, _ = cut_into_chunks(cu_query_lens, num_tokens)
    absent = np.full((1,), -1, np.int32)
    # The last row is that of the tokens of no row.
    bounds = jnp.concatenate([cu_query_lens, np.asarray([num_tokens], np.int32)])
    num_checkpoints, to_slots, lens = 0, absent, absent
    if checkpoints is not None:
        to_slots, lens = (array.reshape(-1) for array in checkpoints)
        num_checkpoints = checkpoints[1].shape[1]
    none = (channels, channels)
    ends = (*np.cumsum(widths)[:2].tolist(), *none)[:2]
    shapes = [(num_tokens, width) for width in widths] + [(4,)] * (3 - len(widths))
    buffer, *outputs = launch(
        _short_conv_kernel,
        x,
        weight,
        weight if bias is None else bias,
        starts,
        sizes,
        rows,
        bounds,
        jnp.concatenate([slots, absent]),
        jnp.concatenate([is_fresh, np.zeros((1,), np.bool_)]),
        to_slots,
        lens,
        np.asarray([window.row], np.int32),
        buffer,
        outputs=[
            jax.ShapeDtypeStruct(buffer.shape, buffer.dtype),
            *(jax.ShapeDtypeStruct(shape, x.dtype) for shape in shapes),
        ],
        aliases={12: 0},
        grid=((starts.shape[0] + num_rows) * -(-channels // block),),
        num_warps=4,
        W=weight.shape[1],
        CHANNELS=channels,
        BLOCK=block,
        END1=ends[0],
        END2=ends[1],
        CHUNKS=starts.shape[0],
        CHECKPOINTS=num_checkpoints,
        HAS_BIAS=bias is not None,
        IS_SILU=is_silu,
        WINDOW_DTYPE=window.dtype,
        ROW_WORDS=window.row_words,
        LAST_ROW=window.last_row,
    )
    return buffer, outputs[: len(widths)]
