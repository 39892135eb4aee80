"""Mixture of experts with shared ones: some experts see every token, without weight.

Source: DeepSeekMoE (arXiv:2401.06066).
"""

import dataclasses

import jax
from jaxtyping import Array, Bool, Float

from models.config_fields import ConfigError, ConfigFields
from models.layers import swiglu, swiglu_weights
from models.moe import Experts, Router, apply_experts, expert_weights
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
        choice = self.router.choose(
            x, layer["router"], correction_bias=layer.get("correction")
        )
        experts = Experts(**layer["experts"])
        out: jax.Array = apply_experts(x, choice, experts, is_token=is_token)
        if self.num_shared:
            out = out + swiglu(x, **layer["shared"])
        return out


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
