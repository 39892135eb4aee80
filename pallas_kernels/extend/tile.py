"""One piece of a kernel's work, as scalars of a running CTA."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.extend.config import NUM_CONSUMERS, WARPGROUP_ROWS, Plan
from pallas_kernels.extend.schedule import (
    BASE,
    END,
    FIRST,
    HEADS,
    KEY_END,
    KEY_START,
    POSITION,
    ROW,
    TILE,
)

Ref = Any  # what Pallas hands to a kernel


class Tile:
    """One piece of work: queries of one row, for the heads of a CTA."""

    def __init__(self, plan: Plan, pieces_ref: Ref, cta: jax.Array, i: jax.Array):
        config, window = plan.config, plan.problem.window

        def field(number: int) -> jax.Array:
            return pieces_ref[cta, i, number]

        self.row, self.base = field(ROW), field(BASE)
        self.first, self.end = field(FIRST), field(END)
        self.position = field(POSITION)
        key_start, key_end = field(KEY_START), field(KEY_END)
        self.number, self.heads = field(TILE), field(HEADS)
        seen_first = key_start
        if window is not None:
            lowest = self.position + self.first - (window - 1)
            seen_first = jnp.maximum(seen_first, lowest)
        seen_end = jnp.minimum(self.position + self.end, key_end)
        self.has_keys = seen_first < seen_end
        # The last position that is seen; negative if none is.
        self.last = jnp.where(self.has_keys, seen_end - 1, -1)
        seen_first = jnp.where(self.has_keys, seen_first, 0)
        seen_last = jnp.maximum(self.last, 0)
        size = plan.problem.page_size
        self.first_page = lax.div(seen_first, size)
        self.last_page = lax.div(seen_last, size)
        # A tile without keys goes over one block, of which it sees nothing.
        self.first_block = lax.div(seen_first, config.block_kv)
        self.end_block = lax.div(seen_last, config.block_kv) + 1
        # Every query sees all of a block in [full_first, full_end).
        full_end = jnp.minimum(self.position + self.first, self.last) + 1
        full_end = lax.div(jnp.maximum(full_end, 0), config.block_kv)
        full_first = self.first_block
        if window is not None:
            lowest = jnp.maximum(self.last - (window - 1), 0)
            full_first = lax.div(lowest + (config.block_kv - 1), config.block_kv)
        after = self.first_block + 1
        self.full_first = jnp.clip(full_first, after, self.end_block)
        self.full_end = jnp.clip(full_end, self.full_first, self.end_block)
        # Beyond the end of the row its last page may hold anything.
        is_row_end = lax.div(key_end - 1, size) == self.last_page
        is_cut = lax.rem(key_end, size) != 0
        self.must_zero = jnp.logical_or(
            jnp.logical_not(self.has_keys), jnp.logical_and(is_row_end, is_cut)
        )


def places_of(plan: Plan, tile: Tile, warpgroup: Any) -> tuple[jax.Array, jax.Array]:
    """Return a consumer's first packed token, and its query head."""
    if plan.heads_per_cta == NUM_CONSUMERS:
        return tile.base, tile.heads * NUM_CONSUMERS + warpgroup
    return tile.base + warpgroup * WARPGROUP_ROWS, tile.heads
