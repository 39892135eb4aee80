"""Reading a checkpoint's ``config.json`` so that no value goes unnoticed."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from ukv.errors import UkvError


class ConfigError(UkvError, ValueError):
    """A config value is missing, of the wrong type, or not supported."""


_REQUIRED = object()

# Fields that describe training, generation or the exporting library, not the model.
DESCRIPTIVE = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "max_position_embeddings",
        "model_type",
        "pad_token_id",
        "pretraining_tp",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


class ConfigFields:
    """The fields of a config, each of which must be accounted for.

    ``take`` reads a field, ``expect`` insists on one of a few values, ``ignore`` names
    fields that do not change the result; ``finish`` refuses whatever is left, by name.
    """

    def __init__(self, fields: Mapping[str, Any], *, where: str) -> None:
        """Start with no field read.

        Args:
          fields: The parsed JSON object.
          where: Name of the config in messages.
        """
        self._left = dict(fields)
        self._where = where

    @classmethod
    def read(cls, path: pathlib.Path) -> "ConfigFields":
        """Read ``config.json``.

        Raises:
          ConfigError: The file is missing or is no JSON object.
        """
        try:
            fields = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"{path}: must hold a JSON object")
        return cls(fields, where=str(path))

    def take(self, name: str, kind: type, default: Any = _REQUIRED) -> Any:
        """Return a field and count it as read.

        Args:
          name: The field.
          kind: Its type; an int is accepted for a float. With a default of None the
            field may be null.
          default: What a missing field means; without one it must be there.

        Raises:
          ConfigError: The field is missing or of another type.
        """
        if name not in self._left and default is _REQUIRED:
            raise ConfigError(f"{self._where}: field {name!r} is missing")
        value = self._left.pop(name, default)
        if value is None and default is None:
            return None
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ConfigError(
                f"{self._where}: {name}={value!r} must be of type {kind.__name__}"
            )
        return value

    def take_nested(self, name: str) -> "ConfigFields | None":
        """Return a nested object as fields of its own, or None if it is null."""
        value = self._left.pop(name, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ConfigError(f"{self._where}: {name}={value!r} must be an object")
        return ConfigFields(value, where=f"{self._where}: {name}")

    def expect(self, name: str, *allowed: Any) -> None:
        """Refuse a field that is there with another value than these.

        Raises:
          ConfigError: It has.
        """
        value = self._left.pop(name, allowed[0])
        if value not in allowed:
            choices = ", ".join(repr(choice) for choice in allowed)
            raise ConfigError(
                f"{self._where}: {name}={value!r} is not supported; it can be {choices}"
            )

    def ignore(self, *names: str) -> None:
        """Drop fields that do not change the result."""
        for name in names:
            self._left.pop(name, None)

    def finish(self) -> None:
        """Refuse every field that nobody accounted for.

        Raises:
          ConfigError: With the names and values.
        """
        left = {k: v for k, v in self._left.items() if k not in DESCRIPTIVE}
        if left:
            fields = ", ".join(f"{name}={value!r}" for name, value in left.items())
            raise ConfigError(f"{self._where}: unknown or unsupported: {fields}")
