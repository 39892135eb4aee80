"""Each oracle has two forms; they are judged against each other and by hand."""

import functools as ft

import numpy as np
import pytest

from tests.oracles import attention, recurrent, short_conv

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


# KDA and GDN

LOG_DECAYS = {
    "usual": (-0.5, 0.0),
    "keep": (-1e-9, 0.0),
    "forget": (-90.0, -60.0),
    "vanish": (-1e4, -1e3),
    "mixed": (-1e3, 0.0),
}
DELTA_RULES = {
    "kda": (recurrent.kda_recurrent, recurrent.kda_chunked),
    "gdn": (recurrent.gdn_recurrent, recurrent.gdn_chunked),
}


def delta_rule_inputs(rule, *, num_tokens, heads, key_heads, decay):
    """Arrays of a delta rule; a third of the decays are exactly none."""
    rng = np.random.default_rng(3)
    key_width, value_width = 10, 7
    low, high = LOG_DECAYS[decay]
    shape = (num_tokens, heads, key_width) if rule == "kda" else (num_tokens, heads)
    log_decay = rng.uniform(low, high, shape)
    if decay == "mixed":
        log_decay[rng.uniform(size=shape) < 1 / 3] = 0.0
    q, k = (
        recurrent.l2_normalize(
            rng.standard_normal((num_tokens, key_heads, key_width)), eps=1e-6
        )
        for _ in range(2)
    )
    return (
        q,
        k,
        rng.standard_normal((num_tokens, heads, value_width)),
        log_decay,
        rng.uniform(0.0, 1.0, (num_tokens, heads)),
        rng.standard_normal((heads, value_width, key_width)),
    )


@pytest.mark.parametrize("decay", LOG_DECAYS)
@pytest.mark.parametrize("chunk_size", [1, 5, 16, 64])
@pytest.mark.parametrize(
    ("num_tokens", "heads", "key_heads"),
    [(1, 1, 1), (37, 3, 3), (33, 6, 2)],
    ids=["T1-H1-I1", "T37-H3-I3", "T33-H6-I2"],
)
@pytest.mark.parametrize("rule", DELTA_RULES)
def test_chunked_equals_recurrent(
    rule, num_tokens, heads, key_heads, chunk_size, decay
):
    arrays = delta_rule_inputs(
        rule, num_tokens=num_tokens, heads=heads, key_heads=key_heads, decay=decay
    )
    step, chunked = DELTA_RULES[rule]
    expected = step(*arrays, scale=0.3)
    assert np.isfinite(expected[0]).all()
    assert_all_close(chunked(*arrays, scale=0.3, chunk_size=chunk_size), expected)


@pytest.mark.parametrize("splits", [(1,), (20,), (0, 7, 7, 36)], ids=str)
@pytest.mark.parametrize("rule", DELTA_RULES)
def test_carried_state_equals_whole(rule, splits):
    *tokens, state = delta_rule_inputs(
        rule, num_tokens=37, heads=4, key_heads=2, decay="usual"
    )
    step, chunked = DELTA_RULES[rule]
    initial = state.copy()
    whole = step(*tokens, state, scale=0.3)
    np.testing.assert_array_equal(state, initial)
    for run in (
        lambda *arrays: step(*arrays, scale=0.3),
        lambda *arrays: chunked(*arrays, scale=0.3, chunk_size=8),
    ):
        outs, carried = [], state
        for begin, end in zip((0, *splits), (*splits, 37), strict=True):
            out, carried = run(*(x[begin:end] for x in tokens), carried)
            outs.append(out)
        assert_all_close((np.concatenate(outs), carried), whole)


def test_kda_with_equal_channels_is_gdn():
    q, k, v, log_decay, beta, state = delta_rule_inputs(
        "gdn", num_tokens=19, heads=4, key_heads=2, decay="usual"
    )
    per_channel = np.repeat(log_decay[:, :, None], 10, axis=2)
    assert_all_close(
        recurrent.kda_recurrent(q, k, v, per_channel, beta, state, scale=0.3),
        recurrent.gdn_recurrent(q, k, v, log_decay, beta, state, scale=0.3),
    )


