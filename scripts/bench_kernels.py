r"""Times the kernels at the shapes that count, against ceilings and other kernels.

All cases are compiled first, in as many processes as there are cores, and then measured
one after the other. A result that is not right is not timed. Every step touches more
bytes than the L2 cache holds, and the card's ceilings are measured in the same run.

    python scripts/bench_kernels.py --json docs/benchmarks/kernels_h200.json
    python scripts/bench_kernels.py --op mla_decode --where batch=64 --against xla
    python scripts/bench_kernels.py --against docs/benchmarks/peers_h200.json \
        --against docs/benchmarks/targets_h200.json
    python scripts/bench_kernels.py --small     # tiny shapes, on any machine

It ends with a table and one JSON line. The exit code is 1 if a result was wrong.
"""

import argparse
import dataclasses
import importlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import get_args

import jax
from tqdm import tqdm

from scripts import benchmarking
from scripts.benchmarking import GIB, Result
from scripts.kernel_benches.case import Compiled, WrongResultError, measure
from scripts.kernel_benches.comparison import (
    TARGET,
    Line,
    as_text,
    of_shape,
    read_lines,
    rows,
)
from scripts.kernel_benches.precompile import (
    Job,
    RefusedError,
    compiled_programs,
    num_cores,
)
from scripts.kernel_benches.registry import add_choice, all_cases, select
from ukv.implementation import Implementation


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_choice(parser)
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="NAME|PATH",
        help="another implementation, or a record of other libraries or of targets",
    )
    parser.add_argument(
        "--jobs", type=int, help="processes that compile; as many as cores if left out"
    )
    parser.add_argument("--list", action="store_true", help="print the cases, run none")
    parser.add_argument("--small", action="store_true", help="tiny shapes, any device")
    parser.add_argument(
        "--seconds", type=float, default=0.12, help="time to measure a case for"
    )
    parser.add_argument(
        "--json", type=pathlib.Path, help="write the record here, as far as it goes"
    )
    parser.add_argument("--plot", type=pathlib.Path, help="draw the roofline here")
    parser.add_argument("--commit", help="commit to record when git is not at hand")
    return parser


def _measured(
    jobs: list[Job],
    programs: list[Callable[[], Compiled]],
    ceilings: dict,
    seconds: float,
) -> Iterator[Result | str]:
    """Yield a result for each case, or a line that says why there is none."""
    for job, program in tqdm(
        zip(jobs, programs, strict=True), "measured", len(jobs), unit="case"
    ):
        try:
            compiled = program()
            result = measure(
                job.case, job.implementation, compiled=compiled, seconds=seconds
            )
        except (WrongResultError, RefusedError) as error:
            yield str(error)
        except jax.errors.JaxRuntimeError as error:
            # Out of memory, or a kernel that this card cannot run.
            yield f"{job}: {error}"
        else:
            share = round(job.case.share(result.us, ceilings), 4)
            yield dataclasses.replace(result, of_ceiling=share)


def _targets_first(jobs: list[Job], others: list[Line]) -> list[Job]:
    """Return the same jobs; a run that is cut short has what matters most."""
    return sorted(
        jobs,
        key=lambda job: all(
            line.name != TARGET
            for line in of_shape(others, job.case.op, job.case.shape)
        ),
    )


def main() -> int:
    """Run the benchmark and return the exit code."""
    parser = _parser()
    arguments = parser.parse_args()
    names = get_args(Implementation)
    rivals = [name for name in arguments.against if name in names]
    try:
        cases = select(
            all_cases(),
            ops=arguments.op,
            where=dict(arguments.where),
            small=arguments.small,
        )
        others = [
            line
            for path in arguments.against
            if path not in names
            for line in read_lines(pathlib.Path(path))
        ]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if arguments.list:
        for case in cases:
            print(f"{case}  [{', '.join(case.implementations)}]")
        return 0
    wanted = set(arguments.implementation)
    if wanted:
        wanted.update(rivals)
    jobs = [
        Job(case=case, implementation=implementation)
        for case in cases
        for implementation in case.implementations
        if not wanted or implementation in wanted
    ]
    small = arguments.small
    num_processes = arguments.jobs or (1 if small else min(len(jobs), num_cores()))
    jobs = _targets_first(jobs, others)
    programs = compiled_programs(jobs, num_processes)
    # The others are gone: from here on nothing else runs.
    facts = benchmarking.device_facts(arguments.commit)
    ceilings = benchmarking.ceilings(
        num_bytes=GIB // 64 if small else 4 * GIB, size=256 if small else 8192
    )
    results, problems = [], []
    for found in _measured(jobs, programs, ceilings, arguments.seconds):
        if isinstance(found, str):
            problems.append(found)
            continue
        results.append(found)
        if arguments.json is not None:
            benchmarking.write_record(facts, ceilings, results, arguments.json)
    mine = [Line.of_result(result) for result in results]
    others += [line for line in mine if line.name in rivals]
    print(as_text(rows([line for line in mine if line.name not in rivals], others)))
    if arguments.plot is not None:
        # Only a plot needs matplotlib.
        roofline = importlib.import_module("scripts.kernel_benches.roofline")
        roofline.draw(mine, ceilings, facts["device"], arguments.plot)
    print(json.dumps(benchmarking.record_of(facts, ceilings, results)))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
