"""The Triton kernels of GQA and of KV writes, against float64 oracles.

On a card they run as they are. Without one they run in Triton's interpreter, in a
process of its own: `test_everything_here_passes_in_the_interpreter` starts it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention_cases import (
    DTYPES,
    Gqa,
    assert_result,
    gqa_oracle,
    make_gqa,
    run_gqa,
    run_gqa_decode,
)
from tests.gpu_compile import (
    compile_for_h200,
    pool_sized_copies,
    requires_h200_compiler,
)
from tests.paged_rows import PLACEMENTS, layout_with
from tests.test_ops_attention import (
    BIT_DECODE_ROWS,
    BIT_ROWS,
    GQA_CASES,
    GQA_DECODE_CASES,
    WINDOWED,
    alone,
    other_page,
)
from tests.test_ops_kv_write import SPECS, draw_values, locations_of, views_of
from tests.triton_interpreter import (
    IS_INTERPRETING,
    assert_passes_in_the_interpreter,
    interpret_launches,
)
from ukv import ops
from ukv.ids import KernelBlocks, WriteLocations
from ukv.layout import unified_layout
from ukv.pool import create_pool
from ukv.spec import AttentionSpec, MLASpec

runs_triton = pytest.mark.triton


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Triton's interpreter in the place of a card."""
    interpret_launches(
        monkeypatch, "gqa_decode_triton", "gqa_extend_triton", "kv_write_triton"
    )


@pytest.mark.skipif(IS_INTERPRETING, reason="this is that process")
@requires_h200_compiler
def test_everything_here_passes_in_the_interpreter():
    # Writes do not depend on which end of the buffer the entries lie at.
    assert_passes_in_the_interpreter(__file__, "-k", "not low and not float")


# Results


def supported(cases):
    return {
        name: case for name, case in cases.items() if not case.store.endswith("fnuz")
    }


EXTEND_CASES = supported(GQA_CASES)
DECODE_CASES = {
    **supported(GQA_DECODE_CASES),
    "Q1-chunks": Gqa(rows=((1, 900), (1, 5), (1, 257), (1, 0), (1, 128)), group=3),
    "Q1-chunks-window": Gqa(rows=((1, 900), (1, 5)), window=600, page_size=1),
    "Q2-chunks-sinks": Gqa(rows=((2, 900), (2, 2)), sinks=True, soft_cap=4.0),
    "Q17-tiles": Gqa(rows=((17, 90), (17, 17)), group=5, kv_heads=1),
    "D192-E128": Gqa(rows=((1, 300), (1, 9)), dims=(192, 128), kv_heads=1),
    "D256": Gqa(rows=((1, 300),), dims=(256, 256), kv_heads=1, group=1),
    "padded": Gqa(rows=((2, 30), (2, 9)), kv_heads=1, dims=(10, 7)),
    "f16": Gqa(rows=((1, 30), (1, 3)), store="f16", compute="f16"),
    "e5m2-f32": Gqa(rows=((1, 30), (1, 3)), store="e5m2", compute="f32"),
}


@runs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("case", EXTEND_CASES.values(), ids=EXTEND_CASES.keys())
def test_extend(case):
    data = make_gqa(case)
    result = run_gqa(case, data, implementation="triton")
    assert_result(case, result, gqa_oracle(case, data), width=case.dims[0])


@runs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("case", DECODE_CASES.values(), ids=DECODE_CASES.keys())
def test_decode(case):
    data = make_gqa(case)
    oracle = gqa_oracle(case, data, padding=0)
    result = run_gqa_decode(case, data, implementation="triton")
    assert_result(case, result, oracle, width=case.dims[0])


@runs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_a_row_without_keys_is_zero(sinks):
    case = Gqa(rows=((4, 2), (4, 0)), sinks=sinks)
    data = make_gqa(case)
    for run in (run_gqa_decode, run_gqa):
        result = run(case, data, implementation="triton")
        out, lse = (np.asarray(x)[:8] for x in result)
        sees_keys = np.isin(np.arange(8), [2, 3])
        assert (out[~sees_keys] == 0.0).all()
        assert (lse[~sees_keys] == -np.inf).all()
        assert np.isfinite(lse[sees_keys]).all()
        assert (np.abs(out[sees_keys]).max(axis=-1) > 0).all()


@runs_triton
@pytest.mark.gpu
def test_nan_of_a_visible_key_shows():
    case = Gqa(rows=((1, 20), (1, 9)))
    data = make_gqa(case)
    poisoned = tuple(jnp.full_like(buffer, 0xFFFFFFFF) for buffer in data.pool.buffers)
    pool = dataclasses.replace(data.pool, buffers=poisoned)
    for run in (run_gqa_decode, run_gqa):
        out, lse = run(
            case, dataclasses.replace(data, pool=pool), implementation="triton"
        )
        assert np.isnan(np.asarray(out)[:2]).all()
        assert np.isnan(np.asarray(lse)[:2]).all()


