"""The pure forms of the delta rule, in chunks and token by token, on one row."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.comparison import assert_matches
from tests.oracles import recurrent as oracle
from tests.recurrent_cases import EPS, check
from ukv.ops import chunked_delta_rule, recurrent_delta_rule

FORMS = {
    "chunked": jax.jit(chunked_delta_rule, static_argnames="chunk_size"),
    "recurrent": jax.jit(recurrent_delta_rule),
}


def draw_pure(rng, num_tokens, *, log_decay, heads=2, key_dim=16, value_dim=8):
    """Inputs of one row as the pure forms take them; `log_decay` draws its own."""
    q, k = rng.standard_normal((2, num_tokens, heads, key_dim))
    return {
        "q": oracle.l2_normalize(q, eps=EPS).astype(np.float32),
        "k": oracle.l2_normalize(k, eps=EPS).astype(np.float32),
        "v": rng.standard_normal((num_tokens, heads, value_dim)).astype(np.float32),
        "log_decay": log_decay((num_tokens, heads, key_dim)).astype(np.float32),
        "beta": rng.uniform(0, 1, (num_tokens, heads)).astype(np.float32),
        "state_vk": rng.standard_normal((heads, value_dim, key_dim)).astype(np.float32),
    }


def run_pure(form, inputs, **kwargs):
    num_tokens = inputs["q"].shape[0]
    batched = {name: jnp.asarray(x[None]) for name, x in inputs.items()}
    out, state = FORMS[form](**batched, lens=jnp.asarray([num_tokens]), **kwargs)
    return np.asarray(out)[0], np.asarray(state)[0]


def mixed_decay(rng, shape):
    """Half of the channels near 1 for ever, the others near 0 in some stretches."""
    gentle = -np.exp(rng.uniform(-18, -7, shape))
    strong = -np.exp(rng.uniform(2, 12, shape))
    is_strong = (np.arange(shape[0]) // 37 % 3 == 0)[:, None, None]
    return np.where(is_strong & (np.arange(shape[-1]) % 2 == 0), strong, gentle)


@pytest.mark.parametrize("form", FORMS)
def test_extreme_decays_over_4096_tokens(form):
    rng = np.random.default_rng(6)
    inputs = draw_pure(rng, 4096, log_decay=ft.partial(mixed_decay, rng))
    truth, last = oracle.kda_recurrent(*inputs.values(), scale=1.0)
    out, state = run_pure(form, inputs)
    check(out, truth, reduced_len=4096)
    check(state, last, reduced_len=4096)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [-1e-9, -0.0, -88.0, -1e4, -3e38, -np.inf])
def test_constant_decays_over_4096_tokens_stay_finite(form, value):
    rng = np.random.default_rng(7)
    inputs = draw_pure(rng, 4096, log_decay=lambda shape: np.full(shape, value))
    out, state = run_pure(form, inputs)
    assert np.all(np.isfinite(out))
    # A strong decay leaves what the last token wrote, beta * outer(v, k).
    if value < -80:
        k, v, beta = inputs["k"][-1], inputs["v"][-1], inputs["beta"][-1]
        last = np.einsum("hv,hk->hvk", (beta[:, None] * v).astype(np.float64), k)
        check(state, last, reduced_len=1)
    else:
        assert np.abs(state).max() < 10


@pytest.mark.parametrize("decay", [-1e-9, -0.5])
def test_a_repeated_key_is_solved_exactly(decay):
    # The triangular system is at its worst: a series in its powers reaches 1e17.
    rng = np.random.default_rng(8)
    inputs = draw_pure(rng, 192, log_decay=lambda shape: np.full(shape, decay))
    inputs["k"] = np.broadcast_to(inputs["k"][:1], inputs["k"].shape).copy()
    inputs["beta"] = np.full_like(inputs["beta"], 0.999)
    truth, last = oracle.kda_recurrent(*inputs.values(), scale=1.0)
    for form in FORMS:
        out, state = run_pure(form, inputs)
        # With one key and beta near 1 a token's output is what is left of terms a
        # thousand times its size, so the error is measured by the head's outputs.
        assert_matches(
            np.asarray(out), truth, dtype="float32", reduced_len=192, row_axes=(1,)
        )
        check(state, last, reduced_len=192)


@pytest.mark.parametrize("chunk_size", [16, 48])
def test_the_chunk_size_does_not_matter(chunk_size):
    rng = np.random.default_rng(9)
    inputs = draw_pure(rng, 100, log_decay=lambda s: -np.exp(rng.uniform(-5, 2, s)))
    truth, last = oracle.kda_recurrent(*inputs.values(), scale=1.0)
    out, state = run_pure("chunked", inputs, chunk_size=chunk_size)
    check(out, truth, reduced_len=100)
    check(state, last, reduced_len=100)


@pytest.mark.parametrize("decay_dim", ["key_dim", "one"])
def test_gradients_of_the_chunked_form(decay_dim):
    rng = np.random.default_rng(10)
    rows, time, heads, key_dim, value_dim = 2, 75, 2, 8, 12
    lens = jnp.asarray([75, 40], jnp.int32)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    out_weight = normal(rows, time, heads, value_dim)
    state_weight = normal(rows, heads, value_dim, key_dim)

    def loss(form, *inputs):
        out, state = form(*inputs, lens)
        return jnp.sum(out * out_weight) + jnp.sum(state * state_weight)

    slopes = {
        name: jax.jit(jax.grad(ft.partial(loss, form), argnums=range(6)))
        for name, form in FORMS.items()
    }
    shape = (rows, time, heads, key_dim if decay_dim == "key_dim" else 1)
    unit = [normal(rows, time, heads, key_dim) for _ in range(2)]
    unit = [x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in unit]
    # From mild decays to those that reach 0 and 1.
    for low, high in ((-4, 0), (-12, 12)):
        inputs = (
            *unit,
            normal(rows, time, heads, value_dim),
            -jnp.exp(jnp.asarray(rng.uniform(low, high, shape), jnp.float32)),
            jax.nn.sigmoid(normal(rows, time, heads)),
            normal(rows, heads, value_dim, key_dim),
        )
        chunked, recurrent = (slopes[name](*inputs) for name in FORMS)
        for mine, plain in zip(chunked, recurrent, strict=True):
            assert np.all(np.isfinite(mine))
            # A row of the comparison is a sequence: some tokens have no gradient.
            assert_matches(
                np.asarray(mine),
                np.asarray(plain, np.float64),
                dtype="float32",
                reduced_len=time,
                row_axes=(0,),
            )
        for mine in chunked[:5]:
            assert np.all(np.asarray(mine)[1, 40:] == 0)


def test_padding_may_be_nan_and_changes_nothing():
    rng = np.random.default_rng(11)
    inputs = draw_pure(rng, 192, log_decay=lambda s: -rng.uniform(0, 1, s))
    batched = {name: jnp.asarray(x[None]) for name, x in inputs.items()}
    poisoned = {
        name: x if name == "state_vk" else x.at[:, 50:].set(jnp.nan)
        for name, x in batched.items()
    }
    for form in FORMS.values():
        lens = jnp.asarray([50])
        for a, b in zip(
            form(**batched, lens=lens), form(**poisoned, lens=lens), strict=True
        ):
            np.testing.assert_array_equal(a, b)
        _, state = form(**poisoned, lens=jnp.asarray([0]))
        np.testing.assert_array_equal(state, batched["state_vk"])


@pytest.mark.usefixtures("unchecked")
def test_an_odd_chunk_size_is_refused():
    inputs = draw_pure(np.random.default_rng(14), 8, log_decay=np.zeros)
    with pytest.raises(ValueError, match="chunk_size=8 must be a multiple of 16"):
        run_pure("chunked", inputs, chunk_size=8)
