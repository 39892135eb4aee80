"""DeepSeek-V2 and V3: latent attention with rotated keys, and experts in groups.

V3 chooses experts by sigmoid scores with a correction, V2 by softmax scores. Both
extend the context with YaRN, which here also scales the attention scores.

Source: DeepSeek-V2 (arXiv:2405.04434), DeepSeek-V3 (arXiv:2412.19437).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from models.config_fields import ConfigError, ConfigFields
from models.layers import embed, linear, rms_norm, swiglu, swiglu_weights
from models.mla import LatentAttention
from models.moe import Router
from models.rope import Rope, rope_from_config, rotate_neighbours
from models.shared_moe import SharedMoe, moe_layers_from_config
from models.weights import Weights, joined, weight
from ukv.ops import Implementation
from ukv.pool import PoolState
from ukv.spec import SubPoolSpec
from ukv.translator import StepInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeek:
    """A DeepSeek-V2 or V3 model: its sizes, and what follows from them.

    Attributes:
      vocab_size: Tokens of the vocabulary.
      hidden_size: Width of the residual stream.
      intermediate_size: Width inside the MLP of layers without experts.
      num_layers: Layers.
      num_extra_layers: Layers behind them in a checkpoint, which are not loaded.
      q_latent_dim: Elements that q is compressed to; None if it is not.
      latent: Latent attention.
      rope: Rotary frequencies.
      moe: Experts, and which layers have them; None for a model without.
      epsilon: Of every RMS norm.
      implementation: How ops run; None for the default device's best.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_extra_layers: int
    q_latent_dim: int | None
    latent: LatentAttention
    rope: Rope
    moe: SharedMoe | None
    epsilon: float
    implementation: Implementation | None = None

    @classmethod
    def from_config(cls, fields: ConfigFields, model_type: str) -> "DeepSeek":
        """Read ``config.json`` of a ``deepseek_v2`` or ``deepseek_v3`` checkpoint.

        Raises:
          ConfigError: A field is missing, of the wrong type, or not supported.
        """
        fields.expect("hidden_act", "silu")
        fields.expect("attention_bias", False)
        fields.expect("mlp_bias", False)
        fields.expect("tie_word_embeddings", False)
        fields.expect("rope_interleave", True)
        # For training, for distribution, or told again by other fields.
        fields.ignore("aux_loss_alpha", "seq_aux", "ep_size", "head_dim")
        hidden = fields.take("hidden_size", int)
        num_layers = fields.take("num_hidden_layers", int)
        latent = LatentAttention.from_config(fields)
        rope = rope_from_config(
            latent.rope_dim,
            fields.take("rope_theta", float),
            fields.take_nested("rope_scaling"),
        )
        scale = latent.softmax_scale * rope.score_magnitude
        model = cls(
            vocab_size=fields.take("vocab_size", int),
            hidden_size=hidden,
            intermediate_size=fields.take("intermediate_size", int),
            num_layers=num_layers,
            num_extra_layers=fields.take("num_nextn_predict_layers", int, 0),
            q_latent_dim=fields.take("q_lora_rank", int, None),
            latent=dataclasses.replace(latent, softmax_scale=scale),
            rope=rope,
            moe=_moe_from_config(fields, model_type, hidden, num_layers),
            epsilon=fields.take("rms_norm_eps", float),
        )
        fields.finish()
        return model

    @property
    def ignored_tensors(self) -> str:
        """Stored frequencies, and layers behind the last."""
        extra = range(self.num_layers, self.num_layers + self.num_extra_layers)
        layers = "|".join(str(index) for index in extra)
        return rf".*rotary_emb\.inv_freq|model\.layers\.({layers})\..*"

    def weights(self) -> Weights:
        """Describe every array and the checkpoint tensors that it is made of."""
        hidden = self.hidden_size
        return {
            "embedding": weight("model.embed_tokens.weight", self.vocab_size, hidden),
            "layers": [self._layer_weights(index) for index in range(self.num_layers)],
            "norm": weight("model.norm.weight", hidden, spread=0.0),
            "output": weight("lm_head.weight", self.vocab_size, hidden),
        }

    def _layer_weights(self, index: int) -> Weights:
        hidden, prefix = self.hidden_size, f"model.layers.{index}"
        if self.moe is not None and index in self.moe.layers:
            mlp_weights = self.moe.weights(
                f"{prefix}.mlp", projections=("gate_proj", "up_proj", "down_proj")
            )
        else:
            mlp_weights = swiglu_weights(
                f"{prefix}.mlp", width=hidden, inner=self.intermediate_size
            )
        return {
            "attention_norm": weight(
                f"{prefix}.input_layernorm.weight", hidden, spread=0.0
            ),
            "attention": self._attention_weights(f"{prefix}.self_attn"),
            "mlp_norm": weight(
                f"{prefix}.post_attention_layernorm.weight", hidden, spread=0.0
            ),
            "mlp": mlp_weights,
        }

    def _attention_weights(self, prefix: str) -> Weights:
        hidden, latent, q_latent = self.hidden_size, self.latent, self.q_latent_dim
        q_width = latent.num_heads * latent.key_dim
        # Both read the residual stream: q, or what it is compressed to, and the row.
        q_name, q_rows = ("q", q_width) if q_latent is None else ("q_a", q_latent)
        described = {
            "q_row": joined(
                [
                    f"{prefix}.{q_name}_proj.weight",
                    f"{prefix}.kv_a_proj_with_mqa.weight",
                ],
                [(q_rows, hidden), (latent.row_width, hidden)],
            ),
            "latent_norm": weight(
                f"{prefix}.kv_a_layernorm.weight", latent.latent_dim, spread=0.0
            ),
            **latent.expansions(f"{prefix}.kv_b_proj.weight"),
            "o": weight(
                f"{prefix}.o_proj.weight", hidden, latent.num_heads * latent.value_dim
            ),
        }
        if q_latent is not None:
            described["q_norm"] = weight(
                f"{prefix}.q_a_layernorm.weight", q_latent, spread=0.0
            )
            described["q"] = weight(f"{prefix}.q_b_proj.weight", q_width, q_latent)
        return described

    def pool_specs(self, *, page_size: int, dtype: np.dtype) -> tuple[SubPoolSpec, ...]:
        """Return what the model keeps in the pool.

        Args:
          page_size: Tokens per page.
          dtype: Storage dtype of latent rows.
        """
        return (
            self.latent.pool_spec(
                "mla", num_layers=self.num_layers, page_size=page_size, dtype=dtype
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
            normed = rms_norm(x, layer["attention_norm"], self.epsilon)
            attended, pool = self._attention(
                layer["attention"], index, normed, inputs, pool
            )
            x = x + attended
            normed = rms_norm(x, layer["mlp_norm"], self.epsilon)
            if self.moe is not None and index in self.moe.layers:
                x = x + self.moe.apply(layer["mlp"], normed, inputs.is_token)
            else:
                x = x + swiglu(normed, **layer["mlp"])
        x = rms_norm(x[inputs.logit_tokens], weights["norm"], self.epsilon)
        return linear(x, weights["output"]).astype(jnp.float32), pool

    def _attention(
        self,
        layer: Weights,
        index: int,
        x: Float[Array, "num_tokens width"],
        inputs: StepInputs,
        pool: PoolState,
    ) -> tuple[jax.Array, PoolState]:
        latent, num_tokens = self.latent, x.shape[0]
        q_row = linear(x, layer["q_row"])
        q, compressed, key = jnp.split(
            q_row, [-latent.row_width, -latent.rope_dim], axis=1
        )
        if self.q_latent_dim is not None:
            q = linear(rms_norm(q, layer["q_norm"], self.epsilon), layer["q"])
        q = q.reshape(num_tokens, latent.num_heads, latent.key_dim)
        q_nope, q_rope = jnp.split(q, [latent.nope_dim], axis=-1)
        q_rope = rotate_neighbours(q_rope, inputs.positions, self.rope)
        # One key for all heads.
        key = rotate_neighbours(key[:, None, :], inputs.positions, self.rope)[:, 0]
        compressed = rms_norm(compressed, layer["latent_norm"], self.epsilon)
        out, pool = latent.attend(
            jnp.concatenate([q_nope, q_rope], axis=-1),
            jnp.concatenate([compressed, key], axis=-1),
            layer["w_kc"],
            layer["w_vc"],
            inputs,
            pool,
            sub_pool="mla",
            layer=index,
            implementation=self.implementation,
        )
        return linear(out.reshape(num_tokens, -1), layer["o"]), pool


def _moe_from_config(
    fields: ConfigFields, model_type: str, hidden_size: int, num_layers: int
) -> SharedMoe | None:
    """Read the experts, which each version chooses its own way; None if none."""
    is_v3 = model_type == "deepseek_v3"
    if is_v3:
        fields.expect("scoring_func", "sigmoid")
        fields.expect("topk_method", "noaux_tc")
        is_grouped, renormalizes = True, fields.take("norm_topk_prob", bool, True)
    else:
        fields.expect("scoring_func", "softmax")
        method = fields.take("topk_method", str, "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise ConfigError(
                f"topk_method={method!r} is not supported; it can be 'greedy' or "
                "'group_limited_greedy'"
            )
        # The released code would scale renormalised weights in another way.
        fields.expect("norm_topk_prob", False)
        is_grouped, renormalizes = method == "group_limited_greedy", False
    num_experts = fields.take("n_routed_experts", int, None)
    num_chosen = fields.take("num_experts_per_tok", int, None)
    num_groups = fields.take("n_group", int, None) or 1
    num_chosen_groups = fields.take("topk_group", int, None) or 1
    scaling = fields.take("routed_scaling_factor", float, 1.0)
    num_shared = fields.take("n_shared_experts", int, None) or 0
    expert_size = fields.take("moe_intermediate_size", int, None)
    layers = moe_layers_from_config(fields, num_layers)
    if num_experts is None:
        return None
    if num_chosen is None or expert_size is None:
        raise ConfigError(
            f"n_routed_experts={num_experts} needs num_experts_per_tok and "
            f"moe_intermediate_size, which are {num_chosen} and {expert_size}"
        )
    return SharedMoe(
        router=Router(
            num_experts=num_experts,
            num_chosen=num_chosen,
            scoring="sigmoid" if is_v3 else "softmax",
            num_groups=num_groups if is_grouped else 1,
            num_chosen_groups=num_chosen_groups if is_grouped else 1,
            group_score="two best" if is_v3 else "best",
            renormalizes=renormalizes,
            scaling=scaling,
        ),
        has_correction=is_v3,
        num_shared=num_shared,
        width=hidden_size,
        expert_size=expert_size,
        layers=layers,
    )
