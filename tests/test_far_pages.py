"""Every kernel on pools of more than 2**31 elements and 4 GiB: the last pages.

Rows of many pages give the bits that they give in a small pool. Rows of one page, and
rows all of whose pages are one and the same, are compared with the oracle.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention_cases import (
    DTYPES,
    Gqa,
    Mla,
    Rows,
    assert_result,
    make_gqa,
    make_mla,
    run_absorbed,
    run_expanded,
    run_gqa,
    run_gqa_decode,
    run_mla_decode,
)
from tests.far_pools import FAR_BYTES, far_buffers, far_layout, page_words
from tests.paged_rows import PagedRows
from tests.random_kernels.attention import (
    absorbed_rows_oracle,
    expanded_rows_oracle,
    gqa_rows_oracle,
)
from tests.recurrent_cases import Kind
from tests.state_pools import StatePool
from tests.test_ops_kv_write import draw_values, kv_spec, locations_of, mla_spec
from tests.test_ops_mamba2 import draw_tokens as draw_mamba2
from tests.test_ops_mamba2 import make_parameters, make_pool
from tests.test_ops_mamba2 import run as run_mamba2
from ukv import ops
from ukv.ids import KernelBlocks
from ukv.implementation import SUPPORT
from ukv.layout import unified_layout
from ukv.ops import DeltaTokens
from ukv.pool import create_pool

LAYERS = {"num_layers": 2, "layer": 1, "store": "bf16", "compute": "bf16"}
LLAMA = functools.partial(
    Gqa, dims=(128, 128), kv_heads=8, group=4, page_size=64, **LAYERS
)
KIMI = functools.partial(
    Mla, dims=(512, 64, 128, 128), heads=16, page_size=64, **LAYERS
)
DECODE_ROWS = ((1, 300), (1, 64), (1, 5), (1, 257))
PACKED_ROWS = ((40, 300), (5, 64), (1, 5), (19, 257))


@dataclasses.dataclass(frozen=True)
class Attention:
    """An op: its case, its arrays, how it runs and what is right."""

    case: Rows
    make: Callable
    run: Callable
    oracle: Callable
    operand: str | None = None

    @property
    def name(self) -> str:
        return "full" if isinstance(self.case, Gqa) else "mla"


ATTENTION = {
    "gqa_decode": Attention(
        LLAMA(rows=DECODE_ROWS, bound=1), make_gqa, run_gqa_decode, gqa_rows_oracle
    ),
    "gqa_attention": Attention(
        LLAMA(rows=PACKED_ROWS), make_gqa, run_gqa, gqa_rows_oracle
    ),
    "mla_decode": Attention(
        KIMI(rows=DECODE_ROWS, bound=1), make_mla, run_mla_decode, absorbed_rows_oracle
    ),
    "mla_extend": Attention(
        KIMI(rows=PACKED_ROWS), make_mla, run_expanded, expanded_rows_oracle, "bfloat16"
    ),
    "mla_extend_absorbed": Attention(
        KIMI(rows=PACKED_ROWS), make_mla, run_absorbed, absorbed_rows_oracle
    ),
}


def implementations(op):
    """Each kernel on a card; the reference on a small pool, for the tests' own sake."""
    names = sorted({line.implementation for line in SUPPORT[op]} - {"xla"})
    marks = [pytest.mark.slow] if "extend" in op or op == "gqa_attention" else []
    return [
        pytest.param(op, "xla", 8 << 20, marks=marks),
        *(pytest.param(op, n, FAR_BYTES, marks=pytest.mark.gpu) for n in names),
    ]


by_attention = pytest.mark.parametrize(
    ("op", "implementation", "pool_bytes"),
    [param for op in ATTENTION for param in implementations(op)],
)


