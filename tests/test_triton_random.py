"""Random batches through the Triton kernels of GQA: 2,000 on a card, some elsewhere.

What a kernel is compiled for is drawn a few times, what it reads every time: lengths,
pages, queries, keys. Every case poisons the pool, scatters its rows over it, and is
compared with the float64 oracle.
"""

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.attention_cases import (
    Gqa,
    assert_result,
    gqa_oracle,
    make_gqa,
    run_gqa,
    run_gqa_decode,
)
from tests.gpu_compile import requires_h200_compiler
from tests.test_gqa_triton import interpreter as interpreter
from tests.triton_interpreter import IS_INTERPRETING

STRUCTURES = 20
CASES_OF_EACH = 2 if IS_INTERPRETING else 100
MAX_LEN = 192 if IS_INTERPRETING else 1500
NUM_ROWS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn(Gqa):
    """A case whose arrays have the shapes of its structure, whatever its lengths."""

    @property
    def max_pages(self) -> int:
        return -(-MAX_LEN // self.page_size)

    @property
    def num_pages(self) -> int:
        return NUM_ROWS * self.max_pages + 3


def draw_structure(index: int) -> tuple[bool, dict]:
    rng = np.random.default_rng(index)
    is_decode = index % 2 == 0
    stores = ("bf16", "bf16", "f32", "f16", "e4m3", "e5m2")
    store = str(rng.choice(stores))
    width = int(rng.choice([16, 24, 64, 80, 128]))
    return is_decode, {
        "page_size": int(rng.choice([1, 4, 16, 64, 128])),
        "kv_heads": int(rng.choice([1, 2, 3, 4])),
        "group": int(rng.choice([1, 2, 3, 4, 7, 8, 16])),
        "dims": (width, int(rng.choice([width, 32]))),
        "store": store,
        "compute": "f32" if store == "f32" else "bf16",
        "window": None if rng.random() < 0.6 else int(rng.integers(1, 300)),
        "sinks": bool(rng.random() < 0.3),
        "soft_cap": 5.0 if rng.random() < 0.2 else None,
        "placement": str(rng.choice(["low", "high", "static"])),
        "num_layers": 2,
        "layer": int(rng.integers(2)),
        # Equal sums, so that all cases of a structure have as many tokens.
        "bound": int(rng.integers(1, 5)) if is_decode else 64,
    }


def draw_rows(is_decode: bool, bound: int, seed: int) -> tuple[tuple[int, int], ...]:
    rng = np.random.default_rng(10_000 + seed)
    query_lens = [bound] * NUM_ROWS if is_decode else [1, 5, 19, 40]
    rows = []
    for query_len in rng.permutation(query_lens).tolist():
        # Short rows, long ones, and those that end where a page or a block does.
        longest = int(rng.choice([query_len + 3, 64, 128, MAX_LEN]))
        kv_len = int(rng.integers(query_len, max(longest, query_len) + 1))
        if rng.random() < 0.3:
            kv_len = max(kv_len // 64 * 64, query_len)
        rows.append((query_len, kv_len))
    return tuple(rows)


@pytest.mark.triton
@pytest.mark.gpu
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("index", range(STRUCTURES))
def test_random_batches(index):
    is_decode, numbers = draw_structure(index)
    for seed in range(CASES_OF_EACH):
        rows = draw_rows(is_decode, numbers["bound"], CASES_OF_EACH * index + seed)
        case = Drawn(rows=rows, **numbers)
        data = make_gqa(case, seed=seed)
        run = run_gqa_decode if is_decode else run_gqa
        oracle = gqa_oracle(case, data, padding=0 if is_decode else 3)
        result = run(case, data, implementation="triton")
        try:
            assert_result(case, result, oracle, width=case.dims[0])
        finally:
            make_gqa.cache_clear()


@pytest.mark.skipif(IS_INTERPRETING, reason="this is that process")
@requires_h200_compiler
def test_random_batches_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-m", "triton", __file__],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"{STRUCTURES} passed" in done.stdout
