"""What the kernels are built for, and what may be tuned."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE = 64
"""Tokens of a tile: the rows of a wgmma."""

ROPE_DIM = 64
"""Elements of a row that are only key."""

PAGE_SIZES = (16, 32, 64, 128)
NARROW_COLUMNS = 32
WIDE_COLUMNS = 64

# Large finite, and not -inf: a query that has seen no key has no maximum, and the
# difference of two infinities would be NaN.
NO_MAXIMUM = -1e30

# pyright sees neither the base class's hook nor the export.
SWIZZLE = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
"""How shared memory holds bfloat16 operands: what TMA writes and wgmma reads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlaDecodeConfig:
    """Tuning of the decode.

    Attributes:
      num_ctas: Persistent CTAs; one fits a multiprocessor, and there are no more of
        them than multiprocessors, whatever it says.
      min_tiles: Tiles of 64 tokens below which a row is not split further.
    """

    num_ctas: int = 128
    min_tiles: int = 2

    def __post_init__(self):
        """Checks the ranges."""
        for name in ("num_ctas", "min_tiles"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """What is fixed when a kernel is built.

    Attributes:
      latent_dim: Elements of a row that are key and value.
      num_rows: Rows of the batch.
      query_len: Query tokens of a row.
      num_heads: Heads of a query token; columns past all of them are padding.
      num_groups: Groups of columns, each with CTAs of its own.
      group_columns: Columns of a group.
      page_size: Tokens per page.
      softmax_scale: Factor of ``q . k``.
      num_ctas: CTAs for each group, which all fit on the card at once.
      interpret: Parameters of the simulator, or False.
    """

    latent_dim: int
    num_rows: int
    query_len: int
    num_heads: int
    num_groups: int
    group_columns: int
    page_size: int
    softmax_scale: float
    num_ctas: int
    interpret: Any

    @property
    def num_parts(self) -> int:
        """Parts that a row is expected to have."""
        return -(-self.num_ctas // self.num_rows) + 1

    def results(self, dtype, width: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the results: rows, and the parts of those that are split, by id.

        Args:
          dtype: Of the outputs of rows.
          width: Of the outputs of rows.
        """
        columns = self.num_groups * self.group_columns
        rows, parts = self.num_rows, self.num_ctas + self.num_rows
        return (
            jax.ShapeDtypeStruct((rows, columns, width), dtype),
            jax.ShapeDtypeStruct((rows, columns), jnp.float32),
            jax.ShapeDtypeStruct((parts, columns, self.latent_dim), jnp.float32),
            jax.ShapeDtypeStruct((parts, columns), jnp.float32),
        )


SWIZZLE_32_BITS = (
    plgpu.TilingTransform((8, 32)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
"""The same for 32 bits that are on their way out."""

ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
"""Accumulator of a wgmma."""


def zeros(shape, layout):
    """Accumulators of float32 zeros in registers."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def store(ref, value):
    """Stores into global memory, be it whole sectors or not.

    JAX 0.12 refuses a store of less unless it is told so; 0.11 has no word for it.
    """
    store_ = getattr(plgpu, "store", None)
    if store_ is None:
        ref[...] = value
    else:
        store_(ref, value, optimized=False)
