"""Runs a model over a pool step by step, for tests: the smallest possible engine."""

import functools as ft
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from tests.pools import POISON
from tests.tagged_pools import make_room
from ukv.allocator import alloc, alloc_extend, raise_on_error
from ukv.ids import VirtualPages
from ukv.layout import (
    Placement,
    RequestShape,
    packed_bytes,
    pages_of_request,
    static_layout,
    unified_layout,
)
from ukv.ops.state_slots import slot_rows
from ukv.pool import PoolState, create_pool, read_entries
from ukv.translator import (
    Bucket,
    KVIndexTranslator,
    StepBatch,
    make_static_tables,
    translated_step,
)


class ModelRunner:
    """Rows of a batch that advance together, each by its own number of tokens.

    Every row holds a state slot from the start; pages come with the tokens. Windows
    are not released here: see the engine.

    With ``is_optimized`` steps are compiled as for a user, which takes longer.
    """

    def __init__(
        self,
        model,
        weights,
        *,
        num_rows: int,
        max_tokens: int,
        page_size: int = 16,
        dtype: str = "float32",
        is_unified: bool = True,
        spare_pages: int = 0,
        is_optimized: bool = False,
    ):
        specs = model.pool_specs(page_size=page_size, dtype=jnp.dtype(dtype))
        per_row = -(-max_tokens // page_size)
        pages = {
            spec.name: (num_rows + spare_pages) * (per_row if spec.grows else 1)
            for spec in specs
        }
        if is_unified:
            layout = unified_layout(specs, pool_bytes=packed_bytes(specs, pages))
        else:
            layout = static_layout(specs, num_pages=pages)
        self.model, self.weights, self.layout = model, weights, layout
        self.is_optimized = is_optimized
        self.num_rows, self.per_row = num_rows, per_row
        self.pool = create_pool(layout, fill_word=POISON)
        self.translator = _translator(layout)
        self.lens = np.zeros(num_rows, np.int32)
        self.tables = {}
        for sub in layout.owners:
            if sub.spec.grows:
                ids = jnp.zeros((num_rows, per_row), jnp.int32)
            else:
                max_pages = {sub.name: num_rows}
                self.pool, grant = _alloc(self.pool, max_pages)
                assert bool(grant.granted)
                ids = grant.pages[sub.name].ids
            self.tables[sub.name] = VirtualPages(ids=ids, space=sub.name)

    def step(
        self,
        tokens: Sequence[np.ndarray],
        *,
        num_tokens: int | None = None,
        max_query_len: int | None = None,
    ) -> list[np.ndarray]:
        """Feed each row its new tokens; return their logits, row by row.

        Args:
          tokens: For each row its new tokens, perhaps none.
          num_tokens: Bucket of the packed axis; None for just enough.
          max_query_len: Bucket of the tokens of a row; None for the next power of 2.
        """
        lens = np.array([len(row) for row in tokens], np.int32)
        is_decode = lens.max() == 1
        if is_decode:
            # One token for every row; a row without one is padding.
            packed = np.array([row[0] if len(row) else 0 for row in tokens])
            cu = np.arange(self.num_rows + 1)
            size = self.num_rows
        else:
            size = num_tokens or int(lens.sum())
            packed = np.zeros(size, np.int32)
            packed[: lens.sum()] = np.concatenate(tokens)
            cu = np.concatenate([[0], np.cumsum(lens)])
        kv_lens = np.where(lens > 0, self.lens + lens, 0)
        if any(sub.placement is Placement.FLOAT for sub in self.layout.sub_pools):
            self.pool = self._with_room(lens)
        longest = 1 if is_decode else max_query_len or _bucket(lens.max())
        step = _jitted_step(
            self.model, self.translator, size, longest, self.is_optimized
        )
        bucket = Bucket(num_rows=self.num_rows, max_pages=self.per_row, num_tokens=size)
        static = make_static_tables(self.translator, [bucket])[bucket]
        logits, self.pool, self.tables = step(
            self.weights,
            self.pool,
            static,
            self.tables,
            jnp.asarray(packed, jnp.int32),
            jnp.asarray(cu, jnp.int32),
            jnp.asarray(np.where(lens > 0, self.lens, 0), jnp.int32),
            jnp.asarray(lens, jnp.int32),
            jnp.asarray(kv_lens, jnp.int32),
        )
        raise_on_error(self.pool)
        self.lens += lens
        logits = np.asarray(logits)
        return [logits[cu[row] : cu[row] + lens[row]] for row in range(self.num_rows)]

    def _with_room(self, lens: np.ndarray) -> PoolState:
        """Move what floats between the ends out of the way of the new pages."""
        num_pages = {}
        for sub in self.layout.owners:
            if sub.spec.grows:
                old, new = (
                    -(-n // sub.page_size) for n in (self.lens, self.lens + lens)
                )
                num_pages[sub.name] = jnp.asarray((new - old).sum(), jnp.int32)
        return make_room(self.pool, num_pages)[0]

    def states(self, name: str, *, layer: int, part: str) -> np.ndarray:
        """Return a part of every row's state, ``[num_rows, *shape]``.

        Args:
          name: The sub-pool.
          layer: Index of the layer among those of the sub-pool.
          part: Name of the part.
        """
        view = self.layout.part_view(name, layer=layer, part=part)
        slots = self.translator.translate(self.pool, name, self.tables[name])
        rows, _ = slot_rows(view, slots, "slots")
        buffer = self.pool.buffers[view.buffer_index]
        return np.asarray(read_entries(buffer, view, rows))


def _bucket(length: int) -> int:
    """Round a query length up, so that few programs are compiled."""
    return 1 << int(np.ceil(np.log2(max(int(length), 2))))


@ft.cache
def _translator(layout):
    # One for each layout: a program is compiled once for all runners that share it.
    return KVIndexTranslator(layout)


@ft.cache
def _jitted_alloc(names_and_pages):
    max_pages = dict(names_and_pages)
    return jax.jit(
        lambda state: alloc(state, max_pages, max_pages=max_pages), donate_argnums=0
    )


def _alloc(state: PoolState, max_pages: dict[str, int]):
    return _jitted_alloc(tuple(max_pages.items()))(state)


@ft.cache
def _jitted_step(model, translator, num_tokens, max_query_len, is_optimized):
    def step(weights, pool, static, tables, tokens, cu, context, lens, kv_lens):
        growing = {
            sub.name: tables[sub.name]
            for sub in translator.layout.owners
            if sub.spec.grows
        }
        if growing:
            rows, width = next(iter(growing.values())).ids.shape
            pool, grown, _ = alloc_extend(
                pool, growing, context, lens, max_new_pages=rows * width
            )
            tables = {**tables, **grown}
        batch = StepBatch(
            page_tables=tables,
            cu_query_lens=cu,
            kv_lens=kv_lens,
            num_tokens=num_tokens,
        )
        pool, _, inputs = translated_step(
            translator,
            static,
            pool,
            batch,
            tokens,
            max_query_len=max_query_len,
            logit_tokens=jnp.arange(num_tokens, dtype=jnp.int32),
        )
        logits, pool = model.forward(weights, inputs, pool)
        return logits, pool, tables

    # Tests compile in a hurry, unless it matters how a user's program rounds.
    options = {"xla_backend_optimization_level": "3", "xla_backend_extra_options": ""}
    return jax.jit(
        step,
        donate_argnums=(1, 3),
        compiler_options=options if is_optimized else None,
    )


def forget_programs():
    """Compile every step anew: other code runs then, or memory is wanted back."""
    _jitted_step.cache_clear()


def request_pages(layout, num_tokens: int) -> dict[str, int]:
    """Return the pages by sub-pool of one request of that length."""
    shape = RequestShape(num_tokens=num_tokens)
    return {sub.name: pages_of_request(sub, shape) for sub in layout.sub_pools}
