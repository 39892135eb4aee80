"""From the actions of a plan to the programs that carry them out."""

import itertools as it
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ukv.engine import prefix_programs, row_programs
from ukv.engine.config import EngineConfig
from ukv.engine.device_state import DeviceState
from ukv.engine.plan import (
    Action,
    Checkpoint,
    Keep,
    Release,
    Reuse,
    Room,
    RowAction,
)
from ukv.engine.prefix_eviction import Dropped
from ukv.layout import PoolLayout

MAX_RELEASES = 8
"""Rows that one release program takes; more of them take several."""

MAX_NAMES = 64
"""Pages that one program of the prefix cache takes."""

MAX_CHECKPOINTS = 4
"""Rows whose states one program copies."""

Packed = tuple[Callable[[DeviceState, np.ndarray], DeviceState], np.ndarray]


def pack_actions(
    actions: Sequence[Action], layout: PoolLayout, max_rows: int
) -> Iterator[Packed]:
    """Yield programs and what they take, in the order of the actions.

    Actions of one kind that follow each other share a program.

    Args:
      actions: Of a plan.
      layout: Of the pool.
      max_rows: Row id of padding.
    """
    for _, group in it.groupby(actions, type):
        some = list(group)
        yield from _drops([a for a in some if isinstance(a, Dropped)], layout)
        yield from (_room(a, layout) for a in some if isinstance(a, Room))
        yield from _rows([a for a in some if isinstance(a, RowAction)], max_rows)


def padded_actions(config: EngineConfig, layout: PoolLayout) -> Iterator[Packed]:
    """Yield every program once, with padding, for the warm-up."""
    rows = config.max_rows
    yield from _rows([Release(row=rows, context_len=0)], rows)
    if layout.is_unified:
        yield _room(Room(num_pages={}), layout)
    if config.prefix_cache:
        yield from _rows([Keep(row=rows, column=0, name=0)], rows)
        yield from _rows([Reuse(row=rows, column=0, name=0)], rows)
        if any(not owner.spec.grows for owner in layout.owners):
            yield from _rows([Checkpoint(row=rows, name=0)], rows)
        yield from _drops([Dropped(pages={layout.owners[0].name: [0]})], layout)


def _room(action: Room, layout: PoolLayout) -> Packed:
    counts = [action.num_pages.get(owner.name, 0) for owner in layout.owners]
    return row_programs.jitted_move_pages, np.array(counts, np.int32)


def _rows(actions: Sequence[RowAction], max_rows: int) -> Iterator[Packed]:
    """Yield the programs of actions that are all of one kind, with a row each."""
    if not actions:
        return
    match actions[0]:
        case Release():
            program, most = row_programs.jitted_release, MAX_RELEASES
        case Keep():
            program, most = prefix_programs.jitted_keep, MAX_NAMES
        case Reuse():
            program, most = prefix_programs.jitted_reuse, MAX_NAMES
        case Checkpoint():
            program, most = prefix_programs.jitted_checkpoint, MAX_CHECKPOINTS
    for some in it.batched(actions, most):
        lines = [list(vars(action).values()) for action in some]
        packed = np.zeros((most, len(lines[0])), np.int32)
        packed[:, 0] = max_rows
        packed[: len(lines)] = lines
        yield program, packed


def _drops(actions: Sequence[Dropped], layout: PoolLayout) -> Iterator[Packed]:
    """Yield programs that drop all of these."""
    names: list[list[int]] = []
    for sub in layout.sub_pools:
        found = [{**d.states, **d.halves, **d.pages}.get(sub.name, ()) for d in actions]
        names.append(list(it.chain(*found)))
    for start in range(0, max(map(len, names), default=0), MAX_NAMES):
        packed = np.zeros((len(names), MAX_NAMES), np.int32)
        for line, found in zip(packed, names, strict=True):
            some = found[start : start + MAX_NAMES]
            line[: len(some)] = some
        yield prefix_programs.jitted_drop, packed
