"""The extend kernel over K and V: the simulator against float64, and a card."""

import dataclasses
import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.extend import (
    ExtendConfig,
)
from tests.attention_cases import (
    Gqa,
    assert_result,
    gqa_oracle,
    make_gqa,
    run_gqa,
)
from tests.gpu_compile import (
    compile_for_h200,
    pool_sized_copies,
    requires_h200_compiler,
)
from tests.pools import POISON
from ukv import ops
from ukv.ids import KernelBlocks
from ukv.layout import unified_layout
from ukv.ops.extend_kernels import gqa_packed
from ukv.ops.online_softmax import Scoring
from ukv.pool import create_pool, write_entries
from ukv.spec import AttentionSpec

BF16 = {"store": "bf16", "compute": "bf16"}
MIXED = ((1, 1), (5, 37), (0, 0), (19, 19), (1, 48), (0, 20))

# In the simulator

CONFIG = ExtendConfig(num_ctas=2)
SIMULATED = {
    "D64-mixed": (Gqa(rows=MIXED, dims=(64, 64), kv_heads=1, **BF16), CONFIG),
    "D128-P64-tiles": (
        Gqa(
            rows=((3, 20), (70, 200), (4, 2), (61, 64)),
            dims=(128, 128),
            kv_heads=1,
            page_size=64,
            placement="high",
            **BF16,
        ),
        dataclasses.replace(CONFIG, q_stages=2, block_kv=64, stages=3),
    ),
    "M3-window-sinks-cap": (
        Gqa(
            rows=((5, 300), (70, 161), (1, 9)),
            dims=(64, 64),
            kv_heads=1,
            group=3,
            window=90,
            sinks=True,
            soft_cap=3.0,
            placement="static",
            **BF16,
        ),
        CONFIG,
    ),
    "window-in-the-last-page": (
        Gqa(
            rows=((1, 70), (3, 148)),
            dims=(64, 64),
            kv_heads=1,
            window=1,
            **BF16,
        ),
        CONFIG,
    ),
    "P128-pieces": (
        Gqa(
            rows=((2, 129), (130, 260)),
            dims=(64, 64),
            kv_heads=1,
            group=1,
            page_size=128,
            **BF16,
        ),
        dataclasses.replace(CONFIG, block_kv=64),
    ),
}

jit_gqa_packed = jax.jit(
    gqa_packed, static_argnames=("k_view", "v_view", "scoring", "config", "interpret")
)


def simulate(case, data, config):
    options = data.options(case)
    sinks = options.pop("sinks")
    return jit_gqa_packed(
        jnp.asarray(data.q),
        data.pool.buffers,
        *data.views,
        data.pool.table.ids,
        **case.batch,
        scoring=Scoring(**options),
        sinks=sinks,
        config=config,
        interpret=True,
    )


def cases_of(cases, *, slow):
    """Parameters for pytest; what the names in `slow` show, others show too."""
    return [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name in slow))
        for name, case in cases.items()
    ]


@pytest.mark.parametrize(("case", "config"), cases_of(SIMULATED, slow=("P128-pieces",)))
def test_simulated(case, config):
    data = make_gqa(case)
    result = simulate(case, data, config)
    assert_result(case, result, gqa_oracle(case, data), width=case.dims[0])


def test_simulated_bits_do_not_depend_on_the_pages():
    case, config = SIMULATED["D64-mixed"]
    first, second = make_gqa(case, seed=1), make_gqa(case, seed=2)
    assert (np.asarray(first.pool.table.ids) != second.pool.table.ids).any()
    pairs = zip(
        simulate(case, first, config), simulate(case, second, config), strict=True
    )
    for a, b in pairs:
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=1)


def test_no_tokens():
    case, config = SIMULATED["D64-mixed"]
    data = dataclasses.replace(make_gqa(case), q=jnp.zeros((0, 2, 64), jnp.bfloat16))
    out, lse = simulate(case, data, config)
    assert out.shape == (0, 2, 64)
    assert lse.shape == (0, 2)


# For a card that is not here


def compile_gqa(*, heads, kv_heads, width, page_size, **options):
    spec = AttentionSpec(
        name="full",
        num_layers=4,
        page_size=page_size,
        num_kv_heads=kv_heads,
        head_dim=width,
    )
    layout = unified_layout([spec], pool_bytes=6 << 30)
    views = [layout.part_view("full", layer=3, part=part) for part in "kv"]
    pool = jax.eval_shape(ft.partial(create_pool, layout))

    def step(q, buffers, ids, cu_query_lens, kv_lens, sinks):
        return ops.gqa_attention(
            q,
            buffers,
            *views,
            KernelBlocks(ids=ids, sub_pool="full"),
            cu_query_lens=cu_query_lens,
            kv_lens=kv_lens,
            max_query_len=1024,
            softmax_scale=0.1,
            sinks=sinks,
            implementation="mosaic_gpu",
            **options,
        )

    shape = jax.ShapeDtypeStruct
    return compile_for_h200(
        step,
        shape((1024, heads, width), jnp.bfloat16),
        pool.buffers,
        shape((3, 64), jnp.int32),
        shape((4,), jnp.int32),
        shape((3,), jnp.int32),
        shape((heads,), jnp.float32),
    )


@requires_h200_compiler
@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 32, "kv_heads": 8, "width": 128, "page_size": 16},
        {"heads": 64, "kv_heads": 8, "width": 64, "page_size": 64, "window": 128},
    ],
    ids=["H32-D128-P16", "H64-D64-P64-window"],
)
def test_compiled_without_copies(sizes):
    program = compile_gqa(**sizes)
    assert "mosaic_gpu" in program.hlo_text
    assert program.temp_bytes < 2 << 20
    assert pool_sized_copies(program.hlo_text, 1 << 24) == []


