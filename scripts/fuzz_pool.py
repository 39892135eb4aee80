"""Runs random histories against pools of every shape and checks each operation.

Requests come, extend, decode, share, copy on write, leave windows behind and go; pools
are compacted; transactions fail and ids are misused on purpose. After every operation:
all invariants, the bytes of every live page, the holders and error words of a
plain-Python model, and the counters of the host mirror. Needs no GPU.

    python scripts/fuzz_pool.py --ops 100000 --seed 0 --json fuzz.json
    python scripts/fuzz_pool.py --ops 5000 --seed 7 --shape four --page-size 16

The operations are shared out evenly over the pools chosen. The last line of the output
is the report, as JSON; the exit code is 1 if anything was violated.
"""

import argparse
import json
import platform
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import jax
import jaxlib
import numpy as np
from tqdm import tqdm

from scripts.pool_fuzzing.checked_pool import CheckedPool, PoolViolationError
from scripts.pool_fuzzing.history import History
from scripts.pool_fuzzing.shapes import PAGE_SIZES, SHAPES

COUNTS = (
    "ops",
    "violations",
    "refused_although_bytes_fit",
    "granted_although_refused_by_mirror",
    "pages_moved",
)


def fuzz_one(
    shape: str, page_size: int, *, num_ops: int, seed: int, progress: tqdm
) -> dict[str, object]:
    """Run one history and return its report; it ends early at a violation.

    Args:
      shape: Name of a shape.
      page_size: Tokens per page.
      num_ops: Operations to run.
      seed: Seed of the history.
      progress: Bar to move by one for each operation.
    """
    started = time.monotonic()
    pool = CheckedPool(SHAPES[shape](page_size))
    history = History(pool, random.Random(f"{seed} {shape} {page_size}"))
    messages: list[str] = []
    while pool.num_ops < num_ops:
        done = pool.num_ops
        try:
            history.step()
        except PoolViolationError as error:
            where = f"{shape}, page size {page_size}, operation {pool.num_ops}"
            messages = [f"{where}: {line}" for line in error.lines]
            tqdm.write(f"{where}: {error}", file=sys.stderr)
            break
        finally:
            progress.update(pool.num_ops - done)
    return {
        "shape": shape,
        "page_size": page_size,
        "ops": pool.num_ops,
        "violations": len(messages),
        "refused_although_bytes_fit": pool.refused_although_bytes_fit,
        "granted_although_refused_by_mirror": pool.granted_although_refused_by_mirror,
        "pages_moved": pool.pages_moved,
        "seconds": round(time.monotonic() - started, 1),
        "kinds": dict(sorted(pool.kinds.items())),
        "messages": messages,
    }


def fuzz(
    shapes: Sequence[str], page_sizes: Sequence[int], *, num_ops: int, seed: int
) -> dict[str, object]:
    """Run a history on each shape at each page size and return the report.

    Args:
      shapes: Names of shapes.
      page_sizes: Tokens per page.
      num_ops: Operations of all histories together.
      seed: Seed of the histories.
    """
    started = time.monotonic()
    pools = [(shape, page_size) for shape in shapes for page_size in page_sizes]
    reports = []
    with tqdm(total=num_ops, unit="op", file=sys.stderr) as progress:
        for index, (shape, page_size) in enumerate(pools):
            progress.set_description(f"{shape}, page size {page_size}")
            share = num_ops // len(pools) + (index < num_ops % len(pools))
            reports.append(
                fuzz_one(shape, page_size, num_ops=share, seed=seed, progress=progress)
            )
    kinds: Counter[str] = Counter()
    for report in reports:
        kinds.update(report.pop("kinds"))
    return {
        **{name: sum(report[name] for report in reports) for name in COUNTS},
        "seconds": round(time.monotonic() - started, 1),
        "seed": seed,
        "messages": [line for report in reports for line in report.pop("messages")],
        "kinds": dict(sorted(kinds.items())),
        "pools": reports,
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "numpy": np.__version__,
        },
        "device": jax.devices()[0].device_kind,
    }


def is_clean(report: dict[str, object]) -> bool:
    """Return whether nothing was violated."""
    return not any(report[name] for name in COUNTS[1:4])


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, run, and return the exit code."""
    summary, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ops",
        type=int,
        default=100_000,
        help="operations in all (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument("--json", type=Path, metavar="F", help="write the report to F")
    parser.add_argument(
        "--shape", choices=SHAPES, action="append", help="only this shape; repeatable"
    )
    parser.add_argument(
        "--page-size",
        type=int,
        choices=PAGE_SIZES,
        action="append",
        help="only this page size; repeatable",
    )
    arguments = parser.parse_args(argv)
    if arguments.ops < 1:
        parser.error(f"--ops {arguments.ops} must be 1 or more")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    report = fuzz(
        arguments.shape or list(SHAPES),
        arguments.page_size or PAGE_SIZES,
        num_ops=arguments.ops,
        seed=arguments.seed,
    )
    for row in report["pools"]:
        print(
            f"{row['shape']:>16} page size {row['page_size']:>3}: {row['ops']:>6} ops, "
            f"{row['pages_moved']:>6} pages moved, {row['violations']} violations, "
            f"{row['seconds']:>5} s"
        )
    line = json.dumps(report)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(line + "\n")
    print(line)
    return 0 if is_clean(report) else 1


if __name__ == "__main__":
    sys.exit(main())
