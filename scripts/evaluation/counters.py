"""What a run of an engine counted: additive but for the peaks."""

import dataclasses
from collections.abc import Iterable
from typing import Self


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counters:
    """Counts of one run, or of several together.

    Attributes:
      seconds: Since the first step, compilation not included.
      steps: Steps of the engine.
      prompt_tokens: Tokens of the prompts of finished questions.
      tokens: Tokens generated.
      prefix_lookup_tokens: Tokens of requests that began, or began again.
      prefix_hit_tokens: Those of them that the prefix cache had.
      compactions: How often pages were moved to make room.
      retractions: How often a request lost its pages and was computed again.
      running: Running requests, summed over the steps.
      peak_running: Most requests that ran at once.
      peak_bytes: Most bytes of bound pages, those of the prefix cache included.
    """

    seconds: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    prefix_lookup_tokens: int = 0
    prefix_hit_tokens: int = 0
    compactions: int = 0
    retractions: int = 0
    running: int = 0
    peak_running: int = 0
    peak_bytes: int = 0

    @classmethod
    def together(cls, runs: Iterable[Self]) -> Self:
        """Return what several runs counted."""
        runs = list(runs)
        total = {
            field.name: (max if field.name.startswith("peak") else sum)(
                [getattr(run, field.name) for run in runs] or [0]
            )
            for field in dataclasses.fields(cls)
        }
        return cls(**total)
