"""One decode step of KDA and GDN, from the projections to the output norm."""

import dataclasses
import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.comparison import assert_matches
from tests.delta_step_layers import STEPS, Layer, draw, take, without_clusters
from tests.gpu_compile import (
    compile_for_h200,
    pool_sized_copies,
    requires_h200_compiler,
)
from tests.state_pools import round_to
from tests.triton_interpreter import (
    IS_INTERPRETING,
    assert_passes_in_the_interpreter,
    faulty_kernel,
    interpret_launches,
)
from ukv.errors import IdSpaceError, UnsupportedError
from ukv.ids import KernelBlocks
from ukv.layout import unified_layout
from ukv.ops import DeltaViews, ProjectedTokens, StateSlots
from ukv.pool import pool_struct

by_implementation = pytest.mark.parametrize(
    "implementation",
    ["xla", pytest.param("triton", marks=(pytest.mark.gpu, pytest.mark.triton))],
)
by_kind = pytest.mark.parametrize("kind", STEPS)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Triton's interpreter in the place of a card, where no program has company."""
    interpret_launches(monkeypatch, "delta.decode")
    if IS_INTERPRETING:
        without_clusters(monkeypatch)


@pytest.mark.skipif(IS_INTERPRETING, reason="this is that process")
@requires_h200_compiler
def test_the_kernel_passes_in_the_interpreter():
    # The others take long or run what these run.
    left_out = "larger drift together bits tuning"
    chosen = " and ".join(f"not {name}" for name in left_out.split())
    assert_passes_in_the_interpreter(
        __file__, "-k", f"{chosen} or float32-32 or float32-128"
    )


CASES = {
    "kda": Layer(kind="kda"),
    "kda-bf16": Layer(kind="kda", conv_dtype="bfloat16", dtype="bfloat16"),
    "kda-bf16-state": Layer(kind="kda", storage="bfloat16", placement="float"),
    "kda-bf16-window": Layer(kind="kda", conv_dtype="bfloat16", value_dim=128),
    "kda-bounded": Layer(kind="kda", lower_bound=-5.0, has_bias=True),
    "kda-128": Layer(kind="kda", heads=2, key_dim=128, value_dim=128),
    "gdn": Layer(kind="gdn", placement="static"),
    "gdn-bf16": Layer(kind="gdn", conv_dtype="bfloat16", dtype="bfloat16"),
    "gdn-128": Layer(kind="gdn", heads=4, key_dim=128, value_dim=128),
}


def check(actual, truth, layer, query_len, *, dtype):
    """Compare outputs by token, states by head.

    The output of a fresh row is a multiple of q . k, which may nearly vanish and has
    then no digits of its own: errors are measured against all heads of a token. With
    bfloat16 tokens the reference rounds q, k and v before the recurrence.
    """
    rounded = "bfloat16" if "bfloat16" in (dtype, layer.dtype) else "float32"
    assert_matches(
        np.asarray(actual, rounded),
        truth,
        dtype=rounded,
        reduced_len=query_len + layer.key_dim + 5,
        row_axes=(0,),
    )


def check_step(layer, slots, is_fresh, query_len, implementation):
    """Compare a step with the oracles; a slot that is None belongs to a padded row."""
    rng = np.random.default_rng(3)
    tokens = layer.tokens(rng, len(slots), query_len)
    used = [slot for slot in slots if slot is not None]
    for x in tokens.values():
        x[[slot is None for slot in slots]] = np.nan
    # What a fresh row finds in its slot is poison.
    olds = [s for s, fresh in zip(slots, is_fresh, strict=True) if s and not fresh]
    states, windows = draw(layer, rng, olds)
    before = layer.put(states, windows)
    after, out = layer.run(before, tokens, slots, is_fresh, implementation)
    state, window = layer.pools
    for row, slot in enumerate(slots):
        if slot is None:
            assert np.all(out[row] == 0)
            continue
        if is_fresh[row]:
            starts = tuple(np.zeros(pool.view.shape) for pool in layer.pools)
        else:
            starts = states[slot], windows[slot]
        expected = layer.expected(take(tokens, row), *starts)
        check(out[row], expected[0], layer, query_len, dtype=layer.dtype)
        check(
            state.get(after, slot), expected[1], layer, query_len, dtype=layer.storage
        )
        last = round_to(expected[2], window.view.dtype)
        np.testing.assert_array_equal(window.get(after, slot), last)
    # Neither another slot, nor the other layer, nor a neighbour.
    for old, new in zip(
        layer.erased(before, used), layer.erased(after, used), strict=True
    ):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("case", CASES)
