"""The kernel of `pallas_kernels.extend` as a function of packed rows."""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.extend import kernel, schedule
from pallas_kernels.extend.config import (
    WARPGROUP_ROWS,
    ExtendConfig,
    Plan,
    Problem,
    default_config,
    make_plan,
)
from pallas_kernels.extend.tiles import cut_on_grid


def attend_packed(
    q: Float[Array, "num_tokens num_q_heads key_width"],
    sources: tuple[Float[Array, "..."], ...],
    table: Int32[Array, "rows max_pages"],
    *,
    offsets: Int32[Array, " sources"],
    cu_query_lens: Int32[Array, " bounds"],
    kv_lens: Int32[Array, " rows"],
    key_ranges: tuple[Int32[Array, " rows"], Int32[Array, " rows"]] | None = None,
    is_absent: Bool[Array, " rows"] | None = None,
    sinks: Float[Array, " num_q_heads"] | None = None,
    problem: Problem,
    config: ExtendConfig | None = None,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> tuple[
    Float[Array, "num_tokens num_q_heads value_width"],
    Float32[Array, "num_tokens num_q_heads"],
]:
    """Attend packed rows of any query length to what they see of cached rows.

    Page ``p`` of a row of the batch is the ``page_size`` rows from row
    ``(table[row, p] + offset) * page_size`` of each source.

    Args:
      q: Queries, the rows of the batch one after the other.
      sources: The array of each source of keys, then that of the values, of the dtype
        of ``q``, with the axes that ``Source`` says.
      table: Read table. What no query sees may have an entry of any value.
      offsets: What is added to an entry, for each source.
      cu_query_lens: Exclusive prefix sum of the query lengths.
      kv_lens: Tokens of each row, its query tokens included; 0 for a padded row.
      key_ranges: For each row, the first position whose key there is, a multiple of
        the block of keys, and the end of those positions; None means all.
      is_absent: Rows that somebody else attends: what their tokens get is not defined.
        None means none.
      sinks: Logits that join the denominator only.
      problem: What is computed.
      config: Tuning; the default suits a card of 132 multiprocessors.
      interpret: Simulate the kernel on the CPU, for tests: parameters of the
        simulator, or True for its defaults.

    Returns:
      Outputs of the dtype of ``q``, and the natural log-sum-exp, sinks included. A
      token of padding, or one that sees no key, gets zeros and ``-inf``.

    Raises:
      ValueError: The kernel cannot do these sizes.
    """
    plan = make_plan(problem, default_config(problem) if config is None else config)
    if len(sources) != len(problem.keys) + 1:
        raise ValueError(
            f"{len(sources)} sources, {len(problem.keys)} for keys and one for values "
            "are needed"
        )
    if q.shape[1:] != (problem.num_q_heads, problem.key_width):
        raise ValueError(
            f"{q.shape=} must end in ({problem.num_q_heads}, {problem.key_width})"
        )
    if q.shape[0] == 0:
        out = jnp.zeros((0, problem.num_q_heads, problem.value.width), q.dtype)
        return out, jnp.zeros((0, problem.num_q_heads), jnp.float32)
    simulator = plgpu.InterpretGPUParams() if interpret is True else interpret
    if problem.has_sinks != (sinks is not None):
        raise ValueError(f"{problem.has_sinks=} must say whether there are sinks")
    logits = jnp.zeros(1, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    return _attend(
        q,
        sources,
        table,
        offsets,
        cu_query_lens,
        kv_lens,
        (jnp.zeros_like(kv_lens), kv_lens) if key_ranges is None else key_ranges,
        jnp.zeros(kv_lens.shape, bool) if is_absent is None else is_absent,
        logits,
        plan=plan,
        interpret=simulator,
    )


# One function for all layers, which differ by their offsets alone: it is lowered once.
@functools.partial(jax.jit, static_argnames=("plan", "interpret"))
def _attend(
    q: jax.Array,
    sources: tuple[jax.Array, ...],
    table: jax.Array,
    offsets: jax.Array,
    cu_query_lens: jax.Array,
    kv_lens: jax.Array,
    key_ranges: tuple[jax.Array, jax.Array],
    is_absent: jax.Array,
    sinks: jax.Array,
    *,
    plan: Plan,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    num_tokens = q.shape[0]
    problem, config = plan.problem, plan.config
    tiles, places = cut_on_grid(
        cu_query_lens,
        kv_lens,
        *key_ranges,
        num_tokens=num_tokens,
        block_q=plan.block_q,
    )
    num_tiles = tiles.row.shape[0]
    num_groups = problem.num_q_heads // plan.heads_per_cta
    # A tile of padding has the number of the last row.
    is_padding = tiles.base + tiles.first >= cu_query_lens[-1]
    cost = schedule.costs(tiles, block_kv=config.block_kv, window=problem.window)
    pieces, counts = schedule.deal(
        tiles,
        jnp.where(is_absent[tiles.row] & ~is_padding, 0, cost),
        num_groups=num_groups,
        num_ctas=min(config.num_ctas, num_tiles * num_groups),
    )
    # A copy brings 64 tokens, from arrays whose length is a multiple of 8.
    padding = max(WARPGROUP_ROWS - num_tokens, -num_tokens % 8)
    out, lse = kernel.attend(
        jnp.pad(q, ((0, padding), (0, 0), (0, 0))) if padding else q,
        sources,
        jnp.concatenate([offsets, jnp.zeros(1, jnp.int32)]),
        table,
        pieces,
        counts,
        sinks,
        plan=plan,
        num_tiles=num_tiles,
        interpret=interpret,
    )
    return out[:num_tokens], jnp.take(lse, places, axis=1, mode="clip").T
