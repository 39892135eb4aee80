"""Short depthwise causal convolution on windows in the pool.

With ``u`` the window (the last ``conv_width - 1`` raw inputs before this step)
followed by this step's inputs ``x``, per channel ``c``:

    y[t, c] = act(bias[c] + sum_j weight[c, j] * u[t + j, c])     j < conv_width

and the last ``conv_width - 1`` entries of ``u`` are the next window. With fewer new
tokens than that the window shifts. Example: width 4, window (a, b, c), one token x:
y uses (a, b, c, x), the next window is (b, c, x).

Sums are float32; windows keep raw inputs in the storage dtype of the pool.
"""

import itertools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from ukv.errors import UnsupportedError
from ukv.implementation import Implementation, OpCase, resolve
from ukv.layout import PartView
from ukv.ops.cached_rows import Buffers
from ukv.ops.gpu_kernels import triton_kernels
from ukv.ops.state_places import checkpoint_ids, place_of, slot_ids
from ukv.ops.state_slots import (
    StateSlots,
    present_rows,
    query_lens_of,
    read_states,
    require_shapes,
    require_slots,
    write_states,
    write_states_and_checkpoints,
)
from ukv.pytree import Leaf

MAX_KERNEL_TAPS = 4
"""Longer convolutions of a prefill run on XLA."""


class ShortConv(flax.struct.PyTreeNode):
    """Parameters of the short convolution of one layer.

    Attributes:
      weight: ``[channels, conv_width]``; the last tap multiplies the current token.
      bias: ``[channels]``, or None.
      is_silu: Whether the result goes through SiLU.
    """

    weight: Leaf
    bias: Leaf | None = None
    is_silu: bool = flax.struct.field(pytree_node=False, default=True)


def require_window(view: PartView, num_channels: int, conv: ShortConv) -> None:
    """Check the view's entry against the parameters and the channels of the inputs.

    Raises:
      ValueError: They disagree.
    """
    channels, conv_width = conv.weight.shape
    if view.shape != (conv_width - 1, channels) or num_channels != channels:
        raise ValueError(
            f"{view.sub_pool}.{view.part} has entries {view.shape} and x has "
            f"{num_channels} channels; weight {conv.weight.shape} needs entries "
            f"[conv_width - 1, channels] = {(conv_width - 1, channels)}"
        )
    require_shapes(bias=(conv.bias, (channels,)))


def _require_case(
    op: str,
    view: PartView,
    x: Array,
    conv: ShortConv,
    implementation: Implementation | None,
) -> Implementation:
    require_window(view, x.shape[-1], conv)
    channels, conv_width = conv.weight.shape
    case = OpCase(
        page_size=view.page_size,
        storage_dtype=view.dtype.name,
        compute_dtype=x.dtype.name,
        widths=(conv_width, channels),
    )
    return resolve(op, implementation, case)


def combine_taps(
    taps: list[Array], conv: ShortConv
) -> Float32[Array, "*batch channels"]:
    """Return the result from the inputs of each tap, ``[*batch, channels]`` each."""
    leading = tuple(range(taps[0].ndim - 1))
    total = jnp.zeros(taps[0].shape, jnp.float32)
    if conv.bias is not None:
        total = total + jnp.expand_dims(conv.bias.astype(jnp.float32), leading)
    for j, tap in enumerate(taps):
        weight = jnp.expand_dims(conv.weight[:, j].astype(jnp.float32), leading)
        total = total + weight * tap
    out = jax.nn.silu(total) if conv.is_silu else total
    # Without the barrier, XLA computes an output again inside each of its consumers,
    # with bits that depend on the loop it lands in, hence on the layout of the pool.
    return jax.lax.optimization_barrier(out)


def short_conv_decode(
    buffers: Buffers,
    view: PartView,
    x: Float[Array, "rows query_len channels"],
    conv: ShortConv,
    slots: StateSlots,
    *,
    implementation: Implementation | None = None,
) -> tuple[Buffers, Float[Array, "rows query_len channels"]]:
    """Convolve the new tokens of a decode batch and shift the windows, in place.

    Args:
      buffers: All buffers of the pool.
      view: Part ``conv`` of the layer, ``[conv_width - 1, channels]``.
      x: Raw inputs.
      conv: Parameters of the layer.
      slots: Whose windows; checkpoints are not written here.
      implementation: None for the default device's best.

    Returns:
      The buffers, in place when they are donated, and the results in the dtype of
      ``x``; zeros for a padded row.

    Raises:
      IdSpaceError: The slots are not kernel blocks of the view's sub-pool.
      ValueError: Shapes disagree.
      UnsupportedError: ``implementation`` cannot do this.
    """
    _require_case("short_conv_decode", view, x, conv, implementation)
    require_slots(buffers, view, slots, num_rows=x.shape[0])
    query_len, num_taps = x.shape[1], conv.weight.shape[1]
    window = read_states(buffers, view, slots)
    inputs = jnp.concatenate([window, x.astype(jnp.float32)], axis=1)
    taps = [inputs[:, j : j + query_len] for j in range(num_taps)]
    is_present = present_rows(view, slots)[:, None, None]
    out = jnp.where(is_present, combine_taps(taps, conv), 0.0).astype(x.dtype)
    return write_states(buffers, view, slots, inputs[:, query_len:]), out


