"""How MLA decode cuts a batch, and where its tiles lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla_decode import plan
from pallas_kernels.mla_decode.config import TILE
from pallas_kernels.mla_decode.pages import tile_blocks, tile_pieces

jit_plan_work = jax.jit(
    plan.plan_work, static_argnames=("page_size", "num_ctas", "min_tiles")
)


def plan_work(kv_lens, *, page_size=64, **statics):
    """A plan of rows whose pages are 0, 1, 2, ..., then those of the next row."""
    pages = -(-max(*kv_lens, page_size) // page_size)
    table = np.arange(len(kv_lens) * pages).reshape(-1, pages)
    operands = jnp.asarray(table, jnp.int32), jnp.asarray(kv_lens, jnp.int32)
    return table, jit_plan_work(*operands, page_size=page_size, **statics)


def parts_of(found_plan, num_ctas):
    """`{part id: (cta, row, first tile, tiles)}`, as a kernel walks through a plan."""
    ctas, rows = np.asarray(found_plan.ctas), np.asarray(found_plan.rows)
    found = {}
    for cta in range(num_ctas):
        count, row, first, tiles, kv_len, row_tiles, budget, _ = ctas[cta].tolist()
        for _ in range(count):
            assert tiles > 0
            assert (row_tiles, kv_len) == tuple(rows[row, 1:3].tolist())
            assert cta + row not in found
            found[cta + row] = (cta, row, first, tiles)
            budget -= tiles
            row, first = rows[row, 0].item(), 0
            row_tiles, kv_len = rows[row, 1:3].tolist()
            tiles = min(row_tiles, budget)
        assert budget == 0
    return found


PLAN_LENGTHS = {
    "one": [1],
    "example": [192, 0, 256],
    "empty": [0, 0, 0],
    "empty-ends": [0, 0, 700, 0, 64, 65, 0],
    "equal": [640] * 16,
    "long-and-short": [100_000, *[1] * 63],
    "few": [63, 64],
}


@pytest.mark.parametrize("lengths", PLAN_LENGTHS.values(), ids=PLAN_LENGTHS.keys())
@pytest.mark.parametrize("num_ctas", [1, 2, 7, 128])
@pytest.mark.parametrize("min_tiles", [1, 3])
def test_a_plan_covers_every_tile_once(lengths, num_ctas, min_tiles):
    _, found_plan = plan_work(lengths, num_ctas=num_ctas, min_tiles=min_tiles)
    parts = parts_of(found_plan, num_ctas)
    tiles = -(-np.asarray(lengths) // TILE)
    covered = [np.zeros(n, np.int64) for n in tiles]
    work = np.zeros(num_ctas, np.int64)
    for cta, row, first, count in parts.values():
        covered[row][first : first + count] += 1
        work[cta] += count
    assert all((seen == 1).all() for seen in covered)
    assert work.max() <= max(-(-tiles.sum() // num_ctas), min_tiles)
    assert (np.diff(work) <= 0).all()
    assert (work[work > 0][:-1] == work.max()).all()
    for row, (_, _, _, first_cta, count) in enumerate(
        np.asarray(found_plan.rows)[:, :5]
    ):
        mine = [part for part, (_, owner, _, _) in parts.items() if owner == row]
        assert sorted(mine) == [first_cta + row + i for i in range(count)]


def test_the_example_of_the_plan():
    _, found_plan = plan_work([192, 0, 256], num_ctas=2, min_tiles=1)
    assert parts_of(found_plan, 2) == {
        0: (0, 0, 0, 3),
        2: (0, 2, 0, 1),
        3: (1, 2, 1, 3),
    }


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_a_plan_names_the_blocks_of_every_first_tile(page_size):
    lengths = [300, 0, 1000, 65]
    table, found_plan = plan_work(lengths, page_size=page_size, num_ctas=5, min_tiles=1)
    ctas, starts = np.asarray(found_plan.ctas), np.asarray(found_plan.starts)
    for (_, row, first, *_), blocks in zip(ctas, starts, strict=True):
        pages = first * TILE // page_size + np.arange(max(1, TILE // page_size))
        last = (lengths[row] - 1) // page_size
        np.testing.assert_array_equal(blocks, table[row, np.minimum(pages, last)])


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_pieces_of_a_tile_are_its_tokens(page_size):
    table = np.asarray([[9, 4, 7, 30, 2, 11, 5, 3] * 2], np.int32)
    kv_len, offset = 5 * page_size + 3, 6
    size = min(page_size, TILE)
    for tile in range(-(-kv_len // TILE)):
        number = jnp.int32(tile)
        blocks = tile_blocks(
            jnp.asarray(table), 0, jnp.int32(kv_len), number, page_size=page_size
        )
        pieces = tile_pieces(blocks, number, page_size=page_size, block_offset=offset)
        first = np.asarray([int(piece) * size for piece in pieces])
        rows = (first[:, None] + np.arange(size)).reshape(-1)
        tokens = np.arange(tile * TILE, min(tile * TILE + TILE, kv_len))
        expected = (table[0, tokens // page_size] + offset) * page_size
        expected += tokens % page_size
        np.testing.assert_array_equal(rows[: len(tokens)], expected)
        last_block = (table[0, 5] + offset) * page_size
        assert (rows[len(tokens) :] // page_size == last_block // page_size).all()


def test_the_example_of_the_pieces():
    pieces = tile_pieces((40,), jnp.int32(3), page_size=128, block_offset=5)
    assert [int(piece) for piece in pieces] == [91]
