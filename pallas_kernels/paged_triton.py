"""What the Triton attention kernels share. Importing this module imports Triton."""

import dataclasses
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class KvParts:
    """Constants by which a kernel finds K and V of some heads at a time.

    Attributes:
        key_dim: width of a K head.
        value_dim: width of a V head.
        k_dtype: Triton's name of the storage type of K.
        v_dtype: that of V.
        k_row: elements of a kernel row of K.
        v_row: of V.
        k_entry: elements from one token's K to the next.
        v_entry: from one token's V to the next.
        page_size: tokens of a page.
        block_d: columns of a tile of K.
        block_e: columns of a tile of V.
    """

    key_dim: int
    value_dim: int
    k_dtype: str
    v_dtype: str
    k_row: int
    v_row: int
    k_entry: int
    v_entry: int
    page_size: int
    block_d: int
    block_e: int

    @classmethod
    def of(cls, k: PagedPart, v: PagedPart, *, heads: int = 1) -> "KvParts":
        """Returns the constants of K and V, read `heads` heads at a time."""
        return cls(
            key_dim=k.width,
            value_dim=v.width,
            k_dtype=TYPES[k.dtype.name],
            v_dtype=TYPES[v.dtype.name],
            k_row=k.row_elements,
            v_row=v.row_elements,
            k_entry=k.entry_elements,
            v_entry=v.entry_elements,
            page_size=k.page_size,
            block_d=tile_width(heads * k.width),
            block_e=tile_width(heads * v.width),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring:
    """Constants that make a logit of `q . k`.

    Attributes:
        scale: factor of `q . k`.
        soft_cap: `c` in `c * tanh(s / c)`, applied to scaled scores; 0 for none.
        window: tokens that a query sees; 0 for all.
    """

    scale: float
    soft_cap: float
    window: int

    @classmethod
    def of(
        cls, softmax_scale: float, *, window: int | None, soft_cap: float | None
    ) -> "Scoring":
        """Returns the constants of what an op is given, where None means none."""
        return cls(
            scale=float(softmax_scale),
            soft_cap=0.0 if soft_cap is None else float(soft_cap),
            window=0 if window is None else min(window, 2**30),
        )


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
