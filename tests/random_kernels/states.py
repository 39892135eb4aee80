"""Random structures of recurrent layers: decode steps and chunked prefill."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from tests import delta_step_layers as delta_step
from tests import test_ops_delta_prefill as prefill
from tests import test_ops_mamba2 as mamba2
from tests import test_ops_short_conv as short_conv
from tests.comparison import assert_matches
from tests.recurrent_cases import Kind
from tests.state_pools import StatePool, round_to
from ukv.implementation import OpCase

ROWS = 4
CONV_TOKENS = ROWS * 104 + 5
SLOTS = 8
"""Slots of a pool that may be held; slot 0 is the null page of a static pool."""


def _draw_slots(rng) -> tuple[list[int | None], list[bool]]:
    """Slots of a batch, some absent, and which rows start from zeros."""
    slots = (1 + rng.permutation(SLOTS)[:ROWS]).tolist()
    absent, fresh = rng.random(ROWS) < 0.2, rng.random(ROWS) < 0.3
    absent[rng.integers(ROWS)] = False
    return [
        None if a else s for s, a in zip(slots, absent, strict=True)
    ], fresh.tolist()


def _moved(slots: list[int | None]) -> list[int | None]:
    """The same slots one further on."""
    return [None if slot is None else slot % SLOTS + 1 for slot in slots]


def _assert_equal(layers, before, after, slots) -> None:
    """Nothing but the entries of some slots has changed."""
    held = [slot for slot in slots if slot is not None]
    for old, new in zip(layers(before, held), layers(after, held), strict=True):
        np.testing.assert_array_equal(old, new)


def _compare_step(actual, truth, layer, query_len, dtype) -> None:
    """Compare as the tests of the op do, all heads of a token together.

    With bfloat16 tokens, q, k and v may be rounded before the recurrence: an element is
    then a sum of rounded products, as in a prefill.
    """
    is_rounded = "bfloat16" in (dtype, layer.dtype)
    rounded = "bfloat16" if is_rounded else "float32"
    assert_matches(
        np.asarray(actual, rounded),
        truth,
        dtype=rounded,
        accumulate_dtype="tensorfloat32" if layer.dtype == "bfloat16" else None,
        reduced_len=query_len + layer.key_dim + 5,
        row_axes=(0,),
    )


def _check_step(layer, query_len, implementation, seed) -> None:
    rng = np.random.default_rng(seed)
    slots, is_fresh = _draw_slots(rng)
    tokens = layer.tokens(rng, ROWS, query_len)
    for x in tokens.values():
        x[[slot is None for slot in slots]] = np.nan
    states, windows = delta_step.draw(layer, rng, range(1, SLOTS + 1))
    before = layer.put(states, windows)
    after, out = layer.run(before, tokens, slots, is_fresh, implementation)
    state, window = layer.pools
    for row, slot in enumerate(slots):
        if slot is None:
            assert np.all(out[row] == 0)
            continue
        starts = states[slot], windows[slot]
        if is_fresh[row]:
            starts = tuple(np.zeros(pool.view.shape) for pool in layer.pools)
        expected = layer.expected(delta_step.take(tokens, row), *starts)
        _compare_step(out[row], expected[0], layer, query_len, layer.dtype)
        _compare_step(
            state.get(after, slot), expected[1], layer, query_len, layer.storage
        )
        last = round_to(expected[2], window.view.dtype)
        np.testing.assert_array_equal(window.get(after, slot), last)
    _assert_equal(layer.erased, before, after, slots)
    moved = _moved(slots)
    places = [(a, b) for a, b in zip(slots, moved, strict=True) if a is not None]
    again, out_again = layer.run(
        layer.put(*({b: x[a] for a, b in places} for x in (states, windows))),
        tokens,
        moved,
        is_fresh,
        implementation,
    )
    np.testing.assert_array_equal(out, out_again)
    for a, b in places:
        np.testing.assert_array_equal(state.get(after, a), state.get(again, b))


def draw_step(rng, implementation, max_len, index, *, kind: str):
    """Return a structure of a decode step: its facts and its check."""
    del max_len, index
    storage, conv, dtype = (str(rng.choice(["float32", "bfloat16"])) for _ in range(3))
    layer = delta_step.Layer(
        kind=kind,
        storage=storage,
        conv_dtype=conv,
        dtype=dtype,
        placement=str(rng.choice(["low", "float", "high", "static"])),
        has_bias=bool(rng.random() < 0.5),
        lower_bound=-5.0 if kind == "kda" and rng.random() < 0.3 else None,
        heads=int(rng.choice([2, 4, 6])),
        key_dim=int(rng.choice([64, 128])),
        value_dim=int(rng.choice([64, 128])),
    )
    query_len = int(rng.integers(1, 5))
    case = OpCase(
        page_size=1,
        storage_dtype=storage,
        compute_dtype=dtype,
        widths=(layer.key_dim, layer.value_dim, 4),
    )
    return case, functools.partial(_check_step, layer, query_len, implementation)


def _check_prefill(kind, pool, gate, implementation, seed) -> None:
    rng = np.random.default_rng(seed)
    slots, is_fresh = _draw_slots(rng)
    lens = rng.choice([0, 1, 3, 63, 64, 65, 100, int(rng.integers(1, 104))], ROWS)
    lens[rng.integers(ROWS)] = 104
    gates = str(rng.choice(["mild", "strong", "mixed", "none"]))
    rows = [
        (prefill.draw_tokens(kind, rng, int(n), gates), slot, fresh)
        for n, slot, fresh in zip(lens, slots, is_fresh, strict=True)
    ]
    states = {
        slot: round_to(rng.standard_normal(pool.view.shape) * 0.3, pool.view.dtype)
        for slot in range(1, SLOTS + 1)
    }
    before = pool.put(states)
    after, outs = prefill.run(kind, pool, gate, before, rows, implementation)
    for (tokens, slot, fresh), out in zip(rows, outs, strict=False):
        if slot is None:
            assert np.all(out == 0)
            continue
        start = np.zeros(pool.view.shape) if fresh else states[slot]
        if not len(out):
            np.testing.assert_array_equal(
                pool.get(after, slot), np.asarray(start, pool.view.dtype)
            )
            continue
        start = np.asarray(start, np.float64)
        truth, last, sizes = kind.expected_with_sizes(tokens, gate, start)
        prefill.check(out, truth, len(out), head_axis=1, sizes=sizes)
        prefill.check(pool.get(after, slot), last, len(out), head_axis=0)
    pool.assert_only_written(before, after, [s for s in slots if s is not None])
    moved = _moved(slots)
    places = [(a, b) for a, b in zip(slots, moved, strict=True) if a is not None]
    there = [
        (tokens, slot, fresh)
        for (tokens, _, fresh), slot in zip(rows, moved, strict=True)
    ]
    start = pool.put({b: states[a] for a, b in places})
    again, outs_again = prefill.run(kind, pool, gate, start, there, implementation)
    for one, other in zip(outs, outs_again, strict=True):
        np.testing.assert_array_equal(one, other)
    for a, b in places:
        np.testing.assert_array_equal(pool.get(after, a), pool.get(again, b))


def draw_prefill(rng, implementation, max_len, index, *, name: str):
    """Return a structure of a prefill: its facts and its check."""
    del max_len, index
    heads = int(rng.choice([2, 4]))
    kind = Kind(
        H=heads,
        I=heads if name == "kda" else heads // 2,
        K=int(rng.choice([64, 128])),
        V=int(rng.choice([64, 128])),
        decode=None,
        prefill=prefill.PREFILLS[name],
    )
    storage = str(rng.choice(["float32", "bfloat16"]))
    pool = StatePool.create(
        kind.spec(storage),
        str(rng.choice(["low", "float", "high", "static"])),
        part="recurrent",
        num_slots=SLOTS + 1,
    )
    gate = kind.gate(rng)
    case = OpCase(
        page_size=1,
        storage_dtype=storage,
        compute_dtype="bfloat16",
        widths=(kind.K, kind.V),
    )
    if implementation == "triton":
        chunk, scan = map(str, rng.choice(["triton", "gluon"], 2))
        kind = prefill.configured(kind, chunk=chunk, scan=scan)
    check = functools.partial(_check_prefill, kind, pool, gate, implementation)
    return case, check


def _check_mamba2(pool, parameters, dtype, query_len, implementation, seed) -> None:
    rng = np.random.default_rng(seed)
    slots, is_fresh = _draw_slots(rng)
    tokens = mamba2.draw_tokens(rng, ROWS, query_len, dtype)
    for x in tokens.values():
        x[[slot is None for slot in slots]] = np.nan
    states = {
        slot: round_to(rng.standard_normal(pool.view.shape), pool.view.dtype)
        for slot in range(1, SLOTS + 1)
    }
    run = functools.partial(mamba2.run, implementation=implementation)
    before = pool.put(states)
    after, out = run(pool, parameters, before, tokens, slots, is_fresh)
    for row, slot in enumerate(slots):
        if slot is None:
            assert np.all(out[row] == 0)
            continue
        start = np.zeros(pool.view.shape) if is_fresh[row] else states[slot]
        truth, last = mamba2.expected(tokens, parameters, row, start)
        mamba2.check_drawn(out[row], truth, dtype, query_len)
        mamba2.check(pool.get(after, slot), last, pool.view.dtype, query_len)
    pool.assert_only_written(before, after, [s for s in slots if s is not None])
    moved = _moved(slots)
    places = [(a, b) for a, b in zip(slots, moved, strict=True) if a is not None]
    start = pool.put({b: states[a] for a, b in places})
    again, out_again = run(pool, parameters, start, tokens, moved, is_fresh)
    np.testing.assert_array_equal(out, out_again)
    for a, b in places:
        np.testing.assert_array_equal(pool.get(after, a), pool.get(again, b))


def draw_mamba2(rng, implementation, max_len, index):
    """Return a structure of a Mamba2 step: its facts and its check."""
    del max_len, index
    storage, dtype = (str(rng.choice(["float32", "bfloat16"])) for _ in range(2))
    placement = str(rng.choice(["low", "float", "high", "static"]))
    pool = mamba2.make_pool(placement, storage)
    case = OpCase(
        page_size=1,
        storage_dtype=storage,
        compute_dtype=dtype,
        widths=(mamba2.HEAD_DIM, mamba2.STATE_DIM),
    )
    parameters = mamba2.make_parameters(rng)
    query_len = int(rng.integers(1, 5))
    check = functools.partial(
        _check_mamba2, pool, parameters, dtype, query_len, implementation
    )
    return case, check


def _check_conv(pool, conv, dtype, implementation, seed) -> None:
    rng = np.random.default_rng(seed)
    slots, is_fresh = _draw_slots(rng)
    width = conv.weight.shape[1]
    lens = rng.choice([0, 1, width - 1, 63, 64, 65, int(rng.integers(1, 104))], ROWS)
    bounds = np.cumsum([0, *lens])
    x = round_to(rng.standard_normal((CONV_TOKENS, short_conv.CHANNELS)), dtype)
    x[bounds[-1] :] = np.nan
    for row, slot in enumerate(slots):
        if slot is None:
            x[bounds[row] : bounds[row + 1]] = np.nan
    windows = short_conv.draw_windows(pool, rng, range(1, SLOTS + 1))
    run = functools.partial(
        short_conv.prefill,
        view=pool.view,
        x=jnp.asarray(x),
        conv=conv,
        cu_query_lens=jnp.asarray(bounds, jnp.int32),
        implementation=implementation,
    )
    before = pool.put(windows)
    after, y = run(before, slots=pool.slots(slots, is_fresh))
    y = np.asarray(y)
    assert np.all(y[bounds[-1] :] == 0)
    for row, slot in enumerate(slots):
        part = slice(bounds[row], bounds[row + 1])
        if slot is None:
            assert np.all(y[part] == 0)
            continue
        window = np.zeros(pool.view.shape) if is_fresh[row] else windows[slot]
        truth, last = short_conv.expected(x[part], conv, window)
        if lens[row]:
            short_conv.check(y[part], truth, dtype, width)
        np.testing.assert_array_equal(
            pool.get(after, slot), round_to(last, pool.view.dtype)
        )
    pool.assert_only_written(before, after, [s for s in slots if s is not None])
    moved = _moved(slots)
    places = [(a, b) for a, b in zip(slots, moved, strict=True) if a is not None]
    start = pool.put({b: windows[a] for a, b in places})
    again, y_again = run(start, slots=pool.slots(moved, is_fresh))
    np.testing.assert_array_equal(y, np.asarray(y_again))
    for a, b in places:
        np.testing.assert_array_equal(pool.get(after, a), pool.get(again, b))


def draw_conv(rng, implementation, max_len, index):
    """Return a structure of a short convolution: its facts and its check."""
    del max_len, index
    storage, dtype = (str(rng.choice(["float32", "bfloat16"])) for _ in range(2))
    width = int(rng.choice([2, 3, 4]))
    placement = str(rng.choice(["low", "float", "high", "static"]))
    pool = short_conv.make_pool(placement, storage, width)
    is_silu, has_bias = (bool(rng.random() < 0.5) for _ in range(2))
    conv = short_conv.make_conv(rng, width, is_silu, has_bias)
    case = OpCase(
        page_size=1,
        storage_dtype=storage,
        compute_dtype=dtype,
        widths=(width, short_conv.CHANNELS),
    )
    return case, functools.partial(_check_conv, pool, conv, dtype, implementation)


DRAW: dict[str, Callable] = {
    "kda_decode_step": functools.partial(draw_step, kind="kda"),
    "gdn_decode_step": functools.partial(draw_step, kind="gdn"),
    "kda_prefill": functools.partial(draw_prefill, name="kda"),
    "gdn_prefill": functools.partial(draw_prefill, name="gdn"),
    "mamba2_decode": draw_mamba2,
    "short_conv_prefill": draw_conv,
}
