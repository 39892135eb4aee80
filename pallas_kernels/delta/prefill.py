"""Chunked prefill of a gated delta rule layer, in place on the pool (Triton, Gluon).

Rows of unequal length are packed one after the other and cut into chunks of 64 tokens
each. One kernel computes of all chunks at once what needs no state, another takes the
states from chunk to chunk. What passes between them is made for a segment of chunks at
a time: a few arrays of the size of its activations.

Both are in Triton (`delta_chunk_kernel` or `delta_head_chunk_kernel`, and
`delta_scan_kernel`), or both in Gluon (`delta_fragment_chunk_kernel` or
`delta_head_fragment_chunk_kernel`, and `delta_scan_gluon_kernel`), where those arrays
lie in the order in which the tensor core reads them.

Importing this module imports Triton.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import triton
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from pallas_kernels.card import is_hopper, num_multiprocessors
from pallas_kernels.delta.chunk_kernel import delta_chunk_kernel
from pallas_kernels.delta.fragment_chunk_kernel import delta_fragment_chunk_kernel
from pallas_kernels.delta.head_chunk_kernel import delta_head_chunk_kernel
from pallas_kernels.delta.head_fragment_chunk_kernel import (
    delta_head_fragment_chunk_kernel,
)
from pallas_kernels.delta.scan_gluon_kernel import delta_scan_gluon_kernel
from pallas_kernels.delta.scan_kernel import delta_scan_kernel
from pallas_kernels.part_place import PartPlace
from pallas_kernels.row_chunks import CHUNK, Checkpoints, cut_into_chunks
from pallas_kernels.triton_launch import launch

# What makes chunks independent, by whether each key channel decays on its own.
_CHUNK_KERNELS = {
    (True, "triton"): delta_chunk_kernel,
    (False, "triton"): delta_head_chunk_kernel,
    (True, "gluon"): typing.cast(triton.JITFunction, delta_fragment_chunk_kernel),
    (False, "gluon"): typing.cast(triton.JITFunction, delta_head_fragment_chunk_kernel),
}
_SCAN_KERNELS = {
    "triton": delta_scan_kernel,
    "gluon": typing.cast(triton.JITFunction, delta_scan_gluon_kernel),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaPrefillConfig:
    """Tuning of the prefill.

    Attributes:
        language: of the kernels. Those in Gluon have bfloat16 tokens, keys and values
            of 64 or 128 channels, and are for Hopper, compute capability 9.0; None
            takes them where they are.
        part: key channels that the kernels of a chunk in Triton hold in registers at a
            time.
        chunk_warps: warps of a program of theirs.
        block_v: value rows of a program that scans, in Gluon 64 or 128; None takes few
            for few rows.
        stages: chunks that the scan in Triton loads ahead.
        segment: chunks of a segment. A state rests in the pool between two of them,
            rounded if it is stored in bfloat16.
    """

    language: typing.Literal["triton", "gluon"] | None = None
    part: int = 32
    chunk_warps: int = 4
    block_v: int | None = None
    stages: int = 3
    segment: int = 2048

    def __post_init__(self):
        """Checks the ranges."""
        if self.language not in ("triton", "gluon", None):
            raise ValueError(f"{self.language=} must be 'triton', 'gluon' or None")
        for name in ("part", "chunk_warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two")
        if self.segment < 1:
            raise ValueError(f"{self.segment=} must be at least 1")


def _missing_in_gluon(dtypes: set[str], key_dim: int, value_dim: int) -> str:
    """Says what the kernels in Gluon lack, or ""."""
    if key_dim not in (64, 128) or value_dim not in (64, 128):
        return f"{key_dim=} and {value_dim=} must each be 64 or 128 in Gluon"
    return "" if dtypes == {"bfloat16"} else f"{dtypes=} must be bfloat16 in Gluon"


def _chunk_options(
    config: DeltaPrefillConfig, key_dim: int, *, is_gluon: bool, is_per_channel: bool
) -> dict[str, typing.Any]:
    """Returns how the kernel is launched that makes chunks independent."""
    if not is_gluon:
        return {"PART": min(config.part, key_dim), "num_warps": config.chunk_warps}
    # So three programs fit a multiprocessor, or four.
    max_registers = 168 if is_per_channel else 128
    return {"num_warps": 4, "max_registers": max_registers, "only_capability": 90}


def _scan_options(
    config: DeltaPrefillConfig,
    num_heads: int,
    num_rows: int,
    value_dim: int,
    *,
    is_gluon: bool,
) -> dict[str, int]:
    """Returns how the kernel is launched that scans."""
    if not is_gluon:
        block_v = min(config.block_v or (32 if num_rows < 4 else 64), value_dim)
        options = {"num_warps": 4, "num_stages": config.stages}
        return options | {"BLOCK_V": block_v, "STAGES": config.stages}
    # A program has a multiprocessor to itself. If all run at once, L2 is asked ahead;
    # else memory has enough to do.
    is_few = num_rows * num_heads * value_dim // 64 <= num_multiprocessors()
    block_v = min(config.block_v or (64 if is_few else 128), value_dim)
    if block_v not in (64, 128):
        raise ValueError(f"{block_v=} must be 64 or 128 in Gluon")
    options = {"num_warps": block_v // 16, "only_capability": 90}
    return options | {"BLOCK_V": block_v, "AHEAD": 2 if is_few else 0}


def delta_prefill(
    buffer: UInt32[Array, "pool_rows words"],
    q: Float[Array, "tokens key_heads key_dim"],
    k: Float[Array, "tokens key_heads key_dim"],
    v: Float[Array, "tokens heads value_dim"],
    gate_logits: Float[Array, "tokens gates"],
    beta_logits: Float[Array, "tokens heads"],
    a_log: Float[Array, " heads"],
    dt_bias: Float[Array, " gates"],
    cu_query_lens: Int32[Array, " bounds"],
    slots: Int32[Array, " rows"],
    is_fresh: Bool[Array, " rows"],
    checkpoints: Checkpoints | None,
    *,
    state: PartPlace,
    lower_bound: float | None = None,
    config: DeltaPrefillConfig | None = None,
) -> tuple[UInt32[Array, "pool_rows words"], Float[Array, "tokens heads value_dim"]]:
    """Advances the states of packed rows, in place.

    Args:
        buffer: the whole pool.
        q: queries, not normalised.
        k: keys, not normalised.
        v: values.
        gate_logits: before the gate; per head, or per head and key channel.
        beta_logits: before the sigmoid.
        a_log: of the gate.
        dt_bias: of the gate, added to the logits.
        cu_query_lens: exclusive prefix sum of the rows' lengths.
        slots: first row of each slot. One that does not lie in the pool is absent: its
            row reads and writes nothing and its outputs are 0.
        is_fresh: whether a row starts from zeros, whatever its slot holds.
        checkpoints: slots that get a state from inside a row, absent ones for none,
            and after how many tokens of the row: a multiple of 64 up to its length. At
            any other number nothing is written.
        state: where the states lie, `[heads, value_dim, key_dim]`.
        lower_bound: of the bounded gate; None for the softplus gate.
        config: tuning.

    Returns:
        The pool, and the outputs in the dtype of `v`; 0 for tokens of no row.

    Raises:
        ValueError: a dimension is no power of two of at least 16, or it or the dtype
            is none that the kernel has that `config` asks for.
    """
    config = DeltaPrefillConfig() if config is None else config
    heads, value_dim, key_dim = state.shape
    for name, dim in (("key_dim", key_dim), ("value_dim", value_dim)):
        if dim < 16 or dim & (dim - 1):
            raise ValueError(f"{name}={dim} must be a power of two, at least 16")
    num_tokens, num_rows = v.shape[0], slots.shape[0]
    starts, sizes, rows, first_chunks, counts = cut_into_chunks(
        cu_query_lens, num_tokens
    )
    absent = np.full((1,), -1, np.int32)
    slots = jnp.concatenate([slots, absent])
    is_fresh = jnp.concatenate([is_fresh, np.zeros((1,), np.bool_)])
    is_live = (slots >= 0) & (slots <= state.num_rows)
    live_sizes = jnp.where(is_live[rows], sizes, 0)
    num_checkpoints, to_slots, after_chunks = 0, absent, absent
    if checkpoints is not None:
        to_slots, lens = checkpoints
        num_checkpoints = lens.shape[1]
        is_wanted = (lens >= 0) & (lens <= jnp.diff(cu_query_lens)[:, None])
        is_wanted &= lens % CHUNK == 0
        after_chunks = jnp.where(is_wanted, lens // CHUNK, -1).reshape(-1)
        to_slots = to_slots.reshape(-1)
    max_chunks = starts.shape[0]
    segment_chunks = min(config.segment, max_chunks)
    num_segments = -(-max_chunks // segment_chunks)
    padding = (0, num_segments * segment_chunks - max_chunks)
    starts, sizes, live_sizes = (
        jnp.pad(x, padding) for x in (starts, sizes, live_sizes)
    )
    is_per_channel = dt_bias.shape[0] != heads
    offset = np.asarray([state.row], np.int32)
    missing = _missing_in_gluon({x.dtype.name for x in (q, k, v)}, key_dim, value_dim)
    language = config.language
    if language is None:
        language = "triton" if missing or not is_hopper() else "gluon"
    is_gluon = language == "gluon"
    if is_gluon and missing:
        raise ValueError(missing)
    chunk_options = _chunk_options(
        config, key_dim, is_gluon=is_gluon, is_per_channel=is_per_channel
    )
    scan_options = _scan_options(config, heads, num_rows, value_dim, is_gluon=is_gluon)

    def scratch(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((segment_chunks, heads, *shape), dtype)

    def run_segment(index, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        buffer, out = carry
        first = index * segment_chunks
        segment = np.zeros(1, np.int32) if num_segments == 1 else first.reshape(1)
        chunks = (starts, live_sizes, segment)
        u = scratch(value_dim, CHUNK)
        if is_gluon:
            between = [scratch(3 * CHUNK, key_dim), u]
        else:
            between = [scratch(2 * CHUNK, key_dim), u, scratch(CHUNK, key_dim)]
        between += [scratch(key_dim, dtype=jnp.float32), scratch(CHUNK, CHUNK)]
        own = []
        if is_per_channel and not is_gluon:
            own = [
                scratch(CHUNK, key_dim, dtype=jnp.float32),
                scratch(15, key_dim, dtype=jnp.float32),
                scratch(3, CHUNK, dtype=jnp.float32),
            ]
        made = launch(
            _CHUNK_KERNELS[is_per_channel, language],
            q,
            k,
            v,
            gate_logits,
            beta_logits,
            a_log,
            dt_bias,
            *chunks,
            outputs=between + own,
            grid=(segment_chunks * heads,),
            H=heads,
            KEY_HEADS=q.shape[1],
            K=key_dim,
            V=value_dim,
            LOWER_BOUND=lower_bound,
            **chunk_options,
        )
        buffer, out = launch(
            _SCAN_KERNELS[language],
            *made[: len(between)],
            starts,
            sizes,
            segment,
            first_chunks,
            counts,
            slots,
            is_fresh,
            to_slots,
            after_chunks,
            offset,
            buffer,
            out,
            outputs=[
                jax.ShapeDtypeStruct(buffer.shape, buffer.dtype),
                jax.ShapeDtypeStruct(v.shape, v.dtype),
            ],
            aliases={len(between) + 10: 0, len(between) + 11: 1},
            grid=((num_rows + 1) * heads * value_dim // scan_options["BLOCK_V"],),
            H=heads,
            K=key_dim,
            V=value_dim,
            SEGMENT=segment_chunks,
            CHECKPOINTS=num_checkpoints,
            STATE_IS_BF16=state.dtype == "bfloat16",
            ROW_WORDS=state.row_words,
            LAST_ROW=state.last_row,
            **scan_options,
        )
        return buffer, out

    carry = (buffer, jnp.empty(v.shape, v.dtype))
    if num_segments == 1:
        return run_segment(np.int32(0), carry)
    return lax.fori_loop(0, num_segments, run_segment, carry)
