"""The layout of an engine's pool, unified or split up front."""

import jax.numpy as jnp

from ukv.engine.config import EngineConfig
from ukv.engine.model import Model
from ukv.layout import (
    PoolLayout,
    RequestShape,
    pages_of_request,
    static_layout,
    unified_layout,
)


def engine_layout(model: Model, *, pool_bytes: int, config: EngineConfig) -> PoolLayout:
    """Return the layout of an engine's pool.

    A static pool without ``static_pages`` is split so that every sub-pool runs out
    at the same number of requests of ``max_kv_len`` tokens.

    Args:
      model: Says what it keeps.
      pool_bytes: Budget in bytes.
      config: Sizes, and which kind of pool.

    Raises:
      BudgetError: The bytes hold no request.
    """
    specs = model.pool_specs(page_size=config.page_size, dtype=jnp.dtype(config.dtype))
    unified = unified_layout(specs, pool_bytes=pool_bytes)
    if config.is_unified:
        return unified
    if config.static_pages is not None:
        return static_layout(specs, num_pages=dict(config.static_pages))
    shape = RequestShape(
        num_tokens=config.max_kv_len,
        chunk_len=min(config.max_step_tokens, config.max_kv_len),
    )
    needs = {sub.name: pages_of_request(sub, shape) for sub in unified.sub_pools}
    total = sum(needs[sub.name] * sub.page_bytes for sub in unified.sub_pools)
    # A static sub-pool that owns its ids has a null page on top.
    usable = pool_bytes - sum(sub.page_bytes for sub in unified.owners)
    num_pages = {name: need * usable // total for name, need in needs.items()}
    return static_layout(
        specs, num_pages={name: max(count, 1) for name, count in num_pages.items()}
    )
