"""Chunked prefill at sizes that kernels have, against the recurrent oracles."""

import dataclasses
import functools as ft
import importlib
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.comparison import assert_matches
from tests.gpu_compile import (
    compile_for_h200,
    pool_sized_copies,
    requires_h200_compiler,
)
from tests.oracles.recurrent import l2_normalize
from tests.recurrent_cases import EPS, Kind
from tests.state_pools import StatePool, round_to
from tests.triton_interpreter import (
    IS_INTERPRETING,
    assert_passes_in_the_interpreter,
    interpreted_launch,
)
from ukv.errors import UnsupportedError
from ukv.ids import KernelBlocks
from ukv.implementation import Target
from ukv.layout import unified_layout
from ukv.ops import DeltaTokens, StateCheckpoints, StateSlots, gdn_prefill, kda_prefill
from ukv.ops.state_places import place_of
from ukv.pool import pool_struct

PREFILLS = {
    name: jax.jit(op, static_argnames=("view", "max_query_len", "implementation"))
    for name, op in (("kda", kda_prefill), ("gdn", gdn_prefill))
}
KINDS = {
    "kda": Kind(H=2, I=2, K=64, V=64, decode=None, prefill=PREFILLS["kda"]),
    "gdn": Kind(H=4, I=2, K=64, V=64, decode=None, prefill=PREFILLS["gdn"]),
    "kda-128": Kind(H=2, I=2, K=128, V=128, decode=None, prefill=PREFILLS["kda"]),
}
GATES = ["mild", "strong", "mixed", "none", "repeated"]
by_kind = pytest.mark.parametrize("kind", ["kda", "gdn"])
on_a_gpu = (pytest.mark.gpu, pytest.mark.triton)
by_implementation = pytest.mark.parametrize(
    "implementation",
    ["xla", *(pytest.param(name, marks=on_a_gpu) for name in ("triton", "gluon"))],
)
LANGUAGES = ("triton", "gluon")
MAX_TOKENS, MAX_ROWS = 416, 6


def configured(kind, **fields):
    """The kind with prefills whose kernels have this configuration."""
    op = kda_prefill if kind.is_kda else gdn_prefill

    @ft.wraps(op)
    def prefill(*operands, **options):
        make = importlib.import_module("pallas_kernels.delta.prefill")
        config = make.DeltaPrefillConfig(**fields)
        with mock.patch.object(make, "DeltaPrefillConfig", return_value=config):
            return op(*operands, **options)

    static = ("view", "max_query_len", "implementation")
    return dataclasses.replace(kind, prefill=jax.jit(prefill, static_argnames=static))


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Triton's interpreter in the place of a card."""
    if IS_INTERPRETING:
        h200 = Target(platform="gpu", capability=90)
        monkeypatch.setattr("ukv.implementation.default_target", lambda: h200)
        monkeypatch.setattr("pallas_kernels.delta.prefill.launch", interpreted_launch)


@pytest.mark.skipif(IS_INTERPRETING, reason="this is that process")
@requires_h200_compiler
@pytest.mark.parametrize(
    "which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)]
)
def test_the_kernels_pass_in_the_interpreter(which):
    assert_passes_in_the_interpreter(__file__, "-m", f"triton and {which}")


def check(actual, truth, num_tokens, *, head_axis, sizes=None):
    """Compare head by head, all tokens of an output together.

    Kernels multiply in bfloat16 and sum in float32: an element of the result is a sum
    of rounded products over the key channels and the tokens.
    """
    assert_matches(
        np.asarray(actual, "bfloat16"),
        truth,
        dtype="bfloat16",
        accumulate_dtype="tensorfloat32",
        reduced_len=num_tokens + 128,
        row_axes=(head_axis,),
        sizes=sizes,
    )


