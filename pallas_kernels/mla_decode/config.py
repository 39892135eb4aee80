"""Sizes that the kernels are built for, and what may be tuned."""

import dataclasses

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

LATENT_DIM = 512
ROPE_DIM = 64
ROW_DIM = LATENT_DIM + ROPE_DIM
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
      num_ctas: Persistent CTAs; one fits a multiprocessor.
      min_tiles: Tiles of 64 tokens below which a row is not split further.
    """

    num_ctas: int = 128
    min_tiles: int = 2

    def __post_init__(self):
        """Checks the ranges."""
        for name in ("num_ctas", "min_tiles"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


SWIZZLE_FLOAT32 = (
    plgpu.TilingTransform((8, 32)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
"""The same for float32 that are on their way out."""

ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
"""Accumulator of a wgmma."""


def zeros(shape, layout):
    """Accumulators of float32 zeros in registers."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
