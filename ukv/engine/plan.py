"""What one step does: the scheduler decides it, the programs carry it out."""

import dataclasses
from collections.abc import Mapping

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Admission:
    """A row that begins.

    Attributes:
      sequence: Whose it is.
      row: The row.
    """

    sequence: Sequence
    row: int


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
class StepPlan:
    """One step, in the order of its fields.

    Attributes:
      releases: Rows that give their pages back.
      room: Pages by owner to make room for, moving others; None if all fits.
      admissions: Rows that begin.
      chunks: Rows that get tokens; none if pages only go back.
      is_decode: Whether every chunk is of a decoding row.
    """

    releases: tuple[Release, ...]
    room: Mapping[str, int] | None
    admissions: tuple[Admission, ...]
    chunks: tuple[Chunk, ...]
    is_decode: bool