def _prefill_triton(
    buffers: Buffers,
    view: PartView,
    x: Float[Array, "tokens channels"],
    conv: ShortConv,
    cu_query_lens: Int32[Array, " bounds"],
    slots: StateSlots,
    widths: tuple[int, ...],
) -> tuple[Buffers, list[Array]]:
    query_lens_of(buffers, view, slots, cu_query_lens)
    written = list(buffers)
    kernels = triton_kernels("short_conv")
    written[view.buffer_index], outputs = kernels.short_conv_prefill(
        buffers[view.buffer_index],
        x,
        conv.weight,
        conv.bias,
        cu_query_lens,
        slot_ids(view, slots.slots, "slots"),
        slots.is_fresh,
        checkpoint_ids(view, slots),
        window=place_of(view),
        is_silu=conv.is_silu,
        widths=widths,
    )
    return tuple(written), outputs


def short_conv_prefill(
    buffers: Buffers,
    view: PartView,
    x: Float[Array, "tokens channels"],
    conv: ShortConv,
    cu_query_lens: Int32[Array, " bounds"],
    slots: StateSlots,
    *,
    implementation: Implementation | None = None,
) -> tuple[Buffers, Float[Array, "tokens channels"]]:
    """Convolve packed rows of unequal length and store their windows, in place.

    Args:
      buffers: All buffers of the pool.
      view: Part ``conv`` of the layer, ``[conv_width - 1, channels]``.
      x: Raw inputs, the rows one after the other.
      conv: Parameters of the layer.
      cu_query_lens: Exclusive prefix sum of the query lengths, one more than rows.
      slots: Whose windows, and which checkpoints to write.
      implementation: None for the default device's best.

    Returns:
      The buffers, in place when they are donated, and the results in the dtype of
      ``x``; zeros for a token of no row or of a padded row.

    Raises:
      IdSpaceError: The slots are not kernel blocks of the view's sub-pool.
      ValueError: Shapes disagree.
      UnsupportedError: ``implementation`` cannot do this.
    """
    buffers, (out,) = short_conv_prefill_parts(
        buffers,
        view,
        x,
        conv,
        cu_query_lens,
        slots,
        widths=(x.shape[1],),
        implementation=implementation,
    )
    return buffers, out


def short_conv_prefill_parts(
    buffers: Buffers,
    view: PartView,
    x: Float[Array, "tokens channels"],
    conv: ShortConv,
    cu_query_lens: Int32[Array, " bounds"],
    slots: StateSlots,
    *,
    widths: tuple[int, ...],
    implementation: Implementation | None = None,
) -> tuple[Buffers, list[Array]]:
    """Do what ``short_conv_prefill`` does; the channels come as arrays of their own.

    A kernel writes them apart, which saves a copy to those who need them apart.

    Args:
      buffers: All buffers of the pool.
      view: Part ``conv`` of the layer, ``[conv_width - 1, channels]``.
      x: Raw inputs, the rows one after the other.
      conv: Parameters of the layer.
      cu_query_lens: Exclusive prefix sum of the query lengths, one more than rows.
      slots: Whose windows, and which checkpoints to write.
      widths: Channels of each result, up to three that add up to all.
      implementation: None for the default device's best.

    Returns:
      The buffers and the results, ``[tokens, width]``, as ``short_conv_prefill``.

    Raises:
      IdSpaceError: The slots are not kernel blocks of the view's sub-pool.
      ValueError: Shapes disagree.
      UnsupportedError: ``implementation`` cannot do this.
    """
    if conv.weight.shape[1] > MAX_KERNEL_TAPS:
        if implementation == "triton":
            raise UnsupportedError(
                f"short_conv_prefill: implementation 'triton' has up to "
                f"{MAX_KERNEL_TAPS} taps, not {conv.weight.shape[1]}; works 'xla'"
            )
        implementation = "xla"
    chosen = _require_case("short_conv_prefill", view, x, conv, implementation)
    if sum(widths) != x.shape[1]:
        raise ValueError(f"{widths=} must add up to the {x.shape[1]} channels of x")
    if chosen == "triton":
        return _prefill_triton(buffers, view, x, conv, cu_query_lens, slots, widths)
    num_past, num_tokens = view.shape[0], x.shape[0]
    starts = cu_query_lens[:-1]
    lens = query_lens_of(buffers, view, slots, cu_query_lens)
    window = read_states(buffers, view, slots)

    def input_at(row: Array, place: Array) -> Float32[Array, "*batch channels"]:
        """Return input ``place`` of a row; places below 0 lie in its window."""
        token = jnp.clip(starts[row] + jnp.maximum(place, 0), 0, num_tokens - 1)
        past = jnp.clip(num_past + place, 0, num_past - 1)
        is_past = (place < 0)[..., None]
        return jnp.where(is_past, window[row, past], x[token].astype(jnp.float32))

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    # The default method is a loop, which the host drives on a GPU.
    row = jnp.searchsorted(
        cu_query_lens[1:], token, side="right", method="compare_all"
    ).astype(jnp.int32)
    row = jnp.minimum(row, starts.shape[0] - 1)
    place = token - starts[row]
    taps = [input_at(row, place - num_past + j) for j in range(num_past + 1)]
    is_token = place < lens[row]
    out = jnp.where(is_token[:, None], combine_taps(taps, conv), 0.0).astype(x.dtype)

    def windows_after(num_new: Int32[Array, "rows n"]) -> Array:
        past = jnp.arange(-num_past, 0, dtype=jnp.int32)
        places = num_new[:, :, None] + past[None, None, :]
        rows = jnp.arange(num_new.shape[0], dtype=jnp.int32)[:, None, None]
        return input_at(jnp.broadcast_to(rows, places.shape), places)

    last, checkpoints = windows_after(lens[:, None])[:, 0], None
    if slots.checkpoints is not None:
        checkpoints = windows_after(slots.checkpoints.lens)
    buffers = write_states_and_checkpoints(
        buffers, view, slots, lens, last, checkpoints
    )
    ends = list(itertools.accumulate(widths))[:-1]
    return buffers, jnp.split(out, ends, axis=1)
