"""Triton kernels on a CPU: Triton's interpreter behind the call that JAX makes.

Triton decides when it is imported whether its functions are compiled or interpreted,
so this needs a process of its own that has ``TRITON_INTERPRET=1`` from the start.
"""

import functools as ft
import math
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from tests.gpu_compile import H200

IS_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def interpret_launches(monkeypatch, *modules: str) -> None:
    """Puts the interpreter in the place of a card, for modules of `pallas_kernels`.

    In any other process it does nothing.
    """
    if IS_INTERPRETING:
        monkeypatch.setattr("ukv.implementation.default_target", lambda: H200)
        for module in modules:
            name = f"pallas_kernels.{module}.launch"
            monkeypatch.setattr(name, interpreted_launch)


def assert_passes_in_the_interpreter(path: str, *options: str) -> str:
    """Runs the tests of a file that are marked `triton`, in the interpreter.

    Args:
        path: the file.
        *options: more for pytest.

    Returns:
        What pytest wrote.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    # NumPy's products are small, and other tests want the other cores.
    environment["OPENBLAS_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-m", "triton", *options, path],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout
    return done.stdout


_TYPE_NAMES = {
    "bfloat16": "bf16",
    "float32": "fp32",
    "float16": "fp16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "int32": "i32",
    "uint32": "u32",
    "bool": "i1",
}


def _pointer_to(array: np.ndarray) -> types.SimpleNamespace:
    """What Triton takes for a tensor: an address and the type of its elements."""
    return types.SimpleNamespace(
        data_ptr=lambda: array.ctypes.data, dtype=_TYPE_NAMES[array.dtype.name]
    )


class _Executor(interpreter.GridExecutor):
    """The grid executor, without the tensors of PyTorch around it."""

    def _init_args_hst(self, args_dev, kwargs):
        return args_dev, kwargs

    def _restore_args_dev(self, args_dev, args_hst, kwargs, kwargs_hst):
        pass

    def __call__(self, *args, **kwargs):
        _patched_modules.clear()
        super().__call__(*args, **kwargs)


_patch_lang = interpreter._patch_lang
_patched_modules: set[int] = set()


@ft.cache
def _languages(fn) -> set[int]:
    """Return the ids of the modules that a function knows the language by."""
    return {id(tl), id(tl.core)} & {id(value) for value in fn.__globals__.values()}


def _patch_lang_once(fn):
    """Patch the language for a function, unless the running kernel has done it.

    Triton does it at every call of a device function, and looks through all names of
    the language, which takes longer than most of those functions.
    """
    modules = _languages(fn)
    if modules <= _patched_modules:
        return interpreter._LangPatchScope()
    _patched_modules.update(modules)
    return _patch_lang(fn)


_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch_for_numpy_2(tensor, scope):
    _patch_lang_tensor(tensor, scope)
    # NumPy no longer makes an int of an array with one element.
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _numpy_float(dtype: tl.dtype) -> np.dtype:
    (name,) = [name for name, short in _TYPE_NAMES.items() if short == dtype.name]
    return np.dtype(getattr(ml_dtypes, name, name))


def _convert_float(values, source, target, rounding_mode):
    """Convert as a GPU does, to the nearest; Triton's own version truncates."""
    del rounding_mode
    found = np.ascontiguousarray(values).view(_numpy_float(source))
    bits = f"uint{target.primitive_bitwidth}"
    with np.errstate(invalid="ignore", over="ignore"):
        return found.astype(_numpy_float(target)).view(bits)


class _Builder(interpreter.InterpreterBuilder):
    """The interpreter's operations, with products of what is stored as integers."""

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        a, b = (self._floats(x) for x in (a, b))
        with np.errstate(invalid="ignore", over="ignore"):
            return super().create_dot(a, b, d, input_precision, max_num_imprecise_acc)

    def create_inline_asm(self, asm, constraints, values, dtype, is_pure, pack):
        del constraints, dtype, is_pure, pack
        (x,) = values
        with np.errstate(divide="ignore"):
            if asm.startswith("lg2.approx"):
                found, to = np.log2(x.data), tl.float32
            elif asm.startswith("rcp.approx"):
                found, to = np.float32(1) / x.data, tl.float32
            elif asm.startswith("cvt.rn.bf16x2"):
                to = tl.bfloat16
                found = _convert_float(x.data, tl.float32, to, None)
            else:
                raise NotImplementedError(f"the interpreter has no {asm}")
        result = interpreter.TensorHandle(found, to)
        return types.SimpleNamespace(get_result=lambda _: result)

    def _floats(self, x):
        data = x.data
        if data.dtype != np.float32:
            data = data.view(_numpy_float(x.dtype.scalar)).astype(np.float32)
        return interpreter.TensorHandle(data, tl.float32)


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


_get_np_dtype = interpreter._get_np_dtype
_np_dtypes: dict[str, np.dtype] = {}


def _get_np_dtype_once(dtype):
    name = dtype.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _get_np_dtype(dtype)
    return _np_dtypes[name]


interpreter._patch_lang = _patch_lang_once
tl.block_type.__init__ = _init_block_type_once
tl.tensor.__init__ = _init_tensor
interpreter._get_np_dtype = _get_np_dtype_once
# Without `debug`, which it has not, it throws the checks for overflow away.
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
    sanitize_overflow=False
)
interpreter._patch_lang_tensor = _patch_for_numpy_2
interpreter._convert_float = _convert_float
interpreter.interpreter_builder.__class__ = _Builder


def interpreted_launch(
    kernel,
    *operands,
    outputs,
    grid,
    aliases=None,
    num_warps=None,
    num_stages=None,
    cluster_size=1,
    **constants,
):
    """Stand-in for ``pallas_kernels.triton_launch.launch``, also under ``jax.jit``.

    Programs run one after the other, so those of a cluster cannot meet.
    """
    del num_warps, num_stages
    if cluster_size > 1:
        raise NotImplementedError(f"a cluster of {cluster_size} in the interpreter")
    aliases = {} if aliases is None else aliases

    def run(*arrays):
        inputs = [np.array(array) for array in arrays]
        # What a kernel does not write must show.
        results = [_poisoned(shape) for shape in outputs]
        for source, target in aliases.items():
            results[target] = inputs[source]
        pointers = [_pointer_to(array) for array in [*inputs, *results]]
        _Executor(kernel.rewrite(), kernel.arg_names, tuple(grid))(
            *pointers, **constants
        )
        return results

    return jax.pure_callback(run, list(outputs), *operands)


def _poisoned(shape) -> np.ndarray:
    size = int(np.prod(shape.shape)) * jnp.dtype(shape.dtype).itemsize
    return np.full(size, 0xFF, np.uint8).view(shape.dtype).reshape(shape.shape)
