"""Packed rows of unequal length, cut into chunks that kernels share out."""

import jax.numpy as jnp
from jaxtyping import Array, Int32

CHUNK = 64

Checkpoints = tuple[Int32[Array, "rows checkpoints"], Int32[Array, "rows checkpoints"]]


def cut_into_chunks(
    cu_query_lens: Int32[Array, " bounds"], num_tokens: int
) -> tuple[Array, Array, Array, Array, Array]:
    """Cuts packed rows, and the tokens after the last one, into chunks.

    Example: rows of 130 and 1 token in an array of 140 are chunks of 64, 64, 2 and 1
    tokens, and one of the 9 tokens of no row.

    Args:
        cu_query_lens: exclusive prefix sum of the lengths.
        num_tokens: tokens of the arrays.

    Returns:
        Of each chunk the first token, the number of tokens (0 past the last chunk) and
        the row; of each row, the last being that of the tokens of no row, the first
        chunk and the number of chunks.
    """
    num_rows = cu_query_lens.shape[0] - 1
    starts = cu_query_lens
    ends = jnp.concatenate([cu_query_lens[1:], jnp.full((1,), num_tokens, jnp.int32)])
    lens = ends - starts
    counts = -(-lens // CHUNK)
    last_chunks = jnp.cumsum(counts, dtype=jnp.int32)
    first_chunks = last_chunks - counts
    max_chunks = (num_tokens + (CHUNK - 1) * (num_rows + 1)) // CHUNK
    chunk = jnp.arange(max_chunks, dtype=jnp.int32)
    # Not a search: it would be a loop, which the host drives.
    is_behind = last_chunks[None, :] <= chunk[:, None]
    rows = jnp.minimum(jnp.sum(is_behind, axis=1, dtype=jnp.int32), num_rows)
    done = (chunk - first_chunks[rows]) * CHUNK
    sizes = jnp.clip(lens[rows] - done, 0, CHUNK)
    return starts[rows] + done, sizes, rows, first_chunks, counts
