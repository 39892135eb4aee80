"""Cases of attention over paged rows: their arrays, their oracles, how they run.

Every op is jitted once for its static arguments, so that cases of equal shapes share
one compilation.
"""

import dataclasses
import functools as ft

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tests.comparison import assert_matches
from tests.oracles import attention as oracles
from tests.paged_rows import PagedRows, layout_with, write_rows
from ukv import ops
from ukv.layout import PartView
from ukv.spec import AttentionSpec, MLASpec

DTYPES = {
    "f32": np.dtype("float32"),
    "f16": np.dtype("float16"),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "e4m3fnuz": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "e5m2fnuz": np.dtype(ml_dtypes.float8_e5m2fnuz),
}
# Tokens at the end of a packed batch that belong to no row.
PADDING = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """What all cases share: a batch of rows in a pool.

    Attributes:
      rows: `(query_len, kv_len)` of each row.
      placement: Where the sub-pool lies.
      num_layers: Its layers.
      layer: The one that the op reads.
      page_size: Tokens per page.
      store: Storage dtype.
      compute: Dtype of the queries.
      bound: `max_query_len` of a packed batch; None is the longest query.
      softmax_scale: None is that of the widths.
    """

    rows: tuple[tuple[int, int], ...]
    placement: str = "low"
    num_layers: int = 3
    layer: int = 1
    page_size: int = 16
    store: str = "f32"
    compute: str = "f32"
    bound: int | None = None
    softmax_scale: float | None = None

    @property
    def query_lens(self) -> list[int]:
        return [query_len for query_len, _ in self.rows]

    @property
    def kv_lens(self) -> list[int]:
        return [kv_len for _, kv_len in self.rows]

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def max_pages(self) -> int:
        return -(-max(self.kv_lens) // self.page_size) + 1

    @property
    def num_pages(self) -> int:
        return 3 + sum(-(-kv_len // self.page_size) for kv_len in self.kv_lens)

    @property
    def batch(self) -> dict[str, jax.Array]:
        """The lengths, as a packed op takes them."""
        bounds = np.cumsum([0, *self.query_lens])
        return {
            "cu_query_lens": jnp.asarray(bounds, jnp.int32),
            "kv_lens": jnp.asarray(self.kv_lens, jnp.int32),
        }

    @property
    def max_query_len(self) -> int:
        return max(self.query_lens) if self.bound is None else self.bound

    def draw(self, rng, *shape):
        """Values that neither dtype of the case rounds."""
        values = rng.standard_normal(shape).astype(DTYPES[self.compute])
        return values.astype(DTYPES[self.store])

    def draw_queries(self, rng, *shape):
        """Packed queries, then tokens of padding that are NaN."""
        q = rng.standard_normal((self.num_tokens, *shape)).astype(DTYPES[self.compute])
        padding = np.full((PADDING, *shape), np.nan, q.dtype)
        return np.concatenate([q, padding])

    def dense(self, packed):
        """The tokens of rows of equal query lengths, `[rows, query_len, ...]`."""
        (query_len,) = set(self.query_lens)
        return packed[: self.num_tokens].reshape(-1, query_len, *packed.shape[1:])

    def split(self, packed):
        return np.split(packed[: self.num_tokens], np.cumsum(self.query_lens)[:-1])


def flat(result):
    """`(out, lse)` of a decode batch, one query token after the other."""
    return tuple(x.reshape(-1, *x.shape[2:]) for x in result)


def packed_oracle(case, attend, padding):
    """`(out, lse, sizes)` of each row, one after the other, and then of the padding."""
    rows = [
        attend(row, kv_len - query_len)
        for row, (query_len, kv_len) in enumerate(case.rows)
    ]
    out, lse, sizes = (np.concatenate(x) for x in zip(*rows, strict=True))
    assert np.isfinite(out).all()
    assert len(out) == case.num_tokens
    return (
        np.concatenate([out, np.zeros((padding, *out.shape[1:]))]),
        np.concatenate([lse, np.full((padding, *lse.shape[1:]), -np.inf)]),
        np.concatenate([sizes, np.zeros((padding, *sizes.shape[1:]))]),
    )


def assert_result(case, result, oracle, *, width, operand=None):
    """Compare `(out, lse)` of packed tokens with `(out, lse, sizes)`."""
    (out, lse), (truth, lse_truth, sizes) = result, oracle
    keys = max(case.kv_lens)
    assert_matches(
        out,
        truth,
        dtype=DTYPES[case.compute],
        reduced_len=keys,
        row_axes=(0, 1),
        accumulate_dtype=operand,
    )
    # A logit sums over the width, the log-sum-exp over the keys.
    assert_matches(
        lse,
        lse_truth,
        dtype="float32",
        reduced_len=max(width, keys),
        row_axes=(0,),
        accumulate_dtype=operand,
        sizes=sizes,
    )


# GQA


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gqa(Rows):
    """A case of GQA.

    Attributes:
      kv_heads: Heads of K and V.
      group: Query heads of each.
      dims: Width of a K and of a V head.
      window: Tokens a query sees.
      sinks: Whether there are sinks.
      soft_cap: Cap of the logits.
    """

    kv_heads: int = 2
    group: int = 2
    dims: tuple[int, int] = (16, 16)
    window: int | None = None
    sinks: bool = False
    soft_cap: float | None = None

    @property
    def scale(self) -> float:
        return self.softmax_scale or self.dims[0] ** -0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class GqaData:
    """The arrays of a case of GQA; `views` are those of K and V."""

    q: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]
    sinks: np.ndarray | None
    pool: PagedRows
    views: tuple[PartView, PartView]

    def options(self, case):
        return {
            "softmax_scale": case.scale,
            "window": case.window,
            "sinks": None if self.sinks is None else jnp.asarray(self.sinks),
            "soft_cap": case.soft_cap,
        }


@ft.cache
def make_gqa(case: Gqa, *, seed=0, value_seed=7) -> GqaData:
    """The arrays: `seed` decides the pages, `value_seed` what is in them."""
    rng = np.random.default_rng(value_seed)
    heads = case.kv_heads * case.group
    q = case.draw_queries(rng, heads, case.dims[0])
    keys = [case.draw(rng, n, case.kv_heads, case.dims[0]) for n in case.kv_lens]
    values = [case.draw(rng, n, case.kv_heads, case.dims[1]) for n in case.kv_lens]
    sinks = rng.standard_normal(heads).astype(np.float32) if case.sinks else None
    pool, views = _place_gqa(case, keys, values, seed)
    return GqaData(q=q, keys=keys, values=values, sinks=sinks, pool=pool, views=views)


def _place_gqa(case: Gqa, keys, values, seed):
    """A pool with the rows in pages drawn by `seed`, and the views of K and V."""
    spec = AttentionSpec(
        name="full",
        num_layers=case.num_layers,
        page_size=case.page_size,
        num_kv_heads=case.kv_heads,
        head_dim=case.dims[0],
        value_dim=case.dims[1],
        dtype=DTYPES[case.store],
    )
    layout = layout_with(spec, case.placement, num_pages=case.num_pages)
    reach = max(case.kv_lens) if case.window is None else case.window
    pool = write_rows(
        layout,
        "full",
        layer=case.layer,
        entries={"k": keys, "v": values},
        first_live=[max(0, kv - ql - reach + 1) for ql, kv in case.rows],
        max_pages=case.max_pages,
        seed=seed,
    )
    views = tuple(
        layout.part_view("full", layer=case.layer, part=part) for part in ("k", "v")
    )
    return pool, views


def move_gqa(case: Gqa, data: GqaData, seed: int) -> GqaData:
    """The same rows in other pages."""
    pool, views = _place_gqa(case, data.keys, data.values, seed)
    return dataclasses.replace(data, pool=pool, views=views)


def gqa_scoring(case: Gqa, data: GqaData, context_len):
    """What an oracle needs besides the arrays of a row."""
    return {
        "context_len": context_len,
        "softmax_scale": case.scale,
        "window": case.window,
        "sinks": data.sinks,
        "soft_cap": case.soft_cap,
    }


def gqa_oracle(case: Gqa, data: GqaData, *, padding=PADDING):
    """`(out, lse, sizes)`; the last `padding` tokens belong to no row."""
    queries = case.split(data.q)

    def attend(row, context_len):
        operands = queries[row], data.keys[row]
        options = gqa_scoring(case, data, context_len)
        return (
            *oracles.dense_attention(
                *operands, data.values[row], **options, causal=True
            ),
            oracles.lse_sizes(*operands, **options),
        )

    return packed_oracle(case, attend, padding)


GQA_STATICS = (
    "k_view",
    "v_view",
    "max_query_len",
    "softmax_scale",
    "window",
    "soft_cap",
    "implementation",
)
jit_gqa_attention = jax.jit(ops.gqa_attention, static_argnames=GQA_STATICS)
jit_gqa_decode = jax.jit(
    ops.gqa_decode, static_argnames=set(GQA_STATICS) - {"max_query_len"}
)


def run_gqa(case: Gqa, data: GqaData, **changed):
    """`(out, lse)` of `gqa_attention`."""
    return jit_gqa_attention(
        jnp.asarray(data.q),
        data.pool.buffers,
        *data.views,
        data.pool.table,
        **case.batch,
        **data.options(case) | {"max_query_len": case.max_query_len} | changed,
    )


def run_gqa_decode(case: Gqa, data: GqaData, **changed):
    """`(out, lse)` of `gqa_decode`, its rows one after the other."""
    return flat(
        jit_gqa_decode(
            jnp.asarray(case.dense(data.q)),
            data.pool.buffers,
            *data.views,
            data.pool.table,
            kv_lens=case.batch["kv_lens"],
            **data.options(case) | changed,
        )
    )


# MLA


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mla(Rows):
    """A case of MLA.

    Attributes:
      heads: Query heads.
      dims: Widths of the latent, of the rope part, of the key part without position
        and of a value head.
    """

    heads: int = 3
    dims: tuple[int, int, int, int] = (24, 8, 12, 10)

    @property
    def scale(self) -> float:
        return self.softmax_scale or (self.dims[1] + self.dims[2]) ** -0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlaData:
    """The arrays of a case of MLA: `q` is absorbed, `q_heads` is not."""

    q: np.ndarray
    q_heads: np.ndarray
    w_kc: np.ndarray
    w_vc: np.ndarray
    cached: list[np.ndarray]
    pool: PagedRows
    view: PartView


@ft.cache
def make_mla(case: Mla, *, seed=0, value_seed=11) -> MlaData:
    """The arrays: `seed` decides the pages, `value_seed` what is in them."""
    rng = np.random.default_rng(value_seed)
    latent, rope, nope, value = case.dims
    compute = DTYPES[case.compute]
    cached = [case.draw(rng, n, latent + rope) for n in case.kv_lens]
    pool, view = _place_mla(case, cached, seed)
    return MlaData(
        q=case.draw_queries(rng, case.heads, latent + rope),
        q_heads=case.draw_queries(rng, case.heads, nope + rope),
        w_kc=(rng.standard_normal((case.heads, nope, latent)) / 5).astype(compute),
        w_vc=(rng.standard_normal((case.heads, value, latent)) / 5).astype(compute),
        cached=cached,
        pool=pool,
        view=view,
    )


def _place_mla(case: Mla, cached, seed):
    """A pool with the rows in pages drawn by `seed`, and their view."""
    spec = MLASpec(
        name="mla",
        num_layers=case.num_layers,
        page_size=case.page_size,
        latent_dim=case.dims[0],
        rope_dim=case.dims[1],
        dtype=DTYPES[case.store],
    )
    layout = layout_with(spec, case.placement, num_pages=case.num_pages)
    pool = write_rows(
        layout,
        "mla",
        layer=case.layer,
        entries={"latent": cached},
        first_live=[0] * len(case.rows),
        max_pages=case.max_pages,
        seed=seed,
    )
    return pool, layout.part_view("mla", layer=case.layer, part="latent")


def move_mla(case: Mla, data: MlaData, seed: int) -> MlaData:
    """The same rows in other pages."""
    pool, view = _place_mla(case, data.cached, seed)
    return dataclasses.replace(data, pool=pool, view=view)


def mla_scoring(case: Mla, context_len):
    """What an oracle of plain attention needs besides the arrays of a row."""
    plain = {"window": None, "sinks": None, "soft_cap": None}
    return {"context_len": context_len, "softmax_scale": case.scale, **plain}


def attend_latents(case: Mla, q, rows, context_len):
    """`(out, lse, sizes)` of one row."""
    options = mla_scoring(case, context_len)
    result = oracles.mla_latent_attention(
        q,
        rows,
        latent_dim=case.dims[0],
        context_len=context_len,
        softmax_scale=case.scale,
        causal=True,
    )
    return *result, oracles.lse_sizes(q, rows[:, None], **options)


def absorbed_oracle(case: Mla, data: MlaData, *, padding=PADDING):
    """`(out, lse, sizes)`; the last `padding` tokens belong to no row."""
    queries = case.split(data.q)

    def attend(row, context_len):
        return attend_latents(case, queries[row], data.cached[row], context_len)

    return packed_oracle(case, attend, padding)


def expanded_oracle(case: Mla, data: MlaData, *, padding=PADDING):
    """`(out, lse, sizes)`; the last `padding` tokens belong to no row."""
    queries = case.split(data.q_heads)
    nope = case.dims[2]

    def attend(row, context_len):
        parts = np.split(data.cached[row], [case.dims[0]], axis=1)
        result = oracles.mla_expanded(
            queries[row][..., :nope],
            queries[row][..., nope:],
            *parts,
            data.w_kc,
            data.w_vc,
            context_len=context_len,
            softmax_scale=case.scale,
        )
        keys = oracles.mla_keys(*parts, data.w_kc)
        options = mla_scoring(case, context_len)
        return *result, oracles.lse_sizes(queries[row], keys, **options)

    return packed_oracle(case, attend, padding)


MLA_STATICS = (
    "view",
    "max_query_len",
    "latent_dim",
    "softmax_scale",
    "implementation",
)
jit_mla_decode = jax.jit(
    ops.mla_decode, static_argnames=set(MLA_STATICS) - {"max_query_len"}
)
jit_mla_extend_absorbed = jax.jit(ops.mla_extend_absorbed, static_argnames=MLA_STATICS)
jit_mla_extend = jax.jit(
    ops.mla_extend, static_argnames=set(MLA_STATICS) - {"latent_dim"}
)


def run_absorbed(case: Mla, data: MlaData, **changed):
    """`(out, lse)` of `mla_extend_absorbed`."""
    options = {"max_query_len": case.max_query_len, "softmax_scale": case.scale}
    return jit_mla_extend_absorbed(
        jnp.asarray(data.q),
        data.pool.buffers,
        data.view,
        data.pool.table,
        **case.batch,
        latent_dim=case.dims[0],
        **options | changed,
    )


def run_expanded(case: Mla, data: MlaData, **changed):
    """`(out, lse)` of `mla_extend`."""
    options = {"max_query_len": case.max_query_len, "softmax_scale": case.scale}
    return jit_mla_extend(
        jnp.asarray(data.q_heads),
        jnp.asarray(data.w_kc),
        jnp.asarray(data.w_vc),
        data.pool.buffers,
        data.view,
        data.pool.table,
        **case.batch,
        **options | changed,
    )


def run_mla_decode(case: Mla, data: MlaData, **changed):
    """`(out, lse)` of `mla_decode`, its rows one after the other."""
    return flat(
        jit_mla_decode(
            jnp.asarray(case.dense(data.q)),
            data.pool.buffers,
            data.view,
            data.pool.table,
            kv_lens=case.batch["kv_lens"],
            latent_dim=case.dims[0],
            **{"softmax_scale": case.scale} | changed,
        )
    )
