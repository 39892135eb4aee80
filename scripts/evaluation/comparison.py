"""What two pools did with the same questions: numbers for a table, a page and JSON."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.evaluation.counters import Counters
from scripts.evaluation.pools import PoolKind
from scripts.evaluation.questions import Question
from scripts.evaluation.records import Answer

CONFIDENCE = 0.95


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return Wilson's score interval of a proportion, with 95 % confidence.

    Args:
      successes: At most ``trials``.
      trials: One or more.

    Source: E. B. Wilson, Probable inference, the law of succession, and statistical
    inference, J. Am. Stat. Assoc. 22 (1927).
    """
    z = statistics.NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    share = successes / trials
    middle = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    low, high = ((middle + sign * spread) / (1 + z * z / trials) for sign in (-1, 1))
    # At the ends one border is exact, and rounding must not move it inwards.
    return (low if successes else 0.0), (high if successes < trials else 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolResult:
    """What one pool did.

    Attributes:
      kind: Which pool.
      pool_bytes: Its size.
      answers: By index of the question.
      counters: Of all runs together.
      num_runs: How many runs it took; more than one if it was continued.
      trace: The steps of the last run: a line of the engine's trace each.
    """

    kind: PoolKind
    pool_bytes: int
    answers: Mapping[int, Answer]
    counters: Counters
    num_runs: int
    trace: Sequence[Mapping[str, Any]]

    @property
    def num_correct(self) -> int:
        """Right answers."""
        return sum(answer.is_correct for answer in self.answers.values())

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return self.num_correct / len(self.answers)

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's interval of the accuracy."""
        return wilson_interval(self.num_correct, len(self.answers))

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second."""
        return self.counters.tokens / max(self.counters.seconds, 1e-9)

    @property
    def mean_running(self) -> float:
        """Running requests, on average over the steps."""
        return self.counters.running / max(self.counters.steps, 1)

    @property
    def hit_rate(self) -> float:
        """Share of the tokens to compute at a start that the prefix cache had."""
        looked_up = max(self.counters.prefix_lookup_tokens, 1)
        return self.counters.prefix_hit_tokens / looked_up

    def facts(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return {
            "accuracy": round(self.accuracy, 4),
            "interval": [round(border, 4) for border in self.interval],
            "correct": self.num_correct,
            "errors": sum(a.finish == "error" for a in self.answers.values()),
            "pool_bytes": self.pool_bytes,
            "peak_bytes": self.counters.peak_bytes,
            "peak_concurrency": self.counters.peak_running,
            "mean_concurrency": round(self.mean_running, 2),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "prefix_hit_rate": round(self.hit_rate, 4),
            "runs": self.num_runs,
            **{
                name: getattr(self.counters, name)
                for name in (
                    "prefix_hit_tokens",
                    "compactions",
                    "retractions",
                    "prompt_tokens",
                    "tokens",
                    "steps",
                    "seconds",
                )
            },
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The questions, and what each pool made of them.

    Attributes:
      questions: All of them, in order.
      results: One or two.
      settings: What shaped the answers.
      facts: Device, versions, commit and command.
    """

    questions: Sequence[Question]
    results: Sequence[PoolResult]
    settings: Mapping[str, Any]
    facts: Mapping[str, Any]

    def result(self, kind: PoolKind) -> PoolResult | None:
        """Return what a pool did; None if it was not asked."""
        return next((found for found in self.results if found.kind == kind), None)

    def differing(self, part: str) -> list[Question]:
        """Return the questions on which the pools differ.

        Args:
          part: ``found`` for the number, ``text`` for all that was generated.
        """
        return [
            question
            for question in self.questions
            if len({getattr(r.answers[question.index], part) for r in self.results}) > 1
        ]

    def record(self) -> dict[str, Any]:
        """Return the whole comparison as JSON values.

        Counts without the name of a pool are those of the first one asked.
        """
        first = self.results[0].facts()
        flat: dict[str, Any] = {"questions": len(self.questions)}
        for kind in ("unified", "static"):
            result = self.result(kind)
            facts = result.facts() if result else {}
            flat |= {
                f"{name}_{kind}": facts.get(name)
                for name in (
                    "accuracy",
                    "interval",
                    "pool_bytes",
                    "peak_bytes",
                    "peak_concurrency",
                    "mean_concurrency",
                    "tokens_per_second",
                    "prefix_hit_rate",
                )
            }
        is_compared = len(self.results) > 1
        return {
            **flat,
            "different_answers": len(self.differing("found")) if is_compared else None,
            "different_texts": len(self.differing("text")) if is_compared else None,
            **{
                name: first[name]
                for name in ("compactions", "prefix_hit_tokens", "retractions")
            },
            "pools": {result.kind: result.facts() for result in self.results},
            "settings": dict(self.settings),
            **self.facts,
        }
