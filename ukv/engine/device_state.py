"""Everything of the engine that lives on the device: donated to each program."""

from collections.abc import Mapping

import flax.struct
import jax.numpy as jnp

from ukv.engine.config import EngineConfig
from ukv.engine.prefix_spec import PrefixSpec
from ukv.engine.sampling import NO_TOKEN, NUM_SCALARS
from ukv.ids import VirtualPages
from ukv.layout import PoolLayout
from ukv.pool import PoolState, create_pool
from ukv.pytree import Leaf


class DeviceState(flax.struct.PyTreeNode):
    """The pool, and what the device knows of each row.

    Attributes:
      pool: The pool.
      page_tables: By owner: ``[max_rows, max_pages]`` virtual ids for a sub-pool that
        grows with tokens, ``[max_rows]`` for a state; null where there is no page.
      cached: By owner: ``[num_virtual]`` virtual ids of what the prefix cache holds,
        by the name that the host gave it; null where there is nothing. Empty without
        a prefix cache.
      hit_lens: int32 ``[max_rows]``, tokens that a row found in the prefix cache.
      last_tokens: int32 ``[max_rows]``, the token that a row decodes next.
      is_stopped: bool ``[max_rows]``, whether it drew a stop token or a logit that is
        no number; such a row writes nothing until it is admitted anew.
      params: int32 ``[max_rows, width]``, packed sampling parameters.
      kept_tokens: Static; tokens for which rows hold window halves longer than they
        see them.
    """

    pool: PoolState
    page_tables: Mapping[str, VirtualPages]
    cached: Mapping[str, VirtualPages]
    hit_lens: Leaf
    last_tokens: Leaf
    is_stopped: Leaf
    params: Leaf
    kept_tokens: int = flax.struct.field(pytree_node=False)


def create_device_state(config: EngineConfig, layout: PoolLayout) -> DeviceState:
    """Create the state of an engine without requests."""
    rows = config.max_rows
    tables = {
        owner.name: VirtualPages(
            ids=jnp.zeros(
                (rows, config.max_pages) if owner.spec.grows else (rows,), jnp.int32
            ),
            space=owner.name,
        )
        for owner in layout.owners
    }
    cached, kept_tokens = {}, 0
    if config.prefix_cache:
        kept_tokens = PrefixSpec.of(layout).kept_tokens
        cached = {
            owner.name: VirtualPages(
                ids=jnp.zeros(owner.num_virtual, jnp.int32), space=owner.name
            )
            for owner in layout.owners
        }
    width = NUM_SCALARS + config.max_stop_tokens
    return DeviceState(
        pool=create_pool(layout, fill_word=config.fill_word),
        page_tables=tables,
        cached=cached,
        hit_lens=jnp.zeros(rows, jnp.int32),
        last_tokens=jnp.zeros(rows, jnp.int32),
        is_stopped=jnp.ones(rows, jnp.bool),
        params=jnp.full((rows, width), NO_TOKEN, jnp.int32),
        kept_tokens=kept_tokens,
    )
