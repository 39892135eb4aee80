"""One model under one trace: every memory system, at the same bytes and load."""

import argparse
import dataclasses
from collections.abc import Callable, Iterator

from scripts.capacity.geometry import Card, Geometry
from scripts.capacity.simulation import Outcome, simulate
from scripts.capacity.systems import (
    default_share,
    padded_layout,
    request_bytes,
    share_bounds,
    split_layout,
)
from scripts.capacity.traces import (
    Trace,
)
from ukv.engine import EngineConfig
from ukv.layout import PoolLayout, unified_layout

GIB = 2**30
SYSTEMS = ("unified", "best", "default", "padded")
FEWEST_REQUESTS = 4
"""Mean requests of the smallest pool that is tried."""
FULL_FRACTION = 0.1
"""The pool is the limit if it keeps the queue waiting for this part of the time."""
QUEUED_FRACTION = 0.5
OVERLOADS = (1.5, 3.0, 6.0, 12.0)
"""Arrival rates to try, of what the unified pool serves, until somebody waits for
``QUEUED_FRACTION`` of the time in which requests arrive."""
LARGEST_MARGIN = 1.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a trace, and what each system did.

    Attributes:
      model: Its name.
      trace: Its name.
      pool_bytes: Bytes of every system's pool, at most.
      pool_requests: Requests of mean size that it holds.
      is_limit: Whether the pool is what limits the unified system.
      recorded_rate: Requests per second of the trace.
      rate: Requests per second in the simulation.
      repeated_fraction: Prompt blocks that an earlier request had; nobody uses it.
      share: The first kind's part of the bytes in the best static split.
      default_share: And in the default one.
      outcomes: By system.
    """

    model: str
    trace: str
    pool_bytes: int
    pool_requests: float
    is_limit: bool
    recorded_rate: float
    rate: float
    repeated_fraction: float
    share: float
    default_share: float
    outcomes: dict[str, Outcome]

    def gain(self, system: str) -> float:
        """Return the unified pool's tokens per second over another system's."""
        theirs = self.outcomes[system].tokens_per_second
        return self.outcomes["unified"].tokens_per_second / max(theirs, 1e-9)


def find_best_split(
    run: Callable[[float], Outcome],
    *,
    start: float,
    bounds: tuple[float, float],
    num_splits: int,
) -> tuple[float, Outcome]:
    """Return the split with the fewest refusals, then the most tokens per second.

    Tries the start, then steps to both sides, halved whenever neither is better.

    Args:
      run: Simulates a share of the first kind.
      start: First share to try.
      bounds: Shares in which the largest request fits, if the first is not larger.
      num_splits: Simulations.
    """
    low, high = bounds if bounds[0] <= bounds[1] else (0.0, 1.0)
    tried: dict[float, Outcome] = {}

    def worth(share: float) -> tuple[int, float]:
        found = tried[share]
        return -found.num_refused, found.tokens_per_second

    best, step = min(max(start, low), high), 0.08
    tried[best] = run(best)
    while len(tried) < num_splits and step > 1e-3:
        sides = [min(max(best + side, low), high) for side in (step, -step)]
        for share in [s for s in sides if s not in tried]:
            if len(tried) < num_splits:
                tried[share] = run(share)
        found = max(tried, key=worth)
        step, best = (step / 2, best) if found == best else (step, found)
    return best, tried[best]


class Bench:
    """The systems of one model.

    Attributes:
      geometry: The model.
    """

    def __init__(
        self, geometry: Geometry, card: Card, arguments: argparse.Namespace
    ) -> None:
        """Keep the options."""
        self.geometry = geometry
        self._card = card
        self._arguments = arguments
        self._config = EngineConfig(
            page_size=arguments.page_size,
            max_rows=min(1024, arguments.step_tokens - 1),
            max_step_tokens=arguments.step_tokens,
            decode_steps=arguments.decode_steps,
        )

    def _simulate(
        self, layout: PoolLayout, trace: Trace, *, has_borders: bool = True
    ) -> Outcome:
        return simulate(
            self.geometry,
            layout,
            trace,
            config=self._config,
            card=self._card,
            has_borders=has_borders,
        )

    def _unified(self, trace: Trace, pool_bytes: int) -> Outcome:
        layout = unified_layout(self.geometry.specs, pool_bytes=pool_bytes)
        return self._simulate(layout, trace)

    def _sizes(self, trace: Trace) -> Iterator[int]:
        """Yield sizes of the pool to try, largest first."""
        if self._arguments.pool_gib is not None:
            yield int(self._arguments.pool_gib * GIB)
            return
        largest = self._largest(trace)
        num_requests = self._arguments.pool_requests
        while True:
            wanted = int(num_requests * self._mean(trace))
            yield max(wanted, largest)
            num_requests //= 2
            if num_requests < FEWEST_REQUESTS or wanted <= largest:
                return

    def _mean(self, trace: Trace) -> float:
        each = [
            request_bytes(self.geometry.specs, arrival.num_tokens)
            for arrival in trace.arrivals
        ]
        return sum(each) / len(each)

    def _largest(self, trace: Trace) -> int:
        most = request_bytes(
            self.geometry.specs,
            trace.longest,
            chunk_len=self._arguments.step_tokens,
        )
        return int(LARGEST_MARGIN * most)

    def run(self, trace: Trace, tick: Callable[[], None]) -> Case:
        """Simulate a trace on every system.

        Args:
          trace: What arrives.
          tick: Called after each simulation.
        """
        specs = self.geometry.specs
        # Everybody at once: how much can be served, and is the pool the limit?
        burst = trace.at_rate(1e9)
        for pool_bytes in self._sizes(trace):
            served = self._unified(burst, pool_bytes)
            tick()
            if served.full_fraction >= FULL_FRACTION:
                break
        for overload in OVERLOADS:
            rate = overload * max(served.requests_per_second, 1e-9)
            offered = trace.at_rate(rate)
            unified = self._unified(offered, pool_bytes)
            tick()
            is_limit = unified.full_fraction >= FULL_FRACTION
            # A pool that a burst does not fill is not filled by anything slower.
            if served.full_fraction < FULL_FRACTION or (
                is_limit and unified.queued_fraction >= QUEUED_FRACTION
            ):
                break

        def split(share: float) -> Outcome:
            found = self._simulate(split_layout(specs, pool_bytes, share), offered)
            tick()
            return found

        bounds = share_bounds(
            specs, pool_bytes, trace.longest, self._arguments.step_tokens
        )
        share, best = find_best_split(
            split,
            start=unified.shares[specs[0].name],
            bounds=bounds,
            num_splits=self._arguments.splits,
        )
        usual = default_share(specs)
        default = split(usual)
        if (-default.num_refused, default.tokens_per_second) > (
            -best.num_refused,
            best.tokens_per_second,
        ):
            share, best = usual, default
        padded = self._simulate(
            padded_layout(specs, pool_bytes), offered, has_borders=False
        )
        tick()
        return Case(
            model=self.geometry.name,
            trace=trace.name,
            pool_bytes=pool_bytes,
            pool_requests=pool_bytes / self._mean(trace),
            is_limit=is_limit,
            recorded_rate=trace.rate,
            rate=rate,
            repeated_fraction=trace.repeated_fraction(),
            share=share,
            default_share=usual,
            outcomes={
                "unified": unified,
                "best": best,
                "default": default,
                "padded": padded,
            },
        )
