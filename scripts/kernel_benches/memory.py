"""Page moves, which compaction and copy on write cost, and writes of new tokens."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from scripts.benchmarking import GIB
from scripts.kernel_benches.case import COLD_BYTES, BenchCase, Program
from scripts.kernel_benches.random_words import random_values
from ukv.ids import PhysicalPages, WriteLocations
from ukv.implementation import Implementation
from ukv.layout import PartView, PoolLayout, SubPoolLayout, unified_layout
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Writes:
    """Groups of new tokens, each written to every layer of a pool.

    Attributes:
      layout: A pool of one sub-pool with room for all of them.
      tokens: Tokens of a group.
      groups: How many, each with places of its own.
      in_pages: The tokens of a group fill pages, as those of a prefill do. Else each
        has a place anywhere, as those of a decode do.
      is_projected: The values of a layer are a product of 256 rows, as in a step of a
        model; the time is then what the writes add to that step. Else they lie in
        memory, and a step only writes.
    """

    layout: PoolLayout
    tokens: int
    groups: int
    in_pages: bool
    is_projected: bool

    @property
    def sub(self) -> SubPoolLayout:
        """The sub-pool."""
        (sub,) = self.layout.sub_pools
        return sub

    @property
    def views(self) -> list[tuple[PartView, ...]]:
        """Where the parts of each layer lie."""
        return [
            tuple(
                self.layout.part_view(self.sub.name, layer=layer, part=part.name)
                for part in self.sub.spec.parts
            )
            for layer in range(self.sub.spec.num_layers)
        ]

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """Return kernel blocks and offsets of each group's tokens."""
        sub = self.sub
        slots = np.arange(sub.num_pages * sub.page_size, dtype=np.int32)
        units = slots.reshape(-1, sub.page_size if self.in_pages else 1)
        slots = np.random.default_rng(0).permutation(units).reshape(-1)
        slots = slots[: self.groups * self.tokens].reshape(self.groups, self.tokens)
        blocks = slots // sub.page_size * sub.blocks_per_page
        return blocks, slots % sub.page_size

    def make(self):
        """Return a poisoned pool, the places, and values or what makes them."""
        (buffer,) = pool_struct(self.layout).buffers
        pool = (jnp.full(buffer.shape, 0xFFFFFFFF, jnp.uint32),)
        blocks, offsets = (tuple(map(jnp.asarray, x)) for x in self.places())
        view = self.views[0][0]
        if self.is_projected:
            rows = random_values((self.tokens, view.num_elements), "bfloat16", seed=0)
            # The projection keeps every bit, which XLA does not know.
            weights = jnp.eye(view.num_elements, dtype=rows.dtype)
            return pool, blocks, offsets, (rows, weights)
        values = tuple(
            random_values(
                (self.groups, self.tokens, *view.shape), "bfloat16", seed=part
            )
            for part, view in enumerate(self.views[0])
        )
        return pool, blocks, offsets, tuple(zip(*values, strict=True))

    def step(self, state, *, implementation: Implementation | None):
        """Write every group to every layer: each write goes elsewhere.

        Args:
          state: As `make` returns it.
          implementation: None writes nothing.
        """
        buffers, blocks, offsets, values = state
        for group in range(self.groups):
            locations = WriteLocations(
                blocks=blocks[group],
                offsets=offsets[group],
                sub_pool=self.sub.name,
            )
            for layer in self.views:
                if self.is_projected:
                    rows, weights = values
                    # As attention does in a model, the next layer waits for the
                    # write: it needs a word of the pool. None is 0.
                    is_zero = buffers[0][0, 0] == 0
                    rows = jnp.where(is_zero, 0, rows) @ weights
                    # The kernels are the same ones whether or not there is a write.
                    rows = jax.lax.optimization_barrier(rows)
                    values = rows, weights
                    entries = tuple(rows.reshape(-1, *view.shape) for view in layer)
                else:
                    entries = values[group]
                if implementation is not None:
                    buffers = write_kv(
                        buffers,
                        layer,
                        locations,
                        entries,
                        implementation=implementation,
                    )
        return buffers, blocks, offsets, values

    def error(self, state) -> jax.Array:
        """Return how many elements are wrong in the first and the last group."""
        buffers, _, _, values = state
        blocks, offsets = self.places()
        wrong = jnp.int32(0)
        for group in {0, self.groups - 1}:
            for layer in (self.views[0], self.views[-1]):
                for part, view in enumerate(layer):
                    at = (blocks[group] + view.block_offset) * view.page_size
                    at = at + offsets[group] * view.rows_per_entry
                    found = read_entries(buffers[0], view, jnp.asarray(at))
                    value = values[0] if self.is_projected else values[group][part]
                    wrong += jnp.sum(found != value.reshape(found.shape))
        return wrong.astype(jnp.float32)

    def program(self, implementation: Implementation, config) -> Program:
        """Return what is run."""
        if config is not None:
            raise ValueError("writes have no configuration to try")
        views = self.views
        entry_bytes = sum(view.num_elements * view.dtype.itemsize for view in views[0])
        calls = self.groups * len(views)
        return Program(
            make=self.make,
            step=functools.partial(self.step, implementation=implementation),
            error=self.error,
            calls=calls,
            touched_bytes=2 * calls * self.tokens * entry_bytes,
            without=functools.partial(self.step, implementation=None)
            if self.is_projected
            else None,
        )


def _write(
    kind: str,
    tokens: int,
    groups: int,
    *,
    num_layers: int = 7,
    in_pages: bool = False,
    is_projected: bool = False,
    small: bool = False,
) -> BenchCase:
    spec = _write_spec(kind, num_layers)
    entry_bytes = sum(
        math.prod(part.shape) * part.dtype.itemsize for part in spec.parts
    )
    slots = groups * tokens + 8 * spec.page_size
    layout = unified_layout([spec], pool_bytes=slots * num_layers * entry_bytes)
    writes = Writes(
        layout=layout,
        tokens=tokens,
        groups=groups,
        in_pages=in_pages,
        is_projected=is_projected,
    )
    return BenchCase(
        op="kv_write",
        shape={
            "kind": kind,
            "entry_bytes": entry_bytes,
            "tokens": tokens,
            "places": "pages" if in_pages else "scattered",
            "layers": num_layers,
            "page_size": spec.page_size,
            "dtype": "bfloat16",
        },
        moved_bytes=2 * tokens * entry_bytes,
        flops=0,
        max_error=0.0,
        implementations=("triton", "xla"),
        program=writes.program,
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
        # What the writes add to a step; the places of all groups exceed the L2 cache.
        _write("kv", 256, 16, is_projected=True),
        _write("mla", 256, 56, is_projected=True),
        _write("mla", 256, 15, num_layers=27, is_projected=True),
        _write("kv", 32768, 1, in_pages=True),
        _write("mla", 32768, 1, in_pages=True),
        _write("mla", 32768, 1),
        _write("kv", 5, 2, num_layers=2, in_pages=True, small=True),
        _write("kv", 5, 2, num_layers=1, is_projected=True, small=True),
    ]
