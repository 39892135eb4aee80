"""MLA extend: prompts with and without a prefix, few tokens behind one, mixed batches.

A step calls the op for layer after layer, each on its own latent rows and with
queries of its own. Where the op expands rows into keys and values, that is included in
the time; in the operations counted it is anyway. Compared are three query tokens of the
last layer with a float32 reference.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.extend import ExtendConfig
from scripts.kernel_benches.case import BenchCase, Program, relative_error
from scripts.kernel_benches.implementations import kernels
from scripts.kernel_benches.random_words import random_values, random_words
from ukv.ids import KernelBlocks
from ukv.implementation import OpCase
from ukv.layout import PoolLayout, unified_layout
from ukv.ops import mla_extend
from ukv.ops.extend_kernels import mla_packed
from ukv.pool import read_blocks
from ukv.spec import MLASpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One shape; the names are those of the record.

    Attributes:
      heads: Heads.
      batch: Rows.
      context: Tokens of a row before its query tokens.
      query: Query tokens of a row.
      page_size: Tokens per page.
      dtype: Of queries and of the pool.
      head_dim: Elements of a key, a third of them rotated.
      decode_rows: Rows of one query token in the same batch.
      decode_context: Their tokens.
    """

    heads: int
    batch: int
    context: int
    query: int
    page_size: int = 64
    dtype: str = "bfloat16"
    head_dim: int = 192
    decode_rows: int = 0
    decode_context: int = 0

    @property
    def rope_dim(self) -> int:
        """Elements of a key that all heads share."""
        return self.head_dim // 3

    @property
    def nope_dim(self) -> int:
        """Other elements of a key; also those of a value."""
        return self.head_dim - self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Elements of a cached row that are expanded."""
        return 4 * self.nope_dim

    @property
    def kv_len(self) -> int:
        """Tokens of a row."""
        return self.context + self.query

    @property
    def query_lens(self) -> np.ndarray:
        """Query tokens of all rows, those that decode behind the others."""
        return np.repeat([self.query, 1], [self.batch, self.decode_rows])

    @property
    def kv_lens(self) -> np.ndarray:
        """Tokens of all rows."""
        lens = [self.kv_len, self.decode_context]
        return np.repeat(lens, [self.batch, self.decode_rows])

    @property
    def max_pages(self) -> int:
        """Pages of the longest row."""
        return int(-(-self.kv_lens.max() // self.page_size))

    @property
    def flops(self) -> int:
        """The fewest operations: rows expanded or absorbed, whichever is less."""
        return self._row_flops(self.batch, self.context, self.query) + self._row_flops(
            self.decode_rows, self.decode_context - 1, 1
        )

    def _row_flops(self, rows: int, context: int, query: int) -> int:
        pairs = query * context + query * (query + 1) // 2
        # Keys and values of each head, and the products that make them, once a place.
        kv_flops = 4 * self.latent_dim * self.nope_dim * (context + query)
        expanded = 2 * pairs * (self.head_dim + self.nope_dim) + kv_flops
        # Queries into the latent space, and outputs out of it.
        q_flops = 4 * self.latent_dim * self.nope_dim * query
        absorbed = 2 * pairs * (2 * self.latent_dim + self.rope_dim) + q_flops
        return rows * self.heads * min(expanded, absorbed)

    @property
    def scale(self) -> float:
        """Factor of ``q . k``."""
        return self.head_dim**-0.5


def _reference(shape: Shape, rows, q, w_kc, w_vc, position: int) -> jax.Array:
    """Attend the query at a position in float32, absorbed."""
    rows, q, w_kc, w_vc = (x.astype(jnp.float32) for x in (rows, q, w_kc, w_vc))
    rows = rows.reshape(-1, shape.latent_dim + shape.rope_dim)
    rows = rows[: position + 1]
    multiply = functools.partial(jnp.einsum, precision="highest")
    absorbed = multiply("hd,hdc->hc", q[:, : shape.nope_dim], w_kc)
    absorbed = jnp.concatenate([absorbed, q[:, shape.nope_dim :]], axis=1)
    weights = jax.nn.softmax(multiply("hc,nc->hn", absorbed, rows) * shape.scale)
    latents = multiply("hn,nc->hc", weights, rows[:, : shape.latent_dim])
    return multiply("hc,hdc->hd", latents, w_vc)


def _attend(
    shape: Shape, implementation, config, view, q, buffers, weights, ids, *lens
):
    lengths = dict(zip(("cu_query_lens", "kv_lens"), lens, strict=True))
    options = {"softmax_scale": shape.scale}
    if config is not None:
        operands = q, *weights, buffers, view, ids
        return mla_packed(*operands, **lengths, **options, config=config)[0]
    return mla_extend(
        q,
        *weights,
        buffers,
        view,
        KernelBlocks(ids=ids, sub_pool="mla"),
        **lengths,
        **options,
        max_query_len=shape.query,
        implementation=implementation,
    )[0]


def _layout(shape: Shape, num_layers: int) -> PoolLayout:
    spec = MLASpec(
        name="mla",
        num_layers=num_layers,
        page_size=shape.page_size,
        latent_dim=shape.latent_dim,
        rope_dim=shape.rope_dim,
        dtype=jnp.dtype(shape.dtype),
    )
    pages = len(shape.kv_lens) * shape.max_pages + 8
    row_bytes = (shape.latent_dim + shape.rope_dim) * spec.dtype.itemsize
    pool_bytes = pages * shape.page_size * num_layers * row_bytes
    return unified_layout([spec], pool_bytes=pool_bytes)


def _program(implementation, config, *, shape: Shape, num_layers: int) -> Program:
    dtype = jnp.dtype(shape.dtype)
    layout = _layout(shape, num_layers)
    views = [
        layout.part_view("mla", layer=layer, part="latent")
        for layer in range(num_layers)
    ]
    attend = functools.partial(_attend, shape, implementation, config)
    sub = layout.sub_pool("mla")
    order = np.random.default_rng(0).permutation(sub.num_pages)
    num_rows = len(shape.kv_lens)
    table = order[: num_rows * shape.max_pages].reshape(num_rows, -1)
    table = (table * sub.blocks_per_page).astype(np.int32)
    words = layout.buffer_words[0]
    starts = np.cumsum([0, *shape.query_lens])
    tokens = int(starts[-1])

    def make():
        pool = random_words((layout.pool_bytes // (4 * words), words), shape.dtype)
        q_shape = (tokens, shape.heads, shape.head_dim)
        w_shape = (shape.heads, shape.nope_dim, shape.latent_dim)
        queries = tuple(
            random_values(q_shape, shape.dtype, seed=3 + layer)
            for layer in range(num_layers)
        )
        weights = tuple(
            random_values(w_shape, shape.dtype, seed=seed)
            * jnp.asarray(shape.latent_dim**-0.5, dtype)
            for seed in (1, 2)
        )
        out = jnp.zeros((*q_shape[:-1], shape.nope_dim), dtype)
        bounds = jnp.asarray(starts, jnp.int32)
        kv_lens = jnp.asarray(shape.kv_lens, jnp.int32)
        rest = weights, jnp.asarray(table), bounds, kv_lens
        return queries, (out,) * num_layers, (pool,), *rest

    def step(state):
        queries, _, *rest = state
        outs = tuple(
            attend(view, q, *rest) for view, q in zip(views, queries, strict=True)
        )
        return queries, outs, *rest

    def error(state):
        queries, outs, buffers, weights, ids, *_ = state
        errors = []
        for at in sorted({0, tokens // 3, tokens - 1}):
            row = int(np.searchsorted(starts[1:], at, side="right"))
            position = int(shape.kv_lens[row] - starts[row + 1] + at)
            rows = read_blocks(buffers[0], views[-1], ids[row])
            wanted = _reference(shape, rows, queries[-1][at], *weights, position)
            errors.append(relative_error(outs[-1][at], wanted))
        return jnp.max(jnp.stack(errors))

    return Program(
        make=make,
        step=step,
        error=error,
        calls=num_layers,
        touched_bytes=num_layers * _moved_bytes(shape),
    )


def _moved_bytes(shape: Shape) -> int:
    """Bytes of cached rows, queries and outputs."""
    cached = int(shape.kv_lens.sum()) * (shape.latent_dim + shape.rope_dim)
    tokens = int(shape.query_lens.sum()) * shape.heads
    elements = cached + tokens * (shape.head_dim + shape.nope_dim)
    return elements * jnp.dtype(shape.dtype).itemsize


def _case(num_layers: int, *, small: bool = False, **numbers) -> BenchCase:
    shape = Shape(**numbers)
    op_case = OpCase(
        page_size=shape.page_size,
        storage_dtype=shape.dtype,
        compute_dtype=shape.dtype,
        widths=(
            shape.latent_dim + shape.rope_dim,
            shape.latent_dim,
            shape.nope_dim,
            shape.nope_dim,
        ),
    )
    configs = (ExtendConfig(block_kv=64, stages=3),)
    return BenchCase(
        op="mla_extend",
        shape=dataclasses.asdict(shape),
        moved_bytes=_moved_bytes(shape),
        flops=shape.flops,
        # bfloat16 rounds keys, values, weights and outputs by up to 2**-9 each.
        max_error=2e-2 if shape.dtype == "bfloat16" else 1e-4,
        implementations=("xla",) if small else kernels("mla_extend", op_case),
        program=functools.partial(_program, shape=shape, num_layers=num_layers),
        configs={} if small else {"mosaic_gpu": configs},
        # The products that absorb queries are XLA's.
        small=small,
    )


def cases() -> list[BenchCase]:
    """Return prompts of 8,192 tokens, few tokens behind as many, and a mixed batch."""
    prefill = {"heads": 32, "batch": 1, "query": 8192}
    tiny = {"heads": 2, "head_dim": 24, "page_size": 4}
    return [
        _case(3, **prefill, context=0),
        _case(3, **prefill, context=8192),
        _case(4, heads=32, batch=8, query=64, context=8192),
        _case(
            4,
            heads=32,
            batch=1,
            query=2048,
            context=0,
            decode_rows=31,
            decode_context=8192,
        ),
        _case(
            2,
            small=True,
            **tiny,
            batch=2,
            context=5,
            query=9,
            dtype="float32",
            decode_rows=2,
            decode_context=14,
        ),
    ]
