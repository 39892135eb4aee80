"""Pools with known states in some slots, for the tests of recurrent ops.

Slots are physical pages, so nothing of the allocator or the translator takes part.
Every byte that no state owns stays 0xFF, NaN in float32 and bfloat16.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from tests.paged_rows import layout_with
from ukv.ids import ABSENT_BLOCK, KernelBlocks
from ukv.layout import PartView, PoolLayout
from ukv.ops import StateCheckpoints, StateSlots
from ukv.pool import create_pool
from ukv.spec import StateSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatePool:
    """One part of one layer in a pool, its bytes seen from the host.

    Attributes:
      layout: The pool's layout.
      view: The part and layer.
    """

    layout: PoolLayout
    view: PartView

    @classmethod
    def create(
        cls, spec: StateSpec, placement: str, *, part: str, num_slots: int
    ) -> "StatePool":
        """A pool of `spec` beside a neighbour; the view is of the last layer."""
        layout = layout_with(spec, placement, num_pages=num_slots)
        layer = spec.num_layers - 1
        return cls(
            layout=layout, view=layout.part_view(spec.name, layer=layer, part=part)
        )

    @property
    def name(self) -> str:
        return self.view.sub_pool

    def block(self, slot: int) -> int:
        return slot * self.layout.sub_pool(self.name).blocks_per_page

    def blocks(self, slots) -> KernelBlocks:
        """Block ids of slots of any shape; None stands for an absent one."""
        flat = np.asarray(slots, object)
        ids = [ABSENT_BLOCK if s is None else self.block(int(s)) for s in flat.ravel()]
        ids = np.asarray(ids, np.int32).reshape(flat.shape)
        return KernelBlocks(jnp.asarray(ids), self.name)

    def slots(self, slots, is_fresh, checkpoint_slots=None, lens=None) -> StateSlots:
        checkpoints = None
        if checkpoint_slots is not None:
            checkpoints = StateCheckpoints(
                slots=self.blocks(checkpoint_slots), lens=jnp.asarray(lens, jnp.int32)
            )
        return StateSlots(
            slots=self.blocks(slots),
            is_fresh=jnp.asarray(is_fresh, bool),
            checkpoints=checkpoints,
        )

    def _bytes_of(self, slot: int) -> slice:
        start = (self.block(slot) + self.view.block_offset) * self.view.row_bytes
        return slice(start, start + self.view.num_elements * self.view.dtype.itemsize)

    def put(
        self, states: dict[int, np.ndarray], buffers: tuple[jax.Array, ...] = ()
    ) -> tuple[jax.Array, ...]:
        """Buffers, poisoned ones if none are given, with states in some slots."""
        buffers = list(
            buffers or create_pool(self.layout, fill_word=0xFFFFFFFF).buffers
        )
        raw = np.array(buffers[self.view.buffer_index])
        flat = raw.reshape(-1).view(np.uint8)
        for slot, state in states.items():
            stored = np.asarray(state, self.view.dtype)
            assert stored.shape == self.view.shape
            flat[self._bytes_of(slot)] = stored.reshape(-1).view(np.uint8)
        buffers[self.view.buffer_index] = jnp.asarray(raw)
        return tuple(buffers)

    def get(self, buffers: tuple[jax.Array, ...], slot: int) -> np.ndarray:
        flat = np.asarray(buffers[self.view.buffer_index]).reshape(-1).view(np.uint8)
        found = flat[self._bytes_of(slot)].copy()
        return found.view(self.view.dtype).reshape(self.view.shape)

    def erased(self, buffers, slots: list[int]) -> list[np.ndarray]:
        """The buffers on the host, with zeros in the entries of some slots."""
        found = [np.array(buffer) for buffer in buffers]
        flat = found[self.view.buffer_index].reshape(-1).view(np.uint8)
        for slot in slots:
            flat[self._bytes_of(slot)] = 0
        return found

    def assert_only_written(self, before, after, slots: list[int]) -> None:
        """Every byte outside the entries of `slots` is as it was."""
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            old_bytes = np.array(old).reshape(-1).view(np.uint8)
            new_bytes = np.array(new).reshape(-1).view(np.uint8)
            if index == self.view.buffer_index:
                padded = self.view.rows_per_entry * self.view.row_bytes
                for slot in slots:
                    start = self._bytes_of(slot).start
                    old_bytes[start : start + padded] = 0
                    new_bytes[start : start + padded] = 0
            np.testing.assert_array_equal(old_bytes, new_bytes)


def round_to(values: np.ndarray, dtype) -> np.ndarray:
    """Values that a dtype holds, in that dtype; ml_dtypes' bfloat16 included."""
    return np.asarray(values).astype(jnp.dtype(dtype))
