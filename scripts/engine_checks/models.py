"""The small models that engine checks run: the goldens, a hybrid, a released one."""

import functools as ft
import math
import pathlib

import jax
import jax.numpy as jnp

from models.gated_deltanet import GatedDeltaNet
from models.gguf_file import load_gguf
from models.hybrid import Hybrid
from models.registry import Loaded, load
from models.rope import plain_rope
from models.smollm2 import find_smollm2
from models.weights import abstract_weights

GOLDENS = pathlib.Path(__file__).parents[2] / "tests" / "goldens"
FAMILIES = (
    "deepseek_v2",
    "deepseek_v3",
    "gemma3",
    "gpt_oss",
    "gpt_oss_mxfp4",
    "kimi_linear",
    "llama",
    "qwen3",
    "qwen3_next",
)
"""Families with a golden; their models are tiny."""

MODELS = (*FAMILIES, "hybrid", "smollm2")
"""All models; ``hybrid`` has states, windows and full attention in one buffer."""

HYBRID = Hybrid(
    vocab_size=61,
    hidden_size=40,
    intermediate_size=56,
    pattern=("state", "full", "swa", "full"),
    num_q_heads=6,
    num_full_kv_heads=3,
    num_swa_kv_heads=2,
    head_dim=14,
    window=27,
    rope=plain_rope(14, 1_000.0),
    delta_net=GatedDeltaNet(
        hidden_size=40,
        num_key_heads=2,
        num_value_heads=4,
        key_dim=12,
        value_dim=10,
        conv_width=4,
        epsilon=1e-6,
    ),
    epsilon=1e-6,
)


def _hybrid_weights() -> object:
    """Return random weights of such a size that every layer counts."""
    shapes = abstract_weights(HYBRID.weights(), jnp.dtype("float32"))
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(5), len(leaves))
    arrays = []
    for leaf, key in zip(leaves, keys, strict=True):
        values = jax.random.normal(key, leaf.shape, jnp.float32)
        is_matrix = len(leaf.shape) > 1
        arrays.append(
            values / math.sqrt(leaf.shape[-1]) if is_matrix else 1 + 0.2 * values
        )
    return jax.tree.unflatten(structure, arrays)


@ft.cache
def load_model(name: str) -> Loaded:
    """Return one of ``MODELS`` in float32.

    Raises:
      CheckpointError: It is ``smollm2``, and its package is not installed.
    """
    if name == "hybrid":
        return Loaded(model=HYBRID, weights=_hybrid_weights())
    if name == "smollm2":
        return load_gguf(find_smollm2(), dtype="float32", progress=False)
    return load(GOLDENS / name, dtype="float32", progress=False)
