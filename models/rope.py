"""Rotary position embeddings, with the scalings that released checkpoints use.

Source: RoFormer (arXiv:2104.09864); YaRN (arXiv:2309.00071); the Llama 3.1 scaling:
meta-llama/llama-models, models/llama3/model.py.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from models.config_fields import ConfigError, ConfigFields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Frequencies of a rotary embedding.

    Attributes:
      frequencies: Radians per position of each rotated pair.
      magnitude: Factor of cosine and sine (YaRN's attention factor).
      score_magnitude: Factor of the softmax scale, for all elements of q and k, also
        those that are not rotated (YaRN's ``mscale_all_dim``, squared).
    """

    frequencies: tuple[float, ...]
    magnitude: float = 1.0
    score_magnitude: float = 1.0

    @property
    def dim(self) -> int:
        """Elements that are rotated, twice the pairs."""
        return 2 * len(self.frequencies)


def plain_rope(dim: int, theta: float) -> Rope:
    """Return the unscaled frequencies of ``dim`` rotated elements."""
    exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
    return Rope(frequencies=tuple((1.0 / theta**exponents).tolist()))


def _llama3_rope(dim: int, theta: float, fields: ConfigFields) -> Rope:
    """Slow long wavelengths down, keep short ones, and blend in between."""
    factor = fields.take("factor", float)
    low = fields.take("low_freq_factor", float)
    high = fields.take("high_freq_factor", float)
    original = fields.take("original_max_position_embeddings", int)
    base = np.asarray(plain_rope(dim, theta).frequencies)
    wavelength = 2 * math.pi / base
    blend = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    scaled = (1 - blend) * base / factor + blend * base
    return Rope(frequencies=tuple(scaled.tolist()))


def yarn_magnitude(factor: float, mscale: float) -> float:
    """Return YaRN's magnitude for a length extended by ``factor``."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_rope(dim: int, theta: float, fields: ConfigFields) -> Rope:
    """Interpolate slow pairs by the factor, keep fast ones, ramp in between."""
    factor = fields.take("factor", float)
    original = fields.take("original_max_position_embeddings", int)
    fast = fields.take("beta_fast", float, 32.0)
    slow = fields.take("beta_slow", float, 1.0)
    truncates = fields.take("truncate", bool, True)
    mscale = fields.take("mscale", float, None)
    mscale_all = fields.take("mscale_all_dim", float, None)
    magnitude = fields.take("attention_factor", float, None)

    def pair_that_turns(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(fast), pair_that_turns(slow)
    if truncates:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    span = max(last - first, 0.001)
    ramp = np.clip((np.arange(dim // 2) - first) / span, 0.0, 1.0)
    base = np.asarray(plain_rope(dim, theta).frequencies)
    scaled = ramp * base / factor + (1 - ramp) * base
    if magnitude is None:
        if mscale and mscale_all:
            magnitude = yarn_magnitude(factor, mscale) / yarn_magnitude(
                factor, mscale_all
            )
        else:
            magnitude = yarn_magnitude(factor, 1.0)
    return Rope(
        frequencies=tuple(scaled.tolist()),
        magnitude=magnitude,
        score_magnitude=yarn_magnitude(factor, mscale_all or 0.0) ** 2,
    )


def rope_from_config(dim: int, theta: float, fields: ConfigFields | None) -> Rope:
    """Return the frequencies that a config's ``rope_scaling`` describes.

    Args:
      dim: Rotated elements per head.
      theta: Base.
      fields: The ``rope_scaling`` object, None if it is null.

    Raises:
      ConfigError: The kind of scaling, or one of its fields, is unknown.
    """
    if fields is None:
        return plain_rope(dim, theta)
    kind = fields.take("rope_type", str, None) or fields.take("type", str)
    fields.ignore("type")
    if kind == "default":
        rope = plain_rope(dim, theta)
    elif kind == "linear":
        factor = fields.take("factor", float)
        base = plain_rope(dim, theta).frequencies
        rope = Rope(frequencies=tuple(f / factor for f in base))
    elif kind == "llama3":
        rope = _llama3_rope(dim, theta, fields)
    elif kind == "yarn":
        rope = _yarn_rope(dim, theta, fields)
    else:
        raise ConfigError(
            f"rope_scaling: type {kind!r} is not supported; it can be 'default', "
            "'linear', 'llama3' or 'yarn'"
        )
    fields.finish()
    return rope


def _angles(
    rope: Rope, positions: Int32[Array, " num_tokens"]
) -> tuple[Float32[Array, "num_tokens 1 pairs"], Float32[Array, "num_tokens 1 pairs"]]:
    frequencies = jnp.asarray(rope.frequencies, jnp.float32)
    angle = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
    cos, sin = jnp.cos(angle) * rope.magnitude, jnp.sin(angle) * rope.magnitude
    return cos[:, None, :], sin[:, None, :]


def rotate_halves(
    x: Float[Array, "num_tokens heads head_dim"],
    positions: Int32[Array, " num_tokens"],
    rope: Rope,
) -> Float[Array, "num_tokens heads head_dim"]:
    """Rotate the first ``rope.dim`` elements; pair i is elements i and i + dim / 2."""
    cos, sin = _angles(rope, positions)
    pairs = rope.dim // 2
    values = x.astype(jnp.float32)
    first, second = values[..., :pairs], values[..., pairs : rope.dim]
    rotated = [first * cos - second * sin, second * cos + first * sin]
    rest = values[..., rope.dim :]
    return jnp.concatenate([*rotated, rest], axis=-1).astype(x.dtype)


def rotate_neighbours(
    x: Float[Array, "num_tokens heads head_dim"],
    positions: Int32[Array, " num_tokens"],
    rope: Rope,
) -> Float[Array, "num_tokens heads head_dim"]:
    """Rotate all elements; pair i is elements 2 i and 2 i + 1."""
    cos, sin = _angles(rope, positions)
    values = x.astype(jnp.float32)
    even, odd = values[..., 0::2], values[..., 1::2]
    rotated = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return rotated.reshape(x.shape).astype(x.dtype)
