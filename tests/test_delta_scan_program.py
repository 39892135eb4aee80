"""The compiled scan in Gluon: nothing waits that need not, and all that must does."""

import functools
import re

import numpy as np
import pytest

from pallas_kernels.delta.scan_gluon_kernel import delta_scan_gluon_kernel
from pallas_kernels.triton_launch import compile_kernel
from tests.gpu_assembly import (
    PTXAS,
    assemble,
    assemblers,
    from_first_product_to_last_wait,
    listing,
    touched_while_products_run,
)
from tests.gpu_races import races
from tests.triton_interpreter import IS_INTERPRETING

DTYPES = (
    *("bfloat16", "bfloat16", "float32", "bfloat16"),
    *("int32",) * 6,
    "bool",
    *("int32",) * 3,
    *("uint32", "bfloat16") * 2,
)
# Key channels, values, value rows of a program, dtype of the states, checkpoints.
PROGRAMS = {
    "few rows": (128, 128, 64, "float32", 0),
    "few rows, checkpoints": (128, 128, 64, "float32", 2),
    "few rows, bfloat16 states": (128, 128, 64, "bfloat16", 2),
    "many rows": (128, 128, 128, "float32", 0),
    "many rows, checkpoints": (128, 128, 128, "float32", 7),
    "many rows, bfloat16 states": (128, 128, 128, "bfloat16", 2),
    "small": (64, 64, 64, "float32", 2),
    "narrow keys": (64, 128, 128, "bfloat16", 2),
}
# Of what a program may have, 232,448 bytes.
SHARED_BYTES = {(128, 64): 200_704, (128, 128): 227_328, (64, 64): 126_976}
SHARED_BYTES |= {(64, 128): 161_792}

pytestmark = [
    pytest.mark.skipif(IS_INTERPRETING, reason="nothing is compiled there"),
    pytest.mark.skipif(not PTXAS.is_file(), reason="Triton came without an assembler"),
]


H, SEGMENT = 32, 2048
ROW_BYTES = 4 << 20


@functools.cache
def compiled_kernel(program):
    key_dim, value_dim, block_v, dtype, checkpoints = PROGRAMS[program]
    constants = {
        "H": H,
        "K": key_dim,
        "V": value_dim,
        "BLOCK_V": block_v,
        "SEGMENT": SEGMENT,
        "CHECKPOINTS": checkpoints,
        "STATE_IS_BF16": dtype == "bfloat16",
        "ROW_WORDS": ROW_BYTES // 4,
        "LAST_ROW": 1 << 16,
        "AHEAD": 2 if block_v == 64 else 0,
    }
    return compile_kernel(
        delta_scan_gluon_kernel,
        DTYPES,
        tuple(sorted(constants.items())),
        num_warps=block_v // 16,
        num_stages=1,
        capability=90,
    )


def faults(
    program, *, ptx=None, chunks, first_chunk=0, segment=0, slot=5, cut=0, before=0
):
    """Takes the last program of a row, or one before it, through the kernel.

    The row ends with half a chunk, at the end of a million tokens; of their outputs
    `cut` bytes are missing.
    """
    key_dim, value_dim, block_v, _, checkpoints = PROGRAMS[program]
    compiled = compiled_kernel(program)
    last_chunk = first_chunk + chunks
    num_tokens = 1 << 20
    starts = num_tokens + 32 + 64 * (np.arange(last_chunk) - last_chunk)
    sizes = np.where(np.arange(last_chunk) < last_chunk - 1, 64, 32)
    tile_bytes = 2 * 64 * SEGMENT * H
    int32 = functools.partial(np.asarray, dtype=np.int32)
    arrays = [
        3 * key_dim * tile_bytes,
        value_dim * tile_bytes,
        4 * key_dim * SEGMENT * H,
        64 * tile_bytes,
        int32([*starts, 0]),
        int32([*sizes, 0]),
        int32([segment]),
        int32([first_chunk]),
        int32([chunks]),
        int32([slot]),
        np.zeros(1, np.int8),
        int32([*range(10, 10 + checkpoints), 0]),
        int32([*range(checkpoints), 0]),
        int32([3]),
        *(0, 0),
        ((1 << 16) + 1) * ROW_BYTES,
        2 * num_tokens * H * value_dim - cut,
    ]
    last, warps = H * value_dim // block_v - 1, block_v // 16
    ptx = compiled.ptx if ptx is None else ptx
    return races(ptx, arrays, last - before, warps, compiled.shared_bytes)


@pytest.mark.parametrize("assembler", assemblers())
@pytest.mark.parametrize("program", PROGRAMS)
def test_products_overlap_and_nothing_touches_them(program, assembler):
    key_dim, _, block_v, _, _ = PROGRAMS[program]
    compiled = compiled_kernel(program)
    assert compiled.shared_bytes <= SHARED_BYTES[key_dim, block_v]
    assembled = assemble(compiled.ptx, assemblers()[assembler])
    assert assembled.spilled_bytes == 0
    # Else it makes each product wait for the one before, and says so.
    assert "serialized" not in assembled.log
    lines = from_first_product_to_last_wait(listing(assembled.cubin))
    # S w^T, S q^T, new k, of all keys at once, and new P^T in steps of 16.
    products = [x for x in lines if x.startswith("HGMMA")]
    assert len(products) == 2 * key_dim // 16 + 2 * 64 // 16
    assert [x for x in lines if x.startswith(("BRA", "BSYNC", ".L"))] == []
    assert sum(x.startswith("BAR.SYNC") for x in lines) == 1
    assert touched_while_products_run(lines) == []


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_thread_comes_too_soon(program):
    for chunks in (0, 1, 2, 3, 5):
        assert faults(program, chunks=chunks) == []
    assert faults(program, chunks=2, slot=-1) == []
    # Of three segments: before the row, its first and its last chunks.
    for segment in (0, SEGMENT, 2 * SEGMENT):
        row = {"chunks": 3, "first_chunk": 2 * SEGMENT - 1}
        assert faults(program, **row, segment=segment) == []
    # One that asks L2 ahead.
    assert faults(program, chunks=5, before=1) == []


