"""Fills pools with random numbers, on the device and at the speed of its memory."""

import jax
import jax.numpy as jnp
import numpy as np


def random_words(
    shape: tuple[int, ...], dtype: str, *, smallest: float = 0.5
) -> jax.Array:
    """Return words of numbers of either sign, from ``smallest`` to four times that.

    Sign, fraction and the last bit of the exponent are random bits: a normal
    distribution over a pool of gigabytes takes longer than what is measured on it.

    Args:
      shape: Of the words.
      dtype: What they hold: a floating point dtype of one to four bytes.
      smallest: Power of two, its exponent of the kind whose last bit is 0: 2**-1 is,
        2**-5 is.
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
    words = jax.random.bits(jax.random.key(0, impl="rbg"), shape, jnp.uint32)
    return (words & jnp.uint32(kept * copies)) | jnp.uint32(exponent * copies)
