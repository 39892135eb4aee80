"""Layers that several models share. Each computes on packed tokens ``[num_tokens]``.

Weight matrices keep the orientation of released checkpoints, ``[out, in]``.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from models.weights import Weights, joined, weight
from ukv.ops import Implementation, gqa_attention, gqa_decode, write_kv
from ukv.pool import PoolState
from ukv.translator import StepInputs


def linear(
    x: Float[Array, "*batch inputs"],
    weight: Float[Array, "outputs inputs"],
    bias: Float[Array, " outputs"] | None = None,
) -> Float[Array, "*batch outputs"]:
    """Multiply by a matrix ``[out, in]``: float32 sums, the dtype of ``x`` out."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    product = jax.lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    if bias is not None:
        product = product + bias.astype(jnp.float32).reshape(
            *(1,) * (product.ndim - 1), -1
        )
    return product.astype(x.dtype)


def rms_norm(
    x: Float[Array, "*batch width"],
    weight: Float[Array, " width"],
    epsilon: float,
    *,
    is_zero_centred: bool = False,
) -> Float[Array, "*batch width"]:
    """Scale to unit root mean square, in float32.

    Args:
      x: Values.
      weight: Scale of each element.
      epsilon: Added to the mean square.
      is_zero_centred: Whether the scale is ``1 + weight``.

    Source: Zhang and Sennrich (arXiv:1910.07467).
    """
    values = x.astype(jnp.float32)
    mean = jnp.mean(values * values, axis=-1, keepdims=True)
    scale = weight.astype(jnp.float32)
    if is_zero_centred:
        scale = 1.0 + scale
    scale = scale.reshape(*(1,) * (x.ndim - 1), -1)
    return (values * jax.lax.rsqrt(mean + epsilon) * scale).astype(x.dtype)


def embed(
    token_ids: Int32[Array, " num_tokens"], table: Float[Array, "vocabulary width"]
) -> Float[Array, "num_tokens width"]:
    """Look tokens up; an id outside the vocabulary, as in padding, is clipped."""
    return table.at[token_ids].get(mode="clip")


def swiglu(
    x: Float[Array, "num_tokens width"],
    gate_up: Float[Array, "two_inner width"],
    down: Float[Array, "width inner"],
) -> Float[Array, "num_tokens width"]:
    """Return ``down(silu(gate(x)) * up(x))``; gate and up are fused along rows.

    Source: Shazeer (arXiv:2002.05202).
    """
    gate, up = jnp.split(linear(x, gate_up), 2, axis=-1)
    return linear(jax.nn.silu(gate) * up, down)


def swiglu_weights(prefix: str, *, width: int, inner: int) -> Weights:
    """Describe the weights of ``swiglu``, named as most checkpoints do.

    Args:
      prefix: Of the tensors.
      width: Elements that go in and out.
      inner: Elements between.
    """
    return {
        "gate_up": joined(
            [f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"],
            [(inner, width)] * 2,
        ),
        "down": weight(f"{prefix}.down_proj.weight", width, inner),
    }


def cached_attention(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    k: Float[Array, "num_tokens num_kv_heads head_dim"],
    v: Float[Array, "num_tokens num_kv_heads value_dim"],
    inputs: StepInputs,
    pool: PoolState,
    *,
    sub_pool: str,
    layer: int,
    softmax_scale: float,
    sinks: Float[Array, " num_q_heads"] | None = None,
    soft_cap: float | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "num_tokens num_q_heads value_dim"], PoolState]:
    """Write K and V of the step's tokens to the pool, then attend what each row sees.

    Args:
      q: Queries, rotated where the model does.
      k: Keys, likewise.
      v: Values.
      inputs: The step.
      pool: The pool.
      sub_pool: Where this kind of layer keeps its K and V; its spec has the window.
      layer: Index of the layer among those of the sub-pool.
      softmax_scale: Factor of ``q . k``.
      sinks: Logits that join the denominator only.
      soft_cap: Bound of the scores.
      implementation: None for the default device's best.
    """
    layout = pool.layout
    k_view = layout.part_view(sub_pool, layer=layer, part="k")
    v_view = layout.part_view(sub_pool, layer=layer, part="v")
    buffers = write_kv(
        pool.buffers,
        (k_view, v_view),
        inputs.writes[sub_pool],
        (k, v),
        implementation=implementation,
    )
    window = layout.sub_pool(sub_pool).spec.window
    table = inputs.reads[sub_pool]
    if inputs.is_decode:
        out, _ = gqa_decode(
            q[:, None],
            buffers,
            k_view,
            v_view,
            table,
            kv_lens=inputs.kv_lens,
            softmax_scale=softmax_scale,
            window=window,
            sinks=sinks,
            soft_cap=soft_cap,
            implementation=implementation,
        )
        out = out[:, 0]
    else:
        out, _ = gqa_attention(
            q,
            buffers,
            k_view,
            v_view,
            table,
            cu_query_lens=inputs.cu_query_lens,
            kv_lens=inputs.kv_lens,
            max_query_len=inputs.max_query_len,
            softmax_scale=softmax_scale,
            window=window,
            sinks=sinks,
            soft_cap=soft_cap,
            implementation=implementation,
        )
    return out, pool.replace(buffers=buffers)
