"""How extend kernels cut their work: tiles, schedule, sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.extend import (
    ExtendConfig,
    Problem,
    Source,
    make_plan,
    schedule,
)
from pallas_kernels.extend.config import default_config
from pallas_kernels.extend.tiles import Tiles, cut_on_grid

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
