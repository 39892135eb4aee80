"""What a model keeps and what a step of it costs, from its config alone.

The cost of a pass is the larger of two times: the bytes that it must move over the
card's copy rate, and its products over the card's bfloat16 rate.

    bytes     weights (of experts those that some token chooses, in expectation), K/V
              and latents that queries see, new rows, states read and written
    products  2 per weight and token, 2 per head, element and visible pair of tokens,
              8 per element of a state and token
"""

import dataclasses
import functools as ft
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from models.kimi_linear import KimiLinear
from models.registry import CheckpointModel, read_model
from models.weights import Weight
from ukv.spec import MLASpec, SubPoolSpec

CARD = pathlib.Path(__file__).parents[2] / "docs" / "benchmarks" / "pool_h200.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """What a card can do, as measured.

    Attributes:
      name: Which card.
      copy_gbps: Gigabytes per second, read and written together.
      matmul_tflops: bfloat16 products.
    """

    name: str
    copy_gbps: float
    matmul_tflops: float

    @classmethod
    def read(cls, path: pathlib.Path = CARD) -> "Card":
        """Return the ceilings of a benchmark record."""
        record = json.loads(path.read_text(encoding="utf-8"))
        ceilings = record["ceilings"]
        return cls(
            name=record["device"],
            copy_gbps=ceilings["copy_gbps"],
            matmul_tflops=ceilings["matmul_tflops"],
        )

    def seconds(self, num_bytes: float, flops: float) -> float:
        """Return the time of a pass: the larger of both."""
        return max(num_bytes / self.copy_gbps / 1e9, flops / self.matmul_tflops / 1e12)


@ft.cache
def token_bytes(spec: SubPoolSpec) -> int:
    """Return the bytes of one entry of all layers, without any padding."""
    return spec.num_layers * sum(part.entry_bytes for part in spec.parts)


def used_bytes(specs: tuple[SubPoolSpec, ...], context_len: int) -> int:
    """Return what a row of this length needs: visible tokens and states, no padding."""
    total = 0
    for spec in specs:
        count = min(context_len, spec.window or context_len) if spec.grows else 1
        total += count * token_bytes(spec)
    return total


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """A model without weights.

    Attributes:
      name: For tables.
      specs: What it keeps in the pool.
      dense_params: Weights that every token meets.
      head_params: Weights that a sampled token meets besides.
      expert_params: Weights of all experts.
      chosen_fraction: Experts that a token chooses, of all.
      param_bytes: Bytes of a weight.
      pair_flops: For each spec, products of one visible pair of tokens.
    """

    name: str
    specs: tuple[SubPoolSpec, ...]
    dense_params: int
    head_params: int
    expert_params: int
    chosen_fraction: float
    param_bytes: int
    pair_flops: tuple[int, ...]

    def pass_cost(
        self, context_lens: np.ndarray, query_lens: np.ndarray, num_sampled: int
    ) -> tuple[float, float]:
        """Return bytes and products of one pass.

        Args:
          context_lens: Tokens of each row in the pool.
          query_lens: New tokens of each row.
          num_sampled: Rows that draw a token.
        """
        num_tokens = int(query_lens.sum())
        active = self.dense_params + self.expert_params * self.chosen_fraction
        flops = 2.0 * (active * num_tokens + self.head_params * num_sampled)
        touched = 1.0 - (1.0 - self.chosen_fraction) ** num_tokens
        params = self.dense_params + self.expert_params * touched
        params += self.head_params * (num_sampled > 0)
        num_bytes = params * self.param_bytes
        kv_lens = context_lens + query_lens
        for spec, pair in zip(self.specs, self.pair_flops, strict=True):
            entry = token_bytes(spec)
            if not spec.grows:
                num_bytes += 2 * entry * len(query_lens)
                flops += pair * num_tokens
                continue
            seen = kv_lens
            pairs = query_lens * (context_lens + (query_lens + 1) / 2)
            if spec.window is not None:
                seen = np.minimum(kv_lens, spec.window - 1 + query_lens)
                pairs = np.minimum(pairs, query_lens * spec.window)
            num_bytes += entry * float(seen.sum() + num_tokens)
            flops += pair * float(pairs.sum())
        return num_bytes, flops


def _num_heads(model: CheckpointModel) -> int:
    if isinstance(model, KimiLinear):
        return model.latent.num_heads
    return model.num_q_heads


def _pair_flops(spec: SubPoolSpec, num_heads: int) -> int:
    if not spec.grows:
        elements = math.prod(spec.parts[0].shape)
        return 8 * spec.num_layers * elements
    if isinstance(spec, MLASpec):
        width = 2 * spec.latent_dim + spec.rope_dim
    else:
        width = spec.parts[0].shape[-1] + spec.parts[1].shape[-1]
    return 2 * spec.num_layers * num_heads * width


def read_geometry(
    folder: pathlib.Path, *, page_size: int, dtype: str = "bfloat16"
) -> Geometry:
    """Return the geometry of the model that a folder's ``config.json`` describes."""
    model = read_model(folder)
    pool_dtype = jnp.dtype(dtype)
    dense = head = embedding = experts = num_experts = 0
    leaves = jax.tree_util.tree_leaves_with_path(
        model.weights(), is_leaf=lambda node: isinstance(node, Weight)
    )
    for path, weight in leaves:
        keys = [str(getattr(step, "key", "")) for step in path]
        count = math.prod(weight.final_shape)
        if "experts" in keys:
            experts, num_experts = experts + count, weight.final_shape[0]
        elif keys == ["output"]:
            head = count
        elif keys == ["embedding"]:
            embedding = count
        else:
            dense += count
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    chosen = config.get("num_experts_per_tok") or config.get("num_experts_per_token", 0)
    specs = tuple(model.pool_specs(page_size=page_size, dtype=pool_dtype))
    heads = _num_heads(model)
    return Geometry(
        name=folder.name,
        specs=specs,
        dense_params=dense,
        head_params=head or embedding,
        expert_params=experts,
        chosen_fraction=chosen / num_experts if num_experts else 0.0,
        param_bytes=pool_dtype.itemsize,
        pair_flops=tuple(_pair_flops(spec, heads) for spec in specs),
    )