@pytest.mark.parametrize("program", ["few rows", "many rows"])
def test_a_thread_that_comes_too_soon_is_found(program):
    lines = compiled_kernel(program).ptx.splitlines()
    waits = re.compile(r"\s*(bar\.sync|wgmma\.wait\S* [01];)")
    missed = []
    for place in [i for i, line in enumerate(lines) if waits.match(line)]:
        ptx = "\n".join([*lines[:place], *lines[place + 1 :]])
        # The barrier of an absent slot is only passed there.
        if not any(faults(program, ptx=ptx, chunks=5, slot=x) for x in (5, -1)):
            missed.append(lines[place].split())
    # Behind the zeros of an absent slot.
    assert missed == [["bar.sync", "0;"]]


def test_other_faults_of_a_program_are_found():
    program = "few rows"
    ptx = compiled_kernel(program).ptx
    found = faults(program, chunks=1, cut=2)
    assert {x.split(":")[0] for x in found} == {"outside"}
    # Without a copy, with one from elsewhere, and with another number of bytes.
    copy = re.search(
        r"\S+ cp\.async\.bulk\S+\s+\[\S+\], \[(%rd\d+)\], (%r\d+), \S+;", ptx
    )
    found = faults(program, ptx=ptx.replace(copy[0], ""), chunks=1)
    assert {x.split(":")[0] for x in found} == {
        "never comes",
        "reads what nobody wrote",
    }
    elsewhere = f"add.u64 {copy[1]}, {copy[1]}, 8; {copy[0]}"
    (found,) = faults(program, ptx=ptx.replace(copy[0], elsewhere), chunks=1)
    assert found.startswith("not aligned: ")
    shorter = f"sub.u32 {copy[2]}, {copy[2]}, 16; {copy[0]}"
    found = faults(program, ptx=ptx.replace(copy[0], shorter), chunks=1)
    assert "never comes" in {x.split(":")[0] for x in found}
    ask = re.search(r"\S+ cp\.async\.bulk\.prefetch\S+ \[(%rd\d+)\], \S+;", ptx)
    far = f"add.u64 {ask[1]}, {ask[1]}, {1 << 39}; {ask[0]}"
    (found,) = faults(program, ptx=ptx.replace(ask[0], far), chunks=5, before=1)
    assert found.startswith("outside: ")
    # A barrier that is not made, or waited for in the wrong turn.
    made = re.search(r"\S+ mbarrier\.init\S+ \S+ 1;", ptx)[0]
    found = faults(program, ptx=ptx.replace(made, "", 1), chunks=1)
    assert {x.split(":")[0] for x in found} == {"not all threads see the barrier"}
    phase = re.search(r"mbarrier\.try_wait\S+ \S+ \S+ (%r\d+);", ptx)
    late = f"xor.b32 {phase[1]}, {phase[1]}, 1; {phase[0]}"
    found = faults(program, ptx=ptx.replace(phase[0], late), chunks=1)
    assert {"nobody waits for", "race"} <= {x.split(":")[0] for x in found}
    # A product's operand that is rounded between the fence and the product.
    fence = "wgmma.fence.sync.aligned;"
    found = faults(program, ptx=ptx.replace(fence, "", 1), chunks=1)
    assert {x.split(":")[0] for x in found} == {
        "registers of a product with no fence or wait"
    }


def test_what_touches_running_products_is_found():
    product = "HGMMA.64x64x16.F32.BF16 R24, R56, gdesc[UR16], RZ, !UPT, gsb0"
    other = "HGMMA.64x64x16.F32.BF16 R88, R60, gdesc[UR16].tnspB, R88, gsb0"
    adds = product.replace("RZ, !UPT", "R24")
    of_shared = product.replace("R56", "gdesc[UR8].tnspA")
    wait = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
    fine = [
        "F2FP.BF16.F32.PACK_AB R130, R57, R58",
        "STG.E.64 desc[UR20][R120.64], R22",
        "LDS.64 R22, [R56]",
        adds,
    ]
    bad = [
        "FADD R130, R25, R26",
        "IMAD.MOV.U32 R55, RZ, RZ, R2",
        "LDS.64 R58, [R2]",
        "LDS.128 R52, [R2]",
        "LDG.E R2, desc[UR20][R54.64+0x4]",
        "STG.E.64 desc[UR20][R120.64], R54",
        "STSM.16.MT88.4 [R0], R21",
        product.replace("R24", "R40"),
        product.replace("R24", "R58"),
        product.replace("R56", "R24"),
    ]
    assert touched_while_products_run([product, *fine]) == []
    assert touched_while_products_run([of_shared, bad[2], *fine]) == []
    assert touched_while_products_run([of_shared, bad[0]]) == bad[:1]
    for line in bad:
        assert touched_while_products_run([product, line]) == [line]
        assert touched_while_products_run([product, other, line])[-1:] == [line]
        if line[0] != "H":
            assert touched_while_products_run([product, other, wait, line]) == []
