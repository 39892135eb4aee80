"""Recurrent ops on whole rows without a pool: differentiable, for training.

They compute what the ops over the pool do for fresh rows, with the same arithmetic.
"""

import functools as ft

import jax.numpy as jnp
from jaxtyping import Array, Float

from ukv.ops.delta_states import DeltaTokens, activate
from ukv.ops.delta_training import delta_rule_rows
from ukv.ops.kda import KdaGate, kda_log_decay
from ukv.ops.short_conv import ShortConv, combine_taps


def short_conv_rows(
    x: Float[Array, "rows time channels"], conv: ShortConv
) -> Float[Array, "rows time channels"]:
    """Convolve rows that begin with an empty window.

    Args:
      x: Raw inputs.
      conv: Parameters of the layer.

    Returns:
      The results in the dtype of ``x``.
    """
    time, num_taps = x.shape[1], conv.weight.shape[1]
    padded = jnp.pad(x.astype(jnp.float32), ((0, 0), (num_taps - 1, 0), (0, 0)))
    taps = [padded[:, j : j + time] for j in range(num_taps)]
    return combine_taps(taps, conv).astype(x.dtype)


def kda_rows(
    tokens: DeltaTokens, gate: KdaGate
) -> Float[Array, "rows time heads value_dim"]:
    """Run Kimi Delta Attention over rows that begin with an empty state.

    Padding goes behind the tokens of a row, where it changes none of their outputs.

    Args:
      tokens: ``[rows, time, ...]``.
      gate: Parameters of the layer.

    Returns:
      The outputs in the dtype of ``tokens.v``.
    """
    q, k, v, log_decay, beta = activate(tokens, ft.partial(kda_log_decay, gate=gate))
    out = delta_rule_rows(q, k, v.astype(jnp.float32), log_decay, beta)
    return out.astype(tokens.v.dtype)
