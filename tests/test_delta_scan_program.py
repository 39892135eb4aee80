"""What assemblers make of the scan in Gluon: nothing waits that need not, or spills."""

import pytest

from pallas_kernels.delta_scan_gluon_kernel import delta_scan_gluon_kernel
from pallas_kernels.triton_launch import compile_kernel
from tests.gpu_assembly import (
    PTXAS,
    assemble,
    assemblers,
    from_first_product_to_last_wait,
    listing,
    touched_while_products_run,
)
from tests.triton_interpreter import IS_INTERPRETING

DTYPES = (
    *("bfloat16",) * 4,
    "float32",
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
SHARED_BYTES = {(128, 64): 200_192, (128, 128): 228_352, (64, 64): 126_464}

pytestmark = [
    pytest.mark.skipif(IS_INTERPRETING, reason="nothing is compiled there"),
    pytest.mark.skipif(not PTXAS.is_file(), reason="Triton came without an assembler"),
]


@pytest.mark.parametrize("assembler", assemblers())
@pytest.mark.parametrize("program", PROGRAMS)
def test_products_overlap_and_nothing_touches_them(program, assembler):
    key_dim, value_dim, block_v, dtype, checkpoints = PROGRAMS[program]
    constants = {
        "H": 32,
        "K": key_dim,
        "V": value_dim,
        "BLOCK_V": block_v,
        "SEGMENT": 2048,
        "CHECKPOINTS": checkpoints,
        "STATE_IS_BF16": dtype == "bfloat16",
        "ROW_WORDS": 1 << 20,
        "LAST_ROW": 1 << 16,
    }
    compiled = compile_kernel(
        delta_scan_gluon_kernel,
        DTYPES,
        tuple(sorted(constants.items())),
        num_warps=block_v // 16,
        num_stages=1,
        capability=90,
    )
    assert compiled.shared_bytes <= SHARED_BYTES.get((key_dim, block_v), 160_000)
    assembled = assemble(compiled.ptx, assemblers()[assembler])
    assert assembled.spilled_bytes == 0
    # Else it makes each product wait for the one before, and says so.
    assert "serialized" not in assembled.log
    lines = from_first_product_to_last_wait(listing(assembled.cubin))
    # S w^T, S q^T, new k and new P^T in steps of 16.
    products = [x for x in lines if x.startswith("HGMMA")]
    assert len(products) == 3 * key_dim // 16 + 64 // 16
    assert [x for x in lines if x.startswith(("BRA", "BSYNC", ".L"))] == []
    assert sum(x.startswith("BAR.SYNC") for x in lines) == 2
    assert touched_while_products_run(lines) == []


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
