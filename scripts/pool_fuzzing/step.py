"""One jitted program for a pool: any operation, the verifier and page tags.

Every page, and every window half, carries a tag that was made when it was granted:
words at its beginning, middle and end. After each operation the tags of all pages that
were live before and are live still are read through v2p and compared, so a page that
was lost, doubled, overwritten or moved without its bytes shows at once.

One launch and one read of the device for each operation: the arguments travel in one
int32 vector, the results in another.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from ukv.allocator import (
    alloc,
    alloc_decode,
    alloc_extend,
    clear_error,
    compact,
    copy_page,
    free,
    free_full,
    free_window,
    make_room,
    share,
)
from ukv.allocator.verify import check
from ukv.ids import VirtualPages
from ukv.layout import PoolLayout, SubPoolLayout
from ukv.pool import PoolState, create_pool, pool_struct

NUM_IDS = 16
"""Ids of one operation, and most pages of an owner in one transaction."""

NUM_ROWS, TABLE_WIDTH, MAX_NEW_PAGES, NUM_DECODE_STEPS = 4, 12, 8, 3

Op = tuple[str, str]
"""An operation and the sub-pool it names ("" if none)."""


@dataclasses.dataclass(frozen=True)
class Fields:
    """Names and shapes of the parts of a flat int32 vector."""

    shapes: Mapping[str, tuple[int, ...]]

    @ft.cached_property
    def _places(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        places, start = {}, 0
        for name, shape in self.shapes.items():
            size = int(np.prod(shape, dtype=np.int64))
            places[name] = (slice(start, start + size), shape)
            start += size
        return places

    def size(self) -> int:
        """Return the length of the vector."""
        return max((place.stop for place, _ in self._places.values()), default=0)

    def unpack(self, vector) -> dict:
        """Return the parts of a NumPy or JAX vector."""
        return {
            name: vector[place].reshape(shape)
            for name, (place, shape) in self._places.items()
        }

    def pack(self, values: Mapping[str, object]) -> np.ndarray:
        """Return the vector of these parts; those left out are 0."""
        vector = np.zeros(self.size(), np.int32)
        for name, value in values.items():
            place, shape = self._places[name]
            vector[place] = np.broadcast_to(np.asarray(value), shape).reshape(-1)
        return vector


@dataclasses.dataclass(frozen=True)
class Probe:
    """A word of every page of a sub-pool that holds its tag."""

    buffer: int
    base_row: int
    page_rows: int
    row: int
    word: int


def _probes(layout: PoolLayout, sub: SubPoolLayout) -> list[Probe]:
    if layout.is_unified:
        words = layout.buffer_words[0]
        rows = sub.page_bytes // (4 * words)
        base = sub.base_bytes // (4 * words)
        return [
            Probe(0, base, rows, row, word)
            for row, word in ((0, 0), (rows // 2, words // 2), (rows - 1, words - 1))
        ]
    probes = []
    for is_last in (False, True):
        for part in sub.spec.parts:
            layer = sub.spec.num_layers - 1 if is_last else 0
            view = layout.part_view(sub.name, layer=layer, part=part.name)
            last = (view.page_size - 1, layout.buffer_words[view.buffer_index] - 1)
            row, word = last if is_last else (0, 0)
            probes.append(
                Probe(view.buffer_index, view.row_offset, view.page_size, row, word)
            )
    return probes


def _pages_of(state: PoolState, sub: SubPoolLayout) -> jax.Array:
    if sub.is_translating:
        return state.tables[sub.index].v2p
    return jnp.arange(sub.num_virtual, dtype=jnp.int32)


def _read_tags(state: PoolState, sub: SubPoolLayout) -> jax.Array:
    """Return the tag words of every virtual id: ``[num_virtual, probes]``."""
    pages = jnp.clip(_pages_of(state, sub), 0, sub.num_pages - 1)
    found = [
        state.buffers[p.buffer][p.base_row + pages * p.page_rows + p.row, p.word]
        for p in _probes(state.layout, sub)
    ]
    return jnp.stack(found, axis=1)


def _write_tags(
    state: PoolState, sub: SubPoolLayout, is_new: jax.Array, tags: jax.Array
) -> PoolState:
    buffers, pages = list(state.buffers), _pages_of(state, sub)
    for number, p in enumerate(_probes(state.layout, sub)):
        rows = p.base_row + pages * p.page_rows + p.row
        rows = jnp.where(is_new, rows, buffers[p.buffer].shape[0])
        word = tags + jnp.uint32(number)
        buffers[p.buffer] = buffers[p.buffer].at[rows, p.word].set(word, mode="drop")
    return state.replace(buffers=tuple(buffers))


def _bad_tags(found: jax.Array, tags: jax.Array, is_checked: jax.Array) -> jax.Array:
    numbers = jnp.arange(found.shape[1], dtype=jnp.uint32)
    is_bad = jnp.any(found != tags[:, None] + numbers[None, :], axis=1)
    return jnp.sum(is_bad & is_checked, dtype=jnp.int32)


class PoolStep:
    """The jitted step of one layout, with the shapes of what goes in and out.

    Attributes:
      layout: The layout.
      growing: Owners whose pages grow with tokens: those with page tables.
      arguments: Parts of the argument vector.
      results: Parts of the result vector.
      ops: The operations, in the order of their codes.
    """

    def __init__(self, layout: PoolLayout):
        self.layout = layout
        self.owners = [sub.name for sub in layout.owners]
        self.growing = [sub.name for sub in layout.owners if sub.spec.grows]
        num_subs, num_owners = len(layout.sub_pools), len(layout.owners)
        tables = (len(self.growing), NUM_ROWS, TABLE_WIDTH)
        self.arguments = Fields(
            {
                "op": (),
                "serial": (),
                "then_alloc": (),
                "counts": (num_owners,),
                "ids": (NUM_IDS,),
                "context_lens": (NUM_ROWS,),
                "query_lens": (NUM_ROWS,),
                "tables": tables,
            }
        )
        self._branches: dict[Op, Callable] = {}
        self._add_branches()
        self.ops = list(self._branches)
        self._codes = {op: code for code, op in enumerate(self.ops)}
        self.num_findings = jax.eval_shape(check, pool_struct(layout)).shape[0]
        self.results = Fields(
            {
                "granted": (NUM_DECODE_STEPS,),
                "fits": (),
                "moved": (num_subs,),
                "ids": (num_owners, NUM_IDS),
                "tables": tables,
                "bad_tags": (num_subs,),
                "bad_copies": (num_subs,),
                "error": (num_subs,),
                "counters": (num_subs, 4),
                "report": (self.num_findings, 5),
                **{
                    f"holders_{sub.name}": (sub.num_virtual,)
                    for sub in layout.sub_pools
                },
            }
        )
        # Compiling takes longer than thousands of operations on so small a pool.
        options = {"xla_backend_optimization_level": 0}
        self._run = jax.jit(self._step, donate_argnums=(0, 1), compiler_options=options)

    def create(self, fill_word: int = 0xFFFFFFFF) -> tuple[PoolState, tuple]:
        """Return an empty pool full of NaN, and the tags of no page."""
        tags = tuple(
            jnp.zeros(sub.num_virtual, jnp.uint32) for sub in self.layout.sub_pools
        )
        return create_pool(self.layout, fill_word=fill_word), tags

    def run(
        self, state: PoolState, tags: tuple, op: Op, values: Mapping[str, object]
    ) -> tuple[PoolState, tuple, dict[str, np.ndarray]]:
        """Run one operation; ``state`` and ``tags`` are donated."""
        packed = self.arguments.pack({"op": self._codes[op], **values})
        state, tags, results = self._run(state, tags, packed)
        return state, tags, self.results.unpack(np.asarray(results))

    def _step(self, state: PoolState, tags: tuple, packed: jax.Array):
        arguments = self.arguments.unpack(packed)
        was_live = [tables.refcounts > 0 for tables in state.tables]
        state, out = jax.lax.switch(
            arguments["op"], list(self._branches.values()), state, arguments
        )
        new_tags, bad_tags, bad_copies = [], [], []
        for sub in self.layout.sub_pools:
            is_live = state.tables[sub.index].refcounts > 0
            old, found = tags[sub.index], _read_tags(state, sub)
            bad_tags.append(_bad_tags(found, old, was_live[sub.index] & is_live))
            # What a copy should hold: the tag of its source.
            source = jnp.zeros(sub.num_virtual, jnp.int32)
            source = source.at[out["copies"]].set(arguments["ids"], mode="drop")
            is_copy = is_live & (source > 0) & (out["copy_owner"] == sub.owner)
            bad_copies.append(
                _bad_tags(found, old.at[source].get(mode="clip"), is_copy)
            )
            is_new = is_live & ~was_live[sub.index]
            fresh = arguments["serial"].astype(jnp.uint32) << 13
            fresh |= jnp.arange(sub.num_virtual, dtype=jnp.uint32) << 5
            fresh |= jnp.uint32(sub.index << 3)
            state = _write_tags(state, sub, is_new, fresh)
            new_tags.append(jnp.where(is_new, fresh, old))
        results = {
            **out,
            "bad_tags": jnp.stack(bad_tags),
            "bad_copies": jnp.stack(bad_copies),
            "error": state.error,
            "counters": state.counters,
            "report": check(state),
            **{
                f"holders_{sub.name}": state.tables[sub.index].refcounts
                for sub in self.layout.sub_pools
            },
        }
        flat = [
            results[name].astype(jnp.int32).reshape(-1) for name in self.results.shapes
        ]
        return clear_error(state), tuple(new_tags), jnp.concatenate(flat)

    def _add_branches(self) -> None:
        layout, branches = self.layout, self._branches
        branches["alloc", ""] = self._alloc
        branches["extend", ""] = self._extend
        branches["decode", ""] = self._decode
        if layout.is_unified:
            branches["make_room", ""] = self._make_room
            branches["compact", ""] = self._compact
        for owner in layout.owners:
            branches["free", owner.name] = self._release(owner, free, (NUM_IDS,))
            branches["share", owner.name] = self._release(owner, share, (NUM_IDS,))
            branches["copy", owner.name] = self._copy(owner)
            for sub in layout.members(owner)[1:]:
                branches["free_full", owner.name] = self._release(
                    owner, free_full, (4, NUM_IDS // 4)
                )
                branches["free_window", sub.name] = self._release(
                    owner,
                    lambda state, pages, name=sub.name: free_window(state, name, pages),
                    (NUM_IDS,),
                )
        first = layout.owners[0]
        branches["free_grid", first.name] = self._release(
            first, free, (2, NUM_IDS // 2)
        )
        branches["free_none", first.name] = self._release(first, free, (0,))

    def _out(self, arguments: dict, **values: jax.Array) -> dict[str, jax.Array]:
        """Return the results of a branch; those left out say that nothing happened."""
        num_subs, num_owners = len(self.layout.sub_pools), len(self.owners)
        out = {
            "granted": jnp.ones(NUM_DECODE_STEPS, jnp.bool_),
            "fits": jnp.asarray(True),
            "moved": jnp.zeros(num_subs, jnp.int32),
            "ids": jnp.zeros((num_owners, NUM_IDS), jnp.int32),
            "tables": arguments["tables"],
            # Past the end of every id space: copied nothing.
            "copies": jnp.full(NUM_IDS, 2**30, jnp.int32),
            "copy_owner": jnp.int32(num_subs),
        }
        return {**out, **values}

    def _needs(self, arguments: dict) -> dict[str, jax.Array]:
        return {name: arguments["counts"][i] for i, name in enumerate(self.owners)}

    def _alloc(self, state: PoolState, arguments: dict):
        state, grant = alloc(
            state,
            self._needs(arguments),
            max_pages=dict.fromkeys(self.owners, NUM_IDS),
        )
        ids = jnp.stack([grant.pages[name].ids for name in self.owners])
        granted = jnp.broadcast_to(grant.granted, (NUM_DECODE_STEPS,))
        return state, self._out(arguments, granted=granted, ids=ids)

    def _make_room(self, state: PoolState, arguments: dict):
        state, done = make_room(state, self._needs(arguments))
        then = {**arguments, "counts": arguments["counts"] * arguments["then_alloc"]}
        state, out = self._alloc(state, then)
        return state, {**out, "fits": done.fits, "moved": done.moved}

    def _compact(self, state: PoolState, arguments: dict):
        state, done = compact(state)
        return state, self._out(arguments, fits=done.fits, moved=done.moved)

    def _tables(self, arguments: dict) -> dict[str, VirtualPages]:
        return {
            name: VirtualPages(ids=arguments["tables"][i], space=name)
            for i, name in enumerate(self.growing)
        }

    def _extend(self, state: PoolState, arguments: dict):
        state, tables, granted = alloc_extend(
            state,
            self._tables(arguments),
            arguments["context_lens"],
            arguments["query_lens"],
            max_new_pages=MAX_NEW_PAGES,
        )
        stacked = jnp.stack([tables[name].ids for name in self.growing])
        granted = jnp.broadcast_to(granted, (NUM_DECODE_STEPS,))
        return state, self._out(arguments, granted=granted, tables=stacked)

    def _decode(self, state: PoolState, arguments: dict):
        """Several decode steps in one dispatch; a refused one is tried again."""
        is_active = arguments["query_lens"] > 0

        def one(carry, _):
            state, tables, context_lens = carry
            state, tables, granted = alloc_decode(
                state, tables, context_lens, is_active
            )
            added = (is_active & granted).astype(jnp.int32)
            return (state, tables, context_lens + added), granted

        carry = (state, self._tables(arguments), arguments["context_lens"])
        (state, tables, _), granted = jax.lax.scan(one, carry, length=NUM_DECODE_STEPS)
        stacked = jnp.stack([tables[name].ids for name in self.growing])
        return state, self._out(arguments, granted=granted, tables=stacked)

    def _release(
        self, owner: SubPoolLayout, operation: Callable, shape: tuple[int, ...]
    ) -> Callable:
        def branch(state: PoolState, arguments: dict):
            ids = arguments["ids"][: int(np.prod(shape))].reshape(shape)
            state = operation(state, VirtualPages(ids=ids, space=owner.name))
            return state, self._out(arguments)

        return branch

    def _copy(self, owner: SubPoolLayout) -> Callable:
        index = self.owners.index(owner.name)

        def branch(state: PoolState, arguments: dict):
            pages = VirtualPages(ids=arguments["ids"], space=owner.name)
            state, copies, granted = copy_page(state, pages)
            ids = jnp.zeros((len(self.owners), NUM_IDS), jnp.int32)
            return state, self._out(
                arguments,
                granted=jnp.broadcast_to(granted, (NUM_DECODE_STEPS,)),
                ids=ids.at[index].set(copies.ids),
                copies=jnp.where(copies.ids > 0, copies.ids, 2**30),
                copy_owner=jnp.int32(owner.index),
            )

        return branch
