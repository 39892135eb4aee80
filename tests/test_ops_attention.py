"""GQA and MLA over paged rows against float64 oracles."""

import dataclasses
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import ukv.ops
from tests.attention_cases import (
    Gqa,
    Mla,
    MlaData,
    absorbed_oracle,
    assert_result,
    expanded_oracle,
    gqa_oracle,
    make_gqa,
    make_mla,
    run_absorbed,
    run_expanded,
    run_gqa,
    run_gqa_decode,
    run_mla_decode,
)
from tests.pools import POISON
from ukv.ids import KernelBlocks
from ukv.layout import static_layout
from ukv.ops import gqa, mla, online_softmax
from ukv.pool import create_pool
from ukv.spec import AttentionSpec

# GQA

MIXED = ((1, 1), (5, 37), (0, 0), (19, 19), (1, 48), (0, 20))

GQA_CASES = {
    "P16-mixed": Gqa(rows=MIXED),
    "P1": Gqa(rows=((3, 7), (4, 4)), page_size=1),
    "P64-high": Gqa(rows=((3, 64), (2, 65), (7, 7)), page_size=64, placement="high"),
    "P128": Gqa(rows=((3, 127), (2, 129), (7, 7)), page_size=128, placement="float"),
    "P16-static": Gqa(rows=MIXED, placement="static", layer=2),
    "L1": Gqa(rows=((3, 20),), num_layers=1, layer=0),
    "first-layer": Gqa(rows=((3, 20), (2, 31)), layer=0, placement="high"),
    "last-layer": Gqa(rows=((3, 20), (2, 31)), layer=2, placement="high"),
    "M1": Gqa(rows=((3, 20), (1, 9)), group=1),
    "M3-odd": Gqa(rows=((3, 20), (1, 9)), group=3, kv_heads=3, dims=(12, 20)),
    "M7": Gqa(rows=((3, 20), (1, 9)), group=7, kv_heads=1),
    "M16": Gqa(rows=((3, 20), (1, 9)), group=16, kv_heads=1, dims=(24, 8)),
    "D192-E128": Gqa(rows=((4, 40), (1, 3)), dims=(192, 128), placement="high"),
    "D8-E24-static": Gqa(rows=((4, 40), (1, 3)), dims=(8, 24), placement="static"),
    "padded-row": Gqa(rows=((3, 20), (1, 9)), kv_heads=1, dims=(10, 7)),
    "window1": Gqa(rows=MIXED, window=1),
    "window5": Gqa(rows=((1, 200), *MIXED), window=5),
    "window40": Gqa(rows=((9, 200), *MIXED), window=40, page_size=4),
    "window-huge": Gqa(rows=MIXED, window=1000),
    "window-static": Gqa(rows=((1, 99), *MIXED), window=20, placement="static"),
    "sinks": Gqa(rows=MIXED, sinks=True),
    "cap": Gqa(rows=MIXED, soft_cap=1.5),
    "window-sinks-cap": Gqa(rows=MIXED, window=9, sinks=True, soft_cap=3.0),
    "long": Gqa(rows=((3, 900), (1, 257), (2, 256)), kv_heads=1),
    "long-window": Gqa(rows=((3, 900), (1, 257), (9, 9)), kv_heads=1, window=300),
    "many-tiles": Gqa(rows=((150, 170), (64, 64), (65, 65)), kv_heads=1, group=2),
    "bound-below": Gqa(rows=((9, 30), (1, 5)), bound=4),
    "bound-above": Gqa(rows=((9, 30), (1, 5)), bound=64),
    "only-decode": Gqa(rows=((1, 30), (1, 5), (1, 1)), bound=1),
    "bf16": Gqa(rows=MIXED, store="bf16", compute="bf16", placement="high"),
    "f16": Gqa(rows=MIXED, store="f16", compute="f16"),
    "bf16-in-f32": Gqa(rows=MIXED, store="f32", compute="bf16"),
    "f32-from-bf16": Gqa(rows=MIXED, store="bf16", compute="f32"),
    "e4m3-bf16": Gqa(rows=MIXED, store="e4m3", compute="bf16", placement="high"),
    "e5m2-f32": Gqa(rows=MIXED, store="e5m2", compute="f32"),
    "e4m3fnuz-bf16": Gqa(rows=MIXED, store="e4m3fnuz", compute="bf16"),
    "e5m2fnuz-f16": Gqa(rows=MIXED, store="e5m2fnuz", compute="f16"),
}


@pytest.mark.parametrize("case", GQA_CASES.values(), ids=GQA_CASES.keys())
def test_gqa_attention(case):
    data = make_gqa(case)
    if case.placement == "high":
        assert data.pool.layout.sub_pool("full").base_bytes > 0
    oracle = gqa_oracle(case, data)
    assert_result(case, run_gqa(case, data), oracle, width=case.dims[0])


