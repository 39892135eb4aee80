"""Small pools whose pages are tagged by their ids, and jitted operations on them.

The operations are jitted once here, so that tests which use the same layout share
their compilations. Every pool starts as 0xFF, NaN in bfloat16 and float32.
"""

import functools as ft
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from ukv import allocator
from ukv.ids import VirtualPages
from ukv.layout import PoolLayout, unified_layout
from ukv.pool import HI, HOLES, LIVE, LO, PoolState, create_pool
from ukv.spec import AttentionSpec, MLASpec, Part, SlidingWindowSpec, StateSpec

POISON = 0xFFFFFFFF
# Id arrays are padded with the null page to one length: one compilation.
NUM_IDS = 16


def latent_spec(name="latent", *, num_layers=2, page_size=4, width=32) -> MLASpec:
    """Bytes of a page: num_layers * page_size * width * 2 (512 by default)."""
    return MLASpec(
        name=name,
        num_layers=num_layers,
        page_size=page_size,
        latent_dim=width - 8,
        rope_dim=8,
    )


def full_spec(name="full", *, num_layers=1, page_size=4, head_dim=16) -> AttentionSpec:
    """Bytes of a page: num_layers * page_size * head_dim * 4 (256 by default)."""
    return AttentionSpec(
        name=name,
        num_layers=num_layers,
        page_size=page_size,
        num_kv_heads=1,
        head_dim=head_dim,
    )


def window_spec(
    name="window",
    *,
    num_layers=2,
    page_size=4,
    head_dim=16,
    window_size=8,
    shares_ids="full",
) -> SlidingWindowSpec:
    """Bytes of a page: num_layers * page_size * head_dim * 4 (512 by default)."""
    return SlidingWindowSpec(
        name=name,
        num_layers=num_layers,
        page_size=page_size,
        num_kv_heads=1,
        head_dim=head_dim,
        window_size=window_size,
        shares_ids=shares_ids,
    )


