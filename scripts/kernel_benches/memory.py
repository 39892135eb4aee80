"""Page moves, which compaction and copy on write cost, and writes of new tokens."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from scripts.benchmarking import GIB
from scripts.kernel_benches.case import COLD_BYTES, BenchCase, Program
from scripts.kernel_benches.random_words import random_values
from ukv.ids import PhysicalPages, WriteLocations
from ukv.layout import PoolLayout, unified_layout
from ukv.ops import write_kv
from ukv.pool import copy_pages, pool_struct, read_entries
from ukv.spec import AttentionSpec, MLASpec, SubPoolSpec, kda_state_spec


def kimi_layout(num_mla_layers: int, pool_bytes: int) -> PoolLayout:
    """Return a pool of Kimi-Linear-48B, with all of its MLA layers or fewer.

    Args:
      num_mla_layers: 1 makes pages of 72 KiB, 7 of 504 KiB.
      pool_bytes: Size of the buffer.
    """
    specs = [
        MLASpec(
            name="mla",
            num_layers=num_mla_layers,
            page_size=64,
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
    return unified_layout(specs, pool_bytes=pool_bytes)


def _numbered_rows(layout: PoolLayout) -> jax.Array:
    """Return a buffer whose rows hold their own number."""
    (buffer,) = pool_struct(layout).buffers
    number = jnp.arange(buffer.shape[0], dtype=jnp.uint32)
    return jnp.broadcast_to(number[:, None], buffer.shape)


def _page_move_program(
    implementation, config, *, sub_pool: str, layout: PoolLayout, count: int, calls: int
) -> Program:
    if config is not None:
        raise ValueError("page moves have no configuration to try")
    sub = layout.sub_pool(sub_pool)
    rng = np.random.default_rng(0)
    pages = rng.permutation(sub.num_pages)[: 2 * calls * count].astype(np.int32)
    pages = pages.reshape(2, calls, count)
    row_bytes = 4 * layout.buffer_words[0]
    page_rows, base = sub.page_bytes // row_bytes, sub.base_bytes // row_bytes
    # Which rows are looked at: of sampled pages, the first, the last and others.
    sample = rng.integers(0, count, 256)
    offset = rng.integers(0, page_rows, 256).astype(np.int32)
    offset[:128] = np.where(sample[:128] % 2, 0, page_rows - 1)

    def make():
        src, dst = (tuple(jnp.asarray(ids)) for ids in pages)
        return (_numbered_rows(layout),), src, dst

    def step(state):
        buffers, src, dst = state
        for from_, to in zip(src, dst, strict=True):
            buffers = copy_pages(
                buffers,
                layout,
                sub,
                PhysicalPages(ids=from_, sub_pool=sub_pool),
                PhysicalPages(ids=to, sub_pool=sub_pool),
                jnp.int32(count),
                implementation=implementation,
            )
        return buffers, src, dst

    def error(state):
        (buffer,), src, dst = state
        wrong = jnp.int32(0)
        for from_, to in ((src[0], dst[0]), (src[-1], dst[-1])):
            found = buffer[base + to[sample] * page_rows + offset]
            wanted = (base + from_[sample] * page_rows + offset).astype(jnp.uint32)
            wrong += jnp.sum(found != wanted[:, None])
        return wrong.astype(jnp.float32)

    return Program(
        make=make,
        step=step,
        error=error,
        calls=calls,
        touched_bytes=2 * calls * count * sub.page_bytes,
    )


def _page_move(
    sub_pool: str, layout: PoolLayout, moved_bytes: int, *, small: bool = False
) -> BenchCase:
    sub = layout.sub_pool(sub_pool)
    count = max(min(moved_bytes // sub.page_bytes, sub.num_pages // 2 - 1), 1)
    calls = 1 if small else -(-COLD_BYTES // (2 * count * sub.page_bytes))
    return BenchCase(
        op="page_move",
        shape={
            "sub_pool": sub_pool,
            "page_bytes": sub.page_bytes,
            "pages": count,
            "pool_bytes": layout.pool_bytes,
        },
        moved_bytes=2 * count * sub.page_bytes,
        flops=0,
        max_error=0.0,
        implementations=("xla",) if small else ("mosaic_gpu", "triton", "xla"),
        program=functools.partial(
            _page_move_program,
            sub_pool=sub_pool,
            layout=layout,
            count=count,
            calls=calls,
        ),
        bandwidth="copy",
        small=small,
    )


def _write_spec(kind: str, num_layers: int) -> SubPoolSpec:
    if kind == "mla":
        return MLASpec(
            name="mla",
            num_layers=num_layers,
            page_size=64,
            latent_dim=512,
            rope_dim=64,
        )
    return AttentionSpec(
        name="kv", num_layers=num_layers, page_size=64, num_kv_heads=8, head_dim=128
    )


def _write_step(state, *, name: str, views, implementation):
    """Write every group of tokens to every layer: each write goes elsewhere."""
    buffers, blocks, offsets, values = state
    for group, entries in enumerate(values):
        locations = WriteLocations(
            blocks=blocks[group], offsets=offsets[group], sub_pool=name
        )
        for layer in views:
            buffers = write_kv(
                buffers, layer, locations, entries, implementation=implementation
            )
    return buffers, blocks, offsets, values


def _write_program(
    implementation, config, *, layout: PoolLayout, tokens: int, groups: int
) -> Program:
    if config is not None:
        raise ValueError("writes have no configuration to try")
    (sub,) = layout.sub_pools
    views = [
        tuple(
            layout.part_view(sub.name, layer=layer, part=part.name)
            for part in sub.spec.parts
        )
        for layer in range(sub.spec.num_layers)
    ]
    slots = np.random.default_rng(0).permutation(sub.num_pages * sub.page_size)
    slots = slots[: groups * tokens].reshape(groups, tokens).astype(np.int32)
    ids, offsets = slots // sub.page_size * sub.blocks_per_page, slots % sub.page_size

    def make():
        (buffer,) = pool_struct(layout).buffers
        values = tuple(
            random_values((groups, tokens, *view.shape), "bfloat16", seed=part)
            for part, view in enumerate(views[0])
        )
        return (
            (jnp.full(buffer.shape, 0xFFFFFFFF, jnp.uint32),),
            tuple(jnp.asarray(ids)),
            tuple(jnp.asarray(offsets)),
            tuple(zip(*values, strict=True)),
        )

    def error(state):
        buffers, _, _, values = state
        wrong = jnp.int32(0)
        for group in {0, groups - 1}:
            for layer in (views[0], views[-1]):
                for view, value in zip(layer, values[group], strict=True):
                    rows = (ids[group] + view.block_offset) * view.page_size
                    rows = rows + offsets[group] * view.rows_per_entry
                    found = read_entries(buffers[0], view, jnp.asarray(rows))
                    wrong += jnp.sum(found != value)
        return wrong.astype(jnp.float32)

    entry_bytes = sum(view.num_elements * view.dtype.itemsize for view in views[0])
    calls = groups * len(views)
    return Program(
        make=make,
        step=functools.partial(
            _write_step, name=sub.name, views=views, implementation=implementation
        ),
        error=error,
        calls=calls,
        touched_bytes=2 * calls * tokens * entry_bytes,
    )


def _write(
    kind: str, tokens: int, groups: int, *, num_layers: int = 7, small: bool = False
) -> BenchCase:
    spec = _write_spec(kind, num_layers)
    entry_bytes = sum(
        math.prod(part.shape) * part.dtype.itemsize for part in spec.parts
    )
    slots = groups * tokens + 8 * spec.page_size
    layout = unified_layout([spec], pool_bytes=slots * num_layers * entry_bytes)
    return BenchCase(
        op="kv_write",
        shape={
            "kind": kind,
            "entry_bytes": entry_bytes,
            "tokens": tokens,
            "layers": num_layers,
            "page_size": spec.page_size,
            "dtype": "bfloat16",
        },
        moved_bytes=2 * tokens * entry_bytes,
        flops=0,
        max_error=0.0,
        implementations=("triton", "xla"),
        program=functools.partial(
            _write_program, layout=layout, tokens=tokens, groups=groups
        ),
        bandwidth="copy",
        small=small,
    )


def cases() -> list[BenchCase]:
    """Return moves of pages of 72 KiB, 504 KiB and 41 MiB, and writes of tokens."""
    thin, thick = (kimi_layout(layers, 12 * GIB) for layers in (1, 7))
    tiny = unified_layout([_write_spec("mla", 1)], pool_bytes=GIB // 1024)
    return [
        _page_move("mla", thin, GIB),
        _page_move("mla", thick, GIB),
        _page_move("mla", thick, GIB // 128),
        # Recurrent states: what compaction moves, and one checkpoint.
        _page_move("kda", thick, GIB),
        _page_move("kda", thick, 1),
        _page_move("mla", tiny, GIB // 4096, small=True),
        _write("kv", 256, 16),
        _write("mla", 256, 56),
        _write("kv", 32768, 1),
        _write("mla", 32768, 1),
        _write("kv", 5, 2, num_layers=2, small=True),
    ]