@by_implementation
@pytest.mark.parametrize("query_len", [1, 3])
def test_step_matches_the_oracles(case, implementation, query_len):
    slots, is_fresh = [6, None, 2, 7], [False, False, True, False]
    check_step(CASES[case], slots, is_fresh, query_len, implementation)


@pytest.mark.parametrize("case", CASES)
@by_implementation
@pytest.mark.parametrize("query_len", [1, 2])
def test_larger_batches_match_the_oracles(case, implementation, query_len):
    # A kernel may take larger blocks then.
    slots = [8, 3, 1, None, 5, 2, 7, 4, None, 6]
    is_fresh = [slot == 5 for slot in slots]
    check_step(CASES[case], slots, is_fresh, query_len, implementation)


@pytest.mark.gpu
@pytest.mark.triton
@by_kind
@pytest.mark.parametrize("rows", [1, 3, 8, 32, 128])
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_the_tuning_of_every_batch_matches_the_oracles(
    kind, rows, storage, monkeypatch
):
    module = pytest.importorskip("pallas_kernels.delta.decode")
    tuned = ft.partial(module.default_config, rows)
    monkeypatch.setattr(module, "default_config", lambda _, *facts: tuned(*facts))
    jax.clear_caches()
    layer = dataclasses.replace(CASES[f"{kind}-128"], storage=storage)
    if storage == "bfloat16":
        layer = dataclasses.replace(layer, placement="float")
    for query_len in (1, 4):
        check_step(layer, [5, None, 2, 8], [False] * 4, query_len, "triton")
    jax.clear_caches()


@by_kind
@by_implementation
def test_tokens_together_or_one_by_one(kind, implementation):
    layer, rng = CASES[kind], np.random.default_rng(4)
    tokens, slots = layer.tokens(rng, 2, 4), [3, 5]
    before = layer.put(*draw(layer, rng, slots))
    together, out = layer.run(before, tokens, slots, [False] * 2, implementation)
    buffers, outs = before, []
    for t in range(4):
        one = {name: x[:, t : t + 1] for name, x in tokens.items()}
        buffers, o = layer.run(buffers, one, slots, [False] * 2, implementation)
        outs.append(o)
    np.testing.assert_allclose(out, np.concatenate(outs, 1), rtol=1e-4, atol=1e-5)
    for pool in layer.pools:
        for slot in slots:
            np.testing.assert_allclose(
                pool.get(together, slot), pool.get(buffers, slot), rtol=1e-4, atol=1e-5
            )


