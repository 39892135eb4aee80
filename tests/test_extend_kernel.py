"""The extend kernels: their tiles, the simulator against float64, and a card."""

import dataclasses
import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.extend import (
    ExtendConfig,
    Problem,
    Source,
    expand_heads,
    make_plan,
    schedule,
)
from pallas_kernels.extend.config import default_config
from pallas_kernels.extend.tiles import Tiles, cut_on_grid
from tests.attention_cases import (
    Gqa,
    Mla,
    assert_result,
    expanded_oracle,
    gqa_oracle,
    make_gqa,
    make_mla,
    run_expanded,
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
from ukv.ops import expanded_rows
from ukv.ops.expanded_rows import WORKSPACE_BYTES
from ukv.ops.extend_kernels import gqa_packed, mla_packed
from ukv.ops.online_softmax import Scoring
from ukv.pool import create_pool, write_entries
from ukv.spec import AttentionSpec, MLASpec

BF16 = {"store": "bf16", "compute": "bf16"}
MIXED = ((1, 1), (5, 37), (0, 0), (19, 19), (1, 48), (0, 20))

# Tiles

cut = jax.jit(cut_on_grid, static_argnames=("num_tokens", "block_q"))


def whole_rows(kv_lens):
    """All keys of all rows are there."""
    return jnp.zeros(len(kv_lens), jnp.int32), jnp.asarray(kv_lens, jnp.int32)


deal = jax.jit(schedule.deal, static_argnames=("num_groups", "num_ctas"))

TILE_CASES = {
    "example": ([5, 0, 3], [9, 0, 3], 10, 4),
    "aligned": ([64, 128], [64, 500], 192, 64),
    "ragged": ([1, 70, 0, 63, 2], [7, 70, 4, 100, 1], 150, 64),
    "no-padding": ([3, 130], [3, 200], 133, 64),
    "empty": ([0, 0], [3, 0], 70, 64),
    "token-each": ([1] * 9, [4] * 9, 9, 64),
}


@pytest.mark.parametrize("case", TILE_CASES.values(), ids=TILE_CASES.keys())
def test_every_token_is_in_one_tile(case):
    query_lens, kv_lens, num_tokens, block_q = case
    bounds = np.cumsum([0, *query_lens])
    tiles, places = cut(
        jnp.asarray(bounds, jnp.int32),
        jnp.asarray(kv_lens, jnp.int32),
        *whole_rows(kv_lens),
        num_tokens=num_tokens,
        block_q=block_q,
    )
    places = np.asarray(places)
    seen = np.zeros(num_tokens, int)
    for number, tile in enumerate(np.stack(tiles, axis=1).tolist()):
        row, base, first, end, position, key_start, key_end = tile
        assert key_start == 0
        assert base % block_q == 0
        assert 0 <= first <= end <= block_q
        for place in range(first, end):
            token = base + place
            seen[token] += 1
            assert places[token] == number * block_q + place
            if token < bounds[-1]:
                owner = np.searchsorted(bounds[1:], token, side="right")
                context_len = kv_lens[owner] - query_lens[owner]
                assert (row, key_end) == (owner, kv_lens[owner])
                assert position + place == context_len + token - bounds[owner]
            else:
                assert key_end == 0
                assert position + place < 0
    assert (seen == 1).all()


# Schedule


@pytest.mark.parametrize("num_ctas", [1, 3, 16])
@pytest.mark.parametrize("num_groups", [1, 4, 5])
def test_every_piece_is_dealt_once(num_ctas, num_groups):
    tiles, _ = cut(
        jnp.asarray([0, 700, 700, 703, 900]),
        jnp.asarray([700, 3, 1000, 197]),
        *whole_rows([700, 3, 1000, 197]),
        num_tokens=960,
        block_q=64,
    )
    cost = schedule.costs(tiles, block_kv=64, window=None)
    pieces, counts = deal(tiles, cost, num_groups=num_groups, num_ctas=num_ctas)
    found, loads = [], []
    for mine, count in zip(np.asarray(pieces), np.asarray(counts), strict=True):
        number, group = mine[:count, schedule.TILE], mine[:count, schedule.HEADS]
        assert (np.diff(group) >= 0).all()
        np.testing.assert_array_equal(
            mine[:count, : len(tiles)], np.stack(tiles, axis=1)[number]
        )
        found += zip(number.tolist(), group.tolist(), strict=True)
        loads.append(np.asarray(cost)[number].sum())
    live = np.flatnonzero(np.asarray(cost)).tolist()
    assert sorted(found) == [(n, g) for n in live for g in range(num_groups)]
    assert max(loads) - min(loads) <= np.max(cost)


def test_the_example_of_the_schedule():
    cost = jnp.asarray([1, 2, 2, 7, 7, 8, 8, 9, 9], jnp.int32)
    tiles = Tiles(*[jnp.zeros(9, jnp.int32)] * 7)
    pieces, counts = deal(tiles, cost, num_groups=1, num_ctas=3)
    dealt = np.asarray(cost)[np.asarray(pieces)[:, :, schedule.TILE]]
    assert dealt.tolist() == [[9, 7, 2], [9, 7, 2], [8, 8, 1]]
    assert counts.tolist() == [3, 3, 3]


def test_costs_are_blocks_and_one():
    tiles, _ = cut(
        jnp.asarray([0, 64, 128]),
        jnp.asarray([64, 1000]),
        *whole_rows([64, 1000]),
        num_tokens=128,
        block_q=64,
    )
    assert schedule.costs(tiles, block_kv=64, window=None).tolist() == [2, 17, 0, 0]
    assert schedule.costs(tiles, block_kv=64, window=10).tolist() == [2, 3, 0, 0]
    tiles = tiles._replace(key_start=jnp.asarray([0, 128, 0, 0]))
    tiles = tiles._replace(key_end=jnp.asarray([64, 512, 0, 0]))
    assert schedule.costs(tiles, block_kv=64, window=None).tolist() == [2, 7, 0, 0]


# Sizes

GQA = Problem(
    num_q_heads=8,
    num_kv_heads=2,
    keys=(Source(0, 128, 1),),
    value=Source(0, 128, 1),
    page_size=16,
    softmax_scale=0.1,
    window=None,
    soft_cap=None,
    has_sinks=False,
)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_q_heads": 5}, "problem.num_q_heads=5 must be a multiple"),
        ({"keys": (Source(0, 96, 1),)}, "multiples of 64 columns"),
        ({"value": Source(0, 64, 1)}, "values of 64 must be as wide"),
        ({"page_size": 4}, "page_size=4 must be a multiple of 8"),
        ({"page_size": 48}, "page_size=48 must be a multiple of 8 and divide"),
        ({"softmax_scale": -1.0}, "softmax_scale=-1.0 must be positive"),
        ({"window": 0}, "window=0 must be 1 or more"),
        ({"soft_cap": 0.0}, "soft_cap=0.0 must be positive"),
    ],
)
def test_problems_that_the_kernel_cannot_do(changed, message):
    with pytest.raises(ValueError, match=message):
        make_plan(GQA._replace(**changed), ExtendConfig())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"block_kv": 96}, "block_kv=96 must be a multiple of 64"),
        ({"stages": 1}, "stages=1 must be at least 2"),
        ({"q_stages": 3}, "q_stages=3 must be 1 or 2"),
        ({"num_ctas": 0}, "num_ctas=0 must be at least 1"),
    ],
)
def test_configs_out_of_range(values, message):
    with pytest.raises(ValueError, match=message):
        ExtendConfig(**values)