# Bits

BIT_RUNS = {
    "extend": (Gqa(rows=BIT_ROWS, group=3, dims=(16, 24), **WINDOWED), run_gqa),
    "extend-all": (Gqa(rows=BIT_ROWS), run_gqa),
    "decode": (Gqa(rows=BIT_DECODE_ROWS, group=3), run_gqa_decode),
    "decode-window": (Gqa(rows=BIT_DECODE_ROWS, **WINDOWED), run_gqa_decode),
}


@runs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("store", ["f32", "bf16"])
@pytest.mark.parametrize("name", BIT_RUNS)
def test_bits_do_not_depend_on_the_pages(name, store):
    case, run = BIT_RUNS[name]
    case = dataclasses.replace(case, store=store, compute=store)
    first, second = make_gqa(case, seed=1), make_gqa(case, seed=2)
    results = [run(case, data, implementation="triton") for data in (first, second)]
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)


@runs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("name", BIT_RUNS)
def test_a_row_alone_has_the_bits_it_has_in_a_batch(name):
    case, run = BIT_RUNS[name]
    case = dataclasses.replace(case, store="bf16", compute="bf16")
    data = make_gqa(case, seed=1)
    together = run(case, data, implementation="triton")
    for row, (query_len, _) in enumerate(case.rows):
        start = sum(case.query_lens[:row])
        single = run(*alone(case, data, row), implementation="triton")
        for a, b in zip(single, together, strict=True):
            np.testing.assert_array_equal(a[:query_len], b[start : start + query_len])


# Can the tests fail?


@runs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("run", [run_gqa, run_gqa_decode])
def test_mutations_are_rejected(run):
    case = Gqa(rows=((2, 40), (2, 9)), store="bf16", compute="bf16")
    data = make_gqa(case)
    oracle = gqa_oracle(case, data, padding=3 if run is run_gqa else 0)
    chosen = {"implementation": "triton"}
    assert_result(case, run(case, data, **chosen), oracle, width=16)
    k_view, _ = data.views
    for mutant in (
        run(case, other_page(data), **chosen),
        run(case, dataclasses.replace(data, views=(k_view, k_view)), **chosen),
        run(case, data, softmax_scale=2 * case.scale, **chosen),
        run(case, data, window=39, **chosen),
    ):
        with pytest.raises(AssertionError):
            assert_result(case, mutant, oracle, width=16)


# Writes


@runs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_writes_equal_the_reference(spec, placement):
    layout = layout_with(spec, placement, num_pages=6)
    sub = layout.sub_pool("kv")
    views = views_of(layout, spec.num_layers - 1)
    rng = np.random.default_rng(3)
    slots = rng.permutation(sub.num_pages * sub.page_size)[:7]
    pages, offsets = slots // sub.page_size, slots % sub.page_size
    pages[[1, 4]] = -1
    values = draw_values(rng, views, 7)
    places = locations_of(pages, offsets, layout)
    # Places that no buffer has.
    bad = jnp.asarray([2**31 - 2, 2**30, 0, 0], jnp.int32)
    places = dataclasses.replace(
        places,
        blocks=jnp.concatenate([places.blocks, bad]),
        offsets=jnp.concatenate(
            [places.offsets, jnp.asarray([0, 0, sub.page_size, -1], jnp.int32)]
        ),
    )
    values = tuple(jnp.concatenate([value, value[:4]]) for value in values)
    buffers = create_pool(layout, fill_word=0xFFFFFFFF).buffers
    written = [
        jax.jit(ops.write_kv, static_argnums=1, static_argnames="implementation")(
            buffers, views, places, values, implementation=implementation
        )
        for implementation in ("xla", "triton")
    ]
    for view in views:
        assert (np.asarray(written[0][view.buffer_index]) != 0xFFFFFFFF).any()
    for reference, found in zip(*written, strict=True):
        np.testing.assert_array_equal(np.asarray(reference), np.asarray(found))


# Far pages


