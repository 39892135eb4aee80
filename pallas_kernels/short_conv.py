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

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from jaxtyping import Array, Bool, Float, Int32, UInt32

from pallas_kernels.part_place import PartPlace
from pallas_kernels.row_chunks import Checkpoints, cut_into_chunks
from pallas_kernels.triton_launch import launch
from pallas_kernels.triton_pointers import cast_pointer

MAX_TAPS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortConvConfig:
    """Tuning of the convolution.

    Attributes:
        block: channels of a program, a power of two.
        num_warps: warps of a program.
        unroll: tokens that a program loads at a time; it divides 64.
    """

    block: int = 128
    num_warps: int = 1
    unroll: int = 16

    def __post_init__(self):
        """Checks the ranges."""
        for name in ("block", "num_warps", "unroll"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two")


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
def _load_tap(weight_ptr, channel, mask, tap: tl.constexpr, W: tl.constexpr):
    """One of four taps; the first are 0 if there are fewer."""
    skipped: tl.constexpr = 4 - W
    at = channel * W + (tap - skipped)
    return tl.load(weight_ptr + at, mask & (tap >= skipped), 0.0).to(tl.float32)


@triton.jit
@typing.no_type_check
def _load_past(
    window_ptr,
    from_ptr,
    channel,
    is_old,
    is_new,
    back: tl.constexpr,
    CHANNELS: tl.constexpr,
    W: tl.constexpr,
):
    """The input so many tokens before the chunk: of the window, or of the row."""
    old_ptr = window_ptr + (W - 1 - back) * CHANNELS + channel
    old = tl.load(old_ptr, is_old & (back < W), 0.0)
    new = tl.load(from_ptr - back * CHANNELS, is_new & (back < W), 0.0)
    return tl.where(is_new, new.to(tl.float32), old.to(tl.float32))


@triton.jit
@typing.no_type_check
def _silu(x):
    """X / (1 + e^-x), with the reciprocal of the hardware."""
    return x * tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;",
        "=f,f",
        [1.0 + tl.exp2(x * -1.4426950408889634)],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


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
    UNROLL: tl.constexpr,
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
    """A thread walks down the chunk with a few channels of its own.

    The first END1 channels of a result go to one output, up to END2 to the next. A
    convolution of fewer than 4 taps is one of 4 whose first are 0.
    """
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
        is_first = start == row_start
        # So that the output's pointer and row are chosen once.
        if first_channel < END1:
            out_ptr = first_ptr + channel
            width = END1
        elif first_channel < END2:
            out_ptr = second_ptr + channel - END1
            width = END2 - END1
        else:
            out_ptr = third_ptr + channel - END2
            width = CHANNELS - END2
        out_ptr += start.to(tl.int64) * width
        from_ptr = x_ptr + start.to(tl.int64) * CHANNELS + channel
        is_here = is_channel & is_present
        bias = tl.zeros((BLOCK,), tl.float32)
        if HAS_BIAS:
            bias += tl.load(bias_ptr + channel, is_channel, 0.0).to(tl.float32)
        w0 = _load_tap(weight_ptr, channel, is_channel, 0, W)
        w1 = _load_tap(weight_ptr, channel, is_channel, 1, W)
        w2 = _load_tap(weight_ptr, channel, is_channel, 2, W)
        w3 = _load_tap(weight_ptr, channel, is_channel, 3, W)
        is_old = is_channel & has_past & is_first
        is_new = is_here & (is_first == 0)
        u0 = _load_past(window_ptr, from_ptr, channel, is_old, is_new, 3, CHANNELS, W)
        u1 = _load_past(window_ptr, from_ptr, channel, is_old, is_new, 2, CHANNELS, W)
        u2 = _load_past(window_ptr, from_ptr, channel, is_old, is_new, 1, CHANNELS, W)
        for t0 in tl.range(0, C, UNROLL):
            for dt in tl.static_range(UNROLL):
                t = t0 + dt
                # The second term keeps the mask a vector, and the access wide.
                is_token = (t < size) & is_channel
                u3 = tl.load(from_ptr + t * CHANNELS, is_token & is_present, 0.0)
                u3 = u3.to(tl.float32)
                y = bias + w0 * u0 + w1 * u1 + w2 * u2 + w3 * u3
                if IS_SILU:
                    y = _silu(y)
                y = tl.where(is_present, y, 0.0).to(first_ptr.dtype.element_ty)
                tl.store(out_ptr + t * width, y, is_token)
                u0, u1, u2 = u1, u2, u3
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
    config: ShortConvConfig | None = None,
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
        config: tuning.

    Returns:
        The pool, and the outputs in the dtype of `x`; 0 for tokens of no row.

    Raises:
        ValueError: there are more than 4 taps, the widths do not add up, or they have
            no common divisor that is a power of two of at least 16.
    """
    num_tokens, channels = x.shape
    num_rows = slots.shape[0]
    widths = (channels,) if widths is None else widths
    if sum(widths) != channels or not 1 <= len(widths) <= 3:
        raise ValueError(f"{widths=} must be up to 3 that add up to {channels}")
    if weight.shape[1] > MAX_TAPS:
        raise ValueError(f"{weight.shape[1]} taps are more than {MAX_TAPS}")
    config = ShortConvConfig() if config is None else config
    block = config.block
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
        num_warps=config.num_warps,
        UNROLL=config.unroll,
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
