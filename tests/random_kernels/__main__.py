"""Command line of the random cases: a line for each structure, then the sum."""

import argparse
import os
import sys

from tests.random_kernels.runner import (
    DRAW,
    Structure,
    all_structures,
    run_all,
    run_structure,
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Random cases of every kernel.")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--cases-of-each", type=int, help="of a structure")
    parser.add_argument("--structures", type=int, default=5, help="of each kernel")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--op", action="append", default=[], choices=list(DRAW))
    parser.add_argument(
        "--structure",
        action="append",
        default=[],
        type=Structure.named,
        metavar="OP-IMPLEMENTATION-INDEX",
        help="only this one, as it is printed",
    )
    parser.add_argument(
        "--seed", action="append", default=[], type=int, help="only these cases of each"
    )
    arguments = parser.parse_args()
    ops = arguments.op or list(DRAW)
    structures = arguments.structure or [
        s for s in all_structures(arguments.structures) if s.op in ops
    ]
    num_cases = arguments.cases
    if arguments.cases_of_each is not None:
        num_cases = arguments.cases_of_each * len(structures)
    if arguments.seed:
        reports = (run_structure(s, arguments.seed) for s in structures)
    else:
        reports = run_all(structures, num_cases, arguments.jobs)
    passed, failed = 0, 0
    for report in reports:
        passed, failed = passed + report.passed, failed + len(report.failures)
        sys.stdout.write(
            f"{report.structure}: {report.passed} passed, {len(report.failures)} "
            f"failed, {report.seconds:.1f} s ({report.facts})\n"
        )
        for seed, message in list(report.failures.items())[:2]:
            sys.stdout.write(f"  seed {seed}: {message}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{passed} passed, {failed} failed\n")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