def write_and_attend(buffers, layout, ids, q, k, v):
    """Write the tokens of one row, and attend its last ones: decode and extend."""
    views = views_of(layout, 1)
    position = np.arange(len(k))
    places = WriteLocations(
        blocks=ids[position // 64],
        offsets=jnp.asarray(position % 64, jnp.int32),
        sub_pool="kv",
    )
    chosen = {"implementation": "triton"}
    buffers = ops.write_kv(buffers, views, places, (k, v), **chosen)
    table = KernelBlocks(ids=ids[None], sub_pool="kv")
    kv_lens = jnp.asarray([len(k)], jnp.int32)
    chosen["softmax_scale"] = 0.1
    decoded = ops.gqa_decode(
        q[None, -1:], buffers, *views, table, kv_lens=kv_lens, **chosen
    )
    extended = ops.gqa_attention(
        q,
        buffers,
        *views,
        table,
        cu_query_lens=jnp.asarray([0, len(q)], jnp.int32),
        kv_lens=kv_lens,
        max_query_len=len(q),
        **chosen,
    )
    return buffers, (*decoded, *extended)


@pytest.mark.gpu
def test_far_pages_give_the_bits_of_near_ones():
    # Element 2**31 lies in the middle of the pool.
    spec = dataclasses.replace(LLAMA, num_kv_heads=2, num_layers=2)
    layout = unified_layout([spec], pool_bytes=9 << 30)
    sub = layout.sub_pool("kv")
    rng = np.random.default_rng(3)
    q, k, v = (
        jnp.asarray(rng.standard_normal((tokens, heads, 128)), jnp.bfloat16)
        for tokens, heads in ((70, 8), (200, 2), (200, 2))
    )
    run = jax.jit(write_and_attend, static_argnums=1, donate_argnums=0)
    results = []
    for pages in (np.arange(1, 5), sub.num_pages - np.arange(1, 5)):
        ids = pages.astype(np.int32) * sub.blocks_per_page
        buffers = create_pool(layout, fill_word=0xFFFFFFFF).buffers
        _, result = run(buffers, layout, jnp.asarray(ids), q, k, v)
        results.append(result)
    for near, far in zip(*results, strict=True):
        assert np.isfinite(np.asarray(near, np.float32)).all()
        np.testing.assert_array_equal(np.asarray(near), np.asarray(far), strict=True)


# Programs

GIB = 1 << 30
LLAMA = AttentionSpec(
    name="kv",
    num_layers=3,
    page_size=64,
    num_kv_heads=8,
    head_dim=128,
    dtype=DTYPES["bf16"],
)


def shapes_of(layout, *, rows, max_pages, tokens):
    ids = jax.ShapeDtypeStruct((rows, max_pages), jnp.int32)
    places = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    return (
        jax.eval_shape(lambda: create_pool(layout).buffers),
        KernelBlocks(ids=ids, sub_pool="kv"),
        WriteLocations(blocks=places, offsets=places, sub_pool="kv"),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    )


def serve(layout, window, buffers, table, places, kv_lens, q, bounds=None):
    """Write and attend layer after layer, the values following from the last."""
    chosen = {"softmax_scale": 0.1, "window": window, "implementation": "triton"}
    for layer in range(3):
        views = views_of(layout, layer)
        values = tuple(q.reshape(-1, *q.shape[-2:])[:, :8] for _ in views)
        buffers = ops.write_kv(buffers, views, places, values, implementation="triton")
        if bounds is None:
            q, _ = ops.gqa_decode(q, buffers, *views, table, kv_lens=kv_lens, **chosen)
        else:
            q, _ = ops.gqa_attention(
                q, buffers, *views, table, cu_query_lens=bounds, kv_lens=kv_lens,
                max_query_len=64, **chosen,
            )  # fmt: skip
    return buffers, q


@requires_h200_compiler
@pytest.mark.skipif(IS_INTERPRETING, reason="nothing is compiled there")
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("kind", ["decode", "extend"])
def test_a_step_of_several_layers_is_in_place(kind, window):
    other = MLASpec(
        name="other", num_layers=1, page_size=64, latent_dim=512, rope_dim=64
    )
    layout = unified_layout([LLAMA, other], pool_bytes=16 * GIB)
    tokens = 8 if kind == "decode" else 100
    shapes = shapes_of(layout, rows=8, max_pages=512, tokens=tokens)
    lead = (8, 1) if kind == "decode" else (tokens,)
    shapes += (jax.ShapeDtypeStruct((*lead, 32, 128), jnp.bfloat16),)
    if kind == "extend":
        shapes += (jax.ShapeDtypeStruct((9,), jnp.int32),)
    program = compile_for_h200(
        lambda *args: serve(layout, window, *args),
        *shapes,
        donate_argnums=0,
        thunks=True,
    )
    assert program.top_thunks == ["kCommandBuffer"]
    assert "iota" not in program.thunk_text
    assert program.alias_bytes >= layout.pool_bytes
    assert program.temp_bytes < 64 << 20
    assert pool_sized_copies(program.hlo_text, GIB) == []
