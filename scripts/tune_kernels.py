"""Measures kernel configurations and keeps the best of each shape, with its evidence.

Nothing else writes the table, and nothing is tuned while a model runs. A configuration
whose result is wrong is thrown out; the default stays unless another is faster by more
than the noise, twice.

    python scripts/tune_kernels.py --op gqa_decode --where batch=64
    python scripts/tune_kernels.py --dry-run    # measure and print, write nothing
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
from tqdm import tqdm

from pallas_kernels.tuning import ASKED_FOR, tuned_path
from scripts import benchmarking
from scripts.benchmarking import Result
from scripts.kernel_benches.case import (
    BenchCase,
    Compiled,
    WrongResultError,
    measure,
)
from scripts.kernel_benches.precompile import (
    Job,
    RefusedError,
    compiled_programs,
    num_cores,
)
from scripts.kernel_benches.registry import add_choice, all_cases, select
from ukv.implementation import Implementation

LEAST_GAIN = 0.02
"""A configuration must be faster by this share, or the default stays."""

NOT_IN_KEY = (
    "batch",
    "context",
    "tokens",
    "rows",
    "decode_rows",
    "decode_context",
)
"""Shape keys that do not change the kernel; the batch is kept beside the key."""


def key_of(case: BenchCase) -> dict[str, Any]:
    """Return the key of a case in the table, the one that its op asks for."""
    return {k: v for k, v in case.shape.items() if k not in NOT_IN_KEY}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidates:
    """The default and all other configurations of a case, ready to be measured.

    Attributes:
      case: The case.
      implementation: Who runs it.
      programs: For the default and then for each of the case's configurations, what
        gives its compiled program.
    """

    case: BenchCase
    implementation: Implementation
    programs: Sequence[Callable[[], Compiled]]

    def measured(self, place: int) -> Result | None:
        """Return the result of one configuration, or None if it is no good."""
        try:
            return measure(
                self.case, self.implementation, compiled=self.programs[place]()
            )
        except (WrongResultError, RefusedError, jax.errors.JaxRuntimeError) as error:
            # A configuration may ask for more shared memory than there is.
            print(str(error).splitlines()[0], file=sys.stderr)
        return None


def tune(candidates: Candidates, facts: dict) -> dict[str, Any] | None:
    """Return the table's entry for a case, or None if nothing ran right.

    Its configuration is empty where the default is best. Another one must be faster by
    ``LEAST_GAIN`` twice: of two times of the default the shorter counts, and of its own
    the longer.

    Args:
      candidates: The case, and the programs of its configurations.
      facts: What the evidence says of device, versions and commit.
    """
    case, implementation = candidates.case, candidates.implementation
    default = candidates.measured(0)
    configs = case.configs[implementation]
    others = [
        (result, place)
        for place in range(1, 1 + len(configs))
        if (result := candidates.measured(place)) is not None
    ]
    result, place = min(others, key=lambda found: found[0].us, default=(None, 0))
    if default is not None and result is not None and _is_faster(result, default):
        default = _extreme(min, default, candidates.measured(0))
        result = _extreme(max, result, candidates.measured(place))
    if default is not None and (result is None or not _is_faster(result, default)):
        result, place = default, 0
    if result is None:
        return None
    return {
        "op": case.op,
        "implementation": implementation,
        "key": key_of(case),
        "batch": case.shape.get("batch", case.shape.get("rows", 1)),
        "config": dataclasses.asdict(configs[place - 1]) if place else {},
        "evidence": {
            "shape": dict(case.shape),
            "us": result.us,
            "default_us": default and default.us,
            "error": result.error,
            "tried": len(configs),
            **{k: facts[k] for k in ("driver", "versions", "commit", "command")},
        },
    }


def _is_faster(result: Result, default: Result) -> bool:
    return result.us < default.us * (1 - LEAST_GAIN)


def _extreme(choose: Callable, first: Result, second: Result | None) -> Result:
    """Return the one of two results of a program whose time is chosen."""
    return choose((first, second or first), key=lambda result: result.us)


def worth_keeping(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of kernels that some batch runs better without the default.

    A call takes the entry of the nearest batch, so where an entry is kept, those that
    say that the default is best at other batches must be kept as well. A call does not
    look at the context: if two cases differ in nothing else and want different
    configurations, the default stays.
    """

    def name(entry: dict[str, Any], *more: str) -> str:
        keys = ("op", "implementation", "key", *more)
        return json.dumps([entry[key] for key in keys], sort_keys=True)

    of_call: dict[str, dict[str, Any]] = {}
    for entry in found:
        other = of_call.setdefault(name(entry, "batch"), entry)
        if other["config"] != entry["config"]:
            of_call[name(entry, "batch")] = entry | {"config": {}}
    gains = {name(entry) for entry in of_call.values() if entry["config"]}
    return [entry for entry in of_call.values() if name(entry) in gains]


def asked_for(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries that a kernel would read, and say which ops have none."""
    pairs = {(entry["op"], entry["implementation"]) for entry in found}
    for op, implementation in sorted(pairs - ASKED_FOR):
        print(
            f"not written: {op} on {implementation} reads no table; what is better for "
            "it is a change of its default",
            file=sys.stderr,
        )
    return [e for e in found if (e["op"], e["implementation"]) in ASKED_FOR]


def merge(path: pathlib.Path, device: str, found: list[dict[str, Any]]) -> None:
    """Put entries into a device's table, in place of those of the same shape."""
    table = {"device": device, "entries": []}
    if path.is_file():
        table = json.loads(path.read_text())

    def name(entry: dict[str, Any]) -> str:
        named = (entry["op"], entry["implementation"], entry["key"], entry["batch"])
        return json.dumps(named, sort_keys=True)

    entries = {name(entry): entry for entry in [*table["entries"], *found]}
    table["entries"] = [entries[key] for key in sorted(entries)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n")


def main() -> None:
    """Tune, print what was found, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_choice(parser)
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    parser.add_argument("--out", type=pathlib.Path, help="table to write instead")
    parser.add_argument("--jobs", type=int, help="processes that compile")
    parser.add_argument("--commit", help="commit to record when git is not at hand")
    arguments = parser.parse_args()
    try:
        cases = select(
            all_cases(),
            ops=arguments.op,
            where=dict(arguments.where),
            small=arguments.small,
        )
    except ValueError as error:
        parser.error(str(error))
    work = [
        (case, name)
        for case in cases
        for name in case.configs
        if not arguments.implementation or name in arguments.implementation
    ]
    if not work:
        parser.error("none of these cases has configurations to try")
    jobs = [
        Job(case=case, implementation=name, config=config)
        for case, name in work
        for config in (None, *case.configs[name])
    ]
    num_processes = arguments.jobs or (1 if arguments.small else num_cores())
    programs = iter(compiled_programs(jobs, num_processes))
    facts = benchmarking.device_facts(arguments.commit)
    found = []
    for case, name in tqdm(work, desc="cases", unit="case"):
        of_case = tuple(itertools.islice(programs, 1 + len(case.configs[name])))
        entry = tune(
            Candidates(case=case, implementation=name, programs=of_case), facts
        )
        if entry is not None:
            found.append(entry)
            print(json.dumps(entry), flush=True)
    gains = sum(bool(entry["config"]) for entry in found)
    print(f"{gains} of {len(work)} are better off without the default")
    kept = asked_for(worth_keeping(found))
    if kept and not arguments.dry_run:
        path = arguments.out or tuned_path(facts["device"])
        merge(path, facts["device"], kept)


if __name__ == "__main__":
    main()
