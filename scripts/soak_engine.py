"""Serves random traffic for a long time and checks everything after every step.

Requests arrive in bursts and lulls, of any length and priority; many begin alike, and
some are aborted, whatever they are doing. The pool holds a few requests and starts full
of NaN. After every step: all invariants of the pool, and that the host counts as the
device does. During the steps: programs compiled after the warm-up, and reads of the
device other than that of the step before, are counted. At the end nothing may be left
but what the prefix cache holds, and nothing at all after it is cleared; and some of the
requests run once more, each alone and cold, and must draw the same tokens.

    python scripts/soak_engine.py --steps 20000 --seed 0 --json soak.json
    python scripts/soak_engine.py --steps 500 --model hybrid

The steps are shared out evenly over the models. Needs no GPU. The last line of the
output is the report, as JSON; the exit code is 1 if anything was violated.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from collections import Counter
from collections.abc import Sequence

import jax
import numpy as np
from tqdm import tqdm

from scripts.benchmarking import device_facts
from scripts.engine_checks.engines import (
    CONFIG,
    MAX_NEW_TOKENS,
    MAX_PROMPT_LEN,
    make_engine,
)
from scripts.engine_checks.models import load_model
from scripts.engine_checks.traffic import Draft, Traffic
from scripts.engine_checks.watch import CompileCounter, ReadCounter
from ukv.engine import EngineConfig, FinishReason
from ukv.errors import PoolStateError

BUCKETS = dataclasses.replace(CONFIG, decode_buckets=(2, 6), prefill_buckets=(32, 112))
SOAKS = {
    "hybrid": BUCKETS,
    "gemma3": BUCKETS,
    "kimi_linear": dataclasses.replace(BUCKETS, decode_steps=4),
}
"""The models of a soak: states, a window and full attention in one buffer; a window and
full attention; states and latents, with several decode steps in one dispatch."""

MAX_WAITING = 8
ARRIVAL_RATES = (0.0, 0.1, 0.5, 1.0)
STEPS_OF_A_RATE = 60
ABORT_RATE = 0.03
NUM_REPLAYED = 30

COUNTS = (
    *("steps", "requests", "aborted", "stopped", "full_length", "tokens"),
    *("retractions", "moves", "hit_tokens", "one_behind_reads", "idle_reads"),
    "replayed",
)
"""What happened; nothing of it should be 0."""
FAULTS = (
    *("violations", "failed", "restarts", "leaked_bytes", "compiles"),
    *("other_reads", "blocking_reads", "changed"),
)
"""What must be 0."""
REASONS = {
    FinishReason.ABORT: "aborted",
    FinishReason.STOP: "stopped",
    FinishReason.LENGTH: "full_length",
    FinishReason.ERROR: "failed",
}


class Soak:
    """An engine under random traffic.

    Attributes:
      counts: By the names in ``COUNTS`` and ``FAULTS``.
      messages: What was violated.
    """

    def __init__(self, name: str, *, config: EngineConfig, seed: int) -> None:
        """Build the engine and warm it up.

        Args:
          name: Of the model.
          config: Of the engine.
          seed: Of the traffic.
        """
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS + FAULTS, 0))
        self.messages: list[str] = []
        self._name, self._config = name, config
        self._engine = make_engine(name, config)
        self._rng = np.random.default_rng(seed)
        self._traffic = Traffic(
            self._rng,
            vocab_size=load_model(name).model.vocab_size,
            max_prompt_len=MAX_PROMPT_LEN,
            max_new_tokens=MAX_NEW_TOKENS,
        )
        self._arrival_rate = 0.0
        self._unfinished: dict[str, tuple[Draft, list[int]]] = {}
        self._finished: list[tuple[Draft, list[int]]] = []
        self._compiles, self._reads = CompileCounter(), ReadCounter()
        self._engine.warm_up(progress=False)
        self._engine.verify()

    def run(self, num_steps: int, progress: tqdm) -> None:
        """Serve traffic, let the last requests end, and replay some of all.

        Args:
          num_steps: Steps under traffic; a few more let the last requests end.
          progress: Bar to move by one for each of them.
        """
        self._compiles.start()
        try:
            for step in range(num_steps):
                if step % STEPS_OF_A_RATE == 0:
                    self._arrival_rate = float(self._rng.choice(ARRIVAL_RATES))
                self._arrive()
                self._abort()
                self._step()
                progress.update()
            while self._engine.has_work:
                self._step()
            self._count_leaks()
        except PoolStateError as error:
            self.counts["violations"] += 1
            self.messages += str(error).splitlines()
        stats = self._engine.stats()
        self.counts.update(
            compiles=self._compiles.count,
            tokens=stats.num_tokens,
            retractions=stats.num_retractions,
            moves=stats.num_moves,
            hit_tokens=stats.prefix_hit_tokens,
            restarts=stats.num_restarts,
            one_behind_reads=self._reads.one_behind,
            idle_reads=self._reads.with_nothing_to_do,
            other_reads=self._reads.others,
            blocking_reads=self._reads.blocking,
        )
        if not self.messages:
            self._replay()

    def _arrive(self) -> None:
        while (
            self._rng.random() < self._arrival_rate
            and self._engine.stats().num_waiting < MAX_WAITING
        ):
            draft = self._traffic.draw()
            name = self._engine.add_request(
                draft.prompt, draft.params, priority=draft.priority
            )
            self._unfinished[name] = (draft, [])
            self.counts["requests"] += 1

    def _abort(self) -> None:
        names = list(self._unfinished)
        if names and self._rng.random() < ABORT_RATE:
            self._engine.abort(names[self._rng.integers(len(names))])

    def _step(self) -> None:
        with self._reads.step(self._engine):
            outputs = self._engine.step()
        self.counts["steps"] += 1
        self._engine.verify()
        for output in outputs:
            draft, tokens = self._unfinished[output.request_id]
            tokens.extend(output.new_tokens)
            if output.finish_reason is None:
                continue
            del self._unfinished[output.request_id]
            self.counts[REASONS[output.finish_reason]] += 1
            if output.finish_reason is not FinishReason.ABORT:
                self._finished.append((draft, tokens))

    def _count_leaks(self) -> None:
        """Count bytes that neither a request nor the prefix cache accounts for."""
        stats = self._engine.stats()
        for name, num_bytes in stats.used_bytes.items():
            self.counts["leaked_bytes"] += abs(num_bytes - stats.cached_bytes[name])
        self._engine.clear_prefix_cache()
        self._engine.verify()
        self.counts["leaked_bytes"] += sum(self._engine.stats().used_bytes.values())

    def _replay(self) -> None:
        """Run some of the finished requests alone and compare their tokens."""
        engine = make_engine(self._name, self._config)
        size = min(NUM_REPLAYED, len(self._finished))
        chosen = self._rng.choice(len(self._finished), size, replace=False)
        for index in chosen.tolist():
            draft, expected = self._finished[index]
            engine.clear_prefix_cache()
            outputs = engine.generate([draft.prompt], draft.params)
            found = [token for output in outputs for token in output.new_tokens]
            self.counts["replayed"] += 1
            self.counts["changed"] += found != expected


def soak(names: Sequence[str], *, num_steps: int, seed: int) -> dict:
    """Soak an engine of each model and return the report.

    Args:
      names: Of ``SOAKS``.
      num_steps: Steps of all together.
      seed: Of the traffic.
    """
    started = time.monotonic()
    reports = []
    with tqdm(total=num_steps, unit="step", file=sys.stderr) as progress:
        for index, name in enumerate(names):
            progress.set_description(name)
            began = time.monotonic()
            run = Soak(name, config=SOAKS[name], seed=seed)
            run.run(
                num_steps // len(names) + (index < num_steps % len(names)), progress
            )
            reports.append(
                {
                    "model": name,
                    **run.counts,
                    "seconds": round(time.monotonic() - began, 1),
                    "messages": run.messages,
                }
            )
    return {
        **device_facts(),
        **{name: sum(report[name] for report in reports) for name in COUNTS + FAULTS},
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
        "models": reports,
    }


def is_clean(report: dict) -> bool:
    """Return whether nothing went wrong."""
    return not any(report[name] for name in FAULTS)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, run, and return the exit code."""
    summary, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--steps", type=int, default=20_000, help="in all (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument(
        "--model", choices=SOAKS, action="append", help="only this one; repeatable"
    )
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="F", help="write the report to F"
    )
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps} must be 1 or more")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    names = arguments.model or list(SOAKS)
    report = soak(names, num_steps=arguments.steps, seed=arguments.seed)
    for name in COUNTS + FAULTS:
        values = "".join(f"{model[name]:>14,}" for model in report["models"])
        print(f"{name:>17}{values}")
    for model in report["models"]:
        for message in model["messages"]:
            print(f"{model['model']}: {message}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return 0 if is_clean(report) else 1


if __name__ == "__main__":
    sys.exit(main())
