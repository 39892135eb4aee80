"""One decode step of a delta rule layer, from the projections to the output norm.

Convolution, SiLU, norms, gate, beta, recurrence and output in one op, for a kernel
that reads and writes each state once. The reference is made of the ops of the parts:
``short_conv_decode``, then ``kda_decode`` or ``gdn_decode``.
"""

import dataclasses

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float

from ukv.implementation import Implementation, OpCase, resolve
from ukv.layout import PartView
from ukv.ops.cached_rows import Buffers
from ukv.ops.delta_states import DeltaTokens
from ukv.ops.gdn import GdnGate, gdn_decode
from ukv.ops.gpu_kernels import triton_kernels
from ukv.ops.kda import KdaGate, kda_decode, require_bound
from ukv.ops.short_conv import ShortConv, require_window, short_conv_decode
from ukv.ops.state_places import place_of, slot_ids
from ukv.ops.state_slots import StateSlots, require_shapes, require_slots
from ukv.pytree import Leaf


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaViews:
    """The two parts that a delta rule layer keeps in each slot.

    Attributes:
      recurrent: ``[heads, value_dim, key_dim]``.
      conv: ``[conv_width - 1, channels]``, channels of q, then k, then v.
    """

    recurrent: PartView
    conv: PartView


class ProjectedTokens(flax.struct.PyTreeNode):
    """What a layer's projections give for each new token.

    ``*tokens`` is ``[rows, query_len]`` in a decode and ``[tokens]`` (packed rows) in
    a prefill.

    Attributes:
      qkv: ``[*tokens, channels]``: raw inputs of the convolution, all heads of q, then
        of k, then of v; its dtype is that of the output.
      gate_logits: KDA ``[*tokens, heads, key_dim]``, GDN ``[*tokens, heads]``.
      beta_logits: ``[*tokens, heads]``, before the sigmoid.
    """

    qkv: Leaf
    gate_logits: Leaf
    beta_logits: Leaf


def kda_decode_step(
    buffers: Buffers,
    views: DeltaViews,
    tokens: ProjectedTokens,
    conv: ShortConv,
    gate: KdaGate,
    slots: StateSlots,
    *,
    implementation: Implementation | None = None,
) -> tuple[Buffers, Float[Array, "rows query_len heads value_dim"]]:
    """Convolve 1 to 4 tokens of each row and advance its KDA state, in place.

    Args:
      buffers: All buffers of the pool.
      views: Parts of the layer.
      tokens: The new tokens.
      conv: Parameters of the convolution.
      gate: Parameters of the gate.
      slots: Whose states; checkpoints are not written here.
      implementation: None for the default device's best.

    Returns:
      The buffers, in place when they are donated, and the outputs in the dtype of
      ``tokens.qkv``; zeros for a padded row. The kernel keeps q, k and v in float32
      between convolution and recurrence, the reference rounds them to that dtype.

    Raises:
      IdSpaceError: The slots are not kernel blocks of the views' sub-pool.
      ValueError: Shapes disagree.
      UnsupportedError: ``implementation`` cannot do this.
    """
    return _decode_step(
        "kda_decode_step", buffers, views, tokens, conv, gate, slots, implementation
    )


def gdn_decode_step(
    buffers: Buffers,
    views: DeltaViews,
    tokens: ProjectedTokens,
    conv: ShortConv,
    gate: GdnGate,
    slots: StateSlots,
    *,
    implementation: Implementation | None = None,
) -> tuple[Buffers, Float[Array, "rows query_len heads value_dim"]]:
    """Convolve 1 to 4 tokens of each row and advance its GDN state, in place.

    Args:
      buffers: All buffers of the pool.
      views: Parts of the layer.
      tokens: The new tokens; the heads of v are a multiple of those of q and k.
      conv: Parameters of the convolution.
      gate: Parameters of the gate.
      slots: Whose states; checkpoints are not written here.
      implementation: None for the default device's best.

    Returns:
      As :func:`kda_decode_step`.

    Raises:
      IdSpaceError: The slots are not kernel blocks of the views' sub-pool.
      ValueError: Shapes disagree.
      UnsupportedError: ``implementation`` cannot do this.
    """
    return _decode_step(
        "gdn_decode_step", buffers, views, tokens, conv, gate, slots, implementation
    )


