"""Decode rows among extend rows: their part of a packed batch, and the way back.

A packed batch may hold rows of many query tokens and rows of one, which a decode
kernel does best: it cuts their keys where an extend kernel has one piece of work for
each query token, however long its row.

    query_lens       5          1    0    1
    packed tokens    0 1 2 3 4  5         6
    decode rows                 5         6      one for each row; the others are empty
"""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped


class DecodeRows(flax.struct.PyTreeNode):
    """Which rows have one query token, and what else there is.

    Attributes:
      is_decode: bool ``[rows]``.
      tokens: int32 ``[rows]``, packed token of each such row; the length of the packed
        axis for another.
      kv_lens: int32 ``[rows]``, its tokens; 0 for another row.
      other_lens: int32 ``[rows]``, tokens of the rows that are no decode rows; 0 for
        those that are.
    """

    is_decode: jax.Array
    tokens: jax.Array
    kv_lens: jax.Array
    other_lens: jax.Array

    def take(
        self, packed: Shaped[Array, "num_tokens ..."]
    ) -> Shaped[Array, "rows 1 ..."]:
        """Return the token of each decode row; another row gets some token."""
        return jnp.take(packed, self.tokens, axis=0, mode="clip")[:, None]

    def put(
        self,
        packed: Shaped[Array, "num_tokens ..."],
        found: Shaped[Array, "rows 1 ..."],
    ) -> Shaped[Array, "num_tokens ..."]:
        """Write what was found for the decode rows over their tokens."""
        return packed.at[self.tokens].set(found[:, 0], mode="drop")


def find_decode_rows(
    cu_query_lens: Int32[Array, " bounds"],
    kv_lens: Int32[Array, " rows"],
    *,
    num_tokens: int,
) -> DecodeRows:
    """Find the rows of one query token in a packed batch.

    Args:
      cu_query_lens: Exclusive prefix sum of the query lengths, one more than rows.
      kv_lens: Tokens of each row, its query tokens included.
      num_tokens: Length of the packed axis.
    """
    first, end = cu_query_lens[:-1], cu_query_lens[1:]
    is_decode = end - first == 1
    return DecodeRows(
        is_decode=is_decode,
        tokens=jnp.where(is_decode, first, num_tokens),
        kv_lens=jnp.where(is_decode, kv_lens, 0),
        other_lens=jnp.where(is_decode, 0, kv_lens),
    )
