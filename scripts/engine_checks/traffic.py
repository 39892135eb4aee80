"""Random requests: of any length, some with shared beginnings, some repeated."""

import dataclasses

import numpy as np

from ukv.engine import SamplingParams

NUM_BEGINNINGS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
    """A request before it is sent.

    Attributes:
      prompt: Token ids.
      params: How to continue.
      priority: Larger goes first.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0


class Traffic:
    """Draws requests for a model; equal seeds draw equal requests.

    Half of the prompts begin with one of a few beginnings; some come a second time. One
    in three is sampled, all others are greedy; some stop at a random token.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        vocab_size: int,
        max_prompt_len: int,
        max_new_tokens: int,
    ) -> None:
        """Draw the shared beginnings.

        Args:
          rng: Where everything comes from.
          vocab_size: Tokens of the model.
          max_prompt_len: Of any prompt.
          max_new_tokens: Most that a request draws.
        """
        self._rng = rng
        self._vocab_size = vocab_size
        self._max_prompt_len = max_prompt_len
        self._max_new_tokens = max_new_tokens
        self._beginnings = [
            self._tokens(length)
            for length in rng.integers(
                max_prompt_len // 2, max_prompt_len, NUM_BEGINNINGS
            )
        ]
        self._last: tuple[int, ...] = self._tokens(1)

    def _tokens(self, length: int) -> tuple[int, ...]:
        return tuple(self._rng.integers(self._vocab_size, size=length).tolist())

    def _prompt(self) -> tuple[int, ...]:
        kind = self._rng.random()
        if kind < 0.1:
            return self._last
        if kind < 0.5:
            return self._tokens(int(self._rng.integers(1, self._max_prompt_len + 1)))
        beginning = self._beginnings[self._rng.integers(NUM_BEGINNINGS)]
        room = self._max_prompt_len - len(beginning)
        return beginning + self._tokens(int(self._rng.integers(0, room + 1)))

    def draw(self) -> Draft:
        """Return the next request."""
        rng = self._rng
        self._last = self._prompt()
        is_sampled = rng.random() < 1 / 3
        stops = rng.random() < 0.3
        return Draft(
            prompt=self._last,
            params=SamplingParams(
                temperature=float(rng.uniform(0.5, 1.2)) if is_sampled else 0.0,
                top_p=float(rng.uniform(0.7, 1.0)) if is_sampled else 1.0,
                seed=int(rng.integers(2**31)),
                max_new_tokens=int(rng.integers(1, self._max_new_tokens + 1)),
                stop_token_ids=self._tokens(1) if stops else (),
            ),
            priority=int(rng.choice(3, p=(0.7, 0.2, 0.1))),
        )
