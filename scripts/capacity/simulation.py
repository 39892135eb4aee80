"""Discrete events over the engine's own scheduler: it plans, a cost model keeps time.

Every step is ``Scheduler.plan()`` with a ``Ledger`` whose allocator is the pool's host
mirror, so who is admitted, served and retracted is decided by the lines that drive a
GPU. Results come one step behind, as in the engine.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from scripts.capacity.geometry import Card, Geometry, used_bytes
from scripts.capacity.traces import Arrival, Trace
from ukv.allocator import PoolMirror
from ukv.engine import EngineConfig, FinishReason, Request, SamplingParams
from ukv.engine.ledger import Advance, Ledger, Pages
from ukv.engine.plan import Chunk, StepPlan
from ukv.engine.scheduler import Scheduler
from ukv.engine.sequence import Sequence
from ukv.errors import BudgetError
from ukv.layout import PoolLayout

# Requests handed to the scheduler ahead of time; it serves them in order anyway.
LOOKAHEAD = 8


class QuickMirror(PoolMirror):
    """The pool's host mirror, which does not work out what nothing changes."""

    def alloc(self, num_pages: Mapping[str, int]) -> PoolMirror:
        """Return the mirror after ``alloc``: itself if there is nothing to bind."""
        return super().alloc(num_pages) if any(num_pages.values()) else self

    def release(self, num_pages: Mapping[str, int]) -> PoolMirror:
        """Return the mirror after ``release``: itself if nothing died."""
        return super().release(num_pages) if any(num_pages.values()) else self


