"""Mamba2 selective state update, in place on the pool (Triton).

One program has a block of a head's rows in registers for all tokens of the step:

    S [row, state] <- S * decay + dt * outer(x, b),   y = S c + d_skip * x

Letters in the kernel: T tokens, H heads, G groups of b and c, P rows of a head, N
elements of b and c. Importing this module imports Triton.
"""

import dataclasses
import typing

import jax
import numpy as np
import triton
import triton.language as tl
from jaxtyping import Array, Bool, Float, Int32, UInt32

from pallas_kernels.part_place import PartPlace
from pallas_kernels.triton_launch import launch
from pallas_kernels.triton_pointers import cast_pointer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2DecodeConfig:
    """Tuning of the update.

    Attributes:
        block_rows: rows of a head that a program has, a power of two.
        num_warps: warps of a program.
    """

    block_rows: int = 32
    num_warps: int = 4

    def __post_init__(self):
        """Checks the ranges."""
        for name in ("block_rows", "num_warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two")


@triton.jit
@typing.no_type_check
def _mamba2_decode_kernel(
    x_ptr,
    dt_logits_ptr,
    b_ptr,
    c_ptr,
    a_log_ptr,
    dt_bias_ptr,
    d_skip_ptr,
    slots_ptr,
    is_fresh_ptr,
    state_row_ptr,
    _pool_in_ptr,
    pool_ptr,
    out_ptr,
    T: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    LAST_ROW: tl.constexpr,
):
    BLOCKS: tl.constexpr = P // BLOCK
    block = tl.program_id(0) % BLOCKS
    head = tl.program_id(0) // BLOCKS % H
    batch_row = (tl.program_id(0) // (BLOCKS * H)).to(tl.int64)
    slot = tl.load(slots_ptr + batch_row).to(tl.int64)
    row = slot + tl.load(state_row_ptr)
    # An absent slot may be any number: nothing behind it is read or written.
    is_present = (slot >= 0) & (row <= LAST_ROW)
    has_past = is_present & (tl.load(is_fresh_ptr + batch_row) == 0)
    p = block * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, N)
    state_ptr = cast_pointer(pool_ptr + row * ROW_WORDS, STATE_DTYPE)
    state_at = (head * P + p)[:, None] * N + n[None, :]
    S = tl.load(state_ptr + state_at, mask=has_past, other=0.0).to(tl.float32)
    # The loads of the state go out before what waits for small ones.
    tl.debug_barrier()
    rate = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    d_skip = tl.load(d_skip_ptr + head).to(tl.float32)
    for t in tl.static_range(T):
        token = batch_row * T + t
        x_at = (token * H + head) * P + p
        x = tl.load(x_ptr + x_at).to(tl.float32)
        group_at = (token * G + head // (H // G)) * N + n
        b = tl.load(b_ptr + group_at).to(tl.float32)
        c = tl.load(c_ptr + group_at).to(tl.float32)
        logits = tl.load(dt_logits_ptr + token * H + head).to(tl.float32) + dt_bias
        e = tl.exp(tl.minimum(logits, 20.0))
        log1p = tl.where(e < 1e-3, e * (1.0 - 0.5 * e), tl.log(1.0 + e))
        dt = tl.where(logits > 20.0, logits, log1p)
        S = S * tl.exp(-rate * dt) + (dt * x)[:, None] * b[None, :]
        y = tl.sum(S * c[None, :], 1) + d_skip * x
        y = tl.where(is_present, y, 0.0)
        tl.store(out_ptr + x_at, y.to(out_ptr.dtype.element_ty))
    tl.store(state_ptr + state_at, S.to(state_ptr.dtype.element_ty), mask=is_present)


def mamba2_decode(
    buffer: UInt32[Array, "pool_rows words"],
    x: Float[Array, "rows query_len heads head_dim"],
    dt_logits: Float[Array, "rows query_len heads"],
    b: Float[Array, "rows query_len groups state_dim"],
    c: Float[Array, "rows query_len groups state_dim"],
    a_log: Float[Array, " heads"],
    dt_bias: Float[Array, " heads"],
    d_skip: Float[Array, " heads"],
    slots: Int32[Array, " rows"],
    is_fresh: Bool[Array, " rows"],
    *,
    state: PartPlace,
    config: Mamba2DecodeConfig | None = None,
) -> tuple[
    UInt32[Array, "pool_rows words"],
    Float[Array, "rows query_len heads head_dim"],
]:
    """Advances the states of a batch by its tokens, in place.

    Args:
        buffer: the whole pool.
        x: inputs.
        dt_logits: time steps before bias and softplus.
        b: input projection of each group.
        c: output projection of each group.
        a_log: logarithm of the decay rate.
        dt_bias: of the time step.
        d_skip: weight of the direct path.
        slots: first row of each slot. One that does not lie in the pool is absent: its
            row reads and writes nothing and its output is 0.
        is_fresh: whether a row starts from zeros, whatever its slot holds.
        state: where the states lie, `[heads, head_dim, state_dim]`.
        config: tuning.

    Returns:
        The pool, and the outputs in the dtype of `x`.

    Raises:
        ValueError: a dimension is no power of two of at least 16.
    """
    config = Mamba2DecodeConfig() if config is None else config
    heads, head_dim, state_dim = state.shape
    for name, dim in (("head_dim", head_dim), ("state_dim", state_dim)):
        if dim < 16 or dim & (dim - 1):
            raise ValueError(f"{name}={dim} must be a power of two, at least 16")
    rows, query_len = x.shape[:2]
    block = min(config.block_rows, head_dim)
    buffer, out = launch(
        _mamba2_decode_kernel,
        x,
        dt_logits,
        b,
        c,
        a_log,
        dt_bias,
        d_skip,
        slots,
        is_fresh,
        np.asarray([state.row], np.int32),
        buffer,
        outputs=[
            jax.ShapeDtypeStruct(buffer.shape, buffer.dtype),
            jax.ShapeDtypeStruct(x.shape, x.dtype),
        ],
        aliases={10: 0},
        grid=(rows * heads * head_dim // block,),
        num_warps=config.num_warps,
        T=query_len,
        H=heads,
        G=b.shape[2],
        P=head_dim,
        N=state_dim,
        BLOCK=block,
        STATE_DTYPE=state.dtype,
        ROW_WORDS=state.row_words,
        LAST_ROW=state.last_row,
    )
    return buffer, out
