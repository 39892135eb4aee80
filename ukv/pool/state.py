"""The state of a pool: a pytree of device arrays and one static layout."""

from collections.abc import Mapping

import flax.struct
import jax
import jax.numpy as jnp

from ukv.layout import PoolLayout, SubPoolLayout
from ukv.pytree import Leaf

# Columns of PoolState.counters.
LIVE, HOLES, LO, HI = range(4)


class SubPoolTables(flax.struct.PyTreeNode):
    """Tables of one sub-pool, all int32.

    A sub-pool that translates nothing (static, owner) has empty ``v2p``, ``p2v`` and
    ``holes``; one that uses another's ids has empty ``free_ids``.

    Attributes:
      v2p: ``[num_virtual]``, physical page of a virtual page; ``num_pages`` if none.
      p2v: ``[num_pages]``, virtual page of a physical page; 0 if none.
      holes: ``[num_pages]``, a stack of the free pages inside the span.
      refcounts: ``[num_virtual]``, holders of each page (of each window half).
      free_ids: ``[num_virtual]``, a stack of the virtual ids that are free.
    """

    v2p: Leaf
    p2v: Leaf
    holes: Leaf
    refcounts: Leaf
    free_ids: Leaf


class PoolState(flax.struct.PyTreeNode):
    """Everything a pool is. Every operation takes one and returns the next.

    Attributes:
      buffers: uint32 ``[rows, words]``; one for a unified pool, one for each part of
        each sub-pool for a static one.
      tables: One for each sub-pool.
      counters: int32 ``[num_sub_pools, 4]``: pages bound, holes in the stack, first
        page of the span, first page past it.
      error: uint32 ``[num_sub_pools]``, the error word; see
        ``ukv.allocator.error_word``.
      layout: Static facts.
    """

    buffers: tuple[Leaf, ...]
    tables: tuple[SubPoolTables, ...]
    counters: Leaf
    error: Leaf
    layout: PoolLayout = flax.struct.field(pytree_node=False)


def _init_tables(sub: SubPoolLayout) -> SubPoolTables:
    # Every leaf is an array of its own, also an empty one: each is donated.
    num_virtual = sub.num_virtual
    mapped_ids = num_virtual if sub.is_translating else 0
    mapped_pages = sub.num_pages if sub.is_translating else 0
    # Ids num_virtual - 1 down to 1: the top of the stack is at the end, so 1 goes
    # first. The null page fills the last entry, which is never in use.
    free_ids = jnp.arange(num_virtual - 1, -1, -1, dtype=jnp.int32)
    return SubPoolTables(
        v2p=jnp.full(mapped_ids, sub.num_pages, jnp.int32),
        p2v=jnp.zeros(mapped_pages, jnp.int32),
        holes=jnp.zeros(mapped_pages, jnp.int32),
        refcounts=jnp.zeros(num_virtual, jnp.int32),
        free_ids=free_ids if sub.owns_ids else jnp.zeros(0, jnp.int32),
    )


def create_pool(layout: PoolLayout, *, fill_word: int = 0) -> PoolState:
    """Create an empty pool on the default device.

    Args:
      layout: From ``unified_layout`` or ``static_layout``.
      fill_word: What each uint32 word of the buffers holds at first. Tests pass
        ``0xFFFFFFFF``, which is NaN in bfloat16 and float32, so that a stray read
        shows; no operation of the pool relies on the contents.
    """
    shapes = [
        (num_bytes // (4 * words), words)
        for num_bytes, words in zip(
            layout.buffer_bytes, layout.buffer_words, strict=True
        )
    ]
    return PoolState(
        buffers=tuple(jnp.full(shape, fill_word, jnp.uint32) for shape in shapes),
        tables=tuple(_init_tables(sub) for sub in layout.sub_pools),
        counters=jnp.asarray(
            [(0, 0, sub.first_page, sub.first_page) for sub in layout.sub_pools],
            jnp.int32,
        ),
        error=jnp.zeros(len(layout.sub_pools), jnp.uint32),
        layout=layout,
    )


def pool_struct(
    layout: PoolLayout, *, sharding: jax.sharding.Sharding | None = None
) -> PoolState:
    """Return the shapes of a pool without allocating it, for ahead-of-time compiling.

    Args:
      layout: The layout.
      sharding: Sharding of every leaf.
    """
    shapes = jax.eval_shape(lambda: create_pool(layout))
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
    )


def page_counts(state: PoolState) -> Mapping[str, int]:
    """Return the bound pages of each sub-pool by name. Reads the device."""
    live = jax.device_get(state.counters)[:, LIVE]
    return dict(zip(state.layout.names, (int(n) for n in live), strict=True))
