"""Times the kernels at the shapes that count, against ceilings and other kernels.

A result that is not right is not timed. Every step touches more bytes than the L2
cache holds, and the card's ceilings are measured in the same run.

    python scripts/bench_kernels.py --json docs/benchmarks/kernels_h200.json
    python scripts/bench_kernels.py --op mla_decode --where batch=64 --against xla
    python scripts/bench_kernels.py --against docs/benchmarks/peers_h200.json
    python scripts/bench_kernels.py --small     # tiny shapes, on any machine

It ends with a table and one JSON line. The exit code is 1 if a result was wrong.
"""

import argparse
import pathlib
import sys
from typing import get_args

import jax
from tqdm import tqdm

from scripts import benchmarking
from scripts.benchmarking import GIB, Result
from scripts.kernel_benches import roofline
from scripts.kernel_benches.case import BenchCase, WrongResultError, measure
from scripts.kernel_benches.registry import (
    all_cases,
    best_peer,
    read_peers,
    select,
)
from ukv.errors import UnsupportedError
from ukv.implementation import Implementation


def _assignment(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", action="append", default=[], help="only this op")
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        type=_assignment,
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
    parser.add_argument(
        "--against",
        metavar="NAME|PATH",
        help="compare with another implementation or a record of other libraries",
    )
    parser.add_argument("--list", action="store_true", help="print the cases, run none")
    parser.add_argument("--small", action="store_true", help="tiny shapes, any device")
    parser.add_argument(
        "--seconds", type=float, default=0.2, help="time to measure a case for"
    )
    parser.add_argument("--json", type=pathlib.Path, help="write the record here")
    parser.add_argument("--plot", type=pathlib.Path, help="draw the roofline here")
    parser.add_argument("--commit", help="commit to record when git is not at hand")
    return parser


def _run(
    work: list[tuple[BenchCase, Implementation]], seconds: float
) -> tuple[list[tuple[BenchCase, Result]], list[str]]:
    """Return the measured cases, and a line for each that could not be."""
    measured, problems = [], []
    for case, implementation in tqdm(work, desc="cases", unit="case"):
        try:
            measured.append((case, measure(case, implementation, seconds=seconds)))
        except (WrongResultError, UnsupportedError) as error:
            problems.append(str(error))
        except jax.errors.JaxRuntimeError as error:
            # Out of memory, or a kernel that this card cannot run.
            problems.append(f"{case} on {implementation}: {error}")
    return measured, problems


def _comparison(measured: list[tuple[BenchCase, Result]], against: str) -> list[str]:
    """Return a line for each case that ``against`` has a time for."""
    is_implementation = against in get_args(Implementation)
    peers = [] if is_implementation else read_peers(pathlib.Path(against))
    times = {(str(case), result.implementation): result.us for case, result in measured}
    lines = []
    for case, result in measured:
        if is_implementation:
            name, other = against, times.get((str(case), against))
        else:
            peer = best_peer(peers, case.op, case.shape)
            name, other = (peer.name, peer.us) if peer else ("", None)
        if other is None or result.us is None or name == result.implementation:
            continue
        lines.append(
            f"{other / result.us:6.2f}x  {result.us:10,.1f} us  {case} "
            f"[{result.implementation}] against {other:,.1f} us [{name}]"
        )
    return lines


def main() -> int:
    """Run the benchmark and return the exit code."""
    parser = _parser()
    arguments = parser.parse_args()
    try:
        cases = select(
            all_cases(),
            ops=arguments.op,
            where=dict(arguments.where),
            small=arguments.small,
        )
        if arguments.against and arguments.against not in get_args(Implementation):
            read_peers(pathlib.Path(arguments.against))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if arguments.list:
        for case in cases:
            print(f"{case}  [{', '.join(case.implementations)}]")
        return 0
    wanted = set(arguments.implementation)
    if arguments.against in get_args(Implementation) and wanted:
        wanted.add(arguments.against)
    work = [
        (case, implementation)
        for case in cases
        for implementation in case.implementations
        if not wanted or implementation in wanted
    ]
    facts = benchmarking.device_facts(arguments.commit)
    limits = benchmarking.ceilings(
        num_bytes=GIB // 64 if arguments.small else 4 * GIB,
        size=256 if arguments.small else 8192,
    )
    measured, problems = _run(work, arguments.seconds)
    if arguments.against:
        for line in _comparison(measured, arguments.against):
            print(line)
    if arguments.plot is not None:
        roofline.draw(
            [result for _, result in measured],
            [case.flops / case.moved_bytes for case, _ in measured],
            limits,
            facts["device"],
            arguments.plot,
        )
    results = [result for _, result in measured]
    benchmarking.finish(facts, limits, results, arguments.json)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
