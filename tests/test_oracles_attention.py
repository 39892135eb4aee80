"""The oracles of attention: forms judged against each other and by hand."""

import functools as ft

import numpy as np
import pytest

from tests.oracles import attention

TIGHT = {"rtol": 1e-10, "atol": 1e-10}


def assert_all_close(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, **TIGHT)


# Attention


def attention_inputs(*, q_len, kv_len, q_heads, kv_heads, key_width, value_width):
    rng = np.random.default_rng(0)
    return (
        rng.standard_normal((q_len, q_heads, key_width)),
        rng.standard_normal((kv_len, kv_heads, key_width)),
        rng.standard_normal((kv_len, kv_heads, value_width)),
    )


def attention_options(**changed):
    options = {
        "context_len": 0,
        "softmax_scale": 0.3,
        "window": None,
        "sinks": None,
        "soft_cap": None,
        "causal": True,
    }
    return options | changed


FORMS = {
    "dense": attention.dense_attention,
    "online": ft.partial(attention.online_softmax_attention, block_kv=2),
    "at-once": attention.attention_at_once,
}
SINKS = np.array([0.5, -3.0, 6.0, 0.0, 1.0, -1.0])


@pytest.mark.parametrize("block_kv", [1, 7, 64])
@pytest.mark.parametrize(
    ("kv_heads", "key_width", "value_width"),
    [(6, 60, 60), (2, 24, 17), (1, 33, 8)],
    ids=["H6-G6-D60-E60", "H6-G2-D24-E17", "H6-G1-D33-E8"],
)
@pytest.mark.parametrize(
    "options",
    [
        attention_options(),
        attention_options(causal=False),
        attention_options(context_len=28),
        attention_options(context_len=28, window=1),
        attention_options(context_len=28, window=9),
        attention_options(context_len=28, window=1000),
        attention_options(sinks=SINKS),
        attention_options(soft_cap=2.0),
        attention_options(context_len=28, window=5, sinks=SINKS, soft_cap=2.0),
        attention_options(softmax_scale=40.0),
    ],
    ids=[
        "causal",
        "full",
        "context",
        "window1",
        "window9",
        "window1000",
        "sinks",
        "cap",
        "all",
        "peaked",
    ],
)
def test_online_attention_equals_dense(
    options, kv_heads, key_width, value_width, block_kv
):
    arrays = attention_inputs(
        q_len=13,
        kv_len=41,
        q_heads=6,
        kv_heads=kv_heads,
        key_width=key_width,
        value_width=value_width,
    )
    dense = attention.dense_attention(*arrays, **options)
    online = attention.online_softmax_attention(*arrays, **options, block_kv=block_kv)
    at_once = attention.attention_at_once(*arrays, **options)
    assert_all_close(at_once, online)
    assert dense[0].shape == (13, 6, value_width)
    assert dense[1].shape == (13, 6)
    assert_all_close(online, dense)


def test_attention_by_hand():
    # Scores log(1), log(3) and a sink of log(4): weights 1/8 and 3/8.
    out, lse = attention.dense_attention(
        np.ones((1, 1, 1)),
        np.log([1.0, 3.0]).reshape(2, 1, 1),
        np.array([8.0, 80.0]).reshape(2, 1, 1),
        **attention_options(context_len=1, softmax_scale=1.0, sinks=np.log([4.0])),
    )
    np.testing.assert_allclose(out, [[[31.0]]], **TIGHT)
    np.testing.assert_allclose(lse, [[np.log(8.0)]], **TIGHT)


def test_soft_cap_by_hand():
    out, lse = attention.dense_attention(
        np.full((1, 1, 1), 6.0),
        np.full((1, 1, 1), 10.0),
        np.full((1, 1, 1), 5.0),
        **attention_options(softmax_scale=0.5, soft_cap=20.0),
    )
    np.testing.assert_allclose(lse, [[20.0 * np.tanh(30.0 / 20.0)]], **TIGHT)
    np.testing.assert_allclose(out, [[[5.0]]], **TIGHT)


@pytest.mark.parametrize("form", FORMS)
def test_window_sees_w_keys_with_its_own(form):
    # With equal scores the output is the mean of the visible values.
    k, v = np.zeros((8, 1, 1)), np.arange(8.0).reshape(8, 1, 1)
    options = attention_options(context_len=5, window=3)
    q = np.zeros((3, 1, 1))
    out, lse = FORMS[form](q, k, v, **options)
    np.testing.assert_allclose(out[:, 0, 0], [4.0, 5.0, 6.0], **TIGHT)
    np.testing.assert_allclose(lse, np.full((3, 1), np.log(3.0)), **TIGHT)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
