"""Released checkpoints: safetensors shards, read one tensor at a time."""

import contextlib
import difflib
import json
import pathlib
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from ukv.errors import UkvError

INDEX = "model.safetensors.index.json"


class CheckpointError(UkvError, ValueError):
    """A checkpoint lacks a file or a tensor, or a tensor has another shape."""


@runtime_checkable
class TensorSource(Protocol):
    """Where the weights of a model come from: tensors by their released names."""

    @property
    def folder(self) -> pathlib.Path:
        """Where they lie, for messages."""
        ...

    def read(self, name: str, shape: tuple[int, ...]) -> jax.Array | np.ndarray:
        """Return a tensor of that shape.

        Raises:
          CheckpointError: It is missing, or has another shape.
        """
        ...

    def unread(self) -> list[str]:
        """Return the names of the tensors that nobody read."""
        ...


class Checkpoint:
    """The tensors of a checkpoint folder, by name.

    Nothing is read before it is asked for, and one tensor at a time is in memory.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        """Find the shard of every tensor.

        Raises:
          CheckpointError: A shard is missing or cannot be read.
        """
        self.folder = folder
        self._stack = contextlib.ExitStack()
        self._files = {}
        self._shard_of: dict[str, str] = {}
        for shard in self._shards():
            path = folder / shard
            if not path.is_file():
                raise CheckpointError(
                    f"{folder}: shard {shard} is missing; {INDEX} lists it. Download "
                    "it again, or remove the index if it belongs to another checkpoint"
                )
            try:
                opened = self._stack.enter_context(safe_open(path, framework="flax"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"{path}: is no whole safetensors file ({error}); download it again"
                ) from error
            self._files[shard] = opened
            self._shard_of.update(dict.fromkeys(opened.keys(), shard))
        self._unread = set(self._shard_of)

    def _shards(self) -> list[str]:
        index = self.folder / INDEX
        if index.is_file():
            return sorted(set(json.loads(index.read_text())["weight_map"].values()))
        found = sorted(path.name for path in self.folder.glob("model*.safetensors"))
        if not found:
            raise CheckpointError(
                f"{self.folder}: has no model*.safetensors file; give the folder of a "
                "released checkpoint"
            )
        return found

    def __enter__(self) -> "Checkpoint":
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close every file."""
        self._stack.close()

    def __contains__(self, name: object) -> bool:
        """Return whether there is a tensor of that name."""
        return name in self._shard_of

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of all tensors."""
        return iter(self._shard_of)

    def read(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        """Return a tensor, in the dtype of the checkpoint.

        Raises:
          CheckpointError: It is missing, or has another shape.
        """
        if name not in self._shard_of:
            near = difflib.get_close_matches(name, self._shard_of, n=3)
            hint = f"; the nearest names are {', '.join(near)}" if near else ""
            raise CheckpointError(f"{self.folder}: tensor {name} is missing{hint}")
        opened = self._files[self._shard_of[name]]
        found = tuple(opened.get_slice(name).get_shape())
        if found != shape:
            raise CheckpointError(
                f"{self.folder}: tensor {name} has shape {found}, the config makes it "
                f"{shape}"
            )
        self._unread.discard(name)
        # On the host: joining and conversion come before the device sees an array.
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return opened.get_tensor(name)

    def unread(self) -> list[str]:
        """Return the names of the tensors that nobody read."""
        return sorted(self._unread)
