"""GGUF files of Llama models: one file with sizes, weights and tokenizer.

Quantized tensors are dequantized when they are read, and get the names and the order
of rows that released checkpoints have.

Source: ggml-org/ggml, docs/gguf.md; the names and the order of rows:
ggml-org/llama.cpp, convert_hf_to_gguf.py.
"""

import pathlib
import re
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np

from models.checkpoint import CheckpointError
from models.llama import Llama
from models.registry import Loaded
from models.rope import plain_rope
from models.weights import load_weights

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")


class GgufFile:
    """A GGUF file; its tensors are read one at a time, by their released names."""

    def __init__(self, path: pathlib.Path) -> None:
        """Read the header.

        Raises:
          CheckpointError: The file cannot be read.
        """
        self.folder = path
        try:
            self._reader = gguf.GGUFReader(path)
        except (OSError, ValueError, IndexError) as error:
            raise CheckpointError(f"{path}: is no GGUF file: {error}") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._unread = set(self._tensors)

    def __contains__(self, name: object) -> bool:
        """Return whether there is a tensor of that released name."""
        return isinstance(name, str) and _gguf_name(name) in self._tensors

    def field(self, name: str) -> Any:
        """Return a value of the header.

        Raises:
          CheckpointError: There is none of that name.
        """
        if name not in self._reader.fields:
            raise CheckpointError(f"{self.folder}: field {name} is missing")
        return self._reader.fields[name].contents()

    def has_field(self, name: str) -> bool:
        """Return whether the header has a value of that name."""
        return name in self._reader.fields

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return a tensor, dequantized to float32.

        Raises:
          CheckpointError: It is missing, or has another shape.
        """
        found = self._tensors.get(_gguf_name(name))
        if found is None:
            raise CheckpointError(
                f"{self.folder}: tensor {_gguf_name(name)}, which is {name}, is missing"
            )
        value = gguf.dequantize(found.data, found.tensor_type)
        if value.shape != shape:
            raise CheckpointError(
                f"{self.folder}: tensor {found.name} has shape {value.shape}, the "
                f"header makes it {shape}"
            )
        self._unread.discard(found.name)
        if name.endswith("q_proj.weight"):
            return _halves(value, self.field("llama.attention.head_count"))
        if name.endswith("k_proj.weight"):
            return _halves(value, self.field("llama.attention.head_count_kv"))
        return value

    def unread(self) -> list[str]:
        """Return the names of the tensors that nobody read."""
        return sorted(self._unread)


def _gguf_name(name: str) -> str:
    """Translate a released name; an unknown one stays."""
    stem, _, ending = name.rpartition(".")
    layer = _LAYER.fullmatch(stem)
    if layer is None:
        return f"{_NAMES.get(stem, stem)}.{ending}"
    index, part = layer.groups()
    return f"blk.{index}.{_NAMES.get(part, part)}.{ending}"


def _halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo the order that GGUF gives the rows of q and k.

    GGUF rotates neighbouring rows, released checkpoints row i with row
    i + head_dim / 2. Rows 0 1 2 3 of a head of four become 0 2 1 3.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def read_llama(file: GgufFile) -> Llama:
    """Return the model that the header describes.

    Raises:
      CheckpointError: It is no Llama, a value is missing, or RoPE is scaled.
    """
    kind = file.field("general.architecture")
    if kind != "llama":
        raise CheckpointError(
            f"{file.folder}: architecture {kind!r} is not supported; it can be 'llama'"
        )
    if file.has_field("llama.rope.scaling.type") or "rope_freqs.weight" in file:
        raise CheckpointError(f"{file.folder}: scaled RoPE is not supported")
    hidden = file.field("llama.embedding_length")
    heads = file.field("llama.attention.head_count")
    head_dim = hidden // heads
    rotated = file.field("llama.rope.dimension_count")
    if rotated != head_dim:
        raise CheckpointError(
            f"{file.folder}: rotates {rotated} of {head_dim} elements of a head; all "
            "must be"
        )
    return Llama(
        vocab_size=file.field("llama.vocab_size"),
        hidden_size=hidden,
        intermediate_size=file.field("llama.feed_forward_length"),
        num_layers=file.field("llama.block_count"),
        num_q_heads=heads,
        num_kv_heads=file.field("llama.attention.head_count_kv"),
        head_dim=head_dim,
        epsilon=file.field("llama.attention.layer_norm_rms_epsilon"),
        rope=plain_rope(head_dim, file.field("llama.rope.freq_base")),
        has_qk_norm=False,
        has_attention_bias=False,
        ties_embeddings="lm_head.weight" not in file,
    )


def load_gguf(
    path: pathlib.Path, *, dtype: object = "bfloat16", progress: bool = True
) -> Loaded:
    """Load a model from a GGUF file.

    Args:
      path: The file.
      dtype: The model's dtype, to which all weights are dequantized.
      progress: Whether to show a progress bar.

    Raises:
      CheckpointError: The file is damaged, or holds another kind of model.
    """
    file = GgufFile(path)
    model = read_llama(file)
    weights = load_weights(
        model.weights(),
        file,
        jnp.dtype(dtype),  # type: ignore[arg-type]
        progress=progress,
    )
    return Loaded(model=model, weights=weights)
