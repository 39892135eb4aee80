"""Layers of KDA and GDN around one decode step: parameters, pools and oracles."""

import dataclasses
import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.oracles import recurrent as oracle
from tests.oracles.short_conv import short_conv
from tests.state_pools import StatePool, round_to
from ukv.ops import (
    DeltaViews,
    GdnGate,
    KdaGate,
    ProjectedTokens,
    ShortConv,
    gdn_decode_step,
    kda_decode_step,
)
from ukv.spec import gdn_state_spec, kda_state_spec

STEPS = {
    "kda": jax.jit(kda_decode_step, static_argnames=("views", "implementation")),
    "gdn": jax.jit(gdn_decode_step, static_argnames=("views", "implementation")),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer, its parts of a pool, and random parameters."""

    kind: str
    storage: str = "float32"
    conv_dtype: str = "float32"
    dtype: str = "float32"
    placement: str = "high"
    has_bias: bool = False
    lower_bound: float | None = None
    heads: int = 4
    key_dim: int = 64
    value_dim: int = 64

    @property
    def key_heads(self) -> int:
        return self.heads if self.kind == "kda" else self.heads // 2

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def spec(self):
        sizes = {"key_dim": self.key_dim, "value_dim": self.value_dim}
        sizes |= {"name": "state", "num_layers": 2, "conv_width": 4}
        sizes |= {"state_dtype": self.storage, "conv_dtype": self.conv_dtype}
        if self.kind == "kda":
            return kda_state_spec(num_heads=self.heads, **sizes)
        return gdn_state_spec(
            num_key_heads=self.key_heads, num_value_heads=self.heads, **sizes
        )

    @ft.cached_property
    def pools(self) -> tuple[StatePool, StatePool]:
        create = ft.partial(StatePool.create, self.spec, self.placement, num_slots=9)
        return create(part="recurrent"), create(part="conv")

    @property
    def views(self) -> DeltaViews:
        state, window = self.pools
        return DeltaViews(recurrent=state.view, conv=window.view)

    @ft.cached_property
    def conv(self) -> ShortConv:
        rng = np.random.default_rng(1)
        weight = rng.standard_normal((self.channels, 4)) * 0.5
        bias = rng.standard_normal(self.channels) if self.has_bias else None
        return ShortConv(
            weight=jnp.asarray(weight, jnp.float32),
            bias=None if bias is None else jnp.asarray(bias, jnp.float32),
        )

    @ft.cached_property
    def gate(self) -> KdaGate | GdnGate:
        rng = np.random.default_rng(2)
        a_log = jnp.asarray(np.log(rng.uniform(0.5, 4, self.heads)), jnp.float32)
        shape = (self.heads, self.key_dim) if self.kind == "kda" else (self.heads,)
        bias = jnp.asarray(rng.standard_normal(shape) - 2, jnp.float32)
        if self.kind == "kda":
            return KdaGate(a_log=a_log, dt_bias=bias, lower_bound=self.lower_bound)
        return GdnGate(a_log=a_log, dt_bias=bias)

    def tokens(self, rng, rows: int, query_len: int) -> dict[str, np.ndarray]:
        gate = (self.heads, self.key_dim) if self.kind == "kda" else (self.heads,)
        shapes = {"qkv": (self.channels,), "gate_logits": gate}
        shapes |= {"beta_logits": (self.heads,)}
        return {
            name: round_to(rng.standard_normal((rows, query_len, *shape)), self.dtype)
            for name, shape in shapes.items()
        }

    def put(self, states, windows):
        """Poisoned buffers with both parts of some slots."""
        state, window = self.pools
        return window.put(windows, state.put(states))

    def erased(self, buffers, slots):
        """The buffers on the host, without both parts of some slots."""
        state, window = self.pools
        return window.erased(state.erased(buffers, slots), slots)

    def run(self, buffers, tokens, rows, is_fresh, implementation, **changes):
        """One step of the op; `changes` are arguments of it to use instead."""
        arguments = {
            "tokens": ProjectedTokens(**jax.tree.map(jnp.asarray, tokens)),
            "conv": self.conv,
            "gate": self.gate,
            "slots": self.pools[0].slots(rows, is_fresh),
        }
        buffers, out = STEPS[self.kind](
            buffers,
            self.views,
            **(arguments | changes),
            implementation=implementation,
        )
        return buffers, np.asarray(out)

    def expected(self, tokens, state, window):
        """Output, state and window of one row, all in float64."""
        x, weight = np.asarray(tokens["qkv"], np.float64), np.asarray(self.conv.weight)
        y, last_window = short_conv(x, weight, window, silu=False)
        if self.conv.bias is not None:
            y = y + np.asarray(self.conv.bias, np.float64)
        y = y / (1 + np.exp(-y))
        first_k = self.key_heads * self.key_dim
        q, k, v = np.split(y, [first_k, 2 * first_k], axis=1)
        q, k = (
            oracle.l2_normalize(z.reshape(-1, self.key_heads, self.key_dim), eps=1e-6)
            for z in (q, k)
        )
        v = v.reshape(-1, self.heads, self.value_dim)
        beta = 1 / (1 + np.exp(-np.asarray(tokens["beta_logits"], np.float64)))
        parameters = (tokens["gate_logits"], self.gate.a_log, self.gate.dt_bias)
        if self.kind == "gdn":
            decay, run = oracle.gdn_log_decay(*parameters), oracle.gdn_recurrent
        elif self.lower_bound is None:
            decay, run = oracle.kda_log_decay(*parameters), oracle.kda_recurrent
        else:
            decay = oracle.kda_log_decay_bounded(
                *parameters, lower_bound=self.lower_bound
            )
            run = oracle.kda_recurrent
        scale = self.key_dim**-0.5
        return *run(q, k, v, decay, beta, state, scale=scale), last_window


def draw(layer: Layer, rng, slots):
    """States and windows of some slots."""
    return tuple(
        {
            slot: round_to(rng.standard_normal(pool.view.shape), pool.view.dtype)
            for slot in slots
        }
        for pool in layer.pools
    )


def take(tokens, row):
    return {name: x[row] for name, x in tokens.items()}


def without_clusters(monkeypatch):
    """Has one program take all values of a key head, as the interpreter must."""
    module = pytest.importorskip("pallas_kernels.delta.decode")
    tuned = module.default_config

    def of_one_program(rows, values_per_key, *facts):
        config = tuned(rows, values_per_key, *facts)
        return dataclasses.replace(config, block_v=values_per_key)

    monkeypatch.setattr(module, "default_config", of_one_program)