# On a card

ON_CARD = {
    "D128-P64": Gqa(
        rows=((300, 300), (1, 1), (0, 0), (200, 1000), (1, 900), (64, 64)),
        dims=(128, 128),
        kv_heads=8,
        group=4,
        page_size=64,
        **BF16,
    ),
    "D128-P16-high": Gqa(
        rows=((77, 78), (1, 16), (1, 17), (200, 333)),
        dims=(128, 128),
        kv_heads=2,
        group=4,
        placement="high",
        **BF16,
    ),
    "D64-P32-window-sinks": Gqa(
        rows=((400, 900), (3, 128), (1, 129), (130, 130)),
        dims=(64, 64),
        kv_heads=8,
        group=8,
        page_size=32,
        window=128,
        sinks=True,
        **BF16,
    ),
    "D128-M5-long-window-cap": Gqa(
        rows=((300, 1200), (17, 500)),
        dims=(128, 128),
        kv_heads=1,
        group=5,
        page_size=128,
        window=400,
        soft_cap=5.0,
        **BF16,
    ),
    "D128-M1-static": Gqa(
        rows=((300, 1200), (17, 500), (4, 2), (3, 0)),
        dims=(128, 128),
        kv_heads=3,
        group=1,
        page_size=64,
        placement="static",
        **BF16,
    ),
    "many-rows": Gqa(
        rows=tuple((i % 5, 37 * i % 300 + i % 5) for i in range(120)),
        dims=(128, 128),
        kv_heads=2,
        group=2,
        page_size=16,
        **BF16,
    ),
}


def random_case(seed):
    rng = np.random.default_rng(seed)
    pick = lambda *options: options[rng.integers(len(options))]  # noqa: E731
    rows = []
    for _ in range(rng.integers(1, 7)):
        query_len = int(pick(0, 1, rng.integers(1, 9), rng.integers(1, 400)))
        context_len = int(pick(0, rng.integers(1, 65), rng.integers(1, 1500)))
        rows.append((query_len, query_len + context_len))
    rows.append((int(rng.integers(1, 65)), int(rng.integers(64, 200))))
    width = pick(64, 128)
    return Gqa(
        rows=tuple(rows),
        dims=(width, width),
        kv_heads=pick(1, 2),
        group=pick(1, 2, 3, 4, 8),
        page_size=pick(16, 32, 64, 128),
        window=pick(None, None, 1, int(rng.integers(2, 700))),
        sinks=pick(False, 1),
        soft_cap=pick(None, None, 4.0),
        placement=pick("low", "high", "float", "static"),
        **BF16,
    )


def check_on_card(case):
    data = make_gqa(case)
    result = run_gqa(case, data, implementation="mosaic_gpu")
    assert_result(case, result, gqa_oracle(case, data), width=case.dims[0])
    moved = run_gqa(case, make_gqa(case, seed=1), implementation="mosaic_gpu")
    for a, b in zip(result, moved, strict=1):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=1)


def far_and_near(pool_bytes, implementation):
    """Outputs over the same rows, once in the first pages and once in the last."""
    spec = AttentionSpec(
        name="full", num_layers=2, page_size=64, num_kv_heads=2, head_dim=128
    )
    layout = unified_layout([spec], pool_bytes=pool_bytes)
    views = [layout.part_view("full", layer=1, part=part) for part in "kv"]
    sub = layout.sub_pool("full")
    rng = np.random.default_rng(3)
    q, k, v = (
        jnp.asarray(rng.standard_normal((300, heads, 128)), jnp.bfloat16)
        for heads in (8, 2, 2)
    )
    position = np.arange(300)
    for pages in (np.arange(1, 6), sub.num_pages - np.arange(1, 6)):
        ids = pages.astype(np.int32) * sub.blocks_per_page
        (buffer,) = create_pool(layout, fill_word=POISON).buffers
        for view, values in zip(views, (k, v), strict=True):
            blocks = ids[position // 64] + view.block_offset
            rows = jnp.asarray(blocks * 64 + position % 64, jnp.int32)
            buffer = put(buffer, view, rows, values)
        yield jit_attention(
            q,
            (buffer,),
            *views,
            KernelBlocks(ids=jnp.asarray(ids[None]), sub_pool="full"),
            cu_query_lens=jnp.asarray([0, 300], jnp.int32),
            kv_lens=jnp.asarray([300], jnp.int32),
            max_query_len=300,
            softmax_scale=0.1,
            implementation=implementation,
        )


put = jax.jit(write_entries, static_argnums=1, donate_argnums=0)
jit_attention = jax.jit(
    ops.gqa_attention,
    static_argnames=(
        "k_view",
        "v_view",
        "max_query_len",
        "softmax_scale",
        "implementation",
    ),
)


@pytest.mark.parametrize(
    ("pool_bytes", "implementation"),
    [
        (1 << 21, "xla"),
        pytest.param(9 << 30, "mosaic_gpu", marks=pytest.mark.gpu),
    ],
)
def test_far_pages(pool_bytes, implementation):
    near, far = far_and_near(pool_bytes, implementation)
    for a, b in zip(near, far, strict=True):
        assert np.isfinite(np.asarray(a, np.float32)).all()
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_CARD.values(), ids=ON_CARD.keys())
def test_on_a_card(case):
    check_on_card(case)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_random_case_on_a_card(seed):
    check_on_card(random_case(seed))
