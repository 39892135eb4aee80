"""Trains the tiny Kimi-Linear on word problems and writes it as a checkpoint.

A correctness instrument, not a language model: it solves the problems of
scripts/arithmetic_problems, and only if pages, states and prefixes are right. The
architecture is the released one at toy size. See docs/tiny_model.md.

    python scripts/train_tiny.py --out models/tiny_kimi_linear
    python scripts/train_tiny.py --steps 20 --batch-rows 4 --hidden 64 --out /tmp/try

On one H200 the default takes minutes; a CPU is good for a try. The log has one JSON
object a line: the run, then losses, then the accuracy on held-out problems with the
stored (rounded) parameters. scripts/refit_tiny.py is the second step.
"""

import argparse
import contextlib
import functools as ft
import json
import math
import pathlib
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from tqdm import tqdm

from models.checkpoint import Checkpoint
from models.kimi_linear import KimiLinear
from models.registry import read_model
from models.weights import tensor_shapes
from scripts.arithmetic_problems.problem_set import problem_set
from scripts.arithmetic_problems.tokenizer import END, build_tokenizer
from scripts.tiny_training.batches import training_batches
from scripts.tiny_training.learner import OPTIMIZER, Learner, pad_prompts
from scripts.tiny_training.parameters import (
    Tensors,
    init_tensors,
    model_config,
    save_checkpoint,
)

ROW_TOKENS = 512
MAX_NEW_TOKENS = 64
STEPS_PER_CALL = 20
CALLS_PER_SAVE = 25


def parse_arguments() -> argparse.Namespace:
    """Return the options, or explain and exit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def add(name: str, kind: type, default: Any, explanation: str) -> None:
        parser.add_argument(
            name, type=kind, default=default, help=f"{explanation}; default %(default)s"
        )

    parser.add_argument(
        "--out", type=pathlib.Path, required=True, metavar="FOLDER", help="checkpoint"
    )
    add("--seed", int, 0, "of parameters and of training rows")
    add("--steps", int, 1220, f"steps, rounded up to a multiple of {STEPS_PER_CALL}")
    add("--batch-rows", int, 128, f"rows of {ROW_TOKENS} tokens in a step")
    add("--rate", float, 2.5e-3, "peak learning rate")
    add("--layers", int, 8, "layers, a multiple of 4")
    add("--hidden", int, 192, "width of the residual stream")
    add("--problems", int, 256, "held-out problems at the end")
    add("--processes", int, 8, "processes that make rows")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="of the computation; default: float32 on a CPU, bfloat16 on a GPU",
    )
    arguments = parser.parse_args()
    for name in ("steps", "batch_rows", "hidden", "processes"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    if arguments.layers < 4 or arguments.layers % 4:
        parser.error(f"--layers {arguments.layers}: must be a multiple of 4")
    return arguments


class Log:
    """JSON lines in a file, and the important ones on the terminal."""

    def __init__(self, path: pathlib.Path) -> None:
        """Begin a new file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        self._path = path

    def add(self, **facts: Any) -> None:
        """Write one line."""
        with self._path.open("a") as file:
            print(json.dumps(facts), file=file)
        tqdm.write(json.dumps(facts))


def learning_rates(num_steps: int, peak: float) -> np.ndarray:
    """Return the rate of each step: up over the first few, then down to nothing."""
    step = np.arange(1, num_steps + 1)
    warmup = np.minimum(1.0, step / min(100, num_steps))
    decay = 0.5 * (1.0 + np.cos(np.pi * step / num_steps))
    return (peak * warmup * decay).astype(np.float32)


