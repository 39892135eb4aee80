"""Page moves, which compaction and copy on write cost, and writes of new tokens."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from scripts.benchmarking import GIB
from scripts.kernel_benches.case import BenchCase, Prepared
from ukv.ids import PhysicalPages, WriteLocations
from ukv.layout import PoolLayout, SubPoolLayout, unified_layout
from ukv.ops import write_kv
from ukv.pool import copy_pages, create_pool, read_entries
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


@functools.partial(jax.jit, donate_argnums=0)
def _number_rows(buffer: jax.Array) -> jax.Array:
    number = jnp.arange(buffer.shape[0], dtype=jnp.uint32)
    return jnp.broadcast_to(number[:, None], buffer.shape)


def _wrong_rows(
    buffer: jax.Array, sub: SubPoolLayout, src: np.ndarray, dst: np.ndarray
) -> float:
    """Return how many of some sampled rows of moved pages hold another row's number."""
    rng = np.random.default_rng(1)
    row_bytes = 4 * buffer.shape[1]
    page_rows, base = sub.page_bytes // row_bytes, sub.base_bytes // row_bytes
    sample = rng.integers(0, len(src), 256)
    offset = rng.integers(0, page_rows, 256)
    found = buffer[jnp.asarray(base + dst[sample] * page_rows + offset), 0]
    wanted = base + src[sample].astype(np.int64) * page_rows + offset
    return float(np.sum(np.asarray(found).astype(np.int64) != wanted))


def _prepare_page_move(
    implementation, config, *, sub_pool: str, layout: PoolLayout, count: int
) -> Prepared:
    if config is not None:
        raise ValueError("page moves have no configuration to try")
    sub = layout.sub_pool(sub_pool)
    rng = np.random.default_rng(0)
    pages = rng.permutation(sub.num_pages)[: 2 * count].astype(np.int32)
    src, dst = pages[:count], pages[count:]

    def step(state):
        buffers, src, dst = state
        buffers = copy_pages(
            buffers,
            layout,
            sub,
            PhysicalPages(ids=src, sub_pool=sub_pool),
            PhysicalPages(ids=dst, sub_pool=sub_pool),
            jnp.int32(count),
            implementation=implementation,
        )
        # The next step moves them back: always between the same two sets.
        return buffers, dst, src

    jitted = jax.jit(step, donate_argnums=0)
    numbered = _number_rows(create_pool(layout).buffers[0])
    state = jitted(((numbered,), jnp.asarray(src), jnp.asarray(dst)))
    return Prepared(
        step=jitted,
        state=state,
        calls=1,
        touched_bytes=2 * count * sub.page_bytes,
        error=_wrong_rows(state[0][0], sub, src, dst),
    )


def _page_move(
    sub_pool: str,
    num_mla_layers: int,
    moved_bytes: int,
    pool_bytes: int,
    *,
    small=False,
) -> BenchCase:
    layout = kimi_layout(num_mla_layers, pool_bytes)
    sub = layout.sub_pool(sub_pool)
    count = max(min(moved_bytes // sub.page_bytes, sub.num_pages // 2 - 1), 1)
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
        prepare=functools.partial(
            _prepare_page_move, sub_pool=sub_pool, layout=layout, count=count
        ),
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


def _prepare_write(
    implementation, config, *, layout: PoolLayout, tokens: int, groups: int
) -> Prepared:
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
    slots = slots[: groups * tokens].reshape(groups, tokens)
    ids, offsets = slots // sub.page_size * sub.blocks_per_page, slots % sub.page_size
    values = tuple(
        tuple(
            jax.random.normal(key, (tokens, *view.shape), jnp.bfloat16)
            for key, view in zip(
                jax.random.split(jax.random.key(group), len(views[0])),
                views[0],
                strict=True,
            )
        )
        for group in range(groups)
    )

    def arrays(numbers: np.ndarray) -> tuple[jax.Array, ...]:
        return tuple(jnp.asarray(row, jnp.int32) for row in numbers)

    step = jax.jit(
        functools.partial(
            _write_step, name=sub.name, views=views, implementation=implementation
        ),
        donate_argnums=0,
    )
    state = step((create_pool(layout).buffers, arrays(ids), arrays(offsets), values))
    wrong = 0
    for group in (0, groups - 1):
        for layer in views:
            for view, value in zip(layer, state[3][group], strict=True):
                rows = (ids[group] + view.block_offset) * view.page_size
                rows = rows + offsets[group] * view.rows_per_entry
                found = read_entries(state[0][0], view, jnp.asarray(rows, jnp.int32))
                wrong += int(jnp.sum(found != value))
    entry_bytes = sum(view.num_elements * view.dtype.itemsize for view in views[0])
    calls = groups * len(views)
    return Prepared(
        step=step,
        state=state,
        calls=calls,
        touched_bytes=2 * calls * tokens * entry_bytes,
        error=float(wrong),
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
        prepare=functools.partial(
            _prepare_write, layout=layout, tokens=tokens, groups=groups
        ),
        small=small,
    )


def cases() -> list[BenchCase]:
    """Return moves of pages of 72 KiB, 504 KiB and 41 MiB, and writes of tokens."""
    return [
        _page_move("mla", 1, GIB, 12 * GIB),
        _page_move("mla", 7, GIB, 12 * GIB),
        _page_move("kda", 7, GIB, 12 * GIB),
        _page_move("mla", 1, GIB // 64, GIB // 4, small=True),
        _write("kv", 256, 16),
        _write("mla", 256, 56),
        _write("kv", 32768, 1),
        _write("kv", 5, 2, num_layers=2, small=True),
    ]
