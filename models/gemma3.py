"""Gemma 3 text models: sliding windows and full attention, each with its own RoPE.

Every norm scales by ``1 + weight``, and a layer has four: before and after attention,
before and after the MLP. Of a checkpoint with images, the text model is loaded.

Source: Gemma 3 (arXiv:2503.19786); huggingface/transformers,
src/transformers/models/gemma3/modeling_gemma3.py.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from models.config_fields import ConfigError, ConfigFields
from models.layers import cached_attention, embed, linear, rms_norm
from models.rope import Rope, plain_rope, rope_from_config, rotate_halves
from models.weights import Weights, joined, weight
from models.window_pattern import WindowPattern
from ukv.ops import Implementation
from ukv.pool import PoolState
from ukv.spec import SubPoolSpec
from ukv.translator import StepInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3:
    """A Gemma 3 text model: its sizes, and what follows from them.

    Attributes:
      vocab_size: Tokens of the vocabulary.
      hidden_size: Width of the residual stream.
      intermediate_size: Width inside the MLP.
      num_q_heads: Query heads.
      num_kv_heads: Key and value heads.
      head_dim: Elements per head.
      epsilon: Of every RMS norm.
      softmax_scale: Factor of ``q . k``.
      pattern: Which layers see a window only.
      full_rope: Rotary frequencies of full layers.
      window_rope: Rotary frequencies of the others.
      attention_soft_cap: Bound of attention scores, or None.
      logit_soft_cap: Bound of the logits, or None.
      prefix: Before every tensor name: set in checkpoints with images.
      implementation: How ops run; None for the default device's best.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float
    softmax_scale: float
    pattern: WindowPattern
    full_rope: Rope
    window_rope: Rope
    attention_soft_cap: float | None
    logit_soft_cap: float | None
    prefix: str = ""
    implementation: Implementation | None = None

    ignored_tensors = (
        r".*rotary_emb\.inv_freq|(.*\.)?lm_head\.weight"
        r"|(vision_tower|multi_modal_projector)\..*"
    )

    @classmethod
    def from_config(cls, fields: ConfigFields, model_type: str) -> "Gemma3":
        """Read ``config.json`` of a ``gemma3_text`` or ``gemma3`` checkpoint.

        A released ``gemma3`` config nests the text model and leaves out what has the
        family's default.

        Raises:
          ConfigError: A field is missing, of the wrong type, or not supported.
        """
        prefix = ""
        if model_type == "gemma3":
            text = fields.take_nested("text_config")
            fields.ignore(
                "vision_config",
                "boi_token_index",
                "eoi_token_index",
                "image_token_index",
                "mm_tokens_per_image",
            )
            fields.finish()
            if text is None:
                raise ConfigError("field 'text_config' is missing")
            text.expect("model_type", "gemma3_text")
            fields, prefix = text, "language_model."
        fields.expect("hidden_activation", "gelu_pytorch_tanh")
        fields.expect("attention_bias", False)
        fields.expect("use_bidirectional_attention", False, None)
        fields.expect("tie_word_embeddings", True)
        fields.ignore("cache_implementation")
        head_dim = fields.take("head_dim", int, 256)
        theta = fields.take("rope_theta", float, 1e6)
        local_theta = fields.take("rope_local_base_freq", float, 1e4)
        model = cls(
            vocab_size=fields.take("vocab_size", int, 262_208),
            hidden_size=fields.take("hidden_size", int),
            intermediate_size=fields.take("intermediate_size", int),
            num_q_heads=fields.take("num_attention_heads", int, 8),
            num_kv_heads=fields.take("num_key_value_heads", int, 4),
            head_dim=head_dim,
            epsilon=fields.take("rms_norm_eps", float, 1e-6),
            softmax_scale=fields.take("query_pre_attn_scalar", float, 256.0) ** -0.5,
            pattern=WindowPattern.from_config(
                fields,
                num_layers=fields.take("num_hidden_layers", int),
                default_period=6,
            ),
            full_rope=rope_from_config(
                head_dim, theta, fields.take_nested("rope_scaling")
            ),
            window_rope=plain_rope(head_dim, local_theta),
            attention_soft_cap=fields.take("attn_logit_softcapping", float, None),
            logit_soft_cap=fields.take("final_logit_softcapping", float, None),
            prefix=prefix,
        )
        fields.finish()
        if model.num_q_heads % model.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads={model.num_q_heads} must be a multiple of "
                f"num_key_value_heads={model.num_kv_heads}"
            )
        return model

    def weights(self) -> Weights:
        """Describe every array and the checkpoint tensors that it is made of."""
        hidden, inner, dim = self.hidden_size, self.intermediate_size, self.head_dim
        q_rows, kv_rows = self.num_q_heads * dim, self.num_kv_heads * dim
        root = f"{self.prefix}model"
        layers = []
        for index in range(len(self.pattern.is_windowed)):
            layer = f"{root}.layers.{index}"
            heads = f"{layer}.self_attn"
            mlp = f"{layer}.mlp"
            layers.append(
                {
                    "attention_norm": weight(f"{layer}.input_layernorm.weight", hidden),
                    "qkv": joined(
                        [f"{heads}.{name}_proj.weight" for name in "qkv"],
                        [(q_rows, hidden), (kv_rows, hidden), (kv_rows, hidden)],
                    ),
                    "q_norm": weight(f"{heads}.q_norm.weight", dim),
                    "k_norm": weight(f"{heads}.k_norm.weight", dim),
                    "o": weight(f"{heads}.o_proj.weight", hidden, q_rows),
                    "attended_norm": weight(
                        f"{layer}.post_attention_layernorm.weight", hidden
                    ),
                    "mlp_norm": weight(
                        f"{layer}.pre_feedforward_layernorm.weight", hidden
                    ),
                    "gate_up": joined(
                        [f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"],
                        [(inner, hidden)] * 2,
                    ),
                    "down": weight(f"{mlp}.down_proj.weight", hidden, inner),
                    "mlp_out_norm": weight(
                        f"{layer}.post_feedforward_layernorm.weight", hidden
                    ),
                }
            )
        return {
            "embedding": weight(f"{root}.embed_tokens.weight", self.vocab_size, hidden),
            "norm": weight(f"{root}.norm.weight", hidden),
            "layers": layers,
        }

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
        # The reference rounds the factor to the model's dtype.
        x = x * jnp.asarray(math.sqrt(self.hidden_size), x.dtype)
        for index, layer in enumerate(weights["layers"]):
            attended, pool = self._attention(layer, index, x, inputs, pool)
            x = x + self._norm(attended, layer["attended_norm"])
            normed = self._norm(x, layer["mlp_norm"])
            gate, up = jnp.split(linear(normed, layer["gate_up"]), 2, axis=-1)
            out = linear(jax.nn.gelu(gate, approximate=True) * up, layer["down"])
            x = x + self._norm(out, layer["mlp_out_norm"])
        x = self._norm(x[inputs.logit_tokens], weights["norm"])
        logits = linear(x, weights["embedding"]).astype(jnp.float32)
        if self.logit_soft_cap is not None:
            logits = self.logit_soft_cap * jnp.tanh(logits / self.logit_soft_cap)
        return logits, pool

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
        sub_pool, place = self.pattern.place(index)
        rope = self.window_rope if sub_pool == "swa" else self.full_rope
        qkv = linear(self._norm(x, layer["attention_norm"]), layer["qkv"])
        qkv = qkv.reshape(x.shape[0], -1, self.head_dim)
        first_v = self.num_q_heads + self.num_kv_heads
        q, k, v = jnp.split(qkv, [self.num_q_heads, first_v], axis=1)
        out, pool = cached_attention(
            rotate_halves(self._norm(q, layer["q_norm"]), inputs.positions, rope),
            rotate_halves(self._norm(k, layer["k_norm"]), inputs.positions, rope),
            v,
            inputs,
            pool,
            sub_pool=sub_pool,
            layer=place,
            softmax_scale=self.softmax_scale,
            soft_cap=self.attention_soft_cap,
            implementation=self.implementation,
        )
        return linear(out.reshape(x.shape[0], -1), layer["o"]), pool