@by_kind
@by_implementation
def test_bits_do_not_depend_on_the_slots(kind, implementation):
    layer, rng = CASES[kind], np.random.default_rng(5)
    steps = [layer.tokens(rng, 3, 1) for _ in range(3)]
    starts = draw(layer, rng, range(3))

    def run(slots_of_step, layers):
        parts, outs = [list(part.values()) for part in starts], []
        for tokens, slots, placed in zip(steps, slots_of_step, layers, strict=True):
            buffers = placed.put(*(dict(zip(slots, p, strict=True)) for p in parts))
            buffers, out = placed.run(
                buffers, tokens, slots, [False] * 3, implementation
            )
            outs.append(out)
            parts = [
                [pool.get(buffers, slot) for slot in slots] for pool in placed.pools
            ]
        return [*outs, *parts[0], *parts[1]]

    others = [dataclasses.replace(layer, placement=p) for p in ("static", "float")]
    moved = run([[5, 1, 7], [2, 7, 5], [1, 3, 2]], [layer, *others])
    for a, b in zip(moved, run([[1, 2, 3]] * 3, [layer] * 3), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("logits", [-1e30, -80.0, 80.0, 1e30])
@by_implementation
def test_extreme_gates_stay_finite(logits, implementation):
    layer, rng = CASES["kda"], np.random.default_rng(6)
    tokens = layer.tokens(rng, 1, 2)
    tokens["gate_logits"][...] = logits
    states, windows = draw(layer, rng, [4])
    before = layer.put(states, windows)
    after, out = layer.run(before, tokens, [4], [False], implementation)
    expected = layer.expected(take(tokens, 0), states[4], windows[4])
    check(out[0], expected[0], layer, 2, dtype="float32")
    check(layer.pools[0].get(after, 4), expected[1], layer, 2, dtype="float32")


@by_implementation
def test_decays_near_1_do_not_drift(implementation):
    # 1024 tokens that write nothing, with a decay of 1 - 3e-8 each.
    layer, rng = CASES["kda"], np.random.default_rng(7)
    tokens = layer.tokens(rng, 1, 4)
    tokens["gate_logits"][...] = -16.0
    tokens["beta_logits"][...] = -1e30
    states, windows = draw(layer, rng, [4])
    buffers = layer.put(states, windows)
    for _ in range(256):
        buffers, _ = layer.run(buffers, tokens, [4], [False], implementation)
    x = np.float64(-16.0) + np.asarray(layer.gate.dt_bias, np.float64)
    decay = -np.exp(np.asarray(layer.gate.a_log, np.float64))[:, None] * np.exp(x)
    expected = states[4] * np.exp(1024 * decay)[:, None, :]
    check(layer.pools[0].get(buffers, 4), expected, layer, 1024, dtype="float32")


@by_kind
@by_implementation
def test_the_comparison_rejects_faults(kind, implementation):
    layer, rng = CASES[kind], np.random.default_rng(8)
    tokens = layer.tokens(rng, 1, 2)
    states, windows = draw(layer, rng, [3, 4])
    buffers = layer.put(states, windows)
    truth, _, _ = layer.expected(take(tokens, 0), states[3], windows[3])

    def run(slot=3, is_fresh=False, **changes):
        changed = tokens | changes
        return layer.run(buffers, changed, [slot], [is_fresh], implementation)[1][0]

    faults = {
        "zeros": np.zeros_like(truth, np.float32),
        "heads": run()[:, ::-1],
        "slot": run(slot=4),
        "fresh": run(is_fresh=True),
        "beta": run(beta_logits=tokens["beta_logits"] + np.float32(0.1)),
        "gate": run(gate_logits=tokens["gate_logits"] + np.float32(0.1)),
        "scale": run() * np.float32(2),
    }
    check(run(), truth, layer, 2, dtype="float32")
    for out in faults.values():
        with pytest.raises(AssertionError):
            check(out, truth, layer, 2, dtype="float32")


# Tiles of KDA come to shared memory there, those of GDN to registers.
KERNEL_FAULTS = {
    "no wait for a tile": (
        "kda",
        "async_copy.wait_group(min(TILES, STAGES + max(0, n - 1)) - n - 1)",
        "pass",
    ),
    "a wait for one tile less": (
        "kda",
        "max(0, n - 1)) - n - 1)",
        "max(0, n - 1)) - n)",
    ),
    "a copy to a tile that is still to be read": (
        "kda",
        "tiles[(n - 1) % STAGES],",
        "tiles[n % STAGES],",
    ),
    "no wait for the windows": (
        "kda",
        "async_copy.wait_group(min(STAGES, TILES) if IS_IN_SHARED else 0)",
        "async_copy.wait_group(min(STAGES, TILES) + 1)",
    ),
    "no wait for the windows beside tiles in registers": (
        "gdn",
        "async_copy.wait_group(min(STAGES, TILES) if IS_IN_SHARED else 0)",
        "pass",
    ),
    "a tile that is loaded twice": (
        "gdn",
        "load_tile(tile_ptr + (n + STAGES) * TILE_V * K, has_past)",
        "load_tile(tile_ptr + n * TILE_V * K, has_past)",
    ),
    "the taps of another token": (
        "kda",
        "wv0, wv1, wv2, wv3 = taps(",
        "wv1, wv0, wv2, wv3 = taps(",
    ),
    "a window that does not shift": (
        "kda",
        "v0, v1, v2 = v1, v2, xv",
        "v0, v1, v2 = v0, v2, xv",
    ),
    "a row of the state that is not written": (
        "kda",
        "S, mask=is_present)",
        "S, mask=is_present & (tile_value > 0)[:, None])",
    ),
    "the past of a fresh row": (
        "kda",
        "has_past = is_present & (is_fresh == 0)",
        "has_past = is_present",
    ),
}


@pytest.mark.triton
@pytest.mark.skipif(not IS_INTERPRETING, reason="a card waits whether asked or not")
@pytest.mark.parametrize("fault", KERNEL_FAULTS)
def test_faults_of_the_kernel_show_in_the_interpreter(fault, monkeypatch, tmp_path):
    kind, *texts = KERNEL_FAULTS[fault]
    layer, is_fresh = CASES[f"{kind}-128"], [False, False, True, False]
    jax.clear_caches()
    module = pytest.importorskip("pallas_kernels.delta.decode")
    kernel = faulty_kernel(tmp_path, module.delta_decode_kernel, *texts)
    monkeypatch.setattr(module, "delta_decode_kernel", kernel)
    with pytest.raises(AssertionError):
        check_step(layer, [6, None, 2, 7], is_fresh, 1, "triton")
    jax.clear_caches()


@pytest.mark.gpu
@by_kind
def test_slots_far_beyond_2_to_the_31_elements(kind):
    layer = dataclasses.replace(
        CASES[kind], heads=32, key_dim=128, value_dim=128, dtype="bfloat16"
    )
    rng = np.random.default_rng(9)
    tokens = ProjectedTokens(**jax.tree.map(jnp.asarray, layer.tokens(rng, 2, 1)))
    layout = unified_layout([layer.spec], pool_bytes=20 << 30)
    sub = layout.sub_pool("state")
    views = DeltaViews(
        recurrent=layout.part_view("state", layer=1, part="recurrent"),
        conv=layout.part_view("state", layer=1, part="conv"),
    )
    buffers = tuple(
        jnp.zeros(buffer.shape, buffer.dtype) for buffer in pool_struct(layout).buffers
    )
    outs = []
    for pages in ([1, 2], [sub.num_pages - 1, sub.num_pages - 2]):
        ids = np.asarray(pages, np.int32) * sub.blocks_per_page
        slots = StateSlots(
            slots=KernelBlocks(jnp.asarray(ids), "state"), is_fresh=jnp.zeros(2, bool)
        )
        for _ in range(2):
            buffers, out = jax.jit(
                STEPS[kind].__wrapped__,
                static_argnames=("views", "implementation"),
                donate_argnames="buffers",
            )(
                buffers,
                views,
                tokens,
                layer.conv,
                layer.gate,
                slots,
                implementation="triton",
            )
        outs.append(np.asarray(out))
    assert np.all(np.isfinite(outs[0]))
    assert np.any(outs[0])
    np.testing.assert_array_equal(*outs)


@requires_h200_compiler
@pytest.mark.parametrize(
    ("kind", "rows", "query_len"), [("kda", 1, 1), ("kda", 256, 1), ("gdn", 16, 4)]
)
def test_layers_are_one_kernel_each_in_one_command_buffer(kind, rows, query_len):
    layer = dataclasses.replace(
        CASES[f"{kind}-128"], heads=32, conv_dtype="bfloat16", dtype="bfloat16"
    )
    num_layers = 6
    spec = dataclasses.replace(layer.spec, num_layers=num_layers)
    layout = unified_layout([spec], pool_bytes=64 << 30)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
        layer.tokens(np.random.default_rng(0), rows, query_len),
    )
    slots = StateSlots(
        slots=KernelBlocks(jnp.zeros(rows, jnp.int32), "state"),
        is_fresh=jnp.zeros(rows, bool),
    )

    def step(buffers, tokens, slots):
        outs = []
        for index in range(num_layers):
            views = DeltaViews(
                recurrent=layout.part_view("state", layer=index, part="recurrent"),
                conv=layout.part_view("state", layer=index, part="conv"),
            )
            buffers, out = STEPS[kind](
                buffers, views, tokens, layer.conv, layer.gate, slots
            )
            outs.append(out)
        return buffers, outs

    program = compile_for_h200(
        step,
        pool_struct(layout).buffers,
        ProjectedTokens(**shapes),
        slots,
        donate_argnums=0,
        thunks=True,
    )
    assert program.alias_bytes >= layout.pool_bytes
    assert program.temp_bytes < 1 << 20
    assert not pool_sized_copies(program.hlo_text, 1 << 20)
    assert program.top_thunks == ["kCommandBuffer"]
    # Nothing else runs: no copy, no constant that is filled anew.
    assert program.thunk_text.count("delta_decode_kernel") == num_layers
    assert len(program.thunk_text.strip().splitlines()) == 1 + num_layers


