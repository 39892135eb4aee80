"""Times the pool on a GPU: read tables, decode allocation, far pages.

Each result is checked before it is timed, and the ceilings of the card are measured
in the same run.

    python scripts/bench_pool.py --json docs/benchmarks/pool_h200.json
    python scripts/bench_pool.py --small        # a quick run of everything, also on CPU
"""

import argparse
import functools as ft
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from scripts import benchmarking
from scripts.benchmarking import GIB, Result
from ukv.allocator import alloc, alloc_decode, alloc_extend, raise_on_error
from ukv.ids import KernelBlocks, VirtualPages
from ukv.layout import unified_layout
from ukv.ops import write_kv
from ukv.pool import (
    PoolState,
    create_pool,
    read_entries,
    write_entries,
)
from ukv.spec import MLASpec, kda_state_spec
from ukv.translator import (
    Bucket,
    KVIndexTranslator,
    StepBatch,
    make_static_tables,
    refresh_static_tables,
)


def kimi_specs(num_mla_layers: int = 7, page_size: int = 64) -> list:
    """Return the sub-pools of Kimi-Linear-48B."""
    return [
        MLASpec(
            name="mla",
            num_layers=num_mla_layers,
            page_size=page_size,
            latent_dim=512,
            rope_dim=64,
        ),
        kda_state_spec(
            name="kda",
            num_layers=20,
            num_heads=32,
            key_dim=128,
            value_dim=128,
            conv_width=4,
        ),
    ]


def _full_rows(state: PoolState, rows: int, width: int):
    """Return the pool and a page table with ``width`` pages in each row."""
    extend = jax.jit(
        ft.partial(alloc_extend, max_new_pages=rows * width), donate_argnums=0
    )
    page_size = state.layout.sub_pool("mla").page_size
    table = {"mla": VirtualPages(ids=jnp.zeros((rows, width), jnp.int32), space="mla")}
    lens = jnp.full(rows, width * page_size, jnp.int32)
    state, table, granted = extend(state, table, jnp.zeros_like(lens), lens)
    raise_on_error(state)
    assert bool(granted)
    return state, table["mla"]


def bench_read_table(rows: int, width: int, pool_bytes: int, unroll: int) -> Result:
    """Time the translation of one read table as part of a jitted step."""
    layout = unified_layout(kimi_specs(1), pool_bytes=pool_bytes)
    state, table = _full_rows(create_pool(layout), rows, width)
    translator = KVIndexTranslator(layout)
    num_pages = jnp.full(rows, width, jnp.int32)

    def fill(out, state, pages, num_pages):
        return translator.fill_read_table(out, state, pages, num_pages)[1]

    out = KernelBlocks(ids=jnp.full((rows, width), -1, jnp.int32), sub_pool="mla")
    found = jax.jit(fill)(out, state, table, num_pages)
    wanted = np.asarray(state.tables[0].v2p)[np.asarray(table.ids)]
    wanted = wanted * layout.sub_pool("mla").blocks_per_page
    error = float(np.sum(np.asarray(found.ids) != wanted))

    def many(tables, state, pages, num_pages, count):
        # Each table is filled for other lengths, so that no two calls are one.
        filled = []
        for i in range(count):
            state, done = translator.fill_read_table(
                tables[i], state, pages, num_pages - i
            )
            state, done = jax.lax.optimization_barrier((state, done))
            filled.append(done)
        return filled, state

    def time_of(count: int) -> float:
        step = jax.jit(ft.partial(many, count=count), donate_argnums=(0, 1))
        held = {
            "tables": [
                KernelBlocks(ids=jnp.zeros((rows, width), jnp.int32), sub_pool="mla")
                for _ in range(count)
            ],
            "state": jax.tree.map(
                jnp.copy, state.replace(buffers=(jnp.zeros((1, 1), jnp.uint32),))
            ),
        }

        def call():
            held["tables"], held["state"] = step(
                held["tables"], held["state"], table, num_pages
            )
            return held["tables"]

        return benchmarking.median_us(call, repeats=15, inner=20)

    us = (time_of(2 * unroll) - time_of(unroll)) / unroll
    return Result(
        op="read_table",
        implementation="xla",
        shape={"rows": rows, "pages": width, "pool_bytes": layout.pool_bytes},
        us=us,
        gbps=8 * rows * width / us / 1e3,
        error=error,
    )


