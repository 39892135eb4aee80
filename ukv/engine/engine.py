"""The engine: requests in, tokens out, one step at a time.

``step`` plans on the host, dispatches to the device, and then reads what the step
before it drew, so the device has the next step in its queue while the host reads.

A step that fails costs the pool its contents, since its buffers were donated. Nobody
loses a token: all requests wait again and are fed what they had. Those of the failed
step run alone until they are past the place where it failed, so that a second failure
names one request, which ends with an error.
"""

import dataclasses
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ukv.allocator import PoolMirror, describe_error, verify
from ukv.engine.config import EngineConfig
from ukv.engine.device import Device
from ukv.engine.holders import require_holders
from ukv.engine.layout import engine_layout
from ukv.engine.ledger import Ledger
from ukv.engine.model import Model
from ukv.engine.outputs import accept
from ukv.engine.plan import Chunk, Room, StepPlan
from ukv.engine.prefix_spec import PrefixSpec
from ukv.engine.programs import Programs
from ukv.engine.prompt_scores import keep_scores
from ukv.engine.request import (
    FinishReason,
    Request,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from ukv.engine.scheduler import Scheduler
from ukv.engine.sequence import Sequence as TokenSequence
from ukv.engine.stats import EngineStats, Trace
from ukv.engine.step import StepResults, StepShape
from ukv.errors import PoolStateError, SpecError

_LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _InFlight:
    """A dispatched step whose results were not read yet."""

    chunks: tuple[Chunk, ...]
    shape: StepShape
    results: StepResults


class Engine:
    """Continuous batching over one pool.

    Attributes:
      layout: The pool's layout.
      config: The sizes it was built for.
      programs: Its compiled programs.
      scheduler: Who runs and who waits.
    """

    def __init__(
        self,
        model: Model,
        weights: Any,
        *,
        pool_bytes: int,
        config: EngineConfig | None = None,
        programs: Programs | None = None,
        trace_path: str | os.PathLike[str] | None = None,
    ) -> None:
        """Allocate the pool and every buffer; compile nothing yet.

        Args:
          model: Sizes and forward pass.
          weights: Its arrays.
          pool_bytes: Budget of the pool in bytes.
          config: Sizes; None for the defaults.
          programs: Of another engine with the same model, bytes and config, so that
            nothing is compiled twice.
          trace_path: Where to write one JSON line for each step.

        Raises:
          BudgetError: The bytes hold no request.
          SpecError: The pool cannot have a prefix cache, or ``programs`` are of
            another model, layout or config.
        """
        self.config = config or EngineConfig()
        self.layout = engine_layout(model, pool_bytes=pool_bytes, config=self.config)
        self.programs = programs or Programs(model, self.layout, self.config)
        if not self.programs.serve(model, self.layout, self.config):
            raise SpecError(
                "programs were built for another model, pool or config: leave them out"
            )
        spec = PrefixSpec.of(self.layout) if self.config.prefix_cache else None
        self.scheduler = Scheduler(self.config, Ledger(self.layout, spec))
        self._device = Device(self.programs, weights)
        self._trace = None if trace_path is None else Trace(trace_path)
        self._vocab_size = model.vocab_size
        self._sequences: dict[str, TokenSequence] = {}
        self._in_flight: _InFlight | None = None
        self._outputs: list[RequestOutput] = []
        self._seeds = np.random.default_rng(self.config.seed)
        self._num_requests = self._num_steps = self._num_tokens = 0
        self._num_moves = self._num_waits = self._num_restarts = 0

    def warm_up(self, *, progress: bool = True) -> None:
        """Compile every program, so that no later step does.

        Args:
          progress: Whether to show a progress bar.
        """
        self._device.warm_up(progress=progress)

    def add_request(
        self,
        prompt: Iterable[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
    ) -> str:
        """Queue a request and return its id.

        Args:
          prompt: Token ids.
          params: How to continue; None for the defaults.
          priority: Larger goes first.
          request_id: A name; None for a number.

        Raises:
          RequestError: The request is malformed or too long, or its id is taken.
          BudgetError: Its bytes do not fit even into an empty pool.
        """
        name = f"request-{self._num_requests}" if request_id is None else request_id
        if name in self._sequences:
            raise RequestError(f"request id {name!r} is taken")
        if not isinstance(prompt, Iterable):
            raise RequestError(f"{prompt=} must be token ids, one prompt a request")
        request = Request(
            request_id=name,
            prompt=tuple(prompt),
            params=params or SamplingParams(),
            priority=priority,
        )
        request.require_within(
            vocab_size=self._vocab_size,
            max_kv_len=self.config.max_kv_len,
            max_stop_tokens=self.config.max_stop_tokens,
            scores_prompts=self.config.scores_prompts,
        )
        seed = request.params.seed
        if seed is None:
            seed = int(self._seeds.integers(2**31))
        self._sequences[name] = self.scheduler.add(request, seed)
        self._num_requests += 1
        return name

    def abort(self, request_id: str) -> None:
        """End a request; the next ``step`` reports it and frees its pages.

        Raises:
          RequestError: No unfinished request has that id.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            raise RequestError(f"no unfinished request has the id {request_id!r}")
        self._end(sequence, FinishReason.ABORT)

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do or to return."""
        return bool(
            self._sequences
            or self._outputs
            or self._in_flight
            or not self.scheduler.is_idle
        )

    @property
    def unread_results(self) -> tuple[jax.Array, ...]:
        """What the device still writes and the next ``step`` reads."""
        if self._in_flight is None:
            return ()
        return tuple(jax.tree.leaves(self._in_flight.results))

    def step(self) -> list[RequestOutput]:
        """Dispatch one step and return what the step before it brought.

        Raises:
          PoolStateError: The pool's error word is set.
        """
        before, self._in_flight = self._in_flight, None
        failure = None
        plan = self.scheduler.plan()
        if plan is not None:
            shape = self.programs.shape_of(plan) if plan.chunks else None
            try:
                self._in_flight = self._dispatch(plan, shape)
            except Exception as error:
                _LOGGER.exception("a step was not dispatched")
                failure = (plan.chunks, shape, error)
        if before is not None:
            try:
                self._read(before)
            except jax.errors.JaxRuntimeError as error:
                _LOGGER.exception("a step failed on the device")
                failure = (before.chunks, before.shape, error)
        if failure is not None:
            self._recover(*failure)
        outputs, self._outputs = self._outputs, []
        return outputs

    def generate(
        self,
        prompts: Sequence[Iterable[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Run prompts to their end; yield outputs as they come, in any order.

        Args:
          prompts: Token ids of each; their request ids are returned by the outputs,
            ``request-0`` and on for a fresh engine.
          params: One for all, or one for each.
        """
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        wanted = {
            self.add_request(prompt, param)
            for prompt, param in zip(prompts, params, strict=True)
        }
        while wanted:
            for output in self.step():
                if output.finish_reason is not None:
                    wanted.discard(output.request_id)
                yield output

    def stats(self) -> EngineStats:
        """Return counts and the present load; reads nothing from the device."""
        holdings, layout = self.scheduler.holdings, self.layout
        mirror, cached = holdings.ledger.mirror, holdings.evictable_pages()
        return EngineStats(
            num_steps=self._num_steps,
            num_tokens=self._num_tokens,
            num_retractions=self.scheduler.num_retractions,
            num_moves=self._num_moves,
            num_waits=self._num_waits,
            num_restarts=self._num_restarts,
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            used_bytes={
                sub.name: mirror.live(sub.name) * sub.page_bytes
                for sub in layout.sub_pools
            },
            cached_bytes={
                sub.name: cached.get(sub.name, 0) * sub.page_bytes
                for sub in layout.sub_pools
            },
            pool_bytes=layout.pool_bytes,
            prefix_hit_tokens=holdings.num_hit,
            prefix_lookup_tokens=holdings.num_looked_up,
        )

    def clear_prefix_cache(self) -> None:
        """Give back every page and state that only the prefix cache holds."""
        holdings = self.scheduler.holdings
        holdings.clear()
        self._device.run(StepPlan(actions=holdings.take_actions()), None)

    def verify(self) -> None:
        """Check every invariant of the pool, and that host and holders count alike.

        Waits for the device: for tests and for debugging.

        Raises:
          PoolStateError: With a line for each broken invariant.
        """
        pool = self._device.state.pool
        verify(pool)
        found, expected = PoolMirror.read(pool), self.scheduler.ledger.mirror
        if found != expected:
            raise PoolStateError(
                f"the device counts {found.counters}, the host {expected.counters}"
            )
        scheduler = self.scheduler
        require_holders(
            self._device.state, scheduler.with_rows, scheduler.holdings.cache
        )

    def close(self) -> None:
        """Close the trace, if there is one."""
        if self._trace is not None:
            self._trace.close()

    def _dispatch(self, plan: StepPlan, shape: StepShape | None) -> _InFlight | None:
        """Send a plan to the device; return what to read later."""
        results = self._device.run(plan, shape)
        self._num_moves += sum(isinstance(action, Room) for action in plan.actions)
        if shape is None or results is None:
            return None
        self._num_steps += 1
        if self._trace is not None:
            num_tokens = sum(chunk.query_len for chunk in plan.chunks)
            self._trace.write(
                self.stats(),
                shape=shape.name,
                rows=len(plan.chunks),
                tokens=num_tokens,
            )
        return _InFlight(plan.chunks, shape, results)

    def _read(self, step: _InFlight) -> None:
        """Read the results of a step and turn them into outputs."""
        leaves = jax.tree.leaves(step.results)
        self._num_waits += not all(leaf.is_ready() for leaf in leaves)
        # The one read of the loop; explicit, so that a transfer guard lets it pass.
        results = jax.device_get(step.results)
        if results.error.any():
            raise PoolStateError("; ".join(describe_error(self.layout, results.error)))
        if step.shape.scores_tokens:
            keep_scores(step.chunks, results.scores)
        drawn = results.drawn
        for row, chunk in enumerate(step.chunks):
            if chunk.is_sampled and chunk.sequence.finish_reason is None:
                num_passes = chunk.query_len if chunk.is_decoding else 1
                output = accept(chunk.sequence, drawn[:num_passes, :, row])
                self._num_tokens += len(output.new_tokens)
                self._report(chunk.sequence, output)

    def _report(self, sequence: TokenSequence, output: RequestOutput) -> None:
        """Keep an output for the caller; a request with a reason ends."""
        self._outputs.append(output)
        if output.finish_reason is not None:
            self.scheduler.finish(sequence, output.finish_reason)
            del self._sequences[output.request_id]

    def _end(
        self, sequence: TokenSequence, reason: FinishReason, error: str | None = None
    ) -> None:
        """End a request that drew nothing new."""
        name = sequence.request.request_id
        output = RequestOutput(request_id=name, finish_reason=reason, error=error)
        self._report(sequence, output)

    def _recover(
        self, chunks: Sequence[Chunk], shape: StepShape | None, error: Exception
    ) -> None:
        """Start over with an empty pool, without the request that is to blame.

        Out of memory is nobody's fault while a smaller program can be used instead.
        """
        self._in_flight = None
        self._num_restarts += 1
        text = f"{type(error).__name__}: {error}"
        is_smaller = False
        if shape is not None and "RESOURCE_EXHAUSTED" in text:
            is_smaller = self.scheduler.use_smaller(
                shape.bucket.num_tokens, is_decode=shape.is_decode
            )
        if not is_smaller:
            suspects = [c for c in chunks if c.sequence.finish_reason is None]
            for chunk in suspects:
                chunk.sequence.suspect_len = chunk.context_len + chunk.query_len
            if len(suspects) == 1:
                self._end(suspects[0].sequence, FinishReason.ERROR, text)
        self.scheduler.restart(self._sequences.values())
        self._device.reset()
