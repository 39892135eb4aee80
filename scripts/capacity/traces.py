"""Requests and their arrivals: public traces, and generated mixes.

Two formats are told apart by the file itself:

    Azure      csv    TIMESTAMP,ContextTokens,GeneratedTokens
    Mooncake   jsonl  {"timestamp": ms, "input_length", "output_length", "hash_ids"}

A Mooncake hash stands for a block of 512 prompt tokens; equal hashes are equal tokens.
"""

import csv
import dataclasses
import datetime
import itertools as it
import json
import math
import pathlib
import random
from collections.abc import Callable, Iterator

HASH_BLOCK = 512


class TraceError(ValueError):
    """A trace cannot be read; the message names the file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
    """One request of a trace.

    Attributes:
      seconds: When it arrives, from the first one on.
      prompt_len: Tokens of the prompt.
      output_len: Tokens that it generates.
      hash_ids: What each 512 tokens of the prompt are; empty if unknown, and then
        the prompt is like no other.
    """

    seconds: float
    prompt_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Prompt and output together."""
        return self.prompt_len + self.output_len

    def prompt(self, unique: int) -> tuple[int, ...]:
        """Return token ids, equal to another's exactly where the hashes are.

        Args:
          unique: A token that no other request has.
        """
        if not self.hash_ids:
            return (unique,) * self.prompt_len
        blocks = (it.repeat(hash_id, HASH_BLOCK) for hash_id in self.hash_ids)
        tokens = it.chain(it.chain.from_iterable(blocks), it.repeat(unique))
        return tuple(it.islice(tokens, self.prompt_len))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """Requests in the order of their arrival.

    Attributes:
      name: For tables.
      arrivals: The requests, at least two.
    """

    name: str
    arrivals: tuple[Arrival, ...]

    @property
    def rate(self) -> float:
        """Requests per second, as recorded."""
        return len(self.arrivals) / max(self.arrivals[-1].seconds, 1e-9)

    @property
    def longest(self) -> int:
        """Most tokens of a request, prompt and output together."""
        return max(arrival.num_tokens for arrival in self.arrivals)

    def repeated_fraction(self) -> float:
        """Return the fraction of prompt blocks that an earlier request had."""
        seen: set[int] = set()
        total = repeated = 0
        for arrival in self.arrivals:
            total += len(arrival.hash_ids)
            repeated += sum(hash_id in seen for hash_id in arrival.hash_ids)
            seen.update(arrival.hash_ids)
        return repeated / total if total else 0.0

    def at_rate(self, rate: float) -> "Trace":
        """Return the same requests, so many per second; bursts stay bursts."""
        scale = self.rate / rate
        return dataclasses.replace(
            self,
            arrivals=tuple(
                dataclasses.replace(arrival, seconds=arrival.seconds * scale)
                for arrival in self.arrivals
            ),
        )


def _azure_lines(file: Iterator[str]) -> Iterator[Arrival]:
    first = None
    for row in csv.DictReader(file):
        time = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26])
        first = first or time
        yield Arrival(
            seconds=(time - first).total_seconds(),
            prompt_len=int(row["ContextTokens"]),
            output_len=int(row["GeneratedTokens"]),
        )


def _mooncake_lines(file: Iterator[str]) -> Iterator[Arrival]:
    first = None
    for line in file:
        record = json.loads(line)
        first = record["timestamp"] if first is None else first
        yield Arrival(
            seconds=(record["timestamp"] - first) / 1e3,
            prompt_len=int(record["input_length"]),
            output_len=int(record["output_length"]),
            hash_ids=tuple(record.get("hash_ids", ())),
        )


def read_trace(path: pathlib.Path, *, num_requests: int) -> Trace:
    """Return the first requests of a trace that have a prompt and an output.

    Args:
      path: A csv of Azure or a jsonl of Mooncake.
      num_requests: At most so many.

    Raises:
      TraceError: The file is of neither format, or holds fewer than two requests.
    """
    try:
        with path.open(encoding="utf-8") as file:
            head = file.readline()
            is_azure = head.startswith("TIMESTAMP,")
            if not (is_azure or head.lstrip().startswith("{")):
                raise TraceError(
                    f"{path}: neither a csv of Azure (TIMESTAMP,...) nor a jsonl of "
                    f"Mooncake: it begins with {head[:40]!r}"
                )
            lines = it.chain([head], file)
            found = _azure_lines(lines) if is_azure else _mooncake_lines(lines)
            whole = (a for a in found if a.prompt_len > 0 and a.output_len > 0)
            arrivals = tuple(it.islice(whole, num_requests))
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{path}: {type(error).__name__}: {error}") from error
    if len(arrivals) < 2:
        raise TraceError(f"{path}: {len(arrivals)} requests; two or more are needed")
    return Trace(name=path.stem, arrivals=arrivals)


def _log_normal(rng: random.Random, median: float, sigma: float, most: int) -> int:
    return max(1, min(most, round(median * math.exp(rng.gauss(0.0, sigma)))))


def _chat(rng: random.Random, _part: float) -> tuple[int, int]:
    return _log_normal(rng, 400, 0.9, 8192), _log_normal(rng, 200, 0.6, 1024)


def _documents(rng: random.Random, _part: float) -> tuple[int, int]:
    return _log_normal(rng, 16000, 0.7, 65536), _log_normal(rng, 200, 0.6, 1024)


def _reasoning(rng: random.Random, _part: float) -> tuple[int, int]:
    return _log_normal(rng, 200, 0.6, 2048), _log_normal(rng, 1200, 0.7, 8192)


def _shifting(rng: random.Random, part: float) -> tuple[int, int]:
    return _chat(rng, part) if part < 0.7 else _documents(rng, part)


MIXES: dict[str, Callable[[random.Random, float], tuple[int, int]]] = {
    "chat": _chat,
    "documents": _documents,
    "reasoning": _reasoning,
    "shifting": _shifting,
}
"""Lengths of prompt and output by how far the trace is, from 0 to 1."""


def generate_mix(name: str, *, num_requests: int, seed: int) -> Trace:
    """Return a generated trace: log-normal lengths, Poisson arrivals, one a second.

    Args:
      name: A key of ``MIXES``.
      num_requests: How many.
      seed: The same seed gives the same requests.
    """
    rng = random.Random(f"{name} {seed}")
    seconds, arrivals = 0.0, []
    for index in range(num_requests):
        prompt_len, output_len = MIXES[name](rng, index / num_requests)
        arrivals.append(
            Arrival(seconds=seconds, prompt_len=prompt_len, output_len=output_len)
        )
        seconds += rng.expovariate(1.0)
    return Trace(name=name, arrivals=tuple(arrivals))
