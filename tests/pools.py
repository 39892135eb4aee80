"""Small pools that several test files share."""

import functools as ft
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from ukv.allocator import Grant, alloc
from ukv.layout import PoolLayout, packed_bytes, static_layout, unified_layout
from ukv.pool import PoolState, create_pool
from ukv.spec import AttentionSpec, MLASpec, SlidingWindowSpec, SubPoolSpec
from ukv.spec import kda_state_spec as _kda_state_spec

POISON = 0xFFFFFFFF


def kda_mla_specs(page_size: int) -> list[SubPoolSpec]:
    """Return a scaled-down Kimi-Linear: 2 MLA layers below, 3 KDA layers above."""
    return [
        MLASpec(
            name="mla", num_layers=2, page_size=page_size, latent_dim=40, rope_dim=8
        ),
        _kda_state_spec(
            name="kda",
            num_layers=3,
            num_heads=2,
            key_dim=8,
            value_dim=8,
            conv_width=4,
        ),
    ]


def window_specs(page_size: int) -> list[SubPoolSpec]:
    """Return full attention, a state and a window: two ends and a float."""
    return [
        AttentionSpec(
            name="full",
            num_layers=2,
            page_size=page_size,
            num_kv_heads=2,
            head_dim=24,
            value_dim=16,
        ),
        _kda_state_spec(
            name="state",
            num_layers=1,
            num_heads=1,
            key_dim=8,
            value_dim=16,
            conv_width=2,
        ),
        SlidingWindowSpec(
            name="swa",
            num_layers=3,
            page_size=page_size,
            num_kv_heads=1,
            head_dim=16,
            window_size=20,
            shares_ids="full",
        ),
    ]


def unified(specs: list[SubPoolSpec], pages: dict[str, int]) -> PoolState:
    """Return a poisoned unified pool that just holds ``pages``."""
    layout = unified_layout(specs, pool_bytes=packed_bytes(specs, pages))
    return create_pool(layout, fill_word=POISON)


def static(specs: list[SubPoolSpec], pages: dict[str, int]) -> PoolState:
    """Return a poisoned static pool with ``pages``."""
    return create_pool(static_layout(specs, num_pages=pages), fill_word=POISON)


def scrambled_ids(layout: PoolLayout, seed: int) -> np.ndarray:
    """Return a permutation of the first owner's usable virtual ids."""
    rng = np.random.default_rng(seed)
    return rng.permutation(np.arange(1, layout.sub_pools[0].num_virtual))


def int32(values: object) -> jnp.ndarray:
    """Return ``values`` as an int32 array."""
    return jnp.asarray(values, jnp.int32)


@ft.cache
def _jitted_alloc(max_pages: tuple[tuple[str, int], ...]):
    return jax.jit(ft.partial(alloc, max_pages=dict(max_pages)), donate_argnums=0)


def jit_alloc(
    state: PoolState, num_pages: Mapping[str, int], *, max_pages: int = 16
) -> tuple[PoolState, Grant]:
    """Call ``alloc`` jitted and donating, compiled once per set of names."""
    step = _jitted_alloc(tuple((name, max_pages) for name in num_pages))
    return step(state, {name: int32(count) for name, count in num_pages.items()})
