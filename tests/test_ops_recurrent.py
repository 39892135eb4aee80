"""KDA and GDN on states in the pool, against their float64 oracles."""

import dataclasses
import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.gpu_compile import (
    compile_for_h200,
    pool_sized_copies,
    requires_h200_compiler,
)
from tests.recurrent_cases import (
    KINDS,
    MAX_LEN,
    Row,
    draw_states,
    poison,
    put_on_device,
    run_decode,
    run_prefill,
    take,
    zeros,
)
from ukv.errors import IdSpaceError, UnsupportedError
from ukv.ids import ABSENT_BLOCK, KernelBlocks
from ukv.layout import PartView, unified_layout
from ukv.ops import (
    CHECKPOINT_GRID,
    CHUNK_SIZE,
    KdaGate,
    StateSlots,
    gdn_decode,
    gdn_prefill,
    kda_log_decay,
)
from ukv.ops.state_slots import slot_rows
from ukv.pool import pool_struct

CASES = [
    ("kda", "high", "float32", "float32"),
    ("kda", "float", "float32", "bfloat16"),
    ("gdn", "high", "float32", "float32"),
    ("gdn", "static", "bfloat16", "float32"),
]
by_kind = pytest.mark.parametrize("kind", KINDS)
by_case = pytest.mark.parametrize(("kind", "placement", "storage", "dtype"), CASES)


@by_case
def test_packed_rows_match_the_oracle(kind, placement, storage, dtype):
    kind, rng = KINDS[kind], np.random.default_rng(0)
    pool, gate = kind.pool(placement, storage), kind.gate(rng)
    lens = [130, 1, 64, 0, 2, 65, 63, 5]
    slots = [7, 2, 9, 11, 1, 3, 4, None]
    is_fresh = [False, False, True, False, True, False, True, False]
    rows = [
        Row(tokens=kind.tokens(rng, length, dtype=dtype), slot=slot, is_fresh=fresh)
        for length, slot, fresh in zip(lens, slots, is_fresh, strict=True)
    ]
    # The last row has tokens, but no slot: padding.
    rows[-1] = dataclasses.replace(
        rows[-1], tokens=poison(rows[-1].tokens, slice(None))
    )
    states = draw_states(pool, rng, [7, 2, 11, 3])
    before = pool.put(states)
    after, outs = run_prefill(kind, pool, gate, before, rows)
    for row, length, out in zip(rows[:-1], lens, outs, strict=False):
        start = zeros(pool) if row.is_fresh else states[row.slot]
        found = pool.get(after, row.slot)
        if length == 0:
            np.testing.assert_array_equal(found, start)
            continue
        truth, last = kind.expected(row.tokens, gate, start)
        kind.check(out, truth, dtype=dtype, num_tokens=length)
        kind.check(found, last, dtype=storage, num_tokens=length)
    assert np.all(outs[-1] == 0)
    pool.assert_only_written(before, after, [7, 2, 9, 11, 1, 3, 4])


@by_case
@pytest.mark.parametrize("query_len", [1, 3])
def test_decode_matches_the_oracle(kind, placement, storage, dtype, query_len):
    kind, rng = KINDS[kind], np.random.default_rng(1)
    pool, gate = kind.pool(placement, storage), kind.gate(rng)
    slots, is_fresh = [6, None, 2, 9], [False, False, True, False]
    tokens = poison(kind.tokens(rng, 4, query_len, dtype=dtype), 1)
    states = draw_states(pool, rng, [6, 9])
    before = pool.put(states)
    after, out = run_decode(kind, pool, gate, before, tokens, slots, is_fresh)
    for row in (0, 2, 3):
        start = zeros(pool) if is_fresh[row] else states[slots[row]]
        truth, last = kind.expected(take(tokens, row), gate, start)
        kind.check(out[row], truth, dtype=dtype, num_tokens=query_len)
        found = pool.get(after, slots[row])
        kind.check(found, last, dtype=storage, num_tokens=query_len)
    assert np.all(out[1] == 0)
    pool.assert_only_written(before, after, [6, 2, 9])


