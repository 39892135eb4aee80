"""Kimi Linear: delta attention with a state, beside latent attention and experts.

Three of four layers are Kimi Delta Attention (KDA), whose memory is one state and one
convolution window per request. The others are latent attention without any position
encoding (NoPE), whose memory grows with the tokens. After the first layers, the MLP is
a mixture of experts with shared ones.

Source: Kimi Linear (arXiv:2510.26692); the released configuration and tensor names of
moonshotai/Kimi-Linear-48B-A3B-Instruct.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from models.config_fields import ConfigError, ConfigFields
from models.kimi_delta_attention import KimiDeltaAttention
from models.layers import embed, linear, rms_norm, swiglu, swiglu_weights
from models.mla import LatentAttention
from models.moe import Router
from models.shared_moe import SharedMoe, moe_layers_from_config
from models.weights import Weights, joined, weight
from ukv.ops import Implementation
from ukv.pool import PoolState
from ukv.spec import SubPoolSpec
from ukv.translator import StepInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiLinear:
    """A Kimi Linear model: its sizes, and what follows from them.

    Attributes:
      vocab_size: Tokens of the vocabulary.
      hidden_size: Width of the residual stream.
      intermediate_size: Width inside the MLP of layers without experts.
      num_layers: Layers.
      kda_layers: Which of them are KDA, from 0; the others are latent attention.
      kda: Kimi Delta Attention.
      latent: Latent attention.
      moe: Experts, and which layers have them; None for a model without.
      epsilon: Of the RMS norms of the residual stream and of latents.
      logit_scale: Factor of the logits.
      implementation: How ops run; None for the default device's best.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    kda_layers: tuple[int, ...]
    kda: KimiDeltaAttention
    latent: LatentAttention
    moe: SharedMoe | None
    epsilon: float
    logit_scale: float = 1.0
    implementation: Implementation | None = None

    ignored_tensors = r".*rotary_emb\..*"

    @classmethod
    def from_config(cls, fields: ConfigFields, model_type: str) -> "KimiLinear":
        """Read ``config.json`` of a ``kimi_linear`` checkpoint.

        Raises:
          ConfigError: A field is missing, of the wrong type, or not supported.
        """
        del model_type
        num_layers = fields.take("num_hidden_layers", int)
        fields.expect("hidden_act", "silu")
        fields.expect("attention_bias", False)
        fields.expect("tie_word_embeddings", False)
        fields.expect("mla_use_nope", True)
        fields.expect("q_lora_rank", None)
        fields.expect("rope_scaling", None)
        fields.expect("num_nextn_predict_layers", 0)
        _refuse_later_architectures(fields)
        # Nothing is rotated, and the sizes of both kinds of heads have other fields.
        fields.ignore("rope_theta", "head_dim", "model_max_length")
        linear_fields = fields.take_nested("linear_attn_config")
        if linear_fields is None:
            raise ConfigError("field 'linear_attn_config' is missing")
        hidden = fields.take("hidden_size", int)
        model = cls(
            vocab_size=fields.take("vocab_size", int),
            hidden_size=hidden,
            intermediate_size=fields.take("intermediate_size", int),
            num_layers=num_layers,
            kda_layers=_kda_layers_from_config(linear_fields, num_layers),
            kda=KimiDeltaAttention(
                hidden_size=hidden,
                num_heads=linear_fields.take("num_heads", int),
                head_dim=linear_fields.take("head_dim", int),
                conv_width=linear_fields.take("short_conv_kernel_size", int),
            ),
            latent=LatentAttention.from_config(fields),
            moe=_moe_from_config(fields, hidden, num_layers),
            epsilon=fields.take("rms_norm_eps", float),
            logit_scale=fields.take("logit_scale", float, 1.0),
        )
        linear_fields.finish()
        fields.finish()
        return model

    @property
    def latent_layers(self) -> tuple[int, ...]:
        """Layers of latent attention, from 0."""
        return tuple(i for i in range(self.num_layers) if i not in self.kda_layers)

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
        mixer = f"{prefix}.self_attn"
        if index in self.kda_layers:
            mixer_weights = self.kda.weights(mixer)
        else:
            mixer_weights = self._latent_weights(mixer)
        if self.moe is not None and index in self.moe.layers:
            mlp_weights = self.moe.weights(
                f"{prefix}.block_sparse_moe", projections=("w1", "w3", "w2")
            )
        else:
            mlp_weights = swiglu_weights(
                f"{prefix}.mlp", width=hidden, inner=self.intermediate_size
            )
        return {
            "mixer_norm": weight(
                f"{prefix}.input_layernorm.weight", hidden, spread=0.0
            ),
            "mixer": mixer_weights,
            "mlp_norm": weight(
                f"{prefix}.post_attention_layernorm.weight", hidden, spread=0.0
            ),
            "mlp": mlp_weights,
        }

    def _latent_weights(self, prefix: str) -> Weights:
        hidden, latent = self.hidden_size, self.latent
        return {
            "q_row": joined(
                [f"{prefix}.q_proj.weight", f"{prefix}.kv_a_proj_with_mqa.weight"],
                [
                    (latent.num_heads * latent.key_dim, hidden),
                    (latent.row_width, hidden),
                ],
            ),
            "latent_norm": weight(
                f"{prefix}.kv_a_layernorm.weight", latent.latent_dim, spread=0.0
            ),
            **latent.expansions(f"{prefix}.kv_b_proj.weight"),
            "o": weight(
                f"{prefix}.o_proj.weight", hidden, latent.num_heads * latent.value_dim
            ),
        }

    def pool_specs(self, *, page_size: int, dtype: np.dtype) -> tuple[SubPoolSpec, ...]:
        """Return what the model keeps in the pool: latent rows, then states.

        Args:
          page_size: Tokens per page.
          dtype: Storage dtype of latent rows and convolution windows; states are
            float32.
        """
        return (
            self.latent.pool_spec(
                "mla",
                num_layers=len(self.latent_layers),
                page_size=page_size,
                dtype=dtype,
            ),
            self.kda.state_spec("kda", len(self.kda_layers), dtype),
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

        def mix(
            layer: Weights, index: int, x: jax.Array, pool: PoolState
        ) -> tuple[jax.Array, PoolState]:
            if index not in self.kda_layers:
                return self._latent_attention(layer, index, x, inputs, pool)
            return self.kda.forward(
                layer,
                x,
                inputs,
                pool,
                sub_pool="kda",
                index=self.kda_layers.index(index),
                implementation=self.implementation,
            )

        def route(
            moe: SharedMoe, layer: Weights, x: jax.Array, pool: PoolState
        ) -> tuple[jax.Array, PoolState]:
            return moe.apply(layer, x, inputs.is_token), pool

        x, pool = self._run_layers(weights, inputs.token_ids, pool, mix, route)
        return self._logits(weights, x[inputs.logit_tokens]), pool

    def forward_rows(
        self,
        weights: Weights,
        token_ids: Int32[Array, "rows time"],
        is_token: Bool[Array, "rows time"],
    ) -> tuple[
        Float32[Array, "rows time vocabulary"], Float32[Array, "moe_layers experts"]
    ]:
        """Run whole rows without a pool; differentiable, for training.

        Args:
          weights: Arrays in the structure of ``weights()``.
          token_ids: Rows, padded behind their tokens.
          is_token: False where padded.

        Returns:
          Logits of all tokens, and for each layer with experts the share of the
          tokens that each expert was chosen for. They add up to the chosen experts.
        """
        x, loads = self.residual_rows(weights, token_ids, is_token)
        logits = self._logits(weights, x.reshape(-1, x.shape[-1]))
        return logits.reshape(*token_ids.shape, -1), loads

    def residual_rows(
        self,
        weights: Weights,
        token_ids: Int32[Array, "rows time"],
        is_token: Bool[Array, "rows time"],
    ) -> tuple[Float[Array, "rows time width"], Float32[Array, "moe_layers experts"]]:
        """Run whole rows as ``forward_rows`` does, up to the residual stream.

        Args:
          weights: Arrays in the structure of ``weights()``; with fewer layers, the
            stream behind those.
          token_ids: Rows, padded behind their tokens.
          is_token: False where padded.

        Returns:
          The stream, and the loads as ``forward_rows`` returns them.
        """
        rows, time = token_ids.shape
        is_packed_token = is_token.reshape(-1)
        loads: tuple[jax.Array, ...] = ()

        def mix(
            layer: Weights, index: int, x: jax.Array, loads: tuple[jax.Array, ...]
        ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            if index in self.kda_layers:
                return self.kda.forward_rows(layer, x, rows), loads
            q, latents = self._latent_projections(layer, x)
            out = self.latent.attend_rows(
                q.reshape(rows, time, *q.shape[1:]),
                latents.reshape(rows, time, -1),
                layer["w_kc"],
                layer["w_vc"],
            )
            return linear(out.reshape(rows * time, -1), layer["o"]), loads

        def route(
            moe: SharedMoe, layer: Weights, x: jax.Array, loads: tuple[jax.Array, ...]
        ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            out, load = moe.apply_all(layer, x, is_packed_token)
            return out, (*loads, load)

        packed = token_ids.reshape(-1)
        x, loads = self._run_layers(weights, packed, loads, mix, route)
        num_experts = 0 if self.moe is None else self.moe.router.num_experts
        return (
            x.reshape(rows, time, -1),
            jnp.stack(loads) if loads else jnp.zeros((0, num_experts), jnp.float32),
        )

    def _run_layers(
        self,
        weights: Weights,
        token_ids: Int32[Array, " num_tokens"],
        carry: Any,
        mix: Callable[..., tuple[jax.Array, Any]],
        route: Callable[..., tuple[jax.Array, Any]],
    ) -> tuple[Float[Array, "num_tokens width"], Any]:
        """Run all layers: what inference and training have in common.

        Args:
          weights: Arrays in the structure of ``weights()``.
          token_ids: Tokens, packed.
          carry: What goes through all layers beside the tokens, such as the pool.
          mix: ``(layer, index, x, carry) -> (mixed, carry)``, over tokens of a row.
          route: ``(moe, layer, x, carry) -> (out, carry)``, through experts.
        """
        x = embed(token_ids, weights["embedding"])
        for index, layer in enumerate(weights["layers"]):
            normed = rms_norm(x, layer["mixer_norm"], self.epsilon)
            mixed, carry = mix(layer["mixer"], index, normed, carry)
            x = x + mixed
            normed = rms_norm(x, layer["mlp_norm"], self.epsilon)
            if self.moe is not None and index in self.moe.layers:
                out, carry = route(self.moe, layer["mlp"], normed, carry)
            else:
                out = swiglu(normed, **layer["mlp"])
            x = x + out
        return x, carry

    def _logits(
        self, weights: Weights, x: Float[Array, "num_logits width"]
    ) -> Float32[Array, "num_logits vocabulary"]:
        x = rms_norm(x, weights["norm"], self.epsilon)
        return linear(x, weights["output"]).astype(jnp.float32) * self.logit_scale

    def _latent_projections(
        self, layer: Weights, x: Float[Array, "num_tokens width"]
    ) -> tuple[
        Float[Array, "num_tokens heads key_dim"], Float[Array, "num_tokens row_width"]
    ]:
        """Return queries, and what each token leaves in the pool."""
        latent = self.latent
        q, compressed, key = jnp.split(
            linear(x, layer["q_row"]),
            np.cumsum([latent.num_heads * latent.key_dim, latent.latent_dim]).tolist(),
            axis=1,
        )
        compressed = rms_norm(compressed, layer["latent_norm"], self.epsilon)
        q = q.reshape(x.shape[0], latent.num_heads, latent.key_dim)
        return q, jnp.concatenate([compressed, key], axis=1)

    def _latent_attention(
        self,
        layer: Weights,
        index: int,
        x: Float[Array, "num_tokens width"],
        inputs: StepInputs,
        pool: PoolState,
    ) -> tuple[Float[Array, "num_tokens width"], PoolState]:
        """Attend over latent rows; their order is all that tells positions apart."""
        q, latents = self._latent_projections(layer, x)
        out, pool = self.latent.attend(
            q,
            latents,
            layer["w_kc"],
            layer["w_vc"],
            inputs,
            pool,
            sub_pool="mla",
            layer=self.latent_layers.index(index),
            implementation=self.implementation,
        )
        return linear(out.reshape(x.shape[0], -1), layer["o"]), pool


def _refuse_later_architectures(fields: ConfigFields) -> None:
    """Refuse fields of later models that share the configuration class, unless off."""
    for name in (
        "attn_res_block_size",
        "routed_expert_hidden_size",
        "latent_moe_use_norm",
        "activation_situ_beta",
        "activation_situ_linear_beta",
        "mla_use_output_gate",
    ):
        fields.expect(name, None, False)


def _kda_layers_from_config(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """Read which layers are KDA; the config counts from 1 and names the others too."""
    fields.expect("gate_lower_bound", None)
    fields.expect("use_full_rank_gate", False, None)
    kda = fields.take("kda_layers", list)
    full = fields.take("full_attn_layers", list)
    if not kda or not full or sorted([*kda, *full]) != [*range(1, num_layers + 1)]:
        raise ConfigError(
            f"linear_attn_config: kda_layers={kda} and full_attn_layers={full} must be "
            f"some layers each and together be 1 ... {num_layers}"
        )
    return tuple(sorted(layer - 1 for layer in kda))


def _moe_from_config(
    fields: ConfigFields, hidden_size: int, num_layers: int
) -> SharedMoe | None:
    """Read the experts; None if there are none."""
    fields.expect("moe_router_activation_func", "sigmoid")
    fields.expect("topk_method", "noaux_tc")
    fields.expect("use_grouped_topk", True)
    num_experts = fields.take("num_experts", int, None)
    num_chosen = fields.take("num_experts_per_token", int, None)
    other_name = fields.take("num_experts_per_tok", int, num_chosen)
    if num_chosen is None:
        num_chosen = other_name
    if num_chosen != other_name:
        raise ConfigError(
            f"num_experts_per_token={num_chosen} and num_experts_per_tok={other_name} "
            "must be equal"
        )
    num_groups = fields.take("num_expert_group", int, 1)
    num_chosen_groups = fields.take("topk_group", int, 1)
    renormalizes = fields.take("moe_renormalize", bool, True)
    scaling = fields.take("routed_scaling_factor", float, 1.0)
    num_shared = fields.take("num_shared_experts", int, 0)
    expert_size = fields.take("moe_intermediate_size", int, None)
    layers = moe_layers_from_config(fields, num_layers)
    if num_experts is None:
        return None
    if num_chosen is None or expert_size is None:
        raise ConfigError(
            f"{num_experts=} needs num_experts_per_token and moe_intermediate_size, "
            f"which are {num_chosen} and {expert_size}"
        )
    return SharedMoe(
        router=Router(
            num_experts=num_experts,
            num_chosen=num_chosen,
            scoring="sigmoid",
            num_groups=num_groups,
            num_chosen_groups=num_chosen_groups,
            group_score="two best",
            renormalizes=renormalizes,
            scaling=scaling,
        ),
        has_correction=True,
        num_shared=num_shared,
        width=hidden_size,
        expert_size=expert_size,
        layers=layers,
    )
