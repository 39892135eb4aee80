"""All cases, and who else was measured on them."""

import dataclasses
import importlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from scripts.kernel_benches.case import BenchCase

MODULES = ("gqa", "memory", "mla", "mla_extend", "recurrent")
"""Modules of this package with a function ``cases() -> list[BenchCase]``."""


def all_cases() -> list[BenchCase]:
    """Return the cases of every module, in the order of ``MODULES``."""
    found = []
    for name in MODULES:
        module = importlib.import_module(f"scripts.kernel_benches.{name}")
        found.extend(module.cases())
    return found


def select(
    cases: list[BenchCase], *, ops: list[str], where: Mapping[str, str], small: bool
) -> list[BenchCase]:
    """Return the cases of some ops whose shape has the given values.

    Args:
      cases: To choose from.
      ops: Names of ops; empty means all.
      where: Shape keys and the values, as text, that they must have.
      small: Only the small cases, or only the others.

    Raises:
      ValueError: An op does not exist, or nothing is left.
    """
    known = sorted({case.op for case in cases})
    for op in ops:
        if op not in known:
            raise ValueError(f"no op {op!r}; there are {', '.join(known)}")
    chosen = [
        case
        for case in cases
        if case.small == small
        and (not ops or case.op in ops)
        and all(str(case.shape.get(key)) == value for key, value in where.items())
    ]
    if not chosen:
        raise ValueError("no case is left; --list shows all of them")
    return chosen


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """A time that another library took for a shape.

    Attributes:
      name: The library and its kernel.
      us: Microseconds.
    """

    name: str
    us: float


def read_peers(path: pathlib.Path) -> list[tuple[str, dict[str, Any], Peer]]:
    """Read a record of other libraries' times: op, shape and peer of each line.

    Args:
      path: A record in the form of `scripts.benchmarking`.

    Raises:
      ValueError: The file is not such a record.
    """
    try:
        record = json.loads(path.read_text())
        return [
            (
                result["op"],
                result["shape"],
                Peer(name=result["implementation"], us=float(result["us"])),
            )
            for result in record["results"]
            if result["us"] is not None
        ]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a benchmark record: {error!r}") from error


def best_peer(
    peers: list[tuple[str, dict[str, Any], Peer]], op: str, shape: Mapping[str, Any]
) -> Peer | None:
    """Return the fastest peer of a shape: every key that both know must agree."""
    matches = [
        peer
        for peer_op, peer_shape, peer in peers
        if peer_op == op
        and peer_shape.keys() <= shape.keys()
        and all(shape[key] == value for key, value in peer_shape.items())
    ]
    return min(matches, key=lambda peer: peer.us, default=None)
