"""Registers seen as other numbers, which Pallas has no operation for."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

# Of a register with two pairs of e4m3 a pair to each result.
_PAIRS = """{
.reg .b16 a, b;
mov.b32 {a, b}, $2;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
}"""


def split_pairs(pairs, *, interpret) -> tuple[jax.Array, ...]:
    """Split pairs of e4m3 ``[rows, columns]`` by columns, even and odd, as float16.

    Column m of the results are the elements ``m // 2 * 4 + m % 2`` of a row of elements
    and, in the second, the elements 2 further on.
    """
    if interpret:
        elements = _elements(pairs).reshape(pairs.shape[0], -1, 4)
        halves = (elements[..., :2], elements[..., 2:])
        return tuple(half.reshape(pairs.shape) for half in halves)
    return _to_float16(pairs, _PAIRS)


def elements_of(pairs) -> tuple[jax.Array, jax.Array]:
    """Return first and second elements of pairs of e4m3, as float16 (simulator)."""
    elements = _elements(pairs)
    return elements[..., 0], elements[..., 1]


def _elements(pairs):
    halves = jnp.stack([pairs & 0xFF, pairs >> 8], axis=-1).astype(jnp.uint8)
    elements = lax.bitcast_convert_type(halves, jnp.float8_e4m3fn)
    return elements.astype(jnp.float16)


def _to_float16(pairs, ptx: str) -> tuple[jax.Array, ...]:
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(pairs.shape, jnp.float16, layout=layout)

    def convert(_ctx, array):
        word = ir.IntegerType.get_signless(32)
        half = ir.VectorType.get((2,), ir.F16Type.get())
        parts = [np.empty_like(array.registers) for _ in range(2)]
        for index, register in np.ndenumerate(array.registers):
            packed = utils.bitcast(register, word)
            words = utils.inline_ptx(ptx, packed, result_types=[word, word])
            for part, found in zip(parts, words, strict=True):
                part[index] = utils.bitcast(found, half)
        return tuple(_like(array, part, is_signed=None) for part in parts)

    inline: Any = plgpu.inline_mgpu(arg_types=(layout,), return_type=(result, result))
    return inline(convert)(pairs)


def pack_bfloat16(first, second, layout, *, interpret) -> jax.Array:
    """Return words whose low halves are ``first`` rounded, the high ones ``second``."""
    if interpret:
        low, high = (
            lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16).astype(
                jnp.uint32
            )
            for x in (first, second)
        )
        return low | high << 16
    result = plgpu.ShapeDtypeStruct(first.shape, jnp.uint32, layout=layout)

    def convert(_ctx, low, high):
        word = ir.IntegerType.get_signless(32)
        one = ir.VectorType.get((1,), word)
        words = np.empty_like(low.registers)
        for index, register in np.ndenumerate(low.registers):
            size = ir.VectorType(register.type).shape[0]
            found = []
            for k in range(size):
                at = slice(k, k + 1)
                numbers = [
                    utils.bitcast(utils.vector_slice(x.registers[index], at), word)
                    for x in (high, low)
                ]
                ptx = "cvt.rn.bf16x2.f32 $0, $1, $2;"
                packed = utils.inline_ptx(ptx, *numbers, result_types=word)
                found.append(utils.bitcast(packed, one))
            words[index] = utils.vector_concat(found)
        return _like(low, words, is_signed=False)

    inline: Any = plgpu.inline_mgpu(arg_types=(layout, layout), return_type=result)
    return inline(convert)(first, second)


def _like(array, registers, *, is_signed):
    return mgpu.FragmentedArray(
        _registers=registers, _layout=array.layout, _is_signed=is_signed
    )


def reduce_tokens(kind: str, x, scratch_smem) -> jax.Array:
    """Return the ``max`` or ``add`` of the rows of ``x``, in the layout of a wgmma.

    Pallas has that, but with one scratch for all warpgroups, and a small one.
    """
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(x.shape[1:], x.dtype, layout=layout.reduce(0))

    def reduce(_ctx, array, scratch):
        return array.reduce(kind, 0, scratch)

    arg_types = layout, plgpu.RefType()
    inline: Any = plgpu.inline_mgpu(arg_types=arg_types, return_type=result)
    return inline(reduce)(x, scratch_smem)
