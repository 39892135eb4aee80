"""Rows of tokens to train on, made ahead by processes that know nothing of JAX."""

import multiprocessing
import random
from collections.abc import Generator

import numpy as np
import tokenizers

from scripts.arithmetic_problems.problem_set import training_text


class Rows:
    """Draws rows, each a text from its beginning, cut at its length."""

    def __init__(self, tokenizer: str, length: int) -> None:
        """Bind what makes rows.

        Args:
          tokenizer: As JSON.
          length: Tokens of a row.
        """
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer)
        self._length = length

    def draw(self, rng: random.Random) -> list[int]:
        """Return the tokens of one row."""
        tokens: list[int] = []
        while len(tokens) < self._length:
            tokens += self._tokenizer.encode(training_text(rng)).ids
        return tokens[: self._length]


_worker_rows: list[Rows] = []


def _start_worker(tokenizer: str, length: int) -> None:
    _worker_rows.append(Rows(tokenizer, length))


def _draw_rows(job: tuple[int, int, int]) -> np.ndarray:
    seed, index, num_rows = job
    rng = random.Random(f"rows {seed} {index}")
    return np.array([_worker_rows[0].draw(rng) for _ in range(num_rows)], np.int16)


def training_batches(
    tokenizer: str,
    *,
    seed: int,
    num_batches: int,
    batch_rows: int,
    length: int,
    processes: int,
) -> Generator[np.ndarray]:
    """Yield batches, int16 ``[batch_rows, length]``.

    What a batch holds depends on the seed and its index alone. Close it: the
    processes end with it.

    Args:
      tokenizer: As JSON.
      seed: Of all draws.
      num_batches: Batches.
      batch_rows: Rows of a batch.
      length: Tokens of a row.
      processes: Processes that make them.
    """
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, _start_worker, (tokenizer, length)) as pool:
        jobs = ((seed, index, batch_rows) for index in range(num_batches))
        yield from pool.imap(_draw_rows, jobs)
