"""Page moves: what compaction and copy on write cost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from scripts.benchmarking import GIB
from scripts.kernel_benches.case import BenchCase, Prepared
from ukv.ids import PhysicalPages
from ukv.layout import PoolLayout, SubPoolLayout, unified_layout
from ukv.pool import copy_pages, create_pool
from ukv.spec import MLASpec, kda_state_spec


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


def cases() -> list[BenchCase]:
    """Return moves of single pages of 72 KiB, 504 KiB and 41 MiB, 1 GiB in all."""
    return [
        _page_move("mla", 1, GIB, 12 * GIB),
        _page_move("mla", 7, GIB, 12 * GIB),
        _page_move("kda", 7, GIB, 12 * GIB),
        _page_move("mla", 1, GIB // 64, GIB // 4, small=True),
    ]
