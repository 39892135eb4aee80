"""gpt-oss: sliding windows with attention sinks, and experts behind a softmax router.

Every projection has a bias. Released checkpoints hold the experts in 4 bits; they are
unpacked at load.

Source: OpenAI, gpt-oss-120b and gpt-oss-20b model card (arXiv:2508.10925);
openai/gpt-oss, gpt_oss/torch/model.py.
"""

import dataclasses
import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from models.config_fields import ConfigError, ConfigFields
from models.layers import cached_attention, embed, linear, rms_norm
from models.moe import Experts, Router, apply_experts
from models.mxfp4 import BLOCK, unpack_mxfp4
from models.rope import Rope, rope_from_config, rotate_halves
from models.weights import Weight, Weights, joined, weight
from models.window_pattern import WindowPattern
from ukv.ops import Implementation
from ukv.pool import PoolState
from ukv.spec import SubPoolSpec
from ukv.translator import StepInputs

_SIGMOID_SLOPE = 1.702


def clamped_swiglu(
    gate: Float[Array, "..."], up: Float[Array, "..."], *, limit: float
) -> jax.Array:
    """Return ``gate * sigmoid(1.702 gate) * (up + 1)`` of clamped inputs.

    Args:
      gate: Clamped from above.
      up: Clamped from both sides.
      limit: The bound.
    """
    gate = jnp.minimum(gate, limit)
    up = jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(_SIGMOID_SLOPE * gate) * (up + 1.0)


def _gate_then_up(rows: jax.Array) -> jax.Array:
    """Put rows gate, up, gate, up, ... of axis 1 into halves, gate first."""
    pairs = rows.reshape(rows.shape[0], -1, 2, *rows.shape[2:])
    return jnp.swapaxes(pairs, 1, 2).reshape(rows.shape)


@ft.partial(jax.jit, static_argnames=("dtype", "is_gate_up"))
def _from_floats(
    matrices: Float[Array, "experts inputs outputs"],
    *,
    dtype: jnp.dtype,
    is_gate_up: bool,
) -> Float[Array, "experts outputs inputs"]:
    rows = jnp.swapaxes(matrices, 1, 2).astype(dtype)
    return _gate_then_up(rows) if is_gate_up else rows


@ft.partial(jax.jit, static_argnames=("dtype", "is_gate_up"))
def _from_mxfp4(
    blocks: Array, scales: Array, *, dtype: jnp.dtype, is_gate_up: bool
) -> Float[Array, "experts outputs inputs"]:
    rows = unpack_mxfp4(blocks, scales, dtype=dtype)
    return _gate_then_up(rows) if is_gate_up else rows