def bench_alloc_decode(rows: int, width: int, pool_bytes: int, unroll: int) -> Result:
    """Time ``alloc_decode`` as part of a jitted step of several tokens."""
    layout = unified_layout(kimi_specs(page_size=16), pool_bytes=pool_bytes)
    state = create_pool(layout)
    table = {"mla": VirtualPages(ids=jnp.zeros((rows, width), jnp.int32), space="mla")}
    # Every step some rows cross a page border.
    first = jnp.arange(rows, dtype=jnp.int32) % 16
    extend = jax.jit(ft.partial(alloc_extend, max_new_pages=rows), donate_argnums=0)
    state, table, _ = extend(state, table, jnp.zeros_like(first), first)
    active = jnp.ones(rows, jnp.bool_)

    def many(state, table, lens, count):
        for _ in range(count):
            state, table, granted = alloc_decode(state, table, lens, active)
            lens = lens + granted.astype(jnp.int32)
        return state, table, lens

    def time_of(count: int) -> tuple[float, float]:
        step = jax.jit(ft.partial(many, count=count), donate_argnums=(0, 1, 2))
        held = {"all": jax.tree.map(jnp.copy, (state, table, first))}

        def call():
            held["all"] = step(*held["all"])
            return held["all"][2]

        us = benchmarking.median_us(call, repeats=9, inner=4)
        final, pages, lens = held["all"]
        raise_on_error(final)
        owned = np.asarray(pages["mla"].ids)
        pages_due = int(np.sum(-(-np.asarray(lens) // 16)))
        ids = owned[owned > 0]
        error = abs(len(ids) - pages_due) + len(ids) - len(set(ids.tolist()))
        return us, float(error)

    long, error = time_of(2 * unroll)
    short, _ = time_of(unroll)
    return Result(
        op="alloc_decode",
        implementation="xla",
        shape={"rows": rows, "steps": unroll, "pool_bytes": layout.pool_bytes},
        us=(long - short) / unroll,
        error=error,
    )


def bench_pointer(rows: int, steps: int, pool_bytes: int) -> Result:
    """Check that pool and tables keep their address over many decode steps."""
    layout = unified_layout(kimi_specs(), pool_bytes=pool_bytes)
    translator = KVIndexTranslator(layout)
    width = 64
    bucket = Bucket(num_rows=rows, max_pages=width, num_tokens=rows)
    tables = make_static_tables(translator, [bucket])[bucket]
    state = create_pool(layout)
    state, grant = jax.jit(
        ft.partial(alloc, max_pages={"kda": rows}), donate_argnums=0
    )(state, {"kda": jnp.int32(rows)})
    slots = grant.pages["kda"]
    table = VirtualPages(ids=jnp.zeros((rows, width), jnp.int32), space="mla")
    lens = jnp.arange(rows, dtype=jnp.int32)
    view = layout.part_view("mla", layer=6, part="latent")
    extend = jax.jit(ft.partial(alloc_extend, max_new_pages=4 * rows), donate_argnums=0)
    state, pages, _ = extend(state, {"mla": table}, jnp.zeros_like(lens), lens)

    def step(state, tables, table, lens):
        state, pages, _ = alloc_decode(
            state, {"mla": table}, lens, jnp.ones(rows, jnp.bool_)
        )
        batch = StepBatch(
            page_tables={"mla": pages["mla"], "kda": slots},
            cu_query_lens=jnp.arange(rows + 1, dtype=jnp.int32),
            kv_lens=lens + 1,
            num_tokens=rows,
        )
        state, tables = refresh_static_tables(translator, tables, state, batch)
        values = jnp.broadcast_to(
            lens.astype(jnp.bfloat16)[:, None], (rows, view.num_elements)
        )
        buffers = write_kv(state.buffers, (view,), tables.writes["mla"], (values,))
        return state.replace(buffers=buffers), tables, pages["mla"], lens + 1

    jitted = jax.jit(step, donate_argnums=(0, 1, 2, 3))
    held = jitted(state, tables, pages["mla"], lens)

    def pointers():
        state, tables, _, _ = held
        leaves = jax.tree.leaves((state.buffers, tables))
        return [leaf.unsafe_buffer_pointer() for leaf in leaves]

    before, moved = pointers(), 0
    for _ in tqdm(range(steps), desc="pointer", leave=False):
        held = jitted(*held)
        moved += pointers() != before
    raise_on_error(held[0])
    return Result(
        op="pool_pointer",
        implementation="xla",
        shape={"rows": rows, "steps": steps, "pool_bytes": layout.pool_bytes},
        us=None,
        error=float(moved),
    )


def bench_far_pages(pool_bytes: int) -> Result:
    """Write and read the first and last page of the last layer of a large pool."""
    layout = unified_layout(kimi_specs(), pool_bytes=pool_bytes)
    error = 0.0
    state = create_pool(layout)
    rng = np.random.default_rng(0)
    for name, part in (("mla", "latent"), ("kda", "recurrent"), ("kda", "conv")):
        sub = layout.sub_pool(name)
        view = layout.part_view(name, layer=sub.spec.num_layers - 1, part=part)
        pages = np.array([0, sub.num_pages - 1])
        rows = (pages * sub.blocks_per_page + view.block_offset) * view.page_size
        rows = rows + (view.page_size - 1) * view.rows_per_entry
        first_rows = jnp.asarray(rows, jnp.int32)
        values = jnp.asarray(rng.normal(size=(2, *view.shape)), view.dtype)

        @ft.partial(jax.jit, donate_argnums=0)
        def write_and_read(state, first_rows, values, view=view):
            buffer = write_entries(state.buffers[0], view, first_rows, values)
            found = read_entries(buffer, view, first_rows)
            return state.replace(buffers=(buffer,)), found

        state, found = write_and_read(state, first_rows, values)
        error += float(jnp.sum(found != values))
        # The words themselves, read by plain arithmetic on the host's side.
        words = np.asarray(values[1]).reshape(-1).view(np.uint32)
        first_word = int(rows[1]) * view.row_words
        width = layout.buffer_words[0]
        row, column = divmod(first_word, width)
        line = np.asarray(jax.lax.dynamic_slice_in_dim(state.buffers[0], row, 1))[0]
        part_words = words[: width - column]
        error += float(np.sum(line[column : column + len(part_words)] != part_words))
    return Result(
        op="far_pages",
        implementation="xla",
        shape={"pool_bytes": layout.pool_bytes},
        us=None,
        error=error,
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=pathlib.Path, help="write the record here")
    parser.add_argument("--commit", help="commit to record when git is not at hand")
    parser.add_argument("--small", action="store_true", help="tiny sizes, any device")
    arguments = parser.parse_args()
    small = arguments.small
    facts = benchmarking.device_facts(arguments.commit)
    small_bytes = GIB // 2
    # First, while the allocator has not yet cut the card's memory into pieces.
    results = [bench_far_pages(small_bytes if small else 100 * GIB)]
    limits = benchmarking.ceilings(
        num_bytes=GIB // 64 if small else 4 * GIB, size=256 if small else 8192
    )
    rows, width = (4, 16) if small else (256, 2048)
    pool_bytes = small_bytes if small else 8 * GIB
    table_bytes = small_bytes if small else rows * width * 73_728 + GIB
    single = [
        ft.partial(bench_read_table, rows, width // 8, pool_bytes, 4),
        ft.partial(bench_alloc_decode, rows, 1024, pool_bytes, 4 if small else 24),
        ft.partial(bench_pointer, rows, 20 if small else 1000, 2 * pool_bytes),
    ]
    if not small:
        single[0] = ft.partial(bench_read_table, rows, width, table_bytes, 32)
    try:
        for step in tqdm(single, desc="state"):
            results.append(step())
    finally:
        # A case that fails must not lose those that were measured before it.
        benchmarking.finish(facts, limits, results, arguments.json)


if __name__ == "__main__":
    main()
