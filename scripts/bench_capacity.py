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
import json
import pathlib
import sys

from tqdm import tqdm

import models
from scripts.capacity.comparison import FEWEST_REQUESTS, Bench
from scripts.capacity.geometry import Card, read_geometry
from scripts.capacity.report import draw, print_cases, record_of
from scripts.capacity.traces import (
    MIXES,
    TraceError,
    generate_mix,
    read_trace,
)
from ukv.errors import UkvError

CONFIGS = pathlib.Path(models.__file__).parent / "configs"
MODELS = ("kimi-linear-48b", "gemma-3-27b", "gpt-oss-20b", "qwen3-next-80b-a3b")


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
