"""One request on its way: its tokens, and how many of them the pool holds."""

import dataclasses

from ukv.engine.prefix_lease import Lease
from ukv.engine.request import FinishReason, Request, TokenScore


@dataclasses.dataclass(eq=False, kw_only=True)
class Sequence:
    """The scheduler's record of a request.

    Lengths run ahead of what the host has read: ``num_sampled`` and ``context_len``
    count every step that was dispatched, ``generated`` only those read back.

    Attributes:
      request: What was asked.
      arrival: Its place in the order of arrival.
      seed: Seed of its tokens.
      row: Its row on the device; None while it waits.
      context_len: Tokens in the pool.
      num_prefilled: Those of them that were known when they were computed.
      hit_len: Those of them that it found there when it was admitted.
      lease: What it holds of the prefix cache; None without a row or a cache.
      chunk_ends: Lengths at which its prefill stops, so that they can be cached.
      num_sampled: Tokens drawn, those in flight included.
      generated: Tokens read back.
      prompt_scores: By place in the prompt, if they are asked for.
      has_last_token: Whether the device holds its last token, so that it can decode.
      num_retractions: How often it lost its pages.
      suspect_len: Tokens in the pool after a step that failed with it; until there
        are more it runs alone.
      finish_reason: None while it goes on.
    """

    request: Request
    arrival: int
    seed: int
    row: int | None = None
    context_len: int = 0
    num_prefilled: int = 0
    hit_len: int = 0
    lease: Lease | None = None
    chunk_ends: tuple[int, ...] = ()
    num_sampled: int = 0
    generated: list[int] = dataclasses.field(default_factory=list)
    prompt_scores: dict[int, TokenScore] = dataclasses.field(default_factory=dict)
    has_last_token: bool = False
    num_retractions: int = 0
    suspect_len: int = -1
    finish_reason: FinishReason | None = None

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service: priority, then arrival."""
        return (-self.request.priority, self.arrival)

    @property
    def target_len(self) -> int:
        """Tokens that exist: prompt and drawn ones."""
        return len(self.request.prompt) + self.num_sampled

    @property
    def num_left(self) -> int:
        """Tokens that exist and are not in the pool."""
        return self.target_len - self.context_len

    @property
    def num_unsampled(self) -> int:
        """Tokens that may still be drawn."""
        return self.request.params.max_new_tokens - self.num_sampled

    @property
    def is_settled(self) -> bool:
        """Whether every drawn token was read back: only then it can be prefilled."""
        return self.num_sampled == len(self.generated)

    @property
    def num_uncached(self) -> int:
        """Tokens at its end that have to be computed, whatever is cached of them."""
        first = self.request.params.scores_from
        if first is None or self.generated:
            return 1
        # The score of a token comes from the logits of the one before it.
        return self.target_len - (first - 1 + len(self.prompt_scores))

    @property
    def is_suspect(self) -> bool:
        """Whether it has not passed the place where a step failed with it."""
        return self.context_len <= self.suspect_len

    @property
    def num_computed(self) -> int:
        """Known tokens whose pages the device has surely written."""
        # Of those that the device drew itself the last one is fed only if it stopped
        # no row, and there may be steps behind it that the host planned in vain.
        num_fed = max(len(self.generated) - 1, 0)
        num_drawn = min(self.context_len, len(self.request.prompt) + num_fed)
        return max(self.num_prefilled, num_drawn)

    def take_hit(self, hit_len: int) -> None:
        """Begin with cached tokens."""
        self.context_len = self.num_prefilled = self.hit_len = hit_len

    def lose_row(self) -> None:
        """Forget the row and what the pool had of the sequence."""
        self.row, self.lease = None, None
        self.context_len = self.num_prefilled = self.hit_len = 0
        self.chunk_ends = ()
        self.has_last_token = False

    def tokens(self, start: int, stop: int) -> list[int]:
        """Return known tokens by position."""
        length = len(self.request.prompt)
        prompt = self.request.prompt[start:stop]
        more = self.generated[max(start - length, 0) : max(stop - length, 0)]
        return [*prompt, *more]