@pytest.mark.parametrize("rule", DELTA_RULES)
def test_delta_rule_overwrites_what_a_key_held(rule):
    # With beta 1 and no decay, reading a key returns the last value written to it.
    k = np.zeros((2, 1, 4))
    k[:, 0, 2] = 1.0
    v = np.array([[[1.0, 2.0]], [[3.0, 5.0]]])
    log_decay = np.zeros((2, 1, 4) if rule == "kda" else (2, 1))
    state = np.full((1, 2, 4), 9.0)
    out, last = DELTA_RULES[rule][0](
        k, k, v, log_decay, np.ones((2, 1)), state, scale=2.0
    )
    np.testing.assert_allclose(out, 2.0 * v, **TIGHT)
    state[0, :, 2] = v[1, 0]
    np.testing.assert_allclose(last, state, **TIGHT)


def test_kda_decays_key_channels_of_a_v_first_state():
    state = np.arange(1.0, 7.0).reshape(1, 2, 3)
    decay = np.array([1.0, 0.5, 0.25])
    zeros = np.zeros((1, 1, 3))
    out, last = recurrent.kda_recurrent(
        np.ones((1, 1, 3)),
        zeros,
        np.zeros((1, 1, 2)),
        np.log(decay).reshape(1, 1, 3),
        np.ones((1, 1)),
        state,
        scale=1.0,
    )
    np.testing.assert_allclose(last, state * decay, **TIGHT)
    np.testing.assert_allclose(out[0, 0], (state[0] * decay).sum(axis=1), **TIGHT)


# Gates


def test_kda_gates_by_hand():
    logits = np.array([[[0.0, 800.0, -800.0], [1.0, 2.0, 3.0]]])
    a_log = np.log([2.0, 0.5])
    dt_bias = np.array([[0.0, 0.0, 0.0], [-1.0, -2.0, 0.0]])
    softplus_3 = np.log(1.0 + np.exp(3.0))
    np.testing.assert_allclose(
        recurrent.kda_log_decay(logits, a_log, dt_bias),
        [
            [
                [-2.0 * np.log(2.0), -1600.0, 0.0],
                [-0.5 * np.log(2.0), -0.5 * np.log(2.0), -0.5 * softplus_3],
            ]
        ],
        **TIGHT,
    )
    np.testing.assert_allclose(
        recurrent.kda_log_decay_bounded(logits, a_log, dt_bias, lower_bound=-5.0),
        [[[-2.5, -5.0, 0.0], [-2.5, -2.5, -5.0 / (1.0 + np.exp(-1.5))]]],
        **TIGHT,
    )


def test_gdn_gate_by_hand():
    np.testing.assert_allclose(
        recurrent.gdn_log_decay(
            np.array([[1.0, 0.0]]), np.log([3.0, 1.0]), np.array([-1.0, 0.0])
        ),
        [[-3.0 * np.log(2.0), -np.log(2.0)]],
        **TIGHT,
    )


def test_l2_normalize_has_eps_inside_the_root():
    np.testing.assert_allclose(
        recurrent.l2_normalize(np.array([[3.0, 0.0], [0.0, 0.0]]), eps=7.0),
        [[0.75, 0.0], [0.0, 0.0]],
        **TIGHT,
    )


# Mamba2


def mamba2_inputs(*, num_tokens, heads, groups, dt_shift):
    rng = np.random.default_rng(4)
    width, state_width = 5, 9
    return (
        rng.standard_normal((num_tokens, heads, width)),
        rng.standard_normal((num_tokens, heads)) + dt_shift,
        rng.standard_normal(heads),
        rng.standard_normal((num_tokens, groups, state_width)),
        rng.standard_normal((num_tokens, groups, state_width)),
        rng.standard_normal(heads),
        rng.standard_normal(heads),
        rng.standard_normal((heads, width, state_width)),
    )


