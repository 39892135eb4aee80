"""What a user asks for, and what comes back."""

import dataclasses
import enum
import math
import numbers
import operator


class RequestError(ValueError):
    """A request is malformed; the message names the field and its bounds."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RequestError(message)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen, and when to stop.

    The filters apply in this order: temperature, ``top_k``, ``top_p`` among what is
    left, ``min_p``. Equal logits at a border all stay.

    Attributes:
      temperature: Divides the logits; 0 takes the largest logit.
      top_k: Keep the k largest logits; None keeps all.
      top_p: Keep the smallest set of largest logits with this much probability.
      min_p: Keep tokens with at least this fraction of the largest probability.
      seed: In [0, 2^31). The same seed gives the same tokens in any batch; None lets
        the engine draw one.
      max_new_tokens: Tokens to generate at most.
      stop_token_ids: Tokens that end the output; the one that did is part of it.
      logprobs: Whether to return the log-probability of each token, under the model's
        own distribution (temperature 1, no filter).
      scores_from: Place of the first token of the prompt to score, 1 or more; None
        scores none. The engine must be built with ``scores_prompts``.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    scores_from: int | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        temperature, top_p, min_p = self.temperature, self.top_p, self.min_p
        _require(
            _is_number(temperature) and temperature >= 0,
            f"{temperature=} must be a finite number of 0 or more",
        )
        _require(
            self.top_k is None or (_is_int(self.top_k) and self.top_k >= 1),
            f"top_k={self.top_k!r} must be an integer of 1 or more, or None",
        )
        _require(_is_number(top_p) and 0 < top_p <= 1, f"{top_p=} must be in (0, 1]")
        _require(_is_number(min_p) and 0 <= min_p <= 1, f"{min_p=} must be in [0, 1]")
        _require(
            self.seed is None or (_is_int(self.seed) and 0 <= self.seed < 2**31),
            f"seed={self.seed!r} must be an integer in [0, 2^31), or None",
        )
        _require(
            _is_int(self.max_new_tokens) and self.max_new_tokens >= 1,
            f"max_new_tokens={self.max_new_tokens!r} must be an integer of 1 or more",
        )
        _require(
            self.scores_from is None
            or (_is_int(self.scores_from) and self.scores_from >= 1),
            f"scores_from={self.scores_from!r} must be an integer of 1 or more, or "
            "None: the first token has nothing before it",
        )
        _require(
            isinstance(self.stop_token_ids, tuple | list),
            f"stop_token_ids={self.stop_token_ids!r} must be a tuple",
        )
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _require(
            all(_is_int(token) and token >= 0 for token in self.stop_token_ids),
            f"stop_token_ids={self.stop_token_ids} must be integers of 0 or more",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how to continue it.

    Attributes:
      request_id: Unique among the requests that the engine holds.
      prompt: Token ids, at least one.
      params: How to continue.
      priority: Larger goes first; equal ones in the order of their arrival.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0

    def __post_init__(self) -> None:
        """Check that there is a prompt."""
        try:
            prompt = tuple(operator.index(token) for token in self.prompt)
        except TypeError as error:
            raise RequestError(
                f"request {self.request_id!r}: a prompt is token ids, integers: {error}"
            ) from error
        object.__setattr__(self, "prompt", prompt)
        _require(bool(self.prompt), f"request {self.request_id!r} has an empty prompt")

    @property
    def max_kv_len(self) -> int:
        """Tokens in the pool at the end; the last token is never fed back."""
        return len(self.prompt) + self.params.max_new_tokens - 1

    def require_within(
        self,
        *,
        vocab_size: int,
        max_kv_len: int,
        max_stop_tokens: int,
        scores_prompts: bool,
    ) -> None:
        """Refuse a request that the engine's buffers cannot express.

        Raises:
          RequestError: A token is unknown, the request or a list is too long, or the
            scores are not to be had.
        """
        name, params = self.request_id, self.params
        for token in self.prompt:
            _require(
                0 <= token < vocab_size,
                f"request {name!r}: {token=} is not in [0, {vocab_size}), the "
                "vocabulary of the model",
            )
        _require(
            self.max_kv_len <= max_kv_len,
            f"request {name!r} has a prompt of {len(self.prompt)} tokens and may draw "
            f"{params.max_new_tokens}: {self.max_kv_len} tokens in the pool, "
            f"{max_kv_len=} allows fewer",
        )
        _require(
            len(params.stop_token_ids) <= max_stop_tokens,
            f"request {name!r} has {len(params.stop_token_ids)} stop_token_ids, "
            f"{max_stop_tokens=} allows fewer",
        )
        first = params.scores_from
        _require(
            first is None or (scores_prompts and first < len(self.prompt)),
            f"request {name!r} asks for scores_from={first} of {len(self.prompt)} "
            "tokens: it must be below that, and the engine built with "
            f"scores_prompts=True, which is {scores_prompts}",
        )


class FinishReason(enum.Enum):
    """Why a request ended: a stop token, its length, its caller, or a fault."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenScore:
    """How likely one token of a prompt is after those before it.

    Attributes:
      logprob: Under the model's own distribution.
      is_greedy: Whether it is the token that temperature 0 would take.
    """

    logprob: float
    is_greedy: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """What is new about one request after a step.

    Attributes:
      request_id: Which request.
      new_tokens: Tokens since the last output.
      new_logprobs: Their log-probabilities, if asked for; else empty.
      prompt_scores: Of the prompt from ``scores_from`` on, if asked for, with the
        output that brings the first token; else empty.
      finish_reason: None while the request goes on.
      error: What went wrong, if ``finish_reason`` is ERROR; else None.
    """

    request_id: str
    new_tokens: tuple[int, ...] = ()
    new_logprobs: tuple[float, ...] = ()
    prompt_scores: tuple[TokenScore, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
