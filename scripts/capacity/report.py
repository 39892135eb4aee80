"""What the capacity benchmark says: a table, a record, a plot."""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure

from scripts import benchmarking
from scripts.capacity.comparison import GIB, SYSTEMS, Case
from scripts.capacity.geometry import Card

REFUSED = {"rotation": 90, "ha": "center", "va": "bottom", "fontsize": 6}
TIE = 0.02
"""Differences in throughput below this count as none."""


def print_cases(cases: list[Case]) -> None:
    """Print a table, and where the unified pool wins nothing."""
    for case in cases:
        print(
            f"\n{case.model}, {case.trace}: pool {case.pool_bytes / GIB:.2f} GiB "
            f"({case.pool_requests:.0f} mean requests), {case.rate:.2f} requests/s "
            f"(recorded: {case.recorded_rate:.2f}), "
            f"split best {case.share:.1%} / default {case.default_share:.1%}"
            + ("" if case.is_limit else "; the pool is NOT the limit")
        )
        print(
            f"  {'system':8} {'used':>6} {'peak':>6} {'held':>6} {'peak':>6} "
            f"{'rows':>7} {'peak':>5} {'req/s':>8} {'tok/s':>9} {'gain':>6} "
            f"{'retract':>7} {'refused':>7}"
        )
        for system in SYSTEMS:
            found = case.outcomes[system]
            print(
                f"  {system:8} {found.mean_used:6.1%} {found.peak_used:6.1%} "
                f"{found.mean_held:6.1%} {found.peak_held:6.1%} "
                f"{found.mean_concurrency:7.2f} {found.peak_concurrency:5} "
                f"{found.requests_per_second:8.3f} {found.tokens_per_second:9.1f} "
                f"{case.gain(system):6.3f} {found.num_retractions:7} "
                f"{found.num_refused:7}"
            )
    print(
        "\nused: visible tokens and states, of the pool; held: bound pages; rows: "
        "requests with pages.\nMeans are over the time in which somebody waits. gain: "
        "the unified pool's tokens/s over this system's;\nit goes with requests of the "
        "other system refused, if there are any."
    )
    print("\nWhat the unified pool does not win (tokens/s, within 2%, or lost):")
    for line in not_won(cases) or ["nothing"]:
        print(f"  {line}")


def not_won(cases: list[Case]) -> list[str]:
    """Return the comparisons that the unified pool ties or loses."""
    lines = []
    for case in cases:
        for system in SYSTEMS[1:]:
            found, gain = case.outcomes[system], case.gain(system)
            if gain < 1.0 + TIE:
                word = "ties with" if gain > 1.0 - TIE else "loses to"
                refused = (
                    f", which refuses {found.num_refused}" if found.num_refused else ""
                )
                lines.append(
                    f"{case.model}, {case.trace}: {word} {system} ({gain:.3f}){refused}"
                )
    return lines


def record_of(cases: list[Case], card: Card, arguments: argparse.Namespace) -> dict:
    """Return the record, in the form of the other benchmarks."""
    facts = benchmarking.device_facts(arguments.commit)
    facts["device"] = f"none: a simulation with the ceilings of {card.name}"
    words = ["python", "scripts/bench_capacity.py"]
    # Where the files lie on this machine is nobody's business.
    words += [pathlib.Path(w).name if "/" in w else w for w in sys.argv[1:]]
    facts["command"] = " ".join(words)
    results = []
    for case in cases:
        shape = {
            field.name: getattr(case, field.name)
            for field in dataclasses.fields(case)
            if field.name != "outcomes"
        }
        for system, found in case.outcomes.items():
            result = benchmarking.Result(
                op="capacity",
                implementation=system,
                shape=shape,
                us=1e6 * found.seconds / max(found.num_steps, 1),
            )
            results.append(
                {
                    **dataclasses.asdict(result),
                    **dataclasses.asdict(found),
                    "tokens_per_second": found.tokens_per_second,
                    "requests_per_second": found.requests_per_second,
                }
            )
    return {
        **facts,
        "ceilings": {
            "copy_gbps": card.copy_gbps,
            "matmul_tflops": card.matmul_tflops,
        },
        "cost_model": "us: mean step; a pass takes max(bytes / copy rate, products / "
        "bfloat16 rate); a move of pages twice their bytes, as many as there are holes",
        "options": {
            name: getattr(arguments, name)
            for name in ("requests", "seed", "page_size", "step_tokens", "decode_steps")
        },
        "not_won": not_won(cases),
        "results": _rounded(results),
    }


def _rounded(value: Any) -> Any:
    """Return the value with five digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def draw(cases: list[Case]) -> Figure:
    """Return bars for each model (rows) and trace: use, requests at once, tokens/s."""
    names = list(dict.fromkeys(case.model for case in cases))
    panels: tuple[tuple[str, Callable[[Case, str], float]], ...] = (
        (
            "pool in use (mean, %)",
            lambda case, system: 100 * case.outcomes[system].mean_used,
        ),
        (
            "requests at once / unified",
            lambda case, system: (
                case.outcomes[system].mean_concurrency
                / max(case.outcomes["unified"].mean_concurrency, 1e-9)
            ),
        ),
        (
            "tokens per second / unified",
            lambda case, system: 1 / max(case.gain(system), 1e-9),
        ),
    )
    most = max(sum(case.model == name for case in cases) for name in names)
    figure = Figure(
        figsize=(3 * max(2.2, 0.8 * most), 2.3 * len(names) + 1.2),
        layout="constrained",
    )
    grid = figure.subplots(len(names), len(panels), squeeze=False, sharex="row")
    width = 0.8 / len(SYSTEMS)
    for row, name in zip(list(grid), names, strict=True):
        mine = [case for case in cases if case.model == name]
        for axes, (title, value) in zip(row, panels, strict=True):
            for index, system in enumerate(SYSTEMS):
                axes.bar(
                    [x + (index - 1.5) * width for x in range(len(mine))],
                    [value(case, system) for case in mine],
                    width,
                    label=system,
                    color=f"C{index}",
                )
                for x, case in enumerate(mine):
                    if case.outcomes[system].num_refused and axes is row[-1]:
                        left = x + (index - 1.5) * width
                        axes.text(left, 0.02, "refuses some", **REFUSED)
            axes.set_xticks(range(len(mine)))
            axes.set_xticklabels(
                [case.trace.replace("_trace", "").replace("_", "\n") for case in mine],
                fontsize=7,
            )
            axes.tick_params(axis="y", labelsize=7)
            if name == names[0]:
                axes.set_title(title, fontsize=9)
            axes.grid(axis="y", alpha=0.3)
            axes.set_axisbelow(True)
        row[0].set_ylabel(name, fontsize=9)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(SYSTEMS))
    return figure
