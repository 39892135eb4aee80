"""MXFP4: 4-bit floats in blocks of 32 that share a power of two.

A byte holds two values, the earlier one in its low half: a sign and an index into
eight magnitudes. A scale is the exponent of two, biased by 127.

Source: OCP Microscaling Formats, version 1.0; the packing of
openai/gpt-oss, gpt_oss/torch/weights.py.
"""

import functools as ft

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

BLOCK = 32
"""Values that share a scale."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@ft.partial(jax.jit, static_argnames="dtype")
def unpack_mxfp4(
    blocks: UInt8[Array, "*batch blocks half_block"],
    scales: UInt8[Array, "*batch blocks"],
    *,
    dtype: jnp.dtype,
) -> Float[Array, "*batch values"]:
    """Return the values, exact in bfloat16 and float32.

    Args:
      blocks: Pairs of values, sixteen bytes for each block.
      scales: Biased exponents.
      dtype: Of the result.
    """
    levels = jnp.asarray([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], dtype)
    codes = jnp.stack([blocks & 0x0F, blocks >> 4], axis=-1)
    values = levels[codes.reshape(*scales.shape, BLOCK)]
    exponents = scales.astype(jnp.int32)[..., None] - 127
    scaled = jnp.ldexp(values, exponents)
    return scaled.reshape(*scales.shape[:-1], -1)
