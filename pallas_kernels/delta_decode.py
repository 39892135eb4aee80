"""Decode step of a gated delta rule layer, in place on the pool (Triton).

One pass over the state does all that lies between a layer's projections and its
output norm: the short convolution and the shift of its window, SiLU, the norms of q
and k, gate and beta, the update of the state and the output. KDA has one decay per
key channel, Gated DeltaNet one per head and fewer heads of q and k than of v.

Importing this module imports Triton.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

from pallas_kernels.delta_decode_kernel import delta_decode_kernel
from pallas_kernels.triton_launch import launch

MAX_CLUSTER = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaDecodeConfig:
    """Tuning of the decode step.

    Attributes:
        block_v: value rows of a program, a power of two; the programs of the value
            heads of one key head form a cluster, so there may be at most 8.
        lane_keys: key channels that neighbouring lanes share, a power of two.
        num_warps: warps of a program.
    """

    block_v: int = 32
    lane_keys: int = 32
    num_warps: int = 4

    def __post_init__(self):
        """Checks the ranges."""
        for name in ("block_v", "lane_keys", "num_warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two")


def default_config(rows: int, values_per_key: int, value_dim: int) -> DeltaDecodeConfig:
    """Tuning for a batch of so many rows.

    Args:
        rows: rows of the batch.
        values_per_key: value heads of a key head.
        value_dim: elements of a value.

    Returns:
        Small blocks as long as the card has room for more programs, then large ones.
    """
    block_v, lane_keys = (32, 32) if rows < 8 else (128, 64)
    smallest = -(-values_per_key * value_dim // MAX_CLUSTER)
    return DeltaDecodeConfig(block_v=max(block_v, smallest), lane_keys=lane_keys)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotPlace:
    """Where the parts of one layer lie, counted in rows of the pool.

    Slot `s` of the batch starts at row `s`; the parts of the layer lie at the same
    distance from it in every slot.

    Attributes:
        row_words: uint32 words of a row, a multiple of 4.
        num_rows: rows of the pool.
        state_row: rows from a slot's start to the layer's state.
        window_row: rows from a slot's start to the layer's window.
        state_dtype: float32, bfloat16 or float16.
        window_dtype: float32, bfloat16 or float16.
    """

    row_words: int
    num_rows: int
    state_row: int
    window_row: int
    state_dtype: str
    window_dtype: str

    def __post_init__(self):
        """Checks the ranges."""
        if self.row_words % 4:
            raise ValueError(f"{self.row_words=} must be a multiple of 4")


def delta_decode(
    buffer: UInt32[Array, "pool_rows words"],
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
    key_dim: int,
    place: SlotPlace,
    lower_bound: float | None = None,
    is_silu: bool = True,
    config: DeltaDecodeConfig | None = None,
) -> tuple[
    UInt32[Array, "pool_rows words"],
    Float[Array, "rows query_len heads value_dim"],
]:
    """Advances the windows and states of a batch by its tokens, in place.

    Args:
        buffer: the whole pool.
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
        num_key_heads: heads of q and of k; they divide the heads.
        key_dim: elements of a key, a power of two.
        place: where the parts lie.
        lower_bound: of the bounded gate; None for the softplus gate.
        is_silu: whether the convolution ends in SiLU.
        config: tuning; the default depends on the batch.

    Returns:
        The pool, and the outputs in the dtype of `qkv`.

    Raises:
        ValueError: a dimension is no power of two, or the programs that share a
            window are more than a cluster can hold.
    """
    rows, query_len, channels = qkv.shape
    heads = a_log.shape[0]
    value_dim = (channels - 2 * num_key_heads * key_dim) // heads
    for name, dim in (("key_dim", key_dim), ("value_dim", value_dim)):
        if dim < 16 or dim & (dim - 1):
            raise ValueError(f"{name}={dim} must be a power of two, at least 16")
    if config is None:
        config = default_config(rows, heads // num_key_heads, value_dim)
    block_v, lane_keys = (
        min(config.block_v, value_dim),
        min(config.lane_keys, key_dim),
    )
    num_blocks = value_dim // block_v
    cluster_size = num_blocks * heads // num_key_heads
    if cluster_size > MAX_CLUSTER:
        raise ValueError(
            f"{block_v=} makes {cluster_size} programs for the {value_dim} values of "
            f"the {heads // num_key_heads} heads of a key head: at most {MAX_CLUSTER}"
        )
    state_bytes = heads * value_dim * key_dim * jnp.dtype(place.state_dtype).itemsize
    pool, out = launch(
        delta_decode_kernel,
        qkv,
        gate_logits,
        beta_logits,
        weight,
        weight if bias is None else bias,
        a_log,
        dt_bias,
        slots,
        is_fresh,
        # As an array, so that one compiled kernel serves all layers.
        jnp.asarray([place.state_row, place.window_row], jnp.int32),
        buffer,
        outputs=[
            jax.ShapeDtypeStruct(buffer.shape, buffer.dtype),
            jax.ShapeDtypeStruct((rows, query_len, heads, value_dim), qkv.dtype),
        ],
        aliases={10: 0},
        grid=(rows * heads * num_blocks,),
        num_warps=config.num_warps,
        cluster_size=cluster_size,
        T=query_len,
        H=heads,
        KEY_HEADS=num_key_heads,
        K=key_dim,
        V=value_dim,
        BLOCK_V=block_v,
        LANE_KEYS=lane_keys,
        STATE_DTYPE=place.state_dtype,
        WINDOW_DTYPE=place.window_dtype,
        IS_PER_CHANNEL=dt_bias.shape[0] != heads,
        LOWER_BOUND=lower_bound,
        HAS_BIAS=bias is not None,
        IS_SILU=is_silu,
        ROW_WORDS=place.row_words,
        LAST_ROW=place.num_rows - -(-state_bytes // (4 * place.row_words)),
    )
    return pool, out
