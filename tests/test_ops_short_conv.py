"""Short convolution on windows in the pool, against its float64 oracle."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.comparison import assert_matches
from tests.gpu_compile import requires_h200_compiler
from tests.oracles import short_conv as oracle
from tests.state_pools import StatePool, round_to
from tests.triton_interpreter import (
    IS_INTERPRETING,
    assert_passes_in_the_interpreter,
    interpret_launches,
)
from ukv.errors import IdSpaceError, UnsupportedError
from ukv.ids import KernelBlocks, PhysicalPages
from ukv.ops import ShortConv, short_conv_decode, short_conv_prefill
from ukv.ops.short_conv import short_conv_prefill_parts
from ukv.spec import gdn_state_spec, kda_state_spec

CHANNELS = 2 * (2 * 24 + 40)
DTYPES = ["float32", "bfloat16"]
CASES = [
    ("high", "float32", "float32", 4, True, False),
    ("static", "bfloat16", "bfloat16", 4, True, True),
    ("float", "bfloat16", "float32", 3, False, True),
]
IDS = ["high-f32-W4-silu", "static-bf16-W4-silu-bias", "float-bf16-f32-W3-bias"]

prefill = jax.jit(short_conv_prefill, static_argnames=("view", "implementation"))
decode = jax.jit(short_conv_decode, static_argnames="view")
by_implementation = pytest.mark.parametrize(
    "implementation",
    ["xla", pytest.param("triton", marks=(pytest.mark.gpu, pytest.mark.triton))],
)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Triton's interpreter in the place of a card."""
    interpret_launches(monkeypatch, "short_conv")


@pytest.mark.skipif(IS_INTERPRETING, reason="this is that process")
@requires_h200_compiler
def test_the_kernel_passes_in_the_interpreter():
    assert_passes_in_the_interpreter(__file__)


def make_pool(placement="high", storage="float32", conv_width=4) -> StatePool:
    spec = kda_state_spec(
        name="state",
        num_layers=2,
        num_heads=2,
        key_dim=24,
        value_dim=40,
        conv_width=conv_width,
        conv_dtype=storage,
    )
    return StatePool.create(spec, placement, part="conv", num_slots=12)


def make_conv(rng, conv_width=4, is_silu=True, has_bias=False) -> ShortConv:
    bias = jnp.asarray(rng.standard_normal(CHANNELS), jnp.float32)
    return ShortConv(
        weight=jnp.asarray(rng.standard_normal((CHANNELS, conv_width)), jnp.float32),
        bias=bias if has_bias else None,
        is_silu=is_silu,
    )


def expected(x, conv: ShortConv, window):
    """The oracle has no bias: one more channel-wise tap on a constant 1 gives it."""
    weight, window = np.asarray(conv.weight), np.asarray(window, np.float64)
    if conv.bias is None:
        return oracle.short_conv(x, weight, window, silu=conv.is_silu)
    linear, state = oracle.short_conv(x, weight, window, silu=False)
    linear = linear + np.asarray(conv.bias, np.float64)
    return (linear / (1 + np.exp(-linear)) if conv.is_silu else linear), state


def check(actual, truth, dtype, conv_width=4):
    assert_matches(
        actual, truth, dtype=dtype, reduced_len=conv_width + 1, row_axes=(0,)
    )


def draw_windows(pool: StatePool, rng, slots):
    return {
        slot: round_to(rng.standard_normal(pool.view.shape), pool.view.dtype)
        for slot in slots
    }


