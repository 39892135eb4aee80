"""Questions with a worked answer that ends in a number, and what stands before each.

The convention of the published GSM8K evaluations: solved examples, then the question,
as plain text without a chat template::

    Question: ...
    Answer: worked steps
    #### 72
                          (a blank line between)
    Question: ...
    Answer:

The data is a file in the published form, one JSON record with ``question`` and
``answer`` a line, or the built-in set of ``scripts.arithmetic_problems``.
"""

import dataclasses
import hashlib
import json
import pathlib
import re

from scripts.arithmetic_problems.problem_set import problem_set
from scripts.evaluation.answers import as_number
from ukv.errors import UkvError

BUILT_IN_SEED = 1
"""Of the built-in set; its prices and questions follow from it."""

# What a calculator was to fill in while GSM8K was written: <<48/2=24>>.
_CALCULATION = re.compile(r"<<[^>]*>>")


class DataError(UkvError, ValueError):
    """A data file is missing, damaged, or not in the form of GSM8K."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """One question.

    Attributes:
      index: Its place in the data, from 0.
      text: What is asked.
      number: The right answer, as ``as_number`` writes it.
    """

    index: int
    text: str
    number: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionSet:
    """Questions that share what stands before them.

    Attributes:
      name: Path of the file, or ``built-in``.
      digest: Of the questions and the prefix.
      prefix: The solved examples, whole blocks.
      shots: How many they are.
      shots_from: Where they come from.
      questions: In the order of the data.
      stops: Texts that end an answer and do not belong to it.
    """

    name: str
    prefix: str
    shots: int
    shots_from: str
    questions: tuple[Question, ...]
    stops: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Checksum of all that is asked."""
        whole = json.dumps([self.prefix, *map(dataclasses.asdict, self.questions)])
        return hashlib.sha256(whole.encode()).hexdigest()[:16]

    def prompt(self, question: Question) -> str:
        """Return all that the model sees."""
        return f"{self.prefix}Question: {question.text}\nAnswer:"


def built_in_set(*, limit: int | None, shots: int) -> QuestionSet:
    """Return generated arithmetic word problems, none of which was trained on.

    Args:
      limit: Questions; None for 48.
      shots: Solved examples in the prefix.

    Raises:
      DataError: A count is out of range.
    """
    try:
        found = problem_set(BUILT_IN_SEED, limit or 48, "test", shots=shots)
    except ValueError as error:
        raise DataError(f"the built-in set: {error}") from error
    return QuestionSet(
        name="built-in",
        prefix=found.prefix,
        shots=shots,
        shots_from="the training split of the generator",
        questions=tuple(
            Question(index=i, text=problem.question, number=str(problem.number))
            for i, problem in enumerate(found.problems)
        ),
        stops=("\n\n", "Question:"),
    )


@dataclasses.dataclass(frozen=True)
class _Record:
    question: str
    answer: str

    @property
    def number(self) -> str:
        return as_number(self.answer.rpartition("####")[2])

    @property
    def block(self) -> str:
        answer = _CALCULATION.sub("", self.answer)
        return f"Question: {self.question}\nAnswer: {answer}\n\n"


def _read_records(path: pathlib.Path) -> list[_Record]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if not lines:
        raise DataError(f"{path}: is empty; give a file in the form of GSM8K")
    records = []
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number} of {len(lines)}"
        try:
            found = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{where}: is no whole JSON record ({error}); the file is truncated "
                "or damaged, get it again"
            ) from error
        if not isinstance(found, dict) or not all(
            isinstance(found.get(name), str) for name in ("question", "answer")
        ):
            raise DataError(f"{where}: has no texts 'question' and 'answer'")
        if not re.search(r"####\s*[-$]?\d", found["answer"]):
            raise DataError(f"{where}: the answer has no line '#### number'")
        records.append(_Record(found["question"], found["answer"]))
    return records


def gsm8k_set(
    path: pathlib.Path,
    *,
    limit: int | None,
    shots: int,
    shots_path: pathlib.Path | None = None,
) -> QuestionSet:
    """Read a file in the published form of GSM8K.

    Args:
      path: One JSON record a line.
      limit: Questions, from the first; None for all.
      shots: Solved examples in the prefix.
      shots_path: Where they are; None takes ``train.jsonl`` beside the file, or, if
        there is none, the first records of the file, which are then not asked.

    Raises:
      DataError: A file cannot be read, is damaged or too short.
    """
    records = _read_records(path)
    beside = path.with_name("train.jsonl")
    first = 0
    if shots_path is None and beside.is_file() and path.name != beside.name:
        shots_path = beside
    if shots_path is not None:
        solved = _read_records(shots_path)
    else:
        solved, first = records, shots
    if len(solved) < shots or len(records) <= first:
        raise DataError(
            f"{shots_path or path}: has {len(solved)} records, too few for {shots} "
            "solved examples and a question"
        )
    asked = records[first:][:limit]
    return QuestionSet(
        name=str(path),
        prefix="".join(record.block for record in solved[:shots]),
        shots=shots,
        shots_from=str(shots_path) if shots_path else f"the first {shots} of {path}",
        questions=tuple(
            Question(index=first + i, text=record.question, number=record.number)
            for i, record in enumerate(asked)
        ),
        stops=("Question:",),
    )
