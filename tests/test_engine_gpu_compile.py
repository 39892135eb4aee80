"""Compiled for an H200, every program of the engine works in place."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from models.registry import read_model
from models.weights import abstract_weights
from tests.engine_runs import CONFIG
from tests.golden import GOLDENS
from tests.gpu_compile import (
    compile_for_h200,
    pool_sized_copies,
    requires_h200_compiler,
)
from tests.short_models import load_short
from ukv.engine import Programs, engine_layout
from ukv.engine.actions import MAX_CHECKPOINTS, MAX_NAMES, MAX_RELEASES
from ukv.engine.device_state import create_device_state
from ukv.engine.prefix_programs import checkpoint, drop, keep, reuse
from ukv.engine.row_programs import ADMIT_COLUMNS, admit, move_pages, release
from ukv.engine.step import pack_chunks
from ukv.translator import make_static_tables

POOL_BYTES = 2 << 30
FAMILY = "gemma3"  # windows, so that a step also gives pages back


def shapes_of(make):
    return jax.eval_shape(make)


def leaf_bytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def int32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def require_in_place(program, donated):
    assert program.alias_bytes == leaf_bytes(donated)
    # Far less than the pool: tables of its pages, values of the step's tokens.
    assert program.temp_bytes < 256 << 20
    assert pool_sized_copies(program.hlo_text, 256 << 20) == []


@requires_h200_compiler
@pytest.mark.parametrize(
    "decode_steps", [1, pytest.param(3, marks=pytest.mark.slow), None]
)
def test_a_step_is_in_place(decode_steps):
    config = dataclasses.replace(
        CONFIG, decode_steps=decode_steps or 1, dtype="bfloat16"
    )
    model = load_short(FAMILY).model
    layout = engine_layout(model, pool_bytes=POOL_BYTES, config=config)
    programs = Programs(model, layout, config)
    is_decode = decode_steps is not None
    shape = next(s for s in programs.shapes if s.is_decode == is_decode)
    state = shapes_of(lambda: create_device_state(config, layout))
    static = shapes_of(
        lambda: make_static_tables(programs.translator, [shape.bucket])[shape.bucket]
    )
    weights = abstract_weights(model.weights(), jnp.dtype("bfloat16"))
    packed = pack_chunks(shape, [], config.max_rows)
    program = compile_for_h200(
        programs.steps[shape], state, static, weights, int32(*packed.shape)
    )
    require_in_place(program, (state, static))


@requires_h200_compiler
@pytest.mark.parametrize("family", [FAMILY, "kimi_linear"])
@pytest.mark.parametrize(
    "program", [admit, checkpoint, drop, keep, move_pages, release, reuse]
)
def test_programs_between_steps_are_in_place(program, family):
    model = read_model(GOLDENS / family)
    layout = engine_layout(model, pool_bytes=POOL_BYTES, config=CONFIG)
    if program is checkpoint and all(owner.spec.grows for owner in layout.owners):
        pytest.skip("there is no state to copy")
    state = shapes_of(lambda: create_device_state(CONFIG, layout))
    packed = {
        admit: int32(CONFIG.max_rows, state.params.shape[1] + ADMIT_COLUMNS),
        checkpoint: int32(MAX_CHECKPOINTS, 2),
        drop: int32(len(layout.sub_pools), MAX_NAMES),
        keep: int32(MAX_NAMES, 3),
        move_pages: int32(len(layout.owners)),
        release: int32(MAX_RELEASES, 2),
        reuse: int32(MAX_NAMES, 3),
    }[program]
    compiled = compile_for_h200(program, state, packed, donate_argnums=0)
    require_in_place(compiled, state)
