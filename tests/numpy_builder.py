"""Operations of Triton's interpreter, mended: its bfloat16 is an integer to NumPy.

`BUILDER` stands where Triton's compiler has its builder of instructions.
"""

import functools as ft
import math
import types

import ml_dtypes
import numpy as np
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from tests import inline_ptx

TYPE_NAMES = {
    "bfloat16": "bf16",
    "float32": "fp32",
    "float16": "fp16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "int32": "i32",
    "uint32": "u32",
    "bool": "i1",
}


def tensor_of(data: np.ndarray, dtype: tl.dtype) -> tl.tensor:
    """A tensor of elements as the interpreter stores them."""
    shape = list(data.shape)
    if not shape:
        return tl.tensor(TensorHandle(np.array([data]), dtype), dtype)
    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, shape))


_get_np_dtype = interpreter._get_np_dtype


def stored_dtype(dtype: tl.dtype) -> np.dtype:
    """What elements are stored as: those of 8 and 16 bits mostly as integers."""
    name = dtype.scalar.name
    if name not in _stored_dtypes:
        _stored_dtypes[name] = _get_np_dtype(dtype)
    return _stored_dtypes[name]


_stored_dtypes: dict[str, np.dtype] = {}


def as_float32(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Stored elements of a floating type, as numbers."""
    return np.ascontiguousarray(data).view(_numpy_float(dtype)).astype(np.float32)


def poison(data: np.ndarray) -> None:
    """Sets all bits: NaN, whatever the floating type."""
    bits = 8 * data.itemsize
    data.view(f"uint{bits}")[...] = 2**bits - 1


def _numpy_float(dtype: tl.dtype) -> np.dtype:
    (name,) = [name for name, short in TYPE_NAMES.items() if short == dtype.name]
    return np.dtype(getattr(ml_dtypes, name, name))


def _convert_float(values, source, target, rounding_mode):
    """Convert as a GPU does, to the nearest; Triton's own version truncates."""
    del rounding_mode
    found = np.ascontiguousarray(values).view(_numpy_float(source))
    bits = f"uint{target.primitive_bitwidth}"
    with np.errstate(invalid="ignore", over="ignore"):
        return found.astype(_numpy_float(target)).view(bits)


class _Builder(interpreter.InterpreterBuilder):
    """The interpreter's operations, with numbers in the place of stored integers."""

    def binary_op(self, lhs, rhs, op):
        dtype, a, b = lhs.dtype.scalar, lhs.data, rhs.data
        if dtype == tl.bfloat16 and a.dtype == np.uint16:
            a, b = (x.view(ml_dtypes.bfloat16) for x in (a, b))
        found = op(a, b)
        if found.dtype == bool:
            return TensorHandle(found, tl.int1)
        kind = stored_dtype(dtype)
        if found.dtype == ml_dtypes.bfloat16:
            found = found.view(kind)
        elif found.itemsize > kind.itemsize:
            found = found.astype(kind)
        return TensorHandle(found, dtype)

    # Of a number and a NaN a GPU takes the number, unless told otherwise.
    def create_maxnumf(self, lhs, rhs):
        return self.binary_op(lhs, rhs, np.fmax)

    def create_minnumf(self, lhs, rhs):
        return self.binary_op(lhs, rhs, np.fmin)

    def create_fma(self, x, y, z):
        return self.create_fadd(self.create_fmul(x, y), z)

    def cast_impl(self, src, dst_type):
        if dst_type.scalar == tl.bfloat16 and src.dtype.scalar != tl.bfloat16:
            found = src.data.astype(np.float32).astype(ml_dtypes.bfloat16)
            return TensorHandle(found.view(np.uint16), tl.bfloat16)
        return super().cast_impl(src, dst_type)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        a, b = (
            TensorHandle(as_float32(x.data, x.dtype.scalar), tl.float32) for x in (a, b)
        )
        return super().create_dot(a, b, d, input_precision, max_num_imprecise_acc)

    def create_inline_asm(self, asm, constraints, values, dtypes, is_pure, pack):
        del is_pure
        kinds = [dtype.scalar for dtype in dtypes]
        found = inline_ptx.run(
            asm,
            constraints,
            np.broadcast_arrays(*(x.data for x in values)),
            [stored_dtype(kind) for kind in kinds],
            pack,
        )
        results = [TensorHandle(x, k) for x, k in zip(found, kinds, strict=True)]
        return types.SimpleNamespace(get_result=results.__getitem__)


_init_block_type = tl.block_type.__init__
_block_types: dict[tuple, dict[str, object]] = {}


def _init_block_type_once(self, element_ty, shape):
    """Make a type from the first one of its kind: every operation makes some."""
    sizes = (size.value if isinstance(size, tl.constexpr) else size for size in shape)
    key = (element_ty.name, *sizes)
    if key not in _block_types:
        _init_block_type(self, element_ty, shape)
        _block_types[key] = vars(self).copy()
    vars(self).update(_block_types[key])


@ft.cache
def _shape_of(*sizes):
    """The shape and the number of elements of a tensor, as its functions see them."""
    shape = tl.tuple([tl.constexpr(size) for size in sizes])
    return shape, tl.constexpr(math.prod(sizes))


def _init_tensor(self, handle, dtype):
    self.handle, self.type, self.dtype = handle, dtype, dtype.scalar
    self.shape, self.numel = _shape_of(*(dtype.shape if dtype.is_block() else ()))


BUILDER = interpreter.interpreter_builder

if knobs.runtime.interpret:
    BUILDER.__class__ = _Builder
    # Without `debug`, which it has not, it throws the checks for overflow away.
    BUILDER.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter._convert_float = _convert_float
    interpreter._get_np_dtype = stored_dtype
    tl.block_type.__init__ = _init_block_type_once
    tl.tensor.__init__ = _init_tensor
