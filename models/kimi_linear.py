"""Kimi Linear: delta attention with a state, beside latent attention and experts.

Three of four layers are Kimi Delta Attention (KDA), whose memory is one state and one
convolution window per request. The others are latent attention without any position
encoding (NoPE), whose memory grows with the tokens. After the first layers, the MLP is
a mixture of experts with shared ones.

Source: Kimi Linear (arXiv:2510.26692); the released configuration and tensor names of
moonshotai/Kimi-Linear-48B-A3B-Instruct.
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
from models.shared_moe import SharedMoe, moe_layers_from_config
from models.weights import Weight, Weights, joined, weight
from ukv.ops import (
    DeltaTokens,
    DeltaViews,
    Implementation,
    KdaGate,
    ProjectedTokens,
    ShortConv,
    StateSlots,
    kda_decode_step,
    kda_prefill,
    short_conv_prefill,
)
from ukv.pool import PoolState
from ukv.spec import SubPoolSpec, kda_state_spec
from ukv.translator import StepInputs

# Of the norm behind a KDA layer's recurrence; no config has a field for it.
OUTPUT_NORM_EPSILON = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiLinear:
    """A Kimi Linear model: its sizes, and what follows from them.

    Attributes:
      vocab_size: Tokens of the vocabulary.
      hidden_size: Width of the residual stream.
      intermediate_size: Width inside the MLP of layers without experts.
      num_layers: Layers.
      kda_layers: Which of them are KDA, from 0; the others are latent attention.
      num_kda_heads: Heads of KDA.
      kda_dim: Elements of a KDA head's q, k and v, and rank of its gates.
      conv_width: Taps of the short convolution of KDA.
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
    num_kda_heads: int
    kda_dim: int
    conv_width: int
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
            num_kda_heads=linear_fields.take("num_heads", int),
            kda_dim=linear_fields.take("head_dim", int),
            conv_width=linear_fields.take("short_conv_kernel_size", int),
            latent=LatentAttention.from_config(fields),
            moe=_moe_from_config(fields, hidden, num_layers),
            epsilon=fields.take("rms_norm_eps", float),
            logit_scale=fields.take("logit_scale", float, 1.0),
        )
        linear_fields.finish()
        fields.finish()
        return model

    @property
    def kda_width(self) -> int:
        """Elements of q, of k or of v of all KDA heads."""
        return self.num_kda_heads * self.kda_dim

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
            mixer_weights = self._kda_weights(mixer)
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

    def _kda_weights(self, prefix: str) -> Weights:
        hidden, heads, dim = self.hidden_size, self.num_kda_heads, self.kda_dim
        width, taps = self.kda_width, self.conv_width
        return {
            "qkv_beta_gates": joined(
                [
                    f"{prefix}.{n}_proj.weight"
                    for n in ("q", "k", "v", "b", "f_a", "g_a")
                ],
                [(rows, hidden) for rows in (width, width, width, heads, dim, dim)],
            ),
            "conv": Weight(
                names=tuple(f"{prefix}.{n}_conv1d.weight" for n in "qkv"),
                shapes=((width, 1, taps),) * 3,
                shape=(3 * width, taps),
                keeps_float32=True,
            ),
            "decay_gate": weight(f"{prefix}.f_b_proj.weight", width, dim),
            "a_log": weight(
                f"{prefix}.A_log", 1, 1, heads, 1, shape=(heads,), keeps_float32=True
            ),
            "dt_bias": weight(
                f"{prefix}.dt_bias", width, shape=(heads, dim), keeps_float32=True
            ),
            "output_gate": weight(f"{prefix}.g_b_proj.weight", width, dim),
            "output_norm": weight(f"{prefix}.o_norm.weight", dim, spread=0.0),
            "o": weight(f"{prefix}.o_proj.weight", hidden, width),
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
            kda_state_spec(
                name="kda",
                num_layers=len(self.kda_layers),
                num_heads=self.num_kda_heads,
                key_dim=self.kda_dim,
                value_dim=self.kda_dim,
                conv_width=self.conv_width,
                state_dtype="float32",
                conv_dtype=dtype,
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
            normed = rms_norm(x, layer["mixer_norm"], self.epsilon)
            mixer = self._kda if index in self.kda_layers else self._latent_attention
            mixed, pool = mixer(layer["mixer"], index, normed, inputs, pool)
            x = x + mixed
            normed = rms_norm(x, layer["mlp_norm"], self.epsilon)
            if self.moe is not None and index in self.moe.layers:
                x = x + self.moe.apply(layer["mlp"], normed, inputs.is_token)
            else:
                x = x + swiglu(normed, **layer["mlp"])
        x = rms_norm(x[inputs.logit_tokens], weights["norm"], self.epsilon)
        logits = linear(x, weights["output"]).astype(jnp.float32)
        return logits * self.logit_scale, pool

    def _kda(
        self,
        layer: Weights,
        index: int,
        x: Float[Array, "num_tokens width"],
        inputs: StepInputs,
        pool: PoolState,
    ) -> tuple[Float[Array, "num_tokens width"], PoolState]:
        """Convolve q, k and v, advance the state with them, and gate what it gives."""
        num_tokens, heads, dim = x.shape[0], self.num_kda_heads, self.kda_dim
        qkv, beta_logits, decay, gate = jnp.split(
            linear(x, layer["qkv_beta_gates"]),
            np.cumsum([3 * self.kda_width, heads, dim]).tolist(),
            axis=1,
        )
        slots = StateSlots(slots=inputs.slots["kda"], is_fresh=inputs.is_fresh)
        state = self.kda_layers.index(index)

        views = DeltaViews(
            recurrent=pool.layout.part_view("kda", layer=state, part="recurrent"),
            conv=pool.layout.part_view("kda", layer=state, part="conv"),
        )
        conv = ShortConv(weight=layer["conv"])
        kda_gate = KdaGate(a_log=layer["a_log"], dt_bias=layer["dt_bias"])
        gate_logits = linear(decay, layer["decay_gate"]).reshape(num_tokens, heads, dim)
        if inputs.is_decode:
            projected = ProjectedTokens(
                qkv=qkv[:, None],
                gate_logits=gate_logits[:, None],
                beta_logits=beta_logits[:, None],
            )
            buffers, out = kda_decode_step(
                pool.buffers,
                views,
                projected,
                conv,
                kda_gate,
                slots,
                implementation=self.implementation,
            )
            out = out[:, 0]
        else:
            buffers, qkv = short_conv_prefill(
                pool.buffers,
                views.conv,
                qkv,
                conv,
                inputs.cu_query_lens,
                slots,
                implementation=self.implementation,
            )
            q, k, v = jnp.split(qkv.reshape(num_tokens, 3 * heads, dim), 3, axis=1)
            tokens = DeltaTokens(
                q=q, k=k, v=v, gate_logits=gate_logits, beta_logits=beta_logits
            )
            buffers, out = kda_prefill(
                buffers,
                views.recurrent,
                tokens,
                kda_gate,
                inputs.cu_query_lens,
                slots,
                max_query_len=inputs.max_query_len,
                implementation=self.implementation,
            )

        gate = linear(gate, layer["output_gate"]).reshape(out.shape)
        normed = rms_norm(
            out.astype(jnp.float32), layer["output_norm"], OUTPUT_NORM_EPSILON
        )
        gated = normed * jax.nn.sigmoid(gate.astype(jnp.float32))
        out = gated.astype(x.dtype).reshape(num_tokens, self.kda_width)
        return linear(out, layer["o"]), pool.replace(buffers=buffers)

    def _latent_attention(
        self,
        layer: Weights,
        index: int,
        x: Float[Array, "num_tokens width"],
        inputs: StepInputs,
        pool: PoolState,
    ) -> tuple[Float[Array, "num_tokens width"], PoolState]:
        """Attend over latent rows; their order is all that tells positions apart."""
        latent, num_tokens = self.latent, x.shape[0]
        q, compressed, key = jnp.split(
            linear(x, layer["q_row"]),
            np.cumsum([latent.num_heads * latent.key_dim, latent.latent_dim]).tolist(),
            axis=1,
        )
        compressed = rms_norm(compressed, layer["latent_norm"], self.epsilon)
        out, pool = latent.attend(
            q.reshape(num_tokens, latent.num_heads, latent.key_dim),
            jnp.concatenate([compressed, key], axis=1),
            layer["w_kc"],
            layer["w_vc"],
            inputs,
            pool,
            sub_pool="mla",
            layer=self.latent_layers.index(index),
            implementation=self.implementation,
        )
        return linear(out.reshape(num_tokens, -1), layer["o"]), pool


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
