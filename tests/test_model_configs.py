"""Config values that a model cannot follow are refused by name, never ignored."""

import dataclasses
import json
import re

import pytest

from models.config_fields import ConfigError
from models.registry import MODELS, read_model
from tests.golden import GOLDENS

MISSING = object()

# Family, changed fields (a dot leads into an object), what the message says.
REFUSED = [
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    ("llama", {"mlp_bias": True}, "mlp_bias=True is not supported"),
    ("llama", {"hidden_size": MISSING}, "field 'hidden_size' is missing"),
    ("llama", {"hidden_size": 72.5}, "hidden_size=72.5 must be of type int"),
    ("llama", {"num_key_value_heads": 4}, "must be a multiple of"),
    ("llama", {"quantization_config": {"bits": 4}}, "unknown.*quantization_config"),
    ("llama", {"rope_scaling.rope_type": "longrope"}, "type 'longrope' is not"),
    ("llama", {"rope_scaling.new": 1}, "rope_scaling.*unknown.*new=1"),
    ("qwen3", {"use_sliding_window": True}, "use_sliding_window=True is not"),
    ("qwen3", {"sliding_window": 4096}, "sliding_window=4096 is not supported"),
    ("kimi_linear", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    ("kimi_linear", {"attention_bias": True}, "attention_bias=True is not"),
    ("kimi_linear", {"tie_word_embeddings": True}, "tie_word_embeddings=True is"),
    ("kimi_linear", {"q_lora_rank": 1536}, "q_lora_rank=1536 is not supported"),
    ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope=False is not supported"),
    ("kimi_linear", {"rope_scaling": {"type": "yarn"}}, "rope_scaling=.* is not"),
    ("kimi_linear", {"num_key_value_heads": 1}, "num_key_value_heads=1 is not"),
    ("kimi_linear", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1 is"),
    ("kimi_linear", {"moe_router_activation_func": "softmax"}, "'softmax' is not"),
    ("kimi_linear", {"topk_method": "greedy"}, "topk_method='greedy' is not"),
    ("kimi_linear", {"use_grouped_topk": False}, "use_grouped_topk=False is not"),
    ("kimi_linear", {"num_expert_group": 3}, "num_groups=3 must divide"),
    ("kimi_linear", {"topk_group": 2}, "num_chosen_groups=2 must be in 1 ... 1"),
    ("kimi_linear", {"num_experts_per_token": 9}, "num_chosen=9 must be in 1 ... 8"),
    ("kimi_linear", {"num_experts_per_token": MISSING}, "needs num_experts_per_token"),
    ("kimi_linear", {"num_experts_per_tok": 3}, "num_experts_per_tok=3 must be equal"),
    ("kimi_linear", {"moe_intermediate_size": None}, "needs .*moe_intermediate_size"),
    ("kimi_linear", {"moe_layer_freq": 0}, "moe_layer_freq=0 must be positive"),
    ("kimi_linear", {"attn_res_block_size": 4}, "attn_res_block_size=4 is not"),
    ("kimi_linear", {"routed_expert_hidden_size": 8}, "routed_expert_hidden_size=8"),
    ("kimi_linear", {"latent_moe_use_norm": True}, "latent_moe_use_norm=True is not"),
    ("kimi_linear", {"activation_situ_beta": 1.0}, "activation_situ_beta=1.0 is not"),
    ("kimi_linear", {"activation_situ_linear_beta": 1.0}, "situ_linear_beta=1.0 is"),
    ("kimi_linear", {"mla_use_output_gate": True}, "mla_use_output_gate=True is not"),
    ("kimi_linear", {"linear_attn_config": MISSING}, "'linear_attn_config' is missing"),
    (
        "kimi_linear",
        {"linear_attn_config.gate_lower_bound": -5.0},
        "linear_attn_config: gate_lower_bound=-5.0 is not supported",
    ),
    (
        "kimi_linear",
        {"linear_attn_config.use_full_rank_gate": True},
        "use_full_rank_gate=True is not supported",
    ),
    (
        "kimi_linear",
        {"linear_attn_config.kda_layers": [1, 2, 3, 5, 6]},
        r"together be 1 ... 9",
    ),
    (
        "kimi_linear",
        {"linear_attn_config.full_attn_layers": [4, 8, 9, 3]},
        r"together be 1 ... 9",
    ),
    ("kimi_linear", {"linear_attn_config.new": 1}, "linear_attn_config: unknown.*new"),
    ("kimi_linear", {"new": 1}, "unknown or unsupported: new=1"),
    ("deepseek_v2", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    ("deepseek_v2", {"attention_bias": True}, "attention_bias=True is not"),
    ("deepseek_v2", {"tie_word_embeddings": True}, "tie_word_embeddings=True is"),
    ("deepseek_v2", {"num_key_value_heads": 1}, "num_key_value_heads=1 is not"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not"),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid' is not"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True is not supported"),
    ("deepseek_v2", {"rope_scaling.type": "dynamic"}, "type 'dynamic' is not"),
    ("deepseek_v2", {"kv_lora_rank": MISSING}, "field 'kv_lora_rank' is missing"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy' is not"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax' is not"),
    ("deepseek_v3", {"n_group": 5}, "num_groups=5 must divide"),
    ("deepseek_v3", {"num_experts_per_tok": None}, "needs num_experts_per_tok"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False is not"),
    ("deepseek_v3", {"quantization_config": {}}, "unknown.*quantization_config"),
]


def model_of(tmp_path, family, changes):
    """Return the model of a golden's config with some fields changed."""
    config = json.loads((GOLDENS / family / "config.json").read_text())
    for name, value in changes.items():
        *outer, field = name.split(".")
        fields = config
        for step in outer:
            fields = fields[step]
        if value is MISSING:
            del fields[field]
        else:
            fields[field] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_model(tmp_path)


def names_of(cases):
    return [f"{case[0]}-{'-'.join(case[1])}" for case in cases]


@pytest.mark.parametrize(
    ("family", "changes", "message"), REFUSED, ids=names_of(REFUSED)
)
def test_refused_by_name(tmp_path, family, changes, message):
    with pytest.raises(ConfigError, match=message):
        model_of(tmp_path, family, changes)


@pytest.mark.parametrize("model_type", ["kimi_k3", 3, None])
def test_an_unknown_model_type_is_refused(tmp_path, model_type):
    message = "model_type" if model_type == "kimi_k3" else "model_type=.* of type str"
    with pytest.raises(ConfigError, match=message):
        model_of(tmp_path, "llama", {"model_type": model_type})


def test_the_message_names_every_model_type(tmp_path):
    with pytest.raises(ConfigError, match=re.escape(", ".join(sorted(MODELS)))):
        model_of(tmp_path, "llama", {"model_type": "mamba"})


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_config_that_is_no_object_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_model(tmp_path)


def test_fields_that_say_the_same_change_nothing(tmp_path):
    plain = model_of(tmp_path, "kimi_linear", {})
    same = {
        "topk_method": "noaux_tc",
        "attention_bias": False,
        "num_experts_per_tok": 2,
        "attn_res_block_size": None,
        "mla_use_output_gate": False,
        "logit_scale": 1.0,
        "linear_attn_config.gate_lower_bound": None,
    }
    assert model_of(tmp_path, "kimi_linear", same) == plain
    other_name = {"num_experts_per_token": MISSING, "num_experts_per_tok": 2}
    assert model_of(tmp_path, "kimi_linear", other_name) == plain


def test_kimi_linear_fields_reach_the_model(tmp_path):
    changes = {
        "logit_scale": 0.5,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 2,
        "num_expert_group": 2,
        "topk_group": 1,
        "moe_renormalize": False,
        "num_shared_experts": 0,
    }
    model = model_of(tmp_path, "kimi_linear", changes)
    assert model.logit_scale == 0.5
    assert model.moe.layers == (4, 6, 8)
    assert model.moe.num_shared == 0
    router = model.moe.router
    assert (router.num_groups, router.num_chosen_groups) == (2, 1)
    assert not router.renormalizes
    assert model.kda_layers == (0, 1, 2, 4, 5, 6)
    assert model.latent_layers == (3, 7, 8)


@pytest.mark.parametrize(
    ("family", "field"),
    [("kimi_linear", "num_experts"), ("deepseek_v3", "n_routed_experts")],
)
def test_a_model_may_have_no_experts(tmp_path, family, field):
    assert model_of(tmp_path, family, {field: None}).moe is None


def test_deepseek_fields_reach_the_model(tmp_path):
    model = model_of(tmp_path, "deepseek_v2", {"topk_method": "greedy"})
    assert model.moe.router.num_groups == 1
    plain = model_of(tmp_path, "deepseek_v3", {"rope_scaling": None})
    assert plain.latent.softmax_scale == (16 + 8) ** -0.5
    scaled = model_of(tmp_path, "deepseek_v3", {})
    # factor 4, mscale_all_dim 1: 0.1 ln 4 + 1, for q and for k.
    assert scaled.latent.softmax_scale / plain.latent.softmax_scale == pytest.approx(
        1.1386294361**2
    )


def test_layers_behind_the_last_are_ignored_where_the_config_has_them(tmp_path):
    model = model_of(tmp_path, "deepseek_v3", {"num_nextn_predict_layers": 2})
    for name, is_ignored in [
        ("model.layers.3.mlp.gate.weight", False),
        ("model.layers.4.eh_proj.weight", True),
        ("model.layers.5.mlp.experts.0.up_proj.weight", True),
        ("model.layers.6.eh_proj.weight", False),
        ("model.layers.40.eh_proj.weight", False),
        ("model.layers.1.self_attn.rotary_emb.inv_freq", True),
    ]:
        assert bool(re.fullmatch(model.ignored_tensors, name)) == is_ignored
    none = dataclasses.replace(model, num_extra_layers=0)
    assert not re.fullmatch(none.ignored_tensors, "model.layers.4.eh_proj.weight")
