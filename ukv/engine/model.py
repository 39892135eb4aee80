"""What the engine asks of a model: its memory, and one forward pass."""

from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from ukv.pool import PoolState
from ukv.spec import SubPoolSpec
from ukv.translator import StepInputs


@runtime_checkable
class Model(Protocol):
    """A model that can run over a pool. Frozen and hashable: sizes, no arrays."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary: the width of the logits."""
        ...

    def pool_specs(self, *, page_size: int, dtype: np.dtype) -> tuple[SubPoolSpec, ...]:
        """Return what the model keeps in the pool."""
        ...

    def forward(
        self, weights: Any, inputs: StepInputs, pool: PoolState
    ) -> tuple[jax.Array, PoolState]:
        """Run one step and return float32 logits and the pool."""
        ...