def test_a_config_that_does_not_fit():
    with pytest.raises(ValueError, match="bytes of shared memory"):
        make_plan(GQA, ExtendConfig(stages=4))


def test_the_default_has_the_stages_that_fit():
    narrow = GQA._replace(keys=(Source(0, 64, 1),), value=Source(0, 64, 1))
    assert default_config(GQA).stages == 2
    assert default_config(narrow).stages == 4
    assert make_plan(narrow, default_config(narrow)).smem_bytes <= 227 << 10


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


KIMI = ft.partial(Mla, dims=(512, 64, 128, 128), store="bf16", compute="bf16")
TINY = ft.partial(Mla, dims=(128, 64, 64, 64), store="bf16", compute="bf16")
SIMULATED_MLA = {
    "P16-mixed": (KIMI(rows=MIXED, heads=1), None),
    "P64-pieces": (
        KIMI(rows=((3, 300), (0, 0), (129, 140)), heads=1, page_size=64),
        128,
    ),
    "P128-e4m3": (
        KIMI(rows=((66, 200), (1, 3)), heads=2, page_size=128, store="e4m3"),
        256,
    ),
    "tiny": (TINY(rows=((3, 150), (0, 0), (70, 70), (1, 5)), heads=2), 128),
}

jit_mla_packed = jax.jit(
    mla_packed,
    static_argnames=("view", "softmax_scale", "config", "piece_len", "interpret"),
)


@pytest.mark.parametrize(
    ("case", "piece_len"), cases_of(SIMULATED_MLA, slow=("P16-mixed", "P128-e4m3"))
)
def test_simulated_mla(case, piece_len):
    data = make_mla(case)
    result = jit_mla_packed(
        jnp.asarray(data.q_heads),
        jnp.asarray(data.w_kc),
        jnp.asarray(data.w_vc),
        data.pool.buffers,
        data.view,
        data.pool.table.ids,
        **case.batch,
        softmax_scale=case.scale,
        config=CONFIG,
        piece_len=piece_len,
        interpret=True,
    )
    oracle = expanded_oracle(case, data)
    assert_result(case, result, oracle, width=192, operand="bfloat16")


jit_expand = jax.jit(expand_heads, static_argnames=("num_ctas", "interpret"))


