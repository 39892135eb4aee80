"""Triton kernels inside JAX programs: how they are compiled and launched."""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl

from pallas_kernels import page_copy_triton
from pallas_kernels.triton_launch import compile_kernel, launch
from tests.gpu_compile import compile_for_h200, requires_h200_compiler

POOL = jax.ShapeDtypeStruct((1 << 20, 1152), jnp.uint32)
IDS = jax.ShapeDtypeStruct((16,), jnp.int32)
COUNT = jax.ShapeDtypeStruct((), jnp.int32)
VECTOR = jax.ShapeDtypeStruct((4096,), jnp.float32)


@triton.jit
@typing.no_type_check
def _add_kernel(x_ptr, y_ptr, sum_ptr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(sum_ptr + at, tl.load(x_ptr + at) + tl.load(y_ptr + at))


@triton.jit
@typing.no_type_check
def _add_in_place_kernel(x_ptr, _y_in_ptr, y_ptr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y_ptr + at, tl.load(x_ptr + at) + tl.load(y_ptr + at))


@triton.jit
@typing.no_type_check
def _descriptor_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [SIZE, SIZE], [SIZE, 1], [SIZE, SIZE])
    y = tl.make_tensor_descriptor(y_ptr, [SIZE, SIZE], [SIZE, 1], [SIZE, SIZE])
    y.store([0, 0], x.load([0, 0]))


@triton.jit
@typing.no_type_check
def _product_kernel(a_ptr, b_ptr, c_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    i, j = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK
    r = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for k in range(0, N, BLOCK):
        a = tl.load(a_ptr + (i + r)[:, None] * N + k + r[None, :])
        b = tl.load(b_ptr + (k + r)[:, None] * N + j + r[None, :])
        total = tl.dot(a, b, total)
    tl.store(c_ptr + (i + r)[:, None] * N + j + r[None, :], total)


@triton.jit
@typing.no_type_check
def _total_kernel(x_ptr, total_ptr, SIZE: tl.constexpr):
    tl.store(total_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, SIZE)), 0))


def add(
    x,
    y,
    *,
    kernel: triton.JITFunction = _add_kernel,
    size=1024,
    outputs=None,
    **options,
):
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype)] if outputs is None else outputs
    options = {"grid": (x.size // 1024,), "SIZE": size, **options}
    return launch(kernel, x, y, outputs=outputs, **options)


@requires_h200_compiler
def test_a_launch_is_a_node_of_the_command_buffer():
    def step(pool, src, dst, count):
        for page_words in (1024, 2048, 4096, 1024, 2048, 4096):
            pool = page_copy_triton.copy_pages(
                pool, src, dst, count, page_words=page_words, base_words=0
            )
        return pool

    program = compile_for_h200(
        step, POOL, IDS, IDS, COUNT, donate_argnums=0, thunks=True
    )
    assert program.alias_bytes == POOL.size * 4
    assert program.top_thunks == ["kCommandBuffer"]
    assert program.thunk_text.count("kCustomKernel") == 6


@requires_h200_compiler
def test_neighbours_form_a_cluster():
    program = compile_for_h200(functools.partial(add, cluster_size=4), VECTOR, VECTOR)
    assert ".reqnctapercluster 4, 1, 1" in program.hlo_text
    program = compile_for_h200(add, VECTOR, VECTOR)
    assert "ctapercluster" not in program.hlo_text


@requires_h200_compiler
def test_registers_are_limited():
    program = compile_for_h200(functools.partial(add, max_registers=64), VECTOR, VECTOR)
    assert ".maxnreg 64" in program.hlo_text
    assert ".maxnreg" not in compile_for_h200(add, VECTOR, VECTOR).hlo_text


@requires_h200_compiler
def test_a_kernel_for_another_card_is_refused():
    compile_for_h200(functools.partial(add, only_capability=90), VECTOR, VECTOR)
    message = "_add_kernel is for cards of compute capability 8.0, and this one has 9.0"
    with pytest.raises(NotImplementedError, match=message):
        compile_for_h200(functools.partial(add, only_capability=80), VECTOR, VECTOR)


def compiled(kernel, *dtypes, num_warps=4, num_stages=1, **constants):
    key = tuple(sorted(constants.items()))
    return compile_kernel(kernel, dtypes, key, num_warps, num_stages, 90)


def test_accesses_are_as_wide_as_the_hardware_has_them():
    kernel = compiled(_add_kernel, *["float32"] * 3, SIZE=1024)
    assert kernel.num_threads == 128
    assert kernel.ptx.count("ld.global.v4") == 4
    assert kernel.ptx.count("st.global.v4") == 2


def test_dynamic_shared_memory_is_asked_for():
    sizes = {"num_stages": 3, "N": 1024, "BLOCK": 128}
    kernel = compiled(_product_kernel, *["bfloat16"] * 2, "float32", **sizes)
    assert kernel.dynamic_shared_bytes >= 3 * 2 * 128 * 128 * 2
    assert ".extern .shared" in kernel.ptx


def test_an_emptied_cache_folder_does_no_harm(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # as jax_triton does when imported
    compile_kernel.cache_clear()
    assert compiled(_add_kernel, *["float32"] * 3, SIZE=256).num_threads == 128
    assert triton.knobs.cache.dir == ""


def test_a_little_shared_memory_is_static():
    kernel = compiled(_total_kernel, "float32", "float32", SIZE=1024)
    assert kernel.shared_bytes > 0
    assert kernel.dynamic_shared_bytes == 0
    assert ".extern .shared" not in kernel.ptx


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"FACTOR": 2}, TypeError, r"x_ptr, y_ptr, sum_ptr, SIZE; .* FACTOR, SIZE"),
        ({"grid": (3,), "cluster_size": 2}, ValueError, "no multiple of cluster_size"),
        ({"aliases": {2: 0}}, ValueError, "alias 2 -> 0: there are 2 operands"),
        (
            {"aliases": {1: 0}, "outputs": [jax.ShapeDtypeStruct((8,), jnp.float32)]},
            ValueError,
            r"alias 1 -> 0: \(4096,\) float32 and \(8,\) float32 share no memory",
        ),
    ],
)
@requires_h200_compiler
def test_calls_that_do_not_fit_the_kernel_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        compile_for_h200(functools.partial(add, **options), VECTOR, VECTOR)


