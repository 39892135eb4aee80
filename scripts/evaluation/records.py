"""Answers on disk: one line each, safe once written, so that a run can be continued.

The first line holds the settings that shape an answer. Each other line is an answer
and what the run had counted by then; it is synced before the next question matters.
A line that was being written when the machine stopped is dropped at the next start.
"""

import dataclasses
import json
import os
import pathlib
from typing import Any, Self

from scripts.evaluation.counters import Counters
from ukv.errors import UkvError


class RecordsError(UkvError, ValueError):
    """A file of answers cannot be read or written, or is of another evaluation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model answered to one question.

    Attributes:
      index: The question's place in the data.
      expected: The right number.
      found: The last number of the text; None if there is none.
      text: The generated text, up to what stopped it.
      prompt_tokens: Tokens of the prompt.
      tokens: Tokens generated.
      finish: Why it ended: stop, length or error.
      error: What went wrong, if it ended so.
    """

    index: int
    expected: str
    found: str | None
    text: str
    prompt_tokens: int
    tokens: int
    finish: str
    error: str | None = None

    @property
    def is_correct(self) -> bool:
        """Whether the number is right."""
        return self.found == self.expected and self.finish != "error"


class Records:
    """The answers of one pool, in a file.

    Attributes:
      path: The file.
      answers: By index.
      runs: What each run so far counted, in their order.
      runs_before: How many runs left answers before this one.
    """

    def __init__(
        self, path: pathlib.Path, settings: dict[str, Any], *, fresh: bool = False
    ) -> None:
        """Open a file to continue it, or begin one.

        Args:
          path: The file; its folder is made.
          settings: All that shapes an answer, as JSON values.
          fresh: Whether to throw away what is there.

        Raises:
          RecordsError: The file is damaged, of other settings, or cannot be written.
        """
        self.path = path
        self.answers: dict[int, Answer] = {}
        self.runs: list[Counters] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if fresh or not path.exists():
                path.write_bytes(b"")
            whole = self._drop_torn_line()
            self._read(whole, settings)
            # Unbuffered: a line that failed to be written must not be tried again.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise RecordsError(f"{path}: cannot be opened: {error}") from error
        if not whole:
            self._write({"settings": settings})
        self.runs_before = len(self.runs)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        self._file.close()

    def add(self, answer: Answer, counters: Counters) -> None:
        """Write an answer; when this returns it is on disk.

        Args:
          answer: To a question that has none yet.
          counters: Of this run, up to now.

        Raises:
          RecordsError: It could not be written. All earlier ones are safe.
        """
        run = self.runs_before
        line = {"run": run, **dataclasses.asdict(answer)}
        self._write({**line, "counters": dataclasses.asdict(counters)})
        self.answers[answer.index] = answer
        self.runs[run:] = [counters]

    def _write(self, line: dict[str, Any]) -> None:
        left = memoryview(json.dumps(line).encode() + b"\n")
        try:
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise RecordsError(
                f"{self.path}: cannot be written: {error}; {len(self.answers)} answers "
                "are kept there, the same command continues"
            ) from error

    def _drop_torn_line(self) -> list[str]:
        data = self.path.read_bytes()
        end = data.rfind(b"\n") + 1
        if end < len(data):
            with self.path.open("r+b") as file:
                file.truncate(end)
        return data[:end].decode("utf-8", errors="replace").splitlines()

    def _read(self, lines: list[str], settings: dict[str, Any]) -> None:
        for number, line in enumerate(lines, 1):
            try:
                found = json.loads(line)
                if number == 1:
                    self._require_same(found["settings"], settings)
                    continue
                counters = Counters(**found.pop("counters"))
                self.runs[found.pop("run") :] = [counters]
                answer = Answer(**found)
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise RecordsError(
                    f"{self.path}, line {number}: is damaged ({error!r}); --fresh "
                    "starts over"
                ) from error
            self.answers[answer.index] = answer

    def _require_same(self, found: dict[str, Any], wanted: dict[str, Any]) -> None:
        differing = [
            f"{name} was {found.get(name)!r} and is now {wanted.get(name)!r}"
            for name in sorted({*found, *wanted})
            if found.get(name) != wanted.get(name)
        ]
        if differing:
            raise RecordsError(
                f"{self.path}: holds answers of another evaluation, and the two do not "
                f"mix: {'; '.join(differing)}. Give another --records folder, or "
                "--fresh to throw the old answers away"
            )