def _gate_up_bias(
    bias: Float[Array, "experts outputs"], *, dtype: jnp.dtype
) -> Float[Array, "experts outputs"]:
    return _gate_then_up(bias).astype(dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptOss:
    """A gpt-oss model: its sizes, and what follows from them.

    Attributes:
      vocab_size: Tokens of the vocabulary.
      hidden_size: Width of the residual stream.
      expert_size: Width inside an expert.
      num_q_heads: Query heads.
      num_kv_heads: Key and value heads.
      head_dim: Elements per head.
      epsilon: Of every RMS norm.
      pattern: Which layers see a window only.
      rope: Rotary frequencies.
      router: How experts are chosen.
      swiglu_limit: Bound of the inputs of the experts' activation.
      is_mxfp4: Whether the checkpoint holds the experts in 4 bits.
      implementation: How ops run; None for the default device's best.
    """

    vocab_size: int
    hidden_size: int
    expert_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float
    pattern: WindowPattern
    rope: Rope
    router: Router
    swiglu_limit: float
    is_mxfp4: bool
    implementation: Implementation | None = None

    ignored_tensors = r".*rotary_emb\.inv_freq"

    @classmethod
    def from_config(cls, fields: ConfigFields, model_type: str) -> "GptOss":
        """Read ``config.json`` of a ``gpt_oss`` checkpoint.

        Raises:
          ConfigError: A field is missing, of the wrong type, or not supported.
        """
        fields.expect("hidden_act", "silu")
        fields.expect("attention_bias", True)
        fields.expect("tie_word_embeddings", False)
        # What the loss adds in training, and what rope_scaling says again.
        fields.ignore(
            "router_aux_loss_coef", "output_router_logits", "initial_context_length"
        )
        num_chosen = fields.take("num_experts_per_tok", int)
        fields.expect("experts_per_token", num_chosen)
        quantization = fields.take_nested("quantization_config")
        if quantization is not None:
            quantization.expect("quant_method", "mxfp4")
            # Always all but the experts: a tensor stored otherwise is not found.
            quantization.ignore("modules_to_not_convert")
            quantization.finish()
        head_dim = fields.take("head_dim", int)
        model = cls(
            vocab_size=fields.take("vocab_size", int),
            hidden_size=fields.take("hidden_size", int),
            expert_size=fields.take("intermediate_size", int),
            num_q_heads=fields.take("num_attention_heads", int),
            num_kv_heads=fields.take("num_key_value_heads", int),
            head_dim=head_dim,
            epsilon=fields.take("rms_norm_eps", float),
            pattern=WindowPattern.from_config(
                fields,
                num_layers=fields.take("num_hidden_layers", int),
                default_period=2,
            ),
            rope=rope_from_config(
                head_dim,
                fields.take("rope_theta", float),
                fields.take_nested("rope_scaling"),
            ),
            # A softmax over the chosen logits is one over all, renormalized.
            router=Router(
                num_experts=fields.take("num_local_experts", int),
                num_chosen=num_chosen,
                scoring="softmax",
            ),
            swiglu_limit=fields.take("swiglu_limit", float, 7.0),
            is_mxfp4=quantization is not None,
        )
        fields.finish()
        if model.num_q_heads % model.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads={model.num_q_heads} must be a multiple of "
                f"num_key_value_heads={model.num_kv_heads}"
            )
        if model.is_mxfp4 and (model.hidden_size % BLOCK or model.expert_size % BLOCK):
            raise ConfigError(
                f"hidden_size={model.hidden_size} and intermediate_size="
                f"{model.expert_size} must be multiples of {BLOCK} for mxfp4"
            )
        return model

    def weights(self) -> Weights:
        """Describe every array and the checkpoint tensors that it is made of."""
        hidden, dim = self.hidden_size, self.head_dim
        q_rows, kv_rows = self.num_q_heads * dim, self.num_kv_heads * dim
        num_experts = self.router.num_experts
        layers = []
        for index in range(len(self.pattern.is_windowed)):
            prefix = f"model.layers.{index}"
            heads = f"{prefix}.self_attn"
            router = f"{prefix}.mlp.router"
            layers.append(
                {
                    "attention_norm": weight(
                        f"{prefix}.input_layernorm.weight", hidden, spread=0.0
                    ),
                    "qkv": joined(
                        [f"{heads}.{name}_proj.weight" for name in "qkv"],
                        [(q_rows, hidden), (kv_rows, hidden), (kv_rows, hidden)],
                    ),
                    "qkv_bias": joined(
                        [f"{heads}.{name}_proj.bias" for name in "qkv"],
                        [(q_rows,), (kv_rows,), (kv_rows,)],
                    ),
                    "sinks": weight(f"{heads}.sinks", self.num_q_heads),
                    "o": weight(f"{heads}.o_proj.weight", hidden, q_rows),
                    "o_bias": weight(f"{heads}.o_proj.bias", hidden),
                    "experts_norm": weight(
                        f"{prefix}.post_attention_layernorm.weight", hidden, spread=0.0
                    ),
                    "router": weight(
                        f"{router}.weight", num_experts, hidden, keeps_float32=True
                    ),
                    "router_bias": weight(
                        f"{router}.bias", num_experts, keeps_float32=True
                    ),
                    "experts": self._expert_weights(f"{prefix}.mlp.experts"),
                }
            )
        return {
            "embedding": weight("model.embed_tokens.weight", self.vocab_size, hidden),
            "norm": weight("model.norm.weight", hidden, spread=0.0),
            "output": weight("lm_head.weight", self.vocab_size, hidden),
            "layers": layers,
        }

    def _expert_weights(self, prefix: str) -> Weights:
        hidden, inner = self.hidden_size, self.expert_size
        num_experts = self.router.num_experts
        return {
            "gate_up": self._expert_matrices(
                f"{prefix}.gate_up_proj", 2 * inner, hidden, is_gate_up=True
            ),
            "down": self._expert_matrices(
                f"{prefix}.down_proj", hidden, inner, is_gate_up=False
            ),
            "gate_up_bias": weight(
                f"{prefix}.gate_up_proj_bias",
                num_experts,
                2 * inner,
                decode=_gate_up_bias,
            ),
            "down_bias": weight(f"{prefix}.down_proj_bias", num_experts, hidden),
        }

    def _expert_matrices(
        self, name: str, outputs: int, inputs: int, *, is_gate_up: bool
    ) -> Weight:
        num_experts = self.router.num_experts
        if self.is_mxfp4:
            blocks = (num_experts, outputs, inputs // BLOCK)
            return Weight(
                names=(f"{name}_blocks", f"{name}_scales"),
                shapes=((*blocks, BLOCK // 2), blocks),
                shape=(num_experts, outputs, inputs),
                decode=ft.partial(_from_mxfp4, is_gate_up=is_gate_up),
            )
        return Weight(
            names=(name,),
            shapes=((num_experts, inputs, outputs),),
            shape=(num_experts, outputs, inputs),
            decode=ft.partial(_from_floats, is_gate_up=is_gate_up),
        )

    def pool_specs(self, *, page_size: int, dtype: np.dtype) -> tuple[SubPoolSpec, ...]:
        """Return what the model keeps in the pool: ``full``, then ``swa``.

        Args:
          page_size: Tokens per page.
          dtype: Storage dtype of K and V.
        """
        return self.pattern.pool_specs(
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=page_size,
            dtype=dtype,
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
        activation = ft.partial(clamped_swiglu, limit=self.swiglu_limit)
        for index, layer in enumerate(weights["layers"]):
            attended, pool = self._attention(layer, index, x, inputs, pool)
            x = x + attended
            normed = rms_norm(x, layer["experts_norm"], self.epsilon)
            choice = self.router.choose(
                normed, layer["router"], bias=layer["router_bias"]
            )
            x = x + apply_experts(
                normed,
                choice,
                Experts(**layer["experts"]),
                is_token=inputs.is_token,
                activation=activation,
            )
        x = rms_norm(x[inputs.logit_tokens], weights["norm"], self.epsilon)
        return linear(x, weights["output"]).astype(jnp.float32), pool

    def _attention(
        self,
        layer: Weights,
        index: int,
        x: jax.Array,
        inputs: StepInputs,
        pool: PoolState,
    ) -> tuple[jax.Array, PoolState]:
        sub_pool, place = self.pattern.place(index)
        normed = rms_norm(x, layer["attention_norm"], self.epsilon)
        qkv = linear(normed, layer["qkv"], layer["qkv_bias"])
        qkv = qkv.reshape(x.shape[0], -1, self.head_dim)
        first_v = self.num_q_heads + self.num_kv_heads
        q, k, v = jnp.split(qkv, [self.num_q_heads, first_v], axis=1)
        out, pool = cached_attention(
            rotate_halves(q, inputs.positions, self.rope),
            rotate_halves(k, inputs.positions, self.rope),
            v,
            inputs,
            pool,
            sub_pool=sub_pool,
            layer=place,
            softmax_scale=self.head_dim**-0.5,
            sinks=layer["sinks"],
            implementation=self.implementation,
        )
        return linear(out.reshape(x.shape[0], -1), layer["o"], layer["o_bias"]), pool
