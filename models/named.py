"""Models by name or by path: what a command line gives becomes arrays and a tokenizer.

``smollm2`` is the checkpoint in an installed package, ``tiny`` the one in this one; all
else is the folder of a released checkpoint, or a GGUF file.
"""

import pathlib

from models.checkpoint import CheckpointError
from models.gguf_file import GgufFile, load_gguf
from models.registry import Loaded, load
from models.smollm2 import find_smollm2
from models.tokenizer import Tokenizer

TINY = pathlib.Path(__file__).parent / "tiny_kimi_linear"


def find_model(name: str) -> pathlib.Path:
    """Return the folder or file of a model.

    Args:
      name: ``tiny``, ``smollm2``, or a path.

    Raises:
      CheckpointError: There is no such thing.
    """
    if name == "smollm2":
        return find_smollm2()
    path = TINY if name == "tiny" else pathlib.Path(name)
    if not path.exists():
        raise CheckpointError(
            f"{name}: no such file or folder; give tiny, smollm2, the folder of a "
            "checkpoint, or a GGUF file"
        )
    return path


def load_found(path: pathlib.Path, *, dtype: str, progress: bool = True) -> Loaded:
    """Load a checkpoint folder or a GGUF file.

    Args:
      path: From ``find_model``.
      dtype: The model's dtype.
      progress: Whether to show a progress bar.

    Raises:
      ConfigError: The config is not supported.
      CheckpointError: A file or tensor is missing, damaged or unknown.
    """
    if path.is_dir():
        return load(path, dtype=dtype, progress=progress)
    return load_gguf(path, dtype=dtype, progress=progress)


def read_tokenizer(path: pathlib.Path) -> Tokenizer:
    """Return the tokenizer of a checkpoint folder or a GGUF file.

    Raises:
      CheckpointError: There is none, or it is not supported.
    """
    if path.is_dir():
        return Tokenizer.from_checkpoint(path)
    return Tokenizer.from_gguf(GgufFile(path))
