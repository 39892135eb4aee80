"""Pools with known rows in them, for the tests of ops that read through tables.

The bytes are put in place by NumPy, and the tables written by hand from a random
choice of physical pages: neither a write op, nor the allocator, nor the translator
takes part. Every byte that no row owns stays 0xFF.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ukv.ids import KernelBlocks
from ukv.layout import Placement, PoolLayout, static_layout, unified_layout
from ukv.layout.sub_pool import page_bytes_of
from ukv.spec import MLASpec, SubPoolSpec

PLACEMENTS = ("low", "float", "high", "static")


def neighbour(name: str) -> MLASpec:
    """A sub-pool of another kind that shares the buffer."""
    return MLASpec(
        name=name,
        num_layers=1,
        page_size=4,
        latent_dim=6,
        rope_dim=2,
        dtype=jnp.dtype("float32"),
    )


def layout_with(spec: SubPoolSpec, placement: str, *, num_pages: int) -> PoolLayout:
    """A layout where `spec` lies at `placement` and has `num_pages` pages or more.

    The high end starts at a byte that is not 0, if the sizes of its pages allow it.
    """
    specs = {
        "low": [spec, neighbour("other")],
        "high": [neighbour("other"), spec],
        "float": [neighbour("other"), spec, neighbour("third")],
        "static": [neighbour("other"), spec],
    }[placement]
    if placement == "static":
        return static_layout(specs, num_pages={"other": 3, spec.name: num_pages})
    page_bytes = page_bytes_of(spec)
    layouts = [
        unified_layout(specs, pool_bytes=page_bytes * (num_pages + 2) + extra)
        for extra in range(0, page_bytes, max(page_bytes // 8, 1))
    ]
    found = max(layouts, key=lambda layout: layout.sub_pool(spec.name).base_bytes)
    assert found.sub_pool(spec.name).num_pages >= num_pages
    assert found.sub_pool(spec.name).placement is Placement(placement)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedRows:
    """A pool in which some rows of a batch have their entries.

    Attributes:
      layout: Its layout.
      buffers: Its buffers.
      table: Read table, `[rows, max_pages]`.
    """

    layout: PoolLayout
    buffers: tuple[jax.Array, ...]
    table: KernelBlocks


def draw_pages(
    layout: PoolLayout, name: str, counts: list[int], rng: np.random.Generator
) -> list[np.ndarray]:
    """Distinct physical pages for each row; page 0 stays free (static: null page)."""
    order = rng.permutation(np.arange(1, layout.sub_pool(name).num_pages))
    assert sum(counts) < len(order), "one page at least must stay free"
    return np.split(order[: sum(counts)], np.cumsum(counts)[:-1])


def write_rows(
    layout: PoolLayout,
    name: str,
    *,
    layer: int,
    entries: dict[str, list[np.ndarray]],
    first_live: list[int],
    max_pages: int,
    seed: int,
) -> PagedRows:
    """Put the rows of a batch into a poisoned pool, at pages drawn by chance.

    Args:
      layout: The pool's layout.
      name: The sub-pool.
      layer: The layer to write.
      entries: For each part, for each row, `[kv_len, *shape]`.
      first_live: For each row, the first position that a query of it can see: the
        pages before that one were released.
      max_pages: Width of the table.
      seed: Decides the pages and what stands in table entries that nobody may use.
    """
    rng = np.random.default_rng(seed)
    sub = layout.sub_pool(name)
    size = sub.page_size
    kv_lens = [len(row) for row in next(iter(entries.values()))]
    released = [first // size for first in first_live]
    counts = [
        max(0, -(-kv_len // size) - skipped)
        for kv_len, skipped in zip(kv_lens, released, strict=True)
    ]
    # What is not live may be anything: the null page, a free page, no page at all.
    garbage = np.array([0, sub.num_pages - 1, 2**31 - 1, 2**30 + 7])
    table = rng.choice(garbage, size=(len(kv_lens), max_pages)).astype(np.int32)
    for row, pages in enumerate(draw_pages(layout, name, counts, rng)):
        end = released[row] + len(pages)
        table[row, released[row] : end] = pages * sub.blocks_per_page
    buffers = [np.full(num, 0xFF, np.uint8) for num in layout.buffer_bytes]
    for part, rows in entries.items():
        view = layout.part_view(name, layer=layer, part=part)
        for row, values in enumerate(rows):
            live = np.arange(released[row] * size, kv_lens[row])
            blocks = table[row, live // size] + view.block_offset
            first_rows = blocks * size + live % size * view.rows_per_entry
            data = values[live].reshape(len(live), view.num_elements).view(np.uint8)
            at = (first_rows * view.row_bytes)[:, None] + np.arange(data.shape[1])
            buffers[view.buffer_index][at] = data
    words = zip(buffers, layout.buffer_words, strict=True)
    return PagedRows(
        layout=layout,
        buffers=tuple(
            jnp.asarray(buffer.view(np.uint32).reshape(-1, row_words))
            for buffer, row_words in words
        ),
        table=KernelBlocks(ids=jnp.asarray(table), sub_pool=name),
    )