@pytest.mark.parametrize("dt_shift", [-30.0, 0.0, 300.0])
@pytest.mark.parametrize(
    ("num_tokens", "heads", "groups"),
    [(0, 1, 1), (1, 1, 1), (31, 6, 2)],
    ids=["T0-H1", "T1-H1", "T31-H6-groups2"],
)
def test_mamba2_dual_equals_recurrent(num_tokens, heads, groups, dt_shift):
    arrays = mamba2_inputs(
        num_tokens=num_tokens, heads=heads, groups=groups, dt_shift=dt_shift
    )
    y, state = recurrent.mamba2_recurrent(*arrays)
    other_y, other_state = recurrent.mamba2_dual(*arrays)
    np.testing.assert_allclose(other_y, y, rtol=1e-10, atol=1e-8)
    np.testing.assert_allclose(other_state, state, rtol=1e-10, atol=1e-8)


@pytest.mark.parametrize("split", [0, 1, 13, 31])
def test_mamba2_carried_state_equals_whole(split):
    x, dt, a_log, b, c, d_skip, dt_bias, state = mamba2_inputs(
        num_tokens=31, heads=4, groups=2, dt_shift=0.0
    )
    whole = recurrent.mamba2_recurrent(x, dt, a_log, b, c, d_skip, dt_bias, state)
    outs, carried = [], state
    for part in (slice(0, split), slice(split, 31)):
        y, carried = recurrent.mamba2_recurrent(
            x[part], dt[part], a_log, b[part], c[part], d_skip, dt_bias, carried
        )
        outs.append(y)
    assert_all_close((np.concatenate(outs), carried), whole)


def test_mamba2_by_hand():
    # softplus(0) = log 2 and a = -1: the state halves, then log 2 * x * B joins it.
    one = np.ones((1, 1, 1))
    y, state = recurrent.mamba2_recurrent(
        3.0 * one,
        np.full((1, 1), -4.0),
        np.zeros(1),
        2.0 * one,
        5.0 * one,
        np.array([7.0]),
        np.array([4.0]),
        10.0 * one,
    )
    expected = 5.0 + 6.0 * np.log(2.0)
    np.testing.assert_allclose(state, expected * one, **TIGHT)
    np.testing.assert_allclose(y, (5.0 * expected + 21.0) * one, **TIGHT)


# Short convolution


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("conv_width", [1, 2, 4])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 29])
def test_short_conv_forms_agree(num_tokens, conv_width, silu):
    rng = np.random.default_rng(5)
    x = rng.standard_normal((num_tokens, 6))
    weight = rng.standard_normal((6, conv_width))
    state = rng.standard_normal((conv_width - 1, 6))
    y, new_state = short_conv.short_conv(x, weight, state, silu=silu)
    assert y.shape == x.shape
    assert new_state.shape == state.shape
    assert_all_close(
        short_conv.short_conv_convolve(x, weight, state, silu=silu), (y, new_state)
    )


@pytest.mark.parametrize("splits", [(1,), (2, 3), (0, 1, 2, 3, 10)], ids=str)
def test_short_conv_carried_state_equals_whole(splits):
    rng = np.random.default_rng(6)
    x, weight = rng.standard_normal((11, 5)), rng.standard_normal((5, 4))
    carried = rng.standard_normal((3, 5))
    whole = short_conv.short_conv(x, weight, carried, silu=True)
    outs = []
    for begin, end in zip((0, *splits), (*splits, 11), strict=True):
        y, carried = short_conv.short_conv(x[begin:end], weight, carried, silu=True)
        outs.append(y)
    assert_all_close((np.concatenate(outs), carried), whole)


def test_short_conv_by_hand():
    weight = np.array([[1.0, 10.0, 100.0]])
    x = np.array([[3.0]])
    y, state = short_conv.short_conv(x, weight, np.array([[1.0], [2.0]]), silu=False)
    np.testing.assert_array_equal(y, [[321.0]])
    np.testing.assert_array_equal(state, [[2.0], [3.0]])
    y, _ = short_conv.short_conv(
        x, np.ones((1, 3)), np.array([[-3.0], [-2.0]]), silu=True
    )
    np.testing.assert_allclose(y, [[-2.0 / (1.0 + np.exp(2.0))]], **TIGHT)


def test_short_conv_refuses_a_state_of_conv_width_inputs():
    with pytest.raises(ValueError, match="does not fit"):
        short_conv.short_conv(
            np.zeros((2, 3)), np.zeros((3, 4)), np.zeros((4, 3)), silu=True
        )
