"""The extend kernel over latent rows, expanded: the simulator, and a card."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.extend import (
    ExtendConfig,
    expand_heads,
)
from tests.attention_cases import (
    Mla,
    assert_result,
    expanded_oracle,
    make_mla,
    run_expanded,
)
from tests.gpu_compile import (
    compile_for_h200,
    pool_sized_copies,
    requires_h200_compiler,
)
from ukv import ops
from ukv.ids import KernelBlocks
from ukv.layout import unified_layout
from ukv.ops import expanded_rows
from ukv.ops.expanded_rows import WORKSPACE_BYTES
from ukv.ops.extend_kernels import mla_packed
from ukv.pool import create_pool
from ukv.spec import MLASpec

MIXED = ((1, 1), (5, 37), (0, 0), (19, 19), (1, 48), (0, 20))

CONFIG = ExtendConfig(num_ctas=2)

# In the simulator

KIMI = ft.partial(Mla, dims=(512, 64, 128, 128), store="bf16", compute="bf16")
TINY = ft.partial(Mla, dims=(128, 64, 64, 64), store="bf16", compute="bf16")
# What those marked slow show, others show too.
SIMULATED = [
    pytest.param(
        KIMI(rows=MIXED, heads=1), None, id="P16-mixed", marks=pytest.mark.slow
    ),
    pytest.param(
        KIMI(rows=((3, 150), (0, 0), (70, 80)), heads=1, page_size=64),
        128,
        id="P64-pieces",
    ),
    pytest.param(
        KIMI(rows=((66, 200), (1, 3)), heads=2, page_size=128, store="e4m3"),
        256,
        id="P128-e4m3",
        marks=pytest.mark.slow,
    ),
    pytest.param(TINY(rows=((3, 150), (0, 0), (1, 5)), heads=2), 256, id="tiny"),
]

jit_packed = jax.jit(
    mla_packed,
    static_argnames=("view", "softmax_scale", "config", "piece_len", "interpret"),
)


@pytest.mark.parametrize(("case", "piece_len"), SIMULATED)
def test_simulated(case, piece_len):
    data = make_mla(case)
    result = jit_packed(
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


# For a card that is not here


@requires_h200_compiler
def test_compiled_without_copies():
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
@pytest.mark.parametrize("case", ON_CARD.values(), ids=ON_CARD.keys())
@pytest.mark.parametrize("workspace", [WORKSPACE_BYTES, 1 << 21])
def test_on_a_card(case, workspace, monkeypatch):
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
