"""Engines of checks: a pool of a few requests, full of NaN at first."""

import dataclasses
import functools as ft

import jax.numpy as jnp

from scripts.engine_checks.models import load_model
from ukv.engine import Engine, EngineConfig, Model, Programs, engine_layout
from ukv.layout import smallest_pool_bytes

MAX_PROMPT_LEN, MAX_NEW_TOKENS = 96, 64
CONFIG = EngineConfig(
    page_size=16,
    dtype="float32",
    max_rows=6,
    max_kv_len=MAX_PROMPT_LEN + MAX_NEW_TOKENS,
    max_step_tokens=112,
    decode_buckets=(6,),
    prefill_buckets=(112,),
    fill_word=0xFFFFFFFF,
)
"""One program for decode steps and one for prompts, so that shapes never differ."""

COLD = dataclasses.replace(CONFIG, prefix_cache=False)
"""The same without a prefix cache."""

POOL_REQUESTS = 1.5
"""Bytes of a unified pool, in requests of the greatest length."""


def pool_bytes_for(model: Model) -> int:
    """Return the bytes of a pool that holds few requests."""
    specs = model.pool_specs(page_size=CONFIG.page_size, dtype=jnp.dtype(CONFIG.dtype))
    longest = smallest_pool_bytes(
        specs, num_tokens=CONFIG.max_kv_len, chunk_len=CONFIG.max_step_tokens
    )
    return int(POOL_REQUESTS * longest)


def split_up_front(model: Model, config: EngineConfig) -> EngineConfig:
    """Return a config with a static pool for few requests, not all of them long."""
    specs = model.pool_specs(page_size=config.page_size, dtype=jnp.dtype(config.dtype))
    pages = tuple(
        (spec.name, config.max_pages * 4 // 3 if spec.grows else 4) for spec in specs
    )
    return dataclasses.replace(config, is_unified=False, static_pages=pages)


@ft.cache
def _programs(name: str, config: EngineConfig) -> Programs:
    model = load_model(name).model
    layout = engine_layout(model, pool_bytes=pool_bytes_for(model), config=config)
    return Programs(model, layout, config)


def make_engine(name: str, config: EngineConfig) -> Engine:
    """Return a fresh engine; those of one model and config share their programs.

    Args:
      name: One of ``MODELS``.
      config: Its sizes.
    """
    loaded = load_model(name)
    return Engine(
        loaded.model,
        loaded.weights,
        pool_bytes=pool_bytes_for(loaded.model),
        config=config,
        programs=_programs(name, config),
    )