class SimulatedLedger(Ledger):
    """The engine's ledger, which also remembers answers and counts moves.

    Attributes:
      was_full: Whether an admission was refused for bytes since this was cleared.
      num_moves: Steps before which pages had to move.
      moved_bytes: Bytes of them, at most: no more pages move than there are holes.
    """

    def __init__(self, layout: PoolLayout) -> None:
        """Start with an empty pool."""
        super().__init__(layout)
        self.mirror = QuickMirror.create(layout)
        self.was_full = False
        self.num_moves = 0
        self.moved_bytes = 0
        self._served: tuple[object, dict] = (None, {})
        self._held: dict[tuple[int, int], Pages] = {}

    def fits(self, pages: Mapping[str, int]) -> bool:
        """Ask the ledger, and remember a refusal."""
        fits = super().fits(pages)
        self.was_full |= not fits
        return fits

    def most_held(self, num_tokens: int, chunk_len: int) -> Pages:
        """Return the ledger's answer, from memory if it was asked before."""
        key = (num_tokens, chunk_len)
        if key not in self._held:
            self._held[key] = super().most_held(num_tokens, chunk_len)
        return self._held[key]

    def can_serve(self, needs: Mapping[str, int]) -> bool:
        """Return the ledger's answer, from memory while the pool is the same."""
        if self._served[0] is not self.mirror:
            self._served = (self.mirror, {})
        answers, key = self._served[1], tuple(needs.items())
        if key not in answers:
            answers[key] = super().can_serve(needs)
        return answers[key]

    def spend(
        self,
        states: Mapping[str, int],
        advances: Iterable[Iterable[Advance]],
    ) -> Pages | None:
        """Follow a step, and count what moves before it."""
        before = self.mirror
        room = super().spend(states, advances)
        if room is not None:
            self.num_moves += 1
            self.moved_bytes += sum(
                min(holes, live) * sub.page_bytes
                for (live, holes, _, _), sub in zip(
                    before.counters, self.layout.sub_pools, strict=True
                )
            )
        return room


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a system did with a trace.

    Means are over the time in which somebody waits, so neither the filling nor the
    draining of the pool counts. A pool is used where it holds visible tokens and
    states; it is held where a page is bound, whatever lies in it.

    Attributes:
      pool_bytes: Bytes of the pool.
      mean_used: Fraction of the pool in use, by time.
      peak_used: The largest.
      mean_held: Fraction of the pool in bound pages, by time.
      peak_held: The largest.
      shares: Of the bytes held, each kind's part, by time.
      mean_concurrency: Requests with pages, by time.
      peak_concurrency: The largest.
      num_finished: Requests that ended.
      num_refused: Requests that no state of the pool could hold.
      refusal: The message of the first one.
      num_retractions: How often a request lost its pages.
      num_moves: Steps before which pages moved.
      move_fraction: Of the time, spent in moves.
      seconds: From the first arrival to the last end.
      num_tokens: Tokens generated.
      num_steps: Steps planned.
      queued_fraction: Of the time until the last arrival, how much somebody waited.
      full_fraction: Of the time in which somebody waited, how much the first of them
        was looked at and did not fit into the pool.
    """

    pool_bytes: int
    mean_used: float
    peak_used: float
    mean_held: float
    peak_held: float
    shares: dict[str, float]
    mean_concurrency: float
    peak_concurrency: int
    num_finished: int
    num_refused: int
    refusal: str
    num_retractions: int
    num_moves: int
    move_fraction: float
    seconds: float
    num_tokens: int
    num_steps: int
    queued_fraction: float
    full_fraction: float

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the whole time."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def requests_per_second(self) -> float:
        """Finished requests over the whole time."""
        return self.num_finished / self.seconds if self.seconds else 0.0


class _Clock:
    """Time-weighted sums of a run."""

    def __init__(self, layout: PoolLayout) -> None:
        """Start at zero."""
        self.layout = layout
        self.seconds = self.queued = self.queued_early = self.full = self.moving = 0.0
        self.used = self.held = self.rows = 0.0
        self.by_kind = dict.fromkeys(layout.names, 0.0)
        self.peak_used = self.peak_held = self.peak_rows = 0

    def add(
        self, seconds: float, *, used: int, rows: int, mirror: PoolMirror, weight: float
    ) -> None:
        """Count a step; ``weight`` is its length if somebody waits, else hardly any."""
        held = mirror.bytes_in_use()
        assert used <= held <= self.layout.pool_bytes, (used, held)
        self.seconds += seconds
        self.queued += weight
        self.used += weight * used
        self.held += weight * held
        self.rows += weight * rows
        for name in self.by_kind:
            sub = self.layout.sub_pool(name)
            self.by_kind[name] += weight * mirror.live(name) * sub.page_bytes
        self.peak_used = max(self.peak_used, used)
        self.peak_held = max(self.peak_held, held)
        self.peak_rows = max(self.peak_rows, rows)

    def outcome(self, **counts: Any) -> Outcome:
        """Return the means and peaks beside these counts."""
        queued, total = max(self.queued, 1e-300), self.layout.pool_bytes
        held = max(sum(self.by_kind.values()), 1e-300)
        return Outcome(
            pool_bytes=total,
            mean_used=self.used / queued / total,
            peak_used=self.peak_used / total,
            mean_held=self.held / queued / total,
            peak_held=self.peak_held / total,
            shares={name: part / held for name, part in self.by_kind.items()},
            mean_concurrency=self.rows / queued,
            peak_concurrency=self.peak_rows,
            move_fraction=self.moving / max(self.seconds, 1e-300),
            full_fraction=self.full / queued,
            **counts,
        )


def simulate(
    geometry: Geometry,
    layout: PoolLayout,
    trace: Trace,
    *,
    config: EngineConfig,
    card: Card,
    has_borders: bool = True,
    on_step: Callable[[Scheduler], None] | None = None,
) -> Outcome:
    """Run a trace until all its requests have ended.

    Args:
      geometry: The model; its specs say what is used, those of the layout what is
        held.
      layout: The system's pool.
      trace: Requests and when they arrive.
      config: Of the scheduler.
      card: Keeps the time.
      has_borders: Whether pages move to make room; False if any page serves any kind.
      on_step: Called after each plan.
    """
    ledger = SimulatedLedger(layout)
    scheduler = Scheduler(config, ledger)
    clock = _Clock(layout)
    arrivals, last_arrival = trace.arrivals, trace.arrivals[-1].seconds
    flying: tuple[Chunk, ...] = ()
    refusal, num_refused, num_finished, num_tokens, num_steps = "", 0, 0, 0, 0
    now, moved, next_index = 0.0, 0, 0
    while True:
        while (
            next_index < len(arrivals)
            and arrivals[next_index].seconds <= now
            and len(scheduler.waiting) < LOOKAHEAD
        ):
            try:
                scheduler.add(_request(arrivals[next_index], next_index), seed=0)
            except BudgetError as error:
                num_refused, refusal = num_refused + 1, refusal or str(error)
            next_index += 1
        ledger.was_full = False
        plan = scheduler.plan()
        for chunk in flying:
            num_tokens += _read(chunk)
            num_finished += _finish(scheduler, chunk.sequence)
        flying = plan.chunks if plan else ()
        if plan is None or not plan.chunks:
            if scheduler.is_idle and next_index == len(arrivals):
                break
            if scheduler.is_idle:
                now = max(now, arrivals[next_index].seconds)
            continue
        num_steps += 1
        seconds = _plan_seconds(geometry, card, plan)
        if has_borders:
            moving = card.seconds(2 * (ledger.moved_bytes - moved), 0)
            seconds, moved = seconds + moving, ledger.moved_bytes
            clock.moving += moving
        waits = bool(scheduler.waiting) or (
            next_index < len(arrivals) and arrivals[next_index].seconds <= now
        )
        clock.add(
            seconds,
            used=_used(geometry, plan, scheduler.running),
            rows=len({*(c.sequence for c in plan.chunks), *scheduler.running}),
            mirror=ledger.mirror,
            # Without a queue the means are of the whole run, not undefined.
            weight=seconds if waits else seconds * 1e-9,
        )
        if waits:
            clock.full += seconds * ledger.was_full
            clock.queued_early += max(min(seconds, last_arrival - now), 0.0)
        now += seconds
        if on_step is not None:
            on_step(scheduler)
    assert ledger.mirror.bytes_in_use() == 0, "pages are left"
    assert num_finished + num_refused == len(arrivals), "requests are lost"
    return clock.outcome(
        refusal=refusal,
        num_refused=num_refused,
        num_finished=num_finished,
        num_tokens=num_tokens,
        num_steps=num_steps,
        num_retractions=scheduler.num_retractions,
        num_moves=ledger.num_moves if has_borders else 0,
        seconds=now - arrivals[0].seconds,
        queued_fraction=clock.queued_early / last_arrival if last_arrival else 1.0,
    )


def _request(arrival: Arrival, index: int) -> Request:
    # Tokens below zero are no hash.
    return Request(
        request_id=str(index),
        prompt=arrival.prompt(-1 - index),
        params=SamplingParams(max_new_tokens=arrival.output_len),
    )


def _read(chunk: Chunk) -> int:
    """Read the tokens of a chunk back; return how many."""
    count = chunk.query_len if chunk.is_decoding else int(chunk.is_sampled)
    chunk.sequence.generated.extend([0] * count)
    return count


def _finish(scheduler: Scheduler, sequence: Sequence) -> bool:
    """End a sequence whose last token was read; return whether it was the last."""
    most = sequence.request.params.max_new_tokens
    if len(sequence.generated) < most or sequence.finish_reason is not None:
        return False
    scheduler.finish(sequence, FinishReason.LENGTH)
    return True


def _used(geometry: Geometry, plan: StepPlan, running: list[Sequence]) -> int:
    """Return the bytes that the rows of a step need at its end."""
    lens = {sequence: sequence.context_len for sequence in running}
    # Who got its last token has left, and its pages stay until the next plan.
    lens |= {c.sequence: c.context_len + c.query_len for c in plan.chunks}
    return sum(used_bytes(geometry.specs, n) for n in lens.values() if n)


def _plan_seconds(geometry: Geometry, card: Card, plan: StepPlan) -> float:
    """Return the time of a step: of one pass, or of several that decode."""
    context_lens = np.array([chunk.context_len for chunk in plan.chunks], np.int64)
    query_lens = np.array([chunk.query_len for chunk in plan.chunks], np.int64)
    if not plan.is_decode:
        sampled = sum(chunk.is_sampled for chunk in plan.chunks)
        return card.seconds(*geometry.pass_cost(context_lens, query_lens, sampled))
    seconds = 0.0
    for done in range(int(query_lens.max())):
        rows = context_lens[query_lens > done] + done
        cost = geometry.pass_cost(rows, np.ones_like(rows), len(rows))
        seconds += card.seconds(*cost)
    return seconds
