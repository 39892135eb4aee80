"""The device's side of an engine: its buffers, and who replaces them."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import tqdm

from ukv.engine import row_programs
from ukv.engine.actions import pack_actions, padded_actions
from ukv.engine.device_state import create_device_state
from ukv.engine.plan import StepPlan
from ukv.engine.programs import Programs
from ukv.engine.row_programs import ADMIT_COLUMNS
from ukv.engine.sampling import pack_params
from ukv.engine.step import StepResults, StepShape, pack_chunks
from ukv.translator import make_static_tables


class Device:
    """The device's side of an engine: its buffers, and programs that replace them.

    Attributes:
      state: The device state; each program takes it and returns the next.
    """

    def __init__(self, programs: Programs, weights: Any) -> None:
        """Allocate every buffer."""
        self._programs = programs
        self._weights = weights
        self._allocate()

    def _allocate(self) -> None:
        programs = self._programs
        self.state = create_device_state(programs.config, programs.translator.layout)
        # A decode step and a step with prompts may have equal buckets: no sharing.
        self._static = {
            shape: make_static_tables(programs.translator, [shape.bucket])[shape.bucket]
            for shape in programs.shapes
        }

    def reset(self) -> None:
        """Allocate every buffer anew; what the pool held is lost."""
        # The old pool goes first: there is no room for two.
        for leaf in jax.tree.leaves((self.state, list(self._static.values()))):
            if not leaf.is_deleted():
                leaf.delete()
        self._allocate()

    def run(self, plan: StepPlan, shape: StepShape | None) -> StepResults | None:
        """Dispatch a plan, in the order of its fields; waits for nothing."""
        config, layout = self._programs.config, self._programs.translator.layout
        for program, packed in pack_actions(plan.actions, layout, config.max_rows):
            self.state = program(self.state, packed)
        if plan.admissions:
            sequences = [admission.sequence for admission in plan.admissions]
            params = pack_params(
                [sequence.request.params for sequence in sequences],
                [sequence.seed for sequence in sequences],
                config.max_stop_tokens,
            )
            packed = np.zeros((config.max_rows, self._admit_width), np.int32)
            packed[:, 0] = config.max_rows
            for row, admission in zip(packed, plan.admissions, strict=False):
                hit_len = admission.sequence.hit_len
                row[:ADMIT_COLUMNS] = admission.row, hit_len, admission.state
            packed[: len(params), ADMIT_COLUMNS:] = params
            self.state = row_programs.jitted_admit(self.state, packed)
        if shape is None:
            return None
        packed = pack_chunks(shape, plan.chunks, config.max_rows)
        self.state, self._static[shape], results = self._programs.steps[shape](
            self.state, self._static[shape], self._weights, packed
        )
        for leaf in jax.tree.leaves(results):
            leaf.copy_to_host_async()
        return results

    def warm_up(self, *, progress: bool) -> None:
        """Run every program once on padding, which changes nothing."""
        programs: Sequence[StepShape | None] = [None, *self._programs.shapes]
        with tqdm.tqdm(programs, disable=not progress, desc="compile") as bar:
            for shape in bar:
                bar.set_postfix_str("page moves" if shape is None else shape.name)
                if shape is None:
                    self._run_row_programs()
                else:
                    self.run(_EMPTY_PLAN, shape)
        jax.block_until_ready(self.state)

    def _run_row_programs(self) -> None:
        config, layout = self._programs.config, self._programs.translator.layout
        for program, packed in padded_actions(config, layout):
            self.state = program(self.state, packed)
        rows = np.zeros((config.max_rows, self._admit_width), np.int32)
        rows[:, 0] = config.max_rows
        self.state = row_programs.jitted_admit(self.state, rows)

    @property
    def _admit_width(self) -> int:
        return ADMIT_COLUMNS + self.state.params.shape[1]


_EMPTY_PLAN = StepPlan(actions=())