GQA_DECODE_CASES = {
    "Q1": Gqa(rows=((1, 30), (1, 1), (1, 16), (1, 17))),
    "Q2-P1": Gqa(rows=((2, 30), (2, 2)), page_size=1),
    "Q3-P64-high": Gqa(rows=((3, 64), (3, 70)), page_size=64, placement="high"),
    "Q4-P128-static": Gqa(rows=((4, 129), (4, 5)), page_size=128, placement="static"),
    "Q1-window": Gqa(rows=((1, 300), (1, 5)), window=7, group=5, kv_heads=1),
    "Q4-window": Gqa(rows=((4, 300), (4, 5)), window=7),
    "Q1-all": Gqa(rows=((1, 90), (1, 5)), window=33, sinks=True, soft_cap=2.0),
    "Q1-long": Gqa(rows=((1, 800), (1, 5), (1, 256)), kv_heads=1),
    "Q1-bf16": Gqa(rows=((1, 30), (1, 1)), store="bf16", compute="bf16", group=16),
    "Q1-e4m3": Gqa(rows=((1, 30), (1, 1)), store="e4m3", compute="bf16"),
}


@pytest.mark.parametrize("case", GQA_DECODE_CASES.values(), ids=GQA_DECODE_CASES.keys())
def test_gqa_decode(case):
    data = make_gqa(case)
    oracle = gqa_oracle(case, data, padding=0)
    assert_result(case, run_gqa_decode(case, data), oracle, width=case.dims[0])


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_a_row_without_keys_is_zero(sinks):
    # Row 0 has two of its four query tokens before position 0, row 1 has no key.
    case = Gqa(rows=((4, 2), (4, 0)), sinks=sinks)
    data = make_gqa(case)
    for run in (run_gqa_decode, run_gqa):
        out, lse = (np.asarray(x)[:8] for x in run(case, data))
        sees_keys = np.isin(np.arange(8), [2, 3])
        assert (out[~sees_keys] == 0.0).all()
        assert (lse[~sees_keys] == -np.inf).all()
        assert np.isfinite(lse[sees_keys]).all()
        assert (np.abs(out[sees_keys]).max(axis=-1) > 0).all()


# MLA

MLA_CASES = {
    "P16-mixed": Mla(rows=MIXED),
    "P1-static": Mla(rows=((3, 7), (4, 4)), page_size=1, placement="static"),
    "P64-high": Mla(rows=((3, 64), (2, 65), (7, 7)), page_size=64, placement="high"),
    "P128-float": Mla(rows=((3, 127), (2, 129)), page_size=128, placement="float"),
    "L1-H1": Mla(rows=((3, 20),), num_layers=1, layer=0, heads=1),
    "last-layer": Mla(rows=((3, 20), (2, 31)), layer=2, placement="high"),
    "no-rope": Mla(rows=((3, 20), (2, 31)), dims=(16, 0, 8, 8)),
    "padded-row": Mla(rows=((3, 20), (2, 31)), dims=(13, 5, 7, 9)),
    "C512-R64-bf16": Mla(
        rows=((3, 40), (1, 9)),
        dims=(512, 64, 128, 128),
        page_size=64,
        store="bf16",
        compute="bf16",
        placement="high",
        heads=2,
    ),
    "long": Mla(rows=((3, 700), (1, 257), (2, 256)), heads=2),
    "many-tiles": Mla(rows=((150, 170), (300, 300)), heads=1),
    "e4m3-bf16": Mla(rows=MIXED, store="e4m3", compute="bf16"),
    "e5m2-f32": Mla(rows=MIXED, store="e5m2"),
}


@pytest.mark.parametrize("case", MLA_CASES.values(), ids=MLA_CASES.keys())
def test_mla_extend_absorbed(case):
    data = make_mla(case)
    if case.placement == "high":
        assert data.pool.layout.sub_pool("mla").base_bytes > 0
    oracle, width = absorbed_oracle(case, data), sum(case.dims[:2])
    assert_result(case, run_absorbed(case, data), oracle, width=width)


@pytest.mark.parametrize("case", MLA_CASES.values(), ids=MLA_CASES.keys())
def test_mla_extend(case):
    data = make_mla(case)
    oracle, width = expanded_oracle(case, data), sum(case.dims[1:3])
    # The expanded keys and values take the dtype of the queries.
    operand = "bfloat16" if case.compute == "bf16" else None
    result = run_expanded(case, data)
    assert_result(case, result, oracle, width=width, operand=operand)


