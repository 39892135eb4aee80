"""KDA and GDN on states in the pool, against their float64 oracles."""

import dataclasses
import functools as ft

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
from tests.oracles import recurrent as oracle
from tests.state_pools import StatePool, round_to
from ukv.errors import IdSpaceError, UnsupportedError
from ukv.ids import ABSENT_BLOCK, KernelBlocks
from ukv.layout import PartView, unified_layout
from ukv.ops import (
    CHECKPOINT_GRID,
    CHUNK_SIZE,
    DeltaTokens,
    GdnGate,
    KdaGate,
    StateSlots,
    chunked_delta_rule,
    gdn_decode,
    gdn_prefill,
    kda_decode,
    kda_log_decay,
    kda_prefill,
    recurrent_delta_rule,
)
from ukv.ops.state_slots import slot_rows
from ukv.pool import pool_struct
from ukv.spec import gdn_state_spec, kda_state_spec

EPS = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """One of the two layers, its sizes in this file, and its ops.

    H value heads, I query/key heads, K and V widths of a head.
    """

    H: int
    I: int  # noqa: E741 - the letter of the oracle's legend
    K: int
    V: int
    decode: object
    prefill: object

    @property
    def is_kda(self) -> bool:
        return self.H == self.I

    def spec(self, storage: str):
        sizes = {"num_layers": 2, "key_dim": self.K, "value_dim": self.V}
        sizes |= {"name": "state", "conv_width": 4, "state_dtype": storage}
        if self.is_kda:
            return kda_state_spec(num_heads=self.H, **sizes)
        return gdn_state_spec(num_key_heads=self.I, num_value_heads=self.H, **sizes)

    def pool(self, placement="high", storage="float32") -> StatePool:
        spec = self.spec(storage)
        return StatePool.create(spec, placement, part="recurrent", num_slots=13)

    def gate(self, rng, lower_bound=None):
        a_log = jnp.asarray(np.log(rng.uniform(0.5, 4.0, self.H)), jnp.float32)
        bias = rng.standard_normal((self.H, self.K) if self.is_kda else self.H) - 2.0
        bias = jnp.asarray(bias, jnp.float32)
        if self.is_kda:
            return KdaGate(a_log=a_log, dt_bias=bias, lower_bound=lower_bound)
        return GdnGate(a_log=a_log, dt_bias=bias)

    def tokens(self, rng, *shape, dtype="float32") -> dict[str, np.ndarray]:
        gate_shape = (self.H, self.K) if self.is_kda else (self.H,)
        shapes = {
            "q": (self.I, self.K),
            "k": (self.I, self.K),
            "v": (self.H, self.V),
            "gate_logits": gate_shape,
            "beta_logits": (self.H,),
        }
        return {
            name: round_to(rng.standard_normal((*shape, *own)), dtype)
            for name, own in shapes.items()
        }

    def check(self, actual, truth, *, num_tokens, dtype="float32"):
        """Behind an element are sums over the key channels and over the tokens."""
        check(actual, truth, dtype=dtype, reduced_len=num_tokens + self.K)

    def expected(self, tokens, gate, state):
        """Outputs and state of one sequence, all in float64."""
        q, k = (oracle.l2_normalize(x, eps=EPS) for x in (tokens["q"], tokens["k"]))
        beta = 1 / (1 + np.exp(-np.asarray(tokens["beta_logits"], np.float64)))
        parameters = (tokens["gate_logits"], gate.a_log, gate.dt_bias)
        if not self.is_kda:
            log_decay, run = oracle.gdn_log_decay(*parameters), oracle.gdn_recurrent
        elif gate.lower_bound is None:
            log_decay, run = oracle.kda_log_decay(*parameters), oracle.kda_recurrent
        else:
            log_decay = oracle.kda_log_decay_bounded(
                *parameters, lower_bound=gate.lower_bound
            )
            run = oracle.kda_recurrent
        scale = self.K**-0.5
        return run(q, k, tokens["v"], log_decay, beta, state, scale=scale)


