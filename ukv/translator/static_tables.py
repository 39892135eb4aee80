"""Buffers of translated indices that keep their address from step to step.

A jitted step replays fastest when every buffer that it reads keeps its address, so
tables and write locations are allocated once per bucket, donated to each step and
returned by it. They are refreshed wholly: whatever a larger batch left in them is
overwritten, so no stale id can write into a page that changed hands.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import flax.struct
import jax
import jax.numpy as jnp

from ukv.errors import SpecError
from ukv.ids import ABSENT_BLOCK, KernelBlocks, WriteLocations
from ukv.pool import PoolState
from ukv.translator.batch import StepBatch
from ukv.translator.translator import KVIndexTranslator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bucket:
    """Static shape of a step.

    Attributes:
      num_rows: Rows of the batch, padding included.
      max_pages: Pages of a row, for each growing sub-pool.
      num_tokens: New tokens of all rows together, padding included.
    """

    num_rows: int
    max_pages: int
    num_tokens: int

    def __post_init__(self) -> None:
        """Check that every size is positive."""
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if size < 1:
                raise SpecError(f"bucket {field.name}={size} must be 1 or more")


class StaticTables(flax.struct.PyTreeNode):
    """Translated indices of one bucket.

    Attributes:
      reads: By growing sub-pool, ``[num_rows, max_pages]``.
      writes: By growing sub-pool, ``[num_tokens]``.
      slots: By state sub-pool, ``[num_rows]``.
      padding: What ``reads`` holds past a row's live pages.
    """

    reads: Mapping[str, KernelBlocks]
    writes: Mapping[str, WriteLocations]
    slots: Mapping[str, KernelBlocks]
    padding: int = flax.struct.field(pytree_node=False)


def make_static_tables(
    translator: KVIndexTranslator, buckets: Sequence[Bucket], *, padding: int = 0
) -> Mapping[Bucket, StaticTables]:
    """Allocate the tables of each bucket, all of them padding.

    Args:
      translator: The pool's translator.
      buckets: The shapes that steps are compiled for.
      padding: What the backend wants past a row's live pages.
    """
    tables = {}
    for bucket in buckets:
        reads, writes, slots = {}, {}, {}
        for sub in translator.layout.sub_pools:
            name = sub.name
            if not sub.spec.grows:
                ids = jnp.full(bucket.num_rows, ABSENT_BLOCK, jnp.int32)
                slots[name] = KernelBlocks(ids=ids, sub_pool=name)
                continue
            shape = (bucket.num_rows, bucket.max_pages)
            reads[name] = KernelBlocks(
                ids=jnp.full(shape, padding, jnp.int32), sub_pool=name
            )
            writes[name] = WriteLocations(
                blocks=jnp.full(bucket.num_tokens, ABSENT_BLOCK, jnp.int32),
                offsets=jnp.zeros(bucket.num_tokens, jnp.int32),
                sub_pool=name,
            )
        tables[bucket] = StaticTables(
            reads=reads, writes=writes, slots=slots, padding=padding
        )
    return tables


def _into(old: jax.Array, new: jax.Array) -> jax.Array:
    """Return ``new`` in a way that keeps ``old`` an argument of the jitted step.

    JAX drops an argument that nothing uses, and with it the donation that lets the
    result take over the address. XLA folds the select away.
    """
    if old.shape != new.shape:
        raise SpecError(
            f"the batch has indices of shape {new.shape}, the bucket's tables "
            f"{old.shape}: build the batch for this bucket"
        )
    return jnp.where(jnp.asarray(True), new, old)


def refresh_static_tables(
    translator: KVIndexTranslator,
    tables: StaticTables,
    state: PoolState,
    batch: StepBatch,
) -> tuple[PoolState, StaticTables]:
    """Overwrite every entry of a bucket's tables for this batch.

    Args:
      translator: The pool's translator.
      tables: The bucket's tables; donate them to the jitted step and return them.
      state: The pool, after the pages of the step were allocated.
      batch: The step, in the bucket's shape.

    Raises:
      SpecError: The batch has another shape than the bucket.
    """
    reads, writes, slots = {}, {}, {}
    for name, old in tables.reads.items():
        state, table = translator.index_table_for_batch(
            state, name, batch, padding=tables.padding
        )
        reads[name] = jax.tree.map(_into, old, table.blocks)
        state, locations = translator.write_locations_for(state, name, batch)
        writes[name] = jax.tree.map(_into, tables.writes[name], locations)
    for name, old in tables.slots.items():
        state, found = translator.slots_for(state, name, batch)
        slots[name] = jax.tree.map(_into, old, found)
    return state, tables.replace(reads=reads, writes=writes, slots=slots)
