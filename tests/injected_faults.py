"""Faults of a memory system, put in one at a time: each reads wrong bytes.

Every one is a mistake that somebody could make in one place, and crashes nothing. Most
are lies to the model about where things are, told on the way into a step, so that the
same compiled programs run with each of them and with none.
"""

import copy
import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from ukv.engine import EngineConfig, Programs
from ukv.engine.holdings import Holdings
from ukv.engine.prefix_spec import PrefixSpec
from ukv.pytree import Leaf
from ukv.translator import StepInputs


class Lies(flax.struct.PyTreeNode):
    """What a step is told.

    Attributes:
      pages: By sub-pool, int32 ``[num_pages]``: the physical page that is read or, of
        states, also written in place of each.
      resets: bool, whether a sequence begins with a state of zeros.
    """

    pages: dict[str, Leaf]
    resets: Leaf


class _ToldInputs(StepInputs):
    resets: Leaf

    @property
    def is_fresh(self):
        return super().is_fresh & self.resets


@dataclasses.dataclass(frozen=True)
class FaultyModel:
    """A model that believes the lies beside its weights."""

    model: Any
    blocks_per_page: tuple[tuple[str, int], ...]

    @property
    def vocab_size(self):
        return self.model.vocab_size

    def pool_specs(self, **sizes):
        return self.model.pool_specs(**sizes)

    def forward(self, weights, inputs, pool):
        real, lies = weights
        blocks = dict(self.blocks_per_page)

        def told(name, table):
            pages, size = lies.pages[name], blocks[name]
            is_page = table.ids < pages.shape[0] * size
            page = jnp.minimum(table.ids // size, pages.shape[0] - 1)
            ids = pages[page] * size + table.ids % size
            return table.replace(ids=jnp.where(is_page, ids, table.ids))

        fields = {
            field.name: getattr(inputs, field.name)
            for field in dataclasses.fields(inputs)
        }
        for kind in ("reads", "slots"):
            tables = fields[kind].items()
            fields[kind] = {name: told(name, table) for name, table in tables}
        inputs = _ToldInputs(**fields, resets=lies.resets)
        return self.model.forward(real, inputs, pool)


class Sound:
    """No fault: the truth."""

    def lies(self, state):
        return Lies(
            pages={
                sub.name: jnp.arange(sub.num_pages, dtype=jnp.int32)
                for sub in state.pool.layout.sub_pools
            },
            resets=jnp.asarray(True),
        )


class UntranslatedReads(Sound):
    """Read tables hold virtual ids as if they were physical; writes are right."""

    def lies(self, state):
        truth = super().lies(state)
        pages = dict(truth.pages)
        for sub, tables in zip(
            state.pool.layout.sub_pools, state.pool.tables, strict=True
        ):
            if sub.spec.grows:
                virtual = jnp.minimum(tables.p2v, sub.num_pages - 1)
                pages[sub.name] = jnp.where(tables.p2v > 0, virtual, pages[sub.name])
        return truth.replace(pages=pages)


class StaleTable(Sound):
    """Tables say where a page was when it was handed out, wherever it moved since."""

    def __init__(self):
        self._first = {}

    def lies(self, state):
        truth = super().lies(state)
        pages = {}
        for sub, tables in zip(
            state.pool.layout.sub_pools, state.pool.tables, strict=True
        ):
            now = np.asarray(tables.v2p)
            first = self._first.get(sub.name, now)
            is_bound = (now < sub.num_pages) & (first < sub.num_pages)
            self._first[sub.name] = first = np.where(is_bound, first, now)
            stale = np.array(truth.pages[sub.name])
            is_live = now < sub.num_pages
            stale[now[is_live]] = first[is_live]
            pages[sub.name] = jnp.asarray(stale)
        return truth.replace(pages=pages)


class StateNotReset(Sound):
    """A sequence begins with what its state slot held."""

    def lies(self, state):
        return super().lies(state).replace(resets=jnp.asarray(False))


def with_fault(programs: Programs, fault: Sound, config: EngineConfig) -> Programs:
    """Return programs that run the same compiled steps and tell the lies of a fault.

    Args:
      programs: Of a ``FaultyModel``.
      fault: What is wrong.
      config: As of ``programs``, but for the prefix cache and what fills the pool.
    """

    def told(step):
        def run(state, static, weights, packed):
            # The state is donated to the step, and the lies must outlive it.
            lies = jax.tree.map(jnp.copy, fault.lies(state))
            return step(state, static, (weights, lies), packed)

        return run

    faulty = copy.copy(programs)
    faulty.steps = {shape: told(step) for shape, step in programs.steps.items()}
    faulty.config = config
    return faulty


def cache_states_a_page_late(monkeypatch):
    """Cache a state for a prefix that is a page longer than what it has seen."""
    find_ends, copy_states = PrefixSpec.chunk_ends, Holdings._checkpoint
    copies = {}

    def with_earlier_ends(self, prompt_len, full_len):
        ends = find_ends(self, prompt_len, full_len)
        earlier = {end - self.page_size for end in ends}
        return sorted({*ends, *earlier} - {0})

    def copy_early(self, sequence, tokens):
        end, page_size = len(tokens), self.cache.spec.page_size
        if end + page_size in sequence.chunk_ends:
            copies[sequence.request, end + page_size] = copy_states(
                self, sequence, tokens
            )
        return copies.pop((sequence.request, end), 0)

    monkeypatch.setattr(PrefixSpec, "chunk_ends", with_earlier_ends)
    monkeypatch.setattr(Holdings, "_checkpoint", copy_early)
