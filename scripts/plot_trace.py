"""Draws what an engine did: memory, batch size, prefix hits, retractions, by step.

    python scripts/plot_trace.py trace.jsonl
    python scripts/plot_trace.py trace.jsonl --png run.png --by-time

TRACE is the file that ``ukv.Engine(..., trace_path=TRACE)`` wrote.
"""

import argparse
import json
import pathlib
import sys
from typing import Any

from matplotlib.figure import Figure

MIB = 2**20


def parse_arguments() -> argparse.Namespace:
    """Return the options, or explain and exit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", metavar="TRACE", type=pathlib.Path)
    parser.add_argument(
        "--png",
        type=pathlib.Path,
        metavar="PATH",
        help="where to save the plot; default: TRACE with the suffix .png",
    )
    parser.add_argument(
        "--by-time", action="store_true", help="draw over seconds, not steps"
    )
    return parser.parse_args()


def read_trace(path: pathlib.Path) -> list[dict[str, Any]]:
    """Return the steps of a trace.

    Raises:
      ValueError: A line is no JSON, or there is none.
    """
    steps = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            steps.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not steps:
        raise ValueError(f"{path} has no steps")
    return steps


def hit_rate(step: dict[str, Any]) -> float:
    """Return which part of the tokens of requests was cached, up to a step."""
    return step["prefix_hit_tokens"] / max(step["prefix_lookup_tokens"], 1)


def draw(steps: list[dict[str, Any]], *, by_time: bool) -> Figure:
    """Return the plot of a trace.

    Args:
      steps: Its steps.
      by_time: Whether the axis is seconds.
    """
    x = [step["seconds"] if by_time else step["num_steps"] for step in steps]
    figure = Figure(figsize=(10, 8), layout="constrained")
    memory, batch, hits, events = figure.subplots(
        4, 1, sharex=True, height_ratios=(3, 2, 1, 1)
    )
    kinds = list(steps[0]["used_bytes"])
    used = [[step["used_bytes"][kind] / MIB for step in steps] for kind in kinds]
    memory.stackplot(x, used, labels=kinds, step="post")
    memory.axhline(steps[0]["pool_bytes"] / MIB, color="black", linewidth=1)
    cached = [sum(step["cached_bytes"].values()) / MIB for step in steps]
    memory.step(x, cached, label="cached only", where="post", color="black", ls=":")
    memory.set_ylabel("MiB in use")
    memory.legend(loc="upper left")
    for name, label in (("rows", "in the step"), ("num_waiting", "waiting")):
        batch.step(x, [step[name] for step in steps], label=label, where="post")
    batch.set_ylabel("requests")
    batch.legend(loc="upper left")
    rates = [hit_rate(step) for step in steps]
    hits.step(x, rates, label="tokens found in the cache", where="post")
    hits.set_ylim(0, 1)
    hits.set_ylabel("hit rate")
    hits.legend(loc="upper left")
    for name, label in (("num_retractions", "retractions"), ("num_moves", "moves")):
        events.step(x, [step[name] for step in steps], label=label, where="post")
    events.set_ylabel("so far")
    events.legend(loc="upper left")
    events.set_xlabel("seconds" if by_time else "step")
    return figure


def main() -> int:
    """Draw the trace and say what it shows."""
    arguments = parse_arguments()
    try:
        steps = read_trace(arguments.trace)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    path = arguments.png or arguments.trace.with_suffix(".png")
    draw(steps, by_time=arguments.by_time).savefig(path, dpi=120)
    last = steps[-1]
    fullest = max(sum(step["used_bytes"].values()) for step in steps)
    print(
        f"{last['num_steps']} steps, {last['seconds']:.1f} s, "
        f"at most {fullest / last['pool_bytes']:.0%} of the pool in use, "
        f"{hit_rate(last):.0%} of the tokens found in the prefix cache, "
        f"{last['num_retractions']} retractions, {last['num_moves']} moves: {path}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
