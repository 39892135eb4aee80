"""Device function that inverts a triangular chunk, for `delta_chunk_kernel`.

The inverse grows from blocks of 1 to 64 by

    [I + A1  0; A21  I + A2]^-1 = [T1  0; -T2 A21 T1  T2]

No factor is larger than the inverse itself, so products in tf32 are enough; the
series in powers of A overflows on repeated keys.
"""

import typing

import triton
import triton.language as tl


@triton.jit
@typing.no_type_check
def stack(x, y, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """The rows of x, then those of y: `[B, M, N]` each, together `[B, 2 M, N]`."""
    return tl.reshape(tl.permute(tl.join(x, y), (0, 3, 1, 2)), (B, 2 * M, N))


@triton.jit
@typing.no_type_check
def _square(top, left, right, B: tl.constexpr, N: tl.constexpr):
    """`[top, 0; left, right]` of `[B, N, N]`, as `[B, 2 N, 2 N]`."""
    upper = tl.permute(tl.join(top, tl.zeros_like(top)), (0, 1, 3, 2))
    lower = tl.permute(tl.join(left, right), (0, 1, 3, 2))
    upper = tl.reshape(upper, (B, N, 2 * N))
    lower = tl.reshape(lower, (B, N, 2 * N))
    return stack(upper, lower, B, N, 2 * N)


@triton.jit
@typing.no_type_check
def _merge(T, A, i, j, SIZE: tl.constexpr):
    """Inverses of twice the size, from those of SIZE in T; blocks `[4, 16, 16]`."""
    is_under = (i // SIZE == j // SIZE + 1) & (i // SIZE % 2 == 1)
    under = tl.where(is_under, -A, 0.0)
    product = tl.dot(T, under, input_precision="tf32")
    return tl.dot(product, T, T, input_precision="tf32")


@triton.jit
@typing.no_type_check
def invert(own, near, far):
    """(I + A)^-1 of a strictly lower A `[64, 64]`.

    A comes in pieces: `own`, the blocks of 16 on its diagonal, `[4, 16, 16]`; `near`,
    the squares between two of them, `[2, 16, 16]`; `far`, that between the halves.
    """
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    is_pair = (i == j + 1) & (i % 2 == 1)
    T = tl.where(i == j, 1.0, 0.0) - tl.where(is_pair, own, 0.0)
    T = _merge(T, own, i, j, 2)
    T = _merge(T, own, i, j, 4)
    T = _merge(T, own, i, j, 8)
    T = tl.permute(tl.reshape(T, (2, 2, 16, 16)), (0, 2, 3, 1))
    first, second = tl.split(T)
    left = tl.dot(second, -near, input_precision="tf32")
    left = tl.dot(left, first, input_precision="tf32")
    T = _square(first, left, second, 2, 16)
    first, second = tl.split(tl.permute(T, (1, 2, 0)))
    left = tl.dot(second, -far, input_precision="tf32")
    left = tl.dot(left, first, input_precision="tf32")
    first = tl.reshape(first, (1, 32, 32))
    left = tl.reshape(left, (1, 32, 32))
    second = tl.reshape(second, (1, 32, 32))
    return tl.reshape(_square(first, left, second, 1, 32), (64, 64))
