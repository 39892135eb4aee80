"""MLA decode on a card that other work shares: it always ends, with the same bits.

The CTAs of a row sum it together, and nothing says that they are on the card at once.
"""

import functools as ft
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.mla_decode import MlaDecodeConfig, arrivals, decode, mla_decode
from tests.oracles import attention as oracles

pytestmark = pytest.mark.gpu

WIDTH, PAGE_SIZE, NUM_BLOCKS, HEADS = 576, 64, 512, 32
SCALE = 0.1
KV_LENS = (4000, 64, 0, 8190, 700)
TIME_LIMIT = 60.0


def make_operands(seed):
    rng = np.random.default_rng(seed)
    bfloat16 = ml_dtypes.bfloat16
    rows = rng.standard_normal((NUM_BLOCKS * PAGE_SIZE, WIDTH), np.float32)
    rows = rows.astype(bfloat16)
    q = rng.standard_normal((len(KV_LENS), 1, HEADS, WIDTH), np.float32)
    q = q.astype(bfloat16)
    table = rng.permutation(NUM_BLOCKS)[: len(KV_LENS) * 128]
    table = np.resize(table, (len(KV_LENS), 128)).astype(np.int32)
    return q, rows, table


def on_card(operands):
    q, rows, table = operands
    lens = np.asarray(KV_LENS, np.int32)
    return tuple(jax.device_put(x) for x in (q, rows.view(np.uint32), table, lens))


def attend(q, buffer, table, kv_lens, config=None):
    return mla_decode(
        q,
        buffer,
        table,
        kv_lens,
        page_size=PAGE_SIZE,
        latent_dim=512,
        block_offset=0,
        softmax_scale=SCALE,
        dtype=jnp.dtype(jnp.bfloat16),
        config=config,
    )


def within_time(function, *args):
    """The result, or an error if the card does not answer."""
    pool = ThreadPoolExecutor(1)
    try:
        run = pool.submit(lambda: jax.tree.map(np.asarray, function(*args)))
        return run.result(timeout=TIME_LIMIT)
    finally:
        pool.shutdown(wait=False)


def assert_same_bits(results, expected):
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


@pytest.fixture
def fresh_programs():
    """Forgets what was traced with other constants."""
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_warpgroups_that_leave_change_no_bit(monkeypatch, fresh_programs):
    operands = on_card(make_operands(0))
    config = MlaDecodeConfig(min_tiles=1)
    run = ft.partial(attend, config=config)
    expected = within_time(jax.jit(run), *operands)
    monkeypatch.setattr(arrivals, "PATIENCE", 0)
    jax.clear_caches()
    impatient = jax.jit(lambda *xs: run(*xs))
    for _ in range(20):
        assert_same_bits(within_time(impatient, *operands), expected)


def test_more_ctas_than_the_card_holds(monkeypatch, fresh_programs):
    # One CTA fits a multiprocessor, so two thirds of them cannot begin before others
    # end, whose rows they have parts of.
    monkeypatch.setattr(decode, "num_multiprocessors", lambda: 396)
    operands = make_operands(1)
    config = MlaDecodeConfig(num_ctas=396, min_tiles=1)
    run = jax.jit(lambda *xs: attend(*xs, config=config))
    out, lse = within_time(run, *on_card(operands))
    q, rows, table = operands
    for row, kv_len in enumerate(KV_LENS):
        if kv_len == 0:
            assert (out[row] == 0).all()
            assert (lse[row] == -np.inf).all()
            continue
        tokens = table[row][:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)
        expected, expected_lse = oracles.mla_latent_attention(
            q[row],
            rows[tokens.reshape(-1)[:kv_len]],
            latent_dim=512,
            context_len=kv_len - 1,
            softmax_scale=SCALE,
            causal=True,
        )
        error = np.abs(out[row].astype(np.float64) - expected).max()
        assert error < 2e-2 * np.abs(expected).max()
        np.testing.assert_allclose(lse[row], expected_lse, atol=1e-4)


def test_two_of_one_program(fresh_programs):
    first, second = (on_card(make_operands(seed)) for seed in range(2))
    expected = [within_time(jax.jit(attend), *xs) for xs in (first, second)]
    both = jax.jit(lambda a, b: (attend(*a), attend(*b)))
    for _ in range(50):
        assert_same_bits(within_time(both, first, second), expected)


def test_two_threads_and_a_product_beside_them(fresh_programs):
    operands = [on_card(make_operands(seed)) for seed in range(2)]
    run = jax.jit(attend)
    expected = [within_time(run, *xs) for xs in operands]
    matrix = jnp.ones((8192, 8192), jnp.bfloat16)
    product = jax.jit(lambda x: x @ x)
    mixed = jax.jit(lambda x, xs: (x @ x, attend(*xs)))
    jax.block_until_ready((product(matrix), mixed(matrix, operands[0])))
    barrier = threading.Barrier(3)

    def decode_often(k):
        barrier.wait()
        return [run(*operands[k]) for _ in range(200)]

    def multiply_often():
        barrier.wait()
        return [mixed(matrix, operands[0])[1] for _ in range(40)]

    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(decode_often, k) for k in range(2)]
        jobs.append(pool.submit(multiply_often))
        results = [job.result(timeout=TIME_LIMIT) for job in jobs]
    for found, want in zip(results, (*expected, expected[0]), strict=True):
        for result in found:
            assert_same_bits(jax.tree.map(np.asarray, result), want)