@pytest.mark.parametrize(
    ("placement", "storage", "dtype", "width", "silu", "bias"), CASES, ids=IDS
)
@by_implementation
def test_packed_rows_match_the_oracle(
    placement, storage, dtype, width, silu, bias, implementation
):
    rng = np.random.default_rng(0)
    pool, conv = make_pool(placement, storage, width), make_conv(rng, width, silu, bias)
    lens = [1, 2, 0, 65, 3, 4, 130, 5]
    slots = [7, 2, 9, 3, 11, 1, 4, None]
    is_fresh = [False, True, False, False, True, False, True, True]
    cu = np.cumsum([0, *lens])
    # The last row is padding in the pool, the last five tokens are of no row.
    x = round_to(rng.standard_normal((cu[-1] + 5, CHANNELS)), dtype)
    x[cu[-2] :] = np.nan
    windows = draw_windows(pool, rng, [7, 9, 3, 1])
    before = pool.put(windows)
    checkpoints = [[None, None] for _ in lens]
    checkpoints[3], checkpoints[6] = [5, 6], [8, 10]
    checkpoint_lens = np.zeros((len(lens), 2), int)
    checkpoint_lens[3], checkpoint_lens[6] = [64, 0], [128, 63]

    after, y = prefill(
        before,
        pool.view,
        jnp.asarray(x),
        conv,
        jnp.asarray(cu, jnp.int32),
        pool.slots(slots, is_fresh, checkpoints, checkpoint_lens),
        implementation=implementation,
    )
    for row, (slot, fresh) in enumerate(zip(slots[:-1], is_fresh, strict=False)):
        tokens = x[cu[row] : cu[row + 1]]
        window = np.zeros(pool.view.shape) if fresh else windows[slot]
        truth, last = expected(tokens, conv, window)
        if len(tokens):
            check(np.asarray(y)[cu[row] : cu[row + 1]], truth, dtype, width)
        np.testing.assert_array_equal(
            pool.get(after, slot), round_to(last, pool.view.dtype)
        )
    assert np.all(np.asarray(y)[cu[-2] :] == 0)
    for row, slot, length in ((3, 5, 64), (3, 6, 0), (6, 8, 128)):
        window = windows[3] if row == 3 else np.zeros(pool.view.shape)
        _, last = expected(x[cu[row] : cu[row] + length], conv, window)
        np.testing.assert_array_equal(
            pool.get(after, slot), round_to(last, pool.view.dtype)
        )
    # 63 is not on the grid: slot 10 keeps its bytes.
    pool.assert_only_written(before, after, [7, 2, 9, 3, 11, 1, 4, 5, 6, 8])


@pytest.mark.parametrize(
    ("placement", "storage", "dtype", "width", "silu", "bias"), CASES, ids=IDS
)
@pytest.mark.parametrize("query_len", [1, 2, 4])
def test_decode_matches_the_oracle(
    placement, storage, dtype, width, silu, bias, query_len
):
    rng = np.random.default_rng(1)
    pool, conv = make_pool(placement, storage, width), make_conv(rng, width, silu, bias)
    slots, is_fresh = [6, None, 2, 9], [False, False, True, False]
    x = round_to(rng.standard_normal((4, query_len, CHANNELS)), dtype)
    x[1] = np.nan
    windows = draw_windows(pool, rng, [6, 9])
    before = pool.put(windows)
    after, y = decode(
        before, pool.view, jnp.asarray(x), conv, pool.slots(slots, is_fresh)
    )
    for row in (0, 2, 3):
        slot = slots[row]
        window = np.zeros(pool.view.shape) if is_fresh[row] else windows[slot]
        truth, last = expected(x[row], conv, window)
        check(np.asarray(y)[row], truth, dtype, width)
        np.testing.assert_array_equal(
            pool.get(after, slot), round_to(last, pool.view.dtype)
        )
    assert np.all(np.asarray(y)[1] == 0)
    pool.assert_only_written(before, after, [6, 2, 9])


@pytest.mark.parametrize("dtype", DTYPES)
@by_implementation
def test_random_splits_and_single_tokens_equal_the_whole(dtype, implementation):
    rng = np.random.default_rng(2)
    pool, conv = make_pool("high", dtype), make_conv(rng)
    num_tokens = 40
    x = round_to(rng.standard_normal((num_tokens, CHANNELS)), dtype)
    truth, last = expected(x, conv, np.zeros(pool.view.shape))

    def run(cuts, slots):
        buffers, y, done, previous = pool.put({}), [], 0, None
        for cut, slot in zip([*cuts, num_tokens], slots, strict=True):
            # Between two steps the window moves to another slot.
            if done:
                buffers = pool.put({slot: pool.get(buffers, previous)})
            piece = np.full_like(x, np.nan)
            piece[: cut - done] = x[done:cut]
            buffers, out = prefill(
                buffers,
                pool.view,
                jnp.asarray(piece),
                conv,
                jnp.asarray([0, cut - done], jnp.int32),
                pool.slots([slot], [done == 0]),
                implementation=implementation,
            )
            y.append(np.asarray(out)[: cut - done])
            previous, done = slot, cut
        return np.concatenate(y), pool.get(buffers, previous)

    whole, window = run([], [3])
    check(whole, truth, dtype)
    np.testing.assert_array_equal(window, round_to(last, pool.view.dtype))
    for cuts, slots in (([1, 2, 5, 37], [5, 1, 5, 2, 8]), ([13], [2, 9])):
        y, final = run(cuts, slots)
        np.testing.assert_array_equal(y, whole)
        np.testing.assert_array_equal(final, window)

    buffers, y = pool.put({}), []
    for t in range(num_tokens):
        buffers, out = decode(
            buffers,
            pool.view,
            jnp.asarray(x[None, t : t + 1]),
            conv,
            pool.slots([4], [t == 0]),
        )
        y.append(np.asarray(out)[0])
    check(np.concatenate(y), truth, dtype)
    np.testing.assert_array_equal(pool.get(buffers, 4), window)


