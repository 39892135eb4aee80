"""Mamba2 selective state update on states in the pool, against its float64 oracle."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.comparison import assert_matches
from tests.gpu_compile import (
    compile_for_h200,
    pool_sized_copies,
    requires_h200_compiler,
)
from tests.oracles.recurrent import mamba2_recurrent
from tests.state_pools import StatePool, round_to
from ukv.errors import IdSpaceError, UnsupportedError
from ukv.ids import KernelBlocks
from ukv.layout import unified_layout
from ukv.ops import Mamba2Parameters, Mamba2Tokens, StateSlots, mamba2_decode
from ukv.pool import pool_struct
from ukv.spec import mamba2_state_spec

HEADS, GROUPS, HEAD_DIM, STATE_DIM = 4, 2, 64, 128
CASES = [
    ("high", "float32", "float32"),
    ("float", "float32", "bfloat16"),
    ("static", "bfloat16", "float32"),
]
by_implementation = pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("triton", marks=pytest.mark.gpu)]
)
decode = jax.jit(mamba2_decode, static_argnames=("view", "implementation"))


def make_spec(storage="float32", **sizes):
    sizes = {"num_heads": HEADS, "num_groups": GROUPS, "head_dim": HEAD_DIM, **sizes}
    return mamba2_state_spec(
        name="state",
        num_layers=2,
        state_dim=STATE_DIM,
        conv_width=4,
        state_dtype=storage,
        **sizes,
    )


def make_pool(placement="high", storage="float32") -> StatePool:
    return StatePool.create(
        make_spec(storage), placement, part="recurrent", num_slots=9
    )


def make_parameters(rng) -> Mamba2Parameters:
    return Mamba2Parameters(
        a_log=jnp.asarray(np.log(rng.uniform(1, 16, HEADS)), jnp.float32),
        dt_bias=jnp.asarray(rng.standard_normal(HEADS) - 3, jnp.float32),
        d_skip=jnp.asarray(rng.standard_normal(HEADS), jnp.float32),
    )


def draw_tokens(rng, rows, query_len, dtype="float32"):
    shapes = {
        "x": (HEADS, HEAD_DIM),
        "dt_logits": (HEADS,),
        "b": (GROUPS, STATE_DIM),
        "c": (GROUPS, STATE_DIM),
    }
    return {
        name: round_to(rng.standard_normal((rows, query_len, *shape)), dtype)
        for name, shape in shapes.items()
    }


def run(pool, parameters, buffers, tokens, slots, is_fresh, implementation="xla"):
    buffers, out = decode(
        buffers,
        pool.view,
        Mamba2Tokens(**{name: jnp.asarray(x) for name, x in tokens.items()}),
        parameters,
        pool.slots(slots, is_fresh),
        implementation=implementation,
    )
    return buffers, np.asarray(out)


def expected(tokens, parameters, row, state):
    one = {name: x[row] for name, x in tokens.items()}
    return mamba2_recurrent(
        one["x"],
        one["dt_logits"],
        np.asarray(parameters.a_log),
        one["b"],
        one["c"],
        np.asarray(parameters.d_skip),
        np.asarray(parameters.dt_bias),
        state,
    )


def check(actual, truth, dtype, query_len, *, row_axes=(0, 1)):
    assert_matches(
        actual,
        truth,
        dtype=dtype,
        reduced_len=query_len + STATE_DIM,
        row_axes=row_axes,
    )


def check_drawn(actual, truth, dtype, query_len):
    """As `check`, but all heads of a token together.

    Among thousands of drawn heads the output of one may vanish against its terms, whose
    rounding it keeps.
    """
    check(actual, truth, dtype, query_len, row_axes=(0,))


@pytest.mark.parametrize(("placement", "storage", "dtype"), CASES)
@pytest.mark.parametrize("query_len", [1, 3])
@by_implementation
def test_update_matches_the_oracle(
    placement, storage, dtype, query_len, implementation
):
    rng = np.random.default_rng(0)
    pool, parameters = make_pool(placement, storage), make_parameters(rng)
    slots, is_fresh = [6, None, 2, 7], [False, False, True, False]
    tokens = draw_tokens(rng, 4, query_len, dtype)
    for x in tokens.values():
        x[1] = np.nan
    states = {
        slot: round_to(rng.standard_normal(pool.view.shape), storage) for slot in (6, 7)
    }
    before = pool.put(states)
    after, out = run(pool, parameters, before, tokens, slots, is_fresh, implementation)
    for row in (0, 2, 3):
        start = np.zeros(pool.view.shape) if is_fresh[row] else states[slots[row]]
        truth, last = expected(tokens, parameters, row, start)
        check(out[row], truth, dtype, query_len)
        check(pool.get(after, slots[row]), last, storage, query_len)
    assert np.all(out[1] == 0)
    pool.assert_only_written(before, after, [6, 2, 7])


@by_implementation
def test_bits_do_not_depend_on_the_slots(implementation):
    rng = np.random.default_rng(1)
    parameters, tokens = make_parameters(rng), draw_tokens(rng, 3, 2)
    states = rng.standard_normal((3, HEADS, HEAD_DIM, STATE_DIM)).astype(np.float32)
    found = []
    for placement, slots in (("high", [1, 2, 3]), ("float", [7, 4, 1])):
        pool = make_pool(placement)
        buffers = pool.put(dict(zip(slots, states, strict=True)))
        buffers, out = run(
            pool, parameters, buffers, tokens, slots, [False] * 3, implementation
        )
        found.append([out, *(pool.get(buffers, slot) for slot in slots)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_comparison_rejects_faults():
    rng = np.random.default_rng(2)
    pool, parameters = make_pool(), make_parameters(rng)
    tokens = draw_tokens(rng, 1, 2)
    states = {s: rng.standard_normal(pool.view.shape).astype("float32") for s in (3, 4)}
    buffers = pool.put(states)
    truth, _ = expected(tokens, parameters, 0, states[3])

    def call(tokens=tokens, parameters=parameters, slot=3, is_fresh=False):
        return run(pool, parameters, buffers, tokens, [slot], [is_fresh])[1][0]

    swapped = tokens | {"b": tokens["c"], "c": tokens["b"]}
    faults = {
        "zeros": np.zeros_like(truth, np.float32),
        "heads": call()[:, ::-1],
        "slot": call(slot=4),
        "fresh": call(is_fresh=True),
        "skip": call(parameters=parameters.replace(d_skip=parameters.d_skip * 0)),
        "rate": call(parameters=parameters.replace(a_log=parameters.a_log + 0.1)),
        "b_is_c": call(swapped),
    }
    for criterion in (check, check_drawn):
        criterion(call(), truth, "float32", 2)
        for out in faults.values():
            with pytest.raises(AssertionError):
                criterion(out, truth, "float32", 2)


@requires_h200_compiler
@pytest.mark.parametrize("query_len", [1, 4])
def test_kernel_is_one_launch_for_a_layer(query_len):
    num_layers, rows, heads = 6, 64, 80
    spec = make_spec(num_heads=heads, num_groups=1, head_dim=64)
    spec = dataclasses.replace(spec, num_layers=num_layers)
    layout = unified_layout([spec], pool_bytes=32 << 30)
    bf16 = jnp.bfloat16
    tokens = Mamba2Tokens(
        x=jax.ShapeDtypeStruct((rows, query_len, heads, 64), bf16),
        dt_logits=jax.ShapeDtypeStruct((rows, query_len, heads), bf16),
        b=jax.ShapeDtypeStruct((rows, query_len, 1, STATE_DIM), bf16),
        c=jax.ShapeDtypeStruct((rows, query_len, 1, STATE_DIM), bf16),
    )
    ones = jax.ShapeDtypeStruct((heads,), jnp.float32)
    parameters = Mamba2Parameters(a_log=ones, dt_bias=ones, d_skip=ones)
    slots = StateSlots(
        slots=KernelBlocks(jnp.zeros(rows, jnp.int32), "state"),
        is_fresh=jnp.zeros(rows, bool),
    )

    def step(buffers, tokens, parameters, slots):
        outs = []
        for layer in range(num_layers):
            view = layout.part_view("state", layer=layer, part="recurrent")
            buffers, out = mamba2_decode(
                buffers, view, tokens, parameters, slots, implementation="triton"
            )
            outs.append(out)
        return buffers, outs

    program = compile_for_h200(
        step,
        pool_struct(layout).buffers,
        tokens,
        parameters,
        slots,
        donate_argnums=0,
        thunks=True,
    )
    assert program.alias_bytes >= layout.pool_bytes
    assert program.temp_bytes < 1 << 20
    assert not pool_sized_copies(program.hlo_text, 1 << 20)
    assert program.top_thunks == ["kCommandBuffer"]
    assert len(program.thunk_text.strip().splitlines()) == 1 + num_layers


@pytest.mark.usefixtures("unchecked")
def test_wrong_use_is_refused():
    rng = np.random.default_rng(3)
    pool, parameters = make_pool(), make_parameters(rng)
    buffers, tokens = pool.put({}), draw_tokens(rng, 1, 1)
    with pytest.raises(UnsupportedError, match="'triton' runs on gpu, not on cpu"):
        run(pool, parameters, buffers, tokens, [1], [True], "triton")
    short = tokens | {"x": tokens["x"][..., :16]}
    with pytest.raises(ValueError, match=r"state_dim\] = \(4, 16, 128\)"):
        run(pool, parameters, buffers, short, [1], [True])
    ids = KernelBlocks(jnp.zeros(1, jnp.int32), "other")
    other = StateSlots(slots=ids, is_fresh=jnp.ones(1, bool))
    with pytest.raises(IdSpaceError, match="not of 'other'"):
        mamba2_decode(
            buffers,
            pool.view,
            Mamba2Tokens(**{name: jnp.asarray(x) for name, x in tokens.items()}),
            parameters,
            other,
        )
