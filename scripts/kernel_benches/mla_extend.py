"""MLA prefill, expanded: all heads of many tokens, with and without a prefix.

A step calls the op for layer after layer, each on its own latent rows and with
queries of its own. The expansion of the rows into keys and values is included, in the
time and in the operations counted.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.extend import ExtendConfig
from scripts.kernel_benches.case import BenchCase, Prepared
from ukv.ids import KernelBlocks
from ukv.layout import unified_layout
from ukv.ops import mla_extend
from ukv.ops.extend_kernels import mla_packed
from ukv.pool import read_blocks
from ukv.spec import MLASpec

CHECKED_TOKENS = 4
"""Query tokens that are compared with a float64 reference."""


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
    """

    heads: int
    batch: int
    context: int
    query: int
    page_size: int = 64
    dtype: str = "bfloat16"
    head_dim: int = 192

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
    def attention_flops(self) -> int:
        """Operations of the causal products, without the expansion."""
        seen = self.query * self.context + self.query * (self.query + 1) // 2
        return 2 * self.heads * self.batch * seen * (self.head_dim + self.nope_dim)

    @property
    def expansion_flops(self) -> int:
        """Operations of expanding every cached row once."""
        width = 2 * self.nope_dim
        return 2 * self.heads * self.batch * self.kv_len * self.latent_dim * width

    @property
    def scale(self) -> float:
        """Factor of ``q . k``."""
        return self.head_dim**-0.5


@functools.partial(jax.jit, static_argnames=("rows", "words", "dtype"))
def _random_pool(key: jax.Array, rows: int, words: int, dtype: str) -> jax.Array:
    per_word = 4 // jnp.dtype(dtype).itemsize
    values = jax.random.normal(key, (rows, words, per_word), jnp.dtype(dtype))
    if per_word == 1:
        values = values[..., 0]
    return jax.lax.bitcast_convert_type(values, jnp.uint32)


def _reference(shape: Shape, rows, q, w_kc, w_vc, token: int) -> np.ndarray:
    """Attend one query token in float64, absorbed."""
    rows, q, w_kc, w_vc = (np.asarray(x, np.float64) for x in (rows, q, w_kc, w_vc))
    rows = rows.reshape(-1, shape.latent_dim + shape.rope_dim)
    rows = rows[: shape.context + token + 1]
    absorbed = np.einsum("hd,hdc->hc", q[:, : shape.nope_dim], w_kc)
    absorbed = np.concatenate([absorbed, q[:, shape.nope_dim :]], axis=1)
    scores = absorbed @ rows.T * shape.scale
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hc,hdc->hd", weights @ rows[:, : shape.latent_dim], w_vc)