def run(kind, pool, gate, buffers, rows, implementation, checkpoints=None):
    """Prefill rows of (tokens, slot, is_fresh); everything else is NaN.

    Implementations but XLA's are the Triton one: with kernels in that language, or, if
    it is none, with those of the kind.
    """
    if implementation in LANGUAGES:
        kind = configured(kind, language=implementation)
    if implementation != "xla":
        implementation = "triton"
    lens = [len(tokens["v"]) for tokens, _, _ in rows]
    bounds = np.cumsum([0, *lens, *[0] * (MAX_ROWS - len(rows))])
    packed = {}
    for name, x in rows[0][0].items():
        packed[name] = np.full((MAX_TOKENS, *x.shape[1:]), np.nan, x.dtype)
        packed[name][: bounds[-1]] = np.concatenate([row[0][name] for row in rows])
    padding = [None] * (MAX_ROWS - len(rows))
    slots = pool.slots(
        [*(slot for _, slot, _ in rows), *padding],
        [*(is_fresh for _, _, is_fresh in rows), *[False] * len(padding)],
        *([] if checkpoints is None else checkpoints),
    )
    buffers, out = kind.prefill(
        buffers,
        pool.view,
        DeltaTokens(**{name: jnp.asarray(x) for name, x in packed.items()}),
        gate,
        jnp.asarray(bounds, jnp.int32),
        slots,
        max_query_len=200,
        implementation=implementation,
    )
    out = np.asarray(out)
    assert np.all(out[bounds[-1] :] == 0)
    return buffers, [out[a:b] for a, b in itertools.pairwise(bounds)]


def draw_tokens(kind, rng, length, gates="mild"):
    tokens = kind.tokens(rng, length, dtype="bfloat16")
    logits = tokens["gate_logits"]
    if gates == "strong":
        logits[...] = round_to(np.abs(logits) * 20, "bfloat16")
    if gates == "mixed":
        logits[...] = round_to(np.where(logits > 0, 30, -30), "bfloat16")
    if gates == "none":
        logits[...] = -60
    if gates == "repeated":
        logits[...] = -60
        tokens["k"][...] = tokens["k"][:1]
        tokens["beta_logits"][...] = 6
    return tokens


def packed_cases():
    """Every kind, gate and implementation; what those marked slow show, others do."""
    ways = itertools.product(KINDS, GATES, ["xla", *LANGUAGES])
    for kind, gates, name in ways:
        marks = on_a_gpu if name != "xla" else ()
        is_long = kind == "kda-128" and name == "triton"
        if is_long and gates != "mixed":
            marks = (*marks, pytest.mark.slow)
        yield pytest.param(kind, gates, name, marks=marks, id=f"{gates}-{name}-{kind}")


@pytest.mark.parametrize(("kind", "gates", "implementation"), [*packed_cases()])
def test_packed_rows_match_the_oracle(kind, gates, implementation):
    kind, rng = KINDS[kind], np.random.default_rng(0)
    pool = StatePool.create(kind.spec("float32"), "high", part="recurrent", num_slots=9)
    gate = kind.gate(rng)
    shapes = [(200, 7, False), (1, 2, True), (64, 6, False), (3, None, False)]
    shapes += [(0, 5, False), (97, 1, True)]
    rows = [(draw_tokens(kind, rng, n, gates), s, fresh) for n, s, fresh in shapes]
    for x in rows[3][0].values():
        x[...] = np.nan
    states = {s: rng.standard_normal(pool.view.shape) * 0.3 for s in (7, 6, 5)}
    before = pool.put(states)
    after, outs = run(kind, pool, gate, before, rows, implementation)
    for (tokens, slot, is_fresh), out in zip(rows, outs, strict=True):
        if slot is None:
            assert np.all(out == 0)
            continue
        start = np.zeros(pool.view.shape) if is_fresh else states[slot]
        if not len(out):
            np.testing.assert_array_equal(pool.get(after, slot), np.float32(start))
            continue
        truth, last, sizes = kind.expected_with_sizes(tokens, gate, start)
        check(out, truth, len(out), head_axis=1, sizes=sizes)
        check(pool.get(after, slot), last, len(out), head_axis=0)
    pool.assert_only_written(before, after, [7, 2, 6, 5, 1])


@by_kind
def test_products_that_cancel_have_their_own_accuracy(kind):
    kind, rng = KINDS[kind], np.random.default_rng(7)
    gate, tokens = kind.gate(rng), draw_tokens(kind, rng, 1, "strong")
    tokens["gate_logits"][...] = 80
    q, k = (l2_normalize(tokens[name], eps=0.0) for name in "qk")
    q -= (1 - 1e-6) * (q * k).sum(axis=-1, keepdims=True) * k
    tokens["q"] = q
    start = rng.standard_normal((kind.H, kind.V, kind.K)) * 0.3
    truth, _, sizes = kind.expected_with_sizes(tokens, gate, start)
    rounded = {
        name: round_to(l2_normalize(x, eps=EPS), "bfloat16")
        for name, x in (("q", q), ("k", k))
    }
    found, _ = kind.expected(tokens | rounded, gate, start)
    check(found, truth, 1, head_axis=1, sizes=sizes)
    with pytest.raises(AssertionError, match=f"{kind.H} of {kind.H} rows"):
        check(found, truth, 1, head_axis=1)


