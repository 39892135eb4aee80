"""Absorbed and mixed extend of MLA: how it is cut, the simulator, and a card."""

import dataclasses
import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mla_decode as mosaic_mla
from pallas_kernels.extend import ExtendConfig
from pallas_kernels.mla_decode import MlaDecodeConfig
from tests.attention_cases import (
    PADDING,
    Mla,
    absorbed_oracle,
    assert_result,
    expanded_oracle,
    make_mla,
    run_absorbed,
    run_expanded,
)
from tests.gpu_compile import H200
from tests.test_ops_attention import other_page
from ukv.ops import mla_kernels
from ukv.ops.decode_rows import find_decode_rows
from ukv.ops.query_tiles import cut_packed

KIMI = ft.partial(Mla, dims=(512, 64, 128, 128), store="bf16", compute="bf16")
TINY = ft.partial(Mla, dims=(128, 64, 64, 64), store="bf16", compute="bf16")

# How a batch is cut

LENGTHS = {
    "example": ([5, 0, 1], [9, 0, 3], 6, 4),
    "padding": ([1, 4, 8, 3], [1, 7, 8, 90], 20, 4),
    "short-rows": ([3, 6], [2, 0], 9, 4),
    "one": ([2, 1, 2], [5, 1, 2], 5, 1),
}


@pytest.mark.parametrize("case", LENGTHS.values(), ids=LENGTHS.keys())
def test_tiles_that_end_with_the_row(case):
    query_lens, kv_lens, num_tokens, block_q = case
    bounds = np.cumsum([0, *query_lens])
    packed = cut_packed(
        jnp.asarray(bounds, jnp.int32),
        jnp.asarray(kv_lens, jnp.int32),
        num_tokens=num_tokens,
        block_q=block_q,
        from_end=True,
    )
    ends = np.asarray(packed.tiles.kv_lens(block_q))
    tokens, rows = np.asarray(packed.tokens), np.asarray(packed.tiles.rows)
    is_token = np.asarray(packed.is_token)
    assert is_token.tolist() == [t < bounds[-1] for t in range(num_tokens)]
    for token, place in enumerate(np.asarray(packed.places)[: bounds[-1]]):
        tile, query = divmod(int(place), block_q)
        row = np.searchsorted(bounds[1:], token, side="right")
        assert tokens[tile, query] == token
        assert rows[tile] == row
        position = kv_lens[row] - query_lens[row] + token - bounds[row]
        if position >= 0:
            assert ends[tile] - block_q + query == position
        else:
            assert ends[tile] <= max(kv_lens[row], 0)
    used = {int(place) // block_q for place in np.asarray(packed.places)[: bounds[-1]]}
    assert all(ends[tile] == 0 for tile in range(len(ends)) if tile not in used)


def test_decode_rows_and_back():
    bounds = jnp.asarray([0, 5, 6, 6, 7], jnp.int32)
    kv_lens = jnp.asarray([9, 8, 7, 6], jnp.int32)
    found = find_decode_rows(bounds, kv_lens, num_tokens=9)
    assert found.tokens.tolist() == [9, 5, 9, 6]
    assert found.kv_lens.tolist() == [0, 8, 0, 6]
    assert found.other_lens.tolist() == [9, 0, 7, 0]
    packed = jnp.arange(9)
    assert found.take(packed).tolist() == [[8], [5], [8], [6]]
    put = found.put(packed, jnp.asarray([[-1], [-2], [-3], [-4]]))
    assert put.tolist() == [0, 1, 2, 3, 4, -2, -4, 7, 8]


# In the simulator


@pytest.fixture
def simulated(monkeypatch):
    """Simulators in the place of the kernels for Hopper."""
    monkeypatch.setattr("ukv.implementation.default_target", lambda: H200)
    decode = ft.partial(
        mosaic_mla.mla_decode,
        interpret=True,
        config=MlaDecodeConfig(num_ctas=3, min_tiles=1),
    )
    monkeypatch.setattr(mosaic_mla, "mla_decode", decode)
    extend = ft.partial(
        mla_kernels.mla_packed, interpret=True, config=ExtendConfig(num_ctas=2)
    )
    monkeypatch.setattr(mla_kernels, "mla_packed", extend)
    jax.clear_caches()
    yield
    jax.clear_caches()


ABSORBED = {
    "P64-H32": KIMI(rows=((5, 70), (0, 0), (1, 129), (3, 2)), heads=32, page_size=64),
    "P16-H3": KIMI(rows=((40, 70), (1, 1)), heads=3),
}


@pytest.mark.parametrize("case", ABSORBED.values(), ids=ABSORBED.keys())
def test_absorbed(case, simulated):
    data = make_mla(case)
    result = run_absorbed(case, data, implementation="mosaic_gpu")
    assert_result(case, result, absorbed_oracle(case, data), width=576)


@pytest.mark.parametrize("most_absorbed", [1, 128])
@pytest.mark.parametrize("model", [KIMI, TINY], ids=["kimi", "tiny"])
def test_heads_of_a_mixed_batch(simulated, model, most_absorbed, monkeypatch):
    monkeypatch.setattr(mla_kernels, "MOST_ABSORBED", most_absorbed)
    case = model(rows=((1, 70), (6, 130), (1, 1), (0, 9)), heads=1, page_size=64)
    data = make_mla(case)
    result = run_expanded(case, data, implementation="mosaic_gpu")
    oracle = expanded_oracle(case, data)
    assert_result(case, result, oracle, width=sum(case.dims[1:3]), operand="bfloat16")


# On a card

ON_CARD = {
    "P64-H32": KIMI(
        rows=((100, 900), (1, 1), (0, 0), (3, 2), (1, 800), (64, 64), (5, 700)),
        heads=32,
        page_size=64,
    ),
    "P16-H3": KIMI(rows=((77, 78), (1, 16), (1, 17), (100, 333), (4, 2)), heads=3),
    "P32-H128": KIMI(
        rows=((30, 700), (1, 500), (9, 9)), heads=128, page_size=32, placement="high"
    ),
    "P128-H16": KIMI(rows=((100, 900), (17, 500)), heads=16, page_size=128),
    "many-rows": KIMI(
        rows=tuple((i % 5, 37 * i % 300 + i % 5) for i in range(2, 92)),
        heads=8,
        page_size=64,
    ),
}


def check(case, run, oracle, **options):
    """The oracle's result, and the same bits wherever the pages lie."""
    data = make_mla(case)
    result = run(case, data)
    assert_result(case, result, oracle(case, data), **options)
    moved = run(case, make_mla(case, seed=1))
    for a, b in zip(result, moved, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)
    wrong = run(case, other_page(data))
    with pytest.raises(AssertionError):
        assert_result(case, wrong, oracle(case, data), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])