KINDS = {
    "kda": Kind(
        H=2,
        I=2,
        K=24,
        V=40,
        decode=jax.jit(kda_decode, static_argnames="view"),
        prefill=jax.jit(kda_prefill, static_argnames=("view", "max_query_len")),
    ),
    "gdn": Kind(
        H=4,
        I=2,
        K=32,
        V=16,
        decode=jax.jit(gdn_decode, static_argnames="view"),
        prefill=jax.jit(gdn_prefill, static_argnames=("view", "max_query_len")),
    ),
}
CASES = [
    ("kda", "high", "float32", "float32"),
    ("kda", "float", "float32", "bfloat16"),
    ("gdn", "high", "float32", "float32"),
    ("gdn", "static", "bfloat16", "float32"),
]
by_kind = pytest.mark.parametrize("kind", KINDS)
by_case = pytest.mark.parametrize(("kind", "placement", "storage", "dtype"), CASES)


def take(tokens, where):
    return {name: x[where] for name, x in tokens.items()}


def poison(tokens, where):
    poisoned = {name: x.copy() for name, x in tokens.items()}
    for x in poisoned.values():
        x[where] = np.nan
    return poisoned


def put_on_device(tokens) -> DeltaTokens:
    return DeltaTokens(**{name: jnp.asarray(x) for name, x in tokens.items()})


def check(actual, truth, *, reduced_len, dtype="float32"):
    """Outputs `[tokens, heads, width]`, states `[heads, rows, columns]`."""
    assert_matches(actual, truth, dtype=dtype, reduced_len=reduced_len, row_axes=(0, 1))


def draw_states(pool: StatePool, rng, slots):
    shape, dtype = pool.view.shape, pool.view.dtype
    return {slot: round_to(rng.standard_normal(shape), dtype) for slot in slots}


