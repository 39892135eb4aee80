"""Mixture of experts: what is chosen, what it computes, and what it never touches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from models.config_fields import ConfigError
from models.moe import (
    Choice,
    Experts,
    Router,
    apply_all_experts,
    apply_experts,
    cut_pairs,
    silu_gate,
)
from tests.comparison import assert_matches
from tests.oracles.moe import choose_experts, experts_by_mask, experts_by_token

WIDTH, INNER = 20, 12

ROUTERS = {
    "plain": Router(num_experts=8, num_chosen=2, scoring="softmax"),
    "all": Router(num_experts=3, num_chosen=3, scoring="sigmoid"),
    "sigmoid": Router(num_experts=8, num_chosen=3, scoring="sigmoid", scaling=2.446),
    "best group": Router(
        num_experts=12,
        num_chosen=3,
        scoring="softmax",
        num_groups=4,
        num_chosen_groups=2,
        renormalizes=False,
        scaling=16.0,
    ),
    "two best of a group": Router(
        num_experts=12,
        num_chosen=4,
        scoring="sigmoid",
        num_groups=3,
        num_chosen_groups=2,
        group_score="two best",
        scaling=2.5,
    ),
}


def drawn(seed, *shape):
    values = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(values, jnp.float32)


def drawn_experts(num_experts, *, has_bias=False):
    experts = Experts(
        gate_up=drawn(1, num_experts, 2 * INNER, WIDTH),
        down=drawn(2, num_experts, WIDTH, INNER),
    )
    if has_bias:
        experts = experts.replace(
            gate_up_bias=drawn(3, num_experts, 2 * INNER),
            down_bias=drawn(4, num_experts, WIDTH),
        )
    return experts


def drawn_choice(num_tokens, num_experts, num_chosen):
    rng = np.random.default_rng(5)
    ids = [rng.permutation(num_experts)[:num_chosen] for _ in range(num_tokens)]
    weights = rng.uniform(0.1, 1.0, size=(num_tokens, num_chosen))
    return Choice(
        expert_ids=jnp.asarray(np.array(ids), jnp.int32),
        weights=jnp.asarray(weights, jnp.float32),
    )


def silu_oracle(gate, up):
    return gate / (1.0 + np.exp(-gate)) * up


def clamped(gate, up):
    return jnp.minimum(gate, 1.0) * jnp.clip(up, -1.0, 1.0)


def clamped_oracle(gate, up):
    return np.minimum(gate, 1.0) * np.clip(up, -1.0, 1.0)


def oracle_arguments(x, choice, experts):
    num_experts = experts.gate_up.shape[0]
    biases = (
        np.zeros((num_experts, 2 * INNER))
        if experts.gate_up_bias is None
        else experts.gate_up_bias,
        np.zeros((num_experts, WIDTH))
        if experts.down_bias is None
        else experts.down_bias,
    )
    arrays = (choice.expert_ids, choice.weights, experts.gate_up, experts.down, *biases)
    ids, *floats = (np.asarray(a) for a in arrays)
    return (np.asarray(x), ids, *(a.astype(np.float64) for a in floats))


@pytest.mark.parametrize("name", ROUTERS)
def test_choice_matches_the_oracle(name):
    router = ROUTERS[name]
    x = drawn(6, 50, WIDTH)
    weight = drawn(7, router.num_experts, WIDTH)
    bias, correction = drawn(8, router.num_experts), drawn(9, router.num_experts)
    choice = jax.jit(router.choose)(x, weight, bias=bias, correction_bias=correction)
    logits = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    ids, weights = choose_experts(
        logits + np.asarray(bias, np.float64),
        np.asarray(correction, np.float64),
        scoring=router.scoring,
        num_chosen=router.num_chosen,
        num_groups=router.num_groups,
        num_chosen_groups=router.num_chosen_groups,
        best_per_group=2 if router.group_score == "two best" else 1,
        renormalize=router.renormalizes,
        scaling=router.scaling,
    )
    order = np.argsort(choice.expert_ids, axis=1)
    found = np.take_along_axis(np.asarray(choice.expert_ids), order, axis=1)
    np.testing.assert_array_equal(found, ids)
    # Softmax weights get the relative error of their logits.
    assert_matches(
        np.take_along_axis(np.asarray(choice.weights), order, axis=1),
        weights,
        dtype="float32",
        reduced_len=WIDTH,
        row_axes=(0,),
    )


def test_correction_and_bias_can_be_left_out():
    router, x = ROUTERS["sigmoid"], drawn(6, 5, WIDTH)
    weight = drawn(7, 8, WIDTH)
    zeros = jnp.zeros(8, jnp.float32)
    without = router.choose(x, weight)
    with_zeros = router.choose(x, weight, bias=zeros, correction_bias=zeros)
    jax.tree.map(np.testing.assert_array_equal, without, with_zeros)


def test_equal_scores_go_to_the_lower_expert():
    router = ROUTERS["two best of a group"]
    x = jnp.ones((1, WIDTH), jnp.float32)
    choice = router.choose(x, jnp.zeros((12, WIDTH), jnp.float32))
    np.testing.assert_array_equal(choice.expert_ids, [[0, 1, 2, 3]])


def test_scores_that_vanish_give_finite_weights():
    router = ROUTERS["sigmoid"]
    x = jnp.full((1, WIDTH), 100.0, jnp.float32)
    choice = router.choose(x, jnp.full((8, WIDTH), -100.0, jnp.float32))
    np.testing.assert_array_equal(choice.weights, np.zeros((1, 3)))


def test_the_oracles_agree():
    experts = drawn_experts(8, has_bias=True)
    arguments = oracle_arguments(drawn(6, 9, WIDTH), drawn_choice(9, 8, 3), experts)
    by_token = experts_by_token(*arguments, silu_oracle)
    by_mask = experts_by_mask(*arguments, silu_oracle)
    np.testing.assert_allclose(by_token, by_mask, rtol=1e-12)


@pytest.mark.parametrize("num_tokens", [1, 5, 16, 200])
@pytest.mark.parametrize("has_bias", [False, True])
def test_experts_match_the_oracle(num_tokens, has_bias):
    experts = drawn_experts(8, has_bias=has_bias)
    x, choice = drawn(6, num_tokens, WIDTH), drawn_choice(num_tokens, 8, 3)
    activation, oracle = (
        (clamped, clamped_oracle) if has_bias else (silu_gate, silu_oracle)
    )
    run = jax.jit(apply_experts, static_argnames="activation")
    out = run(
        x, choice, experts, is_token=jnp.ones(num_tokens, bool), activation=activation
    )
    expected = experts_by_token(*oracle_arguments(x, choice, experts), oracle)
    assert_matches(
        out, expected, dtype="float32", reduced_len=WIDTH * INNER, row_axes=(0,)
    )


@pytest.mark.parametrize("has_bias", [False, True])
def test_all_experts_match_the_oracle_and_have_its_gradient(has_bias):
    experts = drawn_experts(8, has_bias=has_bias)
    x, choice = drawn(6, 30, WIDTH), drawn_choice(30, 8, 3)
    activation, oracle = (
        (clamped, clamped_oracle) if has_bias else (silu_gate, silu_oracle)
    )
    run = jax.jit(apply_all_experts, static_argnames="activation")
    out = run(x, choice, experts, activation=activation)
    expected = experts_by_token(*oracle_arguments(x, choice, experts), oracle)
    assert_matches(
        out, expected, dtype="float32", reduced_len=WIDTH * INNER, row_axes=(0,)
    )
    check_grads(
        lambda x, weights: run(
            x, choice.replace(weights=weights), experts, activation=silu_gate
        ),
        (x, choice.weights),
        order=1,
        modes=["rev"],
        rtol=1e-2,
    )


def test_all_tokens_may_choose_the_same_expert():
    experts, x = drawn_experts(8), drawn(6, 50, WIDTH)
    choice = Choice(
        expert_ids=jnp.full((50, 1), 7, jnp.int32), weights=jnp.ones((50, 1))
    )
    out = apply_experts(x, choice, experts, is_token=jnp.ones(50, bool))
    expected = experts_by_token(*oracle_arguments(x, choice, experts), silu_oracle)
    assert_matches(
        out, expected, dtype="float32", reduced_len=WIDTH * INNER, row_axes=(0,)
    )


def test_padding_and_experts_without_a_token_are_never_read():
    experts, choice = drawn_experts(8), drawn_choice(40, 7, 2)
    experts = jax.tree.map(lambda stack: stack.at[7].set(jnp.nan), experts)
    is_token = np.arange(40) % 3 != 1
    x = jnp.where(is_token[:, None], drawn(6, 40, WIDTH), jnp.nan)
    # Padding has chosen, too.
    ids = np.where(is_token[:, None], choice.expert_ids, 7)
    choice = choice.replace(
        expert_ids=jnp.asarray(ids),
        weights=jnp.where(is_token[:, None], choice.weights, jnp.nan),
    )
    out = np.asarray(apply_experts(x, choice, experts, is_token=jnp.asarray(is_token)))
    assert (out[~is_token] == 0).all()
    arguments = oracle_arguments(x, choice, experts)
    expected = experts_by_token(
        *(a[is_token] for a in arguments[:3]), *arguments[3:], silu_oracle
    )
    assert_matches(
        out[is_token],
        expected,
        dtype="float32",
        reduced_len=WIDTH * INNER,
        row_axes=(0,),
    )


def test_nothing_but_padding_gives_zeros():
    out = apply_experts(
        jnp.full((4, WIDTH), jnp.nan),
        drawn_choice(4, 8, 2),
        drawn_experts(8),
        is_token=jnp.zeros(4, bool),
    )
    np.testing.assert_array_equal(out, np.zeros((4, WIDTH)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neighbours_change_no_bit(dtype):
    router, weight = ROUTERS["sigmoid"], drawn(7, 8, WIDTH)
    experts = jax.tree.map(lambda a: a.astype(dtype), drawn_experts(8))
    x = drawn(6, 33, WIDTH).astype(dtype)

    @jax.jit
    def run(x, is_token):
        choice = router.choose(x, weight)
        return apply_experts(x, choice, experts, is_token=is_token)

    whole = np.asarray(run(x, jnp.ones(33, bool)).astype(jnp.float32))
    rng = np.random.default_rng(8)
    for _ in range(5):
        order, is_token = rng.permutation(33), rng.random(33) < 0.5
        moved = jnp.where(is_token[:, None], x[order], jnp.nan)
        out = np.asarray(run(moved, jnp.asarray(is_token)).astype(jnp.float32))
        np.testing.assert_array_equal(out[is_token], whole[order][is_token])


def test_tiles_of_the_example():
    tiles = cut_pairs(jnp.asarray([7, 3, 7, 7, 3]), num_experts=8, tile_tokens=2)
    assert tiles.num_tiles == 3
    np.testing.assert_array_equal(tiles.experts[:3], [3, 7, 7])
    np.testing.assert_array_equal(tiles.pairs[:3], [[1, 4], [0, 2], [3, 5]])
    np.testing.assert_array_equal(tiles.pairs[3:], np.full((4, 2), 5))


@pytest.mark.parametrize("tile_tokens", [1, 3, 16])
def test_tiles_hold_every_pair_once(tile_tokens):
    cut = jax.jit(cut_pairs, static_argnames=("num_experts", "tile_tokens"))
    for seed in range(20):
        rng = np.random.default_rng(seed)
        # Of few experts or many; 6 means none.
        experts = rng.integers(rng.integers(0, 6), 7, size=40).astype(np.int32)
        tiles = cut(jnp.asarray(experts), num_experts=6, tile_tokens=tile_tokens)
        num_tiles, pairs = int(tiles.num_tiles), np.asarray(tiles.pairs)
        is_pair = pairs < 40
        assert not is_pair[num_tiles:].any()
        np.testing.assert_array_equal(
            np.sort(pairs[is_pair]), np.flatnonzero(experts < 6)
        )
        for tile in range(num_tiles):
            found = experts[pairs[tile][is_pair[tile]]]
            assert found.size
            assert (found == tiles.experts[tile]).all()
        counts = np.bincount(experts, minlength=7)[:6]
        assert num_tiles == (-(-counts // tile_tokens)).sum()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_groups": 5}, "num_groups=5 must divide"),
        ({"num_groups": 0}, "num_groups=0 must divide"),
        ({"num_chosen_groups": 2}, r"num_chosen_groups=2 must be in 1 ... 1"),
        ({"num_chosen": 0}, "num_chosen=0 must be in 1 ... 12"),
        ({"num_chosen": 13}, "num_chosen=13 must be in 1 ... 12"),
        ({"num_groups": 12, "group_score": "two best"}, "have no two best"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(changes, message):
    plain = Router(num_experts=12, num_chosen=1, scoring="sigmoid")
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(plain, **changes)
