"""The two pools of a comparison: equal bytes, equal steps, one of them split up front.

Unless told otherwise a pool holds half of the requests that may run at once, at
their full length. So memory runs short: requests wait, and pages move. The static pool
is split so that every kind of memory runs out at the same number of requests of full
length, which is all that is known before the first one comes.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from ukv.engine import EngineConfig, Model
from ukv.layout import RequestShape, packed_bytes
from ukv.layout.request import pages_of_spec

PoolKind = Literal["unified", "static"]

MANY_STEP_TOKENS = 512
"""From here on a step of few tokens has a program of its own."""

KINDS: tuple[PoolKind, ...] = ("unified", "static")


def engine_config(
    kind: PoolKind,
    *,
    page_size: int,
    dtype: str,
    concurrency: int,
    max_len: int,
    max_stop_tokens: int,
    max_step_tokens: int,
    prefix_cache: bool,
    scores_prompts: bool = False,
) -> EngineConfig:
    """Return the sizes of an engine; those of both kinds differ in nothing else.

    Args:
      kind: Which pool.
      page_size: Tokens per page.
      dtype: Of what the pool stores.
      concurrency: Requests that may run at once.
      max_len: Tokens of the longest prompt and its answer.
      max_stop_tokens: Stop tokens of the model.
      max_step_tokens: Tokens of a step.
      prefix_cache: Whether prompts share what they have in common.
      scores_prompts: Whether requests may ask how likely their prompt is.
    """
    max_step_tokens = max(max_step_tokens, concurrency + 1)
    # Few programs: on a CPU each takes longer to compile than to run.
    buckets = (max_step_tokens,)
    if max_step_tokens >= MANY_STEP_TOKENS:
        buckets = (max_step_tokens // 4, max_step_tokens)
    return EngineConfig(
        page_size=page_size,
        dtype=dtype,
        is_unified=kind == "unified",
        max_rows=concurrency,
        max_kv_len=max_len,
        max_step_tokens=max_step_tokens,
        decode_buckets=(concurrency,),
        prefill_buckets=buckets,
        max_stop_tokens=max_stop_tokens,
        prefix_cache=prefix_cache,
        scores_prompts=scores_prompts,
    )


def default_pool_bytes(model: Model, config: EngineConfig) -> int:
    """Return the bytes of half of the requests that may run at once, full length."""
    specs = model.pool_specs(page_size=config.page_size, dtype=jnp.dtype(config.dtype))
    shape = RequestShape(
        num_tokens=config.max_kv_len,
        chunk_len=min(config.max_step_tokens, config.max_kv_len),
    )
    num_requests = -(-config.max_rows // 2)
    return packed_bytes(
        specs, {spec.name: num_requests * pages_of_spec(spec, shape) for spec in specs}
    )


def with_implementation(model: Model, implementation: str | None) -> Model:
    """Return a model whose ops run in one way; None keeps what is best for the device.

    Args:
      model: A frozen dataclass with a field ``implementation``, as all here are.
      implementation: As in ``ukv.ops``.
    """
    if implementation is None:
        return model
    return dataclasses.replace(model, implementation=implementation)  # type: ignore[type-var]
