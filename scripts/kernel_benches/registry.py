"""All cases, and a choice of them."""

import argparse
import importlib
from collections.abc import Mapping
from typing import get_args

from scripts.kernel_benches.case import BenchCase
from ukv.implementation import Implementation

MODULES = ("gqa", "memory", "mla", "mla_extend", "recurrent", "mamba2")
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


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose cases, and who runs them."""
    parser.add_argument("--op", action="append", default=[], help="only this op")
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        type=assignment,
        metavar="KEY=VALUE",
        help="only cases whose shape has this value, such as batch=64",
    )
    parser.add_argument(
        "--implementation",
        action="append",
        default=[],
        choices=get_args(Implementation),
        help="only this implementation; all that a case names if left out",
    )


def assignment(text: str) -> tuple[str, str]:
    """Return key and value of an argument such as ``batch=64``."""
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value
