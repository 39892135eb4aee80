"""Shows a pool at work on a CPU, in seconds: one buffer whose inner borders move.

A Kimi-Linear shaped model, scaled down: KDA states grow from one end, MLA latent
pages from the other. Requests of random lengths are admitted until their bytes do not
fit, some finish, compaction closes the holes, and more are admitted. The same
requests go to a pool of equal size that is split in two halves for good.

    python scripts/pool_demo.py
    python scripts/pool_demo.py --pool-mib 64 --seed 3 --png out/memory_map.png
    python scripts/pool_demo.py --json out/pool_demo.json

Prints the layout, a memory map before and after compaction, both capacities, and one
line of JSON at the end; saves a drawing of the last map.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from scripts.benchmarking import device_facts
from ukv import allocator
from ukv.allocator import PoolMirror
from ukv.ids import VirtualPages
from ukv.layout import (
    PoolLayout,
    RequestShape,
    describe,
    pages_of_request,
    static_layout,
    unified_layout,
)
from ukv.memory_map import memory_map, plot_memory_map
from ukv.pool import PoolState, create_pool
from ukv.spec import MLASpec, SubPoolSpec, kda_state_spec

# Prompts and outputs vary this much; in pages, what one request may ask at once.
MIN_TOKENS, MAX_TOKENS = 64, 4096
FINISHED_SHARE = 0.4


def kimi_specs() -> list[SubPoolSpec]:
    """Return Kimi-Linear at a quarter of its width and a fifth of its layers."""
    return [
        kda_state_spec(
            name="kda",
            num_layers=4,
            num_heads=8,
            key_dim=32,
            value_dim=32,
            conv_width=4,
        ),
        MLASpec(name="mla", num_layers=2, page_size=64, latent_dim=128, rope_dim=16),
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What one admitted request holds.

    Attributes:
      num_tokens: Its tokens.
      pages: Its virtual pages by sub-pool.
    """

    num_tokens: int
    pages: dict[str, VirtualPages]


def request_lengths(seed: int) -> Iterator[int]:
    """Yield token counts, short ones more often: uniform in the logarithm."""
    rng = np.random.default_rng(seed)
    while True:
        yield int(np.exp(rng.uniform(np.log(MIN_TOKENS), np.log(MAX_TOKENS))))


def needs_of(layout: PoolLayout, num_tokens: int) -> dict[str, int]:
    """Return the pages by sub-pool of a request of that length."""
    shape = RequestShape(num_tokens=num_tokens)
    return {sub.name: pages_of_request(sub, shape) for sub in layout.sub_pools}


class Demo:
    """One pool and the requests in it.

    Attributes:
      state: The pool.
      requests: Those admitted and not finished.
    """

    def __init__(self, layout: PoolLayout):
        self.state: PoolState = create_pool(layout)
        self.requests: list[Request] = []
        bounds = needs_of(layout, MAX_TOKENS)
        self._alloc = jax.jit(
            lambda state, counts: allocator.alloc(state, counts, max_pages=bounds),
            donate_argnums=0,
        )
        self._free = jax.jit(allocator.free, donate_argnums=0)
        self._compact = jax.jit(allocator.compact, donate_argnums=0)

    def admit(self, lengths: Iterator[int]) -> int:
        """Admit requests until one does not fit; return how many."""
        mirror, before = PoolMirror.read(self.state), len(self.requests)
        for num_tokens in lengths:
            needs = needs_of(self.state.layout, num_tokens)
            # The host decides; the device is not asked.
            if not mirror.fits_in_place(needs):
                break
            mirror = mirror.alloc(needs)
            counts = {name: jnp.int32(count) for name, count in needs.items()}
            self.state, grant = self._alloc(self.state, counts)
            self.requests.append(Request(num_tokens=num_tokens, pages=grant.pages))
        allocator.raise_on_error(self.state)
        return len(self.requests) - before

    def finish(self, share: float, seed: int) -> int:
        """Finish a random share of the requests; return how many."""
        rng = np.random.default_rng(seed)
        done = rng.random(len(self.requests)) < share
        for request, is_done in zip(self.requests, done, strict=True):
            if is_done:
                for pages in request.pages.values():
                    self.state = self._free(self.state, pages)
        self.requests = [
            request
            for request, is_done in zip(self.requests, done, strict=True)
            if not is_done
        ]
        allocator.raise_on_error(self.state)
        return int(done.sum())

    def compact(self) -> list[int]:
        """Close all holes; return the pages moved by sub-pool."""
        self.state, compaction = self._compact(self.state)
        return compaction.moved.tolist()

    def num_tokens(self) -> int:
        """Return the tokens of all requests."""
        return sum(request.num_tokens for request in self.requests)