def far_data(attention, case, data, pool_bytes, table):
    """The arrays of a case in the last pages of a large pool."""
    near, name = data.pool.layout, attention.name
    far = far_layout(near, name, pool_bytes)
    here, there = (layout.sub_pool(name) for layout in (near, far))
    pages = sorted({int(x) for x in table.ravel() if x >= 0})
    places = {page: there.num_pages - 1 - i for i, page in enumerate(pages)}
    buffers = far_buffers(near, data.pool.buffers, far, name, places)
    assert here.blocks_per_page == there.blocks_per_page
    ids = np.full(table.shape, 2**31 - 1, np.int64)
    for page, place in places.items():
        ids[table == page] = place * there.blocks_per_page
    pool = PagedRows(
        layout=far,
        buffers=buffers,
        table=KernelBlocks(ids=jnp.asarray(ids, jnp.int32), sub_pool=name),
    )
    view = functools.partial(far.part_view, name, layer=case.layer)
    if isinstance(case, Gqa):
        views = view(part="k"), view(part="v")
        return dataclasses.replace(data, pool=pool, views=views)
    return dataclasses.replace(data, pool=pool, view=view(part="latent"))


def live_pages(case, data, name):
    """The read table as pages; -1 behind a row's last."""
    table = np.asarray(data.pool.table.ids)
    is_live = np.arange(table.shape[1]) < -(-np.asarray(case.kv_lens)[:, None] // 64)
    blocks = data.pool.layout.sub_pool(name).blocks_per_page
    return np.where(is_live, table // blocks, -1)


def assert_equal_bits(one, other):
    for a, b in zip(one, other, strict=True):
        assert np.isfinite(np.asarray(a, np.float32)[:4]).all()
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)


@by_attention
def test_last_pages_give_the_bits_of_a_small_pool(op, implementation, pool_bytes):
    attention = ATTENTION[op]
    case = attention.case
    data = attention.make(case)
    far = far_data(
        attention, case, data, pool_bytes, live_pages(case, data, attention.name)
    )
    near_result, result = (
        attention.run(case, x, implementation=implementation) for x in (data, far)
    )
    assert_equal_bits(near_result, result)


def repeated(data, kv_lens):
    """The arrays of rows whose every page is their first."""
    names = ("keys", "values") if hasattr(data, "keys") else ("cached",)
    return dataclasses.replace(
        data,
        **{
            name: [
                np.resize(rows, (kv_len, *rows.shape[1:]))
                for rows, kv_len in zip(getattr(data, name), kv_lens, strict=True)
            ]
            for name in names
        },
    )


@by_attention
@pytest.mark.parametrize("is_repeated", [False, True], ids=["single", "repeated"])
def test_rows_of_one_page(op, implementation, pool_bytes, is_repeated):
    attention = ATTENTION[op]
    long = attention.case
    lens = [(query_len, max(query_len, 64)) for query_len in long.query_lens]
    short = dataclasses.replace(long, rows=tuple(lens))
    data = attention.make(short)
    first = live_pages(short, data, attention.name)[:, :1]
    case = long if is_repeated else short
    if is_repeated:
        data = repeated(data, long.kv_lens)
    # As wide as the table of long rows: no other program is compiled.
    table = np.full((len(lens), long.max_pages), -1)
    table[:, : long.max_pages if is_repeated else 1] = first
    far = far_data(attention, case, data, pool_bytes, table)
    result = attention.run(
        case,
        far,
        implementation=implementation,
        **({} if case.bound else {"max_query_len": max(long.query_lens)}),
    )
    assert_result(
        case,
        result,
        attention.oracle(case, data),
        width=case.dims[0],
        operand=attention.operand,
    )


@pytest.mark.parametrize(
    ("op", "implementation", "pool_bytes"), implementations("write_kv")
)
@pytest.mark.parametrize("kind", ["mla", "kv"])
def test_last_pages_are_written(op, implementation, pool_bytes, kind):
    bf16 = DTYPES["bf16"]
    spec = (
        mla_spec(page_size=64, dims=(512, 64))
        if kind == "mla"
        else kv_spec(page_size=64, heads=8, dims=(128, 128), dtype=bf16)
    )
    rng = np.random.default_rng(5)
    places, written, values = rng.permutation(128)[:50], [], None
    for pool in (1 << 22, pool_bytes):
        layout = unified_layout([spec], pool_bytes=pool)
        sub, layer = layout.sub_pool("kv"), spec.num_layers - 1
        views = tuple(
            layout.part_view("kv", layer=layer, part=part.name) for part in spec.parts
        )
        values = draw_values(rng, views, 50) if values is None else values
        pages = sub.num_pages - 1 - places // 64
        (buffer,) = jax.jit(
            getattr(ops, op), static_argnums=1, static_argnames="implementation"
        )(
            create_pool(layout, fill_word=0xFFFFFFFF).buffers,
            views,
            locations_of(pages, places % 64, layout),
            values,
            implementation=implementation,
        )
        written.append(
            [
                page_words(layout, (buffer,), "kv", sub.num_pages - 1 - i)
                for i in range(2)
            ]
        )
    assert (written[0][0] != 0xFFFFFFFF).any()
    np.testing.assert_array_equal(*written)


def far_states(pool: StatePool, buffers, pool_bytes):
    """The first slots of a small pool as the last ones of a large one."""
    far = far_layout(pool.layout, pool.name, pool_bytes)
    last = far.sub_pool(pool.name).num_pages - 1
    places = {slot: last - slot for slot in (1, 2)}
    view = far.part_view(pool.name, layer=1, part="recurrent")
    moved = far_buffers(pool.layout, buffers, far, pool.name, places)
    return StatePool(layout=far, view=view), moved, places


def assert_states_equal(pool, after, far_pool, far_after, places):
    for slot, place in places.items():
        near, far = (
            page_words(layout, found, pool.name, at)
            for layout, found, at in (
                (pool.layout, after, slot),
                (far_pool.layout, far_after, place),
            )
        )
        np.testing.assert_array_equal(near, far)


@pytest.mark.parametrize(
    ("op", "implementation", "pool_bytes"),
    [*implementations("kda_prefill"), *implementations("gdn_prefill")],
)
def test_prefill_of_the_last_slots(op, implementation, pool_bytes):
    kind = Kind(
        H=4,
        I=4 if op == "kda_prefill" else 2,
        K=128,
        V=128,
        decode=None,
        prefill=jax.jit(
            getattr(ops, op),
            static_argnames=("view", "max_query_len", "implementation"),
        ),
    )
    rng = np.random.default_rng(6)
    pool = StatePool.create(kind.spec("float32"), "low", part="recurrent", num_slots=3)
    gate, tokens = kind.gate(rng), kind.tokens(rng, 150, dtype="bfloat16")
    before = pool.put({s: rng.standard_normal(pool.view.shape) for s in (1, 2)})
    far_pool, far_before, places = far_states(pool, before, pool_bytes)
    (after, out), (far_after, far_out) = (
        kind.prefill(
            buffers,
            of.view,
            DeltaTokens(**{name: jnp.asarray(x) for name, x in tokens.items()}),
            gate,
            jnp.asarray([0, 100, 150], jnp.int32),
            of.slots(slots, [False, False]),
            max_query_len=100,
            implementation=implementation,
        )
        for of, buffers, slots in (
            (pool, before, [1, 2]),
            (far_pool, far_before, [places[1], places[2]]),
        )
    )
    assert_equal_bits([out], [far_out])
    assert_states_equal(pool, after, far_pool, far_after, places)


@pytest.mark.parametrize(
    ("op", "implementation", "pool_bytes"), implementations("mamba2_decode")
)
def test_update_of_the_last_slots(op, implementation, pool_bytes):
    rng = np.random.default_rng(7)
    pool, parameters = make_pool("low"), make_parameters(rng)
    tokens = draw_mamba2(rng, 2, 3)
    before = pool.put({s: rng.standard_normal(pool.view.shape) for s in (1, 2)})
    far_pool, far_before, places = far_states(pool, before, pool_bytes)
    run = functools.partial(run_mamba2, implementation=implementation)
    after, out = run(pool, parameters, before, tokens, [1, 2], [False, False])
    far_after, far_out = run(
        far_pool, parameters, far_before, tokens, [places[1], places[2]], [False, False]
    )
    assert op == "mamba2_decode"
    assert_equal_bits([out], [far_out])
    assert_states_equal(pool, after, far_pool, far_after, places)
