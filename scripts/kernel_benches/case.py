"""What a case of the kernel benchmark is, and how one is checked and timed."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from scripts.benchmarking import Result
from ukv.implementation import Implementation

COLD_BYTES = 200 << 20
"""Bytes that one step must touch so that nothing is found in the L2 cache (50 MB)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A case with its inputs on the device, computed and compared once.

    Attributes:
      step: Jitted function of one pytree, which it donates and returns; it makes
        ``calls`` calls of the op, each on data of its own (another layer, other
        pages), since XLA would merge equal calls and a second look finds the L2 warm.
      state: What ``step`` takes and returns: pool, tables, queries, outputs. All of it
        is donated, so that no address changes and the step replays as one graph.
      calls: Calls of the op in one step.
      touched_bytes: Bytes that one step reads or writes, all calls together.
      error: Largest error of one call against the reference, relative to the largest
        expected value.
    """

    step: Callable[[Any], Any]
    state: Any
    calls: int
    touched_bytes: int
    error: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchCase:
    """One op at one shape.

    Attributes:
      op: ``mla_decode``, ``gqa_decode``, ``mla_extend``, ``gqa_extend``, ``kv_write``,
        ``page_move``, ``kda_decode``, ``kda_prefill``, ``gdn_decode``, ``gdn_prefill``.
      shape: The numbers that name the case: ``heads`` or ``q_heads`` and ``kv_heads``,
        ``head_dim``, ``batch``, ``context``, ``query``, ``page_size``, ``window``,
        ``dtype``; ``tokens`` and ``rows`` for a prefill.
      moved_bytes: Bytes that one call must move once, reads and writes together.
      flops: Floating point operations that one call must do.
      max_error: Largest ``Prepared.error`` that counts as right.
      implementations: Who can run it; a name that ``SUPPORT`` refuses is an error.
      prepare: Makes the inputs for an implementation, and runs and compares once. Its
        second argument is a kernel configuration, None for the tuned or default one.
      configs: Kernel configurations worth trying, by implementation, for tuning.
      small: The case runs anywhere within a second.
    """

    op: str
    shape: Mapping[str, Any]
    moved_bytes: int
    flops: int
    max_error: float
    implementations: tuple[Implementation, ...]
    prepare: Callable[[Implementation, Any], Prepared]
    configs: Mapping[Implementation, Sequence[Any]] = dataclasses.field(
        default_factory=dict
    )
    small: bool = False

    def __str__(self) -> str:
        """Return the case as one line."""
        return f"{self.op} " + " ".join(f"{k}={v}" for k, v in self.shape.items())


class WrongResultError(Exception):
    """An implementation's result is outside the bound, so it is not timed."""


def _timed_steps(prepared: Prepared, state: Any, steps: int) -> tuple[float, Any]:
    """Return the seconds that some steps take, dispatched back to back, and the state.

    It holds what the host needs to get going and to wait for the last array, once.
    """
    start = time.perf_counter()
    for _ in range(steps):
        state = prepared.step(state)
    jax.block_until_ready(state)
    return time.perf_counter() - start, state


def step_us(prepared: Prepared, *, seconds: float = 0.2) -> float:
    """Return the median microseconds of one call of the op.

    Steps are dispatched back to back: the host's cost of dispatch is hidden behind the
    device's work when a step is longer than that. What it costs to start and to wait
    is in every group of steps once, so the time of a step is the difference of a long
    and a short group.

    Args:
      prepared: The case; its state is used up.
      seconds: Time to measure for, at least seven pairs of groups whatever they take.
    """
    state = prepared.step(prepared.step(prepared.state))
    jax.block_until_ready(state)
    once, state = _timed_steps(prepared, state, 1)
    steps = max(int(seconds / 28 / max(once, 1e-6)), 1)
    times = []
    for _ in range(7):
        short, state = _timed_steps(prepared, state, steps)
        long, state = _timed_steps(prepared, state, 3 * steps)
        # A machine that is busy with other things can make the short group longer.
        is_ordered = long > short
        times.append((long - short) / (2 * steps) if is_ordered else long / (3 * steps))
    times.sort()
    return times[len(times) // 2] / prepared.calls * 1e6


def measure(
    case: BenchCase,
    implementation: Implementation,
    *,
    config: Any = None,
    seconds: float = 0.2,
) -> Result:
    """Compare and time one case.

    Args:
      case: The case.
      implementation: Who runs it.
      config: Kernel configuration; None takes the tuned or default one.
      seconds: Time to measure for.

    Raises:
      WrongResultError: The error is above ``case.max_error``.
      ValueError: A step touches so little that the cache would answer.
    """
    prepared = case.prepare(implementation, config)
    # Not `>`: an error that is NaN must fail too.
    if not prepared.error <= case.max_error:
        raise WrongResultError(
            f"{case} on {implementation}: error {prepared.error:.2e} is above "
            f"{case.max_error:.0e}"
        )
    if not case.small and prepared.touched_bytes < COLD_BYTES:
        raise ValueError(
            f"{case}: a step touches {prepared.touched_bytes} bytes; raise its calls "
            f"until it touches {COLD_BYTES}"
        )
    us = step_us(prepared, seconds=seconds)
    return Result(
        op=case.op,
        implementation=implementation,
        shape=dict(case.shape),
        us=round(us, 2),
        gbps=round(case.moved_bytes / us / 1e3, 1),
        tflops=round(case.flops / us / 1e6, 2),
        error=float(f"{prepared.error:.2e}"),
    )
