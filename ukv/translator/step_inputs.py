"""What a model's forward pass takes beside weights and pool: translated indices."""

from collections.abc import Mapping

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from ukv.ids import KernelBlocks, WriteLocations
from ukv.pool import PoolState
from ukv.pytree import Leaf
from ukv.translator.batch import StepBatch, token_places
from ukv.translator.static_tables import StaticTables, refresh_static_tables
from ukv.translator.translator import KVIndexTranslator


class StepInputs(flax.struct.PyTreeNode):
    """Index arrays of one step; the same for every layer of a kind.

    Attributes:
      token_ids: int32 ``[num_tokens]``, packed; anything where padded.
      positions: int32 ``[num_tokens]``, from 0; 0 where padded.
      is_token: bool ``[num_tokens]``, False where padded.
      cu_query_lens: int32 ``[rows + 1]``, exclusive prefix sum of the new tokens.
      kv_lens: int32 ``[rows]``, tokens of each row after the step; 0 where padded.
      reads: By growing sub-pool, ``[rows, max_pages]``.
      writes: By growing sub-pool, ``[num_tokens]``.
      slots: By state sub-pool, ``[rows]``.
      logit_tokens: int32 ``[num_logits]``, packed tokens whose logits are wanted.
      max_query_len: Static bound of the new tokens of a row. 1 means a decode step:
        token r is the one new token of row r.
    """

    token_ids: Leaf
    positions: Leaf
    is_token: Leaf
    cu_query_lens: Leaf
    kv_lens: Leaf
    reads: Mapping[str, KernelBlocks]
    writes: Mapping[str, WriteLocations]
    slots: Mapping[str, KernelBlocks]
    logit_tokens: Leaf
    max_query_len: int = flax.struct.field(pytree_node=False)

    @property
    def is_decode(self) -> bool:
        """Whether every row has exactly one new token, padded rows included."""
        return self.max_query_len == 1

    @property
    def query_lens(self) -> Int32[Array, " rows"]:
        """New tokens of each row."""
        return self.cu_query_lens[1:] - self.cu_query_lens[:-1]

    @property
    def is_live(self) -> Bool[Array, " rows"]:
        """Which rows take part in the step."""
        return (self.query_lens > 0) & (self.kv_lens > 0)

    @property
    def is_fresh(self) -> Bool[Array, " rows"]:
        """Which rows begin a sequence: their states start from zero."""
        return self.kv_lens == self.query_lens


def step_inputs(
    batch: StepBatch,
    tables: StaticTables,
    token_ids: Int32[Array, " num_tokens"],
    *,
    max_query_len: int,
    logit_tokens: Int32[Array, " num_logits"] | None = None,
) -> StepInputs:
    """Join a batch, its translated tables and its tokens.

    Args:
      batch: The step.
      tables: Refreshed for this batch.
      token_ids: ``[num_tokens]``.
      max_query_len: Static bound of the new tokens of a row; 1 for a decode step.
      logit_tokens: Packed tokens whose logits are wanted; None for the last new token
        of each row.
    """
    places = token_places(batch)
    if logit_tokens is None:
        # In range also for a padded row, whose logits mean nothing.
        logit_tokens = jnp.maximum(batch.cu_query_lens[1:] - 1, 0)
    return StepInputs(
        token_ids=token_ids,
        positions=places.positions,
        is_token=places.is_token,
        cu_query_lens=batch.cu_query_lens,
        kv_lens=jnp.where(batch.is_live, batch.kv_lens, 0),
        reads=tables.reads,
        writes=tables.writes,
        slots=tables.slots,
        logit_tokens=logit_tokens,
        max_query_len=max_query_len,
    )


def translated_step(
    translator: KVIndexTranslator,
    tables: StaticTables,
    state: PoolState,
    batch: StepBatch,
    token_ids: Int32[Array, " num_tokens"],
    *,
    max_query_len: int,
    logit_tokens: Int32[Array, " num_logits"] | None = None,
) -> tuple[PoolState, StaticTables, StepInputs]:
    """Refresh the tables for a batch and return the inputs of its forward pass.

    Raises:
      SpecError: The batch has another shape than the tables.
    """
    state, tables = refresh_static_tables(translator, tables, state, batch)
    inputs = step_inputs(
        batch,
        tables,
        token_ids,
        max_query_len=max_query_len,
        logit_tokens=logit_tokens,
    )
    return state, tables, inputs