@by_kind
def test_random_splits_and_single_tokens_equal_the_whole(kind):
    kind, rng = KINDS[kind], np.random.default_rng(2)
    pool, gate = kind.pool(), kind.gate(rng)
    tokens = kind.tokens(rng, MAX_LEN)
    truth, last = kind.expected(tokens, gate, zeros(pool))
    random_cuts = sorted(rng.choice(MAX_LEN - 1, 3, replace=False) + 1)
    for cuts in ([], [1, 2, 65], random_cuts):
        buffers, done, outs, previous = pool.put({}), 0, [], None
        for cut, slot in zip([*cuts, MAX_LEN], [3, 1, 7, 2], strict=False):
            # Between two steps the state moves to another slot.
            if done:
                buffers = pool.put({slot: pool.get(buffers, previous)})
            piece = take(tokens, slice(done, cut))
            row = Row(tokens=piece, slot=slot, is_fresh=done == 0)
            buffers, (out,) = run_prefill(kind, pool, gate, buffers, [row])
            outs.append(out)
            done, previous = cut, slot
        kind.check(np.concatenate(outs), truth, num_tokens=MAX_LEN)
        kind.check(pool.get(buffers, previous), last, num_tokens=MAX_LEN)

    buffers, outs = pool.put({}), []
    for t in range(MAX_LEN):
        one = take(tokens, np.full((4, 1), t))
        slots, is_fresh = [None, 4, None, None], [t == 0] * 4
        buffers, out = run_decode(kind, pool, gate, buffers, one, slots, is_fresh)
        outs.append(out[1])
    kind.check(np.concatenate(outs), truth, num_tokens=MAX_LEN)
    kind.check(pool.get(buffers, 4), last, num_tokens=MAX_LEN)


@by_kind
def test_results_do_not_depend_on_the_slots(kind):
    kind, rng = KINDS[kind], np.random.default_rng(3)
    gate = kind.gate(rng)
    prompts = [kind.tokens(rng, length) for length in (70, 3, 16, 1)]
    steps = [kind.tokens(rng, 4, 1) for _ in range(3)]

    def run(slots_of_step, placements=("high",) * 4):
        pool = kind.pool(placements[0])
        rows = [
            Row(tokens=tokens, slot=slot, is_fresh=True)
            for tokens, slot in zip(prompts, slots_of_step[0], strict=True)
        ]
        buffers, outs = run_prefill(kind, pool, gate, pool.put({}), rows)
        previous = slots_of_step[0]
        for tokens, slots, placement in zip(
            steps, slots_of_step[1:], placements[1:], strict=True
        ):
            states = [pool.get(buffers, slot) for slot in previous]
            pool = kind.pool(placement)
            buffers = pool.put(dict(zip(slots, states, strict=True)))
            buffers, out = run_decode(
                kind, pool, gate, buffers, tokens, slots, [False] * 4
            )
            outs.append(out)
            previous = slots
        return [*outs, *(pool.get(buffers, slot) for slot in previous)]

    moved = [[9, 4, 12, 3], [12, 9, 4, 1], [4, 1, 2, 9], [5, 7, 3, 2]]
    expected = run([[1, 2, 3, 4]] * 4)
    for placements in (("high",) * 4, ("high", "static", "high", "float")):
        for a, b in zip(run(moved, placements), expected, strict=True):
            np.testing.assert_array_equal(a, b)


@by_kind
def test_checkpoints_equal_the_state_of_a_shorter_run(kind):
    kind, rng = KINDS[kind], np.random.default_rng(4)
    pool, gate = kind.pool(), kind.gate(rng)
    states = draw_states(pool, rng, [2])
    before = pool.put(states)
    first = Row(
        tokens=kind.tokens(rng, MAX_LEN),
        slot=1,
        is_fresh=True,
        checkpoints=((4, 128), (None, 64), (6, 64), (7, 63)),
    )
    second = Row(
        tokens=kind.tokens(rng, 70),
        slot=2,
        is_fresh=False,
        checkpoints=((8, 0), (9, 64), (10, 128), (11, -64)),
    )
    after, _ = run_prefill(kind, pool, gate, before, [first, second])
    for length, slots in ((128, {1: 4}), (64, {1: 6, 2: 9})):
        rows = [
            dataclasses.replace(
                row, tokens=take(row.tokens, slice(length)), checkpoints=()
            )
            for row in (first, second)
        ]
        shorter, _ = run_prefill(kind, pool, gate, before, rows)
        for slot, checkpoint in slots.items():
            np.testing.assert_array_equal(
                pool.get(after, checkpoint), pool.get(shorter, slot)
            )
    np.testing.assert_array_equal(pool.get(after, 8), states[2])
    # Off the grid, past the row, before the row: not written.
    pool.assert_only_written(before, after, [1, 2, 4, 6, 8, 9])


