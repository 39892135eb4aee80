"""Text from an engine: many prompts at once, each until a stop string ends it."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from models.tokenizer import TextStream, Tokenizer
from scripts.evaluation.answers import cut_at_stop
from ukv.engine import Engine, RequestOutput, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A prompt to continue.

    Attributes:
      prompt: Its tokens.
      params: How to continue.
      stops: Texts that end the output and do not belong to it.
    """

    prompt: Sequence[int]
    params: SamplingParams
    stops: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
    """What was generated.

    Attributes:
      text: Up to what stopped it.
      tokens: Tokens generated.
      finish: Why it ended: stop, length or error.
      error: What went wrong, if it ended so.
    """

    text: str
    tokens: int
    finish: str
    error: str | None


@dataclasses.dataclass
class _Open:
    job: Job
    stream: TextStream
    text: str = ""
    tokens: int = 0

    def grow(self, output: RequestOutput) -> Generated | None:
        """Add new tokens; return the whole if they or the engine end it."""
        for token in output.new_tokens:
            self.tokens += 1
            self.text += self.stream.add(token)
            text = cut_at_stop(self.text, self.job.stops)
            if text is not None:
                return Generated(
                    text=text, tokens=self.tokens, finish="stop", error=None
                )
        if output.finish_reason is None:
            return None
        return Generated(
            text=self.text,
            tokens=self.tokens,
            finish=output.finish_reason.value,
            error=output.error,
        )


def generate_texts(
    engine: Engine,
    tokenizer: Tokenizer,
    jobs: Mapping[str, Job],
    *,
    after_step: Callable[[], object] = lambda: None,
) -> Iterator[tuple[str, Generated]]:
    """Run jobs to their end; yield each as it ends, in any order.

    Args:
      engine: Without work of its own.
      tokenizer: Of its model.
      jobs: By a name of your choice.
      after_step: Called after each step of the engine.

    Raises:
      RequestError: A prompt is too long for the engine.
      BudgetError: A prompt does not even fit alone.
    """
    opened: dict[str, _Open] = {}
    for name, job in jobs.items():
        engine.add_request(job.prompt, job.params, request_id=name)
        opened[name] = _Open(job, tokenizer.stream())
    while engine.has_work:
        outputs = engine.step()
        after_step()
        for output in outputs:
            name = output.request_id
            if name not in opened:
                continue  # a stop string ended it
            done = opened[name].grow(output)
            if done is None:
                continue
            if output.finish_reason is None:
                engine.abort(name)
            del opened[name]
            yield name, done


def stop_tokens_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end an answer, as sampling parameters want them."""
    return tuple(sorted(tokenizer.stop_tokens))
