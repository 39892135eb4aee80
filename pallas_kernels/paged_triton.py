"""What the Triton attention kernels share. Importing this module imports Triton."""

import typing

import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Int32

from pallas_kernels.paged_rows import PagedPart, next_power_of_2

# Triton's names of storage types.
TYPES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
}


def tile_width(width: int) -> int:
    """Returns the tile width for `width`: a power of two that a product can take."""
    return max(16, next_power_of_2(width))


def addresses(k: PagedPart, v: PagedPart, *, heads: int = 1) -> dict[str, typing.Any]:
    """Returns the constants by which a kernel finds K and V of some heads at a time."""
    return {
        "KEY_DIM": k.width,
        "VALUE_DIM": v.width,
        "K_DTYPE": TYPES[k.dtype.name],
        "V_DTYPE": TYPES[v.dtype.name],
        "K_ROW": k.row_elements,
        "V_ROW": v.row_elements,
        "K_ENTRY": k.entry_elements,
        "V_ENTRY": v.entry_elements,
        "PAGE_SIZE": k.page_size,
        "BLOCK_D": tile_width(heads * k.width),
        "BLOCK_E": tile_width(heads * v.width),
    }


def scoring(
    softmax_scale: float, *, window: int | None, soft_cap: float | None
) -> dict[str, typing.Any]:
    """Returns the constants of scores; 0 is no window, and no cap."""
    return {
        "SCALE": float(softmax_scale),
        "SOFT_CAP": 0.0 if soft_cap is None else float(soft_cap),
        "WINDOW": 0 if window is None else min(window, 2**30),
    }


def layer_blocks(k: PagedPart, v: PagedPart) -> Int32[Array, " 3"]:
    """Returns the layer's constants of K and V as an array: one kernel for all layers.

    The third number keeps XLA from computing 0 and 1 with a kernel of its own.
    """
    return jnp.asarray([k.block, v.block, -1], jnp.int32)


# Triton compiles the source: a checking wrapper would hide the module's names from it.
@triton.jit
@typing.no_type_check
def finish(acc, m, z, sink, HAS_SINKS: tl.constexpr):
    """Divides by the denominator, sinks included; the log-sum-exp is in base 2."""
    # Not "above 0": the sum is NaN where a key was, and that must show.
    has_keys = z != 0.0
    if HAS_SINKS:
        m_new = tl.maximum(m, sink)
        rescale = tl.exp2(m - m_new)
        z = tl.where(has_keys, z * rescale + tl.exp2(sink - m_new), 1.0)
        acc = acc * rescale[:, None]
        m = m_new
    else:
        z = tl.where(has_keys, z, 1.0)
    out = tl.where(has_keys[:, None], acc / z[:, None], 0.0)
    return out, tl.where(has_keys, m + tl.log2(z), -float("inf"))


@triton.jit
@typing.no_type_check
def cap(s, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr):
    """Scales scores by SCALE, then returns `c * tanh(s / c)` of them in base 2."""
    # tanh(x) = 1 - 2 / (exp(2x) + 1)
    x = tl.exp2(s * (2.0 * SCALE / SOFT_CAP * 1.4426950408889634))
    return (SOFT_CAP * 1.4426950408889634) * (1.0 - 2.0 / (x + 1.0))


@triton.jit
@typing.no_type_check
def weigh(s, m, z):
    """Turns scores in base 2 into weights, in an online softmax.

    Returns the weights, the factor of what was summed before, the new maximum and the
    new denominator.
    """
    m_new = tl.maximum(m, tl.max(s, axis=1))
    # A query that has seen nothing yet has m = -inf; exp2(-inf - 0) is zero.
    origin = tl.where(m_new == -float("inf"), 0.0, m_new)
    p = tl.exp2(s - origin[:, None])
    rescale = tl.exp2(m - origin)
    return p, rescale, m_new, z * rescale + tl.sum(p, axis=1)


@triton.jit
@typing.no_type_check
def pages_of(
    table_ptr,
    first,
    step,
    stop,
    PAGE_SIZE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
):
    """Loads the block ids of keys: one for a block that lies in one page, or each's."""
    if ONE_PAGE:
        pages = tl.load(table_ptr + first // PAGE_SIZE, mask=first < stop, other=0)
    else:
        key = first + step
        pages = tl.load(table_ptr + key // PAGE_SIZE, mask=key < stop, other=0)
    return pages.to(tl.int64)


@triton.jit
@typing.no_type_check
def entry_pointers(
    pool_ptr,
    pages,
    block,
    first,
    step,
    PAGE_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    ENTRY: tl.constexpr,
    ONE_PAGE: tl.constexpr,
):
    """Returns the pointer to each key's entry, in 64 bits; no limit on the pool."""
    if ONE_PAGE:
        in_page = first % PAGE_SIZE
        base = (pages + block) * (PAGE_SIZE * ROW) + in_page * ENTRY
        pointers = pool_ptr + base + step * ENTRY
    else:
        in_page = (first + step) % PAGE_SIZE
        pointers = pool_ptr + ((pages + block) * (PAGE_SIZE * ROW) + in_page * ENTRY)
    return pointers
