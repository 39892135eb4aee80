"""Mixture of experts: a router chooses, and only the chosen experts compute.

No expert has a capacity, so no token is dropped, and what a token gets does not depend
on the tokens beside it.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from models.config_fields import ConfigError
from models.layers import linear
from models.weights import Weight, stacked
from ukv.pytree import Leaf

TILE_TOKENS = 16
"""Tokens of one expert that are multiplied at once. More fill better, and pad more."""


class Choice(flax.struct.PyTreeNode):
    """The experts of each token.

    Attributes:
      expert_ids: int32 ``[num_tokens, num_chosen]``, distinct for each token.
      weights: float32 ``[num_tokens, num_chosen]``, factors of their outputs.
    """

    expert_ids: Leaf
    weights: Leaf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Router:
    """How experts are chosen and weighed.

    With groups, only the experts of the best groups can be chosen; groups are equal
    runs of experts.

    Attributes:
      num_experts: Experts.
      num_chosen: Experts of each token.
      scoring: What turns logits into scores, which also weigh the outputs.
      num_groups: Groups of experts.
      num_chosen_groups: Groups that stay.
      group_score: Of a group: its best expert, or its two best added.
      renormalizes: Whether the chosen scores are divided by their sum.
      scaling: Factor of every weight.

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.2; DeepSeek-V3
    (arXiv:2412.19437), section 2.1.2.
    """

    num_experts: int
    num_chosen: int
    scoring: Literal["sigmoid", "softmax"]
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: Literal["best", "two best"] = "best"
    renormalizes: bool = True
    scaling: float = 1.0

    def __post_init__(self) -> None:
        """Check that so many experts can be chosen.

        Raises:
          ConfigError: The sizes contradict each other.
        """
        groups, kept = self.num_groups, self.num_chosen_groups
        if groups < 1 or self.num_experts % groups:
            raise ConfigError(f"num_groups={groups} must divide {self.num_experts=}")
        group_size = self.num_experts // groups
        if not 1 <= kept <= groups:
            raise ConfigError(f"num_chosen_groups={kept} must be in 1 ... {groups}")
        if not 1 <= self.num_chosen <= kept * group_size:
            raise ConfigError(
                f"num_chosen={self.num_chosen} must be in 1 ... {kept * group_size}, "
                "the experts of the chosen groups"
            )
        if groups > 1 and self.group_score == "two best" and group_size < 2:
            raise ConfigError(f"groups of {group_size} expert have no two best")

    def choose(
        self,
        x: Float[Array, "num_tokens width"],
        weight: Float32[Array, "experts width"],
        *,
        bias: Float[Array, " experts"] | None = None,
        correction_bias: Float32[Array, " experts"] | None = None,
    ) -> Choice:
        """Choose the experts of each token, in float32; equal scores by lower id.

        Args:
          x: Tokens.
          weight: Of the router.
          bias: Added to the logits.
          correction_bias: Added to the scores for choosing, not for weighing.
        """
        logits = linear(x.astype(jnp.float32), weight, bias)
        if self.scoring == "sigmoid":
            scores = jax.nn.sigmoid(logits)
        else:
            scores = jax.nn.softmax(logits, axis=-1)
        ranked = scores
        if correction_bias is not None:
            ranked = ranked + correction_bias.astype(jnp.float32)[None, :]
        if self.num_groups > 1:
            ranked = self._only_best_groups(ranked)
        _, expert_ids = jax.lax.top_k(ranked, self.num_chosen)
        weights = jnp.take_along_axis(scores, expert_ids, axis=1)
        if self.renormalizes:
            # Sigmoid scores may all vanish.
            weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20)
        return Choice(expert_ids=expert_ids, weights=weights * self.scaling)

    def _only_best_groups(
        self, ranked: Float32[Array, "num_tokens experts"]
    ) -> Float32[Array, "num_tokens experts"]:
        """Put the experts of all other groups behind every expert of these."""
        grouped = ranked.reshape(ranked.shape[0], self.num_groups, -1)
        num_best = 1 if self.group_score == "best" else 2
        best, _ = jax.lax.top_k(grouped, num_best)
        _, kept = jax.lax.top_k(jnp.sum(best, axis=-1), self.num_chosen_groups)
        groups = jnp.arange(self.num_groups, dtype=jnp.int32)
        is_kept = jnp.any(kept[:, :, None] == groups[None, None, :], axis=1)
        return jnp.where(is_kept[:, :, None], grouped, -jnp.inf).reshape(ranked.shape)


class Experts(flax.struct.PyTreeNode):
    """Weights of all experts of one layer, stacked; gate and up are fused along rows.

    Attributes:
      gate_up: ``[experts, 2 * inner, width]``.
      down: ``[experts, width, inner]``.
      gate_up_bias: ``[experts, 2 * inner]``, or None.
      down_bias: ``[experts, width]``, or None.
    """

    gate_up: Leaf
    down: Leaf
    gate_up_bias: Leaf | None = None
    down_bias: Leaf | None = None


def expert_weights(
    names: str,
    *,
    projections: tuple[str, str, str],
    num_experts: int,
    width: int,
    inner: int,
) -> dict[str, Weight]:
    """Describe the fields of ``Experts`` that a checkpoint holds matrix by matrix.

    Args:
      names: Tensor names, with ``{expert}`` and ``{projection}`` in them.
      projections: What gate, up and down are called.
      num_experts: Experts.
      width: Elements that go in and out.
      inner: Elements between.
    """

    def names_of(*wanted: str) -> tuple[str, ...]:
        return tuple(
            names.format(expert=expert, projection=projection)
            for expert in range(num_experts)
            for projection in wanted
        )

    gate, up, down = projections
    return {
        # Gate and up of one expert end to end, then those of the next.
        "gate_up": Weight(
            names=names_of(gate, up),
            shapes=((inner, width),) * (2 * num_experts),
            shape=(num_experts, 2 * inner, width),
        ),
        "down": stacked(names_of(down), width, inner),
    }


class ExpertTiles(flax.struct.PyTreeNode):
    """Pairs of token and expert, sorted by expert and cut into tiles of one expert.

    Example: tiles of 2, pairs 0 ... 4 of experts (7, 3, 7, 7, 3). Sorted (1, 4 | 0, 2,
    3); tile 0 is expert 3 with pairs (1, 4), tiles 1 and 2 are expert 7 with (0, 2)
    and (3, none).

    Attributes:
      pairs: int32 ``[max_tiles, tile_tokens]``; the number of pairs where there is
        none.
      experts: int32 ``[max_tiles]``.
      num_tiles: int32 scalar; tiles past it are empty.
    """

    pairs: Leaf
    experts: Leaf
    num_tiles: Leaf


def cut_pairs(
    experts: Int32[Array, " pairs"], *, num_experts: int, tile_tokens: int
) -> ExpertTiles:
    """Sort pairs by expert and cut them into tiles.

    Args:
      experts: Expert of each pair; a pair of no expert has ``num_experts``.
      num_experts: Experts.
      tile_tokens: Pairs of a tile.
    """
    num_pairs = experts.shape[0]
    order = jnp.argsort(experts, stable=True)
    counts = jnp.zeros(num_experts, jnp.int32).at[experts].add(1, mode="drop")
    first_pair = jnp.cumsum(counts) - counts
    ends = jnp.cumsum(-(-counts // tile_tokens))
    # Every expert but those without a pair may leave one tile unfilled.
    max_tiles = num_pairs // tile_tokens + min(num_experts, num_pairs)
    tile = jnp.arange(max_tiles, dtype=jnp.int32)
    expert = jnp.searchsorted(ends, tile, side="right").astype(jnp.int32)
    expert = jnp.minimum(expert, num_experts - 1)
    earlier = jnp.where(expert > 0, ends[jnp.maximum(expert - 1, 0)], 0)
    offset = (tile - earlier)[:, None] * tile_tokens
    offset = offset + jnp.arange(tile_tokens, dtype=jnp.int32)[None, :]
    is_pair = (offset < counts[expert][:, None]) & (tile < ends[-1])[:, None]
    place = jnp.where(is_pair, first_pair[expert][:, None] + offset, num_pairs)
    pairs = order.astype(jnp.int32).at[place].get(mode="fill", fill_value=num_pairs)
    return ExpertTiles(pairs=pairs, experts=expert, num_tiles=ends[-1])


def silu_gate(gate: Float[Array, "..."], up: Float[Array, "..."]) -> jax.Array:
    """Return ``silu(gate) * up``.

    Source: Shazeer (arXiv:2002.05202).
    """
    return jax.nn.silu(gate) * up


def apply_experts(
    x: Float[Array, "num_tokens width"],
    choice: Choice,
    experts: Experts,
    *,
    is_token: Bool[Array, " num_tokens"],
    activation: Callable[[jax.Array, jax.Array], jax.Array] = silu_gate,
) -> Float[Array, "num_tokens width"]:
    """Return the weighted sum of each token's experts.

    The tiles are walked one by one and each reads the weights of its expert in place,
    so the work grows with the chosen pairs. (``jax.lax.ragged_dot`` multiplies every
    token with every expert where it has no kernel: 10 to 100 times slower on a CPU.)

    Args:
      x: Tokens.
      choice: Experts of each, and their weights.
      experts: Weights.
      is_token: False where padded; a padded token costs nothing and gets zeros.
      activation: Of gate and up.
    """
    num_tokens, num_chosen = choice.expert_ids.shape
    num_experts = experts.gate_up.shape[0]
    chosen = jnp.where(is_token[:, None], choice.expert_ids, num_experts)
    tiles = cut_pairs(
        chosen.reshape(-1),
        num_experts=num_experts,
        # A token has no expert twice, so no expert has more pairs than tokens.
        tile_tokens=min(TILE_TOKENS, num_tokens),
    )
    weights = choice.weights.reshape(-1)

    def add_tile(index: jax.Array, total: jax.Array) -> jax.Array:
        pairs = tiles.pairs[index]
        tokens = pairs // num_chosen
        weight = jax.tree.map(lambda stack: stack[tiles.experts[index]], experts)
        rows = x.at[tokens].get(mode="fill", fill_value=0)
        gate_up = linear(rows, weight.gate_up, weight.gate_up_bias)
        inner = activation(*jnp.split(gate_up, 2, axis=-1))
        out = linear(inner, weight.down, weight.down_bias).astype(jnp.float32)
        factor = weights.at[pairs].get(mode="fill", fill_value=0)
        # Tiles come by expert, so the terms of a token are added in that order.
        return total.at[tokens].add(factor[:, None] * out, mode="drop")

    total = jnp.zeros(x.shape, jnp.float32)
    total = jax.lax.fori_loop(0, tiles.num_tiles, add_tile, total)
    return total.astype(x.dtype)


def apply_all_experts(
    x: Float[Array, "num_tokens width"],
    choice: Choice,
    experts: Experts,
    *,
    activation: Callable[[jax.Array, jax.Array], jax.Array] = silu_gate,
) -> Float[Array, "num_tokens width"]:
    """Return what ``apply_experts`` does, by asking every expert about every token.

    It has no loop of unknown length, so it is differentiable. For training a small
    model: the work does not depend on how many experts are chosen.

    Args:
      x: Tokens.
      choice: Experts of each, and their weights.
      experts: Weights.
      activation: Of gate and up.
    """
    num_experts, two_inner, width = experts.gate_up.shape
    chosen = jax.nn.one_hot(choice.expert_ids, num_experts, dtype=jnp.float32)
    shares = jnp.einsum("tce,tc->te", chosen, choice.weights)

    def flat_bias(bias: jax.Array | None) -> jax.Array | None:
        return None if bias is None else bias.reshape(-1)

    matrices = experts.gate_up.reshape(num_experts * two_inner, width)
    gate_up = linear(x, matrices, flat_bias(experts.gate_up_bias))
    gate_up = gate_up.reshape(x.shape[0], num_experts, two_inner)
    inner = activation(*jnp.split(gate_up, 2, axis=-1))
    # The shares go in before the last product, which then adds up the experts.
    inner = (inner.astype(jnp.float32) * shares[:, :, None]).astype(x.dtype)
    down = experts.down.transpose(1, 0, 2).reshape(width, -1)
    out = linear(inner.reshape(x.shape[0], -1), down).astype(jnp.float32)
    if experts.down_bias is not None:
        out = out + linear(shares, experts.down_bias.astype(jnp.float32).T)
    return out.astype(x.dtype)
