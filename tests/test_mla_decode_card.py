"""The MLA decode kernels on a card, against float64."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla_decode import mla_decode
from pallas_kernels.paged_rows import PagedPart
from tests.attention_cases import (
    DTYPES,
    absorbed_oracle,
    assert_result,
    attend_latents,
    flat,
    make_mla,
    run_mla_decode,
)
from tests.test_mla_decode_kernel import BFLOAT16, KIMI, WIDTH
from ukv.ops.gpu_kernels import triton_kernels

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
    width = q.shape[3]
    case = KIMI(
        rows=((1, int(kv_lens.max()) + 1),),
        dims=(width - 64, 64, 1, 1),
        softmax_scale=0.1,
    )
    found = [
        attend_latents(case, queries, tokens, int(kv_len) - len(queries))
        for queries, tokens, kv_len in zip(q, rows, kv_lens, strict=True)
    ]
    oracle = tuple(np.concatenate(x) for x in zip(*found, strict=True))
    assert_result(case, flat(result), oracle, width=width)


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