def half_and_half(specs: Sequence[SubPoolSpec], unified: PoolLayout) -> PoolLayout:
    """Return a static layout that gives each sub-pool half of the same bytes."""
    half = unified.pool_bytes // 2
    counts = {sub.name: half // sub.page_bytes - 1 for sub in unified.sub_pools}
    return static_layout(specs, num_pages=counts)


def parse_arguments() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pool-mib", type=int, default=32, help="size of the pool, MiB (default: 32)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the request lengths (default: 0)"
    )
    parser.add_argument(
        "--png",
        type=Path,
        default=Path("out/memory_map.png"),
        help="where the drawing goes (default: out/memory_map.png)",
    )
    parser.add_argument(
        "--json", type=Path, help="write the last line to this file as well"
    )
    return parser.parse_args()


def main() -> None:
    """Run the demonstration."""
    arguments = parse_arguments()
    started = time.perf_counter()
    specs = kimi_specs()
    layout = unified_layout(specs, pool_bytes=arguments.pool_mib * 2**20)
    print(describe(layout))

    demo = Demo(layout)
    lengths = request_lengths(arguments.seed)
    admitted = demo.admit(lengths)
    tokens = demo.num_tokens()
    print(f"\n{admitted} requests fill the pool: {tokens:,} tokens")
    print(memory_map(demo.state))

    static = Demo(half_and_half(specs, layout))
    static_admitted = static.admit(request_lengths(arguments.seed))
    print(
        f"\nThe same requests in two fixed halves: {static_admitted} admitted, "
        f"{static.num_tokens():,} tokens, one half full and the other not"
    )
    print(memory_map(static.state))
    static_tokens = static.num_tokens()

    finished = demo.finish(FINISHED_SHARE, arguments.seed)
    print(f"\n{finished} requests finish and leave holes")
    print(memory_map(demo.state))

    moved = demo.compact()
    moves = ", ".join(
        f"{count} of {name}" for count, name in zip(moved, layout.names, strict=True)
    )
    print(f"\nCompaction moves pages ({moves}) and leaves no hole")
    print(memory_map(demo.state))

    again = demo.admit(lengths)
    print(f"\n{again} more requests are admitted: {len(demo.requests)} run now")
    print(memory_map(demo.state))
    admitted_tokens = demo.num_tokens()
    demo.finish(FINISHED_SHARE / 2, arguments.seed + 1)
    plot_memory_map(demo.state, arguments.png)
    print(f"\nSome of them finish; drawn in {arguments.png}\n")

    record = {
        "pool_bytes": layout.pool_bytes,
        "seed": arguments.seed,
        "admitted": admitted,
        "tokens": tokens,
        "finished": finished,
        "pages_moved": sum(moved),
        "admitted_after_compaction": again,
        "static_admitted": static_admitted,
        "static_tokens": static_tokens,
        "tokens_after_compaction": admitted_tokens,
        "png": str(arguments.png),
        "seconds": round(time.perf_counter() - started, 2),
        **device_facts(),
    }
    line = json.dumps(record)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
