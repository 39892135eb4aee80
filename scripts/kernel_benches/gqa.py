"""GQA decode and extend: long contexts, short windows, prefill with and without prefix.

A step calls the op for layer after layer, the output of one being the queries of the
next. The pool holds random numbers; table entries behind a window hold what released
pages leave, here block 0. Compared are the first and the last query token of the first
layer with a float32 reference.
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
from ukv.ops import gqa_attention, gqa_decode
from ukv.ops.extend_kernels import gqa_packed
from ukv.ops.gpu_kernels import paged_part, triton_kernels
from ukv.ops.online_softmax import Scoring
from ukv.pool import read_blocks
from ukv.spec import AttentionSpec

TOUCHED_BYTES = 2 << 30
"""What a step of a decode reads at full size, about: layers are added until it does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One shape; the names are those of the record.

    Attributes:
      q_heads: Query heads.
      kv_heads: K/V heads.
      head_dim: Width of K and of V.
      batch: Rows.
      context: Tokens of a row before the query tokens of an extend; all of them for a
        decode.
      query: Query tokens of a row.
      page_size: Tokens per page.
      window: Tokens a query sees; 0 for all.
      dtype: Of queries and of the pool.
      decode_rows: Rows of one query token in the batch of an extend.
      decode_context: Their tokens.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    batch: int
    context: int
    query: int = 1
    page_size: int = 64
    window: int = 0
    dtype: str = "bfloat16"
    decode_rows: int = 0
    decode_context: int = 0

    @property
    def is_decode(self) -> bool:
        """Whether the query tokens are the last of the context."""
        return self.query == 1

    @property
    def kv_len(self) -> int:
        """Tokens of a row."""
        return self.context if self.is_decode else self.context + self.query

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
    def first_live_page(self) -> int:
        """The first page that some query sees."""
        if not self.window:
            return 0
        return max(self.kv_len - self.query + 1 - self.window, 0) // self.page_size

    @property
    def seen(self) -> int:
        """Keys that all queries of the batch see, one after the other."""
        positions = np.arange(self.kv_len - self.query, self.kv_len, dtype=np.int64)
        of_row = int(np.minimum(positions + 1, self.window or self.kv_len).sum())
        return self.batch * of_row + self.decode_rows * self.decode_context

    @property
    def read_keys(self) -> int:
        """Keys of a row that must be read once."""
        most = self.window + self.query - 1 if self.window else self.kv_len
        return min(self.kv_len, most)

    @property
    def read_bytes(self) -> int:
        """Bytes of K and V that must be read once."""
        width = self.head_dim * jnp.dtype(self.dtype).itemsize
        keys = self.batch * self.read_keys + self.decode_rows * self.decode_context
        return 2 * keys * self.kv_heads * width

    @property
    def moved_bytes(self) -> int:
        """Bytes of K and V that must be read, of queries and of outputs."""
        width = self.head_dim * jnp.dtype(self.dtype).itemsize
        return self.read_bytes + 2 * int(self.query_lens.sum()) * self.q_heads * width