@pytest.mark.usefixtures("unchecked")
def test_wrong_use_is_refused():
    layer, rng = CASES["gdn"], np.random.default_rng(10)
    buffers, tokens = layer.put({}, {}), layer.tokens(rng, 2, 1)
    run = ft.partial(layer.run, buffers, tokens, [1, 2], [True, True])
    slots = layer.pools[0].slots([1, 2], [True, True])
    with pytest.raises(UnsupportedError, match="'triton' runs on gpu, not on cpu"):
        run("triton")
    with pytest.raises(UnsupportedError, match="'mosaic_gpu' does not exist"):
        run("mosaic_gpu")
    other = KernelBlocks(slots.slots.ids, "other")
    with pytest.raises(IdSpaceError, match="not of 'other'"):
        run("xla", slots=slots.replace(slots=other))
    short = tokens | {"qkv": tokens["qkv"][..., :300]}
    with pytest.raises(ValueError, match="qkv has 300 channels"):
        layer.run(buffers, short, [1, 2], [True, True], "xla")
    five = jnp.zeros((layer.channels, 5))
    with pytest.raises(ValueError, match="conv_width - 1, channels"):
        run("xla", conv=layer.conv.replace(weight=five))
    kda = CASES["kda"]
    gate = kda.gate.replace(lower_bound=0.5)
    with pytest.raises(ValueError, match=r"lower_bound=0\.5 must be below 0"):
        kda.run(kda.put({}, {}), kda.tokens(rng, 1, 1), [1], [True], "xla", gate=gate)


def test_the_kernel_refuses_decays_per_channel_where_heads_share_keys():
    module = pytest.importorskip("pallas_kernels.delta.decode")
    heads, K, V, rows = 4, 32, 32, 2
    state = module.PartPlace(
        row=0, row_words=1024, num_rows=8, dtype="float32", shape=(heads, V, K)
    )
    channels = 2 * 2 * K + heads * V
    with pytest.raises(ValueError, match="num_key_heads=2 must be heads=4"):
        module.delta_decode(
            jnp.zeros((8, 1024), jnp.uint32),
            None,
            jnp.zeros((rows, 1, channels)),
            jnp.zeros((rows, 1, heads * K)),
            jnp.zeros((rows, 1, heads)),
            jnp.zeros((channels, 4)),
            None,
            jnp.zeros(heads),
            jnp.zeros(heads * K),
            jnp.zeros(rows, jnp.int32),
            jnp.zeros(rows, jnp.bool_),
            num_key_heads=2,
            state=state,
            window=dataclasses.replace(state, shape=(3, channels)),
        )