@by_kind
@pytest.mark.parametrize("num_tokens", [1, 97])
def test_wrong_outputs_are_refused(kind, num_tokens):
    kind, rng = KINDS[kind], np.random.default_rng(6)
    gate, tokens = kind.gate(rng), draw_tokens(kind, rng, num_tokens, "mixed")
    start = rng.standard_normal((kind.H, kind.V, kind.K)) * 0.3
    truth, _, sizes = kind.expected_with_sizes(tokens, gate, start)
    np.testing.assert_array_equal(truth, kind.expected(tokens, gate, start)[0])
    compare = ft.partial(
        check, truth=truth, num_tokens=num_tokens, head_axis=1, sizes=sizes
    )
    compare(truth)
    without_decay = tokens | {"gate_logits": np.full_like(tokens["gate_logits"], -60)}
    for wrong in (
        np.zeros_like(truth),
        1.1 * truth,
        truth[:, ::-1],
        kind.expected(tokens, gate, np.zeros_like(start))[0],
        kind.expected(without_decay, gate, start)[0],
        kind.expected(tokens | {"q": tokens["k"]}, gate, start)[0],
    ):
        with pytest.raises(AssertionError, match="rows and"):
            compare(wrong)


@by_kind
@by_implementation
def test_checkpoints_are_states_of_shorter_runs(kind, implementation):
    kind, rng = KINDS[kind], np.random.default_rng(1)
    pool = StatePool.create(
        kind.spec("bfloat16"), "float", part="recurrent", num_slots=9
    )
    gate = kind.gate(rng)
    tokens = [draw_tokens(kind, rng, n) for n in (200, 128)]
    before = pool.put({1: rng.standard_normal(pool.view.shape)})
    rows = [(tokens[0], 1, False), (tokens[1], 2, True)]
    slots = [[3, 4], [5, 6], *[[None, None]] * 4]
    lens = [[0, 128], [128, 192], *[[0, 0]] * 4]
    after, _ = run(
        kind, pool, gate, before, rows, implementation, checkpoints=(slots, lens)
    )
    np.testing.assert_array_equal(pool.get(after, 3), pool.get(before, 1))
    np.testing.assert_array_equal(pool.get(after, 5), pool.get(after, 2))
    shorter = [({name: x[:128] for name, x in tokens[0].items()}, 1, False)]
    shorter, _ = run(kind, pool, gate, before, shorter, implementation)
    np.testing.assert_array_equal(pool.get(after, 4), pool.get(shorter, 1))
    pool.assert_only_written(before, after, [1, 2, 3, 4, 5])


