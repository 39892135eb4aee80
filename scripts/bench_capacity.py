"""Compares memory systems under load: how full the pool gets, who fits, how fast.

Four models, without weights, serve a trace in a discrete-event simulation. The engine's
own scheduler and host mirror decide each step; a cost model keeps the time: a pass
takes the larger of its bytes over the card's copy rate and its products over the card's
bfloat16 rate, both as measured in docs/benchmarks/pool_h200.json. Needs no GPU.

    unified  one buffer with moving borders; moves are charged
    best     the static split with the most tokens per second, found with hindsight
    default  the static split by SGLang's default ratios: bytes of states 0.9 of those
             of K/V, tokens of windows 0.8 of all tokens
    padded   one page size for all kinds, layers grouped as in vLLM

    python scripts/bench_capacity.py
    python scripts/bench_capacity.py --models gpt-oss-20b --mixes chat --requests 200
    python scripts/bench_capacity.py --trace azure_2023_conv.csv --json conv.json
    python scripts/bench_capacity.py --trace a.csv b.jsonl --mixes chat --png out.png

Without --trace the mixes are generated. A pool holds so many requests of the trace's
mean size as --pool-requests says, halved until the pool and not the step's token budget
is the limit, and never less than 1.25 times its largest request. Requests arrive at 1.5
times the rate that the unified pool serves, or 3, 6 or 12 times if that leaves the pool
with room for most of the time; bursts stay as recorded.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from matplotlib.figure import Figure
from tqdm import tqdm

import models
from scripts import benchmarking
from scripts.capacity.geometry import Card, Geometry, read_geometry
from scripts.capacity.simulation import Outcome, simulate
from scripts.capacity.systems import (
    default_share,
    padded_layout,
    request_bytes,
    share_bounds,
    split_layout,
)
from scripts.capacity.traces import (
    MIXES,
    Trace,
    TraceError,
    generate_mix,
    read_trace,
)
from ukv.engine import EngineConfig
from ukv.errors import UkvError
from ukv.layout import PoolLayout, unified_layout

GIB = 2**30
CONFIGS = pathlib.Path(models.__file__).parent / "configs"
MODELS = ("kimi-linear-48b", "gemma-3-27b", "gpt-oss-20b", "qwen3-next-80b-a3b")
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
REFUSED = {"rotation": 90, "ha": "center", "va": "bottom", "fontsize": 6}
TIE = 0.02
"""Differences in throughput below this count as none."""


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


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options, or explain and exit."""
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nmixes: {', '.join(MIXES)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=list(MODELS),
        metavar="MODEL",
        help=f"default: {' '.join(MODELS)}",
    )
    parser.add_argument(
        "--trace",
        nargs="+",
        type=pathlib.Path,
        default=[],
        metavar="PATH",
        help="csv of Azure or jsonl of Mooncake",
    )
    parser.add_argument(
        "--mixes",
        nargs="*",
        choices=sorted(MIXES),
        metavar="MIX",
        help="generated traces; default: chat, documents and shifting, none if "
        "there is a --trace",
    )
    for option, default, help_text in (
        ("requests", 40, "first requests of each trace"),
        ("seed", 0, "of the generated mixes"),
        ("pool-requests", 16, "requests of mean size that the pool holds"),
        ("splits", 5, "static splits to try for the best one"),
        ("page-size", 64, "tokens per page"),
        ("step-tokens", 2048, "token budget of a step"),
        ("decode-steps", 4, "decode steps in one dispatch"),
    ):
        parser.add_argument(
            f"--{option}",
            type=int,
            default=default,
            metavar="N",
            help=f"{help_text}; default %(default)s",
        )
    parser.add_argument(
        "--pool-gib", type=float, metavar="GIB", help="size of every pool instead"
    )
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="PATH", help="write the record here"
    )
    parser.add_argument(
        "--png", type=pathlib.Path, metavar="PATH", help="draw the results here"
    )
    parser.add_argument("--commit", help="commit to record when git is not at hand")
    arguments = parser.parse_args(words)
    for name, least in (
        ("requests", 2),
        ("pool_requests", FEWEST_REQUESTS),
        ("splits", 1),
        ("page_size", 1),
        ("decode_steps", 1),
    ):
        if getattr(arguments, name) < least:
            option = name.replace("_", "-")
            parser.error(
                f"--{option} {getattr(arguments, name)}: must be {least} or more"
            )
    if arguments.step_tokens < 64:
        parser.error(f"--step-tokens {arguments.step_tokens}: must be 64 or more")
    if arguments.mixes is None:
        arguments.mixes = [] if arguments.trace else ["chat", "documents", "shifting"]
    if not (arguments.mixes or arguments.trace):
        parser.error("neither --trace nor --mixes: there is nothing to serve")
    return arguments


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


