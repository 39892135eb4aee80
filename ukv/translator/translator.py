"""From virtual page ids to what kernels index with: the only place that does it.

Reads go through tables of block ids, writes through write locations; both are
translated once per step and serve every layer, since a layer adds only a constant.
In a static pool virtual ids are block ids, and the same arrays come back.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from ukv.allocator.error_word import ErrorBit, raise_bit
from ukv.errors import SpecError
from ukv.ids import (
    ABSENT_BLOCK,
    KernelBlocks,
    VirtualPages,
    WriteLocations,
    require_ids,
)
from ukv.layout import PoolLayout, SubPoolLayout
from ukv.pool import PoolState
from ukv.pytree import Leaf
from ukv.translator.batch import StepBatch, token_places


class KVIndexTable(flax.struct.PyTreeNode):
    """A read table and what a kernel must know about it.

    Attributes:
      blocks: ``[rows, max_pages]``; entry i of a row is its i-th page of tokens.
      row_ids: int32 ``[rows]``, the batch row that each table row belongs to.
      entry_page_size: Tokens per entry.
    """

    blocks: KernelBlocks
    row_ids: Leaf
    entry_page_size: int = flax.struct.field(pytree_node=False)


class KVIndexTranslator:
    """Translates page ids of one pool layout.

    It holds no state: the tables are in the pool that each method takes. Methods that
    can meet an id nobody owns return the pool too, with UNOWNED_ID set.

    Attributes:
      layout: The layout of the pools it serves.
    """

    def __init__(self, layout: PoolLayout) -> None:
        """Bind the translator to a layout."""
        self.layout = layout

    def __repr__(self) -> str:
        """Name the sub-pools and whether ids change."""
        return (
            f"KVIndexTranslator({', '.join(self.layout.names)}; "
            f"is_translating={self.is_translating})"
        )

    @property
    def is_translating(self) -> bool:
        """Whether block ids differ from virtual ids: False for a static pool."""
        return self.layout.is_unified

    def _sub_pool(self, state: PoolState, name: str) -> SubPoolLayout:
        if state.layout != self.layout:
            raise SpecError(
                f"the pool has sub-pools {state.layout.names} of "
                f"{state.layout.pool_bytes:,} bytes, the translator was built for "
                f"{self.layout.names} of {self.layout.pool_bytes:,} bytes: build a "
                "translator from the pool's own layout"
            )
        return self.layout.sub_pool(name)

    def _lookup(
        self, state: PoolState, sub: SubPoolLayout, pages: VirtualPages
    ) -> tuple[Int32[Array, "..."], Bool[Array, "..."]]:
        """Return block ids, and where there is a page; other entries mean nothing."""
        owner = self.layout.sub_pools[sub.owner]
        found = require_ids(pages, VirtualPages, owner=owner.name, argument="pages")
        ids = found.ids
        is_page = (ids > 0) & (ids < sub.num_virtual)
        if not sub.is_translating:
            return ids, is_page
        physical = state.tables[sub.index].v2p.at[ids].get(mode="clip")
        is_page &= physical < sub.num_pages
        return physical * sub.blocks_per_page, is_page

    def _flag_unowned(
        self, state: PoolState, sub: SubPoolLayout, is_missing: jax.Array
    ) -> PoolState:
        # A window half may be gone on purpose: a tombstone is no error.
        if sub.spec.window is not None and not sub.owns_ids:
            return state
        error = raise_bit(
            state.error, sub.index, ErrorBit.UNOWNED_ID, jnp.any(is_missing)
        )
        return state.replace(error=error)

    def translate(
        self, state: PoolState, name: str, pages: VirtualPages
    ) -> KernelBlocks:
        """Return the block ids of pages, in any shape.

        Args:
          state: The pool.
          name: The sub-pool whose pages are meant.
          pages: Virtual ids of that sub-pool's id space.

        Returns:
          Block ids of the same shape, ``ABSENT_BLOCK`` where there is no page; in a
          static pool the same array.

        Raises:
          IdSpaceError: ``pages`` are no virtual ids of that space.
          SpecError: The pool has another layout than the translator.
        """
        sub = self._sub_pool(state, name)
        blocks, is_page = self._lookup(state, sub, pages)
        if sub.is_translating:
            blocks = jnp.where(is_page, blocks, ABSENT_BLOCK)
        return KernelBlocks(ids=blocks, sub_pool=name)

    def fill_read_table(
        self,
        out: KernelBlocks,
        state: PoolState,
        pages: VirtualPages,
        num_pages: Int32[Array, " rows"],
    ) -> tuple[PoolState, KernelBlocks]:
        """Write the block ids of each row's live pages over the front of ``out``.

        Entries from ``num_pages`` on, and those of tombstones, keep the value that
        ``out`` holds: the padding value of the backend that reads the table.

        Args:
          out: ``[rows, max_entries]``; names the sub-pool. A whole multiple of the
            table's width means smaller entries: see ``index_table_for_batch``.
          state: The pool.
          pages: Virtual ids ``[rows, max_pages]``.
          num_pages: Live pages of each row.

        Returns:
          ``(state, table)``; a live page that nobody owns sets UNOWNED_ID.

        Raises:
          IdSpaceError: An argument is of the wrong space.
          SpecError: The widths do not divide, or the layouts differ.
        """
        name = out.sub_pool
        table = require_ids(out, KernelBlocks, owner=name, argument="out")
        sub = self._sub_pool(state, name)
        blocks, is_page = self._lookup(state, sub, pages)
        column = jnp.arange(blocks.shape[1], dtype=jnp.int32)
        is_live = column[None, :] < num_pages[:, None]
        state = self._flag_unowned(state, sub, is_live & ~is_page)
        is_filled = is_live & is_page
        width, entries = blocks.shape[1], table.ids.shape[1]
        if entries % width:
            raise SpecError(
                f"out has {entries} entries a row for {width} pages: give a whole "
                "number of entries for each page"
            )
        if entries != width:
            blocks, is_filled = self._split(sub, blocks, is_filled, entries // width)
        return state, table.replace(ids=jnp.where(is_filled, blocks, table.ids))

    def _split(
        self,
        sub: SubPoolLayout,
        blocks: Int32[Array, "rows pages"],
        is_filled: Bool[Array, "rows pages"],
        pieces: int,
    ) -> tuple[Int32[Array, "rows entries"], Bool[Array, "rows entries"]]:
        """Turn each page into ``pieces`` entries of ``page_size / pieces`` tokens."""
        per_entry = {
            self.layout.part_view(sub.name, layer=0, part=part.name).rows_per_entry
            for part in sub.spec.parts
        }
        if sub.page_size % pieces or per_entry != {1}:
            raise SpecError(
                f"pages of {sub.name!r} cannot be read in {pieces} pieces: that needs "
                f"page_size={sub.page_size} divisible by {pieces} and parts of equal "
                "width; use one entry per page"
            )
        piece = jnp.arange(pieces, dtype=jnp.int32)
        split = blocks[:, :, None] * pieces + piece[None, None, :]
        rows = blocks.shape[0]
        return split.reshape(rows, -1), jnp.repeat(is_filled, pieces, axis=1)

    def index_table_for_batch(
        self,
        state: PoolState,
        name: str,
        batch: StepBatch,
        *,
        entry_page_size: int | None = None,
        padding: int = 0,
    ) -> tuple[PoolState, KVIndexTable]:
        """Return the read table of one sub-pool for a batch.

        Args:
          state: The pool.
          name: The sub-pool.
          batch: The step.
          entry_page_size: Tokens per entry; None for the page size. A backend that
            reads smaller pages takes a divisor, and reads through
            ``PartView.with_page_size`` of the same divisor.
          padding: What the backend wants past a row's live pages.

        Returns:
          ``(state, table)``; a live page that nobody owns sets UNOWNED_ID.

        Raises:
          SpecError: The sub-pool holds states, or ``entry_page_size`` is no divisor of
            its page size.
          UnknownSubPoolError: No sub-pool has that name.
        """
        sub = self._sub_pool(state, name)
        if not sub.spec.grows:
            raise SpecError(f"sub-pool {name!r} holds states: call slots_for")
        size = sub.page_size if entry_page_size is None else entry_page_size
        if size < 1 or sub.page_size % size:
            raise SpecError(
                f"{entry_page_size=} must divide page_size={sub.page_size} of {name!r}"
            )
        pages = batch.page_tables[self.layout.sub_pools[sub.owner].name]
        rows, width = pages.ids.shape
        shape = (rows, width * (sub.page_size // size))
        out = KernelBlocks(ids=jnp.full(shape, padding, jnp.int32), sub_pool=name)
        num_pages = -(-batch.kv_lens // sub.page_size)
        num_pages = jnp.where(batch.is_live, num_pages, 0)
        state, blocks = self.fill_read_table(out, state, pages, num_pages)
        row_ids = jnp.arange(rows, dtype=jnp.int32)
        return state, KVIndexTable(blocks=blocks, row_ids=row_ids, entry_page_size=size)

    def write_locations_for(
        self, state: PoolState, name: str, batch: StepBatch
    ) -> tuple[PoolState, WriteLocations]:
        """Return where the new tokens of a batch go in one sub-pool.

        Args:
          state: The pool, after its pages for the new tokens were allocated.
          name: A sub-pool that grows with tokens.
          batch: The step.

        Returns:
          ``(state, locations)`` with ``[num_tokens]`` entries. Padding has
          ``ABSENT_BLOCK`` and is never written; so has a token without a page, which
          also sets UNOWNED_ID, unless its window half was released on purpose.

        Raises:
          SpecError: The sub-pool holds states.
          UnknownSubPoolError: No sub-pool has that name.
        """
        sub = self._sub_pool(state, name)
        if not sub.spec.grows:
            raise SpecError(f"sub-pool {name!r} holds states: call slots_for")
        table = batch.page_tables[self.layout.sub_pools[sub.owner].name]
        places = token_places(batch)
        column = jnp.where(places.is_token, places.positions // sub.page_size, 0)
        pages = table.replace(
            ids=table.ids.at[places.rows, column].get(mode="fill", fill_value=0)
        )
        blocks, is_page = self._lookup(state, sub, pages)
        is_written = places.is_token & is_page
        state = self._flag_unowned(state, sub, places.is_token & ~is_page)
        return state, WriteLocations(
            blocks=jnp.where(is_written, blocks, ABSENT_BLOCK),
            offsets=jnp.where(is_written, places.positions % sub.page_size, 0),
            sub_pool=name,
        )

    def sliding_window_write_loc_for(
        self, state: PoolState, name: str, batch: StepBatch
    ) -> tuple[PoolState, WriteLocations]:
        """Return the write locations of a sliding-window sub-pool.

        Raises:
          SpecError: The sub-pool has no window.
        """
        sub = self._sub_pool(state, name)
        if sub.spec.window is None:
            raise SpecError(
                f"sub-pool {name!r} has no window: call write_locations_for"
            )
        return self.write_locations_for(state, name, batch)

    def slots_for(
        self, state: PoolState, name: str, batch: StepBatch
    ) -> tuple[PoolState, KernelBlocks]:
        """Return the state slot of each row, ``ABSENT_BLOCK`` for padded rows.

        Raises:
          SpecError: The sub-pool holds no states.
        """
        sub = self._sub_pool(state, name)
        if sub.spec.grows:
            raise SpecError(
                f"sub-pool {name!r} grows with tokens: call index_table_for_batch"
            )
        blocks, is_page = self._lookup(state, sub, batch.page_tables[name])
        state = self._flag_unowned(state, sub, batch.is_live & ~is_page)
        is_used = batch.is_live & is_page
        ids = jnp.where(is_used, blocks, ABSENT_BLOCK)
        return state, KernelBlocks(ids=ids, sub_pool=name)
