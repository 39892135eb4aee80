"""Every 4-bit code and scale is unpacked to the value that the format gives it."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.mxfp4 import unpack_mxfp4


def value_of(code):
    """Return what sign, two bits of exponent and one of mantissa say (E2M1)."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return -size if sign else size


def test_codes_are_those_of_the_format():
    assert [value_of(code) for code in range(8)] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unpack(dtype):
    # One row of three blocks; the earlier value of a byte is in its low half.
    codes = np.random.default_rng(0).permutation(np.tile(np.arange(16), 6))
    exponents = np.array([[-100, -3, 100]])
    blocks = (codes[0::2] | codes[1::2] << 4).reshape(1, 3, 16).astype(np.uint8)
    scales = (exponents + 127).astype(np.uint8)
    found = unpack_mxfp4(
        jnp.asarray(blocks), jnp.asarray(scales), dtype=jnp.dtype(dtype)
    )
    expected = np.array([value_of(code) for code in codes]).reshape(3, 32)
    expected = expected * 2.0**exponents.T
    assert found.dtype == dtype
    np.testing.assert_array_equal(
        np.asarray(found.astype(jnp.float32), np.float64), expected.reshape(1, 96)
    )
