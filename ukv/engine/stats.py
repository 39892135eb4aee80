"""What an engine did so far, and how full it is."""

import dataclasses
import json
import os
import pathlib
import time


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counts since the engine was made, and its present load.

    Attributes:
      num_steps: Steps dispatched.
      num_tokens: Tokens returned.
      num_retractions: How often a request lost its pages.
      num_moves: How often pages were moved to make room.
      num_waits: Reads that had to wait for the device.
      num_restarts: How often a failed step cost the pool its contents.
      num_running: Requests with a row.
      num_waiting: Requests without.
      used_bytes: Bytes of bound pages by sub-pool.
      cached_bytes: Those of them that only the prefix cache holds.
      prefix_lookup_tokens: Tokens of requests that began, or began again.
      prefix_hit_tokens: Those of them that were cached and not computed again.
      pool_bytes: Bytes of the pool.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_retractions: int = 0
    num_moves: int = 0
    num_waits: int = 0
    num_restarts: int = 0
    num_running: int = 0
    num_waiting: int = 0
    used_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    cached_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    pool_bytes: int = 0
    prefix_lookup_tokens: int = 0
    prefix_hit_tokens: int = 0

    @property
    def prefix_hit_rate(self) -> float:
        """Of the tokens of requests that began, the part that was cached."""
        return self.prefix_hit_tokens / max(self.prefix_lookup_tokens, 1)


class Trace:
    """A file with one JSON line for each step."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Create or empty the file."""
        self._file = pathlib.Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - closed by `close`
        self._start = time.perf_counter()

    def write(self, stats: EngineStats, *, shape: str, rows: int, tokens: int) -> None:
        """Append a step.

        Args:
          stats: After the step was dispatched.
          shape: Name of its program.
          rows: Rows that took part.
          tokens: Tokens that they fed.
        """
        line = {
            "seconds": round(time.perf_counter() - self._start, 6),
            "shape": shape,
            "rows": rows,
            "tokens": tokens,
            **dataclasses.asdict(stats),
        }
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Write what is left and close the file."""
        self._file.close()