@pytest.mark.parametrize("case", ON_CARD.values(), ids=ON_CARD.keys())
def test_absorbed_on_a_card(case, implementation):
    run = ft.partial(run_absorbed, implementation=implementation)
    check(case, run, absorbed_oracle, width=576)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])
@pytest.mark.parametrize("case", ON_CARD.values(), ids=ON_CARD.keys())
def test_heads_on_a_card(case, implementation):
    # Bounds on both sides of what is absorbed; the shapes differ, so no program is
    # found again.
    for bound in (mla_kernels.MOST_ABSORBED, 2 * mla_kernels.MOST_ABSORBED):
        bounded = dataclasses.replace(case, bound=bound)
        run = ft.partial(run_expanded, implementation=implementation)
        check(bounded, run, expanded_oracle, width=192, operand="bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 64])
def test_a_small_model_on_a_card(page_size):
    rows = ((100, 400), (1, 1), (0, 0), (3, 2), (1, 300), (64, 64))
    case = TINY(rows=rows, heads=4, page_size=page_size)
    run = ft.partial(run_absorbed, implementation="mosaic_gpu")
    check(case, run, absorbed_oracle, width=192)
    run = ft.partial(run_expanded, implementation="mosaic_gpu")
    for bound in (mla_kernels.MOST_ABSORBED, 2 * mla_kernels.MOST_ABSORBED):
        bounded = dataclasses.replace(case, bound=bound)
        check(bounded, run, expanded_oracle, width=128, operand="bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(8))
def test_random_heads_on_a_card(seed):
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(rng.integers(1, 9)):
        most = int(rng.choice([1, 2, 2, 9, 300]))
        query_len = int(rng.integers(most))
        rows.append((query_len, query_len + int(rng.choice([0, 1, 64, 300, 500]))))
    case = KIMI(
        rows=(*rows, (1, 130)),
        heads=int(rng.choice([1, 8, 16, 32])),
        page_size=int(rng.choice([16, 32, 64, 128])),
        placement=str(rng.choice(["low", "high", "static"])),
        bound=int(rng.choice([mla_kernels.MOST_ABSORBED, 512])),
    )
    assert case.num_tokens + PADDING > 0
    run = ft.partial(run_expanded, implementation="mosaic_gpu")
    data = make_mla(case)
    oracle = expanded_oracle(case, data)
    assert_result(case, run(case, data), oracle, width=192, operand="bfloat16")
