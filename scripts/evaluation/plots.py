"""Drawings of a comparison, as SVG to be put into a page."""

import io
from collections.abc import Callable

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from scripts.evaluation.comparison import Comparison, PoolResult

MIB = 2**20
COLORS = {"unified": "#1f6f8b", "static": "#c8553d"}
MOST_POINTS = 600


def _svg(figure: Figure, name: str) -> str:
    """Return a figure as an element; ``name`` keeps its ids apart from others'."""
    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    whole = text.getvalue()
    return whole[whole.index("<svg") :]


def _thinned(result: PoolResult) -> list:
    """Return at most ``MOST_POINTS`` steps, evenly spread."""
    steps = result.trace
    places = np.linspace(0, len(steps) - 1, min(len(steps), MOST_POINTS))
    return [steps[int(place)] for place in places]


def draw_accuracy(comparison: Comparison) -> str:
    """Draw each pool's accuracy with its interval."""
    figure = Figure(figsize=(4.2, 2.8), layout="constrained")
    axes = figure.add_subplot()
    for place, result in enumerate(comparison.results):
        low, high = result.interval
        axes.errorbar(
            place,
            result.accuracy,
            yerr=[[result.accuracy - low], [high - result.accuracy]],
            fmt="o",
            capsize=6,
            color=COLORS[result.kind],
        )
    axes.set_xticks(
        range(len(comparison.results)), [result.kind for result in comparison.results]
    )
    axes.set_xlim(-0.6, len(comparison.results) - 0.4)
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("accuracy")
    axes.grid(axis="y", alpha=0.3)
    return _svg(figure, "accuracy")


def draw_concurrency(comparison: Comparison) -> str:
    """Draw how many requests ran at once, over the run."""
    figure = Figure(figsize=(7.2, 2.8), layout="constrained")
    axes = figure.add_subplot()
    for result in comparison.results:
        steps = _thinned(result)
        axes.step(
            [step["seconds"] for step in steps],
            [step["num_running"] for step in steps],
            where="post",
            color=COLORS[result.kind],
            label=result.kind,
        )
    axes.set_xlabel("seconds")
    axes.set_ylabel("requests at once")
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.grid(alpha=0.3)
    return _svg(figure, "concurrency")


def draw_memory(comparison: Comparison) -> str:
    """Draw the bytes in use by kind of memory, over each run."""
    results = [result for result in comparison.results if result.trace]
    figure = Figure(figsize=(4.4 * max(len(results), 1), 3.0), layout="constrained")
    for place, result in enumerate(results):
        axes = figure.add_subplot(1, len(results), place + 1)
        steps = _thinned(result)
        names = list(steps[0]["used_bytes"])
        axes.stackplot(
            [step["seconds"] for step in steps],
            [[step["used_bytes"][name] / MIB for step in steps] for name in names],
            labels=names,
            alpha=0.85,
        )
        axes.axhline(
            result.pool_bytes / MIB, color="black", linestyle="--", linewidth=1
        )
        axes.set_title(f"{result.kind} (dashed: the pool)", fontsize=10)
        axes.set_xlabel("seconds")
        axes.set_ylabel("MiB in use")
        axes.legend(loc="lower right", fontsize=8)
    return _svg(figure, "memory")


DRAWINGS: tuple[tuple[str, Callable[[Comparison], str]], ...] = (
    ("Accuracy, with Wilson's 95 % interval", draw_accuracy),
    ("Requests that run at once", draw_concurrency),
    ("Memory by kind, the prefix cache included", draw_memory),
)
"""Every drawing, under its heading."""
