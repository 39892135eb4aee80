"""MLA decode, absorbed: one query token of every head over cached latent rows.

A step calls the op for layer after layer, each with queries of its own. The plan of
the batch, which the layers share, and the merge are included. Compared are three rows
of the last layer with a float32 reference.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.mla_decode import MlaDecodeConfig
from pallas_kernels.mla_decode import mla_decode as mosaic_mla_decode
from scripts.kernel_benches.case import BenchCase, Program, relative_error
from scripts.kernel_benches.implementations import kernels
from scripts.kernel_benches.random_words import random_values, random_words
from ukv.ids import KernelBlocks
from ukv.implementation import OpCase
from ukv.layout import PoolLayout, unified_layout
from ukv.ops import mla_decode
from ukv.ops.gpu_kernels import paged_part, triton_kernels
from ukv.pool import read_blocks
from ukv.spec import MLASpec

TOUCHED_BYTES = 2 << 30
"""What a step reads at full size, about: layers are added until it does."""

MIN_LAYERS, MAX_LAYERS = 7, 60
"""Layers of a step, which share one plan; Kimi-Linear-48B has 7."""

MOST_QUERIES = 8
"""Arrays of queries, which more layers take in turn: an array costs the host time."""


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
      head_dim: Elements of a row, the last 64 of them only key.
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
        return self.head_dim - self.rope_dim

    @property
    def rope_dim(self) -> int:
        """Elements of a row that are only key."""
        return 64

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


def _reference(shape: Shape, buffers, view, blocks, q) -> jax.Array:
    """Attend the query tokens of one row in float32."""
    rows = read_blocks(buffers[0], view, blocks).astype(jnp.float32)
    rows = rows.reshape(-1, shape.head_dim)[: shape.context]
    multiply = functools.partial(jnp.einsum, precision="highest")
    scores = shape.scale * multiply("qhd,nd->qhn", q.astype(jnp.float32), rows)
    positions = shape.context - shape.query + jnp.arange(shape.query)
    is_seen = jnp.arange(shape.context)[None] <= positions[:, None]
    weights = jax.nn.softmax(jnp.where(is_seen[:, None], scores, -jnp.inf))
    return multiply("qhn,nd->qhd", weights, rows[:, : shape.latent_dim])


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
        return mosaic_mla_decode(
            *operands,
            latent_dim=shape.latent_dim,
            page_size=view.page_size,
            block_offset=view.block_offset,
            dtype=view.dtype,
            **options,
        )[0]
    run = triton_kernels("mla_decode_triton").mla_decode
    part = paged_part(view)
    return run(*operands, part=part, latent_dim=shape.latent_dim, **options)[0]


def _program(implementation, config, *, shape: Shape, num_layers: int) -> Program:
    layout = _layout(shape, num_layers)
    views = [
        layout.part_view("mla", layer=layer, part="latent")
        for layer in range(num_layers)
    ]
    attend = functools.partial(_attend, shape, implementation, config)
    sub = layout.sub_pool("mla")
    max_pages = -(-shape.context // shape.page_size)
    order = np.random.default_rng(0).permutation(sub.num_pages)
    table = order[: shape.batch * max_pages].reshape(shape.batch, max_pages)
    table = (table * sub.blocks_per_page).astype(np.int32)
    words = layout.buffer_words[0]

    def make():
        pool = random_words((layout.pool_bytes // (4 * words), words), shape.dtype)
        q_shape = (shape.batch, shape.query, shape.heads, shape.head_dim)
        queries = tuple(
            random_values(q_shape, shape.query_dtype.name, seed=1 + number)
            for number in range(min(num_layers, MOST_QUERIES))
        )
        out = jnp.zeros((*q_shape[:-1], shape.latent_dim), shape.query_dtype)
        kv_lens = jnp.full(shape.batch, shape.context, jnp.int32)
        outs = (out,) * num_layers
        return queries, outs, (pool,), jnp.asarray(table), kv_lens

    def step(state):
        queries, outs, buffers, ids, kv_lens = state
        outs = tuple(
            attend(view, q, buffers, ids, kv_lens)
            for view, q in zip(views, itertools.cycle(queries), strict=False)
        )
        return queries, outs, buffers, ids, kv_lens

    def error(state):
        queries, outs, buffers, ids, _ = state

        def of_row(row: jax.Array) -> jax.Array:
            q = queries[(num_layers - 1) % len(queries)][row]
            wanted = _reference(shape, buffers, views[-1], ids[row], q)
            return relative_error(outs[-1][row], wanted)

        rows = sorted({0, shape.batch // 2, shape.batch - 1})
        return jnp.max(jax.lax.map(of_row, jnp.asarray(rows)))

    return Program(
        make=make,
        step=step,
        error=error,
        calls=num_layers,
        touched_bytes=num_layers * shape.read_bytes,
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
    op_case = OpCase(
        page_size=shape.page_size,
        storage_dtype=shape.dtype,
        compute_dtype=shape.query_dtype.name,
        widths=(shape.head_dim, shape.latent_dim),
    )
    return BenchCase(
        op="mla_decode",
        shape=dataclasses.asdict(shape),
        moved_bytes=shape.read_bytes + tokens * shape.heads * row_and_out * itemsize,
        flops=2 * shape.batch * int(positions.sum()) * shape.heads * row_and_out,
        # bfloat16 rounds outputs and weights by up to 2**-9 each.
        max_error=1e-2 if itemsize == 2 else 1e-4,
        implementations=(
            ("triton", "xla") if small else kernels("mla_decode", op_case)
        ),
        program=functools.partial(_program, shape=shape, num_layers=num_layers),
        configs={} if small else _configs(shape),
        small=small,
    )


def cases() -> list[BenchCase]:
    """Return the shapes that other libraries were measured on, and variations."""
    batches = (
        (1, 8192),
        (1, 131072),
        (16, 8192),
        (64, 4096),
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
        _case(heads=128, batch=128, context=8192, dtype="float8_e4m3fn"),
    ]
    found += [
        _case(heads=4, head_dim=192, batch=64, context=512),
        _case(**at_64, head_dim=192),
        _case(**at_64, head_dim=320),
    ]
    tiny = {"heads": 4, "head_dim": 80, "num_layers": 2}
    found += [
        _case(small=True, **tiny, batch=3, context=37, page_size=4),
        _case(small=True, **tiny, batch=2, context=9, query=3, page_size=1),
        _case(small=True, **tiny, batch=2, context=70, page_size=16, dtype="float32"),
    ]
    return found