def _prepare(implementation, config, *, shape: Shape, num_layers: int) -> Prepared:
    dtype = jnp.dtype(shape.dtype)
    spec = MLASpec(
        name="mla",
        num_layers=num_layers,
        page_size=shape.page_size,
        latent_dim=shape.latent_dim,
        rope_dim=shape.rope_dim,
        dtype=dtype,
    )
    max_pages = -(-shape.kv_len // shape.page_size)
    entry_bytes = num_layers * (shape.latent_dim + shape.rope_dim) * dtype.itemsize
    num_pages = shape.batch * max_pages + 8
    layout = unified_layout(
        [spec], pool_bytes=num_pages * shape.page_size * entry_bytes
    )
    views = [
        layout.part_view("mla", layer=layer, part="latent")
        for layer in range(num_layers)
    ]

    def attend(view, q, buffers, weights, ids, bounds, kv_lens):
        lens = {"cu_query_lens": bounds, "kv_lens": kv_lens}
        if config is not None:
            found = mla_packed(
                q,
                *weights,
                buffers,
                view,
                ids,
                **lens,
                softmax_scale=shape.scale,
                config=config,
            )
            return found[0]
        return mla_extend(
            q,
            *weights,
            buffers,
            view,
            KernelBlocks(ids=ids, sub_pool="mla"),
            **lens,
            max_query_len=shape.query,
            softmax_scale=shape.scale,
            implementation=implementation,
        )[0]

    def step(state):
        queries, _, *rest = state
        outs = tuple(
            attend(view, q, *rest) for view, q in zip(views, queries, strict=True)
        )
        return queries, outs, *rest

    words = layout.buffer_words[0]
    num_rows = layout.pool_bytes // (4 * words)
    pool = _random_pool(jax.random.key(0, impl="rbg"), num_rows, words, shape.dtype)
    sub = layout.sub_pool("mla")
    order = np.random.default_rng(0).permutation(sub.num_pages)
    table = order[: shape.batch * max_pages].reshape(shape.batch, max_pages)
    table = (table * sub.blocks_per_page).astype(np.int32)
    keys = jax.random.split(jax.random.key(1), num_layers + 2)
    tokens = shape.batch * shape.query
    queries = tuple(
        jax.random.normal(key, (tokens, shape.heads, shape.head_dim), dtype)
        for key in keys[2:]
    )
    weights = tuple(
        jax.random.normal(key, (shape.heads, shape.nope_dim, shape.latent_dim), dtype)
        * jnp.asarray(shape.latent_dim**-0.5, dtype)
        for key in keys[:2]
    )
    outs = tuple(jnp.zeros_like(q[..., : shape.nope_dim]) for q in queries)
    bounds = jnp.arange(shape.batch + 1, dtype=jnp.int32) * shape.query
    kv_lens = jnp.full(shape.batch, shape.kv_len, jnp.int32)
    state = (queries, outs, (pool,), weights, jnp.asarray(table), bounds, kv_lens)
    # A donated argument that nothing reads would be dropped, and with it its address.
    jitted = jax.jit(step, donate_argnums=0, keep_unused=True)
    state = jitted(state)

    queries, outs, buffers, weights, *_ = state
    error = 0.0
    for at in np.unique(np.linspace(0, tokens - 1, CHECKED_TOKENS).astype(int)):
        row, token = divmod(int(at), shape.query)
        rows = read_blocks(buffers[0], views[-1], jnp.asarray(table[row]))
        wanted = _reference(shape, rows, queries[-1][at], *weights, token)
        got = np.asarray(outs[-1][at], np.float64)
        # Not max(): NaN must stay.
        error = np.maximum(error, np.abs(got - wanted).max() / np.abs(wanted).max())
    return Prepared(
        step=jitted,
        state=state,
        calls=num_layers,
        touched_bytes=num_layers * _moved_bytes(shape),
        error=float(error),
    )


def _moved_bytes(shape: Shape) -> int:
    """Bytes of cached rows, queries and outputs."""
    cached = shape.batch * shape.kv_len * (shape.latent_dim + shape.rope_dim)
    tokens = shape.batch * shape.query * shape.heads
    elements = cached + tokens * (shape.head_dim + shape.nope_dim)
    return elements * jnp.dtype(shape.dtype).itemsize


def _case(num_layers: int, *, small: bool = False, **numbers) -> BenchCase:
    shape = Shape(**numbers)
    configs = (ExtendConfig(block_kv=64, stages=3),)
    return BenchCase(
        op="mla_extend",
        shape=dataclasses.asdict(shape),
        moved_bytes=_moved_bytes(shape),
        flops=shape.attention_flops + shape.expansion_flops,
        # bfloat16 rounds keys, values, weights and outputs by up to 2**-9 each.
        max_error=2e-2 if shape.dtype == "bfloat16" else 1e-4,
        # At full size the reference takes longer than anyone waits.
        implementations=("xla",) if small else ("mosaic_gpu",),
        prepare=functools.partial(_prepare, shape=shape, num_layers=num_layers),
        configs={} if small else {"mosaic_gpu": configs},
        small=small,
    )


def cases() -> list[BenchCase]:
    """Return a prefill of 8,192 tokens, and one after a prefix of as many."""
    prefill = {"heads": 32, "batch": 1, "query": 8192}
    tiny = {"heads": 2, "head_dim": 24, "page_size": 4}
    return [
        _case(3, **prefill, context=0),
        _case(3, **prefill, context=8192),
        _case(2, small=True, **tiny, batch=2, context=5, query=9, dtype="float32"),
    ]
