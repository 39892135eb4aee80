"""The MLA decode kernels: their plan, the simulator against float64, and a card."""

import dataclasses
import functools as ft
import re

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla_decode import MlaDecodeConfig, mla_decode, plan
from pallas_kernels.mla_decode.config import TILE
from pallas_kernels.mla_decode.decode import ROWS
from pallas_kernels.mla_decode.pages import tile_blocks, tile_pieces
from pallas_kernels.paged_rows import PagedPart
from tests.attention_cases import (
    DTYPES,
    Mla,
    absorbed_oracle,
    assert_result,
    flat,
    make_mla,
    run_mla_decode,
)
from tests.gpu_compile import (
    compile_for_h200,
    pool_sized_copies,
    requires_h200_compiler,
)
from tests.oracles import attention as oracles
from ukv.ops.gpu_kernels import triton_kernels

KIMI = ft.partial(
    Mla, dims=(512, 64, 128, 128), store="bf16", compute="bf16", placement="high"
)
WIDTH = 576
BFLOAT16 = DTYPES["bf16"]

# The plan

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


# In the simulator


@ft.partial(
    jax.jit,
    static_argnames=(
        "latent_dim",
        "page_size",
        "block_offset",
        "softmax_scale",
        "dtype",
        "config",
        "interpret",
    ),
)
def simulate(q, buffer, table, kv_lens, **statics):
    return mla_decode(q, buffer, table, kv_lens, **statics)


def run_simulated(case, data, *, interpret=True, num_ctas=3):
    """`(out, lse)` of the kernels, the rows one after the other."""
    return flat(
        simulate(
            jnp.asarray(case.dense(data.q)),
            data.pool.buffers[data.view.buffer_index],
            data.pool.table.ids,
            case.batch["kv_lens"],
            latent_dim=case.dims[0],
            page_size=case.page_size,
            block_offset=data.view.block_offset,
            dtype=data.view.dtype,
            config=MlaDecodeConfig(num_ctas=num_ctas, min_tiles=1),
            interpret=interpret,
            softmax_scale=case.scale,
        )
    )


SIMULATED = {
    "P64-H4": KIMI(
        rows=((1, 200), (1, 1), (1, 0), (1, 64), (1, 65)), heads=4, page_size=64
    ),
    "P16-Q3": KIMI(rows=((3, 150), (3, 1), (3, 0), (3, 63)), heads=10, page_size=16),
    "P32-Q2-H16": KIMI(rows=((2, 70), (2, 33)), heads=16, page_size=32),
    "P32-Q2-H40": KIMI(rows=((2, 140), (2, 1), (2, 0)), heads=40, page_size=32),
    "P128-static": KIMI(
        rows=((1, 257),), heads=2, page_size=128, placement="static", layer=2
    ),
    "P64-e4m3": KIMI(
        rows=((1, 200), (1, 1), (1, 0), (1, 65)), heads=4, page_size=64, store="e4m3"
    ),
    "P16-Q2-H20-e4m3": KIMI(
        rows=((2, 140), (2, 1), (2, 0)), heads=20, page_size=16, store="e4m3"
    ),
    "P16-D128": KIMI(
        rows=((1, 200), (1, 1), (1, 0), (1, 65)), heads=4, dims=(128, 64, 64, 64)
    ),
    "P64-Q2-D256": KIMI(
        rows=((2, 200), (2, 1)), heads=3, page_size=64, dims=(256, 64, 64, 64)
    ),
    "P64-D384": KIMI(rows=((1, 200),), heads=4, page_size=64, dims=(384, 64, 64, 64)),
    "P32-H40-D256": KIMI(
        rows=((1, 140), (1, 0)), heads=40, page_size=32, dims=(256, 64, 64, 64)
    ),
    "P64-H34-D128": KIMI(
        rows=((1, 140),), heads=34, page_size=64, dims=(128, 64, 64, 64)
    ),
    "P32-D256-e4m3": KIMI(
        rows=((1, 200), (1, 1), (1, 0)),
        heads=4,
        page_size=32,
        store="e4m3",
        dims=(256, 64, 64, 64),
    ),
}


@pytest.mark.parametrize("case", SIMULATED.values(), ids=SIMULATED.keys())
def test_simulated(case):
    data = make_mla(case)
    oracle = absorbed_oracle(case, data, padding=0)
    assert_result(case, run_simulated(case, data), oracle, width=sum(case.dims[:2]))


