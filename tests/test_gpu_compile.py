"""Programs compiled for an H200 without one: memory, copies, and the harness itself."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import page_copy, page_copy_triton
from tests.gpu_compile import (
    compile_for_h200,
    pool_sized_copies,
    requires_h200_compiler,
)

GIB = 1 << 30
POOL = jax.ShapeDtypeStruct((GIB * 16 // 1152, 1152), jnp.uint32)  # 64 GiB
MOVES = jax.ShapeDtypeStruct((4096,), jnp.int32)
COUNT = jax.ShapeDtypeStruct((), jnp.int32)


def pool_bytes(shape: jax.ShapeDtypeStruct) -> int:
    return shape.size * shape.dtype.itemsize


def write_row(pool, row):
    return pool.at[row].set(jnp.uint32(7))


@requires_h200_compiler
def test_a_donated_update_is_in_place():
    program = compile_for_h200(write_row, POOL, COUNT, donate_argnums=0)
    assert program.alias_bytes == pool_bytes(POOL)
    assert program.output_bytes == pool_bytes(POOL)
    assert program.temp_bytes < 1 << 20
    assert pool_sized_copies(program.hlo_text, 1 << 20) == []


@requires_h200_compiler
def test_an_update_that_is_not_donated_is_found():
    program = compile_for_h200(write_row, POOL, COUNT)
    assert program.alias_bytes == 0
    assert len(pool_sized_copies(program.hlo_text, pool_bytes(POOL))) == 1


@requires_h200_compiler
def test_a_copy_in_a_loop_is_found():
    def swap_often(pools, count):
        return jax.lax.fori_loop(0, count, lambda _, pair: pair[::-1], pools)

    program = compile_for_h200(swap_often, (POOL, POOL), COUNT, donate_argnums=0)
    assert pool_sized_copies(program.hlo_text, pool_bytes(POOL))


@requires_h200_compiler
def test_a_jitted_function_keeps_its_own_donation():
    step = jax.jit(write_row, donate_argnums=0)
    assert compile_for_h200(step, POOL, COUNT).alias_bytes == pool_bytes(POOL)
    with pytest.raises(ValueError, match="donate_argnums=0"):
        compile_for_h200(step, POOL, COUNT, donate_argnums=0)


def test_copies_are_read_from_every_form_of_instruction():
    text = """
  ROOT %copy.3 = u32[256,1024]{1,0} copy(%p), metadata={op_name="a"}
  %copy-start = (bf16[1024,512]{1,0}, bf16[1024,512]{1,0}, u32[]{:S(2)}) copy-start(%x)
  %copy-done = bf16[1024,512]{1,0} copy-done(%copy-start)
  copy.4 = pred[1048576]{0} copy(y)
  %copy.5 = u32[256,1023]{1,0} copy(%small)
  %fusion = u32[256,1024]{1,0} fusion(%copy.3), calls=%copy_computation
"""
    names = [copy.split(" = ")[0] for copy in pool_sized_copies(text, 1 << 20)]
    assert names == ["ROOT %copy.3", "%copy-start", "copy.4"]
    assert "metadata" not in pool_sized_copies(text, 1 << 20)[0]


IMPLEMENTATIONS = {
    "mosaic_gpu": page_copy.copy_pages,
    "mosaic_gpu_vector": functools.partial(
        page_copy.copy_pages, config=page_copy.PageCopyConfig(kernel="vector")
    ),
    "triton": page_copy_triton.copy_pages,
}
# Pages of 73,728 and 516,096 bytes, of a state, and of no more than 16-byte multiples.
SIZES = {
    "mla": (18_432, 0),
    "mha": (129_024, 288),
    "state": (10_854_400, 1_024),
    "odd": (18_436, 20),
}


@requires_h200_compiler
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("size", SIZES)
def test_page_copy_is_in_place(implementation, size):
    page_words, base_words = SIZES[size]
    copy = functools.partial(
        IMPLEMENTATIONS[implementation], page_words=page_words, base_words=base_words
    )
    program = compile_for_h200(copy, POOL, MOVES, MOVES, COUNT, donate_argnums=0)
    assert program.alias_bytes == pool_bytes(POOL)
    assert program.temp_bytes < 1 << 20
    assert pool_sized_copies(program.hlo_text, 1 << 20) == []


@requires_h200_compiler
def test_page_copies_of_two_kinds_chain_without_a_copy():
    def step(pool, src, dst, count):
        for page_words, base_words in SIZES.values():
            pool = page_copy.copy_pages(
                pool, src, dst, count, page_words=page_words, base_words=base_words
            )
        return pool

    program = compile_for_h200(step, POOL, MOVES, MOVES, COUNT, donate_argnums=0)
    assert program.alias_bytes == pool_bytes(POOL)
    assert program.temp_bytes < 1 << 20
    assert pool_sized_copies(program.hlo_text, 1 << 20) == []
