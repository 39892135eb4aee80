"""The warpgroups that attend: each 64 query tokens of one head."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.extend import products, softmax
from pallas_kernels.extend.config import (
    COLUMN_TILE,
    NUM_CONSUMERS,
    WARPGROUP_ROWS,
    Plan,
)
from pallas_kernels.extend.products import ScoreOperands
from pallas_kernels.extend.softmax import Softmax
from pallas_kernels.extend.tile import Ref, Tile, places_of

Carry = tuple[jax.Array, jax.Array]


class Consumer:
    """One of the two warpgroups that attend."""

    def __init__(
        self,
        plan: Plan,
        shared: dict[str, Any],
        warpgroup: jax.Array,
        sinks_ref: Ref,
        out_ref: Ref,
        lse_ref: Ref,
        *,
        opaque_zero: jax.Array,
        interpret: bool,
    ) -> None:
        self.plan = plan
        self.shared = shared
        self.warpgroup = warpgroup
        self.sinks_ref = sinks_ref
        self.out_ref = out_ref
        self.lse_ref = lse_ref
        self.opaque_zero = opaque_zero
        self.interpret = interpret

    def begin(self) -> None:
        """Give the first turns to the first consumer."""

        @pl.when(self.warpgroup == 1)
        def _():
            plgpu.barrier_arrive(self.shared["turn"].at[0])
            plgpu.barrier_arrive(self.shared["rows_turn"].at[0])

    def end(self) -> None:
        """Take the turns that are left over: a barrier's every phase is waited for."""

        @pl.when(self.warpgroup == 0)
        def _():
            plgpu.barrier_wait(self.shared["turn"].at[0])
            plgpu.barrier_wait(self.shared["rows_turn"].at[0])

    def visit(self, tile: Tile, carry: Carry) -> Carry:
        """Attend and store a tile.

        Args:
          tile: The tile.
          carry: Blocks and tiles that were visited before.
        """
        blocks, tiles = carry
        self.attend(tile, blocks, tiles)
        return blocks + (tile.end_block - tile.first_block), tiles + 1

    def attend(self, tile: Tile, blocks: jax.Array, tiles: jax.Array) -> None:
        """Attend one tile, whose first block is the ``blocks``-th of this CTA."""
        problem, config = self.plan.problem, self.plan.config
        q_slot = lax.rem(tiles, config.q_stages)
        token, head = places_of(self.plan, tile, self.warpgroup)
        first_position = tile.position + (token - tile.base)

        def visible(block: jax.Array) -> softmax.Visible:
            return softmax.Visible(
                position=first_position, last=tile.last, key=block * config.block_kv
            )

        def step(block: jax.Array, carry: Any, *, masked: bool) -> Any:
            out, state, zero = carry
            # Always 0, which the compiler cannot know: it would keep descriptors of
            # everything that does not change in registers, and spill.
            zero = jnp.maximum(zero, block - (1 << 30))
            number = blocks + block - tile.first_block
            slot, last_slot = (lax.rem(n, config.stages) for n in (number, number - 1))
            plgpu.barrier_wait(self.shared["k_full"].at[slot])
            plgpu.barrier_wait(self.shared["v_full"].at[last_slot])
            self.wait_turn()
            seen = visible(block) if masked else None
            out, state = products.scores_and_values(
                out,
                state,
                self.operands(q_slot + zero, slot),
                self.shared["values"].at[last_slot],
                lambda s: softmax.update(s, state.m, state.z, problem, seen),
                on_issued=self.pass_turn,
                on_scores=lambda: plgpu.barrier_arrive(self.shared["k_empty"].at[slot]),
                interpret=self.interpret,
            )
            plgpu.barrier_arrive(self.shared["v_empty"].at[last_slot])
            return out * softmax.across(state.rescale, out.shape), state, zero

        plgpu.barrier_wait(self.shared["q_full"].at[q_slot])
        slot = lax.rem(blocks, config.stages)
        plgpu.barrier_wait(self.shared["k_full"].at[slot])
        self.wait_turn()
        s = products.scores(self.operands(q_slot, slot), self.pass_turn)
        plgpu.barrier_arrive(self.shared["k_empty"].at[slot])
        state = softmax.update(
            s,
            softmax.per_row(-jnp.inf, WARPGROUP_ROWS),
            softmax.per_row(0.0, WARPGROUP_ROWS),
            problem,
            visible(tile.first_block),
        )
        state = softmax.as_operand(state, self.out_ref.dtype)
        out = products.zeros(WARPGROUP_ROWS, problem.value.width)
        carry = (out, state, self.opaque_zero)
        after_first = tile.first_block + 1
        if problem.window is not None:
            carry = lax.fori_loop(
                after_first,
                tile.full_first,
                lambda block, carry: step(block, carry, masked=True),
                carry,
            )
        carry = lax.fori_loop(
            tile.full_first,
            tile.full_end,
            lambda block, carry: step(block, carry, masked=False),
            carry,
        )
        out, state, _ = lax.fori_loop(
            tile.full_end,
            tile.end_block,
            lambda block, carry: step(block, carry, masked=True),
            carry,
        )

        number = blocks + tile.end_block - 1 - tile.first_block
        slot = lax.rem(number, config.stages)
        plgpu.barrier_wait(self.shared["v_full"].at[slot])
        pl.when(tile.must_zero)(lambda: self.zero_unseen(tile, slot))
        self.wait_turn()
        out = products.add_values(
            out,
            state.p,
            self.shared["values"].at[slot],
            self.pass_turn,
            interpret=self.interpret,
        )
        plgpu.barrier_arrive(self.shared["v_empty"].at[slot])
        self.finish(tile, q_slot, token, head, out, state)
        plgpu.barrier_arrive(self.shared["q_empty"].at[q_slot])

    def wait_turn(self) -> None:
        """Wait until this warpgroup may issue products."""
        plgpu.barrier_wait(self.shared["turn"].at[self.warpgroup])

    def pass_turn(self) -> None:
        """Let the other warpgroup issue products."""
        plgpu.barrier_arrive(self.shared["turn"].at[1 - self.warpgroup])

    def operands(self, q_slot: jax.Array, slot: jax.Array) -> ScoreOperands:
        """Return the queries of a tile and the keys of a block."""
        queries = [ref.at[q_slot, self.warpgroup] for ref in self.shared["q"]]
        keys = [ref.at[slot] for ref in self.shared["keys"]]
        return ScoreOperands(tuple(queries), tuple(keys))

    def zero_unseen(self, tile: Tile, slot: jax.Array) -> None:
        """Zero the values that no query sees: a weight of 0 would keep their NaN.

        Those are the rows behind the last token, and, where a window starts in the
        row's last page, what was read in the stead of the block's earlier pages.
        """
        plan = self.plan
        block_start = (tile.end_block - 1) * plan.config.block_kv
        num_seen = tile.last + 1 - block_start
        first_read = tile.first_page * plan.problem.page_size - block_start
        for tile_column in range(plan.problem.value.width // COLUMN_TILE):

            def zero(tile_column: int = tile_column) -> None:
                columns = pl.ds(tile_column * COLUMN_TILE, COLUMN_TILE)
                ref = self.shared["values"].at[slot, :, columns]
                values = plgpu.load(ref, layout=plgpu.Layout.WGMMA)
                key = plgpu.broadcasted_iota(
                    jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA
                )
                is_read = jnp.logical_and(key >= first_read, key < num_seen)
                ref[...] = jnp.where(is_read, values, jnp.zeros_like(values))

            pl.when(self.warpgroup == tile_column % NUM_CONSUMERS)(zero)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.shared["zeroed"])
        plgpu.barrier_wait(self.shared["zeroed"])

    def finish(
        self,
        tile: Tile,
        q_slot: jax.Array,
        token: jax.Array,
        head: jax.Array,
        out: jax.Array,
        state: Softmax,
    ) -> None:
        """Normalise and store."""
        plan = self.plan
        place = token - tile.base
        sink = self.sinks_ref[head] if plan.problem.has_sinks else None
        factor, lse = softmax.finish(state.m, state.z, sink)
        first_place = tile.number * plan.block_q + place
        self.lse_ref.at[head, pl.ds(first_place, WARPGROUP_ROWS)][...] = lse
        result = (out * softmax.across(factor, out.shape)).astype(self.out_ref.dtype)

        # The rows of this warpgroup that belong to the tile.
        first = jnp.maximum(tile.first - place, 0)
        end = jnp.minimum(tile.end - place, WARPGROUP_ROWS)
        is_whole = jnp.logical_and(first == 0, end == WARPGROUP_ROWS)

        @pl.when(is_whole)
        def _():
            # Outputs are as wide as the first part of the queries, read by now.
            staged = self.shared["q"][0].at[q_slot, self.warpgroup]
            staged[...] = result
            plgpu.commit_smem()
            tokens = pl.ds(pl.multiple_of(token, 8), WARPGROUP_ROWS)
            plgpu.copy_smem_to_gmem(staged, self.out_ref.at[tokens, head])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        is_cut = jnp.logical_or(tile.first > 0, tile.end < plan.block_q)

        @pl.when(is_cut)
        def _():
            turn = self.shared["rows_turn"]
            plgpu.barrier_wait(turn.at[self.warpgroup])

            @pl.when(jnp.logical_not(is_whole))
            def _():
                rows = self.shared["rows"]
                rows[...] = result
                plgpu.commit_smem()

                def store(row: jax.Array, _: None) -> None:
                    target = self.out_ref.at[pl.ds(token + row, 1), head]
                    plgpu.copy_smem_to_gmem(rows.at[pl.ds(row, 1)], target)

                lax.fori_loop(first, end, store, None)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            plgpu.barrier_arrive(turn.at[1 - self.warpgroup])