def test_the_bounded_gate():
    kind, rng = KINDS["kda"], np.random.default_rng(5)
    pool, gate = kind.pool(), kind.gate(rng, lower_bound=-5.0)
    tokens = kind.tokens(rng, 4, 3)
    log_decay = kda_log_decay(jnp.asarray(tokens["gate_logits"][0]), gate)
    assert np.all((np.asarray(log_decay) > -5) & (np.asarray(log_decay) < 0))
    truth, last = kind.expected(take(tokens, 0), gate, zeros(pool))
    buffers, out = run_decode(
        kind, pool, gate, pool.put({}), tokens, [3, None, None, None], [True] * 4
    )
    kind.check(out[0], truth, num_tokens=3)
    kind.check(pool.get(buffers, 3), last, num_tokens=3)


def test_gates_do_not_overflow():
    gate = KdaGate(a_log=jnp.asarray([3.0, -9.0]), dt_bias=jnp.zeros((2, 4)))
    logits = jnp.asarray([-1e30, -100.0, 100.0, 1e30], jnp.float32)
    logits = jnp.broadcast_to(logits, (1, 2, 4))
    for bound in (None, -5.0):
        log_decay = jax.jit(kda_log_decay)(logits, gate.replace(lower_bound=bound))
        assert np.all(np.isfinite(log_decay))
        assert np.all(np.asarray(log_decay) <= 0)
        slope = jax.jit(jax.grad(lambda x, g: kda_log_decay(x, g).sum()))
        assert np.all(np.isfinite(slope(logits, gate.replace(lower_bound=bound))))


# Mutations, addresses, refusals.


@by_kind
@pytest.mark.parametrize("op", ["decode", "prefill"])
def test_the_comparison_rejects_faults(kind, op):
    kind, rng = KINDS[kind], np.random.default_rng(12)
    pool, gate = kind.pool(), kind.gate(rng)
    tokens = kind.tokens(rng, 4, 3)
    states = draw_states(pool, rng, [3, 4])
    buffers = pool.put(states)

    def run(tokens=tokens, gate=gate, slot=3, is_fresh=False):
        if op == "decode":
            slots = [slot, None, None, None]
            args = kind, pool, gate, buffers, tokens, slots, [is_fresh] * 4
            return run_decode(*args)[1][0]
        row = Row(tokens=take(tokens, 0), slot=slot, is_fresh=is_fresh)
        return run_prefill(kind, pool, gate, buffers, [row])[1][0]

    truth, _ = kind.expected(take(tokens, 0), gate, states[3])
    faults = {
        "zeros": np.zeros_like(truth, np.float32),
        "heads": run()[:, ::-1],
        "slot": run(slot=4),
        "fresh": run(is_fresh=True),
        "gate": run(gate=gate.replace(a_log=gate.a_log + 0.1)),
        "beta": run(tokens | {"beta_logits": tokens["beta_logits"] + np.float32(0.1)}),
        "q_is_k": run(tokens | {"q": tokens["k"]}),
        "scale": run() * np.float32(2),
    }

    def is_accepted(out):
        try:
            kind.check(out, truth, num_tokens=3)
        except AssertionError:
            return False
        return True

    assert is_accepted(run())
    for name, out in faults.items():
        assert not is_accepted(out), name


def test_rows_of_slots_stay_inside_int32():
    # A pool of 2^31 - 1 kernel rows; entries of 3 rows, the layer 1000 rows down.
    view = PartView(
        sub_pool="state",
        part="recurrent",
        layer=1,
        shape=(1, 8, 8),
        dtype=np.dtype("float32"),
        page_size=1,
        row_bytes=128,
        rows_per_entry=3,
        block_offset=1000,
        buffer_index=0,
        num_rows=2**31 - 1,
    )
    last = 2**31 - 1 - 3 - 1000
    ids = [0, last, last + 1, ABSENT_BLOCK, -1, -(2**31)]
    blocks = KernelBlocks(jnp.asarray(ids, jnp.int32), "state")
    rows, is_present = slot_rows(view, blocks, "slots")
    absent = view.num_rows
    assert rows.tolist() == [1000, 2**31 - 4, absent, absent, absent, absent]
    assert is_present.tolist() == [True, True, False, False, False, False]


