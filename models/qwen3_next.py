"""Qwen3-Next: Gated DeltaNet layers, gated GQA every fourth, a MoE in each.

    full attention   output gate beside q, zero-centred norms of q and k, and RoPE on
                     the first quarter of each head; sub-pool "full"
    Gated DeltaNet   ``models.gated_deltanet``; sub-pool "gdn"
    MoE              softmax router, and a shared expert behind a sigmoid gate

Source: huggingface/transformers,
  src/transformers/models/qwen3_next/modeling_qwen3_next.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from models.config_fields import ConfigError, ConfigFields
from models.gated_deltanet import GatedDeltaNet
from models.layers import (
    cached_attention,
    embed,
    linear,
    rms_norm,
    swiglu,
    swiglu_weights,
)
from models.moe import Experts, Router, apply_experts, expert_weights
from models.rope import Rope, rope_from_config, rotate_halves
from models.weights import Weights, joined, weight
from ukv.ops import Implementation
from ukv.pool import PoolState
from ukv.spec import AttentionSpec, SubPoolSpec
from ukv.translator import StepInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Next:
    """A Qwen3-Next model: its sizes, and what follows from them.

    Attributes:
      vocab_size: Tokens of the vocabulary.
      hidden_size: Width of the residual stream.
      is_full: For each layer, whether it is full attention; else Gated DeltaNet.
      num_q_heads: Query heads of full attention.
      num_kv_heads: Its key and value heads.
      head_dim: Its elements per head.
      epsilon: Of every RMS norm.
      rope: Rotary frequencies, of the first elements of each head.
      delta_net: Sizes of the Gated DeltaNet layers.
      router: How routed experts are chosen.
      expert_size: Width inside a routed expert.
      shared_size: Width inside the shared expert.
      implementation: How ops run; None for the default device's best.
    """

    vocab_size: int
    hidden_size: int
    is_full: tuple[bool, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float
    rope: Rope
    delta_net: GatedDeltaNet
    router: Router
    expert_size: int
    shared_size: int
    implementation: Implementation | None = None

    # The release also holds a layer that predicts the token after the next.
    ignored_tensors = r"mtp\..*|.*rotary_emb\.inv_freq"

    @classmethod
    def from_config(cls, fields: ConfigFields, model_type: str) -> "Qwen3Next":
        """Read ``config.json`` of a ``qwen3_next`` checkpoint.

        Raises:
          ConfigError: A field is missing, of the wrong type, or not supported.
        """
        del model_type
        fields.expect("hidden_act", "silu")
        fields.expect("attention_bias", False)
        fields.expect("tie_word_embeddings", False)
        fields.expect("use_sliding_window", False)
        fields.expect("decoder_sparse_step", 1)
        fields.expect("mlp_only_layers", [], None)
        # Width of an MLP without experts, and what training needs.
        fields.ignore("intermediate_size", "output_router_logits")
        fields.ignore("router_aux_loss_coef")
        hidden = fields.take("hidden_size", int)
        epsilon = fields.take("rms_norm_eps", float)
        head_dim = fields.take("head_dim", int)
        rotary_dim = int(head_dim * fields.take("partial_rotary_factor", float))
        model = cls(
            vocab_size=fields.take("vocab_size", int),
            hidden_size=hidden,
            is_full=_layer_kinds(fields),
            num_q_heads=fields.take("num_attention_heads", int),
            num_kv_heads=fields.take("num_key_value_heads", int),
            head_dim=head_dim,
            epsilon=epsilon,
            rope=rope_from_config(
                rotary_dim,
                fields.take("rope_theta", float),
                fields.take_nested("rope_scaling"),
            ),
            delta_net=GatedDeltaNet(
                hidden_size=hidden,
                num_key_heads=fields.take("linear_num_key_heads", int),
                num_value_heads=fields.take("linear_num_value_heads", int),
                key_dim=fields.take("linear_key_head_dim", int),
                value_dim=fields.take("linear_value_head_dim", int),
                conv_width=fields.take("linear_conv_kernel_dim", int),
                epsilon=epsilon,
            ),
            router=Router(
                num_experts=fields.take("num_experts", int),
                num_chosen=fields.take("num_experts_per_tok", int),
                scoring="softmax",
                renormalizes=fields.take("norm_topk_prob", bool),
            ),
            expert_size=fields.take("moe_intermediate_size", int),
            shared_size=fields.take("shared_expert_intermediate_size", int),
        )
        fields.finish()
        return model

    def weights(self) -> Weights:
        """Describe every array and the checkpoint tensors that it is made of."""
        hidden = self.hidden_size
        described = {
            "embedding": weight("model.embed_tokens.weight", self.vocab_size, hidden),
            "norm": weight("model.norm.weight", hidden),
            "output": weight("lm_head.weight", self.vocab_size, hidden),
            "layers": [],
        }
        for index, is_full in enumerate(self.is_full):
            prefix = f"model.layers.{index}"
            if is_full:
                mixer = self._attention_weights(f"{prefix}.self_attn")
            else:
                mixer = self.delta_net.weights(f"{prefix}.linear_attn")
            described["layers"].append(
                {
                    "mixer_norm": weight(f"{prefix}.input_layernorm.weight", hidden),
                    "mixer": mixer,
                    "moe_norm": weight(
                        f"{prefix}.post_attention_layernorm.weight", hidden
                    ),
                    "moe": self._moe_weights(f"{prefix}.mlp"),
                }
            )
        return described

    def _attention_weights(self, prefix: str) -> Weights:
        hidden, dim = self.hidden_size, self.head_dim
        q_rows, kv_rows = self.num_q_heads * dim, self.num_kv_heads * dim
        return {
            "qkv": joined(
                [f"{prefix}.{name}_proj.weight" for name in "qkv"],
                [(2 * q_rows, hidden), (kv_rows, hidden), (kv_rows, hidden)],
            ),
            "q_norm": weight(f"{prefix}.q_norm.weight", dim),
            "k_norm": weight(f"{prefix}.k_norm.weight", dim),
            "o": weight(f"{prefix}.o_proj.weight", hidden, q_rows),
        }

    def _moe_weights(self, prefix: str) -> Weights:
        hidden, num_experts = self.hidden_size, self.router.num_experts
        return {
            "router": weight(
                f"{prefix}.gate.weight", num_experts, hidden, keeps_float32=True
            ),
            "experts": expert_weights(
                f"{prefix}.experts.{{expert}}.{{projection}}.weight",
                projections=("gate_proj", "up_proj", "down_proj"),
                num_experts=num_experts,
                width=hidden,
                inner=self.expert_size,
            ),
            "shared": swiglu_weights(
                f"{prefix}.shared_expert", width=hidden, inner=self.shared_size
            ),
            "shared_gate": weight(f"{prefix}.shared_expert_gate.weight", 1, hidden),
        }

    def pool_specs(self, *, page_size: int, dtype: np.dtype) -> tuple[SubPoolSpec, ...]:
        """Return what the model keeps in the pool.

        Args:
          page_size: Tokens per page.
          dtype: Storage dtype of K, V and convolution windows.
        """
        num_full = sum(self.is_full)
        return (
            AttentionSpec(
                name="full",
                num_layers=num_full,
                page_size=page_size,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                dtype=dtype,
            ),
            self.delta_net.state_spec("gdn", len(self.is_full) - num_full, dtype),
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
        for number, layer in enumerate(weights["layers"]):
            # Its index among the layers of its own kind.
            index = self.is_full[:number].count(self.is_full[number])
            normed = self._norm(x, layer["mixer_norm"])
            if self.is_full[number]:
                mixed, pool = self._attention(
                    layer["mixer"], index, normed, inputs, pool
                )
            else:
                mixed, pool = self.delta_net.forward(
                    layer["mixer"], normed, inputs, pool, sub_pool="gdn", index=index
                )
            x = x + mixed
            normed = self._norm(x, layer["moe_norm"])
            x = x + self._moe(layer["moe"], normed, inputs)
        x = self._norm(x[inputs.logit_tokens], weights["norm"])
        return linear(x, weights["output"]).astype(jnp.float32), pool

    def _norm(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        return rms_norm(x, scale, self.epsilon, is_zero_centred=True)

    def _attention(
        self,
        layer: Weights,
        index: int,
        x: jax.Array,
        inputs: StepInputs,
        pool: PoolState,
    ) -> tuple[jax.Array, PoolState]:
        num_q, num_kv = self.num_q_heads, self.num_kv_heads
        qkv = linear(x, layer["qkv"]).reshape(x.shape[0], -1, self.head_dim)
        q, k, v = jnp.split(qkv, [2 * num_q, 2 * num_q + num_kv], axis=1)
        # Each head's q, then its gate.
        q, gate = q[:, 0::2], q[:, 1::2]
        q, k = self._norm(q, layer["q_norm"]), self._norm(k, layer["k_norm"])
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
        out = (out * jax.nn.sigmoid(gate)).reshape(x.shape[0], -1)
        return linear(out, layer["o"]), pool

    def _moe(self, layer: Weights, x: jax.Array, inputs: StepInputs) -> jax.Array:
        choice = self.router.choose(x, layer["router"])
        experts = Experts(**layer["experts"])
        routed = apply_experts(x, choice, experts, is_token=inputs.is_token)
        shared = swiglu(x, **layer["shared"])
        return routed + jax.nn.sigmoid(linear(x, layer["shared_gate"])) * shared


def _layer_kinds(fields: ConfigFields) -> tuple[bool, ...]:
    """Return which layers are full attention."""
    num_layers = fields.take("num_hidden_layers", int)
    interval = fields.take("full_attention_interval", int, 4)
    kinds = fields.take("layer_types", list, None)
    if kinds is None:
        return tuple((index + 1) % interval == 0 for index in range(num_layers))
    unknown = set(kinds) - {"full_attention", "linear_attention"}
    if unknown or len(kinds) != num_layers:
        raise ConfigError(
            f"layer_types={kinds} must name 'full_attention' or 'linear_attention' "
            f"for each of num_hidden_layers={num_layers}"
        )
    return tuple(kind == "full_attention" for kind in kinds)
