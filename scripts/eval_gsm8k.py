r"""Evaluates a model on math word problems, on a unified pool and on a static one.

    python scripts/eval_gsm8k.py
    python scripts/eval_gsm8k.py --model smollm2 --data gsm8k/test.jsonl --limit 20
    python scripts/eval_gsm8k.py --model path/to/Kimi-Linear-48B-A3B-Instruct \
        --data gsm8k/test.jsonl --concurrency 64 --max-new-tokens 512
    python scripts/eval_gsm8k.py --page-size 16 --prefix-cache off --json out/a.json

conventions
  prompt   --shots solved examples, then the question, as plain text without a chat
           template: "Question: ...\nAnswer: ...", a blank line between. Examples come
           from --shots-data, else from train.jsonl beside the data, else they are the
           first of the data, which are then not asked. What GSM8K has in << >> is
           left out.
  tokens   greedy, at most --max-new-tokens; an answer ends with a stop token of the
           model or where "Question:" begins, in the built-in set also at a blank line
  answer   the last number of what is left, without "$", "," and ".0"; right if it
           equals the number after "####"
  interval Wilson's, 95 %
  pools    the same bytes, programs and steps; the static one is split so that all
           kinds of memory run out at the same number of requests of full length

Each answer is on disk before the next one counts: the same command continues where it
stopped. The built-in data are generated arithmetic problems; --model tiny was trained
on others of their kind, and is an instrument to show faults, not a language model.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from scripts.evaluation.comparison import Comparison
from scripts.evaluation.evaluation import evaluate
from scripts.evaluation.page import render_page
from scripts.evaluation.table import text_table
from ukv.errors import UkvError


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, or explain and exit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--model",
        default="tiny",
        metavar="PATH|tiny|smollm2",
        help="folder of a checkpoint, GGUF file, or a name; default %(default)s",
    )
    add(
        "--data",
        type=pathlib.Path,
        metavar="PATH",
        help="GSM8K as published, JSON lines; default: the built-in set",
    )
    add(
        "--pool",
        choices=["unified", "static", "both"],
        default="both",
        help="default %(default)s",
    )
    add("--shots", type=int, default=4, metavar="N", help="default %(default)s")
    add(
        "--shots-data",
        type=pathlib.Path,
        metavar="PATH",
        help="where the solved examples are, in the form of --data",
    )
    add("--limit", type=int, metavar="N", help="ask the first N questions only")
    add(
        "--page-size",
        type=int,
        default=64,
        metavar="TOKENS",
        help="default %(default)s",
    )
    add(
        "--implementation",
        choices=["xla", "mosaic_gpu", "triton"],
        help="how ops run; default: for each op the best one of the device",
    )
    add(
        "--prefix-cache",
        choices=["on", "off"],
        default="on",
        help="whether prompts share what they have in common; default %(default)s",
    )
    add(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="default: 64 for the built-in set, 320 for --data",
    )
    add(
        "--concurrency",
        type=int,
        default=12,
        metavar="N",
        help="requests that may run at once; default %(default)s",
    )
    add(
        "--pool-mib",
        type=float,
        metavar="MIB",
        help="of each pool; default: half of --concurrency requests, full length",
    )
    add(
        "--max-step-tokens",
        type=int,
        default=128,
        metavar="N",
        help="tokens of a step, prompts and answers together; default %(default)s",
    )
    add(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="of weights and pool; default: float32 on a CPU, bfloat16 on a GPU",
    )
    add(
        "--records",
        type=pathlib.Path,
        metavar="FOLDER",
        help="of the answers; default: one for each set of options in out/eval_gsm8k",
    )
    add("--fresh", action="store_true", help="forget the answers of an earlier run")
    add("--json", type=pathlib.Path, metavar="PATH", help="write the numbers there")
    add(
        "--html",
        type=pathlib.Path,
        default=pathlib.Path("out/eval_gsm8k.html"),
        metavar="PATH",
        help="write the report there; default %(default)s",
    )
    arguments = parser.parse_args(words)
    if arguments.max_new_tokens is None:
        arguments.max_new_tokens = 64 if arguments.data is None else 320
    for name, least in (
        ("limit", 1),
        ("page_size", 1),
        ("max_new_tokens", 1),
        ("concurrency", 1),
        ("max_step_tokens", 2),
        ("shots", 0),
    ):
        value = getattr(arguments, name)
        if value is not None and value < least:
            option = name.replace("_", "-")
            parser.error(f"--{option} {value}: must be {least} or more")
    return arguments


def fail(message: str) -> NoReturn:
    """Exit with a message and no traceback."""
    sys.exit(f"eval_gsm8k.py: error: {message}")


def write_reports(arguments: argparse.Namespace, comparison: Comparison) -> None:
    """Write the files that the options name, or say that the answers are safe."""
    record = comparison.record() | {"html": str(arguments.html)}
    for path, text in (
        (arguments.json, json.dumps(record, indent=1) + "\n"),
        (arguments.html, render_page(comparison)),
    ):
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            fail(
                f"{path}: the report cannot be written: {error}; all answers are kept "
                f"in {comparison.settings['records']}, the same command with another "
                "place writes the report from them"
            )


def main() -> None:
    """Run, and turn what went wrong on purpose into one line."""
    arguments = parse_arguments()
    try:
        comparison = evaluate(arguments)
    except UkvError as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("stopped; finished questions are kept, the same command continues")
    print(f"\n{text_table(comparison)}")
    write_reports(arguments, comparison)
    print(f"report: {arguments.html}\n")
    print(json.dumps(comparison.record()))
    failed = [
        answer
        for result in comparison.results
        for answer in result.answers.values()
        if answer.finish == "error"
    ]
    if failed:
        fail(f"{len(failed)} questions ended with an error: {failed[0].error}")


if __name__ == "__main__":
    main()