def test_what_triton_has_no_pointer_to_is_refused():
    with pytest.raises(TypeError, match="no pointer to int4"):
        compiled(_add_kernel, "int4", "int4", "int4", SIZE=1024)


def test_scratch_in_global_memory_is_refused():
    with pytest.raises(NotImplementedError, match="bytes of scratch"):
        compiled(_descriptor_kernel, "float32", "float32", SIZE=64)


@pytest.mark.gpu
@pytest.mark.parametrize("cluster_size", [1, 4])
def test_sums_on_a_card(cluster_size):
    x, y = np.random.default_rng(0).standard_normal((2, 4096)).astype(np.float32)
    (total,) = jax.jit(functools.partial(add, cluster_size=cluster_size))(x, y)
    np.testing.assert_array_equal(np.asarray(total), x + y)


@pytest.mark.gpu
def test_an_aliased_output_takes_the_operand_on_a_card():
    x, y = np.random.default_rng(1).standard_normal((2, 4096)).astype(np.float32)
    kernel = functools.partial(add, kernel=_add_in_place_kernel, aliases={1: 0})
    step = jax.jit(lambda y, x: kernel(x, y)[0], donate_argnums=0)
    on_device = jnp.asarray(y)
    pointer = on_device.unsafe_buffer_pointer()
    total = step(on_device, jnp.asarray(x))
    assert total.unsafe_buffer_pointer() == pointer
    np.testing.assert_array_equal(np.asarray(total), x + y)


@pytest.mark.gpu
def test_a_launch_gives_the_bits_of_jax_triton_on_a_card():
    jax_triton = pytest.importorskip("jax_triton")
    x, y = jax.random.normal(jax.random.key(0), (2, 4096), jnp.float32)

    def theirs(x, y):
        return jax_triton.triton_call(
            x,
            y,
            kernel=_add_kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(4,),
            SIZE=1024,
        )

    (ours,) = jax.jit(add)(x, y)
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(jax.jit(theirs)(x, y)))


@pytest.mark.gpu
def test_a_product_through_much_shared_memory_on_a_card():
    a, b = jax.random.normal(jax.random.key(0), (2, 512, 512), jnp.bfloat16)

    def multiply(a, b):
        output = jax.ShapeDtypeStruct((512, 512), jnp.float32)
        (product,) = launch(
            _product_kernel,
            a,
            b,
            outputs=[output],
            grid=(4, 4),
            num_warps=8,
            num_stages=3,
            N=512,
            BLOCK=128,
        )
        return product

    expected = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    product = np.asarray(jax.jit(multiply)(a, b))
    np.testing.assert_allclose(product, expected, rtol=1e-5, atol=1e-3)
