"""Attention of query tiles over blocks of cached rows, with an online softmax.

Nothing longer than a block of keys is ever gathered, so memory does not grow with the
context. A tile visits the blocks from its window's first key to its last query, in a
loop whose bound is read on the device. Blocks lie on a grid that starts at position
0 of the row, and a block that a query does not see changes none of its bits, so that
a result depends neither on neighbours nor on where pages lie.

What is gathered and not seen may be anything, NaN included: scores and values are
masked by select.

Legend:
    T, Q, C   tiles of a group, queries of a tile, keys of a block
    G, M      key/value heads, query heads of each
    D, E      width of a key, of a value
    s, p      scaled scores, softmax weights
    m, z      running maximum, running sum of exp(s - m)

Source: Milakov and Gimelshein, Online normalizer calculation for softmax
(arXiv:1805.02867); Dao et al., FlashAttention (arXiv:2205.14135), algorithm 1.
"""

import dataclasses
import functools as ft
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from ukv.ops.query_tiles import QueryTiles, steps

# Keys of a block, unless a page is longer.
BLOCK_KV = 256

# Largest number of elements, of scores or of gathered keys and values, that a group
# of tiles works on at once: 128 MiB of float32.
GROUP_ELEMENTS = 2**25

ReadBlock = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""Reads one block of keys and values for each tile.

Takes the tiles' rows int32 ``[T]``, the blocks to read int32 ``[T]`` and which keys
are seen by some query, bool ``[T, C]``. Returns keys ``[T, C, G, D]`` and values
``[T, C, G, E]`` of the queries' dtype, zero where a key is not seen.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring:
    """What turns ``q . k`` into a logit, and which keys take part.

    Attributes:
      softmax_scale: Factor of ``q . k``.
      window: A query at ``i`` sees ``i - window < j <= i``; None sees all ``j <= i``.
      soft_cap: ``c`` in ``c * tanh(s / c)``, applied to scaled scores, or None.
    """

    softmax_scale: float
    window: int | None = None
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        """Check the window and the cap."""
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window} must be 1 or more, or None")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"soft_cap={self.soft_cap} must be positive, or None")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockShape:
    """Static sizes of the work.

    Attributes:
      block_kv: Keys of a block.
      num_kv_heads: G.
      value_width: E.
    """

    block_kv: int
    num_kv_heads: int
    value_width: int


