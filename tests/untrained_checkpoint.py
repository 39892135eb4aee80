"""A small Kimi-Linear with random weights, as a folder that a command line can name."""

import json
import pathlib

import ml_dtypes
import numpy as np
from jax.tree_util import tree_leaves
from safetensors.numpy import save_file

from models.registry import read_model
from models.weights import Weight
from scripts.arithmetic_problems.tokenizer import END, build_tokenizer
from tests.golden import GOLDENS


def write_untrained_checkpoint(
    folder: pathlib.Path, *, num_shards: int = 1, **fields: object
) -> pathlib.Path:
    """Write config, weights and tokenizer; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((GOLDENS / "kimi_linear" / "config.json").read_text())
    config |= {
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": tokenizer.token_to_id(END),
        "num_hidden_layers": 2,
        "linear_attn_config": {
            **config["linear_attn_config"],
            "kda_layers": [1],
            "full_attn_layers": [2],
        },
        **fields,
    }
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    tensors = {}
    weights = tree_leaves(
        read_model(folder).weights(), is_leaf=lambda w: isinstance(w, Weight)
    )
    for weight in weights:
        for name, shape in zip(weight.names, weight.shapes, strict=True):
            spread = weight.spread and 0.5 / np.sqrt(shape[-1])
            values = rng.normal(size=shape, scale=spread) + (spread == 0)
            tensors[name] = values.astype(ml_dtypes.bfloat16)
    names = sorted(tensors)
    shards = {
        f"model-{i + 1:05}-of-{num_shards:05}.safetensors": names[i::num_shards]
        for i in range(num_shards)
    }
    for shard, kept in shards.items():
        save_file({name: tensors[name] for name in kept}, folder / shard)
    weight_map = {name: shard for shard, kept in shards.items() for name in kept}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map})
    )
    return folder
