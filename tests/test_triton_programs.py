"""What Triton makes of the kernels at full size: no spills, copies of 16 bytes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gqa_decode_triton, gqa_extend_triton, kv_write_triton
from pallas_kernels.paged_rows import PagedPart
from pallas_kernels.triton_launch import compile_kernel
from tests.gpu_assembly import PTXAS, assemble
from tests.triton_interpreter import IS_INTERPRETING

POOL = jax.ShapeDtypeStruct((1 << 24, 1024), jnp.uint32)  # 64 GiB

pytestmark = [
    pytest.mark.skipif(IS_INTERPRETING, reason="nothing is compiled there"),
    pytest.mark.skipif(not PTXAS.is_file(), reason="Triton came without an assembler"),
]


@pytest.fixture
def launched(monkeypatch):
    """The PTX of every kernel that would have been launched."""
    programs = {}

    def record(
        kernel, *operands, outputs, grid, num_warps=4, num_stages=1, aliases=None, **c
    ):
        del grid, aliases
        dtypes = tuple(np.dtype(x.dtype).name for x in [*operands, *outputs])
        compiled = compile_kernel(
            kernel, dtypes, tuple(sorted(c.items())), num_warps, num_stages, 90
        )
        programs[kernel.fn.__name__] = compiled
        return outputs

    for module in (gqa_decode_triton, gqa_extend_triton, kv_write_triton):
        monkeypatch.setattr(module, "launch", record)
    return programs


def part(dtype, heads, width, page_size):
    return PagedPart(
        dtype=jnp.dtype(dtype),
        num_heads=heads,
        width=width,
        page_size=page_size,
        block=3,
        row_elements=heads * width,
        entry_elements=heads * width,
    )


def shapes(*sizes):
    return [jax.ShapeDtypeStruct(size, jnp.int32) for size in sizes]


DECODE = {
    "llama": (64, 32, 8, 128, 64, None, "bfloat16"),
    "llama-P16": (64, 32, 8, 128, 16, None, "bfloat16"),
    "llama-P1": (1, 32, 8, 128, 1, None, "bfloat16"),
    "gpt-oss": (64, 64, 8, 64, 64, None, "bfloat16"),
    "gpt-oss-window": (64, 64, 8, 64, 64, 128, "bfloat16"),
    "mha-256": (16, 16, 16, 256, 64, None, "bfloat16"),
    "llama-fp8": (64, 32, 8, 128, 64, None, "float8_e4m3fn"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", DECODE)
def test_decode_neither_spills_nor_reads_in_crumbs(launched, name):
    rows, q_heads, kv_heads, width, page_size, window, dtype = DECODE[name]
    place = part(dtype, kv_heads, width, page_size)
    gqa_decode_triton.gqa_decode(
        jax.ShapeDtypeStruct((rows, 1, q_heads, width), jnp.bfloat16),
        POOL,
        POOL,
        *shapes((rows, 8192 // page_size), (rows,)),
        k=place,
        v=place,
        softmax_scale=0.1,
        window=window,
    )
    expected = {"whole_rows_kernel"} if window else {"chunks_kernel", "merge_kernel"}
    assert set(launched) == expected
    for kernel, compiled in launched.items():
        assert assemble(compiled.ptx).spilled_bytes == 0
        if kernel != "merge_kernel":
            assert "cp.async.cg.shared.global" in compiled.ptx
    # Four programs share a multiprocessor, or a window's programs all run at once.
    assert all(compiled.shared_bytes < 56 << 10 for compiled in launched.values())


EXTEND = {
    "llama": (32, 8, 128, 64, None, "bfloat16"),
    "llama-P16": (32, 8, 128, 16, None, "bfloat16"),
    "gpt-oss-window": (64, 8, 64, 64, 128, "bfloat16"),
    "mha-256": (16, 16, 256, 64, None, "bfloat16"),
    "llama-fp8": (32, 8, 128, 64, None, "float8_e4m3fn"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", EXTEND)
def test_extend_multiplies_in_warpgroups_and_does_not_spill(launched, name):
    q_heads, kv_heads, width, page_size, window, dtype = EXTEND[name]
    place = part(dtype, kv_heads, width, page_size)
    gqa_extend_triton.gqa_extend(
        jax.ShapeDtypeStruct((8192, q_heads, width), jnp.bfloat16),
        POOL,
        POOL,
        *shapes((1, 8192 // page_size), (2,), (1,)),
        k=place,
        v=place,
        softmax_scale=0.1,
        window=window,
    )
    (compiled,) = launched.values()
    assert assemble(compiled.ptx).spilled_bytes == 0
    assert "wgmma.mma_async" in compiled.ptx
    assert "cp.async.cg.shared.global" in compiled.ptx


# Dtype and widths, and the shared memory of a program on a card of that capability.
SMALL_CARDS = {
    "llama": ("bfloat16", 128, 86),
    "wide": ("bfloat16", 256, 89),
    "wide-f32": ("float32", 256, 86),
    "wide-consumer-blackwell": ("bfloat16", 256, 120),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", SMALL_CARDS)
def test_kernels_fit_cards_with_little_shared_memory(monkeypatch, name):
    dtype, width, capability = SMALL_CARDS[name]
    shared = []

    def record(kernel, *operands, outputs, num_warps=4, num_stages=1, **options):
        del options["grid"]
        dtypes = tuple(np.dtype(x.dtype).name for x in [*operands, *outputs])
        constants = tuple(sorted(options.items()))
        compiled = compile_kernel(
            kernel, dtypes, constants, num_warps, num_stages, capability
        )
        shared.append(compiled.shared_bytes)
        return outputs

    place = part(dtype, 4, width, 64)
    sizes = {"k": place, "v": place, "softmax_scale": 0.1}
    config = gqa_extend_triton.default_config(
        width, None, dtype, capability=f"{capability // 10}.{capability % 10}"
    )
    for module in (gqa_decode_triton, gqa_extend_triton):
        monkeypatch.setattr(module, "launch", record)
    gqa_extend_triton.gqa_extend(
        jax.ShapeDtypeStruct((512, 8, width), jnp.dtype(dtype)),
        POOL,
        POOL,
        *shapes((1, 8), (2,), (1,)),
        config=config,
        **sizes,
    )
    gqa_decode_triton.gqa_decode(
        jax.ShapeDtypeStruct((2, 1, 8, width), jnp.dtype(dtype)),
        POOL,
        POOL,
        *shapes((2, 64), (2,)),
        **sizes,
    )
    assert len(shared) == 3
    assert max(shared) <= 99 << 10


@pytest.mark.usefixtures("unchecked")
def test_writes_move_16_bytes_at_a_time(launched):
    place = kv_write_triton.EntryPlace(block=1, block_words=64 * 512, entry_words=512)
    words = jax.ShapeDtypeStruct((256, 512), jnp.uint32)
    kv_write_triton.write_entries(
        POOL,
        *shapes((256,), (256,)),
        (words, words),
        (place, place),
        page_size=64,
    )
    (compiled,) = launched.values()
    assert assemble(compiled.ptx).spilled_bytes == 0
    assert re.search(r"ld\.global[.\w]*\.v4\.b32", compiled.ptx)
    assert re.search(r"st\.global[.\w]*\.v4\.b32", compiled.ptx)