def print_cases(cases: list[Case]) -> None:
    """Print a table, and where the unified pool wins nothing."""
    for case in cases:
        print(
            f"\n{case.model}, {case.trace}: pool {case.pool_bytes / GIB:.2f} GiB "
            f"({case.pool_requests:.0f} mean requests), {case.rate:.2f} requests/s "
            f"(recorded: {case.recorded_rate:.2f}), "
            f"split best {case.share:.1%} / default {case.default_share:.1%}"
            + ("" if case.is_limit else "; the pool is NOT the limit")
        )
        print(
            f"  {'system':8} {'used':>6} {'peak':>6} {'held':>6} {'peak':>6} "
            f"{'rows':>7} {'peak':>5} {'req/s':>8} {'tok/s':>9} {'gain':>6} "
            f"{'retract':>7} {'refused':>7}"
        )
        for system in SYSTEMS:
            found = case.outcomes[system]
            print(
                f"  {system:8} {found.mean_used:6.1%} {found.peak_used:6.1%} "
                f"{found.mean_held:6.1%} {found.peak_held:6.1%} "
                f"{found.mean_concurrency:7.2f} {found.peak_concurrency:5} "
                f"{found.requests_per_second:8.3f} {found.tokens_per_second:9.1f} "
                f"{case.gain(system):6.3f} {found.num_retractions:7} "
                f"{found.num_refused:7}"
            )
    print(
        "\nused: visible tokens and states, of the pool; held: bound pages; rows: "
        "requests with pages.\nMeans are over the time in which somebody waits. gain: "
        "the unified pool's tokens/s over this system's;\nit goes with requests of the "
        "other system refused, if there are any."
    )
    print("\nWhat the unified pool does not win (tokens/s, within 2%, or lost):")
    for line in not_won(cases) or ["nothing"]:
        print(f"  {line}")


def not_won(cases: list[Case]) -> list[str]:
    """Return the comparisons that the unified pool ties or loses."""
    lines = []
    for case in cases:
        for system in SYSTEMS[1:]:
            found, gain = case.outcomes[system], case.gain(system)
            if gain < 1.0 + TIE:
                word = "ties with" if gain > 1.0 - TIE else "loses to"
                refused = (
                    f", which refuses {found.num_refused}" if found.num_refused else ""
                )
                lines.append(
                    f"{case.model}, {case.trace}: {word} {system} ({gain:.3f}){refused}"
                )
    return lines


def record_of(cases: list[Case], card: Card, arguments: argparse.Namespace) -> dict:
    """Return the record, in the form of the other benchmarks."""
    facts = benchmarking.device_facts(arguments.commit)
    facts["device"] = f"none: a simulation with the ceilings of {card.name}"
    words = ["python", "scripts/bench_capacity.py"]
    # Where the files lie on this machine is nobody's business.
    words += [pathlib.Path(w).name if "/" in w else w for w in sys.argv[1:]]
    facts["command"] = " ".join(words)
    results = []
    for case in cases:
        shape = {
            field.name: getattr(case, field.name)
            for field in dataclasses.fields(case)
            if field.name != "outcomes"
        }
        for system, found in case.outcomes.items():
            result = benchmarking.Result(
                op="capacity",
                implementation=system,
                shape=shape,
                us=1e6 * found.seconds / max(found.num_steps, 1),
            )
            results.append(
                {
                    **dataclasses.asdict(result),
                    **dataclasses.asdict(found),
                    "tokens_per_second": found.tokens_per_second,
                    "requests_per_second": found.requests_per_second,
                }
            )
    return {
        **facts,
        "ceilings": {
            "copy_gbps": card.copy_gbps,
            "matmul_tflops": card.matmul_tflops,
        },
        "cost_model": "us: mean step; a pass takes max(bytes / copy rate, products / "
        "bfloat16 rate); a move of pages twice their bytes, as many as there are holes",
        "options": {
            name: getattr(arguments, name)
            for name in ("requests", "seed", "page_size", "step_tokens", "decode_steps")
        },
        "not_won": not_won(cases),
        "results": _rounded(results),
    }


