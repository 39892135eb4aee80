"""Asks a model the same questions in every way it can run, and compares the tokens.

    python scripts/eval_matrix.py --json out/matrix.json
    python scripts/eval_matrix.py --backends xla best --page-sizes 16 --limit 8

Backends: ``xla`` for every op; ``best``, what a user gets; ``triton`` and
``mosaic_gpu``, those kernels wherever they cover a call, also the ones that are only
there on request, and the best elsewhere; the report has what ran for each op. Each is
run with every page size, with and without the prefix cache, in a process of its own,
on a unified pool that is short of memory; the first one is the reference.

Kernels round in other orders, so two tokens that are equally likely may change places,
and what follows differs. Such a tie is told from a fault by what the model thought:
of two tokens that tie, neither was more likely than about a half. The last line of the
output is the report, as JSON; the exit code is 1 if a run failed, or if tokens differ
that are no tie.
"""

import argparse
import dataclasses
import json
import logging
import math
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from models.named import find_model, load_found, read_tokenizer
from scripts.benchmarking import device_facts
from scripts.evaluation.answers import last_number
from scripts.evaluation.generation import stop_tokens_of
from scripts.evaluation.pools import (
    default_pool_bytes,
    engine_config,
    with_implementation,
)
from scripts.evaluation.questions import built_in_set
from ukv import implementation
from ukv.engine import Engine, SamplingParams
from ukv.errors import UkvError

BACKENDS = ("xla", "best", "triton", "mosaic_gpu")
TIE_PROBABILITY = 0.6
"""Of two tokens that tie neither is more likely than a half, and a margin."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run.

    Attributes:
      backend: One of ``BACKENDS``.
      page_size: Tokens per page.
      prefix_cache: Whether prompts share what they have in common.
    """

    backend: str
    page_size: int
    prefix_cache: bool

    def __str__(self) -> str:
        """Return its name in the output."""
        cache = "on" if self.prefix_cache else "off"
        return f"{self.backend}, page size {self.page_size}, prefix cache {cache}"


def prefer(backend: str) -> None:
    """Put the lines of one implementation first in this process' table."""

    def first(lines: Sequence[implementation.Support]) -> list[implementation.Support]:
        return [
            dataclasses.replace(line, by_default=True)
            for line in lines
            if line.implementation == backend
        ]

    implementation.SUPPORT = {
        op: (
            *first(lines),
            *(line for line in lines if line.implementation != backend),
        )
        for op, lines in implementation.SUPPORT.items()
    }