def case_of_step(
    views: DeltaViews,
    tokens: ProjectedTokens,
    conv: ShortConv,
    gate: KdaGate | GdnGate,
) -> tuple[OpCase, int]:
    """Return the facts of a step that decide who can run it, and its key heads.

    Raises:
      ValueError: Shapes disagree.
    """
    view = views.recurrent
    heads, value_dim, key_dim = view.shape
    channels = tokens.qkv.shape[-1]
    key_channels = channels - heads * value_dim
    key_heads = key_channels // (2 * key_dim)
    if key_heads < 1 or key_channels % (2 * key_dim) or heads % key_heads:
        raise ValueError(
            f"qkv has {channels} channels; {view.sub_pool}.{view.part} with entries "
            f"{view.shape} needs heads * value_dim and 2 * key_dim for each key head"
        )
    require_window(views.conv, channels, conv)
    leading = tokens.qkv.shape[:-1]
    gate_shape = (heads, key_dim) if isinstance(gate, KdaGate) else (heads,)
    require_shapes(
        gate_logits=(tokens.gate_logits, (*leading, *gate_shape)),
        beta_logits=(tokens.beta_logits, (*leading, heads)),
        a_log=(gate.a_log, (heads,)),
        dt_bias=(gate.dt_bias, gate_shape),
    )
    if isinstance(gate, KdaGate):
        require_bound(gate)
    case = OpCase(
        page_size=view.page_size,
        storage_dtype=view.dtype.name,
        compute_dtype=tokens.qkv.dtype.name,
        widths=(key_dim, value_dim, conv.weight.shape[1]),
    )
    return case, key_heads


def _decode_step(
    op: str,
    buffers: Buffers,
    views: DeltaViews,
    tokens: ProjectedTokens,
    conv: ShortConv,
    gate: KdaGate | GdnGate,
    slots: StateSlots,
    implementation: Implementation | None,
) -> tuple[Buffers, Float[Array, "rows query_len heads value_dim"]]:
    case, key_heads = case_of_step(views, tokens, conv, gate)
    for part in (views.recurrent, views.conv):
        require_slots(buffers, part, slots, num_rows=tokens.qkv.shape[0])
    if resolve(op, implementation, case) == "triton":
        return _decode_step_triton(
            buffers, views, tokens, conv, gate, slots, key_heads=key_heads
        )
    buffers, qkv = short_conv_decode(
        buffers, views.conv, tokens.qkv, conv, slots, implementation="xla"
    )
    view = views.recurrent
    heads, value_dim, key_dim = view.shape
    ends = [key_heads * key_dim, 2 * key_heads * key_dim]
    q, k, v = jnp.split(qkv, ends, axis=-1)
    leading = qkv.shape[:2]
    convolved = DeltaTokens(
        q=q.reshape(*leading, key_heads, key_dim),
        k=k.reshape(*leading, key_heads, key_dim),
        v=v.reshape(*leading, heads, value_dim),
        gate_logits=tokens.gate_logits,
        beta_logits=tokens.beta_logits,
    )
    if isinstance(gate, KdaGate):
        return kda_decode(buffers, view, convolved, gate, slots, implementation="xla")
    return gdn_decode(buffers, view, convolved, gate, slots, implementation="xla")


def _decode_step_triton(
    buffers: Buffers,
    views: DeltaViews,
    tokens: ProjectedTokens,
    conv: ShortConv,
    gate: KdaGate | GdnGate,
    slots: StateSlots,
    *,
    key_heads: int,
) -> tuple[Buffers, Float[Array, "rows query_len heads value_dim"]]:
    state, window = views.recurrent, views.conv
    rows, query_len = tokens.qkv.shape[:2]
    written = list(buffers)
    is_one_pool = state.buffer_index == window.buffer_index
    written[state.buffer_index], windows, out = triton_kernels(
        "delta.decode"
    ).delta_decode(
        buffers[state.buffer_index],
        None if is_one_pool else buffers[window.buffer_index],
        tokens.qkv,
        tokens.gate_logits.reshape(rows, query_len, -1),
        tokens.beta_logits,
        conv.weight,
        conv.bias,
        gate.a_log,
        gate.dt_bias.reshape(-1),
        slot_ids(state, slots.slots, "slots"),
        slots.is_fresh,
        num_key_heads=key_heads,
        state=place_of(state),
        window=place_of(window),
        lower_bound=getattr(gate, "lower_bound", None),
        is_silu=conv.is_silu,
    )
    if windows is not None:
        written[window.buffer_index] = windows
    return tuple(written), out
