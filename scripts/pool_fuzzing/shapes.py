"""Tiny pools of every kind, for the fuzzer and the tests of the allocator.

A page is some hundred bytes, a pool some tens of pages, so that every history runs
into exhaustion, fragmentation and exact fits. Bytes grow with the page size, so the
shapes keep their proportions; they are chosen so that no page divides another.
"""

from collections.abc import Callable

import jax.numpy as jnp

from ukv.layout import PoolLayout, static_layout, unified_layout
from ukv.spec import (
    AttentionSpec,
    MLASpec,
    Part,
    SlidingWindowSpec,
    StateSpec,
    SubPoolSpec,
)

PAGE_SIZES = (1, 16, 64, 128)


def _mla(page_size: int) -> MLASpec:
    """48 bytes for each token."""
    return MLASpec(
        name="mla", num_layers=3, page_size=page_size, latent_dim=6, rope_dim=2
    )


def _full(page_size: int) -> AttentionSpec:
    """96 bytes for each token, K of another width than V."""
    return AttentionSpec(
        name="full",
        num_layers=2,
        page_size=page_size,
        num_kv_heads=1,
        head_dim=8,
        value_dim=16,
    )


def _swa(page_size: int) -> SlidingWindowSpec:
    """80 bytes for each token, V of another width than K."""
    return SlidingWindowSpec(
        name="swa",
        num_layers=1,
        page_size=page_size,
        num_kv_heads=1,
        head_dim=32,
        value_dim=8,
        window_size=2 * page_size,
        shares_ids="full",
    )


def _state(page_size: int) -> StateSpec:
    """256 bytes for each token of a page, in a float32 and a bfloat16 part."""
    return StateSpec(
        name="state",
        num_layers=1,
        parts=(
            Part(
                name="recurrent", shape=(4, 8 * page_size), dtype=jnp.dtype("float32")
            ),
            Part(name="conv", shape=(64 * page_size,), dtype=jnp.dtype("bfloat16")),
        ),
    )


def _kda_mla(page_size: int) -> PoolLayout:
    specs = [_mla(page_size), _state(page_size)]
    return unified_layout(
        specs, pool_bytes=(2500 if page_size > 1 else 2600) * page_size
    )


def _swa_full(page_size: int) -> PoolLayout:
    return unified_layout(
        [_full(page_size), _swa(page_size)], pool_bytes=3500 * page_size
    )


def _state_swa_full(page_size: int) -> PoolLayout:
    specs: list[SubPoolSpec] = [_full(page_size), _state(page_size), _swa(page_size)]
    return unified_layout(specs, pool_bytes=4100 * page_size)


def _four(page_size: int) -> PoolLayout:
    specs = [_mla(page_size), _state(page_size), _swa(page_size), _full(page_size)]
    return unified_layout(specs, pool_bytes=4700 * page_size)


def _alone(page_size: int) -> PoolLayout:
    return unified_layout([_mla(page_size)], pool_bytes=1200 * page_size)


def _static(page_size: int) -> PoolLayout:
    specs = [_full(page_size), _swa(page_size), _state(page_size)]
    return static_layout(specs, num_pages={"full": 20, "swa": 14, "state": 5})


SHAPES: dict[str, Callable[[int], PoolLayout]] = {
    "kda_mla": _kda_mla,
    "swa_full": _swa_full,
    "state_swa_full": _state_swa_full,
    "four": _four,
    "alone": _alone,
    "static": _static,
}
"""Layout by page size, by the name of the shape. ``four`` has two floats."""
