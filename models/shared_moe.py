"""Mixture of experts with shared ones: some experts see every token, without weight.

Source: DeepSeekMoE (arXiv:2401.06066).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from models.config_fields import ConfigError, ConfigFields
from models.layers import swiglu, swiglu_weights
from models.moe import (
    Choice,
    Experts,
    Router,
    apply_all_experts,
    apply_experts,
    expert_weights,
)
from models.weights import Weights, weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedMoe:
    """The layers of a model that have routed and shared experts.

    Attributes:
      router: How experts are chosen.
      has_correction: Whether the router corrects its scores for choosing.
      num_shared: Shared experts; they are one wider MLP.
      width: Elements that go in and out.
      expert_size: Elements between, in one expert.
      layers: Which layers of the model they are, from 0.
    """

    router: Router
    has_correction: bool
    num_shared: int
    width: int
    expert_size: int
    layers: tuple[int, ...]

    def weights(self, prefix: str, projections: tuple[str, str, str]) -> Weights:
        """Describe the arrays of one layer.

        Args:
          prefix: Of its tensors.
          projections: What gate, up and down of a routed expert are called.
        """
        num_experts = self.router.num_experts
        described = {
            "router": weight(
                f"{prefix}.gate.weight", num_experts, self.width, keeps_float32=True
            ),
            "experts": expert_weights(
                f"{prefix}.experts.{{expert}}.{{projection}}.weight",
                projections=projections,
                num_experts=num_experts,
                width=self.width,
                inner=self.expert_size,
            ),
        }
        if self.has_correction:
            described["correction"] = weight(
                f"{prefix}.gate.e_score_correction_bias",
                num_experts,
                keeps_float32=True,
            )
        if self.num_shared:
            described["shared"] = swiglu_weights(
                f"{prefix}.shared_experts",
                width=self.width,
                inner=self.expert_size * self.num_shared,
            )
        return described

    def apply(
        self,
        layer: Weights,
        x: Float[Array, "num_tokens width"],
        is_token: Bool[Array, " num_tokens"],
    ) -> Float[Array, "num_tokens width"]:
        """Add what the chosen and the shared experts make of each token.

        Args:
          layer: Arrays in the structure of ``weights``.
          x: Tokens.
          is_token: False where padded.
        """
        out: jax.Array = apply_experts(
            x, self._choose(layer, x), Experts(**layer["experts"]), is_token=is_token
        )
        return self._with_shared(layer, x, out)

    def apply_all(
        self,
        layer: Weights,
        x: Float[Array, "num_tokens width"],
        is_token: Bool[Array, " num_tokens"],
    ) -> tuple[Float[Array, "num_tokens width"], Float32[Array, " experts"]]:
        """Do what ``apply`` does, through every expert: differentiable, for training.

        Args:
          layer: Arrays in the structure of ``weights``.
          x: Tokens.
          is_token: False where padded; a padded token gets something, and counts for
            no expert.

        Returns:
          The result, and the share of the tokens that each expert was chosen for.
        """
        choice = self._choose(layer, x)
        out: jax.Array = apply_all_experts(x, choice, Experts(**layer["experts"]))
        is_chosen = jax.nn.one_hot(choice.expert_ids, self.router.num_experts)
        counted = is_token.astype(jnp.float32)
        counts = jnp.sum(is_chosen * counted[:, None, None], axis=(0, 1))
        load = counts / jnp.maximum(jnp.sum(counted), 1.0)
        return self._with_shared(layer, x, out), load

    def _choose(self, layer: Weights, x: jax.Array) -> Choice:
        return self.router.choose(
            x, layer["router"], correction_bias=layer.get("correction")
        )

    def _with_shared(self, layer: Weights, x: jax.Array, out: jax.Array) -> jax.Array:
        return out + swiglu(x, **layer["shared"]) if self.num_shared else out


def moe_layers_from_config(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """Read which layers have experts: every so many, after the first few.

    Raises:
      ConfigError: A field has another type, or the period is not positive.
    """
    first = fields.take("first_k_dense_replace", int, 0)
    period = fields.take("moe_layer_freq", int, 1)
    if period < 1:
        raise ConfigError(f"moe_layer_freq={period} must be positive")
    return tuple(i for i in range(num_layers) if i >= first and i % period == 0)