@pytest.mark.parametrize("num_places", [0, 130, 384, 9999])
def test_expanded_heads(num_places):
    rng = np.random.default_rng(0)
    latents = jnp.asarray(rng.standard_normal((384, 192)), jnp.bfloat16)
    weights = jnp.asarray(rng.standard_normal((3, 64, 128)), jnp.bfloat16)
    found = jit_expand(
        latents, weights, jnp.int32(num_places), num_ctas=2, interpret=True
    )
    used = min(num_places, 384)
    rows, columns = (np.asarray(x, np.float64) for x in (latents[:, :128], weights))
    wanted = np.einsum("tl,hwl->htw", rows, columns)[:, :used]
    error = np.abs(np.asarray(found, np.float64)[:, :used] - wanted)
    assert error.max(initial=0) <= 2**-8 * np.abs(wanted).max(initial=0)


@pytest.mark.parametrize(
    ("places", "width", "latent_dim", "message"),
    [
        (100, 64, 64, "max_places=100 must be a multiple of 128"),
        (128, 96, 64, "width=96 and latent_dim=64 of 64"),
        (128, 320, 64, "width=320 must be up to 256"),
        (128, 64, 256, "latent_dim=256 up to 192"),
    ],
)
def test_sizes_that_are_not_expanded(places, width, latent_dim, message):
    latents = jnp.zeros((places, 192), jnp.bfloat16)
    weights = jnp.zeros((1, width, latent_dim), jnp.bfloat16)
    with pytest.raises(ValueError, match=message):
        expand_heads(latents, weights, jnp.int32(1))


def test_simulated_bits_do_not_depend_on_the_pages():
    case, config = SIMULATED["D64-mixed"]
    first, second = make_gqa(case, seed=1), make_gqa(case, seed=2)
    assert (np.asarray(first.pool.table.ids) != second.pool.table.ids).any()
    pairs = zip(
        simulate(case, first, config), simulate(case, second, config), strict=True
    )
    for a, b in pairs:
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=1)


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


@requires_h200_compiler
def test_mla_compiled_without_copies():
    spec = MLASpec(name="mla", num_layers=4, page_size=64, latent_dim=512, rope_dim=64)
    layout = unified_layout([spec], pool_bytes=6 << 30)
    view = layout.part_view("mla", layer=3, part="latent")
    pool = jax.eval_shape(ft.partial(create_pool, layout))

    def step(q, w_kc, w_vc, buffers, ids, cu_query_lens, kv_lens):
        return ops.mla_extend(
            q,
            w_kc,
            w_vc,
            buffers,
            view,
            KernelBlocks(ids=ids, sub_pool="mla"),
            cu_query_lens=cu_query_lens,
            kv_lens=kv_lens,
            max_query_len=1024,
            softmax_scale=0.1,
        )

    shape = jax.ShapeDtypeStruct
    program = compile_for_h200(
        step,
        shape((1024, 32, 192), jnp.bfloat16),
        shape((32, 128, 512), jnp.bfloat16),
        shape((32, 128, 512), jnp.bfloat16),
        pool.buffers,
        shape((3, 1024), jnp.int32),
        shape((4,), jnp.int32),
        shape((3,), jnp.int32),
    )
    assert "mosaic_gpu" in program.hlo_text
    assert program.temp_bytes < 2.5 * WORKSPACE_BYTES
    assert pool_sized_copies(program.hlo_text, WORKSPACE_BYTES // 2) == []


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


def test_no_tokens():
    case, config = SIMULATED["D64-mixed"]
    data = dataclasses.replace(make_gqa(case), q=jnp.zeros((0, 2, 64), jnp.bfloat16))
    out, lse = simulate(case, data, config)
    assert out.shape == (0, 2, 64)
    assert lse.shape == (0, 2)


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


MLA_ON_CARD = {
    "P64-H32": KIMI(
        rows=((300, 300), (1, 1), (0, 0), (200, 800), (1, 900), (64, 64)),
        heads=32,
        page_size=64,
    ),
    "P16-H3": KIMI(rows=((77, 78), (1, 16), (1, 17), (200, 333), (4, 2)), heads=3),
    "P128-e5m2": KIMI(
        rows=((300, 900), (17, 500)), heads=4, page_size=128, store="e5m2"
    ),
    "P1": KIMI(rows=((70, 200), (17, 50)), heads=4, page_size=1, placement="high"),
    "tiny": TINY(rows=((300, 400), (1, 90), (64, 64)), heads=4, page_size=64),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", MLA_ON_CARD.values(), ids=MLA_ON_CARD.keys())
@pytest.mark.parametrize("workspace", [WORKSPACE_BYTES, 1 << 21])
def test_mla_on_a_card(case, workspace, monkeypatch):
    monkeypatch.setattr(expanded_rows, "WORKSPACE_BYTES", workspace)
    jax.clear_caches()
    data = make_mla(case)
    result = run_expanded(case, data, implementation="mosaic_gpu")
    oracle = expanded_oracle(case, data)
    assert_result(case, result, oracle, width=192, operand="bfloat16")
    moved = make_mla(case, seed=1)
    again = run_expanded(case, moved, implementation="mosaic_gpu")
    for a, b in zip(result, again, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_random_case_on_a_card(seed):
    check_on_card(random_case(seed))