def _rounded(value: Any) -> Any:
    """Return the value with five digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def draw(cases: list[Case]) -> Figure:
    """Return bars for each model (rows) and trace: use, requests at once, tokens/s."""
    names = list(dict.fromkeys(case.model for case in cases))
    panels: tuple[tuple[str, Callable[[Case, str], float]], ...] = (
        (
            "pool in use (mean, %)",
            lambda case, system: 100 * case.outcomes[system].mean_used,
        ),
        (
            "requests at once / unified",
            lambda case, system: (
                case.outcomes[system].mean_concurrency
                / max(case.outcomes["unified"].mean_concurrency, 1e-9)
            ),
        ),
        (
            "tokens per second / unified",
            lambda case, system: 1 / max(case.gain(system), 1e-9),
        ),
    )
    most = max(sum(case.model == name for case in cases) for name in names)
    figure = Figure(
        figsize=(3 * max(2.2, 0.8 * most), 2.3 * len(names) + 1.2),
        layout="constrained",
    )
    grid = figure.subplots(len(names), len(panels), squeeze=False, sharex="row")
    width = 0.8 / len(SYSTEMS)
    for row, name in zip(list(grid), names, strict=True):
        mine = [case for case in cases if case.model == name]
        for axes, (title, value) in zip(row, panels, strict=True):
            for index, system in enumerate(SYSTEMS):
                axes.bar(
                    [x + (index - 1.5) * width for x in range(len(mine))],
                    [value(case, system) for case in mine],
                    width,
                    label=system,
                    color=f"C{index}",
                )
                for x, case in enumerate(mine):
                    if case.outcomes[system].num_refused and axes is row[-1]:
                        left = x + (index - 1.5) * width
                        axes.text(left, 0.02, "refuses some", **REFUSED)
            axes.set_xticks(range(len(mine)))
            axes.set_xticklabels(
                [case.trace.replace("_trace", "").replace("_", "\n") for case in mine],
                fontsize=7,
            )
            axes.tick_params(axis="y", labelsize=7)
            if name == names[0]:
                axes.set_title(title, fontsize=9)
            axes.grid(axis="y", alpha=0.3)
            axes.set_axisbelow(True)
        row[0].set_ylabel(name, fontsize=9)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(SYSTEMS))
    return figure


def main() -> None:
    """Run the benchmark."""
    arguments = parse_arguments()
    card = Card.read()
    try:
        traces = [
            read_trace(path, num_requests=arguments.requests)
            for path in arguments.trace
        ]
        traces += [
            generate_mix(name, num_requests=arguments.requests, seed=arguments.seed)
            for name in arguments.mixes
        ]
        cases = []
        with tqdm(
            total=len(arguments.models) * len(traces), disable=None, smoothing=0
        ) as bar:
            for model in arguments.models:
                geometry = read_geometry(CONFIGS / model, page_size=arguments.page_size)
                bench = Bench(geometry, card, arguments)
                for trace in traces:
                    bar.set_description(f"{model}, {trace.name}")
                    cases.append(bench.run(trace, bar.refresh))
                    bar.update()
    except (OSError, TraceError, UkvError) as error:
        sys.exit(f"bench_capacity.py: error: {error}")
    print(
        f"cost model: {card.name}, {card.copy_gbps:,.0f} GB/s copied, "
        f"{card.matmul_tflops:,.0f} TFLOP/s bfloat16"
    )
    print_cases(cases)
    if arguments.json is not None:
        record = record_of(cases, card, arguments)
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    if arguments.png is not None:
        draw(cases).savefig(arguments.png, dpi=100)


if __name__ == "__main__":
    main()
