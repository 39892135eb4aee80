"""What one step does: the scheduler decides it, the programs carry it out."""

import dataclasses
from collections.abc import Mapping

from ukv.engine.ledger import Advance
from ukv.engine.prefix_eviction import Dropped
from ukv.engine.sequence import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """New tokens of one row.

    Attributes:
      sequence: Whose they are.
      row: Its row on the device.
      context_len: Tokens in the pool before the step.
      query_len: New tokens; of a decoding row, one for each pass.
      is_decoding: Whether the device has the first of them.
      is_sampled: Whether tokens are drawn: one for each pass of a decoding row, one
        after the last chunk of a prompt.
    """

    sequence: Sequence
    row: int
    context_len: int
    query_len: int
    is_decoding: bool
    is_sampled: bool

    def advance(self, done: int, query_len: int) -> Advance:
        """Return some of the new tokens, after ``done`` others."""
        lease = self.sequence.lease
        return Advance(
            context_len=self.context_len + done,
            query_len=query_len,
            hit_len=self.sequence.hit_len,
            num_cached=0 if lease is None else len(lease.path),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Admission:
    """A row that begins.

    Attributes:
      sequence: Whose it is.
      row: The row.
      state: Name of the cached state that it begins with; 0 for zeros.
    """

    sequence: Sequence
    row: int
    state: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Release:
    """A row that gives its pages back.

    Attributes:
      row: The row.
      context_len: Tokens that it holds.
    """

    row: int
    context_len: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keep:
    """A page of a row that the prefix cache holds too from now on.

    Attributes:
      row: The row.
      column: Which of its pages.
      name: The page's name from now on.
    """

    row: int
    column: int
    name: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reuse:
    """A cached page that a row holds too from now on.

    Attributes:
      row: The row.
      column: Which of its pages.
      name: The page's name.
    """

    row: int
    column: int
    name: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A copy of a row's states for the prefix cache.

    Attributes:
      row: The row.
      name: The copy's name.
    """

    row: int
    name: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
    """Pages that move so that others fit.

    Attributes:
      num_pages: By owner, what has to fit.
    """

    num_pages: Mapping[str, int]


RowAction = Release | Keep | Reuse | Checkpoint
"""What happens to a row."""

Action = RowAction | Dropped | Room
"""What happens to pages between two steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step, in the order of its fields.

    Attributes:
      actions: What happens to pages before it, in this order.
      admissions: Rows that begin.
      chunks: Rows that get tokens; none if pages only go back.
      is_decode: Whether every chunk is of a decoding row.
    """

    actions: tuple[Action, ...]
    admissions: tuple[Admission, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    is_decode: bool = True
