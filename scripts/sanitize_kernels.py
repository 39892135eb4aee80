"""Cases of every kernel under compute-sanitizer's memcheck, on a card.

Every case runs twice, each time in a process of its own: first plainly, which fills a
compilation cache, then under the tool, which loads what was compiled. XLA's compiler
is far too slow under it. Both are compared with the case's oracle.

    python scripts/sanitize_kernels.py                  # two structures of each kernel
    python scripts/sanitize_kernels.py --op mla_decode --out /tmp/memcheck

A line for each case, then the sum; the exit code is 1 unless all are clean.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

# The process that asks which kernels there are takes no memory from the others.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from tests.random_kernels.runner import DRAW, Structure, all_structures

ROOT = pathlib.Path(__file__).parent.parent
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) errors?")

ENVIRONMENT = {
    # An allocation for each array: in one large one, most stray accesses hit another.
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a case.

    Attributes:
      name: Of its structure.
      summary: What the tool or the case said last.
      is_clean: The case passed and the tool reported nothing.
      seconds: Under the tool.
    """

    name: str
    summary: str
    is_clean: bool
    seconds: float


def find_sanitizer() -> str:
    """Return the path of compute-sanitizer.

    Raises:
      FileNotFoundError: There is none.
    """
    for place in ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer"):
        found = shutil.which(place)
        if found:
            return found
    raise FileNotFoundError("compute-sanitizer comes with CUDA, and was not found")


def outcome(name: str, text: str, exit_code: int, seconds: float) -> Outcome:
    """Return what the output of a case under the tool says."""
    errors = SUMMARY.findall(text)
    has_passed = re.search(r"^[1-9]\d* passed, 0 failed$", text, re.MULTILINE)
    is_clean = bool(has_passed) and errors == ["0"] and exit_code == 0
    lines = [line for line in text.splitlines() if line.strip()]
    summary = f"ERROR SUMMARY: {errors[-1]} errors" if errors else "no summary"
    if not is_clean:
        summary += f"; exit code {exit_code}; {lines[-1] if lines else 'no output'}"
    return Outcome(name=name, summary=summary, is_clean=is_clean, seconds=seconds)


def run(name: str, sanitizer: str, cache: str, out: pathlib.Path) -> Outcome:
    """Run one case, plainly and then under the tool."""
    case = [sys.executable, "-u", "-m", "tests.random_kernels", "--jobs", "1"]
    case += ["--structure", name, "--seed", "0"]
    # What JAX asks the driver for on purpose and does not get is no error of a kernel.
    tool = [sanitizer, "--tool", "memcheck", "--report-api-errors", "no"]
    tool += ["--error-exitcode", "9"]
    environment = {**os.environ, **ENVIRONMENT, "JAX_COMPILATION_CACHE_DIR": cache}

    def output_of(command: Sequence[str], suffix: str) -> tuple[str, int]:
        path = out / f"{name}{suffix}.txt"
        with path.open("w") as file:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                check=False,
            )
        return path.read_text(errors="replace"), done.returncode

    text, exit_code = output_of(case, ".plain")
    if exit_code:
        return outcome(name, text, exit_code, 0)
    start = time.perf_counter()
    text, exit_code = output_of([*tool, *case], "")
    return outcome(name, text, exit_code, time.perf_counter() - start)


def main() -> int:
    """Run all cases and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", action="append", default=[], choices=list(DRAW))
    parser.add_argument("--structures", type=int, default=2, help="of each kernel")
    parser.add_argument(
        "--structure",
        action="append",
        default=[],
        type=Structure.named,
        metavar="OP-IMPLEMENTATION-INDEX",
        help="this one as well, as it is printed",
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)) // 2)
    parser.add_argument("--out", type=pathlib.Path, help="keep all output here")
    arguments = parser.parse_args()
    try:
        sanitizer = find_sanitizer()
    except FileNotFoundError as error:
        parser.error(str(error))
    structures = sorted(all_structures(arguments.structures), key=lambda s: s.index)
    structures = [s for s in structures if not arguments.op or s.op in arguments.op]
    names = list(dict.fromkeys(map(str, [*arguments.structure, *structures])))
    num_clean = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(max(1, arguments.jobs)) as pool,
    ):
        out = arguments.out or pathlib.Path(folder) / "out"
        out.mkdir(parents=True, exist_ok=True)
        futures = [
            pool.submit(run, name, sanitizer, f"{folder}/cache", out) for name in names
        ]
        for future in concurrent.futures.as_completed(futures):
            found = future.result()
            num_clean += found.is_clean
            print(f"{found.name}: {found.summary}, {found.seconds:.1f} s", flush=True)
    print(f"{num_clean} of {len(names)} are clean")
    return 0 if names and num_clean == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