def train(
    learner: Learner,
    tensors: Tensors,
    tokenizer: tokenizers.Tokenizer,
    arguments: argparse.Namespace,
    log: Log,
    save: Callable[[Tensors], None],
) -> None:
    """Run all steps, and save what was learned now and then and at the end."""
    num_steps = -(-arguments.steps // STEPS_PER_CALL) * STEPS_PER_CALL
    rates = learning_rates(num_steps, arguments.rate)
    state = OPTIMIZER.init(tensors)
    batches = training_batches(
        tokenizer.to_str(),
        seed=arguments.seed,
        num_batches=num_steps,
        batch_rows=arguments.batch_rows,
        length=ROW_TOKENS + 1,
        processes=arguments.processes,
    )
    tokens_per_call = STEPS_PER_CALL * arguments.batch_rows * ROW_TOKENS
    start = last = time.perf_counter()
    with contextlib.closing(batches):
        for first in tqdm(range(0, num_steps, STEPS_PER_CALL), unit="call"):
            chunk = np.stack([next(batches) for _ in range(STEPS_PER_CALL)])
            tensors, state, losses, peaks = learner.train(
                tensors, state, chunk, rates[first : first + STEPS_PER_CALL]
            )
            losses, peaks = np.asarray(losses), np.asarray(peaks)
            now = time.perf_counter()
            log.add(
                step=first + STEPS_PER_CALL,
                loss=round(float(losses.mean()), 5),
                expert_peak=round(float(peaks.max()), 2),
                tokens_per_second=round(tokens_per_call / (now - last)),
                seconds=round(now - start, 1),
            )
            last = now
            if not np.isfinite(losses).all():
                sys.exit("train_tiny.py: error: the loss is not finite; lower --rate")
            if first // STEPS_PER_CALL % CALLS_PER_SAVE == CALLS_PER_SAVE - 1:
                save(tensors)
    save(tensors)


def accuracy(
    learner: Learner,
    tensors: Tensors,
    tokenizer: tokenizers.Tokenizer,
    *,
    seed: int,
    count: int,
    shots: int,
) -> float:
    """Return the share of held-out problems whose last number is right."""
    problems = problem_set(seed, count, "test", shots=shots)
    prompts = [tokenizer.encode(problems.prompt(p)).ids for p in problems.problems]
    tokens, lens = pad_prompts(prompts, ROW_TOKENS)
    num_right = 0
    for first in range(0, count, 128):
        rows = slice(first, first + 128)
        found = np.asarray(
            learner.answer(tensors, tokens[rows], lens[rows], MAX_NEW_TOKENS)
        )
        for row, start, problem in zip(
            found, lens[rows], problems.problems[rows], strict=True
        ):
            text = tokenizer.decode(row[start : start + MAX_NEW_TOKENS].tolist())
            numbers = re.findall(r"#### (\d+)$", text.split(END)[0])
            num_right += numbers == [str(problem.number)]
    return num_right / count


def main() -> None:
    """Train, store, judge what was stored."""
    arguments = parse_arguments()
    log = Log(arguments.out / "train_log.jsonl")
    tokenizer = build_tokenizer()
    end_token = tokenizer.token_to_id(END)
    config = model_config(
        tokenizer.get_vocab_size(),
        end_token,
        num_layers=arguments.layers,
        hidden=arguments.hidden,
    )
    (arguments.out / "config.json").write_text(json.dumps(config))
    model = read_model(arguments.out)
    assert isinstance(model, KimiLinear)
    shapes = tensor_shapes(model.weights())
    is_cpu = jax.default_backend() == "cpu"
    learner = Learner(
        model=model,
        dtype=arguments.dtype or ("float32" if is_cpu else "bfloat16"),
        answer_token=tokenizer.encode("Answer:").ids[0],
        end_token=end_token,
    )
    log.add(
        device=jax.devices()[0].device_kind,
        dtype=learner.dtype,
        jax=jax.__version__,
        parameters=sum(math.prod(shape) for shape in shapes.values()),
        arguments={
            name: value for name, value in vars(arguments).items() if name != "out"
        },
    )
    tensors = init_tensors(shapes, arguments.seed, num_layers=arguments.layers)
    save = ft.partial(save_checkpoint, arguments.out, config, tokenizer=tokenizer)
    train(learner, tensors, tokenizer, arguments, log, save)
    with Checkpoint(arguments.out) as checkpoint:
        stored = {
            name: checkpoint.read(name, shape).astype(jnp.float32)
            for name, shape in shapes.items()
        }
    for seed, shots in ((0, 4), (1, 4), (2, 0)):
        found = accuracy(
            learner,
            stored,
            tokenizer,
            seed=seed,
            count=arguments.problems,
            shots=shots,
        )
        log.add(
            problem_seed=seed,
            shots=shots,
            problems=arguments.problems,
            accuracy=round(found, 4),
        )


if __name__ == "__main__":
    main()
