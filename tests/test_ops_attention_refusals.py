"""What the ops of attention refuse, and what they say."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention_cases import (
    Gqa,
    Mla,
    make_gqa,
    make_mla,
    run_absorbed,
    run_expanded,
    run_gqa,
)
from ukv import ops
from ukv.ids import KernelBlocks, VirtualPages


def test_virtual_pages_are_refused():
    case = Gqa(rows=((1, 3),))
    data = make_gqa(case)
    virtual = VirtualPages(ids=data.pool.table.ids, space="full")
    pool = dataclasses.replace(data.pool, table=virtual)
    with pytest.raises(TypeError, match="table"):
        run_gqa(case, dataclasses.replace(data, pool=pool))


def test_the_table_of_another_sub_pool_is_refused():
    case = Gqa(rows=((1, 3),))
    data = make_gqa(case)
    table = KernelBlocks(ids=data.pool.table.ids, sub_pool="other")
    pool = dataclasses.replace(data.pool, table=table)
    with pytest.raises(TypeError, match="'full', not of 'other'"):
        run_gqa(case, dataclasses.replace(data, pool=pool))


def test_a_table_of_another_batch_is_refused():
    case = Gqa(rows=((1, 3), (1, 4)))
    data = make_gqa(case)
    table = KernelBlocks(ids=data.pool.table.ids[:1], sub_pool="full")
    pool = dataclasses.replace(data.pool, table=table)
    with pytest.raises(ValueError, match=r"the batch needs \[2, max_pages\]"):
        run_gqa(case, dataclasses.replace(data, pool=pool))


def test_sizes_that_contradict_each_other_are_refused():
    case = Gqa(rows=((1, 3),))
    data = make_gqa(case)
    with pytest.raises(ValueError, match="3 query heads must be a multiple of the 2"):
        run_gqa(case, dataclasses.replace(data, q=data.q[:, :3]))
    with pytest.raises(ValueError, match="q has heads of 15, K has heads of 16"):
        run_gqa(case, dataclasses.replace(data, q=data.q[..., :15]))
    with pytest.raises(ValueError, match="window=0 must be 1 or more"):
        run_gqa(case, data, window=0)
    with pytest.raises(ValueError, match=r"soft_cap=0\.0 must be positive"):
        run_gqa(case, data, soft_cap=0.0)
    with pytest.raises(ValueError, match="has 2 entries, 2 rows need 3"):
        ops.gqa_attention(
            jnp.asarray(data.q),
            data.pool.buffers,
            *data.views,
            data.pool.table,
            cu_query_lens=case.batch["cu_query_lens"],
            kv_lens=jnp.ones(2, jnp.int32),
            max_query_len=1,
            softmax_scale=1.0,
        )


def test_mla_sizes_that_contradict_each_other_are_refused():
    case = Mla(rows=((1, 3),))
    data = make_mla(case)
    with pytest.raises(ValueError, match="'mla' have 32 elements: q has 31"):
        run_absorbed(case, dataclasses.replace(data, q=data.q[..., 1:]))
    with pytest.raises(ValueError, match="latent_dim=33 must be positive"):
        run_absorbed(dataclasses.replace(case, dims=(33, 8, 12, 10)), data)
    with pytest.raises(ValueError, match="q has 19, the parts 12 without"):
        run_expanded(case, dataclasses.replace(data, q_heads=data.q_heads[..., 1:]))


def operands(name):
    """Arguments of a right call of an op of attention, all by name."""
    rows = ((2, 40), (2, 9))
    if name.startswith("gqa"):
        case = Gqa(rows=rows)
        data = make_gqa(case)
        found = {
            "q": data.q,
            **dict(zip(("k_view", "v_view"), data.views, strict=True)),
        }
    else:
        case = Mla(rows=rows)
        data = make_mla(case)
        found = {"q": data.q, "view": data.view}
    if name in ("mla_decode", "mla_extend_absorbed"):
        found["latent_dim"] = case.dims[0]
    if name == "mla_extend":
        found |= {"q": data.q_heads, "w_kc": data.w_kc, "w_vc": data.w_vc}
    if name.endswith("decode"):
        found |= {"q": case.dense(found["q"]), "kv_lens": case.batch["kv_lens"]}
    else:
        found |= {**case.batch, "max_query_len": 2}
    found |= {"buffers": data.pool.buffers, "table": data.pool.table}
    arrays = {k: jnp.asarray(x) for k, x in found.items() if isinstance(x, np.ndarray)}
    return found | arrays | {"softmax_scale": case.scale}


def with_ids(change):
    return lambda old: dataclasses.replace(old["table"], ids=change(old["table"].ids))


DECODES = ("gqa_decode", "mla_decode")
PACKED = ("gqa_attention", "mla_extend_absorbed", "mla_extend")
# Ops, the argument, what it becomes, and what is said about it.
NOT_OF_ONE_BATCH = [
    (DECODES, "q", lambda old: old["q"][:1], "q has 1 rows, kv_lens has 2"),
    (DECODES, "q", lambda old: old["q"][0], r"takes \[rows, query_len, num_heads"),
    (PACKED, "q", lambda old: old["q"][None], r"takes \[num_tokens, num_heads"),
    (
        PACKED,
        "cu_query_lens",
        lambda old: old["cu_query_lens"][:2],
        "has 2 entries, 2 rows need 3",
    ),
    (
        DECODES + PACKED,
        "kv_lens",
        lambda old: old["kv_lens"].astype(np.float32),
        r"kv_lens is float32\(2,\), must be int32",
    ),
    (
        DECODES + PACKED,
        "table",
        with_ids(lambda ids: ids[:, :0]),
        r"table has shape \(2, 0\)",
    ),
    (
        DECODES + PACKED,
        "table",
        with_ids(lambda ids: ids.astype(np.float32)),
        "table holds float32, must be int32",
    ),
    (
        DECODES + PACKED,
        "buffers",
        lambda old: tuple(x[:-1] for x in old["buffers"]),
        "are not those of the pool: buffer 0, with",
    ),
    (DECODES + PACKED, "buffers", lambda old: (), r"buffers of \[\] bytes"),
    (
        DECODES + PACKED,
        "buffers",
        lambda old: old["buffers"][0],
        "all buffers of the pool, not one array",
    ),
    (
        ("gqa_decode", "gqa_attention"),
        "sinks",
        lambda old: np.zeros(3, np.float32),
        "must have one for each of the 4",
    ),
    (
        ("gqa_decode", "gqa_attention"),
        "v_view",
        lambda old: operands("mla_decode")["view"],
        r"and \(32,\): K and V have",
    ),
    (
        ("mla_decode", "mla_extend"),
        "view",
        lambda old: operands("gqa_decode")["k_view"],
        "a latent row has one axis",
    ),
    (("mla_extend",), "w_kc", lambda old: old["w_kc"][:2], "q has 3 heads, w_kc"),
    (("mla_extend",), "w_vc", lambda old: old["w_vc"][:2], "with the same heads"),
    (("mla_extend",), "w_vc", lambda old: old["w_vc"][..., 1:], "same heads and lat"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("op", "name", "change", "message"),
    [(op, *case) for names, *case in NOT_OF_ONE_BATCH for op in names],
)
def test_what_is_not_of_one_batch_is_refused(op, name, change, message):
    right = operands(op)
    with pytest.raises(ValueError, match=message):
        getattr(ops, op)(**right | {name: change(right)})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("op", DECODES + PACKED)
def test_what_is_of_one_batch_is_taken(op):
    out, _ = getattr(ops, op)(**operands(op))
    assert np.isfinite(np.asarray(out)[:2]).all()
