"""Prefill of a delta rule layer, from the projections to the output norm.

``short_conv_prefill``, then ``kda_prefill`` or ``gdn_prefill``, each on what runs it
best. The convolution's kernel writes q, k and v apart, as the recurrence takes them.
"""

import functools
from collections.abc import Callable

from jaxtyping import Array, Float, Int32

from ukv.implementation import Implementation
from ukv.ops.cached_rows import Buffers
from ukv.ops.delta_states import DeltaTokens
from ukv.ops.delta_step import DeltaViews, ProjectedTokens, case_of_step
from ukv.ops.gdn import GdnGate, gdn_prefill
from ukv.ops.kda import KdaGate, kda_prefill
from ukv.ops.short_conv import ShortConv, short_conv_prefill_parts
from ukv.ops.state_slots import StateSlots


def kda_prefill_step(
    buffers: Buffers,
    views: DeltaViews,
    tokens: ProjectedTokens,
    conv: ShortConv,
    gate: KdaGate,
    cu_query_lens: Int32[Array, " bounds"],
    slots: StateSlots,
    *,
    max_query_len: int,
    implementation: Implementation | None = None,
) -> tuple[Buffers, Float[Array, "tokens heads value_dim"]]:
    """Convolve packed rows of unequal length and advance their KDA states, in place.

    Args:
      buffers: All buffers of the pool.
      views: Parts of the layer.
      tokens: ``[tokens, ...]``, the rows one after the other.
      conv: Parameters of the convolution.
      gate: Parameters of the gate.
      cu_query_lens: Exclusive prefix sum of the query lengths, one more than rows.
      slots: Whose states and windows, and which checkpoints to write.
      max_query_len: No row is longer.
      implementation: None for the default device's best.

    Returns:
      The buffers, in place when they are donated, and the outputs in the dtype of
      ``tokens.qkv``; zeros for a token of no row or of a padded row.

    Raises:
      IdSpaceError: The slots are not kernel blocks of the views' sub-pool.
      ValueError: Shapes disagree.
      UnsupportedError: ``implementation`` cannot do this.
    """
    return _prefill_step(
        functools.partial(kda_prefill, max_query_len=max_query_len),
        buffers,
        views,
        tokens,
        conv,
        gate,
        cu_query_lens,
        slots,
        implementation,
    )


def gdn_prefill_step(
    buffers: Buffers,
    views: DeltaViews,
    tokens: ProjectedTokens,
    conv: ShortConv,
    gate: GdnGate,
    cu_query_lens: Int32[Array, " bounds"],
    slots: StateSlots,
    *,
    max_query_len: int,
    implementation: Implementation | None = None,
) -> tuple[Buffers, Float[Array, "tokens heads value_dim"]]:
    """Convolve packed rows of unequal length and advance their GDN states, in place.

    Args:
      buffers: All buffers of the pool.
      views: Parts of the layer.
      tokens: ``[tokens, ...]``; the heads of v are a multiple of those of q and k.
      conv: Parameters of the convolution.
      gate: Parameters of the gate.
      cu_query_lens: Exclusive prefix sum of the query lengths, one more than rows.
      slots: Whose states and windows, and which checkpoints to write.
      max_query_len: No row is longer.
      implementation: None for the default device's best.

    Returns:
      As :func:`kda_prefill_step`.

    Raises:
      IdSpaceError: The slots are not kernel blocks of the views' sub-pool.
      ValueError: Shapes disagree.
      UnsupportedError: ``implementation`` cannot do this.
    """
    return _prefill_step(
        functools.partial(gdn_prefill, max_query_len=max_query_len),
        buffers,
        views,
        tokens,
        conv,
        gate,
        cu_query_lens,
        slots,
        implementation,
    )


def _prefill_step(
    prefill: Callable[..., tuple[Buffers, Array]],
    buffers: Buffers,
    views: DeltaViews,
    tokens: ProjectedTokens,
    conv: ShortConv,
    gate: KdaGate | GdnGate,
    cu_query_lens: Int32[Array, " bounds"],
    slots: StateSlots,
    implementation: Implementation | None,
) -> tuple[Buffers, Float[Array, "tokens heads value_dim"]]:
    _, key_heads = case_of_step(views, tokens, conv, gate)
    heads, value_dim, key_dim = views.recurrent.shape
    buffers, (q, k, v) = short_conv_prefill_parts(
        buffers,
        views.conv,
        tokens.qkv,
        conv,
        cu_query_lens,
        slots,
        widths=(key_heads * key_dim, key_heads * key_dim, heads * value_dim),
        implementation=implementation,
    )
    num_tokens = q.shape[0]
    convolved = DeltaTokens(
        q=q.reshape(num_tokens, key_heads, key_dim),
        k=k.reshape(num_tokens, key_heads, key_dim),
        v=v.reshape(num_tokens, heads, value_dim),
        gate_logits=tokens.gate_logits,
        beta_logits=tokens.beta_logits,
    )
    return prefill(
        buffers,
        views.recurrent,
        convolved,
        gate,
        cu_query_lens,
        slots,
        implementation=implementation,
    )