class _Chosen(logging.Handler):
    """Collects what ran for each op, from the log of the dispatch."""

    def __init__(self) -> None:
        super().__init__()
        self.by_op: dict[str, set[str]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Note one choice."""
        op, chosen = map(str, record.args or ())
        self.by_op.setdefault(op, set()).add(chosen)


def watch_dispatch() -> dict[str, set[str]]:
    """Return what runs for each op from now on, filled as it is chosen."""
    handler = _Chosen()
    logger = logging.getLogger(implementation.__name__)
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    return handler.by_op


def run_variant(variant: Variant, arguments: argparse.Namespace) -> dict[str, Any]:
    """Ask every question in one way; return tokens, log-probabilities and counts."""
    started = time.perf_counter()
    if variant.backend in ("triton", "mosaic_gpu"):
        prefer(variant.backend)
    ran = watch_dispatch()
    asked = built_in_set(limit=arguments.limit, shots=4)
    path = find_model(arguments.model)
    tokenizer = read_tokenizer(path)
    is_cpu = jax.default_backend() == "cpu"
    dtype = "float32" if is_cpu else "bfloat16"
    loaded = load_found(path, dtype=dtype, progress=False)
    pinned = "xla" if variant.backend == "xla" else None
    model = with_implementation(loaded.model, pinned)
    prompts = [tokenizer.encode(asked.prompt(question)) for question in asked.questions]
    params = SamplingParams(
        max_new_tokens=arguments.max_new_tokens,
        stop_token_ids=stop_tokens_of(tokenizer),
        logprobs=True,
    )
    config = engine_config(
        "unified",
        page_size=variant.page_size,
        dtype=dtype,
        concurrency=12,
        max_len=max(map(len, prompts)) + arguments.max_new_tokens,
        max_stop_tokens=len(params.stop_token_ids),
        max_step_tokens=256,
        prefix_cache=variant.prefix_cache,
    )
    pool_bytes = default_pool_bytes(model, config)
    engine = Engine(model, loaded.weights, pool_bytes=pool_bytes, config=config)
    names = [engine.add_request(prompt, params) for prompt in prompts]
    tokens: dict[str, list[int]] = {name: [] for name in names}
    logprobs: dict[str, list[float]] = {name: [] for name in names}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.new_tokens
            logprobs[output.request_id] += output.new_logprobs
            if output.error is not None:
                raise UkvError(output.error)
    found = [last_number(tokenizer.decode(tokens[name])) for name in names]
    right = [question.number for question in asked.questions]
    stats = engine.stats()
    return {
        "accuracy": sum(map(str.__eq__, map(str, found), right)) / len(right),
        "compactions": stats.num_moves,
        "prefix_hit_tokens": stats.prefix_hit_tokens,
        "retractions": stats.num_retractions,
        "seconds": round(time.perf_counter() - started, 1),
        "device": jax.devices()[0].device_kind,
        "ran": {op: sorted(chosen) for op, chosen in sorted(ran.items())},
        "tokens": [tokens[name] for name in names],
        "logprobs": [[round(x, 4) for x in logprobs[name]] for name in names],
    }


def compare(found: dict[str, Any], reference: dict[str, Any]) -> dict[str, int]:
    """Count texts that differ, by whether their first difference is a tie."""
    ties = faults = compared = 0
    for index, (one, other) in enumerate(
        zip(found["tokens"], reference["tokens"], strict=True)
    ):
        places = [
            i
            for i, pair in enumerate(zip(one, other, strict=False))
            if len({*pair}) > 1
        ]
        compared += places[0] if places else min(len(one), len(other))
        if not places:
            faults += len(one) != len(other)
            continue
        drawn = (run["logprobs"][index][places[0]] for run in (found, reference))
        is_tie = max(drawn) < math.log(TIE_PROBABILITY)
        ties, faults = ties + is_tie, faults + (not is_tie)
    return {"tokens_compared": compared, "ties": ties, "faults": faults}


def spawn(variant: Variant, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a variant in a process of its own; return what it wrote, or its error."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "found.json"
        done = subprocess.run(
            [
                *(sys.executable, __file__, "--model", arguments.model),
                *("--limit", str(arguments.limit)),
                *("--max-new-tokens", str(arguments.max_new_tokens)),
                *("--worker", json.dumps(dataclasses.asdict(variant))),
                *("--json", str(path)),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            print(f"{variant}:\n{done.stderr[-6000:]}", file=sys.stderr, flush=True)
            last = done.stderr.strip().splitlines() or ["no output"]
            return {"error": last[-1]}
        return json.loads(path.read_text())


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, or explain and exit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="tiny", metavar="PATH|tiny|smollm2", help="what answers")
    add("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    add("--page-sizes", nargs="+", type=int, default=[64, 16, 1], metavar="TOKENS")
    add("--limit", type=int, default=32, help="questions; default %(default)s")
    add("--max-new-tokens", type=int, default=64, help="default %(default)s")
    add("--jobs", type=int, default=1, help="processes at once; default %(default)s")
    add("--json", type=pathlib.Path, metavar="PATH", help="write the report there")
    add("--commit", help="commit to record when git is not at hand")
    add("--worker", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main() -> None:
    """Run every variant and compare, or be the worker of one."""
    arguments = parse_arguments()
    if arguments.worker is not None:
        found = run_variant(Variant(**arguments.worker), arguments)
        arguments.json.write_text(json.dumps(found))
        return
    variants = [
        Variant(backend=backend, page_size=page_size, prefix_cache=prefix_cache)
        for page_size in arguments.page_sizes
        for prefix_cache in (False, True)
        for backend in arguments.backends
    ]
    results, reference = [], None
    with ThreadPoolExecutor(arguments.jobs) as threads:
        for variant, found in zip(
            variants, threads.map(lambda v: spawn(v, arguments), variants), strict=True
        ):
            line = {**dataclasses.asdict(variant), "error": found.pop("error", None)}
            if line["error"] is None:
                reference = reference or found
                compared = compare(found, reference)
                counts = {
                    k: v for k, v in found.items() if k not in ("tokens", "logprobs")
                }
                line |= counts | compared
            results.append(line)
            print(f"{variant}: {json.dumps(line)}", flush=True)
    whole = [line for line in results if line["error"] is None]
    num_tokens = sum(line["tokens_compared"] for line in whole)
    num_ties = sum(line["ties"] for line in whole)
    report = {
        "model": arguments.model,
        "questions": arguments.limit,
        "runs": len(results),
        "failed": len(results) - len(whole),
        "faults": sum(line["faults"] for line in whole),
        "tie_rate": num_ties / max(num_tokens, 1),
        "results": results,
        **device_facts(arguments.commit),
    }
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    if report["failed"] or report["faults"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
