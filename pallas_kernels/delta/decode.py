"""Decode step of a gated delta rule layer, in place on the pool (Gluon).

One pass over the state does all that lies between a layer's projections and its
output norm: the short convolution and the shift of its window, SiLU, the norms of q
and k, gate and beta, the update of the state and the output. KDA has one decay per
key channel, Gated DeltaNet one per head and fewer heads of q and k than of v.

Importing this module imports Triton.
"""

import dataclasses
import typing

import jax
import numpy as np
import triton
from jaxtyping import Array, Bool, Float, Int32, UInt32

from pallas_kernels.delta.decode_kernel import delta_decode_kernel
from pallas_kernels.part_place import PartPlace
from pallas_kernels.triton_launch import launch

MAX_CLUSTER = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaDecodeConfig:
    """Tuning of the decode step.

    Attributes:
        block_v: value rows of a program, a power of two. The programs for the value
            heads of one key head form a cluster, so there may be at most 8.
        tile_v: those that are computed at a time, a power of two.
        stages: tiles that are on their way before the first is computed.
        is_in_shared: whether they come to shared memory, not to registers; if they are
            not the whole block, there must be two.
        key_lanes: lanes that share a value row, a power of two; fewer if keys are few.
        num_warps: warps of a program, a power of two.
        max_registers: registers of a thread, at most: 128 leave room for four programs
            of 4 warps on a multiprocessor. None if any number will do.
    """

    block_v: int
    tile_v: int = 16
    stages: int = 4
    is_in_shared: bool = False
    key_lanes: int = 16
    num_warps: int = 4
    max_registers: int | None = 128

    def __post_init__(self):
        """Checks the ranges."""
        for name in ("block_v", "tile_v", "key_lanes", "num_warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two")
        least = 2 if self.is_in_shared and self.tile_v < self.block_v else 1
        if self.stages < least:
            raise ValueError(f"stages={self.stages} must be at least {least}")


