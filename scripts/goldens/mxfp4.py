"""The 4-bit expert weights of released gpt-oss checkpoints.

A block is 32 values along the input dimension: sixteen bytes, the even value in the low
half of each, and one shared power of two (uint8, biased by 127). Reading is left to
transformers, so that the layout is not ours alone.
"""

from pathlib import Path

import safetensors.torch
import torch
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

EXPERT_WEIGHTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
QUANTIZATION_CONFIG = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}


def pack(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest blocks and scales of weights [experts, inputs, outputs]."""
    blocked = weight.transpose(1, 2).unflatten(-1, (-1, 32)).float()
    exponent = blocked.abs().amax(-1).log2().floor() - 2
    levels = torch.tensor(FP4_VALUES)
    scaled = blocked * torch.exp2(-exponent)[..., None]
    codes = (scaled[..., None] - levels).abs().argmin(-1).to(torch.uint8)
    blocks = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return blocks, (exponent + 127).to(torch.uint8)


def unpack(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Weights [experts, inputs, outputs] as transformers reads them."""
    return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()


def pack_checkpoint(file: Path) -> None:
    """Replaces the expert weights of a checkpoint, which must be exact in 4 bits."""
    packed = {}
    for name, value in safetensors.torch.load_file(file).items():
        if not name.endswith(EXPERT_WEIGHTS):
            packed[name] = value
            continue
        blocks, scales = pack(value)
        if not torch.equal(unpack(blocks, scales), value):
            raise ValueError(f"{name=} is not exact in 4 bits")
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    safetensors.torch.save_file(packed, file, metadata={"format": "pt"})