@pytest.mark.parametrize("rows", ROWS.values(), ids=map(str, ROWS))
def test_two_warpgroups_of_scores_keep_their_slots(rows):
    for cut in rows.CUTS.values():
        assert cut.scorers == 1 or cut.ring % (2 * cut.chunks) == 0


def test_simulated_for_longer_than_the_ring():
    case = KIMI(rows=((1, 900),), heads=2, store="e4m3", dims=(256, 64, 64, 64))
    data = make_mla(case)
    oracle = absorbed_oracle(case, data, padding=0)
    result = run_simulated(case, data, num_ctas=1)
    assert_result(case, result, oracle, width=sum(case.dims[:2]))


def test_simulated_bits_do_not_depend_on_the_pages():
    case = SIMULATED["P16-Q3"]
    first, second = make_mla(case, seed=1), make_mla(case, seed=2)
    assert (np.asarray(first.pool.table.ids) != second.pool.table.ids).any()
    results = run_simulated(case, first), run_simulated(case, second)
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)


def test_the_narrow_kernel_has_no_races(capfd):
    # The wide one reads weights from a tile that a copy overwrites afterwards, which
    # the simulator calls a race; the barrier between them is what a card asks for.
    case = KIMI(rows=((1, 270), (1, 65)), heads=4, page_size=64)
    data = make_mla(case)
    parameters = plgpu.InterpretGPUParams(detect_races=True)
    result = run_simulated(case, data, interpret=parameters)
    oracle = absorbed_oracle(case, data, padding=0)
    assert_result(case, result, oracle, width=WIDTH)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


def swap_pages(data):
    table = data.pool.table
    ids = table.ids.at[0, 1].set(table.ids[0, 0])
    pool = dataclasses.replace(data.pool, table=dataclasses.replace(table, ids=ids))
    return dataclasses.replace(data, pool=pool)


def test_simulated_mutations_are_rejected():
    case = KIMI(rows=((1, 90),), heads=1, page_size=64)
    data = make_mla(case)
    oracle = absorbed_oracle(case, data, padding=0)
    out, lse = run_simulated(case, data)
    for mutant in (
        (jnp.zeros_like(out), lse),
        (out, lse + 0.1),
        run_simulated(case, swap_pages(data)),
        run_simulated(case, dataclasses.replace(data, q=2 * data.q)),
    ):
        with pytest.raises(AssertionError):
            assert_result(case, mutant, oracle, width=WIDTH)


# Refusals


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"page_size": 8}, "page_size=8 must be one of"),
        ({"page_size": 128}, "must hold whole blocks of page_size=128"),
        ({"softmax_scale": 0.0}, "softmax_scale=0.0 must be positive"),
        ({"dtype": DTYPES["e5m2"]}, "rows must be bfloat16 or float8_e4m3fn, not"),
        ({"width": 320}, r"q must be bfloat16\[..., 576\]"),
        ({"latent_dim": 192}, "latent_dim=192 of bfloat16 must be one of 128, 256,"),
        (
            {"latent_dim": 128, "dtype": DTYPES["e4m3"]},
            "latent_dim=128 of float8_e4m3fn must be one of 256, 512",
        ),
    ],
)
def test_wrong_sizes_are_refused(changed, message):
    sizes = {"page_size": 64, "softmax_scale": 1.0, "width": 576, "dtype": BFLOAT16}
    sizes["latent_dim"] = 512
    sizes |= changed
    q = jnp.zeros((1, 1, 2, sizes.pop("width")), jnp.bfloat16)
    buffer, table = jnp.zeros((64, 288), jnp.uint32), jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match=message):
        mla_decode(q, buffer, table, jnp.ones(1, jnp.int32), block_offset=0, **sizes)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_ctas": 0}, "num_ctas=0 must be at least 1"),
        ({"min_tiles": 0}, "min_tiles=0 must be at least 1"),
    ],
)
def test_configs_out_of_range_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        MlaDecodeConfig(**values)


# Compiled for a card

POOL_ROWS = 1 << 26  # 77 GB: 3.9e10 elements


