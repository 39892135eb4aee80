"""Triton and Gluon kernels on a CPU, behind the call that JAX makes.

Triton's interpreter gives the operations. The functions of a kernel are compiled again
here, with other names around them: what is a function of the language runs on NumPy,
and one that nobody wrote down for it raises `NotImplementedError`.

Triton decides when it is imported whether its functions are compiled or interpreted,
so this needs a process of its own that has ``TRITON_INTERPRET=1`` from the start.
"""

import ast
import functools as ft
import importlib.util
import inspect
import operator
import os
import pathlib
import subprocess
import sys
import textwrap
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.gluon_interpreter import GluonProgram, unwrap
from tests.gpu_compile import H200
from tests.numpy_builder import BUILDER, TYPE_NAMES, poison, tensor_of

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


def faulty_kernel(folder: pathlib.Path, kernel, right: str, wrong: str):
    """A kernel from a copy of its module with a fault in it.

    Args:
        folder: where the copy goes.
        kernel: the kernel.
        right: text that the module has once.
        wrong: what stands there instead.
    """
    text = pathlib.Path(inspect.getsourcefile(kernel.fn)).read_text()
    assert text.count(right) == 1
    file = folder / f"{kernel.fn.__name__}.py"
    file.write_text(text.replace(right, wrong))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, kernel.fn.__name__)


def interpreted_launch(
    kernel,
    *operands,
    outputs,
    grid,
    aliases=None,
    num_warps=4,
    num_stages=None,
    cluster_size=1,
    max_registers=None,
    only_capability=None,
    **constants,
):
    """Stand-in for ``pallas_kernels.triton_launch.launch``, also under ``jax.jit``.

    Programs run one after the other, so those of a cluster cannot meet.
    """
    del num_stages, max_registers, only_capability
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
        _run_grid(kernel, pointers, (*grid, 1, 1)[:3], num_warps, constants)
        return results

    return jax.pure_callback(run, list(outputs), *operands)


def _poisoned(shape) -> np.ndarray:
    found = np.empty(shape.shape, jnp.dtype(shape.dtype))
    poison(found)
    return found


def _pointer_to(array: np.ndarray) -> tl.tensor:
    pointer = types.SimpleNamespace(
        data_ptr=lambda: array.ctypes.data, dtype=TYPE_NAMES[array.dtype.name]
    )
    return interpreter._implicit_cvt(pointer)


def _run_grid(kernel, pointers, grid, num_warps, constants):
    """Runs the programs of a kernel one after the other."""
    names = kernel.arg_names
    arguments = dict(zip(names, pointers, strict=False)) | constants
    if {*arguments} != {*names} or len(names) != len(pointers) + len(constants):
        raise TypeError(f"{names} are not {len(pointers)} arrays and {[*constants]}")
    language = _Language(kernel, num_warps)
    function = language.function(kernel.fn)
    # JAX may call from several threads, and tensors and builder are of all of them.
    with _RUNNING, np.errstate(all="ignore"):
        BUILDER.set_grid_dim(*grid)
        scope = language.patch_tensors()
        try:
            for place in np.ndindex(grid):
                BUILDER.set_grid_idx(*place)
                language.start_program()
                function(**arguments)
        finally:
            scope.restore()


_RUNNING = threading.Lock()