MLA_DECODE_CASES = {
    "Q1": Mla(rows=((1, 30), (1, 1), (1, 16), (1, 17))),
    "Q2-P1": Mla(rows=((2, 30), (2, 2)), page_size=1),
    "Q3-P64-high": Mla(rows=((3, 64), (3, 70)), page_size=64, placement="high"),
    "Q4-P128-static": Mla(rows=((4, 129), (4, 5)), page_size=128, placement="static"),
    "Q1-long": Mla(rows=((1, 800), (1, 5), (1, 256))),
    "Q1-bf16": Mla(
        rows=((1, 90), (1, 1)),
        dims=(512, 64, 128, 128),
        store="bf16",
        compute="bf16",
        heads=4,
        page_size=64,
    ),
    "Q1-e4m3": Mla(rows=((1, 30), (1, 1)), store="e4m3", compute="bf16"),
}


@pytest.mark.parametrize("case", MLA_DECODE_CASES.values(), ids=MLA_DECODE_CASES.keys())
def test_mla_decode(case):
    data = make_mla(case)
    oracle = absorbed_oracle(case, data, padding=0)
    width = sum(case.dims[:2])
    assert_result(case, run_mla_decode(case, data), oracle, width=width)


# The work is cut into blocks, tiles and groups; the cut shows in no result.


@pytest.mark.parametrize(
    ("group", "block_kv", "block_q"),
    [(1, 1, 1), (1 << 12, 32, 6), (1 << 14, 1, 6), (1 << 14, 32, 1)],
)
def test_any_cut_of_the_work_gives_the_result(monkeypatch, group, block_kv, block_q):
    monkeypatch.setattr(online_softmax, "GROUP_ELEMENTS", group)
    monkeypatch.setattr(online_softmax, "BLOCK_KV", block_kv)
    monkeypatch.setattr(gqa, "BLOCK_Q", block_q)
    monkeypatch.setattr(mla, "BLOCK_Q_EXPANDED", block_q)
    # A scale of its own, so that no program compiled before is found.
    scale = 0.25 + group * 1e-6 + block_kv * 1e-3 + block_q * 1e-4
    case = Gqa(rows=MIXED, window=30, sinks=True, softmax_scale=scale)
    data = make_gqa(case)
    oracle = gqa_oracle(case, data)
    assert_result(case, run_gqa(case, data), oracle, width=case.dims[0])
    case = Mla(rows=MIXED, softmax_scale=scale)
    data = make_mla(case)
    oracle = expanded_oracle(case, data)
    assert_result(case, run_expanded(case, data), oracle, width=20)


# Bits


BIT_ROWS = ((1, 300), (5, 37), (0, 0), (19, 19), (1, 48))
BIT_DECODE_ROWS = ((2, 300), (2, 37), (2, 2), (2, 48))
WINDOWED = {"window": 150, "sinks": True, "soft_cap": 9.0}
RUNS = {
    "gqa_attention": (
        Gqa(rows=BIT_ROWS, group=3, dims=(16, 24), **WINDOWED),
        make_gqa,
        run_gqa,
    ),
    "gqa_decode": (Gqa(rows=BIT_DECODE_ROWS, group=3), make_gqa, run_gqa_decode),
    "mla_extend_absorbed": (Mla(rows=BIT_ROWS), make_mla, run_absorbed),
    "mla_extend": (Mla(rows=BIT_ROWS), make_mla, run_expanded),
    "mla_decode": (Mla(rows=BIT_DECODE_ROWS), make_mla, run_mla_decode),
}


@pytest.mark.parametrize("store", ["f32", "bf16"])
@pytest.mark.parametrize("op", RUNS)
def test_bits_do_not_depend_on_the_pages(op, store):
    case, make, run = RUNS[op]
    case = dataclasses.replace(case, store=store, compute=store)
    first, second = make(case, seed=1), make(case, seed=2)
    assert (np.asarray(first.pool.table.ids) != second.pool.table.ids).any()
    for a, b in zip(run(case, first), run(case, second), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)


def alone(case, data, row):
    """The case with one row only, first in a batch of the same shapes."""
    query_len, kv_len = case.rows[row]
    is_decode = len(set(case.query_lens)) == 1
    empty = (query_len if is_decode else 0, 0)
    rows = ((query_len, kv_len), *[empty] * (len(case.rows) - 1))
    start = sum(case.query_lens[:row])

    def move(q):
        # Queries that do not count may be anything.
        q = np.roll(q, -start, axis=0)
        q[query_len:] = np.nan
        return q

    ids = jnp.roll(data.pool.table.ids, -row, axis=0)
    table = KernelBlocks(ids=ids, sub_pool=data.pool.table.sub_pool)
    moved = {"pool": dataclasses.replace(data.pool, table=table), "q": move(data.q)}
    if isinstance(data, MlaData):
        moved["q_heads"] = move(data.q_heads)
    alone_case = dataclasses.replace(case, rows=rows, bound=case.max_query_len)
    return alone_case, dataclasses.replace(data, **moved)