def pages_per_block(page_size: int, max_pages: int) -> int:
    """Return how many pages of a read table make a block of keys."""
    return max(1, min(max_pages, BLOCK_KV // page_size))


def multiply(
    a: Float[Array, "..."],
    b: Float[Array, "..."],
    dimension_numbers: jax.lax.DotDimensionNumbers,
) -> Float32[Array, "..."]:
    """Multiply with float32 sums; float32 operands are not shortened."""
    is_float32 = a.dtype == jnp.float32
    return jax.lax.dot_general(
        a,
        b,
        dimension_numbers,
        precision=jax.lax.Precision.HIGHEST if is_float32 else None,
        preferred_element_type=jnp.float32,
    )


def select_seen(
    entries: Float[Array, "tiles block_kv ..."], is_seen: Bool[Array, "tiles block_kv"]
) -> Float[Array, "tiles block_kv ..."]:
    """Replace by zeros what no query sees: a product with zero would keep NaN."""
    is_seen = is_seen.reshape(*is_seen.shape, *[1] * (entries.ndim - 2))
    return jnp.where(is_seen, entries, jnp.zeros((), entries.dtype))


def attend_tiles(
    q: Float[Array, "tiles block_q num_q_heads key_width"],
    tiles: QueryTiles,
    read_block: ReadBlock,
    scoring: Scoring,
    shape: BlockShape,
    *,
    sinks: Float[Array, " num_q_heads"] | None = None,
) -> tuple[
    Float[Array, "tiles block_q num_q_heads value_width"],
    Float32[Array, "tiles block_q num_q_heads"],
]:
    """Attend every tile to the cached rows of its row of the batch.

    Args:
      q: Queries.
      tiles: Where they stand.
      read_block: Reads keys and values.
      scoring: Scale, window and soft cap.
      shape: Static sizes.
      sinks: Logits that join the denominator only, neither scaled nor capped.

    Returns:
      Outputs of the dtype of ``q`` and the natural log-sum-exp, sinks included. A
      query that sees no key gets zeros and ``-inf``.
    """
    num_tiles, block_q, num_q_heads, key_width = q.shape
    widths = key_width + shape.value_width
    per_tile = shape.block_kv * max(block_q * num_q_heads, shape.num_kv_heads * widths)
    group = min(num_tiles, max(1, GROUP_ELEMENTS // per_tile))
    attend = ft.partial(
        _attend_group,
        read_block=read_block,
        scoring=scoring,
        shape=shape,
        sinks=sinks,
    )
    if group == num_tiles:
        return attend(q, tiles)
    num_groups = -(-num_tiles // group)
    padding = num_groups * group - num_tiles

    def split(x: jax.Array) -> jax.Array:
        # A tile of zeros has no queries, so it reads nothing.
        x = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(num_groups, group, *x.shape[1:])

    results = jax.lax.map(lambda args: attend(*args), jax.tree.map(split, (q, tiles)))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_tiles], results)


def _attend_group(
    q: jax.Array,
    tiles: QueryTiles,
    *,
    read_block: ReadBlock,
    scoring: Scoring,
    shape: BlockShape,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    num_tiles, block_q, num_q_heads, key_width = q.shape
    num_kv_heads, block_kv = shape.num_kv_heads, shape.block_kv
    group_size = num_q_heads // num_kv_heads
    # [T, G, Q * M, D]: the queries that share a key head are the rows of one product.
    q = q.reshape(num_tiles, block_q, num_kv_heads, group_size, key_width)
    q = q.transpose(0, 2, 1, 3, 4)
    q = q.reshape(num_tiles, num_kv_heads, block_q * group_size, key_width)

    query_at = tiles.positions(block_q)
    is_query = tiles.counts(block_q)
    last = tiles.first_positions + tiles.num_queries - 1
    first_seen = jnp.zeros_like(last)
    if scoring.window is not None:
        first_seen = jnp.maximum(tiles.first_positions - (scoring.window - 1), 0)
    first_block = first_seen // block_kv
    num_blocks = jnp.where(tiles.num_queries > 0, last // block_kv + 1 - first_block, 0)

    def visit(
        i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        m, z, weighted = carry
        block = first_block + i
        key_at = steps(block * block_kv, block_kv)
        is_seen = (key_at >= first_seen[:, None]) & (key_at <= last[:, None])
        k, v = read_block(tiles.rows, block, is_seen)
        s = multiply(q, k, (((3,), (3,)), ((0, 1), (0, 2)))) * scoring.softmax_scale
        if scoring.soft_cap is not None:
            s = scoring.soft_cap * jnp.tanh(s / scoring.soft_cap)
        visible = _visible(query_at, is_query, key_at, scoring.window)
        s = s.reshape(num_tiles, num_kv_heads, block_q, group_size, block_kv)
        s = jnp.where(visible[:, None, :, None, :], s, -jnp.inf)
        s = s.reshape(num_tiles, num_kv_heads, block_q * group_size, block_kv)
        m_new = jnp.maximum(m, s.max(axis=-1))
        # A query that has seen nothing yet has m = -inf; exp(-inf - 0) is zero.
        origin = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        p = jnp.exp(s - origin[..., None])
        rescale = jnp.exp(m - origin)
        z = z * rescale + p.sum(axis=-1)
        values = multiply(p.astype(v.dtype), v, (((3,), (1,)), ((0, 1), (0, 2))))
        return m_new, z, weighted * rescale[..., None] + values

    lead = (num_tiles, num_kv_heads, block_q * group_size)
    m, z, weighted = jax.lax.fori_loop(
        0,
        num_blocks.max(),
        visit,
        (
            jnp.full(lead, -jnp.inf, jnp.float32),
            jnp.zeros(lead, jnp.float32),
            jnp.zeros((*lead, shape.value_width), jnp.float32),
        ),
    )

    def unfold(x: jax.Array) -> jax.Array:
        """Turn ``[T, G, Q * M, ...]`` into ``[T, Q, G * M, ...]``."""
        x = x.reshape(num_tiles, num_kv_heads, block_q, group_size, *x.shape[3:])
        x = jnp.moveaxis(x, 2, 1)
        return x.reshape(num_tiles, block_q, num_q_heads, *x.shape[4:])

    out, lse = _normalise(unfold(m), unfold(z), unfold(weighted), sinks)
    return out.astype(q.dtype), lse


def _visible(
    query_at: Int32[Array, "tiles block_q"],
    is_query: Bool[Array, "tiles block_q"],
    key_at: Int32[Array, "tiles block_kv"],
    window: int | None,
) -> Bool[Array, "tiles block_q block_kv"]:
    """Return which query sees which key."""
    behind = query_at[:, :, None] - key_at[:, None, :]
    visible = (behind >= 0) & is_query[:, :, None]
    if window is not None:
        visible &= behind < window
    return visible


def _normalise(
    m: Float32[Array, "tiles block_q num_q_heads"],
    z: Float32[Array, "tiles block_q num_q_heads"],
    weighted: Float32[Array, "tiles block_q num_q_heads value_width"],
    sinks: Float[Array, " num_q_heads"] | None,
) -> tuple[
    Float32[Array, "tiles block_q num_q_heads value_width"],
    Float32[Array, "tiles block_q num_q_heads"],
]:
    """Divide by the softmax sum, and add the sinks to it before."""
    # Not "above 0": the sum is NaN where a key was, and that must show.
    has_keys = z != 0
    if sinks is not None:
        logits = jnp.broadcast_to(sinks.astype(jnp.float32), m.shape)
        m_new = jnp.maximum(m, logits)
        rescale = jnp.exp(m - m_new)
        z = z * rescale + jnp.exp(logits - m_new)
        weighted = weighted * rescale[..., None]
        m = m_new
    safe = jnp.where(has_keys, z, 1.0)
    out = jnp.where(has_keys[..., None], weighted / safe[..., None], 0.0)
    return out, jnp.where(has_keys, m + jnp.log(safe), -jnp.inf)
