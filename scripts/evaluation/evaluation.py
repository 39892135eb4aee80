"""From options to a comparison: load, fit the pools, ask, and read it all back."""

import argparse
import dataclasses
import hashlib
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
from tqdm import tqdm

from models.named import find_model, load_found, read_tokenizer
from models.registry import Loaded
from models.tokenizer import Tokenizer
from scripts.benchmarking import device_facts
from scripts.evaluation.asking import Asking, ask
from scripts.evaluation.comparison import Comparison, PoolResult
from scripts.evaluation.counters import Counters
from scripts.evaluation.pools import (
    KINDS,
    PoolKind,
    default_pool_bytes,
    engine_config,
    with_implementation,
)
from scripts.evaluation.questions import QuestionSet, built_in_set, gsm8k_set
from scripts.evaluation.records import Records
from ukv.engine import Engine, EngineConfig, engine_layout

ROOT = pathlib.Path(__file__).parents[2]
CODE = ("ukv", "pallas_kernels", "models", "scripts/evaluation")


def _digest(parts: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def _code_digest() -> str:
    """Return a checksum of all code that an answer comes from."""
    files = sorted(path for room in CODE for path in (ROOT / room).rglob("*.py"))
    return _digest([path.read_text() for path in files])


def _model_digest(path: pathlib.Path) -> str:
    """Return a checksum of names, sizes and times of a model's files."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    facts = [(file.name, file.stat()) for file in files if file.is_file()]
    return _digest([(name, stat.st_size, stat.st_mtime_ns) for name, stat in facts])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """Everything that both pools share.

    Attributes:
      loaded: The model, with its ops as asked for.
      tokenizer: Its tokenizer.
      asked: The questions.
      asking: How they are put.
      configs: Of an engine, by kind of pool.
      pool_bytes: Of either pool.
      settings: All that shapes an answer, as JSON values.
      records: Folder of the answers.
    """

    loaded: Loaded
    tokenizer: Tokenizer
    asked: QuestionSet
    asking: Asking
    configs: dict[PoolKind, EngineConfig]
    pool_bytes: int
    settings: dict[str, Any]
    records: pathlib.Path


def read_questions(arguments: argparse.Namespace) -> QuestionSet:
    """Return the questions that the options ask for.

    Raises:
      DataError: The data cannot be read, or has too few questions.
    """
    if arguments.data is None:
        return built_in_set(limit=arguments.limit, shots=arguments.shots)
    return gsm8k_set(
        arguments.data,
        limit=arguments.limit,
        shots=arguments.shots,
        shots_path=arguments.shots_data,
    )


def prepare(arguments: argparse.Namespace) -> Prepared:
    """Load what the options name and fit the pools to the questions.

    Raises:
      UkvError: The model or the data cannot be read.
    """
    asked = read_questions(arguments)
    path = find_model(arguments.model)
    tokenizer = read_tokenizer(path)
    is_cpu = jax.default_backend() == "cpu"
    dtype = arguments.dtype or ("float32" if is_cpu else "bfloat16")
    loaded = load_found(path, dtype=dtype)
    model = with_implementation(loaded.model, arguments.implementation)
    prompts = {
        question.index: tokenizer.encode(
            asked.prompt(question), adds_special_tokens=True
        )
        for question in asked.questions
    }
    longest = max(map(len, prompts.values()))
    configs = {
        kind: engine_config(
            kind,
            page_size=arguments.page_size,
            dtype=dtype,
            concurrency=arguments.concurrency,
            max_len=longest + arguments.max_new_tokens,
            max_stop_tokens=len(tokenizer.stop_tokens),
            max_step_tokens=arguments.max_step_tokens,
            prefix_cache=arguments.prefix_cache == "on",
        )
        for kind in KINDS
    }
    if arguments.pool_mib is None:
        pool_bytes = default_pool_bytes(model, configs["unified"])
    else:
        pool_bytes = int(arguments.pool_mib * 2**20)
    settings = {
        "model": arguments.model,
        "data": asked.name,
        "questions": len(asked.questions),
        "shots": asked.shots,
        "shots_from": asked.shots_from,
        "stops": list(asked.stops),
        "max_new_tokens": arguments.max_new_tokens,
        "page_size": arguments.page_size,
        "implementation": arguments.implementation or "best for the device",
        "prefix_cache": arguments.prefix_cache,
        "concurrency": arguments.concurrency,
        "max_step_tokens": arguments.max_step_tokens,
        "max_kv_len": configs["unified"].max_kv_len,
        "pool_bytes": pool_bytes,
        "dtype": dtype,
        "backend": jax.default_backend(),
        "data_digest": asked.digest,
        "model_digest": _model_digest(path),
        "code_digest": _code_digest(),
    }
    names = (pathlib.Path(arguments.model).stem, pathlib.Path(asked.name).stem)
    folder = "-".join([*names, _digest([settings])[:8]])
    return Prepared(
        loaded=Loaded(model=model, weights=loaded.weights),
        tokenizer=tokenizer,
        asked=asked,
        asking=Asking(
            prompts=prompts,
            stops=asked.stops,
            max_new_tokens=arguments.max_new_tokens,
        ),
        configs=configs,
        pool_bytes=pool_bytes,
        settings=settings,
        records=arguments.records or pathlib.Path("out/eval_gsm8k") / folder,
    )


def _read_trace(path: pathlib.Path) -> list[dict[str, Any]]:
    """Return the steps of the last run, counted from its first one."""
    if not path.is_file():
        return []
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    return [{**s, "seconds": s["seconds"] - steps[0]["seconds"]} for s in steps]


def ask_pool(prepared: Prepared, kind: PoolKind, *, fresh: bool) -> PoolResult:
    """Ask one pool all questions that it has not answered yet.

    Args:
      prepared: From ``prepare``.
      kind: Which pool.
      fresh: Whether to forget earlier answers.

    Raises:
      UkvError: The pool is too small, or an answer cannot be kept.
    """
    settings = {"pool": kind, **prepared.settings}
    trace = prepared.records / f"{kind}.trace.jsonl"
    layout = engine_layout(
        prepared.loaded.model,
        pool_bytes=prepared.pool_bytes,
        config=prepared.configs[kind],
    )
    with Records(prepared.records / f"{kind}.jsonl", settings, fresh=fresh) as records:
        _ask_what_is_left(prepared, kind, records, trace)
        return PoolResult(
            kind=kind,
            pool_bytes=layout.pool_bytes,
            answers=dict(records.answers),
            counters=Counters.together(records.runs),
            num_runs=len(records.runs),
            trace=_read_trace(trace),
        )


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _ask_what_is_left(
    prepared: Prepared, kind: PoolKind, records: Records, trace: pathlib.Path
) -> None:
    questions, num_done = prepared.asked.questions, len(records.answers)
    if num_done == len(questions):
        _tell(f"{kind}: all answers are in {records.path}; --fresh asks again")
        return
    if num_done:
        _tell(f"{kind}: {num_done} answers are in {records.path}, going on from there")
    engine = Engine(
        prepared.loaded.model,
        prepared.loaded.weights,
        pool_bytes=prepared.pool_bytes,
        config=prepared.configs[kind],
        trace_path=trace,
    )
    try:
        engine.warm_up()
        with tqdm(total=len(questions), initial=num_done, desc=kind, unit="q") as bar:
            ask(engine, prepared.tokenizer, questions, prepared.asking, records, bar)
    finally:
        engine.close()


def evaluate(arguments: argparse.Namespace) -> Comparison:
    """Ask every pool that the options name.

    Raises:
      UkvError: Something that the options name is missing, damaged or too small.
    """
    prepared = prepare(arguments)
    kinds = KINDS if arguments.pool == "both" else (arguments.pool,)
    return Comparison(
        questions=prepared.asked.questions,
        results=[ask_pool(prepared, kind, fresh=arguments.fresh) for kind in kinds],
        settings={**prepared.settings, "records": str(prepared.records)},
        facts=device_facts(),
    )
