"""What a log-sum-exp is held to: the size of its terms, and no more than that."""

import numpy as np
import pytest

from tests.comparison import assert_matches
from tests.oracles.attention import attention_at_once, lse_sizes

HEADS, WIDTH, KV_LEN = 8, 64, 1200


def options(**changed):
    plain = {"window": None, "sinks": None, "soft_cap": None}
    return plain | {"context_len": KV_LEN - 1, "softmax_scale": WIDTH**-0.5} | changed


def check(lse, truth, sizes, reduced_len):
    assert_matches(
        np.asarray(lse, np.float32),
        truth,
        dtype="float32",
        reduced_len=reduced_len,
        row_axes=(0,),
        sizes=sizes,
    )


# Of a key with the logit 0, of products 1.2 and -1.2.
CANCELLED = 1.2 * np.sqrt(2.0)


@pytest.mark.parametrize(
    ("changed", "size"),
    [
        ({}, CANCELLED),
        # A sink takes part of the weight, none of it, or all.
        ({"sinks": [-1.0]}, CANCELLED / (1 + np.exp(-1.0))),
        ({"sinks": [-40.0]}, CANCELLED),
        ({"sinks": [40.0]}, 40.0),
        # Before it a key with the logit 1, of the products 1 and 0.
        ({"context_len": 1}, (CANCELLED + np.exp(1.0)) / (1 + np.exp(1.0))),
        ({"context_len": 1, "window": 1}, CANCELLED),
        # No key.
        ({"context_len": -1}, 0.0),
        ({"context_len": -1, "sinks": [-40.0]}, 40.0),
    ],
)
def test_sizes_by_hand(changed, size):
    q = np.array([[[3.0, 4.0]]])
    own, other = [[4.0, -3.0]], [[10 / 3, 0.0]]
    k = np.array([other, own] if changed.get("context_len") == 1 else [own])
    found = lse_sizes(q, k, **options(softmax_scale=0.1, context_len=0) | changed)
    np.testing.assert_allclose(found, [[size]], rtol=1e-12)


def draw(*, kv_len=KV_LEN):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, HEADS, WIDTH))
    return q, rng.standard_normal((kv_len, 2, WIDTH))


def lse_of(q, k, **changed):
    return attention_at_once(q, k, k, **options(**changed), causal=True)[1]


def in_float32(q, k, **changed):
    """The log-sum-exp with every product and every sum rounded, one after the other."""
    scale = np.float32(options(**changed)["softmax_scale"])
    keys = np.repeat(k, HEADS // k.shape[1], axis=1).astype(np.float32)
    products = q[0].astype(np.float32) * keys
    s = scale * np.cumsum(products, axis=-1, dtype=np.float32)[..., -1]
    m = s.max(axis=0)
    z = np.cumsum(np.exp(s - m), axis=0, dtype=np.float32)[-1]
    return (m + np.log(z))[None]


def moved_to_zero(q, k, **changed):
    """The same keys with a last channel that makes each log-sum-exp 1e-6."""
    q[..., -1] = 1.0
    k = np.repeat(k, HEADS // k.shape[1], axis=1)
    k[..., -1] = 0.0
    scale = options(**changed)["softmax_scale"]
    k[..., -1] = (1e-6 - lse_of(q, k, **changed)) / scale
    return q.astype(np.float32), k.astype(np.float32)


@pytest.mark.parametrize("kv_len", [1, 2, KV_LEN])
def test_what_cancels_is_held_to_the_size_of_its_terms(kv_len):
    # Of one key the products cancel, of many the largest logit and the rest.
    changed = {"context_len": kv_len - 1}
    q, k = moved_to_zero(*draw(kv_len=kv_len), **changed)
    truth, sizes = lse_of(q, k, **changed), lse_sizes(q, k, **options(**changed))
    assert np.abs(truth).max() < 1e-5
    found = in_float32(q, k, **changed)
    check(found, truth, sizes, max(kv_len, WIDTH))
    with pytest.raises(AssertionError, match="1 of 1 rows"):
        check(found, truth, None, max(kv_len, WIDTH))


def without_a_key(q, k):
    return lse_of(q, np.delete(k, 700, axis=0), context_len=KV_LEN - 2)


def without_the_last_key(q, k):
    return lse_of(q, k, context_len=KV_LEN - 2)


def page_read_twice(q, k):
    k = k.copy()
    k[640:656] = k[656:672]
    return lse_of(q, k)


def scale_off_by_a_thousandth(q, k):
    return lse_of(q, k, softmax_scale=1.001 * WIDTH**-0.5)


def one_head_of_another_query(q, k):
    q = q.copy()
    q[0, 3] = q[0, 2]
    return lse_of(q, k)


def window_one_short(q, k):
    return lse_of(q, k, window=KV_LEN - 1)


FAULTS = [
    without_a_key,
    without_the_last_key,
    page_read_twice,
    scale_off_by_a_thousandth,
    one_head_of_another_query,
    window_one_short,
]


@pytest.mark.parametrize("is_moved", [False, True], ids=["drawn", "moved-to-zero"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda x: x.__name__)
def test_faults_are_refused_by_the_lse_alone(fault, is_moved):
    q, k = draw()
    if is_moved:
        q, k = moved_to_zero(q, k)
    truth, sizes = lse_of(q, k), lse_sizes(q, k, **options())
    check(truth, truth, sizes, KV_LEN)
    with pytest.raises(AssertionError, match="1 of 1 rows"):
        check(fault(q, k), truth, sizes, KV_LEN)
