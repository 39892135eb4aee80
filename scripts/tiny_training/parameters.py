"""The parameters of the tiny model: how they start and how they are stored.

They are the tensors of a checkpoint, float32 and by their released names, for all of
training: the model's arrays are assembled of them inside the loss.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from safetensors.flax import save_file

from scripts.arithmetic_problems.tokenizer import END

Tensors = dict[str, jax.Array]

ROUTER_BIAS = ".e_score_correction_bias"
"""End of the names of what balances the experts: no gradient reaches it."""

# Kept in float32 in the checkpoint: what enters exponentials, and routers.
_FLOAT32 = (ROUTER_BIAS, ".A_log", ".dt_bias", ".gate.weight")


def model_config(
    vocab_size: int, end_token: int, *, num_layers: int, hidden: int
) -> dict:
    """Return ``config.json``: the released pattern at toy size.

    Three KDA layers, one of latent attention, and again; no experts in the first.

    Args:
      vocab_size: Tokens of the vocabulary.
      end_token: What ends an answer.
      num_layers: Layers, a multiple of 4.
      hidden: Width of the residual stream.
    """
    layers = range(1, num_layers + 1)
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "dtype": "bfloat16",
        "eos_token_id": end_token,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "kv_lora_rank": 128,
        "linear_attn_config": {
            "full_attn_layers": [layer for layer in layers if layer % 4 == 0],
            "head_dim": 128,
            "kda_layers": [layer for layer in layers if layer % 4],
            "num_heads": 2,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True,
        "model_max_length": 512,
        "model_type": "kimi_linear",
        "moe_intermediate_size": 64,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 4,
        "num_expert_group": 1,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_grouped_topk": True,
        "v_head_dim": 64,
        "vocab_size": vocab_size,
    }


def init_tensors(
    shapes: dict[str, tuple[int, ...]], seed: int, *, num_layers: int
) -> Tensors:
    """Return random tensors.

    Matrices keep the variance of what they multiply; those that add to the residual
    stream are smaller by the root of how many do. Decays start between fast and slow
    as Mamba's and KDA's do.

    Args:
      shapes: By name.
      seed: Of the draws.
      num_layers: Layers of the model.
    """
    rng = np.random.default_rng(seed)

    def init(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.endswith("norm.weight"):
            return np.ones(shape)
        if name.endswith(ROUTER_BIAS):
            return np.zeros(shape)
        if name.endswith(".A_log"):
            return np.log(rng.uniform(1.0, 16.0, shape))
        if name.endswith(".dt_bias"):
            step = np.exp(rng.uniform(np.log(0.001), np.log(0.1), shape))
            return step + np.log(-np.expm1(-step))  # softplus gives the step again
        if "conv1d" in name:
            return rng.uniform(-0.5, 0.5, shape)
        spread = shape[-1] ** -0.5
        if name.endswith("embed_tokens.weight"):
            spread = 0.5
        if name.endswith((".o_proj.weight", ".w2.weight", ".down_proj.weight")):
            spread *= (2 * num_layers) ** -0.5
        return rng.normal(0.0, spread, shape)

    return {
        name: jnp.asarray(init(name, shape), jnp.float32)
        for name, shape in shapes.items()
    }


def stored_tensors(tensors: Tensors) -> Tensors:
    """Round what a checkpoint keeps in bfloat16."""
    return {
        name: tensor if name.endswith(_FLOAT32) else tensor.astype(jnp.bfloat16)
        for name, tensor in tensors.items()
    }


def save_checkpoint(
    folder: pathlib.Path,
    config: dict,
    tensors: Tensors,
    tokenizer: tokenizers.Tokenizer,
) -> None:
    """Write a checkpoint folder as released ones are, bfloat16 where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    save_file(stored_tensors(tensors), path, metadata={"format": "pt"})
    # The library gives the file to its owner alone.
    path.chmod(0o644)
    (folder / "config.json").write_text(f"{json.dumps(config, indent=2)}\n")
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"eos_token": END, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(f"{json.dumps(special, indent=2)}\n")
