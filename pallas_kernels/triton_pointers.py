"""Pointers of Triton kernels. Importing this module imports Triton."""

import typing

import triton
import triton.language as tl


@triton.jit
@typing.no_type_check
def cast_pointer(pointer, DTYPE: tl.constexpr):
    """Points to elements of another dtype."""
    if DTYPE == "float32":
        return pointer.to(tl.pointer_type(tl.float32))
    elif DTYPE == "bfloat16":
        return pointer.to(tl.pointer_type(tl.bfloat16))
    else:
        tl.static_assert(DTYPE == "float16")
        return pointer.to(tl.pointer_type(tl.float16))
