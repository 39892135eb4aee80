"""Prefill of KDA and GDN from the projections to the output norm, packed rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.delta_step_layers import Layer, draw
from tests.gpu_compile import (
    compile_for_h200,
    pool_sized_copies,
    requires_h200_compiler,
)
from tests.state_pools import round_to
from tests.test_ops_delta_prefill import check
from tests.triton_interpreter import (
    IS_INTERPRETING,
    assert_passes_in_the_interpreter,
    interpret_launches,
)
from ukv.errors import UnsupportedError
from ukv.ids import KernelBlocks
from ukv.layout import unified_layout
from ukv.ops import (
    DeltaViews,
    ProjectedTokens,
    StateSlots,
    gdn_prefill_step,
    kda_prefill_step,
)
from ukv.pool import pool_struct

PREFILLS = {
    name: jax.jit(op, static_argnames=("views", "max_query_len", "implementation"))
    for name, op in (("kda", kda_prefill_step), ("gdn", gdn_prefill_step))
}
LAYERS = {
    "kda": Layer(kind="kda", conv_dtype="bfloat16", dtype="bfloat16", has_bias=True),
    "gdn": Layer(kind="gdn", dtype="bfloat16", placement="static"),
}
by_implementation = pytest.mark.parametrize(
    "implementation",
    ["xla", pytest.param("triton", marks=(pytest.mark.gpu, pytest.mark.triton))],
)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Triton's interpreter in the place of a card."""
    interpret_launches(monkeypatch, "short_conv", "delta.prefill")


@pytest.mark.skipif(IS_INTERPRETING, reason="this is that process")
@requires_h200_compiler
def test_the_kernels_pass_in_the_interpreter():
    assert_passes_in_the_interpreter(__file__)


@pytest.mark.parametrize("kind", LAYERS)
@by_implementation
def test_packed_rows_match_the_oracles(kind, implementation):
    layer, rng = LAYERS[kind], np.random.default_rng(0)
    state, window = layer.pools
    lens, slots = [70, 2, 0, 130, 5], [6, 2, 7, 3, None]
    is_fresh = [False, True, False, False, True]
    bounds = np.cumsum([0, *lens])
    # The last tokens are of no row.
    tokens = {
        name: x[0] for name, x in layer.tokens(rng, 1, int(bounds[-1]) + 4).items()
    }
    for x in tokens.values():
        x[bounds[-2] :] = np.nan
    states, windows = draw(layer, rng, [6, 7, 3])
    before = layer.put(states, windows)
    checkpoints = [[None], [None], [None], [5], [None]]
    after, out = PREFILLS[kind](
        before,
        layer.views,
        ProjectedTokens(**jax.tree.map(jnp.asarray, tokens)),
        layer.conv,
        layer.gate,
        jnp.asarray(bounds, jnp.int32),
        state.slots(slots, is_fresh, checkpoints, [[0], [0], [0], [64], [0]]),
        max_query_len=130,
        implementation=implementation,
    )
    out = np.asarray(out)
    assert np.all(out[bounds[-2] :] == 0)

    def expect(row, length, slot):
        part = slice(bounds[row], bounds[row] + length)
        if is_fresh[row]:
            starts = tuple(np.zeros(pool.view.shape) for pool in layer.pools)
        else:
            starts = states[slots[row]], windows[slots[row]]
        of_row = {name: x[part] for name, x in tokens.items()}
        truth, last_state, last_window = layer.expected(of_row, *starts)
        check(out[part], truth, length, head_axis=1)
        check(state.get(after, slot), last_state, length, head_axis=0)
        last_window = round_to(last_window, window.view.dtype)
        np.testing.assert_array_equal(window.get(after, slot), last_window)

    for row in (0, 1, 3):
        expect(row, lens[row], slots[row])
    expect(3, 64, 5)
    written = [6, 2, 7, 3, 5]
    for old, new in zip(
        layer.erased(before, written), layer.erased(after, written), strict=True
    ):
        np.testing.assert_array_equal(old, new)


@requires_h200_compiler
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_is_in_place_in_one_command_buffer(kind):
    layer = Layer(
        kind=kind,
        heads=32,
        key_dim=128,
        value_dim=128,
        conv_dtype="bfloat16",
        dtype="bfloat16",
    )
    layout = unified_layout([layer.spec], pool_bytes=64 << 30)
    num_tokens, rows = 2048, 4
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((num_tokens, *x.shape[2:]), jnp.bfloat16),
        layer.tokens(np.random.default_rng(0), 1, 1),
    )
    slots = StateSlots(
        slots=KernelBlocks(jnp.zeros(rows, jnp.int32), "state"),
        is_fresh=jnp.zeros(rows, bool),
    )
    views = DeltaViews(
        recurrent=layout.part_view("state", layer=1, part="recurrent"),
        conv=layout.part_view("state", layer=1, part="conv"),
    )

    def step(buffers, tokens, cu_query_lens, slots):
        return PREFILLS[kind](
            buffers,
            views,
            tokens,
            layer.conv,
            layer.gate,
            cu_query_lens,
            slots,
            max_query_len=num_tokens,
            implementation="triton",
        )

    program = compile_for_h200(
        step,
        pool_struct(layout).buffers,
        ProjectedTokens(**shapes),
        jnp.zeros(rows + 1, jnp.int32),
        slots,
        donate_argnums=0,
        thunks=True,
    )
    assert program.alias_bytes >= layout.pool_bytes
    assert not pool_sized_copies(program.hlo_text, num_tokens * 128)
    assert program.top_thunks == ["kCommandBuffer"]


def test_what_the_kernels_do_not_cover_is_refused():
    layer, rng = LAYERS["kda"], np.random.default_rng(1)
    tokens = {name: jnp.asarray(x[0]) for name, x in layer.tokens(rng, 1, 3).items()}
    with pytest.raises(UnsupportedError, match="'triton' runs on gpu, not on cpu"):
        PREFILLS["kda"](
            layer.put({}, {}),
            layer.views,
            ProjectedTokens(**tokens),
            layer.conv,
            layer.gate,
            jnp.asarray([0, 3], jnp.int32),
            layer.pools[0].slots([1], [True]),
            max_query_len=3,
            implementation="triton",
        )