@pytest.mark.parametrize("store", ["f32", "bf16"])
@pytest.mark.parametrize("op", RUNS)
def test_a_row_alone_has_the_bits_it_has_in_a_batch(op, store):
    case, make, run = RUNS[op]
    case = dataclasses.replace(case, store=store, compute=store)
    data = make(case, seed=1)
    together = run(case, data)
    for row, (query_len, _) in enumerate(case.rows):
        start = sum(case.query_lens[:row])
        for a, b in zip(run(*alone(case, data, row)), together, strict=True):
            np.testing.assert_array_equal(a[:query_len], b[start : start + query_len])
            rest = np.asarray(a[query_len:])
            assert (rest == (0.0 if a.ndim == 3 else -np.inf)).all()


# Can the tests fail?


def other_page(data):
    """The same data, where row 0 reads its first page in its second's stead."""
    table = data.pool.table
    ids = table.ids.at[0, 1].set(table.ids[0, 0])
    pool = dataclasses.replace(data.pool, table=dataclasses.replace(table, ids=ids))
    return dataclasses.replace(data, pool=pool)


MUTANT_ROWS = ((2, 40), (2, 9))
BF16 = {"store": "bf16", "compute": "bf16"}


@pytest.mark.parametrize("run", [run_gqa, run_gqa_decode])
def test_gqa_mutations_are_rejected(run):
    case = Gqa(rows=MUTANT_ROWS, **BF16)
    data = make_gqa(case)
    oracle = gqa_oracle(case, data, padding=3 if run is run_gqa else 0)
    out, lse = run(case, data)
    assert_result(case, (out, lse), oracle, width=16)
    k_view, _ = data.views
    for mutant in (
        (jnp.zeros_like(out), lse),
        (out, jnp.where(jnp.isfinite(lse), 0.0, lse)),
        run(case, other_page(data)),
        run(case, dataclasses.replace(data, views=(k_view, k_view))),
        run(case, data, softmax_scale=2 * case.scale),
        run(case, data, window=39),
    ):
        with pytest.raises(AssertionError):
            assert_result(case, mutant, oracle, width=16)


@pytest.mark.parametrize("run", [run_absorbed, run_expanded, run_mla_decode])
def test_mla_mutations_are_rejected(run):
    case = Mla(rows=MUTANT_ROWS, **BF16)
    data = make_mla(case)
    find = expanded_oracle if run is run_expanded else absorbed_oracle
    padding = 0 if run is run_mla_decode else 3
    oracle = find(case, data, padding=padding)
    options = {"width": 32, "operand": "bfloat16" if run is run_expanded else None}
    out, lse = run(case, data)
    assert_result(case, (out, lse), oracle, **options)
    # A value from the end of a row instead of its latent part.
    reversed_rows = [rows[:, ::-1] for rows in data.cached]
    backwards = find(
        case, dataclasses.replace(data, cached=reversed_rows), padding=padding
    )
    for mutant in (
        (jnp.zeros_like(out), lse),
        (jnp.asarray(backwards[0], out.dtype), lse),
        run(case, other_page(data)),
        run(case, data, softmax_scale=2 * case.scale),
    ):
        with pytest.raises(AssertionError):
            assert_result(case, mutant, oracle, **options)


def test_nan_of_a_visible_key_shows():
    # The pool is poisoned and nothing was written: a broken page must not pass as
    # a row without keys, whose output is zero.
    spec = AttentionSpec(
        name="full", num_layers=1, page_size=4, num_kv_heads=1, head_dim=8
    )
    layout = static_layout([spec], num_pages={"full": 2})
    buffers = create_pool(layout, fill_word=POISON).buffers
    views = [layout.part_view("full", layer=0, part=part) for part in "kv"]
    out, lse = ukv.ops.gqa_decode(
        jnp.ones((2, 1, 1, 8), jnp.bfloat16),
        buffers,
        *views,
        KernelBlocks(ids=jnp.asarray([[1], [2]], jnp.int32), sub_pool="full"),
        kv_lens=jnp.asarray([3, 0], jnp.int32),
        softmax_scale=1.0,
    )
    assert np.isnan(np.asarray(out[0])).all()
    assert np.isnan(np.asarray(lse[0])).all()
    assert not np.asarray(out[1]).any()
    assert np.isneginf(np.asarray(lse[1])).all()


def test_no_op_translates():
    for source in pathlib.Path(ukv.ops.__file__).parent.glob("*.py"):
        text = source.read_text()
        for word in ("v2p", "p2v", "VirtualPages", "ukv.translator", "ukv.allocator"):
            assert word not in text, f"{source.name} names {word}"
