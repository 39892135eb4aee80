"""KDA and GDN in small sizes: tokens, gates, pools, and how a batch of rows runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from tests.comparison import assert_matches
from tests.oracles import recurrent as oracle
from tests.state_pools import StatePool, round_to
from ukv.ops import (
    DeltaTokens,
    GdnGate,
    KdaGate,
    gdn_decode,
    gdn_prefill,
    kda_decode,
    kda_prefill,
)
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

    def expected_with_sizes(self, tokens, gate, state):
        """Outputs and state of one sequence, and the sizes of what outputs are sums of.

        An output is `scale * sum_k q_k S_vk`. Where q is nearly orthogonal to what the
        state holds (after a strong decay, to one key) the products cancel, and the sum
        has the accuracy to which they are known: `scale * sqrt(sum_k (q_k S_vk)^2)`.
        """
        outs, sizes, scale = [], [], self.K**-0.5
        for t in range(len(tokens["v"])):
            token = take(tokens, slice(t, t + 1))
            out, state = self.expected(token, gate, state)
            q = oracle.l2_normalize(token["q"], eps=EPS)[0]
            q = np.repeat(q, self.H // self.I, axis=0)
            squares = np.einsum("hk,hvk->hv", q**2, state**2)
            outs.append(out)
            sizes.append(scale * np.sqrt(squares)[None])
        return np.concatenate(outs), state, np.concatenate(sizes)


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
