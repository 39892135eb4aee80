"""What the golden of Gemma 3 does not cover: patterns, nested configs, soft caps."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from models.config_fields import ConfigError, ConfigFields
from models.gemma3 import Gemma3
from models.registry import load
from models.weights import Weight
from models.window_pattern import WindowPattern
from tests.golden import GOLDENS, Golden, worst_row_error
from tests.model_runner import ModelRunner


def pattern(num_layers=7, default_period=6, **fields):
    return WindowPattern.from_config(
        ConfigFields({"sliding_window": 20, **fields}, where="config.json"),
        num_layers=num_layers,
        default_period=default_period,
    )


def gemma3(model_type="gemma3_text", **changes):
    fields = json.loads((GOLDENS / "gemma3" / "config.json").read_text()) | changes
    if model_type == "gemma3":
        fields = {"text_config": fields, "vision_config": {}, "eos_token_id": [1]}
    return Gemma3.from_config(ConfigFields(fields, where="config.json"), model_type)


def test_patterns():
    each_third = (True, True, False) * 2 + (True,)
    assert pattern(_sliding_window_pattern=3).is_windowed == each_third
    assert pattern(sliding_window_pattern=3).is_windowed == each_third
    assert pattern().is_windowed == (True,) * 5 + (False, True)
    types = ["full_attention", "sliding_attention"]
    assert pattern(2, layer_types=types).is_windowed == (False, True)


def test_places():
    found = [pattern(sliding_window_pattern=3).place(index) for index in range(7)]
    assert found == [
        *(("swa", 0), ("swa", 1), ("full", 0)),
        *(("swa", 2), ("swa", 3), ("full", 1)),
        ("swa", 4),
    ]


def test_sub_pools_of_one_kind():
    def specs(kind):
        sizes = {"num_kv_heads": 1, "head_dim": 8, "page_size": 4}
        layers = pattern(2, layer_types=[kind] * 2)
        return layers.pool_specs(dtype=jnp.dtype("float32"), **sizes)

    (full,) = specs("full_attention")
    (swa,) = specs("sliding_attention")
    assert (full.name, full.num_layers, full.window) == ("full", 2, None)
    assert (swa.name, swa.num_layers, swa.window, swa.id_space) == ("swa", 2, 20, "swa")


def test_text_of_a_checkpoint_with_images():
    model = gemma3("gemma3")
    assert dataclasses.replace(model, prefix="") == gemma3()
    embedding = model.weights()["embedding"]
    assert isinstance(embedding, Weight)
    assert embedding.names == ("language_model.model.embed_tokens.weight",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layer_types": ["linear_attention"] * 7},
            "linear_attention is not supported",
        ),
        ({"layer_types": ["full_attention"]}, "has 1 entries, num_hidden_layers is 7"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({"num_key_value_heads": 4}, "must be a multiple of num_key_value_heads=4"),
        ({"rope_parameters": {}}, "unknown or unsupported: rope_parameters"),
    ],
)
def test_unsupported_configs_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        gemma3(**changes)


def test_logits_are_capped():
    golden = Golden("gemma3")
    loaded = load(golden.folder, dtype="float32", progress=False)
    cap = float(np.abs(golden.logits(0)).max()) / 2
    model = dataclasses.replace(loaded.model, logit_soft_cap=cap)
    run = ModelRunner(model, loaded.weights, num_rows=1, max_tokens=16)
    (logits,) = run.step([golden.prompt(0)])
    assert worst_row_error(logits, cap * np.tanh(golden.logits(0) / cap)) < 1e-4
