"""The warpgroup that brings queries, keys and values into shared memory."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.extend.config import NUM_CONSUMERS, WARPGROUP_ROWS, Plan
from pallas_kernels.extend.tile import Ref, Tile, places_of


class Producer:
    """Brings queries, keys and values into shared memory."""

    def __init__(
        self,
        plan: Plan,
        shared: dict[str, Any],
        q_ref: Ref,
        source_refs: list[Ref],
        offsets_ref: Ref,
        table_ref: Ref,
    ) -> None:
        self.plan = plan
        self.shared = shared
        self.q_ref = q_ref
        self.source_refs = source_refs
        self.offsets = [offsets_ref[i] for i in range(len(source_refs))]
        self.table_ref = table_ref
        self.start = (jnp.int32(0), jnp.int32(0))

    def visit(self, tile: Tile, carry: tuple[jax.Array, jax.Array]) -> Any:
        """Bring all that a tile needs.

        Args:
          tile: The tile.
          carry: Blocks and tiles that were brought before.
        """
        blocks, tiles = carry
        num_blocks = tile.end_block - tile.first_block

        def step(i: jax.Array, entries: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            block = tile.first_block + i
            following = self.entries(tile, jnp.minimum(block + 1, tile.end_block - 1))
            self.bring_keys(tile, blocks + i, block, entries)
            pl.when(i == 0)(lambda: self.bring_queries(tile, tiles))
            self.bring_values(tile, blocks + i, block, entries)
            return following

        entries = self.entries(tile, tile.first_block)
        lax.fori_loop(0, num_blocks, step, entries)
        return blocks + num_blocks, tiles + 1

    def drain(self, blocks: jax.Array, tiles: jax.Array) -> None:
        """Wait until all that was brought has been read."""
        stages, q_stages = self.plan.config.stages, self.plan.config.q_stages
        for name, count, size in (
            ("k_empty", blocks, stages),
            ("v_empty", blocks, stages),
            ("q_empty", tiles, q_stages),
        ):
            for back in range(size, 0, -1):
                self.wait_empty(name, count - back, size, count >= back)

    def wait_empty(
        self, name: str, number: jax.Array, size: int, is_used: jax.Array
    ) -> None:
        """Wait until a place of a ring has been read, if it was ever used."""
        barrier = self.shared[name].at[lax.rem(jnp.maximum(number, 0), size)]
        pl.when(is_used)(lambda: plgpu.barrier_wait(barrier))

    def entries(self, tile: Tile, block: jax.Array) -> tuple[jax.Array, ...]:
        """Return the table's entries of the pages of a block.

        Pages that the tile does not see may have entries of any value: the nearest
        page that it sees is read in their stead.
        """
        size = self.plan.problem.page_size
        found = []
        for copy in range(self.plan.copies):
            key = block * self.plan.config.block_kv + copy * self.plan.copy_rows
            page = jnp.clip(lax.div(key, size), tile.first_page, tile.last_page)
            found.append(jnp.where(tile.has_keys, self.table_ref[tile.row, page], 0))
        return tuple(found)

    def bring_keys(
        self, tile: Tile, number: jax.Array, block: jax.Array, entries: Any
    ) -> None:
        """Bring a block of keys, which is the ``number``-th of this CTA."""
        slot = self.next_slot("k_empty", number)
        for i, source in enumerate(self.plan.problem.keys):
            target = self.shared["keys"][i].at[slot]
            self.bring(i, source, tile, block, entries, target, "k_full", slot)

    def bring_values(
        self, tile: Tile, number: jax.Array, block: jax.Array, entries: Any
    ) -> None:
        """Bring a block of values."""
        slot = self.next_slot("v_empty", number)
        source, target = self.plan.problem.value, self.shared["values"].at[slot]
        i = len(self.plan.problem.keys)
        self.bring(i, source, tile, block, entries, target, "v_full", slot)

    def next_slot(self, empty: str, number: jax.Array) -> jax.Array:
        """Return the place of a ring where the next block goes, once it is free."""
        stages = self.plan.config.stages
        self.wait_empty(empty, number, stages, number >= stages)
        return lax.rem(number, stages)

    def bring(
        self,
        i: int,
        source: Any,
        tile: Tile,
        block: jax.Array,
        entries: tuple[jax.Array, ...],
        target: Ref,
        full: str,
        slot: jax.Array,
    ) -> None:
        """Bring the rows of a block from one source."""
        plan = self.plan
        size, rows = plan.problem.page_size, plan.copy_rows
        group = plan.problem.num_q_heads // plan.problem.num_kv_heads
        kv_head = lax.div(tile.heads * plan.heads_per_cta, group)
        columns = pl.ds(source.column, source.width)
        for copy, entry in enumerate(entries):
            row = (entry + self.offsets[i]) * size
            if size > rows:  # a block is a piece of a page
                row = row + lax.rem(block * plan.config.block_kv, size)
            row_slice = pl.ds(pl.multiple_of(row, 8), rows)
            index: list[Any] = [row_slice, columns]
            if source.head_axis is not None:
                index.insert(source.head_axis, kv_head)
            found = self.source_refs[i].at[tuple(index)]
            plgpu.copy_gmem_to_smem(
                found,
                target.at[pl.ds(copy * rows, rows)],
                self.shared[full].at[slot],
            )

    def bring_queries(self, tile: Tile, number: jax.Array) -> None:
        """Bring the queries of both consumers."""
        plan = self.plan
        q_stages = plan.config.q_stages
        slot = lax.rem(number, q_stages)
        self.wait_empty("q_empty", number, q_stages, number >= q_stages)
        for w in range(NUM_CONSUMERS):
            token, head = places_of(plan, tile, w)
            tokens = pl.ds(pl.multiple_of(token, 8), WARPGROUP_ROWS)
            column = 0
            for i, source in enumerate(plan.problem.keys):
                columns = pl.ds(column, source.width)
                column += source.width
                plgpu.copy_gmem_to_smem(
                    self.q_ref.at[tokens, head, columns],
                    self.shared["q"][i].at[slot, w],
                    self.shared["q_full"].at[slot],
                )
