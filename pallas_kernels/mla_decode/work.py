"""The parts of one CTA: what it attends, where that lies, and where results go."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_decode.arrivals import NOTHING, OWN, wait_for_parts
from pallas_kernels.mla_decode.config import TILE, Call
from pallas_kernels.mla_decode.merge import Results, clear_row, merge_row, steps_of
from pallas_kernels.mla_decode.pages import pages_per_tile, tile_blocks, tile_pieces
from pallas_kernels.mla_decode.plan import Part, Plan, for_each_part, merge_record

MERGERS = 2
"""Warpgroups of a CTA that merge; the third one loads."""


class Sources(NamedTuple):
    """What says where the tokens of rows are: arrays, or refs in a kernel.

    Attributes:
      plan: The plan of the batch.
      table: Block ids, ``[rows, max_pages]``.
      block_offset: The layer's constant, in blocks: int32 ``[1]``.
    """

    plan: Plan
    table: Any
    block_offset: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a CTA, in a kernel.

    Attributes:
      call: The call.
      sources: Where to find the tokens of rows.
      results: Where results go.
      cta: The CTA among those of its group.
      group: The group of columns.
      signals: Warpgroups that each write a share of a part.
      semaphores: One for each row and group, or None in the simulator.
    """

    call: Call
    sources: Sources
    results: Results
    cta: jax.Array
    group: jax.Array
    signals: int
    semaphores: Any

    @property
    def first_column(self):
        """The first column of the group."""
        return self.group * self.call.group_columns

    @property
    def columns(self):
        """The columns of the group, to slice with."""
        return pl.ds(self.first_column, self.call.group_columns)

    def for_each_part(self, attend_part, carry):
        """Go through the parts; see `plan.for_each_part`."""
        ctas_ref, rows_ref = self.sources.plan.ctas, self.sources.plan.rows
        return for_each_part(ctas_ref, rows_ref, self.cta, attend_part, carry)

    def zero(self):
        """Read a zero that the compiler does not know."""
        return self.sources.plan.ctas[self.cta, 7]

    def num_parts(self):
        """Read how many parts there are."""
        return self.sources.plan.ctas[self.cta, 0]

    def hide(self, scores, part: Part, start, end, *, token_axis: int):
        """Return scores with ``-inf`` where a query does not see a token.

        Column ``t * num_heads + h`` is head h of query token t, which stands at
        position ``kv_len - query_len + t`` and sees what is not behind it. Columns of
        padding see what the last query token sees.

        Args:
          scores: Of a tile and the columns of the group, in a layout of wgmma.
          part: What is attended.
          start: First token of the tile.
          end: Tokens from here on are seen by nobody.
          token_axis: Axis of the tokens; the other one is that of columns.
        """
        query_len = self.call.query_len

        def hide(scores):
            def number(axis):
                return plgpu.broadcasted_iota(
                    jnp.int32, scores.shape, axis, layout=plgpu.Layout.WGMMA
                )

            limit = plgpu.layout_cast(
                jnp.full(scores.shape, end, jnp.int32), plgpu.Layout.WGMMA
            )
            if query_len > 1:
                column = self.first_column + number(1 - token_axis)
                token = lax.div(column, jnp.full_like(column, self.call.num_heads))
                limit = jnp.minimum(token + (part.kv_len - query_len + 1), limit)
            is_seen = number(token_axis) + start < limit
            return jnp.where(is_seen, scores, -jnp.inf)

        # Most tiles are before all queries.
        is_seen_by_all = start + TILE <= jnp.minimum(end, part.kv_len - query_len + 1)
        return lax.cond(is_seen_by_all, lambda s: s, hide, scores)

    def starts(self):
        """Read the blocks of this CTA's first tile."""
        count = pages_per_tile(self.call.page_size)
        return [self.sources.plan.starts[self.cta, k] for k in range(count)]

    def first_pieces(self, index, part: Part, starts):
        """Return the pieces of the first tile of a part, some without a look-up.

        Args:
          index: The part's number.
          part: The part.
          starts: What `starts` read, best before all else.
        """
        return lax.cond(
            index == 0,
            lambda: self._locate(starts, part.first),
            lambda: self.pieces(part, part.first),
        )

    def pieces(self, part: Part, tile):
        """Look up the pieces of a tile of the row of a part."""
        page_size = self.call.page_size
        blocks = tile_blocks(
            self.sources.table, part.row, part.kv_len, tile, page_size=page_size
        )
        return self._locate(blocks, tile)

    def _locate(self, blocks, tile):
        offset = self.sources.block_offset[0]
        return tile_pieces(
            blocks, tile, page_size=self.call.page_size, block_offset=offset
        )

    def store(self, part: Part, store_row, store_part):
        """Store a part with one of two functions of where its output and sums go."""
        is_whole = part.tiles == part.row_tiles
        refs, columns = self.results, self.columns

        @pl.when(is_whole)
        def _():
            store_row(refs.out.at[part.row, columns], refs.lse.at[part.row, columns])

        @pl.when(~is_whole)
        def _():
            part_id = self.cta + part.row
            store_part(
                refs.part_out.at[part_id, columns], refs.part_lse.at[part_id, columns]
            )
            if self.semaphores is not None:
                semaphore = self.semaphores.at[self._semaphore(part.row)]
                plgpu.semaphore_signal(semaphore, memory_scope="gpu")

    def merge(self, ends: tuple[Part, Part], warpgroup: int):
        """Sum this CTA's share of the rows that it has a part of.

        Only the first and the last part of a CTA can be of a row that others share.

        Args:
          ends: The first and the last part.
          warpgroup: This one among those of the CTA that merge.
        """
        if self.semaphores is None:
            return
        rows_ref = self.sources.plan.rows

        def merge_end(index, _):
            part = jax.tree.map(lambda a, b: jnp.where(index == 0, a, b), *ends)
            is_new = (index == 0) | (ends[0].row != ends[1].row)

            # A CTA without work has no tiles.
            is_split = (part.tiles > 0) & (part.tiles != part.row_tiles)

            @pl.when(is_split & is_new)
            def _():
                count, first = merge_record(rows_ref, part.row)
                word = self.semaphores.at[self._semaphore(part.row)]
                share = wait_for_parts(word, count * self.signals)
                mine = (self.cta + part.row - first) * MERGERS + warpgroup

                @pl.when(share != NOTHING)
                def _():
                    merge_row(
                        self.results,
                        part.row,
                        count,
                        first,
                        columns=(self.first_column, self.call.group_columns),
                        worker=jnp.where(share == OWN, mine, 0),
                        workers=jnp.where(share == OWN, count * MERGERS, 1),
                        num_parts=self.call.num_parts,
                        interpret=self.call.interpret,
                    )

        lax.fori_loop(0, 2, merge_end, None)

    def clear_empty_rows(self):
        """Write zeros and ``-inf`` to this CTA's share of the rows without tokens."""

        def clear(index, _):
            row = self.cta + index * self.call.num_ctas
            count, _ = merge_record(self.sources.plan.rows, row)
            columns = self.first_column, self.call.group_columns
            pl.when(count == 0)(lambda: clear_row(self.results, row, columns))

        steps = steps_of(self.call.num_rows, self.cta, self.call.num_ctas)
        lax.fori_loop(0, steps, clear, None)

    def _semaphore(self, row):
        return self.group * self.call.num_rows + row


def work_of(call: Call, sources: Sources, results: Results, *, group, signals) -> Work:
    """Return the work of this CTA, in a kernel.

    Its semaphores are in device memory, and zero when the kernel starts.
    """
    semaphores = None
    if not call.interpret:  # the simulator has none
        number = call.num_rows * call.num_groups
        semaphores = pl.get_global(plgpu.SemaphoreType.REGULAR((number,)))
    return Work(
        call=call,
        sources=sources,
        results=results,
        cta=lax.axis_index("cta"),
        group=group,
        signals=signals,
        semaphores=semaphores,
    )
