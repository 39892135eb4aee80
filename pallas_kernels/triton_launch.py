"""Runs a Triton kernel inside a JAX program.

Triton compiles the kernel to PTX when the call is lowered; the text goes into XLA's
own custom call for PTX. So a launch is an ordinary kernel of the program, a node of
its command buffer whose pointers XLA updates, no handler runs on the host, and a
machine without a GPU compiles it for any card. Importing this module imports Triton.

A kernel's parameters are its operands, then its outputs, in the order of the call,
then its constants. An output that aliases an operand is passed as well: read and
write through it. Every pointer is declared a multiple of 16 bytes, which XLA's
buffers are; other numbers must be constants, or small arrays that the kernel loads.
"""

import collections.abc
import dataclasses
import functools
import typing

import jax
import jax.extend.core
import numpy as np
import triton
from jax._src.interpreters.mlir import custom_call as _custom_call
from jax.interpreters import mlir
from jaxtyping import Array
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

_CALL_TARGET = "__gpu$xla.gpu.ptx"
_SHARED = ".extern .shared .align 16 .b8 global_smem[];"
_MAX_STATIC_SHARED_BYTES = 48 * 1024
_WARP_THREADS = 32
_TYPES = {
    "bool": "*i1",
    "int8": "*i8",
    "int16": "*i16",
    "int32": "*i32",
    "int64": "*i64",
    "uint8": "*u8",
    "uint16": "*u16",
    "uint32": "*u32",
    "uint64": "*u64",
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "float32": "*fp32",
    "float64": "*fp64",
    "float8_e4m3fn": "*fp8e4nv",
    "float8_e5m2": "*fp8e5",
}

