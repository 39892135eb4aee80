"""Puts a record beside the times of other libraries and beside targets, as tables."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.benchmarking import Result

TARGET = "target"
"""Implementation of the lines of a record that say what is wanted."""


HEADER = (
    "op",
    "shape",
    "implementation",
    "us",
    "of ceiling",
    "error",
    "best peer",
    "peer / ours",
    "target",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a record.

    Attributes:
      op: What ran.
      name: The library and its kernel, or ``TARGET``.
      shape: The case; of a peer or a target, what must be equal.
      us: Microseconds; of a target, at most. None if not said.
      gbps: Gigabytes per second.
      tflops: Teraflops; of a target, at least.
      of_ceiling: Part of a ceiling; of a target, at least.
      error: Largest error against a reference.
    """

    op: str
    name: str
    shape: Mapping[str, Any]
    us: float | None
    gbps: float | None = None
    tflops: float | None = None
    of_ceiling: float | None = None
    error: float | None = None

    @classmethod
    def of_result(cls, result: Result) -> "Line":
        """Return the line of a result."""
        fields = dataclasses.asdict(result)
        return cls(name=fields.pop("implementation"), **_known(fields))


def _known(fields: Mapping[str, Any]) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(Line) if field.name != "name"]
    return {name: fields[name] for name in names if name in fields}


def read_lines(path: pathlib.Path) -> list[Line]:
    """Read the lines of a record.

    Args:
      path: A record in the form of `scripts.benchmarking`.

    Raises:
      ValueError: The file is not such a record.
    """
    try:
        record = json.loads(path.read_text())
        return [
            Line(name=result["implementation"], **_known(result))
            for result in record["results"]
        ]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a benchmark record: {error!r}") from error


def of_shape(lines: Sequence[Line], op: str, shape: Mapping[str, Any]) -> list[Line]:
    """Return the lines of others for a shape: every key that they name must agree."""
    return [
        line
        for line in lines
        if line.op == op
        and line.shape.keys() <= shape.keys()
        and all(shape[key] == value for key, value in line.shape.items())
    ]


def best_peer(lines: Sequence[Line], op: str, shape: Mapping[str, Any]) -> Line | None:
    """Return the fastest library of a shape, or None."""
    timed = [
        line
        for line in of_shape(lines, op, shape)
        if line.name != TARGET and line.us is not None
    ]
    return min(timed, key=lambda line: line.us or 0.0, default=None)


def verdict(lines: Sequence[Line], mine: Line) -> str:
    """Return what a target wants and whether it is reached; "" without a target."""
    said = []
    for target in of_shape(lines, mine.op, mine.shape):
        if target.name != TARGET:
            continue
        for field, sign, unit in (
            ("us", 1, " us"),
            ("tflops", -1, " TFLOP/s"),
            ("of_ceiling", -1, ""),
        ):
            wanted, found = getattr(target, field), getattr(mine, field)
            if wanted is None or found is None:
                continue
            is_reached = sign * found <= sign * wanted
            number = f"{wanted:.0%}" if field == "of_ceiling" else f"{wanted:g}{unit}"
            bound = "<=" if sign > 0 else ">="
            said.append(f"{bound} {number}: {'yes' if is_reached else 'no'}")
    return ", ".join(said)


def rows(mine: Sequence[Line], others: Sequence[Line]) -> list[tuple[str, ...]]:
    """Return a header and a line of text cells for each line of a record."""
    table = [HEADER]
    for line in mine:
        if line.us is None:
            continue
        peer = best_peer(others, line.op, line.shape)
        of_peer = ("", "")
        if peer is not None and peer.us is not None:
            of_peer = f"{peer.us:g} us, {peer.name}", f"{peer.us / line.us:.2f}"
        table.append(
            (
                line.op,
                " ".join(f"{key}={value}" for key, value in line.shape.items()),
                line.name,
                f"{line.us:,.1f}" if line.us < 1000 else f"{line.us:,.0f}",
                "" if line.of_ceiling is None else f"{line.of_ceiling:.1%}",
                "" if line.error is None else f"{line.error:.1e}",
                *of_peer,
                verdict(others, line),
            )
        )
    return table


def as_text(table: Sequence[tuple[str, ...]]) -> str:
    """Return a table in columns."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in table
    )


def as_markdown(table: Sequence[tuple[str, ...]]) -> str:
    """Return a table for a page of the documentation."""
    header, *body = table
    lines = [header, ("---",) * len(header), *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
