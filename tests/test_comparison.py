"""The comparison accepts rounding and rejects every mistake it was made for."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.comparison import assert_matches, tolerance_of
from tests.oracles.attention import dense_attention

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
# Long enough that outputs are small, as the mean of many values is.
KV_LEN = 1024
Q_HEADS = 4


def attend(*, v, softmax_scale):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((3, Q_HEADS, 64))
    k = rng.standard_normal((KV_LEN, 2, 64))
    return dense_attention(
        q,
        k,
        k if v is None else v,
        context_len=KV_LEN - 3,
        softmax_scale=softmax_scale,
        window=None,
        sinks=None,
        soft_cap=None,
        causal=True,
    )


VALUES = np.random.default_rng(1).standard_normal((KV_LEN, 2, 64))
TRUTH, TRUTH_LSE = attend(v=VALUES, softmax_scale=0.125)


def check(
    actual, *, dtype, oracle=TRUTH, row_axes=(0, 1), reduced_len=KV_LEN, **options
):
    assert_matches(
        actual,
        oracle,
        dtype=dtype,
        reduced_len=reduced_len,
        row_axes=row_axes,
        **options,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_rounded_truth_is_accepted(dtype):
    check(TRUTH.astype(dtype), dtype=dtype)
    check(TRUTH_LSE.astype(dtype), dtype=dtype, oracle=TRUTH_LSE, row_axes=(0,))


def test_jax_arrays_and_negative_axes_are_accepted():
    check(jnp.asarray(TRUTH, jnp.bfloat16), dtype=jnp.bfloat16, row_axes=(-3, -2))
    check(jnp.asarray(TRUTH, jnp.float32), dtype="float32")


def test_weights_rounded_to_bfloat16_are_accepted():
    # What a kernel does that multiplies weights and values on tensor cores.
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((Q_HEADS, KV_LEN))
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    rounded = p.astype(ml_dtypes.bfloat16).astype(np.float64)
    check(
        (rounded @ VALUES[:, 0]).astype(ml_dtypes.bfloat16),
        oracle=p @ VALUES[:, 0],
        dtype=ml_dtypes.bfloat16,
        row_axes=(0,),
    )


def test_float32_sums_are_accepted():
    rng = np.random.default_rng(3)
    p, v = rng.uniform(size=(8, 4096)), rng.standard_normal((4096, 32))
    out = np.zeros((8, 32), np.float32)
    for j in range(4096):
        out += np.float32(p[:, j, None]) * np.float32(v[j])
    check(out, oracle=p @ v, dtype=np.float32, row_axes=(0,), reduced_len=4096)


def zeros(truth):
    return np.zeros_like(truth)


def one_head_zero(truth):
    return np.where(np.arange(truth.size).reshape(truth.shape) // 64 == 7, 0.0, truth)


def one_nan(truth):
    truth = truth.copy()
    truth[2, 3, 63] = np.nan
    return truth


def one_inf(truth):
    truth = truth.copy()
    truth[0, 0, 0] = np.inf
    return truth


def one_element_off(truth):
    truth = truth.copy()
    truth[1, 2, 5] += 0.2 * np.sqrt((truth[1, 2] ** 2).mean())
    return truth


def every_element_off_a_little(truth):
    return truth * 1.02


def heads_swapped(truth):
    return truth[:, ::-1]


def rows_shifted(truth):
    return np.roll(truth, 1, axis=0)


def softmax_scale_doubled(truth):
    del truth
    return attend(v=VALUES, softmax_scale=0.25)[0]


def softmax_scale_halved(truth):
    del truth
    return attend(v=VALUES, softmax_scale=0.0625)[0]


def output_doubled(truth):
    return truth * 2.0


def values_are_keys(truth):
    del truth
    return attend(v=None, softmax_scale=0.125)[0]


def one_page_of_values_wrong(truth):
    del truth
    values = VALUES.copy()
    values[512:576] = values[448:512]
    return attend(v=values, softmax_scale=0.125)[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(
    ("mutate", "message"),
    [
        (zeros, "12 of 12 rows"),
        (one_head_zero, r"1 of 12 rows[^$]*worst row \(1, 3\) of axes \(0, 1\)"),
        (one_nan, r"NaN at different places, 1 of 768 elements; first at \(2, 3, 63\)"),
        (one_inf, r"\+inf at different places"),
        (one_element_off, r"worst element \(1, 2, 5\)"),
        (every_element_off_a_little, "12 of 12 rows"),
        (heads_swapped, "12 of 12 rows"),
        (rows_shifted, "12 of 12 rows"),
        (softmax_scale_doubled, "12 of 12 rows"),
        (softmax_scale_halved, "12 of 12 rows"),
        (output_doubled, "12 of 12 rows"),
        (values_are_keys, "12 of 12 rows"),
        (one_page_of_values_wrong, "12 of 12 rows"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_mistake_is_rejected(mutate, message, dtype):
    with pytest.raises(AssertionError, match=message):
        check(mutate(TRUTH).astype(dtype), dtype=dtype)


def test_one_zeroed_head_among_65536_is_rejected():
    truth = np.random.default_rng(4).standard_normal((4096, 16, 8))
    actual = truth.astype(ml_dtypes.bfloat16)
    actual[4000, 11] = 0
    with pytest.raises(AssertionError, match=r"1 of 65536 rows[^$]*\(4000, 11\)"):
        check(actual, oracle=truth, dtype=ml_dtypes.bfloat16, reduced_len=4096)


def test_small_rows_are_held_to_their_own_size():
    truth = TRUTH * np.array([1.0, 1e-3, 1e-6, 1e-9])[:, None]
    check(truth.astype(np.float32), oracle=truth, dtype=np.float32)
    wrong = truth.copy()
    wrong[1, 3] *= 2.0
    with pytest.raises(AssertionError, match=r"worst row \(1, 3\)"):
        check(wrong.astype(np.float32), oracle=truth, dtype=np.float32)


def test_terms_that_cancel_are_held_to_their_sizes():
    # Of the second row the number is the larger one; of its -inf the size is unused.
    truth = np.array([[1e-6, 1e-6], [1.0, -np.inf]])
    sizes = np.array([[3.0, 3.0], [0.5, 0.5]])
    options = {"dtype": np.float64, "row_axes": (0,), "reduced_len": 1}
    for at, allowed in [((0, 0), 3 * 2.0**-43 * np.sqrt(2)), ((1, 0), 2.0**-43)]:
        for share in (0.9, 1.1):
            off = truth.copy()
            off[at] += share * allowed
            if share < 1:
                assert_matches(off, truth, **options, sizes=sizes)
                continue
            with pytest.raises(AssertionError, match=rf"worst row \({at[0]},\)"):
                assert_matches(off, truth, **options, sizes=sizes)


def test_missing_nan_and_wrong_infinity_are_rejected():
    lse = TRUTH_LSE.copy()
    lse[1, 2], lse[0, 1] = -np.inf, np.nan
    good = lse.astype(np.float32)
    check(good, oracle=lse, dtype=np.float32, row_axes=(0,))
    for at, value, message in [
        ((1, 2), np.inf, r"\+inf at different"),
        ((1, 2), -1e30, "-inf at different"),
        ((0, 1), 0.0, "NaN at different"),
    ]:
        bad = good.copy()
        bad[at] = value
        with pytest.raises(AssertionError, match=message):
            check(bad, oracle=lse, dtype=np.float32, row_axes=(0,))


def test_padding_rows_of_zeros_must_be_zeros():
    truth = TRUTH.copy()
    truth[2] = 0.0
    good = truth.astype(np.float32)
    check(good, oracle=truth, dtype=np.float32)
    good[2, 1, 4] = 1e-20
    with pytest.raises(AssertionError, match=r"worst element \(2, 1, 4\)"):
        check(good, oracle=truth, dtype=np.float32)


def test_values_below_the_type_may_be_flushed():
    truth = np.full((2, 3), 1e-60)
    check(np.zeros((2, 3), np.float32), oracle=truth, dtype=np.float32, row_axes=(0,))


def test_wrong_dtype_and_shape_are_rejected():
    with pytest.raises(AssertionError, match="dtype float32, expected bfloat16"):
        check(TRUTH.astype(np.float32), dtype=ml_dtypes.bfloat16)
    with pytest.raises(AssertionError, match=r"shape \(1, 4, 64\), expected \(3, 4"):
        check(TRUTH[:1].astype(np.float32), dtype=np.float32)


def test_tolerance_grows_with_the_root_of_the_length():
    base = 2.0**-19
    assert tolerance_of(dtype="float32", reduced_len=1) == 2 * base
    assert tolerance_of(dtype="float32", reduced_len=64) == 9 * base
    assert tolerance_of(dtype="bfloat16", reduced_len=64) == 2.0**-7 + 8 * base
    assert (
        tolerance_of(dtype=np.float32, reduced_len=16, accumulate_dtype="tensorfloat32")
        == base + 4 * 2.0**-9
    )
    assert tolerance_of(dtype=np.float64, reduced_len=1) == 2.0**-43


def test_tolerance_ignores_the_environment(monkeypatch):
    before = tolerance_of(dtype=np.float32, reduced_len=100)
    for name in ("CI", "GITHUB_ACTIONS"):
        monkeypatch.setenv(name, "1")
    assert tolerance_of(dtype=np.float32, reduced_len=100) == before


def test_meaningless_comparisons_are_refused():
    actual = TRUTH.astype(np.float32)
    with pytest.raises(ValueError, match="float64 NumPy array"):
        check(actual, oracle=actual, dtype=np.float32)
    with pytest.raises(ValueError, match="nothing to compare"):
        check(actual[:0], oracle=TRUTH[:0], dtype=np.float32)
    for sizes, message in [
        (TRUTH[0], r"sizes.shape=\(4, 64\) must be oracle.shape=\(3, 4, 64\)"),
        (np.full(TRUTH.shape, np.nan), "sizes must be finite"),
        (np.full(TRUTH.shape, np.inf), "sizes must be finite"),
    ]:
        with pytest.raises(ValueError, match=message):
            check(actual, dtype=np.float32, sizes=sizes)
    for row_axes in [(0, 1, 2), (0, 0), (0, -3)]:
        with pytest.raises(ValueError, match="must be distinct and leave an axis"):
            check(actual, dtype=np.float32, row_axes=row_axes)
    with pytest.raises(ValueError, match="must be distinct and leave an axis"):
        check(np.float32(1), oracle=np.array(1.0), dtype=np.float32, row_axes=())
    with pytest.raises(ValueError, match="no tolerance for dtype int32"):
        check(actual, dtype=np.int32)
    with pytest.raises(ValueError, match="reduced_len=0 must be at least 1"):
        check(actual, dtype=np.float32, reduced_len=0)
    with pytest.raises(ValueError, match="compare a shorter case"):
        tolerance_of(
            dtype="float32", reduced_len=4096, accumulate_dtype=ml_dtypes.bfloat16
        )