def zeros(pool: StatePool):
    return np.zeros(pool.view.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a packed batch; `checkpoints` are pairs of a slot and a length."""

    tokens: dict[str, np.ndarray]
    slot: int | None
    is_fresh: bool
    checkpoints: tuple[tuple[int | None, int], ...] = ()


MAX_ROWS, MAX_TOKENS, MAX_LEN, MAX_CHECKPOINTS = 8, 345, 130, 4


def run_prefill(kind, pool, gate, buffers, rows):
    """Prefill rows; outputs by row. Every batch is padded to one shape, with NaN."""
    lens = [len(row.tokens["v"]) for row in rows]
    bounds = np.cumsum([0, *lens, *[0] * (MAX_ROWS - len(rows))])
    packed = {}
    for name, x in rows[0].tokens.items():
        packed[name] = np.full((MAX_TOKENS, *x.shape[1:]), np.nan, x.dtype)
        joined = np.concatenate([row.tokens[name] for row in rows])
        packed[name][: bounds[-1]] = joined
    slots, is_fresh = [None] * MAX_ROWS, [False] * MAX_ROWS
    checkpoint_slots = np.full((MAX_ROWS, MAX_CHECKPOINTS), None)
    checkpoint_lens = np.zeros((MAX_ROWS, MAX_CHECKPOINTS), int)
    for i, row in enumerate(rows):
        slots[i], is_fresh[i] = row.slot, row.is_fresh
        for j, (slot, length) in enumerate(row.checkpoints):
            checkpoint_slots[i, j], checkpoint_lens[i, j] = slot, length
    buffers, out = kind.prefill(
        buffers,
        pool.view,
        put_on_device(packed),
        gate,
        jnp.asarray(bounds, jnp.int32),
        pool.slots(slots, is_fresh, checkpoint_slots, checkpoint_lens),
        max_query_len=MAX_LEN,
    )
    out = np.asarray(out)
    assert np.all(out[bounds[-1] :] == 0)
    return buffers, [out[bounds[i] : bounds[i + 1]] for i in range(len(rows))]


def run_decode(kind, pool, gate, buffers, tokens, slots, is_fresh):
    buffers, out = kind.decode(
        buffers, pool.view, put_on_device(tokens), gate, pool.slots(slots, is_fresh)
    )
    return buffers, np.asarray(out)


@by_case
def test_packed_rows_match_the_oracle(kind, placement, storage, dtype):
    kind, rng = KINDS[kind], np.random.default_rng(0)
    pool, gate = kind.pool(placement, storage), kind.gate(rng)
    lens = [130, 1, 64, 0, 2, 65, 63, 5]
    slots = [7, 2, 9, 11, 1, 3, 4, None]
    is_fresh = [False, False, True, False, True, False, True, False]
    rows = [
        Row(tokens=kind.tokens(rng, length, dtype=dtype), slot=slot, is_fresh=fresh)
        for length, slot, fresh in zip(lens, slots, is_fresh, strict=True)
    ]
    # The last row has tokens, but no slot: padding.
    rows[-1] = dataclasses.replace(
        rows[-1], tokens=poison(rows[-1].tokens, slice(None))
    )
    states = draw_states(pool, rng, [7, 2, 11, 3])
    before = pool.put(states)
    after, outs = run_prefill(kind, pool, gate, before, rows)
    for row, length, out in zip(rows[:-1], lens, outs, strict=False):
        start = zeros(pool) if row.is_fresh else states[row.slot]
        found = pool.get(after, row.slot)
        if length == 0:
            np.testing.assert_array_equal(found, start)
            continue
        truth, last = kind.expected(row.tokens, gate, start)
        kind.check(out, truth, dtype=dtype, num_tokens=length)
        kind.check(found, last, dtype=storage, num_tokens=length)
    assert np.all(outs[-1] == 0)
    pool.assert_only_written(before, after, [7, 2, 9, 11, 1, 3, 4])


@by_case
@pytest.mark.parametrize("query_len", [1, 3])
def test_decode_matches_the_oracle(kind, placement, storage, dtype, query_len):
    kind, rng = KINDS[kind], np.random.default_rng(1)
    pool, gate = kind.pool(placement, storage), kind.gate(rng)
    slots, is_fresh = [6, None, 2, 9], [False, False, True, False]
    tokens = poison(kind.tokens(rng, 4, query_len, dtype=dtype), 1)
    states = draw_states(pool, rng, [6, 9])
    before = pool.put(states)
    after, out = run_decode(kind, pool, gate, before, tokens, slots, is_fresh)
    for row in (0, 2, 3):
        start = zeros(pool) if is_fresh[row] else states[slots[row]]
        truth, last = kind.expected(take(tokens, row), gate, start)
        kind.check(out[row], truth, dtype=dtype, num_tokens=query_len)
        found = pool.get(after, slots[row])
        kind.check(found, last, dtype=storage, num_tokens=query_len)
    assert np.all(out[1] == 0)
    pool.assert_only_written(before, after, [6, 2, 9])


@by_kind
def test_random_splits_and_single_tokens_equal_the_whole(kind):
    kind, rng = KINDS[kind], np.random.default_rng(2)
    pool, gate = kind.pool(), kind.gate(rng)
    tokens = kind.tokens(rng, MAX_LEN)
    truth, last = kind.expected(tokens, gate, zeros(pool))
    random_cuts = sorted(rng.choice(MAX_LEN - 1, 3, replace=False) + 1)
    for cuts in ([], [1, 2, 65], random_cuts):
        buffers, done, outs, previous = pool.put({}), 0, [], None
        for cut, slot in zip([*cuts, MAX_LEN], [3, 1, 7, 2], strict=False):
            # Between two steps the state moves to another slot.
            if done:
                buffers = pool.put({slot: pool.get(buffers, previous)})
            piece = take(tokens, slice(done, cut))
            row = Row(tokens=piece, slot=slot, is_fresh=done == 0)
            buffers, (out,) = run_prefill(kind, pool, gate, buffers, [row])
            outs.append(out)
            done, previous = cut, slot
        kind.check(np.concatenate(outs), truth, num_tokens=MAX_LEN)
        kind.check(pool.get(buffers, previous), last, num_tokens=MAX_LEN)

    buffers, outs = pool.put({}), []
    for t in range(MAX_LEN):
        one = take(tokens, np.full((4, 1), t))
        slots, is_fresh = [None, 4, None, None], [t == 0] * 4
        buffers, out = run_decode(kind, pool, gate, buffers, one, slots, is_fresh)
        outs.append(out[1])
    kind.check(np.concatenate(outs), truth, num_tokens=MAX_LEN)
    kind.check(pool.get(buffers, 4), last, num_tokens=MAX_LEN)


@by_kind
def test_results_do_not_depend_on_the_slots(kind):
    kind, rng = KINDS[kind], np.random.default_rng(3)
    gate = kind.gate(rng)
    prompts = [kind.tokens(rng, length) for length in (70, 3, 16, 1)]
    steps = [kind.tokens(rng, 4, 1) for _ in range(3)]

    def run(slots_of_step, placements=("high",) * 4):
        pool = kind.pool(placements[0])
        rows = [
            Row(tokens=tokens, slot=slot, is_fresh=True)
            for tokens, slot in zip(prompts, slots_of_step[0], strict=True)
        ]
        buffers, outs = run_prefill(kind, pool, gate, pool.put({}), rows)
        previous = slots_of_step[0]
        for tokens, slots, placement in zip(
            steps, slots_of_step[1:], placements[1:], strict=True
        ):
            states = [pool.get(buffers, slot) for slot in previous]
            pool = kind.pool(placement)
            buffers = pool.put(dict(zip(slots, states, strict=True)))
            buffers, out = run_decode(
                kind, pool, gate, buffers, tokens, slots, [False] * 4
            )
            outs.append(out)
            previous = slots
        return [*outs, *(pool.get(buffers, slot) for slot in previous)]

    moved = [[9, 4, 12, 3], [12, 9, 4, 1], [4, 1, 2, 9], [5, 7, 3, 2]]
    expected = run([[1, 2, 3, 4]] * 4)
    for placements in (("high",) * 4, ("high", "static", "high", "float")):
        for a, b in zip(run(moved, placements), expected, strict=True):
            np.testing.assert_array_equal(a, b)


@by_kind
def test_checkpoints_equal_the_state_of_a_shorter_run(kind):
    kind, rng = KINDS[kind], np.random.default_rng(4)
    pool, gate = kind.pool(), kind.gate(rng)
    states = draw_states(pool, rng, [2])
    before = pool.put(states)
    first = Row(
        tokens=kind.tokens(rng, MAX_LEN),
        slot=1,
        is_fresh=True,
        checkpoints=((4, 128), (None, 64), (6, 64), (7, 63)),
    )
    second = Row(
        tokens=kind.tokens(rng, 70),
        slot=2,
        is_fresh=False,
        checkpoints=((8, 0), (9, 64), (10, 128), (11, -64)),
    )
    after, _ = run_prefill(kind, pool, gate, before, [first, second])
    for length, slots in ((128, {1: 4}), (64, {1: 6, 2: 9})):
        rows = [
            dataclasses.replace(
                row, tokens=take(row.tokens, slice(length)), checkpoints=()
            )
            for row in (first, second)
        ]
        shorter, _ = run_prefill(kind, pool, gate, before, rows)
        for slot, checkpoint in slots.items():
            np.testing.assert_array_equal(
                pool.get(after, checkpoint), pool.get(shorter, slot)
            )
    np.testing.assert_array_equal(pool.get(after, 8), states[2])
    # Off the grid, past the row, before the row: not written.
    pool.assert_only_written(before, after, [1, 2, 4, 6, 8, 9])


def test_the_bounded_gate():
    kind, rng = KINDS["kda"], np.random.default_rng(5)
    pool, gate = kind.pool(), kind.gate(rng, lower_bound=-5.0)
    tokens = kind.tokens(rng, 4, 3)
    log_decay = kda_log_decay(jnp.asarray(tokens["gate_logits"][0]), gate)
    assert np.all((np.asarray(log_decay) > -5) & (np.asarray(log_decay) < 0))
    truth, last = kind.expected(take(tokens, 0), gate, zeros(pool))
    buffers, out = run_decode(
        kind, pool, gate, pool.put({}), tokens, [3, None, None, None], [True] * 4
    )
    kind.check(out[0], truth, num_tokens=3)
    kind.check(pool.get(buffers, 3), last, num_tokens=3)


def test_gates_do_not_overflow():
    gate = KdaGate(a_log=jnp.asarray([3.0, -9.0]), dt_bias=jnp.zeros((2, 4)))
    logits = jnp.asarray([-1e30, -100.0, 100.0, 1e30], jnp.float32)
    logits = jnp.broadcast_to(logits, (1, 2, 4))
    for bound in (None, -5.0):
        log_decay = jax.jit(kda_log_decay)(logits, gate.replace(lower_bound=bound))
        assert np.all(np.isfinite(log_decay))
        assert np.all(np.asarray(log_decay) <= 0)
        slope = jax.jit(jax.grad(lambda x, g: kda_log_decay(x, g).sum()))
        assert np.all(np.isfinite(slope(logits, gate.replace(lower_bound=bound))))


# The pure forms.

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


# Mutations, addresses, refusals.


@by_kind
@pytest.mark.parametrize("op", ["decode", "prefill"])
def test_the_comparison_rejects_faults(kind, op):
    kind, rng = KINDS[kind], np.random.default_rng(12)
    pool, gate = kind.pool(), kind.gate(rng)
    tokens = kind.tokens(rng, 4, 3)
    states = draw_states(pool, rng, [3, 4])
    buffers = pool.put(states)

    def run(tokens=tokens, gate=gate, slot=3, is_fresh=False):
        if op == "decode":
            slots = [slot, None, None, None]
            args = kind, pool, gate, buffers, tokens, slots, [is_fresh] * 4
            return run_decode(*args)[1][0]
        row = Row(tokens=take(tokens, 0), slot=slot, is_fresh=is_fresh)
        return run_prefill(kind, pool, gate, buffers, [row])[1][0]

    truth, _ = kind.expected(take(tokens, 0), gate, states[3])
    faults = {
        "zeros": np.zeros_like(truth, np.float32),
        "heads": run()[:, ::-1],
        "slot": run(slot=4),
        "fresh": run(is_fresh=True),
        "gate": run(gate=gate.replace(a_log=gate.a_log + 0.1)),
        "beta": run(tokens | {"beta_logits": tokens["beta_logits"] + np.float32(0.1)}),
        "q_is_k": run(tokens | {"q": tokens["k"]}),
        "scale": run() * np.float32(2),
    }

    def is_accepted(out):
        try:
            kind.check(out, truth, num_tokens=3)
        except AssertionError:
            return False
        return True

    assert is_accepted(run())
    for name, out in faults.items():
        assert not is_accepted(out), name


def test_rows_of_slots_stay_inside_int32():
    # A pool of 2^31 - 1 kernel rows; entries of 3 rows, the layer 1000 rows down.
    view = PartView(
        sub_pool="state",
        part="recurrent",
        layer=1,
        shape=(1, 8, 8),
        dtype=np.dtype("float32"),
        page_size=1,
        row_bytes=128,
        rows_per_entry=3,
        block_offset=1000,
        buffer_index=0,
        num_rows=2**31 - 1,
    )
    last = 2**31 - 1 - 3 - 1000
    ids = [0, last, last + 1, ABSENT_BLOCK, -1, -(2**31)]
    blocks = KernelBlocks(jnp.asarray(ids, jnp.int32), "state")
    rows, is_present = slot_rows(view, blocks, "slots")
    absent = view.num_rows
    assert rows.tolist() == [1000, 2**31 - 4, absent, absent, absent, absent]
    assert is_present.tolist() == [True, True, False, False, False, False]


def test_chunks_end_on_the_grid_of_checkpoints():
    assert CHECKPOINT_GRID % CHUNK_SIZE == 0


@requires_h200_compiler
@pytest.mark.parametrize(("kind", "op"), [("kda", "prefill"), ("gdn", "decode")])
def test_two_layers_run_in_place_in_a_large_pool(kind, op):
    kind, rng = KINDS[kind], np.random.default_rng(13)
    layout = unified_layout([kind.spec("float32")], pool_bytes=8 << 30)
    buffers = pool_struct(layout).buffers
    gate = kind.gate(rng)
    slots = StateSlots(
        slots=KernelBlocks(jnp.zeros(4, jnp.int32), "state"),
        is_fresh=jnp.zeros(4, bool),
    )
    shape = (4, 2) if op == "decode" else (200,)
    tokens = put_on_device(kind.tokens(rng, *shape))

    def step(buffers, tokens, gate, cu_query_lens, slots):
        outs = []
        for layer in range(2):
            view = layout.part_view("state", layer=layer, part="recurrent")
            call = ft.partial(kind.decode, buffers, view, tokens, gate, slots)
            if op == "prefill":
                call = ft.partial(
                    kind.prefill,
                    buffers,
                    view,
                    tokens,
                    gate,
                    cu_query_lens,
                    slots,
                    max_query_len=130,
                )
            buffers, out = call()
            outs.append(out)
        return buffers, outs

    cu_query_lens = jnp.zeros(5, jnp.int32)
    program = compile_for_h200(
        step, buffers, tokens, gate, cu_query_lens, slots, donate_argnums=0
    )
    assert program.alias_bytes >= layout.pool_bytes
    assert program.temp_bytes < 16 << 20
    assert pool_sized_copies(program.hlo_text, layout.pool_bytes // 2) == []


@pytest.mark.usefixtures("unchecked")
def test_wrong_use_is_refused():
    kind, rng = KINDS["gdn"], np.random.default_rng(14)
    pool, gate = kind.pool(), kind.gate(rng)
    buffers, slots = pool.put({}), pool.slots([1, 2], [True, True])
    tokens = put_on_device(kind.tokens(rng, 2, 1))
    packed = put_on_device(kind.tokens(rng, 2))
    three = jnp.concatenate([tokens.q, tokens.q[:, :, :1]], axis=2)
    call = ft.partial(gdn_decode, buffers, pool.view)
    with pytest.raises(ValueError, match=r"key_dim\] = \(4, 8, 32\)"):
        call(tokens.replace(v=tokens.v[..., :8]), gate, slots)
    with pytest.raises(ValueError, match="num_heads=4 must be a multiple of key_heads"):
        call(tokens.replace(q=three, k=three), gate, slots)
    other = KernelBlocks(slots.slots.ids, "other")
    with pytest.raises(IdSpaceError, match="not of 'other'"):
        call(tokens, gate, slots.replace(slots=other))
    with pytest.raises(ValueError, match="give both for each row"):
        call(tokens, gate, slots.replace(is_fresh=jnp.ones(3, bool)))
    with pytest.raises(UnsupportedError, match="'mosaic_gpu' does not exist"):
        call(tokens, gate, slots, implementation="mosaic_gpu")
    half = kind.pool(storage="float16")
    with pytest.raises(UnsupportedError, match="has storage_dtype float32, bfloat16"):
        gdn_decode(half.put({}), half.view, tokens, gate, slots)
    with pytest.raises(ValueError, match="cu_query_lens has 2 entries, 2 rows need 3"):
        gdn_prefill(
            buffers,
            pool.view,
            packed,
            gate,
            jnp.asarray([0, 2], jnp.int32),
            slots,
            max_query_len=1,
        )
    bounded = KINDS["kda"].gate(rng, lower_bound=0.0)
    with pytest.raises(ValueError, match=r"lower_bound=0\.0 must be below 0"):
        kda_log_decay(jnp.zeros((2, 24)), bounded)
    inputs = draw_pure(rng, 8, log_decay=np.zeros)
    with pytest.raises(ValueError, match="chunk_size=8 must be a multiple of 16"):
        run_pure("chunked", inputs, chunk_size=8)
