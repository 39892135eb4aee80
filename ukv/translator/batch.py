"""The index arrays of one step, in virtual ids: what the translator reads."""

from collections.abc import Mapping

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from ukv.ids import VirtualPages
from ukv.pytree import Leaf


class StepBatch(flax.struct.PyTreeNode):
    """Rows of one step: their pages, their lengths, their new tokens.

    The new tokens are packed: those of row r are ``cu_query_lens[r]`` up to
    ``cu_query_lens[r + 1]``; tokens past the last row, and all tokens of a padded row,
    are padding. A decode step keeps one token for every row, padded or not, so that
    a finished row in the middle moves nothing.

    Attributes:
      page_tables: By owner: ``[rows, max_pages]`` virtual ids for a sub-pool that
        grows with tokens, ``[rows]`` for a state.
      cu_query_lens: int32 ``[rows + 1]``, exclusive prefix sum of the new tokens.
      kv_lens: int32 ``[rows]``, tokens of each row after the step; 0 for a padded row.
      num_tokens: Static length of the packed token axis, padding included.
    """

    page_tables: Mapping[str, VirtualPages]
    cu_query_lens: Leaf
    kv_lens: Leaf
    num_tokens: int = flax.struct.field(pytree_node=False)

    @property
    def query_lens(self) -> Int32[Array, " rows"]:
        """New tokens of each row."""
        return self.cu_query_lens[1:] - self.cu_query_lens[:-1]

    @property
    def context_lens(self) -> Int32[Array, " rows"]:
        """Tokens of each row before the step; 0 for a padded row."""
        return jnp.maximum(self.kv_lens - self.query_lens, 0)

    @property
    def is_live(self) -> Bool[Array, " rows"]:
        """Which rows take part in the step; the others are padding."""
        return (self.query_lens > 0) & (self.kv_lens > 0)


class TokenPlaces(flax.struct.PyTreeNode):
    """Where each packed token stands: its row, and its position in the sequence.

    Attributes:
      rows: int32 ``[num_tokens]``, in range also for padding.
      positions: int32 ``[num_tokens]``, from 0.
      is_token: bool ``[num_tokens]``, False for padding.
    """

    rows: Leaf
    positions: Leaf
    is_token: Leaf


def token_places(batch: StepBatch) -> TokenPlaces:
    """Return the row and position of each packed token.

    Example: cu_query_lens (0, 2, 3) and kv_lens (10, 1) place the tokens at
    rows (0, 0, 1) and positions (8, 9, 0).
    """
    token = jnp.arange(batch.num_tokens, dtype=jnp.int32)
    last_row = batch.kv_lens.shape[0] - 1
    row = jnp.searchsorted(
        batch.cu_query_lens[1:], token, side="right", method="compare_all"
    )
    row = jnp.minimum(row.astype(jnp.int32), last_row)
    position = batch.context_lens[row] + token - batch.cu_query_lens[row]
    is_token = (token < batch.cu_query_lens[-1]) & batch.is_live[row]
    return TokenPlaces(
        rows=row, positions=jnp.where(is_token, position, 0), is_token=is_token
    )