def test_the_windows_of_gdn_are_convolved_too():
    rng = np.random.default_rng(3)
    spec = gdn_state_spec(
        name="gdn",
        num_layers=1,
        num_key_heads=1,
        num_value_heads=2,
        key_dim=8,
        value_dim=4,
        conv_width=2,
        conv_dtype="float32",
    )
    pool = StatePool.create(spec, "low", part="conv", num_slots=4)
    conv = ShortConv(weight=jnp.asarray(rng.standard_normal((24, 2)), jnp.float32))
    x = round_to(rng.standard_normal((1, 1, 24)), "float32")
    windows = draw_windows(pool, rng, [2])
    _, y = decode(
        pool.put(windows), pool.view, jnp.asarray(x), conv, pool.slots([2], [False])
    )
    check(np.asarray(y)[0], expected(x[0], conv, windows[2])[0], "float32", 2)


@pytest.mark.parametrize(
    "fault", ["none", "zeros", "stale_window", "other_slot", "taps_reversed", "no_silu"]
)
def test_the_comparison_rejects_faults(fault):
    rng = np.random.default_rng(4)
    pool, conv = make_pool(), make_conv(rng)
    x = round_to(rng.standard_normal((1, 2, CHANNELS)), "float32")
    windows = draw_windows(pool, rng, [1, 2])
    is_fresh = fault == "stale_window"
    used = {
        "taps_reversed": conv.replace(weight=conv.weight[:, ::-1]),
        "no_silu": conv.replace(is_silu=False),
    }.get(fault, conv)
    slot = 2 if fault == "other_slot" else 1
    _, y = short_conv_decode(
        pool.put(windows), pool.view, jnp.asarray(x), used, pool.slots([slot], [False])
    )
    if fault == "zeros":
        y = jnp.zeros_like(y)
    window = np.zeros(pool.view.shape) if is_fresh else windows[1]
    truth, _ = expected(x[0], conv, window)
    if fault == "none":
        check(np.asarray(y)[0], truth, "float32")
        return
    with pytest.raises(AssertionError, match="rows and"):
        check(np.asarray(y)[0], truth, "float32")


@pytest.mark.usefixtures("unchecked")
def test_wrong_use_is_refused():
    rng = np.random.default_rng(5)
    pool, conv = make_pool(), make_conv(rng)
    buffers, slots = pool.put({}), pool.slots([1, 2], [True, True])
    x = jnp.zeros((2, 1, CHANNELS))
    call = ft.partial(short_conv_decode, buffers, pool.view)
    with pytest.raises(ValueError, match=r"conv_width - 1, channels\] = \(2, 176\)"):
        call(x, make_conv(rng, 3), slots)
    with pytest.raises(ValueError, match="x has 88 channels"):
        call(x[:, :, :88], conv, slots)
    physical = PhysicalPages(slots.slots.ids, "state")
    with pytest.raises(IdSpaceError, match="not physical page ids"):
        call(x, conv, slots.replace(slots=physical))
    other = KernelBlocks(slots.slots.ids, "other")
    with pytest.raises(IdSpaceError, match="not of 'other'"):
        call(x, conv, slots.replace(slots=other))
    with pytest.raises(ValueError, match=r"is_fresh has shape \(1,\)"):
        call(x, conv, slots.replace(is_fresh=jnp.ones(1, bool)))
    with pytest.raises(UnsupportedError, match="works 'xla'"):
        call(x, conv, slots, implementation="triton")
    with pytest.raises(ValueError, match=r"widths=\(8, 8\) must add up to the 176"):
        short_conv_prefill_parts(
            buffers,
            pool.view,
            x[:, 0],
            conv,
            jnp.asarray([0, 1, 2], jnp.int32),
            slots,
            widths=(8, 8),
        )
    long = make_pool(conv_width=5)
    with pytest.raises(UnsupportedError, match="up to 4 taps, not 5; works 'xla'"):
        short_conv_prefill(
            long.put({}),
            long.view,
            x[:, 0],
            make_conv(rng, 5),
            jnp.asarray([0, 1, 2], jnp.int32),
            slots,
            implementation="triton",
        )
    with pytest.raises(ValueError, match="cu_query_lens has 2 entries, 2 rows need 3"):
        short_conv_prefill(
            buffers, pool.view, x[:, 0], conv, jnp.asarray([0, 2], jnp.int32), slots
        )
    uneven = pool.slots([1, 2], [True, True], [[3], [4]], [[0, 0], [0, 0]])
    with pytest.raises(ValueError, match="give a length for each slot"):
        short_conv_prefill(
            buffers, pool.view, x[:, 0], conv, jnp.asarray([0, 1, 2], jnp.int32), uneven
        )
