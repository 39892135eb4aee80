"""The comparison as a table of text."""

from collections.abc import Callable, Sequence

from scripts.evaluation.comparison import Comparison, PoolResult

MIB = 2**20


def _accuracy(result: PoolResult) -> str:
    low, high = result.interval
    return f"{result.accuracy:.3f} ({low:.3f} ... {high:.3f})"


ROWS: Sequence[tuple[str, Callable[[PoolResult], str]]] = (
    ("accuracy (95 % interval)", _accuracy),
    ("pool, MiB", lambda r: f"{r.pool_bytes / MIB:,.2f}"),
    ("most bytes in use, MiB", lambda r: f"{r.counters.peak_bytes / MIB:,.2f}"),
    ("requests at once, most", lambda r: f"{r.counters.peak_running}"),
    ("requests at once, mean", lambda r: f"{r.mean_running:.2f}"),
    ("tokens per second", lambda r: f"{r.tokens_per_second:,.1f}"),
    ("steps", lambda r: f"{r.counters.steps:,}"),
    ("seconds", lambda r: f"{r.counters.seconds:,.1f}"),
    ("hit rate of the prefix cache", lambda r: f"{r.hit_rate:.1%}"),
    ("compactions", lambda r: f"{r.counters.compactions:,}"),
    ("retractions", lambda r: f"{r.counters.retractions:,}"),
)
"""What is compared: a name, and how a pool's value is written."""


def verdict(comparison: Comparison) -> str:
    """Return in a sentence whether the pools agree."""
    total = len(comparison.questions)
    if len(comparison.results) < 2:
        return f"{total} questions, one pool"
    numbers, texts = (len(comparison.differing(part)) for part in ("found", "text"))
    if not numbers and not texts:
        return f"both pools gave the same text on all {total} questions"
    return (
        f"of {total} questions the pools differ on {numbers} answers and {texts} texts"
    )


def text_table(comparison: Comparison) -> str:
    """Return the table, and the sentence under it."""
    kinds = [result.kind for result in comparison.results]
    lines = [f"{'':36}" + "".join(f"{kind:>26}" for kind in kinds)]
    for name, write in ROWS:
        values = "".join(f"{write(result):>26}" for result in comparison.results)
        lines.append(f"{name:36}{values}")
    return "\n".join([*lines, "", verdict(comparison)])
