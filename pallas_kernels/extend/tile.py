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
    KV_LEN,
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
        self.position, self.kv_len = field(POSITION), field(KV_LEN)
        self.number, self.heads = field(TILE), field(HEADS)
        # The last position that is seen; negative if none is.
        self.last = self.position + self.end - 1
        self.has_keys = self.last >= 0
        seen_last = jnp.maximum(self.last, 0)
        seen_first = jnp.int32(0)
        if window is not None:
            lowest = self.position + self.first - (window - 1)
            seen_first = jnp.clip(lowest, 0, seen_last)
        size = plan.problem.page_size
        self.first_page = lax.div(seen_first, size)
        self.last_page = lax.div(seen_last, size)
        # A tile without keys goes over one block, of which it sees nothing.
        self.first_block = lax.div(seen_first, config.block_kv)
        self.end_block = lax.div(seen_last, config.block_kv) + 1
        # Every query sees all of a block in [full_first, full_end).
        full_end = lax.div(
            jnp.maximum(self.position + self.first + 1, 0), config.block_kv
        )
        full_first = self.first_block
        if window is not None:
            lowest = jnp.maximum(self.last - (window - 1), 0)
            full_first = lax.div(lowest + (config.block_kv - 1), config.block_kv)
        after = self.first_block + 1
        self.full_first = jnp.clip(
            full_first, after, jnp.maximum(self.end_block, after)
        )
        self.full_end = jnp.clip(
            full_end, self.full_first, jnp.maximum(self.end_block, self.full_first)
        )
        # Beyond the end of the row its last page may hold anything.
        is_row_end = lax.div(self.kv_len - 1, size) == self.last_page
        is_cut = lax.rem(self.kv_len, size) != 0
        self.must_zero = jnp.logical_or(
            jnp.logical_not(self.has_keys), jnp.logical_and(is_row_end, is_cut)
        )


def places_of(plan: Plan, tile: Tile, warpgroup: Any) -> tuple[jax.Array, jax.Array]:
    """Return a consumer's first packed token, and its query head."""
    if plan.heads_per_cta == NUM_CONSUMERS:
        return tile.base, tile.heads * NUM_CONSUMERS + warpgroup
    return tile.base + warpgroup * WARPGROUP_ROWS, tile.heads