def default_config(
    rows: int, values_per_key: int, value_dim: int, key_dim: int, dtype: str
) -> DeltaDecodeConfig:
    """Tuning for a batch of so many rows.

    Args:
        rows: rows of the batch.
        values_per_key: value rows that share a key head.
        value_dim: elements of a value.
        key_dim: elements of a key.
        dtype: of the states.

    Returns:
        The smallest blocks for a few rows, which leave multiprocessors idle. Else a
        head, of which 32 KB are on their way, 24 KB with states of half the size. Where
        no heads share keys, and with float32: 40 KB in shared memory while all of the
        batch is on the card at once, and the whole head in registers from 128 rows on,
        since long bursts of loads and of stores are what the memory takes best.
    """
    # Of wider keys the registers would not be enough.
    max_registers = 128 if key_dim <= 128 else None
    if rows < 4:
        block_v = max(16 if rows < 3 else 32, values_per_key // MAX_CLUSTER)
        return DeltaDecodeConfig(
            block_v=block_v, tile_v=block_v, key_lanes=8, max_registers=max_registers
        )
    is_float32 = dtype == "float32"
    if is_float32 and values_per_key == value_dim:
        if rows < 32:
            return DeltaDecodeConfig(
                block_v=value_dim, stages=5, is_in_shared=True, max_registers=None
            )
        if rows >= 128 and key_dim <= 128:
            return DeltaDecodeConfig(
                block_v=value_dim, tile_v=value_dim, max_registers=None
            )
    return DeltaDecodeConfig(
        block_v=max(value_dim, values_per_key // MAX_CLUSTER),
        stages=max(1, (512 if is_float32 else 768) // key_dim),
        max_registers=max_registers,
    )


def delta_decode(
    buffer: UInt32[Array, "state_rows state_words"],
    windows: UInt32[Array, "window_rows window_words"] | None,
    qkv: Float[Array, "rows query_len channels"],
    gate_logits: Float[Array, "rows query_len gates"],
    beta_logits: Float[Array, "rows query_len heads"],
    weight: Float[Array, "channels 4"],
    bias: Float[Array, " channels"] | None,
    a_log: Float[Array, " heads"],
    dt_bias: Float[Array, " gates"],
    slots: Int32[Array, " rows"],
    is_fresh: Bool[Array, " rows"],
    *,
    num_key_heads: int,
    state: PartPlace,
    window: PartPlace,
    lower_bound: float | None = None,
    is_silu: bool = True,
    config: DeltaDecodeConfig | None = None,
) -> tuple[
    UInt32[Array, "state_rows state_words"],
    UInt32[Array, "window_rows window_words"] | None,
    Float[Array, "rows query_len heads value_dim"],
]:
    """Advances the windows and states of a batch by its tokens, in place.

    Args:
        buffer: the whole pool.
        windows: the whole pool of windows; None if they lie in `buffer`.
        qkv: raw inputs of the convolution: q of all key heads, then k, then v.
        gate_logits: before the gate; per head, or per head and key channel.
        beta_logits: before the sigmoid.
        weight: taps of the convolution, the last for the current token.
        bias: of the convolution.
        a_log: of the gate.
        dt_bias: of the gate, added to the logits.
        slots: first row of each slot. One that does not lie in the pool is absent: its
            row reads and writes nothing and its output is 0.
        is_fresh: whether a row starts from zeros, whatever its slot holds.
        num_key_heads: heads of q and of k; they divide the heads, and are as many if
            there is a decay per key channel.
        state: where the states lie, `[heads, value_dim, key_dim]`.
        window: where the windows lie, `[3, channels]`.
        lower_bound: of the bounded gate; None for the softplus gate.
        is_silu: whether the convolution ends in SiLU.
        config: tuning; the default depends on the batch.

    Returns:
        The pool or pools, and the outputs in the dtype of `qkv`.

    Raises:
        ValueError: a dimension is no power of two, heads share keys but have decays
            per key channel, or the programs that share a window are more than a
            cluster can hold.
    """
    rows, query_len, _ = qkv.shape
    heads, value_dim, key_dim = state.shape
    for name, dim in (("key_dim", key_dim), ("value_dim", value_dim)):
        if dim < 16 or dim & (dim - 1):
            raise ValueError(f"{name}={dim} must be a power of two, at least 16")
    is_per_channel = dt_bias.shape[0] != heads
    if is_per_channel and num_key_heads != heads:
        raise ValueError(
            f"{num_key_heads=} must be {heads=}: decays are per head and key channel"
        )
    values_per_key = heads // num_key_heads * value_dim
    if config is None:
        config = default_config(rows, values_per_key, value_dim, key_dim, state.dtype)
    block_v = min(config.block_v, values_per_key)
    if values_per_key % block_v or block_v & (block_v - 1):
        block_v = min(block_v, value_dim)
    cluster_size = values_per_key // block_v
    if cluster_size > MAX_CLUSTER:
        raise ValueError(
            f"{block_v=} makes {cluster_size} programs for the {values_per_key} values "
            f"that share a key head: at most {MAX_CLUSTER}"
        )
    # A pool may not be passed twice: a second one that is not there is a few words.
    is_one_pool = windows is None
    windows_shape = (4,) if is_one_pool else windows.shape
    buffer, written, out = launch(
        # What decorates it says that it may return something else.
        typing.cast(triton.JITFunction, delta_decode_kernel),
        qkv,
        gate_logits,
        beta_logits,
        weight,
        weight if bias is None else bias,
        a_log,
        dt_bias,
        slots,
        is_fresh,
        # As arrays, so that one compiled kernel serves all layers; NumPy arrays, which
        # are constants of the program and not more arguments of it.
        np.asarray([state.row], np.int32),
        np.asarray([window.row], np.int32),
        buffer,
        slots if is_one_pool else windows,
        outputs=[
            jax.ShapeDtypeStruct(buffer.shape, buffer.dtype),
            jax.ShapeDtypeStruct(windows_shape, buffer.dtype),
            jax.ShapeDtypeStruct((rows, query_len, heads, value_dim), qkv.dtype),
        ],
        aliases={11: 0} if is_one_pool else {11: 0, 12: 1},
        grid=(rows * num_key_heads * cluster_size,),
        num_warps=config.num_warps,
        cluster_size=cluster_size,
        max_registers=config.max_registers,
        T=query_len,
        H=heads,
        KEY_HEADS=num_key_heads,
        K=key_dim,
        V=value_dim,
        BLOCK_V=block_v,
        TILE_V=min(config.tile_v, block_v),
        STAGES=config.stages,
        IS_IN_SHARED=config.is_in_shared,
        KEY_LANES=config.key_lanes,
        STATE_DTYPE=state.dtype,
        WINDOW_DTYPE=window.dtype,
        IS_ONE_POOL=is_one_pool,
        IS_PER_CHANNEL=is_per_channel,
        LOWER_BOUND=lower_bound,
        HAS_BIAS=bias is not None,
        IS_SILU=is_silu,
        STATE_ROW_WORDS=state.row_words,
        WINDOW_ROW_WORDS=window.row_words,
        LAST_ROW=state.last_row,
    )
    return buffer, None if is_one_pool else written, out
