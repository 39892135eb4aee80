"""The Triton kernel of MLA decode, which also extends, against the float64 oracle.

On a card it runs as it is. Without one it runs in Triton's interpreter, in a process
of its own: `test_everything_here_passes_in_the_interpreter` starts it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention_cases import (
    DTYPES,
    Mla,
    absorbed_oracle,
    assert_result,
    make_mla,
    run_absorbed,
    run_mla_decode,
)
from tests.gpu_compile import (
    compile_for_h200,
    pool_sized_copies,
    requires_h200_compiler,
)
from tests.test_ops_attention import (
    BIT_DECODE_ROWS,
    MLA_CASES,
    MLA_DECODE_CASES,
    other_page,
)
from tests.triton_interpreter import (
    IS_INTERPRETING,
    assert_passes_in_the_interpreter,
    interpret_launches,
)
from ukv import ops
from ukv.ids import KernelBlocks
from ukv.layout import unified_layout
from ukv.pool import create_pool
from ukv.spec import MLASpec

runs_triton = pytest.mark.triton


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Triton's interpreter in the place of a card."""
    interpret_launches(monkeypatch, "mla_decode_triton")


@pytest.mark.skipif(IS_INTERPRETING, reason="this is that process")
@requires_h200_compiler
def test_everything_here_passes_in_the_interpreter():
    assert_passes_in_the_interpreter(__file__)


CASES = {
    **MLA_DECODE_CASES,
    "chunks": Mla(rows=((1, 900), (1, 5), (1, 257), (1, 0)), page_size=4),
    "tiles": Mla(rows=((4, 70), (4, 4)), heads=20, placement="high"),
    "no-rope": Mla(rows=((2, 31), (2, 1)), dims=(16, 0, 8, 8)),
    "padded-row": Mla(rows=((3, 20), (3, 2)), dims=(13, 5, 7, 9)),
    "f16": Mla(rows=((1, 30), (1, 3)), store="f16", compute="f16"),
    "e5m2-f32": Mla(rows=((1, 30), (1, 3)), store="e5m2"),
    "C512-R64-e4m3": Mla(
        rows=((2, 90), (2, 65)),
        dims=(512, 64, 128, 128),
        store="e4m3",
        compute="bf16",
        heads=32,
        page_size=64,
    ),
}


@runs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_decode(case):
    data = make_mla(case)
    result = run_mla_decode(case, data, implementation="triton")
    oracle = absorbed_oracle(case, data, padding=0)
    assert_result(case, result, oracle, width=sum(case.dims[:2]))


EXTEND_CASES = {
    name: MLA_CASES[name] for name in ("no-rope", "padded-row", "e4m3-bf16", "long")
}


@runs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("case", EXTEND_CASES.values(), ids=EXTEND_CASES.keys())
def test_extend_absorbed(case):
    data = make_mla(case)
    result = run_absorbed(case, data, implementation="triton")
    assert_result(case, result, absorbed_oracle(case, data), width=sum(case.dims[:2]))


@runs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("store", ["f32", "bf16"])
def test_bits_do_not_depend_on_the_pages(store):
    case = Mla(rows=BIT_DECODE_ROWS, store=store, compute=store)
    first, second = make_mla(case, seed=1), make_mla(case, seed=2)
    results = [
        run_mla_decode(case, data, implementation="triton") for data in (first, second)
    ]
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)


@runs_triton
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # NumPy, in the interpreter
def test_a_row_without_keys_is_zero_and_nan_shows():
    case = Mla(rows=((4, 2), (4, 0), (4, 9)))
    data = make_mla(case)
    out, lse = run_mla_decode(case, data, implementation="triton")
    sees_keys = np.isin(np.arange(12), [2, 3, 8, 9, 10, 11])
    assert (np.asarray(out)[~sees_keys] == 0.0).all()
    assert (np.asarray(lse)[~sees_keys] == -np.inf).all()
    poisoned = tuple(jnp.full_like(buffer, 0xFFFFFFFF) for buffer in data.pool.buffers)
    pool = dataclasses.replace(data.pool, buffers=poisoned)
    out, lse = run_mla_decode(
        case, dataclasses.replace(data, pool=pool), implementation="triton"
    )
    assert np.isnan(np.asarray(out)[sees_keys]).all()
    assert np.isnan(np.asarray(lse)[sees_keys]).all()


@runs_triton
@pytest.mark.gpu
def test_mutations_are_rejected():
    case = Mla(rows=((2, 40), (2, 9)), store="bf16", compute="bf16")
    data = make_mla(case)
    oracle = absorbed_oracle(case, data, padding=0)
    chosen = {"implementation": "triton"}
    assert_result(case, run_mla_decode(case, data, **chosen), oracle, width=32)
    for mutant in (
        run_mla_decode(case, other_page(data), **chosen),
        run_mla_decode(case, data, softmax_scale=2 * case.scale, **chosen),
    ):
        with pytest.raises(AssertionError):
            assert_result(case, mutant, oracle, width=32)


@requires_h200_compiler
@pytest.mark.skipif(IS_INTERPRETING, reason="nothing is compiled there")
@pytest.mark.parametrize(
    ("store", "page_size", "heads"), [("bf16", 64, 32), ("e4m3", 1, 128)]
)
def test_layers_are_read_in_place(store, page_size, heads):
    spec = MLASpec(
        name="mla",
        num_layers=3,
        page_size=page_size,
        latent_dim=512,
        rope_dim=64,
        dtype=DTYPES[store],
    )
    layout = unified_layout([spec], pool_bytes=16 << 30)

    def attend(buffers, ids, kv_lens, q):
        table = KernelBlocks(ids=ids, sub_pool="mla")
        for layer in range(3):
            out, _ = ops.mla_decode(
                q,
                buffers,
                layout.part_view("mla", layer=layer, part="latent"),
                table,
                kv_lens=kv_lens,
                latent_dim=512,
                softmax_scale=0.1,
                implementation="triton",
            )
            q = jnp.concatenate([out, q[..., 512:]], axis=-1)
        return buffers, q

    program = compile_for_h200(
        attend,
        jax.eval_shape(lambda: create_pool(layout).buffers),
        jax.ShapeDtypeStruct((8, 8192 // page_size), jnp.int32),
        jax.ShapeDtypeStruct((8,), jnp.int32),
        jax.ShapeDtypeStruct((8, 1, heads, 576), jnp.bfloat16),
        donate_argnums=0,
    )
    assert program.alias_bytes >= layout.pool_bytes
    assert program.temp_bytes < 256 << 20
    assert pool_sized_copies(program.hlo_text, 1 << 30) == []