class _Language:
    """Triton's language, or Gluon's, for one kernel."""

    def __init__(self, kernel, num_warps: int):
        self._functions = {}
        self._own = {
            tl.associative_scan: self._scan,
            tl.load: self._load,
            tl.max_constancy: _first,
            tl.max_contiguous: _first,
            tl.multiple_of: _first,
            tl.range: self._range,
            tl.reduce: self._reduce,
            tl.static_assert: _static_assert,
            tl.static_print: print,
            tl.static_range: _static_range,
        }
        self._semantic = TritonSemantic(BUILDER)
        self.start_program = _nothing
        if isinstance(kernel, GluonJITFunction):
            program = GluonProgram(num_warps)
            self.start_program = program.start
            self._semantic = program.semantic
            self._own |= program.functions()
        self._own = {inspect.unwrap(k): v for k, v in self._own.items()}

    def function(self, fn):
        """What a kernel or a device function becomes."""
        if fn not in self._functions:
            code, names = _compiled(fn)
            namespace = {
                _TO_TENSOR: self._to_tensor,
                _TRUTH: _truth,
                "max": self.translate(tl.core.builtin_max),
                "min": self.translate(tl.core.builtin_min),
                "range": self._range,
            }
            exec(code, namespace)
            found = self._functions[fn] = namespace[fn.__name__]
            found.__defaults__ = fn.__defaults__
            for name in names & fn.__globals__.keys():
                namespace[name] = self.translate(fn.__globals__[name])
        return self._functions[fn]

    def translate(self, value):
        """What stands for something that a function knows by name."""
        if isinstance(value, (triton.JITFunction, interpreter.InterpretedFunction)):
            return self._own.get(value.fn) or self.function(value.fn)
        if isinstance(value, types.ModuleType):
            is_of_triton = value.__name__.partition(".")[0] == "triton"
            return _Module(self, value) if is_of_triton else value
        if isinstance(value, type):
            return self._own.get(value, value)
        if not isinstance(value, types.FunctionType) or not tl.core.is_builtin(value):
            return value
        found = self._own.get(inspect.unwrap(value))
        if found is None and value.__module__.startswith("triton.language."):
            found = ft.partial(value, _semantic=self._semantic)
        name = f"{value.__module__}.{value.__name__}"
        return found or ft.partial(_missing, name)

    def patch_tensors(self):
        """Gives tensors their methods, until the scope that is returned ends."""
        scope = interpreter._LangPatchScope()
        for kind in (tl.tensor, tl.core.tensor_descriptor_base):
            for name, member in inspect.getmembers(kind):
                if tl.core.is_builtin(member):
                    method = ft.partialmethod(member, _semantic=self._semantic)
                    scope.set_attr(kind, name, method)
                elif isinstance(member, interpreter.InterpretedFunction):
                    scope.set_attr(kind, name, self.function(member.fn))
        interpreter._patch_lang_tensor(tl.tensor, scope)
        # NumPy no longer makes an int of an array with one element.
        scope.set_attr(tl.tensor, "__index__", lambda self: self.handle.data.item())
        # The builder's types are those of the language, which know signs.
        scope.set_attr(tl.dtype, "to_ir", lambda self, builder: self)
        scope.set_attr(tl.block_type, "layout", None)
        return scope

    def _to_tensor(self, value):
        return self._semantic.to_tensor(value, False)

    def _range(self, *bounds, **hints):
        del hints
        for i in range(*(operator.index(unwrap(x)) for x in bounds)):
            yield self._to_tensor(i)

    def _load(self, pointer, mask=None, other=None, *more, **hints):
        hints |= {"_semantic": self._semantic}
        found = tl.load(pointer, mask, other, *more, **hints)
        mask = unwrap(mask)
        if mask is None or unwrap(other) is not None:
            return found
        # What a load without a value for it finds there is anything.
        nothing = np.empty_like(found.handle.data)
        poison(nothing)
        mask = self._to_tensor(mask).handle.data
        found.handle.data = np.where(mask, found.handle.data, nothing)
        return found

    def _reduce(self, input, axis, combine_fn, keep_dims=False):
        axis = unwrap(axis)
        parts, kinds = _parts(input)
        rank = parts[0].ndim
        if axis is None:
            parts = [x.reshape(-1) for x in parts]
        parts = [np.moveaxis(x, axis or 0, 0) for x in parts]
        while len(parts[0]) > 1:
            halves = [x[i::2] for i in (0, 1) for x in parts]
            parts = _combine(combine_fn, halves, kinds)
        parts = [x[0] for x in parts]
        if unwrap(keep_dims):
            axes = tuple(range(rank)) if axis is None else axis
            parts = [np.expand_dims(x, axes) for x in parts]
        return _like(input, parts, kinds)

    def _scan(self, input, axis, combine_fn, reverse=False):
        axis = unwrap(axis)
        parts, kinds = _parts(input)
        parts = [np.moveaxis(x, axis, 0) for x in parts]
        if unwrap(reverse):
            parts = [x[::-1] for x in parts]
        rows = [[x[:1] for x in parts]]
        for i in range(1, len(parts[0])):
            row = [x[i : i + 1] for x in parts]
            rows.append(_combine(combine_fn, [*rows[-1], *row], kinds))
        parts = [np.concatenate(x) for x in zip(*rows, strict=True)]
        if unwrap(reverse):
            parts = [x[::-1] for x in parts]
        return _like(input, [np.moveaxis(x, 0, axis) for x in parts], kinds)


