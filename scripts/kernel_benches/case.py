"""What a case of the kernel benchmark is: compiled first, then checked and timed."""

import collections
import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from scripts.benchmarking import Result
from ukv.implementation import Implementation

COLD_BYTES = 200 << 20
"""Bytes that one step must touch so that nothing is found in the L2 cache (60 MB)."""

UNTIMED = {"xla_gpu_autotune_level": 0}
"""How what is not timed is compiled: XLA tries no variants of its products."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What a case runs on an implementation: functions, compiled before any runs.

    Attributes:
      make: Returns the state: pool, tables, queries, room for outputs. Its random
        numbers are drawn on the device.
      step: Takes the state, donated, and returns it; it makes ``calls`` calls of the
        op, each on data of its own (another layer, other pages), since XLA would merge
        equal calls and a second look finds the L2 warm. All of the state is donated,
        so that no address changes and the step replays as one graph.
      error: Returns, of the state after the first step, the largest error of one call
        against a reference, relative to the largest expected value; 0 is bit-equal.
        It keeps the state.
      calls: Calls of the op in one step.
      touched_bytes: Bytes that one step reads or writes, all calls together.
      without: The step without the calls, where it does other work as well: the time
        of a call is then what the calls add to it.
    """

    make: Callable[[], Any]
    step: Callable[[Any], Any]
    error: Callable[[Any], jax.Array]
    calls: int
    touched_bytes: int
    without: Callable[[Any], Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchCase:
    """One op at one shape.

    Attributes:
      op: ``mla_decode``, ``gqa_decode``, ``mla_extend``, ``gqa_extend``, ``kv_write``,
        ``page_move``, ``kda_decode``, ``kda_prefill``, ``gdn_decode``, ``gdn_prefill``,
        ``mamba2_decode``, ``state_copy``.
      shape: The numbers that name the case: ``heads`` or ``q_heads`` and ``kv_heads``,
        ``head_dim``, ``batch``, ``context``, ``query``, ``page_size``, ``window``,
        ``dtype``; ``tokens`` and ``rows`` for a prefill.
      moved_bytes: Bytes that one call must move once, reads and writes together.
      flops: Floating point operations that one call must do.
      max_error: Largest error that counts as right.
      implementations: Who can run it; a name that ``SUPPORT`` refuses is an error.
      program: Describes the run on an implementation; nothing is computed yet. Its
        second argument is a kernel configuration, None for the tuned or default one.
      bandwidth: Which of the card's bandwidths bounds it: ``read``, or ``copy`` of
        what writes about as much as it reads.
      configs: Kernel configurations worth trying, by implementation, for tuning.
      small: The case runs anywhere within a second.
    """

    op: str
    shape: Mapping[str, Any]
    moved_bytes: int
    flops: int
    max_error: float
    implementations: tuple[Implementation, ...]
    program: Callable[[Implementation, Any], Program]
    bandwidth: Literal["read", "copy"] = "read"
    configs: Mapping[Implementation, Sequence[Any]] = dataclasses.field(
        default_factory=dict
    )
    small: bool = False

    def share(self, us: float, ceilings: Mapping[str, float]) -> float:
        """Return the part of a call's time that the card's ceilings make necessary.

        Args:
          us: Microseconds of a call.
          ceilings: As `scripts.benchmarking.ceilings` measures them.
        """
        memory_us = self.moved_bytes / ceilings[f"{self.bandwidth}_gbps"] / 1e3
        matmul_us = self.flops / ceilings["matmul_tflops"] / 1e6
        return max(memory_us, matmul_us) / us

    def __str__(self) -> str:
        """Return the case as one line."""
        return f"{self.op} " + " ".join(f"{k}={v}" for k, v in self.shape.items())


def relative_error(actual: jax.Array, wanted: jax.Array) -> jax.Array:
    """Return the largest difference relative to the largest wanted value."""
    difference = jnp.abs(actual.astype(jnp.float32) - wanted.astype(jnp.float32))
    # A maximum keeps NaN.
    return jnp.max(difference) / jnp.max(jnp.abs(wanted)).astype(jnp.float32)


class WrongResultError(Exception):
    """An implementation's result is outside the bound, so it is not timed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """A program, compiled; nothing of it has run. Its state is a tuple of arrays.

    Attributes:
      make: As in `Program`.
      step: As in `Program`, donating.
      error: As in `Program`.
      calls: As in `Program`.
      touched_bytes: As in `Program`.
      without: As in `Program`, donating.
    """

    make: Callable[[], tuple[jax.Array, ...]]
    step: Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]]
    error: Callable[[tuple[jax.Array, ...]], jax.Array]
    calls: int
    touched_bytes: int
    without: Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]] | None = None


class MergedCallsError(ValueError):
    """XLA ran a kernel of a step less often than the step calls the op."""


def launches(hlo_text: str) -> collections.Counter[str]:
    """Return how often a compiled program launches each Triton or Mosaic GPU kernel."""
    return collections.Counter(
        found["ptx"] or found["mosaic"] for found in _LAUNCH.finditer(hlo_text)
    )


_LAUNCH = re.compile(
    r'custom-call\(.*custom_call_target="(?:'
    r'__gpu\$xla\.gpu\.ptx".* name = "(?P<ptx>[^"]+)"'
    r'|mosaic_gpu[^"]*".*op_name="(?:[^"/]*/)*?(?P<mosaic>[^"/]+)/[^"/]+")'
)


def _compiled_step(step: jax.stages.Wrapped, leaves, calls: int):
    """Compile a step; MergedCallsError if it does not run every kernel in each call."""
    compiled = step.lower(leaves).compile()
    for name, count in launches(compiled.as_text() or "").items():
        if count % calls:
            raise MergedCallsError(f"{name} is launched {count} times in {calls} calls")
    return compiled


def compilers(program: Program) -> dict[str, Callable[[], jax.stages.Compiled]]:
    """Return what compiles each function, for a state that is a tuple of arrays.

    Each raises UnsupportedError if the implementation does not cover the case, and
    that of the step MergedCallsError if XLA found that calls do the same work.
    """
    tree = jax.tree.structure(jax.eval_shape(program.make))

    def make() -> tuple[jax.Array, ...]:
        return tuple(jax.tree.leaves(program.make()))

    def on_leaves(step: Callable[[Any], Any]) -> jax.stages.Wrapped:
        def step_(leaves: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            after = step(jax.tree.unflatten(tree, leaves))
            if jax.tree.structure(after) != tree:
                raise ValueError(f"a step made {jax.tree.structure(after)} of {tree}")
            return tuple(jax.tree.leaves(after))

        # A donated argument that nothing reads would be dropped, and its address too.
        return jax.jit(step_, donate_argnums=0, keep_unused=True)

    def error(leaves: tuple[jax.Array, ...]) -> jax.Array:
        return program.error(jax.tree.unflatten(tree, leaves))

    leaves = jax.eval_shape(make)
    functions = {
        "make": lambda: jax.jit(make).lower().compile(UNTIMED),
        "step": lambda: _compiled_step(on_leaves(program.step), leaves, program.calls),
        "error": lambda: jax.jit(error).lower(leaves).compile(UNTIMED),
    }
    without = program.without
    if without is not None:
        functions["without"] = lambda: on_leaves(without).lower(leaves).compile()
    return functions


def compile_program(program: Program) -> Compiled:
    """Compile a program in this process.

    Raises:
      UnsupportedError: The implementation does not cover the case.
    """
    functions = {name: compile() for name, compile in compilers(program).items()}
    calls, touched_bytes = program.calls, program.touched_bytes
    return Compiled(**functions, calls=calls, touched_bytes=touched_bytes)


def _timed_steps(step, state: Any, steps: int) -> tuple[float, Any]:
    """Return the seconds that some steps take, dispatched back to back, and the state.

    It holds what the host needs to get going and to wait for the last array, once.
    """
    start = time.perf_counter()
    for _ in range(steps):
        state = step(state)
    jax.block_until_ready(state)
    return time.perf_counter() - start, state


def step_us(
    step: Callable[[Any], Any], state: Any, *, seconds: float = 0.12
) -> tuple[float, Any]:
    """Return the median microseconds of one step, and the state after the last.

    Steps are dispatched back to back: the host's cost of dispatch is hidden behind the
    device's work when a step is longer than that. What it costs to start and to wait
    is in every group of steps once, so the time of a step is the difference of a long
    and a short group. The gaps between the kernels of a step are in it.

    Args:
      step: Takes the state, donated, and returns it.
      state: Used up.
      seconds: Time to measure for: seven pairs of groups, or three where a step takes
        so long that seven take more than twice the time.
    """
    state = step(step(state))
    jax.block_until_ready(state)
    once, state = _timed_steps(step, state, 1)
    steps = max(int(seconds / 28 / max(once, 1e-6)), 1)
    times = []
    for _ in range(7 if 28 * once < 2 * seconds else 3):
        short, state = _timed_steps(step, state, steps)
        long, state = _timed_steps(step, state, 3 * steps)
        # A machine that is busy with other things can make the short group longer.
        is_ordered = long > short
        times.append((long - short) / (2 * steps) if is_ordered else long / (3 * steps))
    times.sort()
    return times[len(times) // 2] * 1e6, state


def check(
    case: BenchCase, implementation: Implementation, compiled: Compiled
) -> tuple[Any, float]:
    """Return the state after one step and its error.

    Raises:
      WrongResultError: The error is above ``case.max_error``, or not a number.
    """
    state = compiled.step(compiled.make())
    error = float(compiled.error(state))
    # Not `>`: an error that is NaN must fail too.
    if not error <= case.max_error:
        raise WrongResultError(
            f"{case} on {implementation}: error {error:.2e} is above "
            f"{case.max_error:.0e}"
        )
    return state, error


def measure(
    case: BenchCase,
    implementation: Implementation,
    *,
    compiled: Compiled | None = None,
    seconds: float = 0.12,
) -> Result:
    """Compare and time one case.

    Args:
      case: The case.
      implementation: Who runs it.
      compiled: The case's program; None compiles it first.
      seconds: Time to measure for.

    Raises:
      WrongResultError: The error is above ``case.max_error``.
      ValueError: A step touches so little that the cache would answer.
    """
    if compiled is None:
        compiled = compile_program(case.program(implementation, None))
    state, error = check(case, implementation, compiled)
    if not case.small and compiled.touched_bytes < COLD_BYTES:
        raise ValueError(
            f"{case}: a step touches {compiled.touched_bytes} bytes; raise its calls "
            f"until it touches {COLD_BYTES}"
        )
    us, state = step_us(compiled.step, state, seconds=seconds)
    if compiled.without is not None:
        us -= step_us(compiled.without, state, seconds=seconds)[0]
    us /= compiled.calls
    return Result(
        op=case.op,
        implementation=implementation,
        shape=dict(case.shape),
        us=round(us, 2),
        gbps=round(case.moved_bytes / us / 1e3, 1),
        tflops=round(case.flops / us / 1e6, 2),
        error=float(f"{error:.2e}"),
    )
