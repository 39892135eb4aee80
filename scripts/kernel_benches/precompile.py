"""Compiles the programs of many cases in as many processes as there are cores.

Tracing and Triton's compiler keep a process to one core. What a process compiles it
hands back as bytes, which the process that measures loads when it needs them; by then
the others are gone, and nothing else runs.
"""

import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import serialize_executable
from tqdm import tqdm

from scripts.kernel_benches.case import (
    BenchCase,
    Compiled,
    Program,
    compile_program,
    compilers,
)
from ukv.errors import UnsupportedError
from ukv.implementation import Implementation

REFUSALS = (UnsupportedError, ValueError, jax.errors.JaxRuntimeError)
"""What compiling raises; a configuration may ask for more memory than there is."""


def num_cores() -> int:
    """Return how many processes can compile at a time."""
    return len(os.sched_getaffinity(0))


class RefusedError(Exception):
    """A program cannot be compiled."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One program to compile.

    Attributes:
      case: Of the benchmark.
      implementation: Who runs it.
      config: Kernel configuration; None takes the tuned or default one.
    """

    case: BenchCase
    implementation: Implementation
    config: Any = None

    def __str__(self) -> str:
        """Return the job as one line."""
        return f"{self.case} on {self.implementation}"

    def program(self) -> Program:
        """Return what is to be compiled."""
        return self.case.program(self.implementation, self.config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """A compiled program as bytes, or why there is none.

    Attributes:
      job: What it was compiled for.
      functions: What `serialize_executable` makes of each function, by name.
      refusal: Why there is no program, or "".
    """

    job: Job
    functions: Mapping[str, tuple]
    refusal: str = ""

    def load(self) -> Compiled:
        """Return the program on this process's device.

        Raises:
          RefusedError: There is none.
        """
        if self.refusal:
            raise RefusedError(self.refusal)
        loaded = {
            name: serialize_executable.deserialize_and_load(*function)
            for name, function in self.functions.items()
        }
        program = self.job.program()
        calls, touched_bytes = program.calls, program.touched_bytes
        return Compiled(**loaded, calls=calls, touched_bytes=touched_bytes)


def _pack(job: Job) -> tuple[dict[str, tuple], str]:
    """Return the compiled functions of a program as bytes, or why there are none."""
    try:
        functions = {
            name: serialize_executable.serialize(compile_())
            for name, compile_ in compilers(job.program()).items()
        }
    except REFUSALS as error:
        return {}, _refusal(job, error)
    return functions, ""


def compiled_programs(
    jobs: Sequence[Job], num_processes: int
) -> list[Callable[[], Compiled]]:
    """Return what gives each program when it is called, and raises RefusedError.

    Args:
      jobs: What to compile.
      num_processes: Compile all of it now, in this many processes. With 1 each is
        compiled here, when it is called for.
    """
    if num_processes > 1:
        return [packed.load for packed in pack_programs(jobs, num_processes)]
    return [functools.partial(_compiled_here, job) for job in jobs]


def _compiled_here(job: Job) -> Compiled:
    try:
        return compile_program(job.program())
    except REFUSALS as error:
        raise RefusedError(_refusal(job, error)) from error


def _refusal(job: Job, error: Exception) -> str:
    return f"{job}: {type(error).__name__}: {str(error).splitlines()[0]}"


def pack_programs(jobs: Sequence[Job], num_processes: int) -> list[Packed]:
    """Compile programs in processes of their own, with a bar of progress.

    Args:
      jobs: What to compile.
      num_processes: How many at a time.

    Returns:
      A program for each job, in order.
    """
    # Each process would take most of the device's memory for itself.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with (
        concurrent.futures.ProcessPoolExecutor(
            num_processes, mp_context=multiprocessing.get_context("spawn")
        ) as pool,
        tqdm(total=len(jobs), desc="compiled", unit="program") as bar,
    ):
        futures = [pool.submit(_pack, job) for job in jobs]
        for _ in concurrent.futures.as_completed(futures):
            bar.update()
    return [
        Packed(job=job, functions=functions, refusal=refusal)
        for job, (functions, refusal) in zip(
            jobs, (future.result() for future in futures), strict=True
        )
    ]