class _Module:
    """A module of the language."""

    def __init__(self, language: _Language, module: types.ModuleType):
        self._language, self._module = language, module

    def __getattr__(self, name):
        found = self._language.translate(getattr(self._module, name))
        setattr(self, name, found)
        return found


def _parts(input):
    """The elements of a tensor or of each of several, and their dtypes."""
    tensors = [input] if isinstance(input, tl.tensor) else list(input)
    return [x.handle.data for x in tensors], [x.dtype for x in tensors]


def _like(input, parts, kinds):
    """Tensors of elements: one where `input` is one."""
    found = [tensor_of(x, kind) for x, kind in zip(parts, kinds, strict=True)]
    return found[0] if isinstance(input, tl.tensor) else tuple(found)


def _combine(combine_fn, parts, kinds):
    """Elements of what a function makes of two tensors, or of twice as many."""
    tensors = [tensor_of(x, k) for x, k in zip(parts, [*kinds, *kinds], strict=True)]
    parts, found_kinds = _parts(combine_fn(*tensors))
    if found_kinds != kinds:
        raise TypeError(f"{combine_fn.__name__} makes {found_kinds} of {kinds}")
    return parts


def _first(value, *_):
    return value


def _nothing():
    pass


def _missing(name: str, *_, **__):
    raise NotImplementedError(f"the interpreter has no {name}")


def _static_assert(cond, msg=""):
    assert unwrap(cond), unwrap(msg)


def _static_range(*bounds):
    return range(*unwrap(bounds))


def _truth(value):
    """A condition, which must not be a tensor of more than one element."""
    if not isinstance(value, tl.tensor):
        return value
    if value.handle.data.size > 1:
        raise TypeError(f"a tensor of shape {unwrap(value.shape)} has no truth")
    return bool(value.handle.data.item())


_TO_TENSOR, _TRUTH = "__to_tensor", "__truth"


class _Transformer(ast.NodeTransformer):
    """Writes out what the compiler does and Python does not."""

    def visit_Assign(self, node):
        self.generic_visit(node)
        node.value = _call(_TO_TENSOR, node.value)
        return node

    def visit_BoolOp(self, node):
        self.generic_visit(node)
        node.values = [_call(_TRUTH, value) for value in node.values]
        return node

    def visit_UnaryOp(self, node):
        self.generic_visit(node)
        if isinstance(node.op, ast.Not):
            node.operand = _call(_TRUTH, node.operand)
        return node

    def visit_Compare(self, node):
        self.generic_visit(node)
        if len(node.ops) > 1:
            raise NotImplementedError(f"{ast.unparse(node)}: more than one comparison")
        return node

    def visit_If(self, node):
        self.generic_visit(node)
        node.test = _call(_TRUTH, node.test)
        return node

    visit_IfExp = visit_While = visit_If


def _call(name: str, value: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), [value], [])


@ft.cache
def _compiled(fn):
    """Code that defines a function, and the names in it."""
    lines, first_line = inspect.getsourcelines(fn)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    (function,) = tree.body
    function.decorator_list = []
    # Defaults are copied from the function itself, and annotations say nothing here.
    function.args.defaults = [ast.Constant(None) for _ in function.args.defaults]
    for argument in function.args.args:
        argument.annotation = None
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    tree = ast.fix_missing_locations(_Transformer().visit(tree))
    ast.increment_lineno(tree, first_line - 1)
    return compile(tree, inspect.getsourcefile(fn), "exec"), names