def test_chunks_end_on_the_grid_of_checkpoints():
    assert CHECKPOINT_GRID % CHUNK_SIZE == 0


@requires_h200_compiler
@pytest.mark.parametrize(("kind", "op"), [("kda", "prefill"), ("gdn", "decode")])
def test_two_layers_run_in_place_in_a_large_pool(kind, op):
    kind, rng = KINDS[kind], np.random.default_rng(13)
    layout = unified_layout([kind.spec("float32")], pool_bytes=8 << 30)
    buffers = pool_struct(layout).buffers
    gate = kind.gate(rng)
    slots = StateSlots(
        slots=KernelBlocks(jnp.zeros(4, jnp.int32), "state"),
        is_fresh=jnp.zeros(4, bool),
    )
    shape = (4, 2) if op == "decode" else (200,)
    tokens = put_on_device(kind.tokens(rng, *shape))

    def step(buffers, tokens, gate, cu_query_lens, slots):
        outs = []
        for layer in range(2):
            view = layout.part_view("state", layer=layer, part="recurrent")
            call = ft.partial(kind.decode, buffers, view, tokens, gate, slots)
            if op == "prefill":
                call = ft.partial(
                    kind.prefill,
                    buffers,
                    view,
                    tokens,
                    gate,
                    cu_query_lens,
                    slots,
                    max_query_len=130,
                )
            buffers, out = call()
            outs.append(out)
        return buffers, outs

    cu_query_lens = jnp.zeros(5, jnp.int32)
    program = compile_for_h200(
        step, buffers, tokens, gate, cu_query_lens, slots, donate_argnums=0
    )
    assert program.alias_bytes >= layout.pool_bytes
    assert program.temp_bytes < 16 << 20
    assert pool_sized_copies(program.hlo_text, layout.pool_bytes // 2) == []


@pytest.mark.usefixtures("unchecked")
def test_wrong_use_is_refused():
    kind, rng = KINDS["gdn"], np.random.default_rng(14)
    pool, gate = kind.pool(), kind.gate(rng)
    buffers, slots = pool.put({}), pool.slots([1, 2], [True, True])
    tokens = put_on_device(kind.tokens(rng, 2, 1))
    packed = put_on_device(kind.tokens(rng, 2))
    three = jnp.concatenate([tokens.q, tokens.q[:, :, :1]], axis=2)
    call = ft.partial(gdn_decode, buffers, pool.view)
    with pytest.raises(ValueError, match=r"key_dim\] = \(4, 8, 32\)"):
        call(tokens.replace(v=tokens.v[..., :8]), gate, slots)
    with pytest.raises(ValueError, match="num_heads=4 must be a multiple of key_heads"):
        call(tokens.replace(q=three, k=three), gate, slots)
    other = KernelBlocks(slots.slots.ids, "other")
    with pytest.raises(IdSpaceError, match="not of 'other'"):
        call(tokens, gate, slots.replace(slots=other))
    with pytest.raises(ValueError, match="give both for each row"):
        call(tokens, gate, slots.replace(is_fresh=jnp.ones(3, bool)))
    with pytest.raises(UnsupportedError, match="'mosaic_gpu' does not exist"):
        call(tokens, gate, slots, implementation="mosaic_gpu")
    half = kind.pool(storage="float16")
    with pytest.raises(UnsupportedError, match="has storage_dtype float32, bfloat16"):
        gdn_decode(half.put({}), half.view, tokens, gate, slots)
    with pytest.raises(ValueError, match="cu_query_lens has 2 entries, 2 rows need 3"):
        gdn_prefill(
            buffers,
            pool.view,
            packed,
            gate,
            jnp.asarray([0, 2], jnp.int32),
            slots,
            max_query_len=1,
        )
    bounded = KINDS["kda"].gate(rng, lower_bound=0.0)
    with pytest.raises(ValueError, match=r"lower_bound=0\.0 must be below 0"):
        kda_log_decay(jnp.zeros((2, 24)), bounded)
