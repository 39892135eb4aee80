"""The memory systems that are compared: layouts of one number of bytes.

    unified   one buffer with moving borders, page sizes by kind
    static    a buffer for each kind, sizes fixed at start
    padded    one page size for all kinds, in bytes: any free page serves any kind

The padded system groups layers as vLLM does (``kv_cache_utils.py`` and its mamba page
alignment): groups of equally many layers, the last one padded; tokens per page raised
until a page of a layer holds a state of a layer, and the state padded to that page.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from scripts.capacity.geometry import used_bytes
from ukv.layout import (
    PoolLayout,
    RequestShape,
    static_layout,
    unified_layout,
)
from ukv.layout.request import pages_of_spec
from ukv.layout.sub_pool import page_bytes_of
from ukv.spec import Part, StateSpec, SubPoolSpec

# Defaults of SGLang: bytes of states over bytes of K/V, tokens of windows over tokens.
STATE_RATIO = 0.9
WINDOW_RATIO = 0.8
PAGE_STEP = 16
"""vLLM rounds the tokens of a page up to a multiple of this."""

Specs = Sequence[SubPoolSpec]


def request_bytes(specs: Specs, num_tokens: int, *, chunk_len: int = 1) -> int:
    """Return the most bytes of pages that a request holds at once."""
    shape = RequestShape(num_tokens=num_tokens, chunk_len=min(chunk_len, num_tokens))
    return sum(pages_of_spec(spec, shape) * page_bytes_of(spec) for spec in specs)


def group_layers(specs: Specs) -> int:
    """Return the layers of a group: the fewest of a kind, or the most if close."""
    counts = [spec.num_layers for spec in specs]
    return max(counts) if max(counts) < 1.5 * min(counts) else min(counts)


def padded_specs(specs: Specs) -> tuple[SubPoolSpec, ...]:
    """Return the same kinds with pages of one size, and layers to whole groups.

    A page of a kind with several groups stands for one page of each: they come and go
    together, since all layers of a kind have the same tokens.
    """
    group = group_layers(specs)
    states = [spec for spec in specs if not spec.grows]
    # Bytes of a token, or of a state, in one layer.
    entry = {
        spec.name: page_bytes_of(spec) // spec.page_size // spec.num_layers
        for spec in specs
    }
    growing = [spec for spec in specs if spec.grows]
    page_size = growing[0].page_size
    if states:
        token = min(entry[spec.name] for spec in growing)
        most = max(entry[spec.name] for spec in states)
        tokens = max(-(-most // token), page_size)
        page_size = -(-tokens // PAGE_STEP) * PAGE_STEP
    page = max(page_size * entry[spec.name] for spec in growing)
    padded: list[SubPoolSpec] = []
    for spec in specs:
        num_layers = -(-spec.num_layers // group) * group
        if spec.grows:
            tokens = page // entry[spec.name]
            padded.append(
                dataclasses.replace(spec, num_layers=num_layers, page_size=tokens)
            )
        else:
            part = Part(name="padded", shape=(page // 2,), dtype=jnp.dtype("bfloat16"))
            padded.append(
                StateSpec(name=spec.name, num_layers=num_layers, parts=(part,))
            )
    return tuple(padded)


def padding_waste(specs: Specs, num_tokens: int) -> int:
    """Return the bytes that a request of this length holds and does not need."""
    held = 0
    for spec in padded_specs(specs):
        tokens = min(num_tokens, spec.window or num_tokens)
        held += (-(-tokens // spec.page_size) if spec.grows else 1) * page_bytes_of(
            spec
        )
    return held - used_bytes(tuple(specs), num_tokens)


def padded_layout(specs: Specs, pool_bytes: int) -> PoolLayout:
    """Return the layout of one page size.

    Equal pages need no borders, so a unified layout of padded specs counts the same:
    a request fits if the bytes of its pages do.
    """
    return unified_layout(padded_specs(specs), pool_bytes=pool_bytes)


def split_layout(specs: Specs, pool_bytes: int, share: float) -> PoolLayout:
    """Return the static layout of two kinds.

    Args:
      specs: Two.
      pool_bytes: Budget, null pages included.
      share: Part of the bytes that the first kind gets.
    """
    first, second = specs
    budgets = (share * pool_bytes, (1.0 - share) * pool_bytes)
    pages = {}
    for spec, budget in zip((first, second), budgets, strict=True):
        null = spec.id_space == spec.name
        pages[spec.name] = max(int(budget) // page_bytes_of(spec) - null, 1)
    return static_layout(specs, num_pages=pages)


def default_share(specs: Specs) -> float:
    """Return the first kind's part of the bytes under SGLang's default ratios."""
    first, second = specs
    if not second.grows:
        return 1.0 / (1.0 + STATE_RATIO)
    tokens = page_bytes_of(first) / first.page_size
    window = page_bytes_of(second) / second.page_size
    return tokens / (tokens + WINDOW_RATIO * window)


def share_bounds(
    specs: Specs, pool_bytes: int, num_tokens: int, chunk_len: int
) -> tuple[float, float]:
    """Return the least and the most share at which a request of this length fits.

    The first is larger than the second if no split holds it.
    """
    shape = RequestShape(num_tokens=num_tokens, chunk_len=min(chunk_len, num_tokens))
    # A page each for the null page and for rounding down.
    needs = [
        (pages_of_spec(spec, shape) + 2) * page_bytes_of(spec) / pool_bytes
        for spec in specs
    ]
    return needs[0], 1.0 - needs[1]
