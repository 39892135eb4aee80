"""Random numbers for pools and inputs, on the device and at the speed of its memory."""

import math

import jax
import jax.numpy as jnp
import numpy as np


def random_words(
    shape: tuple[int, ...], dtype: str, *, smallest: float = 0.5, seed: int = 0
) -> jax.Array:
    """Return words of numbers of either sign, from ``smallest`` to four times that.

    Sign, fraction and the last bit of the exponent are random bits, a hash of the
    place: a generator's code takes seconds to compile, and a normal distribution over a
    pool of gigabytes longer than what is measured on it.

    Args:
      shape: Of the words, fewer than 2**32.
      dtype: What they hold: a floating point dtype of one to four bytes.
      smallest: Power of two, its exponent of the kind whose last bit is 0: 2**-1 is,
        2**-5 is.
      seed: Other numbers for other arrays.

    Source: the finalizer of MurmurHash3, by Austin Appleby.
    """
    dtype_ = jnp.dtype(dtype)
    bits = 8 * dtype_.itemsize
    unsigned = np.dtype(f"uint{bits}")
    exponent = int(np.asarray(smallest, dtype_).view(unsigned))
    kept = (1 << (bits - 1)) | ((2 << jnp.finfo(dtype_).nmant) - 1)
    if exponent & kept:
        raise ValueError(f"{smallest=} has an exponent that ends in 1 as {dtype}")
    # The same for each of the numbers in a word.
    copies = sum(1 << place for place in range(0, 32, bits))
    x = jnp.full(shape, (seed * 0x9E3779B9) % 2**32, jnp.uint32)
    for axis in range(len(shape)):
        stride = math.prod(shape[axis + 1 :]) % 2**32
        iota = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        x += iota * jnp.uint32(stride)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    x ^= x >> 16
    return (x & jnp.uint32(kept * copies)) | jnp.uint32(exponent * copies)


def random_values(shape: tuple[int, ...], dtype: str, *, seed: int) -> jax.Array:
    """Return numbers of either sign from 0.5 to 2, as `random_words` draws them.

    Args:
      shape: Its last axis fills whole words.
      dtype: As for `random_words`.
      seed: As for `random_words`.
    """
    per_word = 4 // jnp.dtype(dtype).itemsize
    words = random_words((*shape[:-1], shape[-1] // per_word), dtype, seed=seed)
    values = jax.lax.bitcast_convert_type(words, jnp.dtype(dtype))
    return values.reshape(shape)
