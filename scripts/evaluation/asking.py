"""Puts questions to an engine, all at once, and keeps each answer as it ends."""

import dataclasses
import time
from collections.abc import Mapping, Sequence

from tqdm import tqdm

from models.tokenizer import Tokenizer
from scripts.evaluation.answers import last_number
from scripts.evaluation.counters import Counters
from scripts.evaluation.generation import Job, generate_texts, stop_tokens_of
from scripts.evaluation.questions import Question
from scripts.evaluation.records import Answer, Records
from ukv.engine import Engine, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asking:
    """How questions are put.

    Attributes:
      prompts: The tokens of each question's prompt, by its index.
      stops: Texts that end an answer.
      max_new_tokens: Tokens of an answer at most.
    """

    prompts: Mapping[int, Sequence[int]]
    stops: tuple[str, ...]
    max_new_tokens: int


class _Meter:
    """Counts what the engine does from now on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = engine.stats()
        self._start = time.perf_counter()
        self._running = self._peak_running = self._peak_bytes = 0
        self._prompt_tokens = self._tokens = 0

    def finish(self, answer: Answer) -> None:
        self._prompt_tokens += answer.prompt_tokens
        self._tokens += answer.tokens

    def step(self) -> None:
        stats = self._engine.stats()
        self._running += stats.num_running
        self._peak_running = max(self._peak_running, stats.num_running)
        self._peak_bytes = max(self._peak_bytes, sum(stats.used_bytes.values()))

    def read(self) -> Counters:
        now, before = self._engine.stats(), self._before
        return Counters(
            seconds=round(time.perf_counter() - self._start, 3),
            steps=now.num_steps - before.num_steps,
            prompt_tokens=self._prompt_tokens,
            tokens=self._tokens,
            prefix_lookup_tokens=now.prefix_lookup_tokens - before.prefix_lookup_tokens,
            prefix_hit_tokens=now.prefix_hit_tokens - before.prefix_hit_tokens,
            compactions=now.num_moves - before.num_moves,
            retractions=now.num_retractions - before.num_retractions,
            running=self._running,
            peak_running=self._peak_running,
            peak_bytes=self._peak_bytes,
        )


def ask(
    engine: Engine,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    asking: Asking,
    records: Records,
    bar: tqdm,
) -> None:
    """Ask questions and record the answers, in the order in which they end.

    Args:
      engine: Warmed up, so that no time goes into compilation.
      tokenizer: Of its model.
      questions: To ask; those that ``records`` has are passed over.
      asking: How.
      records: Where answers go.
      bar: Moves by one with each answer.

    Raises:
      RecordsError: An answer could not be written.
      PoolStateError: The pool is not what it should be.
    """
    params = SamplingParams(
        max_new_tokens=asking.max_new_tokens, stop_token_ids=stop_tokens_of(tokenizer)
    )
    left = {
        str(question.index): question
        for question in questions
        if question.index not in records.answers
    }
    jobs = {
        name: Job(
            prompt=asking.prompts[question.index], params=params, stops=asking.stops
        )
        for name, question in left.items()
    }
    meter = _Meter(engine)
    num_correct = sum(answer.is_correct for answer in records.answers.values())
    for name, done in generate_texts(engine, tokenizer, jobs, after_step=meter.step):
        question = left[name]
        answer = Answer(
            index=question.index,
            expected=question.number,
            found=last_number(done.text),
            prompt_tokens=len(asking.prompts[question.index]),
            **dataclasses.asdict(done),
        )
        meter.finish(answer)
        records.add(answer, meter.read())
        num_correct += answer.is_correct
        bar.update()
        bar.set_postfix_str(f"accuracy {num_correct / len(records.answers):.3f}")
