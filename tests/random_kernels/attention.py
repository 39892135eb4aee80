"""Random structures of decode and extend, GQA and MLA."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from tests.attention_cases import (
    DTYPES,
    Gqa,
    Mla,
    assert_result,
    gqa_scoring,
    make_gqa,
    make_mla,
    mla_scoring,
    move_gqa,
    move_mla,
    packed_oracle,
    run_absorbed,
    run_expanded,
    run_gqa,
    run_gqa_decode,
    run_mla_decode,
)
from tests.oracles.attention import attention_at_once, lse_sizes, mla_keys
from ukv.implementation import OpCase
from ukv.ops.mla_kernels import MOST_ABSORBED

ROWS = 5
PACKED_LENS = (0, 1, 5, 19, 40)
"""Query tokens of the rows of a packed batch, in an order that is drawn."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Reach:
    """The longest row of a structure: its arrays have one shape, whatever the lengths.

    Attributes:
      max_len: Tokens.
    """

    max_len: int = 0

    @property
    def max_pages(self) -> int:
        return -(-self.max_len // self.page_size)

    @property
    def num_pages(self) -> int:
        return ROWS * self.max_pages + 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawnGqa(_Reach, Gqa):
    """Rows of GQA."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawnMla(_Reach, Mla):
    """Rows of MLA."""


def draw_rows(rng, query_lens, max_len, block) -> tuple[tuple[int, int], ...]:
    """Rows that are short, long, empty, or end where a page or a block of keys does."""
    rows = []
    for query_len in rng.permutation(query_lens).tolist():
        longest = int(rng.choice([query_len + 3, 64, max_len]))
        kv_len = int(rng.integers(query_len, max(longest, query_len) + 1))
        if rng.random() < 0.3:
            size = int(rng.choice([block, 64]))
            kv_len = max(kv_len // size * size, query_len)
        if rng.random() < 0.1:
            kv_len = 0
        rows.append((query_len, min(kv_len, max_len)))
    return tuple(rows)


def _check(case, query_lens, max_len, run, oracle, assert_equal, seed) -> None:
    rng = np.random.default_rng(seed)
    rows = draw_rows(rng, query_lens, max_len, case.page_size)
    case = dataclasses.replace(case, rows=rows)
    make, move = (make_gqa, move_gqa) if isinstance(case, Gqa) else (make_mla, move_mla)
    # The function behind the cache: no case comes twice.
    data = make.__wrapped__(case, seed=2 * seed, value_seed=seed)
    moved = move(case, data, 2 * seed + 1)
    result = run(case, data)
    assert_equal(case, result, oracle(case, data))
    for found, again in zip(result, run(case, moved), strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(again), strict=True)


def _padding(case) -> int:
    return 0 if case.bound is not None else 3


def _attend(q, keys, values, options):
    """`(out, lse, sizes)` of one row."""
    result = attention_at_once(q, keys, values, **options, causal=True)
    return *result, lse_sizes(q, keys, **options)


def gqa_rows_oracle(case: Gqa, data):
    """`(out, lse, sizes)` of the batch."""
    queries = case.split(data.q)

    def attend(row, context_len):
        operands = queries[row], data.keys[row], data.values[row]
        out, lse, sizes = _attend(*operands, gqa_scoring(case, data, context_len))
        # The ops promise -inf for a token without keys, sinks or not.
        lse[: max(-context_len, 0)] = -np.inf
        return out, lse, sizes

    return packed_oracle(case, attend, _padding(case))


def absorbed_rows_oracle(case: Mla, data):
    """`(out, lse, sizes)` of the batch in the latent space."""
    queries = case.split(data.q)

    def attend(row, context_len):
        rows = data.cached[row][:, None]
        operands = queries[row], rows, rows[..., : case.dims[0]]
        return _attend(*operands, mla_scoring(case, context_len))

    return packed_oracle(case, attend, _padding(case))


def expanded_rows_oracle(case: Mla, data):
    """`(out, lse, sizes)` of the batch, every head's keys and values written out."""
    queries = case.split(data.q_heads)
    w_vc = np.asarray(data.w_vc, np.float64)

    def attend(row, context_len):
        latent, rope = np.split(data.cached[row], [case.dims[0]], axis=1)
        keys = mla_keys(latent, rope, data.w_kc)
        latent = np.asarray(latent, np.float64)
        values = np.einsum("jc,hvc->jhv", latent, w_vc, optimize=True)
        return _attend(queries[row], keys, values, mla_scoring(case, context_len))

    return packed_oracle(case, attend, 3)


def op_case(case, widths) -> OpCase:
    """Return the facts that decide who can run a case."""
    return OpCase(
        page_size=case.page_size,
        storage_dtype=DTYPES[case.store].name,
        compute_dtype=DTYPES[case.compute].name,
        widths=widths,
    )


def _shared(rng) -> dict:
    store = str(rng.choice(["bf16", "bf16", "bf16", "f32", "f16", "e4m3", "e5m2"]))
    return {
        "page_size": int(rng.choice([1, 4, 16, 32, 64, 128])),
        "store": store,
        "compute": {"f32": "f32", "f16": "f16"}.get(store, "bf16"),
        "placement": str(rng.choice(["low", "float", "high", "static"])),
        "num_layers": 2,
        "layer": int(rng.integers(2)),
        "rows": (),
    }


def draw_gqa(rng, implementation, max_len, index, *, is_decode: bool):
    """Return a structure of GQA: its facts and its check."""
    del index
    width = int(rng.choice([16, 24, 64, 64, 80, 128, 128, 128]))
    case = DrawnGqa(
        **_shared(rng),
        max_len=max_len,
        kv_heads=int(rng.choice([1, 2, 3, 4])),
        group=int(rng.choice([1, 2, 3, 4, 7, 8, 16])),
        dims=(width, int(rng.choice([width, width, 32]))),
        window=None if rng.random() < 0.5 else int(rng.integers(1, 300)),
        sinks=bool(rng.random() < 0.3),
        soft_cap=5.0 if rng.random() < 0.2 else None,
        bound=int(rng.integers(1, 5)) if is_decode else None,
    )
    query_lens = (case.bound,) * ROWS if is_decode else PACKED_LENS
    run = run_gqa_decode if is_decode else run_gqa
    run = functools.partial(run, implementation=implementation)
    if not is_decode:
        run = functools.partial(run, max_query_len=max(PACKED_LENS))
    check = functools.partial(
        _check,
        case,
        query_lens,
        max_len,
        run,
        gqa_rows_oracle,
        functools.partial(assert_result, width=width),
    )
    return op_case(case, case.dims), check


def _draw_mla(rng, max_len, index, *, is_absorbed: bool, bound=None) -> DrawnMla:
    kimi = (512, 64, 128, 128)
    small = [(24, 8, 12, 10), (128, 64, 64, 64), (256, 64, 128, 128)]
    dims = kimi if rng.random() < 0.6 else small[int(rng.integers(len(small)))]
    scale = sum(dims[1:3]) ** -0.5
    if is_absorbed:
        # The matrices that expand rows are as large as all else, and not used.
        dims = (*dims[:2], 1, 1)
    heads = [32, 128, 16, 64, 20] if dims[0] == 512 else [1, 3, 8, 20]
    return DrawnMla(
        **_shared(rng),
        max_len=max_len,
        # One after the other: kernels differ by how many heads there are.
        heads=heads[index % len(heads)],
        dims=dims,
        softmax_scale=scale,
        bound=bound,
    )


def draw_mla_decode(rng, implementation, max_len, index):
    """Return a structure of MLA decode: its facts and its check."""
    case = _draw_mla(
        rng, max_len, index, is_absorbed=True, bound=int(rng.integers(1, 5))
    )
    check = functools.partial(
        _check,
        case,
        (case.bound,) * ROWS,
        max_len,
        functools.partial(run_mla_decode, implementation=implementation),
        absorbed_rows_oracle,
        functools.partial(assert_result, width=sum(case.dims[:2])),
    )
    return op_case(case, (sum(case.dims[:2]), case.dims[0])), check


def draw_mla_extend(rng, implementation, max_len, index, *, is_absorbed: bool):
    """Return a structure of MLA extend: its facts and its check."""
    # Expanded rows are rounded to the dtype of the queries, and their error grows with
    # the keys: longer rows could not be told from wrong ones.
    case = _draw_mla(rng, min(max_len, 800), index, is_absorbed=is_absorbed)
    if not is_absorbed and case.heads > 16:
        case = dataclasses.replace(case, heads=16)
    # A bound above what is absorbed expands the rows of more than one token.
    most_query = int(rng.choice([max(PACKED_LENS), 2 * MOST_ABSORBED]))
    row = sum(case.dims[:2])
    widths = (row, case.dims[0]) if is_absorbed else (row, case.dims[0], *case.dims[2:])
    run = run_absorbed if is_absorbed else run_expanded
    check = functools.partial(
        _check,
        case,
        PACKED_LENS,
        case.max_len,
        functools.partial(run, implementation=implementation, max_query_len=most_query),
        absorbed_rows_oracle if is_absorbed else expanded_rows_oracle,
        functools.partial(
            assert_result,
            width=row if is_absorbed else sum(case.dims[1:3]),
            operand=None if is_absorbed else DTYPES[case.compute].name,
        ),
    )
    return op_case(case, widths), check


# Those that take longest come first.
DRAW: dict[str, Callable] = {
    "mla_extend_absorbed": functools.partial(draw_mla_extend, is_absorbed=True),
    "mla_extend": functools.partial(draw_mla_extend, is_absorbed=False),
    "mla_decode": draw_mla_decode,
    "gqa_attention": functools.partial(draw_gqa, is_decode=False),
    "gqa_decode": functools.partial(draw_gqa, is_decode=True),
}
