"""The check that whatever a model routes its layers through translates as we do.

A model here takes translated ids and carries no translator. A wrapper that does carry
one, say an op set that sends a layer to its kind of op, must carry the engine's own:
another one reads plausible garbage after the first page move. So everything that can
be reached from the model is looked at once, when the programs are made.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from ukv.errors import SpecError
from ukv.translator import KVIndexTranslator

_LEAVES = (
    type(None),
    str,
    bytes,
    int,
    float,
    complex,
    type,
    np.ndarray,
    np.dtype,
    jax.Array,
)


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, each with how to write its place."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", found) for key, found in value.items())
    elif isinstance(value, tuple | list | set | frozenset):
        yield from ((f"[{index}]", found) for index, found in enumerate(value))
    else:
        names = list(getattr(value, "__dict__", ()))
        if dataclasses.is_dataclass(value):
            names += [field.name for field in dataclasses.fields(value)]
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            names += [slots] if isinstance(slots, str) else list(slots)
        for name in dict.fromkeys(names):
            if hasattr(value, name):
                yield f".{name}", getattr(value, name)


def translators_of(model: Any) -> dict[str, KVIndexTranslator]:
    """Return every translator that can be reached from a model, by its place."""
    found, seen = {}, {id(model)}
    todo = [(type(model).__name__, model)]
    while todo:
        place, value = todo.pop()
        for name, member in _members(value):
            where = f"{place}{name}"
            if isinstance(member, KVIndexTranslator):
                found[where] = member
            elif not isinstance(member, _LEAVES) and id(member) not in seen:
                seen.add(id(member))
                todo.append((where, member))
    return found


def require_one_translator(model: Any, translator: KVIndexTranslator) -> None:
    """Refuse a model from which another translator can be reached.

    Raises:
      SpecError: With the place of each.
    """
    others = [
        place
        for place, other in translators_of(model).items()
        if other is not translator
    ]
    if others:
        raise SpecError(
            f"{', '.join(sorted(others))}: carries another translator than the "
            "engine's; build it with the translator that the engine's programs have"
        )