@requires_h200_compiler
@pytest.mark.parametrize(
    ("batch", "query_len", "heads", "page_size", "dtype", "latent_dim"),
    [
        (64, 1, 32, 64, "bf16", 512),
        (3, 4, 16, 16, "bf16", 512),
        (1, 1, 128, 128, "bf16", 512),
        (2, 1, 64, 32, "e4m3", 512),
        (16, 1, 4, 64, "bf16", 128),
        (3, 1, 32, 16, "bf16", 256),
        (2, 1, 16, 64, "bf16", 384),
        (2, 1, 128, 64, "bf16", 256),
        (2, 1, 16, 64, "e4m3", 256),
    ],
)
def test_compiled_in_place(batch, query_len, heads, page_size, dtype, latent_dim):
    dtype, width = DTYPES[dtype], latent_dim + 64
    words = width * dtype.itemsize // 4
    shapes = (
        jax.ShapeDtypeStruct((batch, query_len, heads, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((POOL_ROWS, words), jnp.uint32),
        jax.ShapeDtypeStruct((batch, 8), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )
    decode = ft.partial(
        mla_decode,
        latent_dim=latent_dim,
        page_size=page_size,
        block_offset=5,
        softmax_scale=0.1,
        dtype=dtype,
    )
    program = compile_for_h200(decode, *shapes)
    columns = 128 if query_len * heads == 128 else -(-query_len * heads // 32) * 32
    num_parts = batch + MlaDecodeConfig().num_ctas
    part_bytes = num_parts * columns * (latent_dim + 1) * 4
    row_bytes = batch * columns * (width + latent_dim) * 2
    assert program.temp_bytes < part_bytes + 2 * row_bytes + (1 << 20)
    assert pool_sized_copies(program.hlo_text, 1 << 30) == []


@requires_h200_compiler
def test_layers_share_one_plan_and_one_command_buffer():
    def attend(pool, table, kv_lens, queries):
        sizes = {"page_size": 64, "softmax_scale": 0.1, "dtype": BFLOAT16}
        sizes["latent_dim"] = 512
        return pool, [
            mla_decode(q, pool, table, kv_lens, block_offset=layer, **sizes)
            for layer, q in enumerate(queries)
        ]

    program = compile_for_h200(
        attend,
        jax.ShapeDtypeStruct((POOL_ROWS, WIDTH // 2), jnp.uint32),
        jax.ShapeDtypeStruct((64, 8), jnp.int32),
        jax.ShapeDtypeStruct((64,), jnp.int32),
        [jax.ShapeDtypeStruct((64, 1, 32, WIDTH), jnp.bfloat16)] * 3,
        donate_argnums=0,
        thunks=True,
    )
    assert program.top_thunks == ["kCommandBuffer"]
    # The plan and the zeros of the semaphores, by XLA, before all layers.
    before, *layers = re.split(r"\d: kCustomCall ", program.thunk_text)
    assert before.count("kCustomKernel ") + before.count("kCopy ") <= 8
    assert len(layers) == 3
    assert not any("kCustomKernel " in text or "kCopy " in text for text in layers)


# On a card

ON_CARD = {
    "P64-H32": KIMI(
        rows=((1, 5000), (1, 1), (1, 0), (1, 64), (1, 65)), heads=32, page_size=64
    ),
    "P16-H32": KIMI(rows=((1, 3000), (1, 17), (1, 0)), heads=32, page_size=16),
    "P32-H16-Q2": KIMI(rows=((2, 3000), (2, 1), (2, 33)), heads=16, page_size=32),
    "P128-H20": KIMI(rows=((1, 3000), (1, 129)), heads=20, page_size=128),
    "P64-H64": KIMI(rows=((1, 3000), (1, 129), (1, 0)), heads=64, page_size=64),
    "P64-H128": KIMI(rows=((1, 3000), (1, 65), (1, 64)), heads=128, page_size=64),
    "P32-H128-Q4": KIMI(rows=((4, 900), (4, 3), (4, 0)), heads=128, page_size=32),
    "P64-H96": KIMI(rows=((1, 700), (1, 3)), heads=96, page_size=64),
    "P128-static": KIMI(
        rows=((1, 700), (1, 3)), heads=32, page_size=128, placement="static"
    ),
    "many-rows": KIMI(
        rows=tuple((1, 37 * i % 513) for i in range(150)), heads=32, page_size=64
    ),
    "P64-H32-e4m3": KIMI(
        rows=((1, 5000), (1, 1), (1, 0), (1, 64), (1, 65)),
        heads=32,
        page_size=64,
        store="e4m3",
    ),
    "P16-H40-Q2-e4m3": KIMI(
        rows=((2, 3000), (2, 17), (2, 0)), heads=40, page_size=16, store="e4m3"
    ),
    "P32-H16-e4m3": KIMI(
        rows=((1, 3000), (1, 33), (1, 0)), heads=16, page_size=32, store="e4m3"
    ),
    "P64-H4-D128": KIMI(
        rows=((1, 3000), (1, 1), (1, 0), (1, 64), (1, 65)),
        heads=4,
        page_size=64,
        dims=(128, 64, 64, 64),
    ),
    "P16-H64-D128": KIMI(
        rows=((1, 3000), (1, 17)), heads=64, page_size=16, dims=(128, 64, 64, 64)
    ),
    "P64-H16-Q2-D256": KIMI(
        rows=((2, 3000), (2, 65)), heads=16, page_size=64, dims=(256, 64, 64, 64)
    ),
    "P32-H128-D256": KIMI(
        rows=((1, 3000), (1, 33)), heads=128, page_size=32, dims=(256, 64, 64, 64)
    ),
    "P64-H40-D256-e4m3": KIMI(
        rows=((1, 3000), (1, 33)),
        heads=40,
        page_size=64,
        store="e4m3",
        dims=(256, 64, 64, 64),
    ),
    "P64-H32-D384": KIMI(
        rows=((1, 3000), (1, 33)), heads=32, page_size=64, dims=(384, 64, 64, 64)
    ),
    # A CTA has more tiles than the ring, twice over.
    "long-D256-e4m3": KIMI(
        rows=((1, 6000),) * 30,
        heads=8,
        page_size=64,
        store="e4m3",
        dims=(256, 64, 64, 64),
    ),
    "long-D128": KIMI(
        rows=((1, 6000),) * 30, heads=4, page_size=64, dims=(128, 64, 64, 64)
    ),
    "P128-H64-D384": KIMI(
        rows=((1, 3000), (1, 33)), heads=64, page_size=128, dims=(384, 64, 64, 64)
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_CARD.values(), ids=ON_CARD.keys())
def test_on_a_card(case):
    data = make_mla(case)
    oracle = absorbed_oracle(case, data, padding=0)
    result = run_mla_decode(case, data, implementation="mosaic_gpu")
    assert_result(case, result, oracle, width=sum(case.dims[:2]))
    moved = make_mla(case, seed=1)
    for a, b in zip(
        result, run_mla_decode(case, moved, implementation="mosaic_gpu"), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)


NUM_BLOCKS = 1 << 10


def run_on_card(
    implementation, q, buffer, table, kv_lens, *, page_size, block_offset, dtype
):
    operands, width = (q, buffer, table, kv_lens), q.shape[3]
    sizes = {"latent_dim": width - 64, "softmax_scale": 0.1}
    if implementation == "mosaic_gpu":
        place = {"page_size": page_size, "block_offset": block_offset, "dtype": dtype}
        return mla_decode(*operands, **place, **sizes)
    part = PagedPart(
        dtype=dtype,
        num_heads=1,
        width=width,
        page_size=page_size,
        block=block_offset,
        row_elements=width,
        entry_elements=width,
    )
    return triton_kernels("mla_decode_triton").mla_decode(*operands, part=part, **sizes)


def assert_rows(result, q, rows, kv_lens):
    """Compare a batch with the oracle; `rows` are the tokens of each row."""
    outs, lses, width = [], [], q.shape[3]
    for queries, tokens, kv_len in zip(q, rows, kv_lens, strict=True):
        out, lse = oracles.mla_latent_attention(
            queries,
            tokens,
            latent_dim=width - 64,
            context_len=int(kv_len) - len(queries),
            softmax_scale=0.1,
            causal=True,
        )
        outs.append(out)
        lses.append(lse)
    case = KIMI(rows=((1, int(kv_lens.max()) + 1),))
    assert_result(
        case, flat(result), (np.concatenate(outs), np.concatenate(lses)), width=width
    )


# 250 rows of each: 3,500 for an implementation.
RANDOM = {
    "P16-H32": (16, 1, 32, "bf16", 512),
    "P64-Q3-H16": (64, 3, 16, "bf16", 512),
    "P32-H128": (32, 1, 128, "bf16", 512),
    "P128-Q2-H16": (128, 2, 16, "bf16", 512),
    "P64-H7": (64, 1, 7, "bf16", 512),
    "P64-H32-e4m3": (64, 1, 32, "e4m3", 512),
    "P16-Q3-H16-e4m3": (16, 3, 16, "e4m3", 512),
    "P128-H20-e4m3": (128, 1, 20, "e4m3", 512),
    "P32-H33-e4m3": (32, 1, 33, "e4m3", 512),
    "P64-H4-D128": (64, 1, 4, "bf16", 128),
    "P16-Q2-H4-D128": (16, 2, 4, "bf16", 128),
    "P32-H32-D256": (32, 1, 32, "bf16", 256),
    "P64-H64-D256": (64, 1, 64, "bf16", 256),
    "P32-Q2-H16-D256-e4m3": (32, 2, 16, "e4m3", 256),
}


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])
@pytest.mark.parametrize("numbers", RANDOM.values(), ids=RANDOM.keys())
def test_random_batches_on_a_card(implementation, numbers):
    page_size, query_len, heads, store, latent_dim = numbers
    width = latent_dim + 64
    rng = np.random.default_rng(page_size + heads)
    num_rows, num_batches, max_pages = 10, 25, 1024 // page_size
    values = rng.standard_normal((NUM_BLOCKS * page_size, width), np.float32)
    values = values.astype(DTYPES[store])
    buffer = jnp.asarray(values.view(np.uint32))
    run = jax.jit(
        ft.partial(
            run_on_card,
            implementation,
            page_size=page_size,
            block_offset=2,
            dtype=DTYPES[store],
        )
    )
    for _ in range(num_batches):
        kv_lens = rng.integers(0, 1000, num_rows) * rng.integers(0, 2, num_rows)
        kv_lens[0] = rng.integers(1, 1024)
        # Rows may share pages, as prefixes do, and a row may hold one page often.
        table = rng.integers(0, NUM_BLOCKS - 2, (num_rows, max_pages))
        table[1] = table[1, 0]
        tokens = (table + 2)[:, :, None] * page_size + np.arange(page_size)
        tokens = tokens.reshape(num_rows, -1)
        rows = [values[ids[:n]] for ids, n in zip(tokens, kv_lens, strict=True)]
        q = rng.standard_normal((num_rows, query_len, heads, width))
        q = q.astype(BFLOAT16)
        result = run(
            jnp.asarray(q),
            buffer,
            jnp.asarray(table, jnp.int32),
            jnp.asarray(kv_lens, jnp.int32),
        )
        assert_rows(result, q, rows, kv_lens)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])
def test_far_pages_on_a_card(implementation):
    # 9.7 GB: 4.8e9 elements of bfloat16, with NaN in all that is not written.
    num_rows, page_size, kv_len = 1 << 23, 64, 130
    rng = np.random.default_rng(3)
    values = rng.standard_normal((1, kv_len, WIDTH)).astype(DTYPES["bf16"])
    blocks = num_rows // page_size - 1 - np.asarray([[0, 5, 3]])
    places = (blocks[0][:, None] * page_size + np.arange(page_size)).reshape(-1)
    write = jax.jit(lambda pool, at, words: pool.at[at].set(words), donate_argnums=0)
    buffer = write(
        jnp.full((num_rows, WIDTH // 2), 0xFFFFFFFF, jnp.uint32),
        jnp.asarray(places[:kv_len], jnp.int32),
        jnp.asarray(values[0].view(np.uint32)),
    )
    q = rng.standard_normal((1, 1, 32, WIDTH)).astype(DTYPES["bf16"])
    kv_lens = np.asarray([kv_len])
    place = {"page_size": page_size, "block_offset": 7, "dtype": BFLOAT16}
    result = jax.jit(ft.partial(run_on_card, implementation, **place))(
        jnp.asarray(q),
        buffer,
        jnp.asarray(blocks - 7, jnp.int32),
        jnp.asarray(kv_lens, jnp.int32),
    )
    assert_rows(result, q, values, kv_lens)
