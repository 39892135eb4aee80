"""Device functions for the decays of a chunk, of `pallas_kernels.delta.chunk_kernel`.

With `G` the running sum of the log2 decays of a chunk, per key channel, a product of
decayed keys has the terms `2^(G_i - G_j)`, `j <= i`. Each is made of two factors that
stay finite whatever the gate does:

* inside a block of 16 tokens, `2^(G_i - M)` and its reciprocal, where M is the middle
  of the block's decay. A token's log2 decay is cut at -15, so that both lie in 2^+-120;
  at most 2^-15 of what stood before the token is left by it;
* between blocks both sides decay towards a border between them: both are at most 1.

So a token costs one exponential and one reciprocal. The rest are products with
factors of its block, which are in a table.
"""

import typing

import triton
import triton.language as tl


@triton.jit
@typing.no_type_check
def reciprocal(x):
    """1 / x of the hardware, off by one unit in the last place."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
@typing.no_type_check
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return reciprocal(1.0 + tl.exp(-x))


@triton.jit
@typing.no_type_check
def _log2(x):
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
@typing.no_type_check
def log2_decay(logits, a_log, LOWER_BOUND: tl.constexpr):
    """The gate in log2 units, cut at -15."""
    LOG2E: tl.constexpr = 1.4426950408889634
    if LOWER_BOUND is None:
        # log2(1 + 2^x), exact for the small 2^x of a decay near 1.
        x = logits * LOG2E
        e = tl.exp2(tl.minimum(x, 30.0))
        small = e * (LOG2E - (0.5 * LOG2E) * e)
        softplus = tl.where(e < 1e-3, small, _log2(1.0 + e))
        decay = -tl.exp(a_log) * tl.where(x > 30.0, x, softplus)
    else:
        decay = (LOWER_BOUND * LOG2E) / (1.0 + tl.exp(-tl.exp(a_log) * logits))
    return tl.maximum(decay, -15.0)


@triton.jit
@typing.no_type_check
def _write_table(table_ptr, totals, CHANNELS: tl.constexpr):
    """Writes the table of the blocks' decays. Returns 2^G of the whole chunk."""
    # 2^4 of each factor has been left in what it is multiplied with.
    before = 0.0 * totals[0] - 4.0
    after = 0.0 * totals[0] + 4.0
    for b in tl.static_range(4):
        tl.store(table_ptr + b * CHANNELS, tl.exp2(0.5 * totals[b]))
        tl.store(table_ptr + (4 + b) * CHANNELS, tl.exp2(before))
        tl.store(table_ptr + (11 - b) * CHANNELS, tl.exp2(after))
        before += totals[b]
        after += totals[3 - b]
    one = 0.0 * totals[0] + 1.0
    tl.store(table_ptr + 12 * CHANNELS, tl.exp2(totals[1]))
    tl.store(table_ptr + 13 * CHANNELS, one)
    tl.store(table_ptr + 14 * CHANNELS, tl.exp2(totals[2]))
    return tl.exp2(before + 4.0)


@triton.jit
@typing.no_type_check
def write_decays(
    gate_logits_ptr,
    a_log_ptr,
    dt_bias_ptr,
    powers_ptr,
    table_ptr,
    size,
    head,
    H: tl.constexpr,
    K: tl.constexpr,
    LOWER_BOUND: tl.constexpr,
):
    """Writes the factors of a chunk of a head.

    A thread walks down the chunk with a channel of its own. `2^(G_i - M)` goes to
    `powers`, `[64, K]`, with M 4 below the middle: before the first token no decay of
    its own has come, so the factors are 2^-116 at the least and no normal key is lost.
    Of the 4 blocks of 16 tokens go to `table`, `[15, K]`, with D the block's decay:

    * 0 to 3: `2^(D / 2)`. It makes of a power the decay from 4 above the block's start,
      and of a reciprocal the one to 4 above its end;
    * 4 to 7: from the start of the chunk to 4 above that of the block;
    * 8 to 11: from 4 above the end of the block to that of the chunk;
    * 12 to 14: between the middle of the chunk and the border that faces it, of block
      0, of 1 and of 2, and of 3.

    Returns 2^G of the whole chunk, `[K]`.
    """
    channel = tl.arange(0, K)
    a_log = tl.load(a_log_ptr + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head * K + channel).to(tl.float32)
    gate_logits_ptr += head * K + channel
    powers_ptr += channel
    # All at once: stores in between would hold the later ones up.
    rows = ()
    for t in tl.static_range(64):
        row = tl.minimum(t, size - 1)
        rows += (tl.load(gate_logits_ptr + row * (H * K)),)
    totals = ()
    for b in tl.static_range(4):
        total = tl.zeros((K,), tl.float32)
        sums = ()
        for t in tl.static_range(16):
            logits = rows[16 * b + t].to(tl.float32) + dt_bias
            decay = log2_decay(logits, a_log, LOWER_BOUND)
            total += tl.where(16 * b + t < size, decay, 0.0)
            sums += (total,)
        middle = 0.5 * total - 4.0
        for t in tl.static_range(16):
            tl.store(powers_ptr + (16 * b + t) * K, tl.exp2(sums[t] - middle))
        totals += (total,)
    return _write_table(table_ptr + channel, totals, K)
