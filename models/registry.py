"""From a checkpoint folder to a model: ``load(path)`` needs nothing else."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp

from models.checkpoint import Checkpoint
from models.config_fields import ConfigError, ConfigFields
from models.deepseek import DeepSeek
from models.gemma3 import Gemma3
from models.gpt_oss import GptOss
from models.kimi_linear import KimiLinear
from models.llama import Llama
from models.qwen3_next import Qwen3Next
from models.weights import Weights, load_weights
from ukv.engine import Model


@runtime_checkable
class CheckpointModel(Model, Protocol):
    """A model that says what its checkpoint holds, besides what the engine asks."""

    @property
    def ignored_tensors(self) -> str:
        """Regular expression of checkpoint tensors that the model does not need."""
        ...

    def weights(self) -> Weights:
        """Describe every array as ``models.weights.Weight``."""
        ...


MODELS: Mapping[str, Callable[[ConfigFields, str], CheckpointModel]] = {
    "deepseek_v2": DeepSeek.from_config,
    "deepseek_v3": DeepSeek.from_config,
    "gemma3": Gemma3.from_config,
    "gemma3_text": Gemma3.from_config,
    "gpt_oss": GptOss.from_config,
    "kimi_linear": KimiLinear.from_config,
    "llama": Llama.from_config,
    "qwen3": Llama.from_config,
    "qwen3_next": Qwen3Next.from_config,
}


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model and its arrays.

    Attributes:
      model: Sizes and forward pass.
      weights: Arrays in the structure of ``model.weights()``.
    """

    model: CheckpointModel
    weights: Any


def read_model(folder: pathlib.Path) -> CheckpointModel:
    """Return the model that ``config.json`` describes, without its weights.

    Raises:
      ConfigError: The model type is unknown, or a field is not supported.
    """
    fields = ConfigFields.read(folder / "config.json")
    model_type = fields.take("model_type", str)
    if model_type not in MODELS:
        raise ConfigError(
            f"{folder}: model_type={model_type!r} is not supported; it can be "
            f"{', '.join(sorted(MODELS))}"
        )
    return MODELS[model_type](fields, model_type)


def load(
    folder: pathlib.Path | str,
    *,
    dtype: object = "bfloat16",
    progress: bool = True,
) -> Loaded:
    """Load a released checkpoint.

    Args:
      folder: Holds ``config.json`` and the safetensors shards.
      dtype: The model's dtype; parameters that need it stay in float32.
      progress: Whether to show a progress bar.

    Raises:
      ConfigError: The config is not supported.
      CheckpointError: A shard or tensor is missing, misshapen or unknown.
    """
    folder = pathlib.Path(folder)
    model = read_model(folder)
    with Checkpoint(folder) as checkpoint:
        weights = load_weights(
            model.weights(),
            checkpoint,
            jnp.dtype(dtype),  # type: ignore[arg-type]
            ignored=model.ignored_tensors,
            progress=progress,
        )
    return Loaded(model=model, weights=weights)
