"""Prints what a model's memory costs, and how many requests a GPU holds.

    python scripts/inspect_model.py kimi-linear-48b
    python scripts/inspect_model.py kimi-linear-48b --tokens 131072 --gpu-gib 141
    python scripts/inspect_model.py gemma-3-27b --tokens 8192 --pool-gib 40
    python scripts/inspect_model.py path/to/checkpoint --dtype float32

MODEL is a folder with a config.json, weights or not, or the name of a built-in config.
The pool gets what the GPU has beyond the weights and a reserve, or --pool-gib.
"""

import argparse
import pathlib
import sys

import jax.numpy as jnp

import models
from models.config_fields import ConfigError
from models.registry import read_model
from models.weights import weight_bytes
from ukv.errors import UkvError
from ukv.layout import (
    PoolLayout,
    RequestShape,
    describe,
    max_requests,
    max_tokens,
    pages_of_request,
    smallest_pool_bytes,
    unified_layout,
)

GIB = 2**30
CONFIGS = pathlib.Path(models.__file__).parent / "configs"


def built_in() -> list[str]:
    """Return the names of the built-in configs."""
    return sorted(path.parent.name for path in CONFIGS.glob("*/config.json"))


def parse_arguments() -> argparse.Namespace:
    """Return the options, or explain and exit."""
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nbuilt-in configs: {', '.join(built_in())}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="folder or built-in config")
    parser.add_argument(
        "--tokens",
        type=int,
        default=4096,
        metavar="N",
        help="prompt and output of a request together; default %(default)s",
    )
    parser.add_argument(
        "--chunk",
        type=int,
        default=512,
        metavar="N",
        help="most tokens that one step adds to a request; default %(default)s",
    )
    parser.add_argument(
        "--page-size",
        type=int,
        default=64,
        metavar="TOKENS",
        help="tokens per page; default %(default)s",
    )
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32", "float16"],
        default="bfloat16",
        help="of weights and pool; default %(default)s",
    )
    parser.add_argument(
        "--gpu-gib",
        type=float,
        default=141.0,
        metavar="GIB",
        help="memory of the GPU; default %(default)s",
    )
    parser.add_argument(
        "--reserve-gib",
        type=float,
        default=8.0,
        metavar="GIB",
        help="of it, for activations and programs; default %(default)s",
    )
    parser.add_argument(
        "--pool-gib",
        type=float,
        metavar="GIB",
        help="size of the pool, whatever the GPU",
    )
    arguments = parser.parse_args()
    for name in ("tokens", "chunk", "page_size"):
        if getattr(arguments, name) < 1:
            option = name.replace("_", "-")
            parser.error(f"--{option} {getattr(arguments, name)}: must be 1 or more")
    return arguments


def find_config(name: str) -> pathlib.Path:
    """Return the folder of a config.

    Raises:
      ConfigError: There is none of that name.
    """
    for folder in (pathlib.Path(name), CONFIGS / name):
        if (folder / "config.json").is_file():
            return folder
    what = "has no config.json" if pathlib.Path(name).exists() else "does not exist"
    raise ConfigError(
        f"{name}: {what}; give a folder that has one, or one of {', '.join(built_in())}"
    )


def size(num_bytes: float) -> str:
    """Return bytes for people."""
    for unit, name in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.2f} {name}"
    return f"{num_bytes:,.0f} B"


def print_request(layout: PoolLayout, shape: RequestShape) -> None:
    """Print what one request holds in each sub-pool."""
    print(
        f"\none request of {shape.num_tokens:,} tokens, "
        f"at most {shape.chunk_len:,} of them in a step:"
    )
    total = 0
    for sub in layout.sub_pools:
        pages = pages_of_request(sub, shape)
        total += pages * sub.page_bytes
        if not sub.spec.grows:
            kind = "state: one slot, whatever the length"
        elif sub.spec.window is None:
            kind = f"{size(sub.page_bytes / sub.page_size)} per token"
        else:
            kind = (
                f"{size(sub.page_bytes / sub.page_size)} per token, "
                f"for the last {sub.spec.window:,} and the step's"
            )
        held = size(pages * sub.page_bytes)
        print(f"  {sub.name:8} {pages:8,} pages  {held:>12}  {kind}")
    print(f"  {'together':8} {'':14}  {size(total):>12}")


def run(arguments: argparse.Namespace) -> None:
    """Read the config, and print."""
    model = read_model(find_config(arguments.model))
    dtype = jnp.dtype(arguments.dtype)
    specs = model.pool_specs(page_size=arguments.page_size, dtype=dtype)
    weights = weight_bytes(model.weights(), dtype)
    shape = RequestShape(
        num_tokens=arguments.tokens, chunk_len=min(arguments.chunk, arguments.tokens)
    )
    print(f"{arguments.model}: {type(model).__name__}, {arguments.dtype}")
    print(f"weights: {size(weights)} ({weights:,} bytes)")
    needed = smallest_pool_bytes(specs, num_tokens=arguments.tokens)
    print_request(unified_layout(specs, pool_bytes=needed), shape)
    if arguments.pool_gib is None:
        gpu, reserve = arguments.gpu_gib, arguments.reserve_gib
        pool_bytes = int((gpu - reserve) * GIB) - weights
        budget = f"a GPU of {gpu:g} GiB less weights and {reserve:g} GiB of reserve"
    else:
        pool_bytes = int(arguments.pool_gib * GIB)
        budget = "as given"
    if pool_bytes < smallest_pool_bytes(specs):
        print(f"\nno pool, {budget}: not one request at once")
        return
    layout = unified_layout(specs, pool_bytes=pool_bytes)
    print(f"\npool of {size(layout.pool_bytes)}, {budget}:")
    print(f"  {max_requests(layout, shape):,} such requests at once")
    if any(sub.spec.grows and sub.spec.window is None for sub in layout.sub_pools):
        print(f"  {max_tokens(layout):,} tokens in one request")
    print(f"\n{describe(layout)}")


def main() -> None:
    """Run, and turn what went wrong on purpose into one line."""
    arguments = parse_arguments()
    try:
        run(arguments)
    except UkvError as error:
        sys.exit(f"inspect_model.py: error: {error}")


if __name__ == "__main__":
    main()
