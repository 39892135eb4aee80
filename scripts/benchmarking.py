"""What every benchmark script shares: device facts, ceilings, timing, records.

A record has one form: ``{device, driver, versions, commit, command, ceilings,
results}``; each result ``{op, implementation, shape, us, gbps, tflops, error,
of_ceiling}``. The ceilings are measured in the same run as the results that are
compared with them.
"""

import dataclasses
import importlib.metadata
import json
import pathlib
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

GIB = 2**30
PACKAGES = ("jax", "jaxlib", "triton", "numpy", "flax")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One measured case.

    Attributes:
      op: What ran.
      implementation: Who ran it.
      shape: The case.
      us: Median microseconds of one call.
      gbps: Gigabytes per second of the bytes that must move, or None.
      tflops: Teraflops, or None.
      error: Largest error against the expected result; 0 means bit-equal.
      of_ceiling: Part of the time that the card's ceilings make necessary, or None.
    """

    op: str
    implementation: str
    shape: dict
    us: float | None
    gbps: float | None = None
    tflops: float | None = None
    error: float | None = None
    of_ceiling: float | None = None


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_facts(commit: str | None = None) -> dict:
    """Return device, driver, versions, commit and command of this run."""
    device = jax.devices()[0]
    driver = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    versions = {name: _version(name) for name in PACKAGES}
    versions["python"] = platform.python_version()
    return {
        "device": device.device_kind,
        "driver": driver.splitlines()[0] if driver else "none",
        "versions": {name: v for name, v in versions.items() if v},
        "commit": commit or _run("git", "rev-parse", "--short", "HEAD") or "unknown",
        "command": shlex.join(["python", *sys.argv]),
    }


def median_us(call: Callable[[], object], *, repeats: int, inner: int = 1) -> float:
    """Return the median microseconds of one inner call.

    ``call`` is called ``inner`` times and then waited for; ``inner`` calls hide the
    cost of waiting when one call is short.
    """
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(inner):
            last = call()
        jax.block_until_ready(last)
        times.append((time.perf_counter() - start) / inner)
    return statistics.median(times) * 1e6


def _stream_us(num_bytes: int) -> tuple[float, float]:
    """Return microseconds to read, and to copy, that many bytes."""
    words = jax.random.bits(jax.random.key(0), (num_bytes // 4,), jnp.uint32)
    total = jax.jit(jnp.sum)
    read_us = median_us(lambda: total(words), repeats=7, inner=20)
    # A plain device-to-device copy; a copy captured in a graph is much slower.
    copy_us = median_us(lambda: jnp.copy(words), repeats=7, inner=20)
    step = jax.jit(lambda x: x ^ jnp.uint32(1))
    return read_us, min(copy_us, median_us(lambda: step(words), repeats=7, inner=20))


def ceilings(*, num_bytes: int = 4 * GIB, size: int = 8192) -> dict:
    """Measure what the card can do: read, copy (read + write), bf16 product."""
    read_us, copy_us = _stream_us(num_bytes)
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    product = jax.jit(lambda a, b: a @ b)
    matmul_us = median_us(lambda: product(a, a), repeats=7, inner=20)
    return {
        "read_gbps": round(num_bytes / read_us / 1e3, 1),
        "copy_gbps": round(2 * num_bytes / copy_us / 1e3, 1),
        "matmul_tflops": round(2 * size**3 / matmul_us / 1e6, 1),
    }


def record_of(facts: dict, limits: dict, results: list[Result]) -> dict:
    """Return a record."""
    found = [dataclasses.asdict(result) for result in results]
    return {**facts, "ceilings": limits, "results": found}


def write_record(
    facts: dict, limits: dict, results: list[Result], path: pathlib.Path
) -> None:
    """Write a record to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record_of(facts, limits, results), indent=1) + "\n")


def finish(
    facts: dict, limits: dict, results: list[Result], path: pathlib.Path | None
) -> None:
    """Print a table and one JSON line, and write the record."""
    sys.stdout.write(f"{'op':28} {'implementation':18} {'us':>10} {'GB/s':>8}  shape\n")
    for result in results:
        us = "-" if result.us is None else f"{result.us:,.1f}"
        gbps = "-" if result.gbps is None else f"{result.gbps:,.0f}"
        sys.stdout.write(
            f"{result.op:28} {result.implementation:18} {us:>10} {gbps:>8}  "
            f"{result.shape} error={result.error}\n"
        )
    if path is not None:
        write_record(facts, limits, results, path)
    sys.stdout.write(json.dumps(record_of(facts, limits, results)) + "\n")
