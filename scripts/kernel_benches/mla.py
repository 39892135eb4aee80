"""MLA decode, absorbed: one query token of every head over cached latent rows.

A step calls the op for layer after layer, each with queries of its own. The plan of
the batch, which the layers share, and the merge are included.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.mla_decode import MlaDecodeConfig
from pallas_kernels.mla_decode import mla_decode as mosaic_mla_decode
from scripts.kernel_benches.case import BenchCase, Prepared
from ukv.ids import KernelBlocks
from ukv.layout import PoolLayout, unified_layout
from ukv.ops import mla_decode
from ukv.ops.gpu_kernels import paged_part, triton_kernels
from ukv.pool import read_blocks
from ukv.spec import MLASpec

CHECKED_ROWS = 2
"""Rows that are compared with a float64 reference."""

TOUCHED_BYTES = 2 << 30
"""What a step reads at full size, about: layers are added until it does."""

MIN_LAYERS, MAX_LAYERS = 7, 60
"""Layers of a step, which share one plan; Kimi-Linear-48B has 7."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One shape; the names are those of the record.

    Attributes:
      heads: Query heads.
      batch: Rows.
      context: Tokens of a row.
      query: Query tokens of a row, the last of the context.
      page_size: Tokens per page.
      dtype: Of the pool; queries are bfloat16, or float32 for a float32 pool.
      head_dim: Elements of a row, eight ninths of them latent: 512 + 64.
    """

    heads: int
    batch: int
    context: int
    query: int = 1
    page_size: int = 64
    dtype: str = "bfloat16"
    head_dim: int = 576

    @property
    def latent_dim(self) -> int:
        """Elements of a row that are key and value."""
        return self.head_dim // 9 * 8

    @property
    def rope_dim(self) -> int:
        """Elements of a row that are only key."""
        return self.head_dim - self.latent_dim

    @property
    def read_bytes(self) -> int:
        """Bytes of the cached rows."""
        itemsize = jnp.dtype(self.dtype).itemsize
        return self.batch * self.context * self.head_dim * itemsize

    @property
    def query_dtype(self) -> jnp.dtype:
        """Dtype of queries and outputs."""
        return jnp.dtype("float32" if self.dtype == "float32" else "bfloat16")

    @property
    def scale(self) -> float:
        """Factor of ``q . k`` for heads of 128 elements without position."""
        return (128 + self.rope_dim) ** -0.5


def _layout(shape: Shape, num_layers: int) -> PoolLayout:
    spec = MLASpec(
        name="mla",
        num_layers=num_layers,
        page_size=shape.page_size,
        latent_dim=shape.latent_dim,
        rope_dim=shape.rope_dim,
        dtype=jnp.dtype(shape.dtype),
    )
    pages = shape.batch * -(-shape.context // shape.page_size) + 8
    page_bytes = num_layers * shape.page_size * shape.head_dim * spec.dtype.itemsize
    return unified_layout([spec], pool_bytes=pages * page_bytes)


@functools.partial(jax.jit, static_argnames=("rows", "words", "dtype"))
def _random_pool(key: jax.Array, rows: int, words: int, dtype: str) -> jax.Array:
    per_word = 4 // jnp.dtype(dtype).itemsize

    def fill(key: jax.Array) -> jax.Array:
        values = jax.random.normal(key, (words, per_word), jnp.float32).astype(dtype)
        if per_word == 1:
            values = values[:, 0]
        return jax.lax.bitcast_convert_type(values, jnp.uint32)

    return jax.lax.map(fill, jax.random.split(key, rows), batch_size=min(rows, 4096))


def _reference(shape: Shape, buffers, view, table: np.ndarray, q, row) -> np.ndarray:
    """Attend the query tokens of one row in float64."""
    rows = read_blocks(buffers[0], view, jnp.asarray(table[row]))
    rows = np.asarray(rows, np.float64).reshape(-1, shape.head_dim)[: shape.context]
    # A product of matrices: an einsum of this size takes seconds.
    scores = shape.scale * (np.asarray(q[row], np.float64) @ rows.T)
    position = shape.context - shape.query + np.arange(shape.query)
    hidden = np.arange(shape.context) > position[:, None]
    scores[np.broadcast_to(hidden[:, None], scores.shape)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ rows[:, : shape.latent_dim]


def _attend(shape: Shape, implementation, config, view, q, buffers, ids, kv_lens):
    if config is None:
        out, _ = mla_decode(
            q,
            buffers,
            view,
            KernelBlocks(ids=ids, sub_pool="mla"),
            kv_lens=kv_lens,
            latent_dim=shape.latent_dim,
            softmax_scale=shape.scale,
            implementation=implementation,
        )
        return out
    operands = q, buffers[0], ids, kv_lens
    options = {"softmax_scale": shape.scale, "config": config}
    if implementation == "mosaic_gpu":
        place = {"page_size": view.page_size, "block_offset": view.block_offset}
        return mosaic_mla_decode(*operands, **place, **options)[0]
    run = triton_kernels("mla_decode_triton").mla_decode
    part = paged_part(view)
    return run(*operands, part=part, latent_dim=shape.latent_dim, **options)[0]


def _prepare(implementation, config, *, shape: Shape, num_layers: int) -> Prepared:
    layout = _layout(shape, num_layers)
    views = [
        layout.part_view("mla", layer=layer, part="latent")
        for layer in range(num_layers)
    ]
    attend = functools.partial(_attend, shape, implementation, config)

    def step(state):
        queries, outs, buffers, ids, kv_lens = state
        outs = tuple(
            attend(view, q, buffers, ids, kv_lens)
            for view, q in zip(views, queries, strict=True)
        )
        return queries, outs, buffers, ids, kv_lens

    words = layout.buffer_words[0]
    pool = _random_pool(
        jax.random.key(0, impl="rbg"),
        layout.pool_bytes // (4 * words),
        words,
        shape.dtype,
    )
    sub = layout.sub_pool("mla")
    max_pages = -(-shape.context // shape.page_size)
    order = np.random.default_rng(0).permutation(sub.num_pages)
    table = order[: shape.batch * max_pages].reshape(shape.batch, max_pages)
    table = (table * sub.blocks_per_page).astype(np.int32)
    q_shape = (shape.batch, shape.query, shape.heads, shape.head_dim)
    keys = jax.random.split(jax.random.key(1), num_layers)
    queries = tuple(jax.random.normal(key, q_shape, shape.query_dtype) for key in keys)
    outs = tuple(jnp.zeros_like(q[..., : shape.latent_dim]) for q in queries)
    kv_lens = jnp.full(shape.batch, shape.context, jnp.int32)
    state = (queries, outs, (pool,), jnp.asarray(table), kv_lens)

    # A donated argument that nothing reads would be dropped, and with it its address.
    jitted = jax.jit(step, donate_argnums=0, keep_unused=True)
    state = jitted(state)
    found = np.asarray(state[1][-1], np.float64)
    error = 0.0
    for row in np.unique(np.linspace(0, shape.batch - 1, CHECKED_ROWS).astype(int)):
        queries, _, buffers, _, _ = state
        wanted = _reference(shape, buffers, views[-1], table, queries[-1], row)
        # Not max(): NaN must stay.
        error = np.maximum(
            error, np.abs(found[row] - wanted).max() / np.abs(wanted).max()
        )
    return Prepared(
        step=jitted,
        state=state,
        calls=num_layers,
        touched_bytes=num_layers * shape.read_bytes,
        error=float(error),
    )


def _configs(shape: Shape):
    make = triton_kernels("mla_decode_triton").MlaDecodeTritonConfig
    return {
        "mosaic_gpu": (
            MlaDecodeConfig(num_ctas=132),
            MlaDecodeConfig(min_tiles=1),
            MlaDecodeConfig(min_tiles=4),
        ),
        "triton": (
            make(tile_bytes=32768, num_stages=3),
            make(num_stages=1),
            make(most_chunk=2048),
            make(num_programs=264, tile_bytes=32768, num_stages=2),
        ),
    }


def _case(*, small: bool = False, num_layers: int | None = None, **numbers):
    shape = Shape(**numbers)
    if num_layers is None:
        num_layers = TOUCHED_BYTES // shape.read_bytes
        num_layers = min(max(num_layers, MIN_LAYERS), MAX_LAYERS)
    tokens = shape.batch * shape.query
    positions = np.arange(shape.context - shape.query, shape.context) + 1
    itemsize = shape.query_dtype.itemsize
    row_and_out = shape.head_dim + shape.latent_dim
    full: tuple = ("mosaic_gpu", "triton")
    if shape.dtype != "bfloat16":
        full = ("triton",)
    return BenchCase(
        op="mla_decode",
        shape=dataclasses.asdict(shape),
        moved_bytes=shape.read_bytes + tokens * shape.heads * row_and_out * itemsize,
        flops=2 * shape.batch * int(positions.sum()) * shape.heads * row_and_out,
        # bfloat16 rounds outputs and weights by up to 2**-9 each.
        max_error=1e-2 if itemsize == 2 else 1e-4,
        implementations=("triton", "xla") if small else full,
        prepare=functools.partial(_prepare, shape=shape, num_layers=num_layers),
        configs={} if small else _configs(shape),
        small=small,
    )


def cases() -> list[BenchCase]:
    """Return the shapes that other libraries were measured on, and variations."""
    batches = (
        (1, 8192),
        (1, 131072),
        (16, 8192),
        (64, 8192),
        (128, 4096),
        (128, 8192),
        (256, 2048),
    )
    found = [
        _case(heads=heads, batch=batch, context=context)
        for heads in (32, 128)
        for batch, context in batches
    ]
    at_64 = {"heads": 32, "batch": 64, "context": 8192}
    found += [_case(**at_64, page_size=page_size) for page_size in (16, 32, 128)]
    found += [_case(**at_64, query=query) for query in (2, 4)]
    found += [
        _case(heads=64, batch=64, context=8192),
        _case(heads=16, batch=64, context=8192),
        _case(heads=32, batch=128, context=8192, dtype="float8_e4m3fn"),
    ]
    tiny = {"heads": 4, "head_dim": 36, "num_layers": 2}
    found += [
        _case(small=True, **tiny, batch=3, context=37, page_size=4),
        _case(small=True, **tiny, batch=2, context=9, query=3, page_size=1),
        _case(small=True, **tiny, batch=2, context=70, page_size=16, dtype="float32"),
    ]
    return found
