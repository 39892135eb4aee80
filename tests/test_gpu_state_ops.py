"""Every state operation, compiled for an H200 on a 64 GiB pool: nothing is copied."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest

from tests.gpu_compile import (
    compile_for_h200,
    pool_sized_copies,
    requires_h200_compiler,
)
from ukv.allocator import (
    alloc,
    alloc_decode,
    alloc_extend,
    compact,
    copy_page,
    free,
    free_full,
    free_window,
    make_room,
    share,
)
from ukv.ids import VirtualPages
from ukv.layout import unified_layout
from ukv.ops import (
    DeltaViews,
    KdaGate,
    ProjectedTokens,
    ShortConv,
    StateSlots,
    kda_decode_step,
    mla_decode,
    write_kv,
)
from ukv.pool import pool_struct
from ukv.spec import AttentionSpec, MLASpec, SlidingWindowSpec, kda_state_spec
from ukv.translator import (
    Bucket,
    KVIndexTranslator,
    StepBatch,
    make_static_tables,
    refresh_static_tables,
)

pytestmark = requires_h200_compiler

GIB = 2**30
MIB = 2**20
ROWS, WIDTH = 256, 2048
# The reference gathers the states of a layer, 2 MiB for each row.
STEP_ROWS = 8

KIMI = [
    MLASpec(name="mla", num_layers=7, page_size=64, latent_dim=512, rope_dim=64),
    kda_state_spec(
        name="kda",
        num_layers=20,
        num_heads=32,
        key_dim=128,
        value_dim=128,
        conv_width=4,
    ),
]
HYBRID = [
    AttentionSpec(
        name="full", num_layers=10, page_size=64, num_kv_heads=8, head_dim=128
    ),
    kda_state_spec(
        name="state",
        num_layers=8,
        num_heads=16,
        key_dim=128,
        value_dim=128,
        conv_width=4,
    ),
    SlidingWindowSpec(
        name="swa",
        num_layers=20,
        page_size=64,
        num_kv_heads=8,
        head_dim=128,
        window_size=1024,
        shares_ids="full",
    ),
]


def int32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def ids(space, *shape):
    return VirtualPages(ids=int32(*shape), space=space)


def scalars(**names):
    return {name: int32() for name in names}


def operations(grow, state):
    """Return by name: a function of the pool, and its other arguments."""
    both = {grow: 512, state: 16}
    lens, active = int32(ROWS), jax.ShapeDtypeStruct((ROWS,), jnp.bool_)
    table = {grow: ids(grow, ROWS, WIDTH)}
    counts = scalars(**both)
    return {
        "alloc": (ft.partial(alloc, max_pages=both), (counts,)),
        "alloc_extend": (
            ft.partial(alloc_extend, max_new_pages=512),
            (table, lens, lens),
        ),
        "alloc_decode": (alloc_decode, (table, lens, active)),
        "free": (free, (ids(grow, ROWS, WIDTH),)),
        "free_full": (free_full, (ids(grow, 512),)),
        "share": (share, (ids(grow, ROWS, WIDTH),)),
        "copy_page": (copy_page, (ids(grow, 256),)),
        "copy_state": (copy_page, (ids(state, 64),)),
        "make_room": (make_room, (counts,)),
        "compact": (compact, ()),
    }


CASES = [
    *(("kimi", name) for name in operations("mla", "kda")),
    *(("hybrid", name) for name in operations("full", "state")),
    ("hybrid", "free_window"),
]


@pytest.mark.parametrize(("model", "name"), CASES)
def test_state_operation_is_in_place(model, name):
    specs = KIMI if model == "kimi" else HYBRID
    layout = unified_layout(specs, pool_bytes=64 * GIB)
    if name == "free_window":
        fn = lambda state, pages: free_window(state, "swa", pages)  # noqa: E731
        arguments = (ids("full", ROWS, 64),)
    else:
        fn, arguments = operations(layout.names[0], layout.names[1])[name]
    program = compile_for_h200(fn, pool_struct(layout), *arguments, donate_argnums=0)
    assert program.alias_bytes >= layout.pool_bytes
    assert program.temp_bytes < 64 * MIB
    assert not pool_sized_copies(program.hlo_text, layout.pool_bytes // 2)
    if name in {"copy_page", "copy_state", "make_room", "compact"}:
        # The copy is the kernel that a card of this kind gets by default.
        assert "mosaic_gpu" in program.hlo_text


@pytest.mark.parametrize("specs", [KIMI, HYBRID], ids=["kimi", "hybrid"])
def test_refresh_of_static_tables_is_in_place(specs):
    layout = unified_layout(specs, pool_bytes=64 * GIB)
    translator = KVIndexTranslator(layout)
    bucket = Bucket(num_rows=ROWS, max_pages=WIDTH, num_tokens=ROWS)
    tables = jax.eval_shape(lambda: make_static_tables(translator, [bucket])[bucket])
    batch = StepBatch(
        page_tables={
            sub.name: ids(sub.name, ROWS, WIDTH)
            if sub.spec.grows
            else ids(sub.name, ROWS)
            for sub in layout.owners
        },
        cu_query_lens=int32(ROWS + 1),
        kv_lens=int32(ROWS),
        num_tokens=ROWS,
    )
    program = compile_for_h200(
        ft.partial(refresh_static_tables, translator),
        tables,
        pool_struct(layout),
        batch,
        donate_argnums=(0, 1),
    )
    table_bytes = sum(leaf.size * 4 for leaf in jax.tree.leaves(tables))
    assert program.alias_bytes >= layout.pool_bytes + table_bytes
    assert program.temp_bytes < 64 * MIB
    assert not pool_sized_copies(program.hlo_text, layout.pool_bytes // 2)


def kimi_step(translator, tables, state, batch, hidden, weight):
    """One decode step of 27 layers that write and read the pool, bare of a model."""
    state, tables = refresh_static_tables(translator, tables, state, batch)
    layout, buffers = state.layout, state.buffers
    rows, heads, dim = STEP_ROWS, 32, 128
    slots = StateSlots(slots=tables.slots["kda"], is_fresh=batch.context_lens == 0)
    conv = ShortConv(weight=jnp.ones((3 * heads * dim, 4), jnp.float32))
    gate = KdaGate(
        a_log=jnp.zeros(heads, jnp.float32),
        dt_bias=jnp.zeros((heads, dim), jnp.float32),
    )
    num_mla = num_kda = 0
    for layer in range(27):
        mixed = hidden @ weight
        if (layer + 1) % 4 == 0 or layer == 26:
            view = layout.part_view("mla", layer=num_mla, part="latent")
            latent = (mixed[:, :576],)
            buffers = write_kv(buffers, (view,), tables.writes["mla"], latent)
            q = jnp.broadcast_to(mixed[:, None, None, :576], (rows, 1, heads, 576))
            out, _ = mla_decode(
                q,
                buffers,
                view,
                tables.reads["mla"],
                kv_lens=batch.kv_lens,
                latent_dim=512,
                softmax_scale=192**-0.5,
            )
            hidden = hidden + out[:, 0, 0, :256]
            num_mla += 1
            continue
        views = DeltaViews(
            recurrent=layout.part_view("kda", layer=num_kda, part="recurrent"),
            conv=layout.part_view("kda", layer=num_kda, part="conv"),
        )
        x = jnp.tile(mixed, (1, 3 * heads * dim // mixed.shape[1]))[:, None]
        logits = x[..., : heads * dim].reshape(rows, 1, heads, dim)
        tokens = ProjectedTokens(qkv=x, gate_logits=logits, beta_logits=logits[..., 0])
        buffers, out = kda_decode_step(buffers, views, tokens, conv, gate, slots)
        hidden = hidden + out[:, 0, :2].reshape(rows, -1)
        num_kda += 1
    return tables, state.replace(buffers=buffers), hidden


def test_step_of_27_layers_is_in_place():
    layout = unified_layout(KIMI, pool_bytes=64 * GIB)
    translator = KVIndexTranslator(layout)
    bucket = Bucket(num_rows=STEP_ROWS, max_pages=64, num_tokens=STEP_ROWS)
    tables = jax.eval_shape(lambda: make_static_tables(translator, [bucket])[bucket])
    batch = StepBatch(
        page_tables={"mla": ids("mla", STEP_ROWS, 64), "kda": ids("kda", STEP_ROWS)},
        cu_query_lens=int32(STEP_ROWS + 1),
        kv_lens=int32(STEP_ROWS),
        num_tokens=STEP_ROWS,
    )
    hidden = jax.ShapeDtypeStruct((STEP_ROWS, 256), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((256, 1024), jnp.bfloat16)
    program = compile_for_h200(
        ft.partial(kimi_step, translator),
        tables,
        pool_struct(layout),
        batch,
        hidden,
        weight,
        donate_argnums=(0, 1, 3),
    )
    assert program.alias_bytes >= layout.pool_bytes
    assert program.temp_bytes < 64 * MIB
    assert not pool_sized_copies(program.hlo_text, layout.pool_bytes // 2)
