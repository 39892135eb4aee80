"""The online softmax of one warpgroup, in registers.

Scores stay as the products ``q . k`` give them. The running maximum is of what is
exponentiated: scores times ``factor``, which is the softmax scale in units of log2,
or capped scores in these units, with a factor of 1.

Legend: R queries of the warpgroup, C keys of a block; ``m`` running maximum, ``z``
running sum of the weights ``p``.
"""

import math
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.extend.config import Problem

LOG2_E = math.log2(math.e)
ROWS = plgpu.Layout.WGMMA.reduce(1)


class Visible(NamedTuple):
    """Which keys of a block the queries of a warpgroup see.

    Attributes:
      position: Position of the warpgroup's first query.
      last: Last position that any query of the tile may see.
      key: Position of the block's first key.
    """

    position: jax.Array
    last: jax.Array
    key: jax.Array


class Softmax(NamedTuple):
    """What a block of scores turns into.

    Attributes:
      p: Weights of the block.
      m: Running maximum.
      z: Running sum of weights.
      rescale: What the outputs of earlier blocks are to be multiplied with.
    """

    p: jax.Array
    m: jax.Array
    z: jax.Array
    rescale: jax.Array


def as_operand(state: Softmax, dtype: jnp.dtype) -> Softmax:
    """Return the state with its weights in the dtype of the values."""
    return state._replace(p=state.p.astype(dtype))


def per_row(value: float, num_rows: int) -> jax.Array:
    """Return a constant for each query."""
    return plgpu.layout_cast(jnp.full((num_rows,), value, jnp.float32), ROWS)


def across(row_values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeat the value of each query along its columns."""
    return lax.broadcast_in_dim(row_values, shape, [0])


def factor_of(problem: Problem) -> float:
    """Return what scores are multiplied with before they are exponents of 2."""
    return 1.0 if problem.soft_cap is not None else problem.softmax_scale * LOG2_E


def capped(s: jax.Array, problem: Problem) -> jax.Array:
    """Cap scores, in units of log2; scores without a cap are returned as they are.

    ``tanh(x) = 1 - 2 / (exp(2 x) + 1)``: the instruction for tanh is too coarse for
    what a cap multiplies.
    """
    if problem.soft_cap is None:
        return s
    cap = problem.soft_cap * LOG2_E
    twice = jnp.exp2(s * (2 * LOG2_E * problem.softmax_scale / problem.soft_cap))
    return cap - (2 * cap) / (twice + 1.0)


def hide(s: jax.Array, visible: Visible, window: int | None) -> jax.Array:
    """Replace the scores of keys that a query does not see by -inf."""
    layout = plgpu.Layout.WGMMA
    query = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=layout)
    key = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=layout)
    query = query + (visible.position - visible.key)
    seen = key <= jnp.minimum(query, visible.last - visible.key)
    if window is not None:
        seen = jnp.logical_and(seen, key > query - window)
    return jnp.where(seen, s, -jnp.inf)


def update(
    s: jax.Array,
    m: jax.Array,
    z: jax.Array,
    problem: Problem,
    visible: Visible | None,
) -> Softmax:
    """Turn scores into weights and bring the running values up to date.

    Args:
      s: Scores of a block.
      m: Running maximum.
      z: Running sum.
      problem: What is computed.
      visible: Which keys are seen; None means all of them, by every query.
    """
    s = capped(s, problem)
    if visible is not None:
        s = hide(s, visible, problem.window)
    factor = factor_of(problem)
    m_new = jnp.maximum(m, s.max(axis=1) * factor)
    # A query that has seen nothing yet has m = -inf; 2 ** (-inf - 0) is zero.
    origin = m_new if visible is None else jnp.where(m_new == -jnp.inf, 0.0, m_new)
    p = jnp.exp2(s * factor - across(origin, s.shape))
    rescale = jnp.exp2(m - origin)
    return Softmax(p=p, m=m_new, z=z * rescale + p.sum(axis=1), rescale=rescale)


def finish(
    m: jax.Array, z: jax.Array, sink: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return the factor of the weighted values, and the natural log-sum-exp.

    Args:
      m: Maximum.
      z: Sum of weights; 0 for a query that saw no key, whose factor is 0.
      sink: Logit that joins the denominator only, or None.
    """
    # Not "above 0": the sum is NaN where a key was, and that must show.
    has_keys = z != 0
    scale = jnp.ones_like(m)
    if sink is not None:
        logit = sink * LOG2_E
        m_new = jnp.maximum(m, logit)
        scale = jnp.exp2(m - m_new)
        z = z * scale + jnp.exp2(logit - m_new)
        m = m_new
    safe = jnp.where(has_keys, z, 1.0)
    factor = jnp.where(has_keys, scale / safe, 0.0)
    lse = jnp.where(has_keys, m * (1 / LOG2_E) + jnp.log(safe), -jnp.inf)
    return factor, lse
