"""The oracles of recurrent layers: forms judged against each other and by hand."""

import numpy as np
import pytest

from tests.oracles import recurrent, short_conv
from tests.test_oracles_attention import TIGHT, assert_all_close

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
