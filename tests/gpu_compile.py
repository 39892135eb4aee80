"""Compiles functions for an H200 on a machine that has none.

XLA, Mosaic GPU and Triton all compile from a description of the target card, so a
test can say what a function costs in memory before it ever runs:

    @requires_h200_compiler
    def test_step_is_in_place():
        state = jax.eval_shape(functools.partial(create, specs, pool_bytes))
        compiled = compile_for_h200(step, state, batch, donate_argnums=0)
        assert compiled.alias_bytes >= pool_bytes
        assert compiled.temp_bytes < 64 << 20
        assert not pool_sized_copies(compiled.hlo_text, pool_bytes // 2)

* Arguments are pytrees whose leaves have a shape and a dtype: `jax.ShapeDtypeStruct`,
  as `jax.eval_shape` gives for a whole state, or arrays, of which the values are not
  used. Nothing of the pool's size is ever allocated. Close over static arguments.
* `fn` is a plain function with `donate_argnums`, or a jitted one with its own.
* Ops pick their implementation as they would on the card; a kernel that asks
  `jax.default_backend()` itself would still be told "cpu", and `interpret` must be off.
* Calls run in the process of the CPU tests: no GPU backend is initialised.

It proves that a function compiles, where its memory goes and which instructions it
has. It proves nothing about results or speed.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import math
import pathlib
import re
import tempfile
from unittest import mock

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from ukv.implementation import Target

TARGET_CONFIG = pathlib.Path(__file__).parent / "data" / "h200_target_config.txtpb"
COMPUTE_CAPABILITY = 90
H200 = Target(platform="gpu", capability=COMPUTE_CAPABILITY)

_ARRAY = re.compile(r"(?P<dtype>[a-z][a-z0-9]*)\[(?P<dims>[0-9,]*)\]")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?[\w.\-]+ = (?P<shape>\(.*?\)|\S+) (?P<opcode>[a-z\-]+)\("
)
_COPY_OPCODES = frozenset({"copy", "copy-start"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuProgram:
    """What the compiler says about one program.

    Attributes:
        alias_bytes: bytes of results that live in donated arguments.
        temp_bytes: bytes of temporary memory.
        output_bytes: bytes of results, aliased ones included.
        hlo_text: the optimized program, with fusions and loop bodies.
        thunk_text: what runs, in order, if it was asked for: one line for each kernel
            or call, and under a `kCommandBuffer` those that replay as one graph.
    """

    alias_bytes: int
    temp_bytes: int
    output_bytes: int
    hlo_text: str
    thunk_text: str = ""

    @property
    def top_thunks(self) -> list[str]:
        """Kinds of what the host launches one by one: a command buffer is one."""
        return re.findall(r"^\d+: (\w+)", self.thunk_text, re.MULTILINE)


def missing_for_h200() -> str:
    """Says what keeps this machine from compiling for an H200; "" if nothing."""
    plugins = [f"jax_plugins.xla_cuda{version}" for version in (12, 13)]
    if not any(_is_installed(plugin) for plugin in plugins):
        return "compiling for a GPU needs jax-cuda12-plugin and jax-cuda12-pjrt"
    if not TARGET_CONFIG.exists():
        return f"compiling for a GPU needs tests/data/{TARGET_CONFIG.name}"
    return ""


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that would contain it
        return False


requires_h200_compiler = pytest.mark.skipif(
    bool(missing_for_h200()), reason=missing_for_h200() or "it compiles here"
)


def compile_for_h200(fn, *args, donate_argnums=(), thunks=False) -> GpuProgram:
    """Compiles `fn(*args)` for one H200.

    Args:
        fn: function, jitted or not.
        *args: pytrees of shapes.
        donate_argnums: as for `jax.jit`; not for a function that is jitted already.
        thunks: whether to fill `thunk_text`.

    Returns:
        What the program needs and does.

    Raises:
        ValueError: a jitted function came with `donate_argnums`.
    """
    if not hasattr(fn, "lower"):
        fn = jax.jit(fn, donate_argnums=donate_argnums)
    elif donate_argnums != ():
        raise ValueError(f"{donate_argnums=} of a function that is jitted already")
    sharding = _h200_sharding()
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        args,
    )
    with (
        jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh),
        _triton_for(COMPUTE_CAPABILITY),
        mock.patch("ukv.implementation.default_target", return_value=H200),
        tempfile.TemporaryDirectory() as folder,
    ):
        # The tests' own programs are compiled in a hurry; these as for a user.
        options = {"xla_backend_optimization_level": 3}
        if thunks:
            options |= {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        compiled = fn.lower(*shapes).compile(compiler_options=options)
        dumped = pathlib.Path(folder).glob("*.thunk_sequence_after_thunk_passes.txt")
        thunk_text = "".join(path.read_text() for path in dumped)
    memory = compiled.memory_analysis()
    return GpuProgram(
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        hlo_text=compiled.as_text(),
        thunk_text=thunk_text,
    )


@functools.cache
def _h200_sharding() -> NamedSharding:
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET_CONFIG.read_text(), topology="1x1x1"
    )
    return NamedSharding(
        topologies.make_mesh(topology, (1,), ("gpu",)), PartitionSpec()
    )


def _triton_for(compute_capability: int):
    """Kernels in Triton ask the first GPU what to compile for; this answers instead."""
    if not _is_installed("triton"):
        return contextlib.nullcontext()
    return mock.patch(
        "pallas_kernels.triton_launch.compute_capability",
        return_value=compute_capability,
    )


def pool_sized_copies(hlo_text: str, min_bytes: int) -> list[str]:
    """Finds the copies of at least `min_bytes`, wherever they are in a program.

    A copy inside a fusion or a loop body counts like one of its own: it runs at
    least once. The scatter that updates an array in place is not a copy.

    Args:
        hlo_text: the optimized program.
        min_bytes: smallest copy to report.

    Returns:
        The instructions, without their metadata.
    """
    found = []
    for line in hlo_text.splitlines():
        match = _INSTRUCTION.match(line)
        if match is None or match["opcode"] not in _COPY_OPCODES:
            continue
        arrays = _ARRAY.finditer(match["shape"])
        if max(_array_bytes(**array.groupdict()) for array in arrays) >= min_bytes:
            found.append(line.split(", metadata=")[0].strip())
    return found


def _array_bytes(dtype: str, dims: str) -> int:
    """Bytes of an array such as `bf16[8,576]`; a type without a number is 1 byte."""
    bits = re.match(r"[a-z]+(\d+)", dtype)
    sizes = [int(size) for size in dims.split(",") if size]
    return math.prod(sizes) * int(bits[1] if bits else 8) // 8