def _live_pages(shape: Shape) -> np.ndarray:
    """Return how many pages of each row some query sees."""
    return -(-shape.kv_lens // shape.page_size) - shape.first_live_page


def _layout(shape: Shape, num_layers: int) -> PoolLayout:
    spec = AttentionSpec(
        name="kv",
        num_layers=num_layers,
        page_size=shape.page_size,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=jnp.dtype(shape.dtype),
    )
    pages = int(_live_pages(shape).sum())
    entry = 2 * num_layers * shape.kv_heads * shape.head_dim * spec.dtype.itemsize
    return unified_layout([spec], pool_bytes=(pages + 8) * shape.page_size * entry)


def _table(shape: Shape, layout: PoolLayout) -> np.ndarray:
    sub = layout.sub_pool("kv")
    pages, first = _live_pages(shape), shape.first_live_page
    order = np.random.default_rng(0).permutation(sub.num_pages)[: pages.sum()]
    table = np.zeros((len(pages), first + pages.max()), np.int32)
    for row, ids in enumerate(np.split(order, np.cumsum(pages)[:-1])):
        table[row, first : first + len(ids)] = ids
    return table * sub.blocks_per_page


def _reference(shape: Shape, buffers, views, blocks, q, position: int) -> jax.Array:
    """Attend one query token of one row in float32, all keys at once."""
    first = shape.first_live_page * shape.page_size
    oldest = max(position + 1 - shape.window, 0) if shape.window else 0
    seen = slice(oldest - first, position + 1 - first)
    k, v = (
        read_blocks(buffers[view.buffer_index], view, blocks[shape.first_live_page :])
        .reshape(-1, shape.kv_heads, shape.head_dim)[seen]
        .astype(jnp.float32)
        for view in views
    )
    q = q.astype(jnp.float32).reshape(shape.kv_heads, -1, shape.head_dim)
    multiply = functools.partial(jnp.einsum, precision="highest")
    weights = jax.nn.softmax(multiply("gmd,ngd->gmn", q, k) * shape.head_dim**-0.5)
    return multiply("gmn,ngd->gmd", weights, v).reshape(shape.q_heads, -1)


def _attend(shape: Shape, implementation, config, views, q, buffers, ids, bounds, lens):
    table = KernelBlocks(ids=ids, sub_pool="kv")
    lengths = {"kv_lens": lens}
    if not shape.is_decode:
        lengths["cu_query_lens"] = bounds
    options = {"softmax_scale": shape.head_dim**-0.5, "window": shape.window or None}
    if config is not None:
        k, v = views
        if implementation == "mosaic_gpu":
            scoring = Scoring(**options)
            run = functools.partial(gqa_packed, scoring=scoring, config=config)
            return run(q, buffers, k, v, ids, **lengths)[0]
        pools = buffers[k.buffer_index], buffers[v.buffer_index]
        parts = {"k": paged_part(k), "v": paged_part(v), "config": config}
        if shape.is_decode:
            run = triton_kernels("gqa_decode_triton").gqa_decode
        else:
            run = triton_kernels("gqa_extend_triton").gqa_extend
        return run(q, *pools, ids, **lengths, **parts, **options)[0]
    options |= {"implementation": implementation}
    if shape.is_decode:
        return gqa_decode(q, buffers, *views, table, **lengths, **options)[0]
    lengths["max_query_len"] = shape.query
    return gqa_attention(q, buffers, *views, table, **lengths, **options)[0]


def _program(implementation, config, *, shape: Shape, num_layers: int) -> Program:
    layout = _layout(shape, num_layers)
    views = [
        tuple(layout.part_view("kv", layer=layer, part=part) for part in "kv")
        for layer in range(num_layers)
    ]
    attend = functools.partial(_attend, shape, implementation, config)
    starts = np.cumsum([0, *shape.query_lens])
    lead = (shape.batch, 1) if shape.is_decode else (int(starts[-1]),)
    q_shape = (*lead, shape.q_heads, shape.head_dim)
    words = layout.buffer_words[0]
    table = _table(shape, layout)

    def make():
        pool = random_words((layout.pool_bytes // (4 * words), words), shape.dtype)
        q = random_values(q_shape, shape.dtype, seed=1)
        bounds = jnp.asarray(starts, jnp.int32)
        kv_lens = jnp.asarray(shape.kv_lens, jnp.int32)
        outs = jnp.zeros_like(q), jnp.zeros_like(q)
        return q, outs, (pool,), jnp.asarray(table), bounds, kv_lens

    def step(state):
        q, _, *rest = state
        first = last = attend(views[0], q, *rest)
        for of_layer in views[1:]:
            last = attend(of_layer, last, *rest)
        return q, (first, last), *rest

    def error(state):
        q, (first, _), buffers, ids, *_ = state
        errors = []
        for at in {0, int(starts[-1]) - 1}:
            row = int(np.searchsorted(starts[1:], at, side="right"))
            wanted = _reference(
                shape,
                buffers,
                views[0],
                ids[row],
                q.reshape(-1, *q_shape[-2:])[at],
                int(shape.kv_lens[row] - starts[row + 1] + at),
            )
            errors.append(relative_error(first.reshape(-1, *q_shape[-2:])[at], wanted))
        return jnp.max(jnp.stack(errors))

    return Program(
        make=make,
        step=step,
        error=error,
        calls=num_layers,
        touched_bytes=num_layers * shape.moved_bytes,
    )


def _configs(shape: Shape):
    if shape.is_decode:
        make = triton_kernels("gqa_decode_triton").GqaDecodeTritonConfig
        return {
            "triton": (
                make(tile_bytes=32768, num_programs=396),
                make(tile_bytes=32768, num_programs=264),
                make(num_programs=396),
                make(num_programs=396, num_stages=4),
                make(most_chunk=512),
                make(most_chunk=1024),
                make(head_width=64),
            )
        }
    make = triton_kernels("gqa_extend_triton").GqaExtendTritonConfig
    return {
        "triton": (
            make(block_m=64, num_warps=4),
            make(block_m=64, num_warps=4, num_stages=2),
            make(block_m=128, num_warps=8),
        ),
        "mosaic_gpu": (
            ExtendConfig(q_stages=2),
            ExtendConfig(block_kv=64, stages=3, q_stages=2),
        ),
    }


def _implementations(shape: Shape, op: str):
    case = OpCase(
        page_size=shape.page_size,
        storage_dtype=shape.dtype,
        compute_dtype=shape.dtype,
        widths=(shape.head_dim, shape.head_dim),
    )
    return kernels("gqa_decode" if op == "gqa_decode" else "gqa_attention", case)


def _case(*, num_layers: int | None = None, small: bool = False, **numbers):
    shape = Shape(**numbers)
    if num_layers is None:
        num_layers = max(4, min(64, TOUCHED_BYTES // shape.read_bytes))
    itemsize = jnp.dtype(shape.dtype).itemsize
    op = "gqa_decode" if shape.is_decode else "gqa_extend"
    return BenchCase(
        op=op,
        shape=dataclasses.asdict(shape),
        moved_bytes=shape.moved_bytes,
        flops=4 * shape.q_heads * shape.head_dim * shape.seen,
        # bfloat16 rounds outputs and weights by up to 2**-9 each.
        max_error=1e-2 if itemsize == 2 else 1e-4,
        implementations=("triton", "xla") if small else _implementations(shape, op),
        program=functools.partial(_program, shape=shape, num_layers=num_layers),
        configs={} if small else _configs(shape),
        small=small,
    )


def cases() -> list[BenchCase]:
    """Return the shapes that other libraries were measured on, and prefill."""
    llama = {"q_heads": 32, "kv_heads": 8, "head_dim": 128}
    gpt_oss = {"q_heads": 64, "kv_heads": 8, "head_dim": 64}
    found = [
        _case(**heads, batch=batch, context=context, page_size=page_size, window=window)
        for heads, window in ((llama, 0), (gpt_oss, 0), (gpt_oss, 128))
        for batch, context in ((16, 8192), (64, 8192), (128, 2048))
        for page_size in (16, 64)
    ]
    found += [_case(**llama, batch=1, context=context) for context in (8192, 131072)]
    prefill = {"batch": 1, "query": 8192, "num_layers": 6}
    found += [
        _case(**llama, **prefill, context=0),
        _case(**llama, **prefill, context=8192),
        _case(**llama, **prefill, context=0, page_size=16),
        _case(**gpt_oss, **prefill, context=0, window=128),
        _case(**llama, batch=8, query=1024, context=8192, num_layers=4),
    ]
    mixed = {"batch": 1, "context": 0, "query": 2048, "num_layers": 3}
    found.append(_case(**llama, **mixed, decode_rows=63, decode_context=8192))
    tiny = {"q_heads": 4, "kv_heads": 2, "head_dim": 16, "page_size": 4}
    tiny |= {"num_layers": 2, "small": True}
    found += [
        _case(**tiny, batch=3, context=37),
        _case(**tiny, batch=3, context=37, window=9, dtype="float32"),
        _case(**tiny, batch=2, context=9, query=13, decode_rows=3, decode_context=21),
    ]
    return found
