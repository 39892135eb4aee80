"""Mamba2 selective state update on states in the pool.

Per head, with the state ``S`` ``[head_dim, state_dim]``, for each token:

    dt = softplus(dt_logits + dt_bias)
    S <- S * exp(-exp(a_log) * dt) + dt * outer(x, b)
    y  = S c + d_skip * x

Heads share b and c by groups, in order. The convolution before it is
``ukv.ops.short_conv``; the gated norm after it is the model's.

Source: Transformers are SSMs (arXiv:2405.21060).
"""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ukv.implementation import Implementation, OpCase, resolve
from ukv.layout import PartView
from ukv.ops.cached_rows import Buffers
from ukv.ops.gpu_kernels import triton_kernels
from ukv.ops.state_places import place_of, slot_ids
from ukv.ops.state_slots import (
    StateSlots,
    present_rows,
    read_states,
    require_shapes,
    require_slots,
    write_states,
)
from ukv.pytree import Leaf


class Mamba2Tokens(flax.struct.PyTreeNode):
    """What a layer computes for each new token before the update.

    Attributes:
      x: ``[rows, query_len, heads, head_dim]``; its dtype is that of the output.
      dt_logits: ``[rows, query_len, heads]``, before bias and softplus.
      b: ``[rows, query_len, groups, state_dim]``.
      c: ``[rows, query_len, groups, state_dim]``.
    """

    x: Leaf
    dt_logits: Leaf
    b: Leaf
    c: Leaf


class Mamba2Parameters(flax.struct.PyTreeNode):
    """Parameters of one Mamba2 layer, ``[heads]`` each.

    Attributes:
      a_log: Logarithm of the decay rate.
      dt_bias: Of the time step.
      d_skip: Weight of the direct path.
    """

    a_log: Leaf
    dt_bias: Leaf
    d_skip: Leaf


def mamba2_decode(
    buffers: Buffers,
    view: PartView,
    tokens: Mamba2Tokens,
    parameters: Mamba2Parameters,
    slots: StateSlots,
    *,
    implementation: Implementation | None = None,
) -> tuple[Buffers, Float[Array, "rows query_len heads head_dim"]]:
    """Advance the states of a decode batch by its tokens, in place.

    Args:
      buffers: All buffers of the pool.
      view: Part ``recurrent`` of the layer, ``[heads, head_dim, state_dim]``.
      tokens: The new tokens.
      parameters: Of the layer.
      slots: Whose states; checkpoints are not written here.
      implementation: None for the default device's best.

    Returns:
      The buffers, in place when they are donated, and the outputs in the dtype of
      ``tokens.x``; zeros for a padded row.

    Raises:
      IdSpaceError: The slots are not kernel blocks of the view's sub-pool.
      ValueError: Shapes disagree.
      UnsupportedError: ``implementation`` cannot do this.
    """
    heads, head_dim = tokens.x.shape[-2:]
    groups, state_dim = tokens.b.shape[-2:]
    if view.shape != (heads, head_dim, state_dim) or heads % groups:
        raise ValueError(
            f"{view.sub_pool}.{view.part} has entries {view.shape}; the tokens need "
            f"[heads, head_dim, state_dim] = {(heads, head_dim, state_dim)}, heads a "
            f"multiple of {groups=}"
        )
    rows, query_len = tokens.x.shape[:2]
    require_shapes(
        dt_logits=(tokens.dt_logits, (rows, query_len, heads)),
        b=(tokens.b, (rows, query_len, groups, state_dim)),
        c=(tokens.c, (rows, query_len, groups, state_dim)),
        a_log=(parameters.a_log, (heads,)),
        dt_bias=(parameters.dt_bias, (heads,)),
        d_skip=(parameters.d_skip, (heads,)),
    )
    require_slots(buffers, view, slots, num_rows=rows)
    case = OpCase(
        page_size=view.page_size,
        storage_dtype=view.dtype.name,
        compute_dtype=tokens.x.dtype.name,
        widths=(head_dim, state_dim),
    )
    if resolve("mamba2_decode", implementation, case) == "triton":
        written = list(buffers)
        kernels = triton_kernels("mamba2_decode")
        written[view.buffer_index], out = kernels.mamba2_decode(
            buffers[view.buffer_index],
            tokens.x,
            tokens.dt_logits,
            tokens.b,
            tokens.c,
            parameters.a_log,
            parameters.dt_bias,
            parameters.d_skip,
            slot_ids(view, slots.slots, "slots"),
            slots.is_fresh,
            state=place_of(view),
        )
        return tuple(written), out
    states = read_states(buffers, view, slots)
    out, states = _recurrent_update(tokens, parameters, states)
    is_present = jnp.expand_dims(present_rows(view, slots), (1, 2, 3))
    out = jnp.where(is_present, out, 0.0).astype(tokens.x.dtype)
    return write_states(buffers, view, slots, states), out


def _recurrent_update(
    tokens: Mamba2Tokens, parameters: Mamba2Parameters, states: Array
) -> tuple[Array, Array]:
    """Run the tokens one after the other, in float32."""
    x, dt_logits, b, c = (
        jnp.moveaxis(leaf.astype(jnp.float32), 1, 0)
        for leaf in (tokens.x, tokens.dt_logits, tokens.b, tokens.c)
    )
    heads = x.shape[2]
    b, c = (jnp.repeat(leaf, heads // leaf.shape[2], axis=2) for leaf in (b, c))
    a_log, dt_bias, d_skip = (
        leaf.astype(jnp.float32)[None]
        for leaf in (parameters.a_log, parameters.dt_bias, parameters.d_skip)
    )

    def step(states: Array, token: tuple) -> tuple[Array, Array]:
        x, dt_logits, b, c = token
        dt = jax.nn.softplus(dt_logits + dt_bias)
        decay = jnp.exp(-jnp.exp(a_log) * dt)
        added = (dt[..., None] * x)[..., None] * b[..., None, :]
        states = states * decay[..., None, None] + added
        y = jnp.sum(states * c[..., None, :], axis=-1) + d_skip[..., None] * x
        return states, y

    states, out = jax.lax.scan(step, states, (x, dt_logits, b, c))
    return jnp.moveaxis(out, 0, 1), states