def state_spec(name="state", *, num_layers=2, slot_bytes=768) -> StateSpec:
    """A float32 part and a bfloat16 part of half its bytes."""
    third = slot_bytes // num_layers // 3
    return StateSpec(
        name=name,
        num_layers=num_layers,
        parts=(
            Part(name="recurrent", shape=(third // 2,), dtype=jnp.dtype("float32")),
            Part(name="conv", shape=(third // 2,), dtype=jnp.dtype("bfloat16")),
        ),
    )


ALONE = unified_layout([latent_spec()], pool_bytes=512 * 23)
KDA_MLA = unified_layout([state_spec(), latent_spec()], pool_bytes=512 * 31)
SWA_FULL = unified_layout([full_spec(), window_spec()], pool_bytes=512 * 21)
# Pages of 768, 512 and 256 bytes.
THREE = unified_layout([state_spec(), latent_spec(), full_spec()], pool_bytes=512 * 29)
# Ends of 256 bytes around floats of 512, 768 and 256.
FIVE = unified_layout(
    [
        full_spec("low"),
        latent_spec("a"),
        state_spec("b"),
        full_spec("c"),
        full_spec("high"),
    ],
    pool_bytes=256 * 60,
)
LAYOUTS = {
    "alone": ALONE,
    "kda+mla": KDA_MLA,
    "swa+full": SWA_FULL,
    "three": THREE,
    "five": FIVE,
}


def new_pool(specs, pool_bytes: int) -> PoolState:
    return poisoned(unified_layout(specs, pool_bytes=pool_bytes))


def poisoned(layout: PoolLayout) -> PoolState:
    return create_pool(layout, fill_word=POISON)


@ft.partial(jax.jit, static_argnames="max_pages", donate_argnames="state")
def _alloc(state, num_pages, *, max_pages):
    return allocator.alloc(
        state, num_pages, max_pages=dict.fromkeys(num_pages, max_pages)
    )


_make_room = jax.jit(allocator.make_room, donate_argnums=0)


def _of_every_owner(state, num_pages):
    # One compilation for a layout, whichever sub-pools are asked.
    return dict.fromkeys([sub.name for sub in state.layout.owners], 0) | num_pages


def alloc(state, num_pages, *, max_pages=NUM_IDS):
    return _alloc(state, _of_every_owner(state, num_pages), max_pages=max_pages)


def make_room(state, num_pages):
    return _make_room(state, _of_every_owner(state, num_pages))


free = jax.jit(allocator.free, donate_argnums=0)
free_full = jax.jit(allocator.free_full, donate_argnums=0)
free_window = jax.jit(allocator.free_window, static_argnums=1, donate_argnums=0)
share = jax.jit(allocator.share, donate_argnums=0)
compact = jax.jit(allocator.compact, donate_argnums=0)
copy_page = jax.jit(allocator.copy_page, donate_argnums=0)
alloc_extend = jax.jit(
    allocator.alloc_extend, static_argnames="max_new_pages", donate_argnums=0
)
alloc_decode = jax.jit(allocator.alloc_decode, donate_argnums=0)


def pages(space: str, *ids: int, length: int = NUM_IDS) -> VirtualPages:
    """Virtual ids, padded with the null page."""
    padded = np.zeros(length, np.int32)
    padded[: len(ids)] = ids
    return VirtualPages(ids=jnp.asarray(padded), space=space)


def take(state: PoolState, /, **num_pages: int) -> tuple[PoolState, dict]:
    """Allocate in place, insist on the grant, and return the ids by owner."""
    state, grant = alloc(state, num_pages)
    assert bool(grant.granted), (num_pages, state.counters)
    ids = {name: held(grant.pages[name]) for name in num_pages}
    assert {name: len(found) for name, found in ids.items()} == num_pages
    return state, ids


def grow(state: PoolState, /, **num_pages: int) -> tuple[PoolState, dict]:
    """Make room, then allocate."""
    state, made = make_room(state, num_pages)
    assert bool(made.fits), (num_pages, state.counters)
    return take(state, **num_pages)


def held(virtual: VirtualPages) -> list[int]:
    """The ids that are no padding."""
    ids = np.asarray(virtual.ids).reshape(-1)
    return ids[ids != 0].tolist()


def row(state: PoolState, name: str) -> dict[str, int]:
    """Counters of one sub-pool."""
    counters = np.asarray(state.counters)[state.layout.sub_pool(name).index]
    names = {"live": LIVE, "holes": HOLES, "lo": LO, "hi": HI}
    return {key: int(counters[column]) for key, column in names.items()}


def live(state: PoolState, name: str) -> int:
    return row(state, name)["live"]


def errors(state: PoolState) -> dict[str, allocator.ErrorBit]:
    """The bits that are set, by sub-pool."""
    words = np.asarray(state.error)
    return {
        sub.name: allocator.ErrorBit(int(words[sub.index]))
        for sub in state.layout.sub_pools
        if words[sub.index]
    }


def physical(state: PoolState, name: str, ids) -> list[int]:
    """Where pages lie now."""
    sub = state.layout.sub_pool(name)
    if not sub.is_translating:
        return list(ids)
    return np.asarray(state.tables[sub.index].v2p)[list(ids)].tolist()


def _page_slices(state: PoolState, name: str, page: int):
    """(buffer, first byte, one past the last) of all that a physical page holds."""
    layout = state.layout
    sub = layout.sub_pool(name)
    if layout.is_unified:
        first = sub.base_bytes + page * sub.page_bytes
        return [(0, first, first + sub.page_bytes)]
    slices = []
    for layer in range(sub.spec.num_layers):
        for part in sub.spec.parts:
            view = layout.part_view(name, layer=layer, part=part.name)
            block_bytes = view.page_size * view.row_bytes
            first = (page + view.block_offset) * block_bytes
            slices.append((view.buffer_index, first, first + block_bytes))
    return slices


def _bytes_of_buffers(state: PoolState) -> list[np.ndarray]:
    return [np.array(buffer).reshape(-1).view(np.uint8) for buffer in state.buffers]


def write_tags(state: PoolState, name: str, ids) -> PoolState:
    """Fill the page of each id with bytes that depend on the id alone."""
    raw = _bytes_of_buffers(state)
    sub = state.layout.sub_pool(name)
    for virtual, page in zip(ids, physical(state, name, ids), strict=True):
        assert page < sub.num_pages, f"{name} page {virtual} is bound nowhere"
        rng = np.random.default_rng([sub.index, virtual])
        for buffer, first, last in _page_slices(state, name, page):
            raw[buffer][first:last] = rng.integers(0, 255, last - first, np.uint8)
    buffers = tuple(
        jnp.asarray(found.view(np.uint32).reshape(buffer.shape))
        for found, buffer in zip(raw, state.buffers, strict=True)
    )
    return state.replace(buffers=buffers)


def read_pages(state: PoolState, name: str, ids) -> dict[int, bytes]:
    """The bytes that the page of each id holds now."""
    raw = _bytes_of_buffers(state)
    return {
        virtual: b"".join(
            raw[buffer][first:last].tobytes()
            for buffer, first, last in _page_slices(state, name, page)
        )
        for virtual, page in zip(ids, physical(state, name, ids), strict=True)
    }


def held_pages(state: PoolState) -> dict[str, list[int]]:
    """The ids that have a holder, by sub-pool, from the reference counts."""
    return {
        sub.name: np.flatnonzero(np.asarray(tables.refcounts)).tolist()
        for sub, tables in zip(state.layout.sub_pools, state.tables, strict=True)
    }


def contents(state: PoolState) -> dict[str, dict[int, bytes]]:
    """The bytes of every page that has a holder."""
    return {
        name: read_pages(state, name, ids) for name, ids in held_pages(state).items()
    }


def tag_everything(state: PoolState) -> PoolState:
    """Tag every page that has a holder."""
    for name, ids in held_pages(state).items():
        state = write_tags(state, name, ids)
    return state


def check(state: PoolState) -> None:
    """Assert what must hold between the tables, the counters and the bytes."""
    spans = []
    for sub, tables in zip(state.layout.sub_pools, state.tables, strict=True):
        counts = row(state, sub.name)
        holders = np.asarray(tables.refcounts)
        assert (holders >= 0).all(), sub.name
        assert holders[0] == 0, sub.name
        ids = np.flatnonzero(holders)
        assert len(ids) == counts["live"], sub.name
        if sub.owns_ids:
            free_ids = np.asarray(tables.free_ids)[: sub.num_virtual - 1 - len(ids)]
            everything = sorted([*free_ids.tolist(), *ids.tolist()])
            assert everything == list(range(1, sub.num_virtual)), sub.name
        else:
            owner = np.asarray(state.tables[sub.owner].refcounts)
            assert (owner[ids] > 0).all(), sub.name
        if not sub.is_translating:
            continue
        v2p, p2v = np.asarray(tables.v2p), np.asarray(tables.p2v)
        assert (p2v[v2p[ids]] == ids).all(), sub.name
        assert np.count_nonzero(p2v) == len(ids), sub.name
        assert (np.delete(v2p, ids) == sub.num_pages).all(), sub.name
        holes = np.asarray(tables.holes)[: counts["holes"]]
        inside = np.arange(counts["lo"], counts["hi"])
        assert sorted([*holes, *v2p[ids]]) == inside.tolist(), sub.name
        if len(inside) and state.layout.is_unified:
            first = sub.base_bytes + counts["lo"] * sub.page_bytes
            spans.append((first, first + len(inside) * sub.page_bytes))
    borders = [0, *itertools.chain(*spans), state.layout.pool_bytes]
    assert borders == sorted(borders)
