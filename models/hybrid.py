"""A small hybrid of three kinds of memory: states, windows and full attention.

It follows no release. It is the model that needs three sub-pools in one buffer:
"full" at the low end, "state" afloat, and "swa" at the high end with the ids of
"full".
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from models.gated_deltanet import GatedDeltaNet
from models.layers import (
    cached_attention,
    embed,
    linear,
    rms_norm,
    swiglu,
    swiglu_weights,
)
from models.rope import Rope, rotate_halves
from models.weights import Weights, joined, weight
from ukv.ops import Implementation
from ukv.pool import PoolState
from ukv.spec import AttentionSpec, SlidingWindowSpec, SubPoolSpec
from ukv.translator import StepInputs

LayerKind = Literal["full", "state", "swa"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hybrid:
    """The sizes of a hybrid, and what follows from them.

    Attributes:
      vocab_size: Tokens of the vocabulary.
      hidden_size: Width of the residual stream.
      intermediate_size: Width inside the MLPs.
      pattern: The kind of each layer, which is the sub-pool of its memory.
      num_q_heads: Query heads.
      num_full_kv_heads: Key and value heads of full attention.
      num_swa_kv_heads: Key and value heads of sliding-window attention.
      head_dim: Elements per head.
      window: Tokens that a query of a sliding-window layer sees, its own included.
      rope: Rotary frequencies.
      delta_net: Sizes of the state layers.
      epsilon: Of every RMS norm.
      implementation: How ops run; None for the default device's best.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    pattern: tuple[LayerKind, ...]
    num_q_heads: int
    num_full_kv_heads: int
    num_swa_kv_heads: int
    head_dim: int
    window: int
    rope: Rope
    delta_net: GatedDeltaNet
    epsilon: float
    implementation: Implementation | None = None

    ignored_tensors = r""

    def weights(self) -> Weights:
        """Describe every array."""
        hidden, inner = self.hidden_size, self.intermediate_size
        layers = []
        for index, kind in enumerate(self.pattern):
            prefix = f"layers.{index}"
            if kind == "state":
                mixer = self.delta_net.weights(f"{prefix}.mixer")
            else:
                mixer = self._attention_weights(f"{prefix}.mixer", kind)
            layers.append(
                {
                    "mixer_norm": weight(f"{prefix}.mixer_norm", hidden, spread=0.0),
                    "mixer": mixer,
                    "mlp_norm": weight(f"{prefix}.mlp_norm", hidden, spread=0.0),
                    "mlp": swiglu_weights(f"{prefix}.mlp", width=hidden, inner=inner),
                }
            )
        return {
            "embedding": weight("embedding", self.vocab_size, hidden),
            "layers": layers,
            "norm": weight("norm", hidden, spread=0.0),
            "output": weight("output", self.vocab_size, hidden),
        }

    def _num_kv_heads(self, kind: LayerKind) -> int:
        return self.num_full_kv_heads if kind == "full" else self.num_swa_kv_heads

    def _attention_weights(self, prefix: str, kind: LayerKind) -> Weights:
        q_rows = self.num_q_heads * self.head_dim
        kv_rows = self._num_kv_heads(kind) * self.head_dim
        return {
            "qkv": joined(
                [f"{prefix}.{name}" for name in "qkv"],
                [(rows, self.hidden_size) for rows in (q_rows, kv_rows, kv_rows)],
            ),
            "o": weight(f"{prefix}.o", self.hidden_size, q_rows),
        }

    def pool_specs(self, *, page_size: int, dtype: np.dtype) -> tuple[SubPoolSpec, ...]:
        """Return what the model keeps in the pool.

        Args:
          page_size: Tokens per page.
          dtype: Storage dtype of K, V and convolution windows.
        """
        return (
            AttentionSpec(
                name="full",
                num_layers=self.pattern.count("full"),
                page_size=page_size,
                num_kv_heads=self.num_full_kv_heads,
                head_dim=self.head_dim,
                dtype=dtype,
            ),
            self.delta_net.state_spec("state", self.pattern.count("state"), dtype),
            SlidingWindowSpec(
                name="swa",
                num_layers=self.pattern.count("swa"),
                page_size=page_size,
                num_kv_heads=self.num_swa_kv_heads,
                head_dim=self.head_dim,
                window_size=self.window,
                shares_ids="full",
                dtype=dtype,
            ),
        )

    def forward(
        self, weights: Weights, inputs: StepInputs, pool: PoolState
    ) -> tuple[Float32[Array, "num_logits vocabulary"], PoolState]:
        """Run one step: prefill, chunk, mixed batch or decode.

        Args:
          weights: Arrays in the structure of ``weights()``.
          inputs: The step; ``inputs.logit_tokens`` says whose logits are wanted.
          pool: The pool; donate it.
        """
        x = embed(inputs.token_ids, weights["embedding"])
        for number, (kind, layer) in enumerate(
            zip(self.pattern, weights["layers"], strict=True)
        ):
            index = self.pattern[:number].count(kind)
            normed = rms_norm(x, layer["mixer_norm"], self.epsilon)
            if kind == "state":
                mixed, pool = self.delta_net.forward(
                    layer["mixer"], normed, inputs, pool, sub_pool=kind, index=index
                )
            else:
                mixed, pool = self._attention(
                    layer["mixer"], normed, inputs, pool, kind=kind, index=index
                )
            x = x + mixed
            normed = rms_norm(x, layer["mlp_norm"], self.epsilon)
            x = x + swiglu(normed, **layer["mlp"])
        x = rms_norm(x[inputs.logit_tokens], weights["norm"], self.epsilon)
        return linear(x, weights["output"]).astype(jnp.float32), pool

    def _attention(
        self,
        layer: Weights,
        x: jax.Array,
        inputs: StepInputs,
        pool: PoolState,
        *,
        kind: LayerKind,
        index: int,
    ) -> tuple[jax.Array, PoolState]:
        first_v = self.num_q_heads + self._num_kv_heads(kind)
        qkv = linear(x, layer["qkv"]).reshape(x.shape[0], -1, self.head_dim)
        q, k, v = jnp.split(qkv, [self.num_q_heads, first_v], axis=1)
        out, pool = cached_attention(
            rotate_halves(q, inputs.positions, self.rope),
            rotate_halves(k, inputs.positions, self.rope),
            v,
            inputs,
            pool,
            sub_pool=kind,
            layer=index,
            softmax_scale=self.head_dim**-0.5,
            implementation=self.implementation,
        )
        return linear(out.reshape(x.shape[0], -1), layer["o"]), pool