@by_kind
@by_implementation
def test_splits_on_the_grid_change_no_bit(kind, implementation):
    # A state that passes through the pool in float32 is the one in registers.
    kind, rng = KINDS[kind], np.random.default_rng(2)
    pool = StatePool.create(kind.spec("float32"), "high", part="recurrent", num_slots=9)
    gate, tokens = kind.gate(rng), draw_tokens(kind, rng, 200)
    once, outs = run(
        kind, pool, gate, pool.put({}), [(tokens, 4, True)], implementation
    )
    buffers, pieces = pool.put({}), []
    for start, end in ((0, 64), (64, 192), (192, 200)):
        piece = {name: x[start:end] for name, x in tokens.items()}
        row = (piece, 4, start == 0)
        buffers, out = run(kind, pool, gate, buffers, [row], implementation)
        pieces.append(out[0])
    np.testing.assert_array_equal(np.concatenate(pieces), outs[0])
    np.testing.assert_array_equal(pool.get(buffers, 4), pool.get(once, 4))


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize(
    ("language", "block_v"),
    [
        ("gluon", 64),
        pytest.param("gluon", 128, marks=pytest.mark.slow),
        pytest.param("triton", 64, marks=pytest.mark.slow),
    ],
)
def test_segments_change_no_bit(language, block_v):
    # Rows of more chunks than are loaded ahead, which begin and end inside of segments.
    kind, rng = KINDS["kda-128"], np.random.default_rng(6)
    pool = StatePool.create(kind.spec("float32"), "high", part="recurrent", num_slots=9)
    gate, tokens = kind.gate(rng), [draw_tokens(kind, rng, n) for n in (270, 70)]
    start = rng.standard_normal(pool.view.shape) * 0.3
    rows = [(tokens[0], 7, False), (tokens[1], 2, True)]
    slots = [[3, 4], [5, None], *[[None, None]] * 4]
    lens = [[128, 256], [64, 0], *[[0, 0]] * 4]
    found = []
    for segment in (2048, 2):
        options = {"language": language, "block_v": block_v, "segment": segment}
        of_kind = configured(kind, **options)
        after, outs = run(
            of_kind,
            pool,
            gate,
            pool.put({7: start}),
            rows,
            "configured",
            checkpoints=(slots, lens),
        )
        found.append([*outs[:2], *(pool.get(after, s) for s in (7, 2, 3, 4, 5))])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    out, _, last, _, *checkpoints, _ = found[0]
    truth, state = kind.expected(tokens[0], gate, start)
    check(out, truth, len(out), head_axis=1)
    check(last, state, len(out), head_axis=0)
    for size, checkpoint in zip(lens[0], checkpoints, strict=True):
        some = {name: x[:size] for name, x in tokens[0].items()}
        check(checkpoint, kind.expected(some, gate, start)[1], size, head_axis=0)


