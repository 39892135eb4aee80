"""Runs random cases, many structures at a time in processes of their own."""

import concurrent.futures
import dataclasses
import multiprocessing
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import cast, get_args

import numpy as np

from tests.random_kernels import attention, copies, states
from ukv.implementation import SUPPORT, Implementation, OpCase, default_target

DRAW: dict[str, Callable] = {**attention.DRAW, **states.DRAW, **copies.DRAW}
MAX_LEN = 1200
MOST_DRAWS = 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Structure:
    """What a kernel is compiled for, by number.

    Attributes:
      op: Key of ``DRAW``, and of ``SUPPORT``.
      implementation: Who runs it.
      index: Which of the structures of this op.
      max_len: Longest row of attention.
    """

    op: str
    implementation: Implementation
    index: int
    max_len: int = MAX_LEN

    def __str__(self) -> str:
        return f"{self.op}-{self.implementation}-{self.index}"

    @classmethod
    def named(cls, name: str) -> "Structure":
        """The structure that prints as `name`; ValueError if none does."""
        match name.rsplit("-", 2):
            case [op, implementation, index] if (
                op in DRAW
                and implementation in get_args(Implementation)
                and index.isdecimal()
            ):
                known = cast("Implementation", implementation)
                return cls(op=op, implementation=known, index=int(index))
        raise ValueError(f"no structure is named {name!r}")

    def draw(self) -> tuple[OpCase, Callable[[int], None]]:
        """The facts of the structure, and what checks a case of it by its seed."""
        target = default_target()
        lines = [
            line
            for line in SUPPORT[self.op]
            if line.implementation == self.implementation
        ]
        name = zlib.crc32(f"{self.op} {self.implementation}".encode())
        for attempt in range(MOST_DRAWS):
            rng = np.random.default_rng([name, self.index, attempt])
            case, check = DRAW[self.op](
                rng, self.implementation, self.max_len, self.index
            )
            if any(line.refusal(case, target) is None for line in lines):
                return case, check
        raise LookupError(f"{self}: none of {MOST_DRAWS} structures is supported")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What came of the cases of a structure.

    Attributes:
      structure: Its name.
      facts: What it was.
      passed: Cases that passed.
      failures: Seeds of those that did not, and how.
      seconds: Time for all, compilation included.
    """

    structure: str
    facts: str
    passed: int
    failures: dict[int, str]
    seconds: float


def run_structure(structure: Structure, seeds: Sequence[int]) -> Report:
    """Run the cases of some seeds; a failure does not stop the others."""
    start = time.perf_counter()
    case, check = structure.draw()
    failures = {}
    for seed in seeds:
        try:
            check(seed)
        except AssertionError as error:
            failures[seed] = str(error)
    return Report(
        structure=str(structure),
        facts=str(case),
        passed=len(seeds) - len(failures),
        failures=failures,
        seconds=time.perf_counter() - start,
    )


def kernels_of(op: str) -> list[Implementation]:
    """Return the kernels of an op that the default device may run."""
    target = default_target()
    return sorted(
        {
            line.implementation
            for line in SUPPORT[op]
            if line.implementation != "xla"
            and (line.platforms is None or target.platform in line.platforms)
            and (line.min_capability or 0) <= target.capability
            and target.capability <= (line.max_capability or 1000)
        }
    )


def all_structures(num_of_each: int) -> list[Structure]:
    """Return structures of every kernel that the default device may run."""
    return [
        Structure(op=op, implementation=implementation, index=index)
        for op in DRAW
        for implementation in kernels_of(op)
        for index in range(num_of_each)
    ]


def run_all(
    structures: Sequence[Structure], num_cases: int, num_processes: int
) -> Iterator[Report]:
    """Run as many cases, dealt over the structures, and yield reports as they come."""
    # The oracles are products in NumPy, and every process would take all cores.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    shares = np.array_split(np.arange(num_cases), len(structures))
    with concurrent.futures.ProcessPoolExecutor(
        num_processes, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        futures = [
            pool.submit(run_structure, structure, share.tolist())
            for structure, share in zip(structures, shares, strict=True)
        ]
        for future in concurrent.futures.as_completed(futures):
            yield future.result()
