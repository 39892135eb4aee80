"""Llama and Qwen3: grouped-query attention over one K/V sub-pool.

Qwen3 differs by an RMS norm on each head of q and k, and by tied embeddings.

Source: Llama 3 (arXiv:2407.21783), Qwen3 (arXiv:2505.09388).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from models.config_fields import ConfigError, ConfigFields
from models.layers import cached_attention, embed, linear, rms_norm, swiglu
from models.rope import Rope, rope_from_config, rotate_halves
from models.weights import Weights, joined, weight
from ukv.ops import Implementation
from ukv.pool import PoolState
from ukv.spec import AttentionSpec, SubPoolSpec
from ukv.translator import StepInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama:
    """A Llama or Qwen3 model: its sizes, and what follows from them.

    Attributes:
      vocab_size: Tokens of the vocabulary.
      hidden_size: Width of the residual stream.
      intermediate_size: Width inside the MLP.
      num_layers: Layers.
      num_q_heads: Query heads.
      num_kv_heads: Key and value heads.
      head_dim: Elements per head.
      epsilon: Of every RMS norm.
      rope: Rotary frequencies.
      has_qk_norm: Whether q and k heads are normalised (Qwen3).
      has_attention_bias: Whether q, k, v and o have biases.
      ties_embeddings: Whether the output matrix is the embedding table.
      implementation: How ops run; None for the default device's best.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float
    rope: Rope
    has_qk_norm: bool
    has_attention_bias: bool
    ties_embeddings: bool
    implementation: Implementation | None = None

    ignored_tensors = r".*rotary_emb\.inv_freq|lm_head\.weight"

    @classmethod
    def from_config(cls, fields: ConfigFields, model_type: str) -> "Llama":
        """Read ``config.json`` of a ``llama`` or ``qwen3`` checkpoint.

        Raises:
          ConfigError: A field is missing, of the wrong type, or not supported.
        """
        hidden = fields.take("hidden_size", int)
        heads = fields.take("num_attention_heads", int)
        head_dim = fields.take("head_dim", int, None) or hidden // heads
        fields.expect("hidden_act", "silu")
        fields.expect("mlp_bias", False)
        fields.expect("use_sliding_window", False)
        fields.expect("sliding_window", None)
        fields.ignore("max_window_layers")
        model = cls(
            vocab_size=fields.take("vocab_size", int),
            hidden_size=hidden,
            intermediate_size=fields.take("intermediate_size", int),
            num_layers=fields.take("num_hidden_layers", int),
            num_q_heads=heads,
            num_kv_heads=fields.take("num_key_value_heads", int, heads),
            head_dim=head_dim,
            epsilon=fields.take("rms_norm_eps", float),
            rope=rope_from_config(
                head_dim,
                fields.take("rope_theta", float),
                fields.take_nested("rope_scaling"),
            ),
            has_qk_norm=model_type == "qwen3",
            has_attention_bias=fields.take("attention_bias", bool, False),
            ties_embeddings=fields.take("tie_word_embeddings", bool, False),
        )
        fields.finish()
        if heads % model.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads={heads} must be a multiple of "
                f"num_key_value_heads={model.num_kv_heads}"
            )
        return model

    def weights(self) -> Weights:
        """Describe every array and the checkpoint tensors that it is made of."""
        hidden, inner, dim = self.hidden_size, self.intermediate_size, self.head_dim
        q_rows, kv_rows = self.num_q_heads * dim, self.num_kv_heads * dim
        described = {
            "embedding": weight("model.embed_tokens.weight", self.vocab_size, hidden),
            "norm": weight("model.norm.weight", hidden, spread=0.0),
            "layers": [],
        }
        if not self.ties_embeddings:
            described["output"] = weight("lm_head.weight", self.vocab_size, hidden)
        for index in range(self.num_layers):
            prefix = f"model.layers.{index}"
            heads = f"{prefix}.self_attn"
            mlp = f"{prefix}.mlp"
            layer = {
                "attention_norm": weight(
                    f"{prefix}.input_layernorm.weight", hidden, spread=0.0
                ),
                "qkv": joined(
                    [f"{heads}.{name}_proj.weight" for name in "qkv"],
                    [(q_rows, hidden), (kv_rows, hidden), (kv_rows, hidden)],
                ),
                "o": weight(f"{heads}.o_proj.weight", hidden, q_rows),
                "mlp_norm": weight(
                    f"{prefix}.post_attention_layernorm.weight", hidden, spread=0.0
                ),
                "gate_up": joined(
                    [f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"],
                    [(inner, hidden)] * 2,
                ),
                "down": weight(f"{mlp}.down_proj.weight", hidden, inner),
            }
            if self.has_attention_bias:
                layer["qkv_bias"] = joined(
                    [f"{heads}.{name}_proj.bias" for name in "qkv"],
                    [(q_rows,), (kv_rows,), (kv_rows,)],
                )
                layer["o_bias"] = weight(f"{heads}.o_proj.bias", hidden)
            if self.has_qk_norm:
                layer["q_norm"] = weight(f"{heads}.q_norm.weight", dim, spread=0.0)
                layer["k_norm"] = weight(f"{heads}.k_norm.weight", dim, spread=0.0)
            described["layers"].append(layer)
        return described

    def pool_specs(self, *, page_size: int, dtype: np.dtype) -> tuple[SubPoolSpec, ...]:
        """Return what the model keeps in the pool.

        Args:
          page_size: Tokens per page.
          dtype: Storage dtype of K and V.
        """
        return (
            AttentionSpec(
                name="full",
                num_layers=self.num_layers,
                page_size=page_size,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
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
        for index, layer in enumerate(weights["layers"]):
            attended, pool = self._attention(layer, index, x, inputs, pool)
            x = x + attended
            normed = rms_norm(x, layer["mlp_norm"], self.epsilon)
            x = x + swiglu(normed, layer["gate_up"], layer["down"])
        x = rms_norm(x[inputs.logit_tokens], weights["norm"], self.epsilon)
        output = weights["embedding" if self.ties_embeddings else "output"]
        return linear(x, output).astype(jnp.float32), pool

    def _attention(
        self,
        layer: Weights,
        index: int,
        x: jax.Array,
        inputs: StepInputs,
        pool: PoolState,
    ) -> tuple[jax.Array, PoolState]:
        normed = rms_norm(x, layer["attention_norm"], self.epsilon)
        qkv = linear(normed, layer["qkv"], layer.get("qkv_bias"))
        qkv = qkv.reshape(x.shape[0], -1, self.head_dim)
        first_v = self.num_q_heads + self.num_kv_heads
        q, k, v = jnp.split(qkv, [self.num_q_heads, first_v], axis=1)
        if self.has_qk_norm:
            q = rms_norm(q, layer["q_norm"], self.epsilon)
            k = rms_norm(k, layer["k_norm"], self.epsilon)
        out, pool = cached_attention(
            rotate_halves(q, inputs.positions, self.rope),
            rotate_halves(k, inputs.positions, self.rope),
            v,
            inputs,
            pool,
            sub_pool="full",
            layer=index,
            softmax_scale=self.head_dim**-0.5,
            implementation=self.implementation,
        )
        out = out.reshape(x.shape[0], -1)
        return linear(out, layer["o"], layer.get("o_bias")), pool