def test_row_without_keys_is_zero(form, sinks):
    q, k, v = attention_inputs(
        q_len=3, kv_len=0, q_heads=6, kv_heads=2, key_width=4, value_width=5
    )
    options = attention_options(sinks=sinks)
    out, lse = FORMS[form](q, k, v, **options)
    np.testing.assert_array_equal(out, np.zeros((3, 6, 5)))
    empty = np.full(6, -np.inf) if sinks is None else sinks
    np.testing.assert_allclose(lse, np.tile(empty, (3, 1)), **TIGHT)


@pytest.mark.parametrize("form", FORMS)
def test_invisible_rows_may_be_nan(form):
    q, k, v = attention_inputs(
        q_len=4, kv_len=20, q_heads=4, kv_heads=2, key_width=5, value_width=3
    )
    options = attention_options(context_len=10, window=6)

    clean = FORMS[form](q, k, v, **options)
    for array in (k, v):
        array[:5], array[14:] = np.nan, np.nan
    assert np.isfinite(clean[0]).all()
    assert_all_close(FORMS[form](q, k, v, **options), clean)


def test_parts_merge_by_lse():
    q, k, v = attention_inputs(
        q_len=5, kv_len=31, q_heads=4, kv_heads=2, key_width=6, value_width=7
    )
    options = attention_options(causal=False)
    whole_out, whole_lse = attention.dense_attention(q, k, v, **options)
    parts = [
        attention.dense_attention(q, k[part], v[part], **options)
        for part in (slice(0, 4), slice(4, 30), slice(30, 31))
    ]
    lse = np.logaddexp.reduce([part_lse for _, part_lse in parts])
    out = sum(o * np.exp(part_lse - lse)[..., None] for o, part_lse in parts)
    assert_all_close((out, lse), (whole_out, whole_lse))


def test_query_split_equals_whole():
    q, k, v = attention_inputs(
        q_len=12, kv_len=21, q_heads=2, kv_heads=1, key_width=6, value_width=7
    )
    whole = attention.dense_attention(q, k, v, **attention_options(context_len=9))
    parts = [
        attention.dense_attention(q[a:b], k, v, **attention_options(context_len=9 + a))
        for a, b in [(0, 1), (1, 8), (8, 12)]
    ]
    assert_all_close([np.concatenate(p) for p in zip(*parts, strict=True)], whole)


@pytest.mark.parametrize("form", FORMS)
def test_window_needs_causal(form):
    arrays = attention_inputs(
        q_len=1, kv_len=2, q_heads=1, kv_heads=1, key_width=1, value_width=1
    )
    options = attention_options(window=2, causal=False)
    with pytest.raises(ValueError, match="needs causal=True"):
        FORMS[form](*arrays, **options)


# MLA


def mla_inputs(*, q_len, kv_len, heads):
    rng = np.random.default_rng(1)
    nope, rope, latent, value = 12, 5, 19, 11
    return (
        rng.standard_normal((q_len, heads, nope)),
        rng.standard_normal((q_len, heads, rope)),
        rng.standard_normal((kv_len, latent)),
        rng.standard_normal((kv_len, rope)),
        rng.standard_normal((heads, nope, latent)),
        rng.standard_normal((heads, value, latent)),
    )


@pytest.mark.parametrize(
    ("q_len", "context_len", "heads"),
    [(1, 0, 1), (1, 62, 3), (17, 0, 5), (9, 22, 3)],
    ids=["T1-H1", "T1-J63-H3", "T17-H5", "T9-J31-H3"],
)
def test_mla_absorbed_equals_expanded(q_len, context_len, heads):
    arrays = mla_inputs(q_len=q_len, kv_len=context_len + q_len, heads=heads)
    options = {"context_len": context_len, "softmax_scale": 17.0**-0.5}
    absorbed = attention.mla_absorbed(*arrays, **options)
    assert absorbed[0].shape == (q_len, heads, 11)
    assert_all_close(absorbed, attention.mla_expanded(*arrays, **options))


@pytest.mark.parametrize("causal", [True, False])
def test_mla_latent_attention_is_attention_with_one_shared_head(causal):
    rng = np.random.default_rng(2)
    q, rows = rng.standard_normal((7, 3, 21)), rng.standard_normal((30, 21))
    latent = attention.mla_latent_attention(
        q, rows, latent_dim=16, context_len=20, softmax_scale=0.2, causal=causal
    )
    dense = attention.dense_attention(
        q,
        rows[:, None, :],
        rows[:, None, :16],
        **attention_options(context_len=20, softmax_scale=0.2, causal=causal),
    )
    assert_all_close(latent, dense)


def test_mla_latent_attention_over_no_rows():
    out, lse = attention.mla_latent_attention(
        np.ones((2, 3, 6)),
        np.ones((0, 6)),
        latent_dim=4,
        context_len=0,
        softmax_scale=1.0,
        causal=True,
    )
    np.testing.assert_array_equal(out, np.zeros((2, 3, 4)))
    np.testing.assert_array_equal(lse, np.full((2, 3), -np.inf))