@by_kind
@by_implementation
def test_bits_do_not_depend_on_the_slots(kind, implementation):
    kind, rng = KINDS[kind], np.random.default_rng(3)
    gate, tokens = kind.gate(rng), [draw_tokens(kind, rng, n) for n in (70, 64, 5)]
    states = [rng.standard_normal((kind.H, kind.V, kind.K)) for _ in tokens]
    found = []
    for placement, slots in (("high", (1, 2, 3)), ("static", (7, 1, 5))):
        pool = StatePool.create(
            kind.spec("float32"), placement, part="recurrent", num_slots=9
        )
        rows = [(t, slot, False) for t, slot in zip(tokens, slots, strict=True)]
        before = pool.put(dict(zip(slots, states, strict=True)))
        after, outs = run(kind, pool, gate, before, rows, implementation)
        found.append([*outs[:3], *(pool.get(after, slot) for slot in slots)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("logits", [-30.0, -16.0, 0.0, 80.0])
def test_65536_tokens_match_the_oracle(logits):
    # Decays of 1 - 1e-13, 1 - 1e-8, about 1/2, and 0 in float32.
    kind, rng, num_tokens = KINDS["kda"], np.random.default_rng(4), 65536
    pool = StatePool.create(kind.spec("float32"), "high", part="recurrent", num_slots=3)
    gate, tokens = kind.gate(rng), draw_tokens(kind, rng, num_tokens)
    tokens["gate_logits"][...] = logits
    start = rng.standard_normal(pool.view.shape)
    after, out = kind.prefill(
        pool.put({1: start}),
        pool.view,
        DeltaTokens(**{name: jnp.asarray(x) for name, x in tokens.items()}),
        gate,
        jnp.asarray([0, num_tokens], jnp.int32),
        pool.slots([1], [False]),
        max_query_len=num_tokens,
        implementation="triton",
    )
    truth, last = kind.expected(tokens, gate, start)
    # What a token leaves is overwritten once some hundred keys have come after it.
    check(out, truth, 1024, head_axis=1)
    check(pool.get(after, 1), last, 1024, head_axis=0)


@pytest.mark.gpu
@by_kind
def test_slots_far_beyond_2_to_the_31_elements(kind):
    kind, rng, num_tokens = KINDS[kind], np.random.default_rng(5), 130
    kind = dataclasses.replace(kind, H=32, I=32 if kind.is_kda else 16, K=128, V=128)
    layout = unified_layout([kind.spec("float32")], pool_bytes=20 << 30)
    sub, view = (
        layout.sub_pool("state"),
        layout.part_view("state", layer=1, part="recurrent"),
    )
    tokens = DeltaTokens(
        **jax.tree.map(jnp.asarray, draw_tokens(kind, rng, num_tokens))
    )
    buffers = tuple(
        jnp.zeros(buffer.shape, buffer.dtype) for buffer in pool_struct(layout).buffers
    )
    step = jax.jit(
        kind.prefill.__wrapped__,
        static_argnames=("view", "max_query_len", "implementation"),
        donate_argnums=0,
    )
    gate, outs = kind.gate(rng), []
    for pages in ([1, 2], [sub.num_pages - 1, sub.num_pages - 2]):
        ids = np.asarray(pages, np.int32) * sub.blocks_per_page
        slots = StateSlots(
            slots=KernelBlocks(jnp.asarray(ids), "state"), is_fresh=jnp.zeros(2, bool)
        )
        for _ in range(2):
            buffers, out = step(
                buffers,
                view,
                tokens,
                gate,
                jnp.asarray([0, 100, num_tokens], jnp.int32),
                slots,
                max_query_len=100,
                implementation="triton",
            )
        outs.append(np.asarray(out))
    assert np.all(np.isfinite(outs[0]))
    assert np.any(outs[0])
    np.testing.assert_array_equal(*outs)


@requires_h200_compiler
@pytest.mark.parametrize(
    ("kind", "num_tokens", "language"),
    [
        ("kda", 8192, "triton"),
        ("gdn", 64, "triton"),
        ("kda", 8192, "gluon"),
        ("gdn", 64, "gluon"),
    ],
)
def test_prefill_is_in_place_in_one_command_buffer(kind, num_tokens, language):
    kind = Kind(
        H=32, I={"kda": 32, "gdn": 16}[kind], K=128, V=128, decode=None, prefill=None
    )
    layout = unified_layout([kind.spec("float32")], pool_bytes=64 << 30)
    rng, rows, count = np.random.default_rng(0), 4, 2
    prefill = configured(kind, language=language).prefill
    blocks = KernelBlocks(jnp.zeros(rows, jnp.int32), "state")
    pairs = KernelBlocks(jnp.zeros((rows, count), jnp.int32), "state")
    slots = StateSlots(
        slots=blocks,
        is_fresh=jnp.zeros(rows, bool),
        checkpoints=StateCheckpoints(
            slots=pairs, lens=jnp.zeros((rows, count), jnp.int32)
        ),
    )
    shapes = {
        name: jax.ShapeDtypeStruct((num_tokens, *x.shape[1:]), jnp.bfloat16)
        for name, x in kind.tokens(rng, 1).items()
    }

    def step(buffers, tokens, cu_query_lens, slots):
        view = layout.part_view("state", layer=1, part="recurrent")
        return prefill(
            buffers,
            view,
            tokens,
            kind.gate(rng),
            cu_query_lens,
            slots,
            max_query_len=num_tokens,
            implementation="triton",
        )

    program = compile_for_h200(
        step,
        pool_struct(layout).buffers,
        DeltaTokens(**shapes),
        jnp.zeros(rows + 1, jnp.int32),
        slots,
        donate_argnums=0,
        thunks=True,
    )
    assert program.alias_bytes >= layout.pool_bytes
    # Six arrays of the size of the activations, of chunks that rows fill in part.
    assert program.temp_bytes < 7 * (num_tokens + 64 * (rows + 1)) * 32 * 128 * 2
    assert not pool_sized_copies(program.hlo_text, layout.pool_bytes // 2)
    assert program.top_thunks == ["kCommandBuffer"]


def traced_kernels(sizes, dtype, config, kind="kda", num_rows=1):
    """The kernels of a prefill with such a configuration: names, and how launched."""
    module = importlib.import_module("pallas_kernels.delta.prefill")
    kind, rng = dataclasses.replace(KINDS[kind], **sizes), np.random.default_rng(3)
    pool = StatePool.create(kind.spec("float32"), "high", part="recurrent", num_slots=9)
    buffer = pool.put({})[pool.view.buffer_index]
    x, gate = kind.tokens(rng, num_rows, dtype=dtype), kind.gate(rng)
    prefill = ft.partial(
        module.delta_prefill,
        checkpoints=None,
        state=place_of(pool.view),
        config=module.DeltaPrefillConfig(**config),
    )
    traced = {}

    def launch(kernel, *_, outputs, **options):
        traced[kernel.fn.__name__] = options
        return [jnp.zeros(out.shape, out.dtype) for out in outputs]

    with mock.patch.object(module, "launch", launch):
        jax.eval_shape(
            prefill,
            buffer,
            *(x["q"], x["k"], x["v"], x["gate_logits"].reshape(num_rows, -1)),
            *(x["beta_logits"], gate.a_log, gate.dt_bias.reshape(-1)),
            cu_query_lens=jnp.arange(num_rows + 1, dtype=jnp.int32),
            slots=jnp.zeros(num_rows, jnp.int32),
            is_fresh=jnp.ones(num_rows, bool),
        )
    return traced


@pytest.mark.parametrize(
    ("sizes", "dtype", "config", "message"),
    [
        ({}, "bfloat16", {"language": "gluon", "block_v": 32}, "block_v=32 must be 64"),
        (
            {"K": 32},
            "bfloat16",
            {"language": "gluon"},
            "key_dim=32 and .* must each be",
        ),
        (
            {"V": 256},
            "bfloat16",
            {"language": "gluon"},
            "value_dim=256 must each be 64",
        ),
        ({}, "float32", {"language": "gluon"}, "'float32'} must be bfloat16"),
    ],
)
def test_what_a_kernel_in_gluon_does_not_have_is_refused(sizes, dtype, config, message):
    with pytest.raises(ValueError, match=message):
        traced_kernels(sizes, dtype, config)


@by_kind
@pytest.mark.parametrize(
    ("sizes", "dtype", "is_hopper", "language"),
    [
        ({}, "bfloat16", True, "gluon"),
        ({"K": 128}, "bfloat16", True, "gluon"),
        ({}, "bfloat16", False, "triton"),
        ({"K": 32}, "bfloat16", True, "triton"),
        ({"V": 256}, "bfloat16", True, "triton"),
        ({}, "float32", True, "triton"),
    ],
)
def test_the_default_kernel_has_the_card_the_sizes_and_the_dtype(
    kind, sizes, dtype, is_hopper, language
):
    chunk = {
        ("kda", "gluon"): "delta_fragment_chunk_kernel",
        ("kda", "triton"): "delta_chunk_kernel",
        ("gdn", "gluon"): "delta_head_fragment_chunk_kernel",
        ("gdn", "triton"): "delta_head_chunk_kernel",
    }[kind, language]
    scan = {"gluon": "delta_scan_gluon_kernel", "triton": "delta_scan_kernel"}[language]
    with mock.patch("pallas_kernels.delta.prefill.is_hopper", return_value=is_hopper):
        assert [*traced_kernels(sizes, dtype, {}, kind)] == [chunk, scan]


@pytest.mark.parametrize(
    ("value_dim", "num_rows", "block_v"),
    [(128, 1, 64), (128, 33, 64), (128, 34, 128), (64, 34, 64)],
)
def test_a_scan_in_gluon_has_as_many_programs_as_multiprocessors(
    value_dim, num_rows, block_v
):
    config = {"language": "gluon"}
    sizes = {"V": value_dim}
    traced = traced_kernels(sizes, "bfloat16", config, num_rows=num_rows)
    options = traced["delta_scan_gluon_kernel"]
    assert (options["BLOCK_V"], options["num_warps"]) == (block_v, block_v // 16)
    assert (options["AHEAD"] > 0) == (num_rows < 34 or value_dim == 64)


@pytest.mark.usefixtures("unchecked")
def test_a_language_that_there_is_not_is_refused():
    module = importlib.import_module("pallas_kernels.delta.prefill")
    with pytest.raises(ValueError, match="language='pallas' must be 'triton', 'gluon'"):
        module.DeltaPrefillConfig(language="pallas")


def test_what_the_kernel_does_not_cover_is_refused():
    kind, rng = KINDS["kda"], np.random.default_rng(3)
    pool = StatePool.create(kind.spec("float32"), "high", part="recurrent", num_slots=9)
    call = ft.partial(run, kind, pool, kind.gate(rng), pool.put({}))
    rows = [(draw_tokens(kind, rng, 3), 1, True)]
    with pytest.raises(UnsupportedError, match="'triton' runs on gpu, not on cpu"):
        call(rows, "triton")