# One of several numbers, which a kernel reads as attributes, is a frozen dataclass.
Constant = collections.abc.Hashable


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel for one kind of card.

    Attributes:
        name: entry point of the PTX.
        ptx: the program.
        shared_bytes: shared memory.
        dynamic_shared_bytes: the part of it that a launch has to ask for: all or none.
        num_threads: threads of a program.
        cubin: the machine code that Triton's own assembler made of it.
    """

    name: str
    ptx: str
    shared_bytes: int
    dynamic_shared_bytes: int
    num_threads: int
    cubin: bytes


def compute_capability() -> int:
    """Compute capability of the first device, major times 10 plus minor."""
    major, minor = jax.devices()[0].compute_capability.split(".")
    return 10 * int(major) + int(minor)


@functools.cache
def compile_kernel(
    kernel: triton.JITFunction,
    dtypes: tuple[str, ...],
    constants: tuple[tuple[str, Constant], ...],
    num_warps: int,
    num_stages: int,
    capability: int,
    max_registers: int | None = None,
) -> Compiled:
    """Compiles a kernel; needs no GPU.

    Args:
        kernel: the kernel.
        dtypes: of its operands and outputs, in order.
        constants: names and values of its compile-time constants.
        num_warps: warps of a program.
        num_stages: stages of pipelined loops.
        capability: compute capability to compile for.
        max_registers: registers of a thread, at most.

    Returns:
        The compiled kernel.

    Raises:
        TypeError: the kernel has other parameters than the call gives it, or Triton
            has no pointer to a dtype.
        NotImplementedError: the kernel needs a scratch buffer in global memory.
    """
    names, given = kernel.arg_names, [name for name, _ in constants]
    if len(names) != len(dtypes) + len(given) or {*names[len(dtypes) :]} != {*given}:
        raise TypeError(
            f"{kernel.fn.__name__} has the parameters {', '.join(names)}; the call "
            f"gives {len(dtypes)} arrays and {', '.join(given)}"
        )
    unknown = [dtype for dtype in dtypes if dtype not in _TYPES]
    if unknown:
        raise TypeError(f"{kernel.fn.__name__}: no pointer to {', '.join(unknown)}")
    signature = {
        name: _TYPES[dtype] for name, dtype in zip(names, dtypes, strict=False)
    }
    signature |= {name: "constexpr" for name, _ in constants}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel,
        signature,
        dict(constants),
        {(i,): [["tt.divisibility", 16]] for i in range(len(dtypes))},
    )
    with knobs.cache.scope():
        if not knobs.cache.dir:
            # Importing jax_triton empties it, and Triton then refuses to compile.
            knobs.cache.dir = knobs.cache.get_triton_dir("cache")
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", capability, _WARP_THREADS),
            options={
                "num_warps": num_warps,
                "num_stages": num_stages,
                "maxnreg": max_registers,
            },
        )
    metadata = compiled.metadata
    if metadata.global_scratch_size:
        raise NotImplementedError(
            f"{metadata.name} needs {metadata.global_scratch_size} bytes of scratch "
            "for each program; make its tensor descriptors without Triton's scratch"
        )
    ptx, shared_bytes = compiled.asm["ptx"], metadata.shared
    is_static = shared_bytes <= _MAX_STATIC_SHARED_BYTES and _SHARED in ptx
    if is_static:
        # XLA sets a limit on the dynamic shared memory of kernels that have some; the
        # card then keeps little L1, and kernels that stream are 13 to 20 % slower.
        static = f".shared .align 16 .b8 global_smem[{max(shared_bytes, 16)}];"
        ptx = ptx.replace(_SHARED, static)
    return Compiled(
        name=metadata.name,
        ptx=ptx,
        shared_bytes=shared_bytes,
        dynamic_shared_bytes=0 if is_static else shared_bytes,
        num_threads=_WARP_THREADS * metadata.num_warps,
        cubin=compiled.asm["cubin"],
    )


def launch(
    kernel: triton.JITFunction,
    *operands: Array | np.ndarray,
    outputs: collections.abc.Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    aliases: collections.abc.Mapping[int, int] | None = None,
    num_warps: int = 4,
    num_stages: int = 1,
    cluster_size: int = 1,
    max_registers: int | None = None,
    only_capability: int | None = None,
    **constants: Constant,
) -> list[Array]:
    """Launches a kernel on arrays.

    Args:
        kernel: function under `triton.jit`.
        *operands: arrays. A NumPy array becomes a constant of the program.
        outputs: shapes and dtypes of its outputs, uninitialised but for the aliased.
        grid: programs along x, y and z, up to three numbers.
        aliases: index of the operand whose memory an output takes, by index of the
            operand; the values are indices of `outputs`.
        num_warps: warps of a program.
        num_stages: stages of pipelined loops.
        cluster_size: this many neighbours along x form one cluster of thread blocks,
            whose barriers (`barrier.cluster`) inline assembly may use.
        max_registers: registers of a thread, at most, so that more programs fit.
        only_capability: the one compute capability that has what the kernel uses, major
            times 10 plus minor; None if any will do.
        **constants: compile-time constants by name.

    Returns:
        The outputs.

    Raises:
        TypeError: the kernel has other parameters than the call gives it, or Triton
            has no pointer to a dtype.
        ValueError: the grid is not a whole number of clusters, or an alias joins
            arrays of different shape or dtype.
        NotImplementedError: the kernel needs a scratch buffer in global memory, or,
            once the program is compiled, another card.
    """
    grid = (*grid, 1, 1)[:3]
    if grid[0] % cluster_size:
        raise ValueError(f"{grid=} is no multiple of {cluster_size=}")
    aliases = {} if aliases is None else aliases
    for source, target in aliases.items():
        alias = f"alias {source} -> {target}"
        if source >= len(operands) or target >= len(outputs):
            raise ValueError(
                f"{alias}: there are {len(operands)} operands and {len(outputs)} "
                "outputs"
            )
        from_, to = (
            f"{x.shape} {x.dtype.name}" for x in (operands[source], outputs[target])
        )
        if from_ != to:
            raise ValueError(f"{alias}: {from_} and {to} share no memory")
    return _launch_p.bind(
        *operands,
        outputs=tuple((out.shape, np.dtype(out.dtype)) for out in outputs),
        kernel=kernel,
        grid=grid,
        aliases=tuple(sorted(aliases.items())),
        num_warps=num_warps,
        num_stages=num_stages,
        cluster_size=cluster_size,
        max_registers=max_registers,
        only_capability=only_capability,
        constants=tuple(sorted(constants.items())),
    )


_launch_p = jax.extend.core.Primitive("triton_launch")
_launch_p.multiple_results = True


@_launch_p.def_abstract_eval
@typing.no_type_check
def _outputs_of(*_, outputs, **params):
    del params
    return [jax.core.ShapedArray(shape, dtype) for shape, dtype in outputs]


@typing.no_type_check
def _lower(
    ctx,
    *operands,
    outputs,
    kernel,
    grid,
    aliases,
    num_warps,
    num_stages,
    cluster_size,
    max_registers,
    only_capability,
    constants,
):
    capability = compute_capability()
    if only_capability not in (None, capability):
        raise NotImplementedError(
            f"{kernel.fn.__name__} is for cards of compute capability "
            f"{only_capability / 10}, and this one has {capability / 10}: choose "
            "another configuration, or leave it to the default"
        )
    avals = [*ctx.avals_in, *ctx.avals_out]
    compiled = compile_kernel(
        kernel,
        tuple(aval.dtype.name for aval in avals),
        constants,
        num_warps,
        num_stages,
        capability,
        max_registers,
    )
    # Triton's entry points end in two pointers to scratch memory, not used here. They
    # get the address of an operand, one that shares no memory if there is one.
    spare = next((i for i in range(len(operands)) if i not in dict(aliases)), 0)
    layouts = [tuple(reversed(range(aval.ndim))) for aval in avals]
    first_output = len(operands)
    numbers = {"shared_mem_bytes": compiled.dynamic_shared_bytes}
    for axis, programs, threads in zip(
        "xyz", grid, (compiled.num_threads, 1, 1), strict=True
    ):
        numbers |= {f"grid_{axis}": programs, f"block_{axis}": threads}
    config = {name: mlir.i32_attr(number) for name, number in numbers.items()}
    config["output_indices"] = mlir.ir.ArrayAttr.get(
        [mlir.i32_attr(first_output + i) for i in range(len(outputs))]
    )
    texts = {"name": compiled.name, "kernel_type": "ptx"}
    texts["kernel_data"] = _in_clusters(compiled.ptx, cluster_size)
    config |= {name: mlir.ir.StringAttr.get(text) for name, text in texts.items()}
    return _custom_call(
        _CALL_TARGET,
        operands=[*operands, operands[spare], operands[spare]],
        result_types=[
            mlir.ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(aval.dtype))
            for aval in ctx.avals_out
        ],
        backend_config=config,
        operand_layouts=[*layouts[:first_output], layouts[spare], layouts[spare]],
        result_layouts=layouts[first_output:],
        operand_output_aliases=dict(aliases),
    ).results


mlir.register_lowering(_launch_p, _lower, platform="cuda")


def _in_clusters(ptx: str, cluster_size: int) -> str:
    """Fixes the cluster of the only entry point, before its body."""
    if cluster_size == 1:
        return ptx
    before, entry, after = ptx.partition(".entry ")
    parameters, brace, body = after.partition("\n{")
    cluster = f"\n.explicitcluster\n.reqnctapercluster {cluster_size}, 1, 1"
    return f"{before}{entry}{parameters}{cluster}{brace}{body}"
