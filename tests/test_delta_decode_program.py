"""What assemblers make of the decode step: in which order memory is asked."""

import dataclasses
import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.delta import decode as delta_decode
from pallas_kernels.part_place import PartPlace
from pallas_kernels.triton_launch import Compiled, compile_kernel
from tests.gpu_assembly import (
    PTXAS,
    assemble,
    assemblers,
    listing,
    loads_waited_for,
)
from tests.triton_interpreter import IS_INTERPRETING

K = V = 128
HEADS = 32
ROW_WORDS = 1024

pytestmark = [
    pytest.mark.skipif(IS_INTERPRETING, reason="nothing is compiled there"),
    pytest.mark.skipif(not PTXAS.is_file(), reason="Triton came without an assembler"),
]


def compiled(kind: str, rows: int, dtype: str, query_len: int = 1) -> Compiled:
    """The kernel that a batch of so many rows would launch."""
    key_heads = HEADS if kind == "kda" else HEADS // 2
    gates = HEADS * K if kind == "kda" else HEADS
    channels = 2 * key_heads * K + HEADS * V
    state = PartPlace(
        shape=(HEADS, V, K), dtype=dtype, row=8, row_words=ROW_WORDS, num_rows=1 << 24
    )
    window = dataclasses.replace(state, shape=(3, channels), dtype="bfloat16", row=0)
    found = []

    def record(
        kernel,
        *operands,
        outputs,
        grid,
        aliases,
        num_warps,
        cluster_size,
        max_registers,
        **constants,
    ):
        del grid, aliases, cluster_size
        dtypes = tuple(np.dtype(x.dtype).name for x in [*operands, *outputs])
        constants = tuple(sorted(constants.items()))
        found.append(
            compile_kernel(kernel, dtypes, constants, num_warps, 1, 90, max_registers)
        )
        return [jnp.zeros(out.shape, out.dtype) for out in outputs]

    def shape(*sizes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(sizes, dtype)

    token = ft.partial(shape, rows, query_len, dtype=jnp.bfloat16)
    step = ft.partial(
        delta_decode.delta_decode, num_key_heads=key_heads, state=state, window=window
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_decode, "launch", record)
        jax.eval_shape(
            step,
            shape(state.num_rows, ROW_WORDS, dtype=jnp.uint32),
            None,
            token(channels),
            token(gates),
            token(HEADS),
            shape(channels, 4),
            None,
            shape(HEADS),
            shape(gates),
            shape(rows, dtype=jnp.int32),
            shape(rows, dtype=jnp.bool_),
        )
    [kernel] = found
    return kernel


def until_the_last_load_of_the_state(lines: list[str]) -> list[str]:
    """The code ahead of the first wait for a window, as far as it loads."""
    wait = next(i for i, line in enumerate(lines) if line.startswith("DEPBAR.LE"))
    loads = [i for i in range(wait) if lines[i].startswith(("LDG", "LDGSTS"))]
    return lines[: loads[-1] + 1]


BATCHES = [
    ("kda", 1, "float32"),
    ("kda", 16, "float32"),
    ("kda", 64, "float32"),
    ("kda", 256, "float32"),
    ("kda", 64, "bfloat16"),
    ("gdn", 1, "float32"),
    ("gdn", 64, "float32"),
]


@pytest.mark.parametrize(("kind", "rows", "dtype"), BATCHES)
@pytest.mark.parametrize("assembler", assemblers())
def test_loads_of_the_state_wait_for_addresses_alone(kind, rows, dtype, assembler):
    kernel = compiled(kind, rows, dtype)
    assembled = assemble(kernel.ptx, assemblers()[assembler])
    assert assembled.spilled_bytes == 0
    ahead = until_the_last_load_of_the_state(listing(assembled.cubin))
    # The slot, whether it is fresh, and where the layer has state and window.
    assert len(loads_waited_for(ahead)) == 4


def test_a_load_that_is_waited_for_is_found():
    lines = [
        "LDG.E R6, desc[UR6][R2.64]",
        "LDG.E.128 R8, desc[UR6][R4.64]",
        "LDG.E.U16 R3, desc[UR6][R6.64]",
        "FADD R6, R7, R7",
        "ISETP.GE.AND P0, PT, R10, RZ, PT",
        "LDGSTS.E.BYPASS.128 [R12], desc[UR6][R6.64], P1",
    ]
    assert loads_waited_for(lines) == lines[:2]
