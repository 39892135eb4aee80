"""States, windows and full attention in one buffer, against a forward without one."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.gated_deltanet import GatedDeltaNet
from models.hybrid import Hybrid
from models.rope import plain_rope
from models.weights import abstract_weights
from tests.golden import worst_row_error
from tests.model_runner import ModelRunner
from tests.oracles.hybrid_model import Sizes, hybrid_logits
from ukv.layout import Placement

FLOAT32 = jnp.dtype("float32")
THETA = 1_000.0
MODEL = Hybrid(
    vocab_size=61,
    hidden_size=40,
    intermediate_size=56,
    pattern=("state", "swa", "state", "full", "swa"),
    num_q_heads=6,
    num_full_kv_heads=3,
    num_swa_kv_heads=2,
    head_dim=14,
    window=11,
    rope=plain_rope(14, THETA),
    delta_net=GatedDeltaNet(
        hidden_size=40,
        num_key_heads=2,
        num_value_heads=4,
        key_dim=12,
        value_dim=10,
        conv_width=4,
        epsilon=1e-6,
    ),
    epsilon=1e-6,
)
SIZES = Sizes(
    pattern=MODEL.pattern,
    head_dim=MODEL.head_dim,
    kv_heads={"full": 3, "swa": 2},
    window=MODEL.window,
    theta=THETA,
    key_heads=2,
    value_heads=4,
    key_dim=12,
    value_dim=10,
    epsilon=MODEL.epsilon,
)
PROMPT_LENS = (5, 37, 70)
NUM_DECODED = 6
# One program for prefill and chunks.
BUCKET = {"num_tokens": 112, "max_query_len": 80}
BOUND = 1e-4


@ft.cache
def weights():
    """Return random weights of such a size that every layer counts."""
    shapes, structure = jax.tree.flatten(abstract_weights(MODEL.weights(), FLOAT32))
    rng = np.random.default_rng(5)
    arrays = []
    for shape in shapes:
        values = rng.standard_normal(shape.shape)
        if len(shape.shape) == 1:
            values = 1 + 0.2 * values
        else:
            values = values / np.sqrt(shape.shape[-1])
        arrays.append(jnp.asarray(values, jnp.float32))
    return jax.tree.unflatten(structure, arrays)


@ft.cache
def sequences():
    rng = np.random.default_rng(7)
    return [
        rng.integers(0, MODEL.vocab_size, size + NUM_DECODED) for size in PROMPT_LENS
    ]


@ft.cache
def expected():
    plain = jax.tree.map(np.asarray, weights())
    return [hybrid_logits(plain, tokens, SIZES) for tokens in sequences()]


def runner(**options):
    return ModelRunner(MODEL, weights(), num_rows=3, max_tokens=80, **options)


def test_three_sub_pools_share_one_buffer():
    layout = runner().layout
    assert layout.names == ("full", "state", "swa")
    assert [sub.placement for sub in layout.sub_pools] == [
        Placement.LOW,
        Placement.FLOAT,
        Placement.HIGH,
    ]
    assert layout.sub_pool("swa").spec.id_space == "full"


@pytest.mark.parametrize("is_unified", [True, False], ids=["unified", "static"])
def test_prefill_and_decode(is_unified):
    run = runner(is_unified=is_unified)
    found = [
        [logits]
        for logits in run.step(
            [
                tokens[:size]
                for tokens, size in zip(sequences(), PROMPT_LENS, strict=True)
            ],
            **BUCKET,
        )
    ]
    for j in range(NUM_DECODED):
        logits = run.step(
            [
                tokens[size + j : size + j + 1]
                for tokens, size in zip(sequences(), PROMPT_LENS, strict=True)
            ]
        )
        for rows, new in zip(found, logits, strict=True):
            rows.append(new)
    for rows, wanted in zip(found, expected(), strict=True):
        assert worst_row_error(np.concatenate(rows), wanted) < BOUND


def test_chunks_of_any_size():
    run = runner()
    rng = np.random.default_rng(0)
    left, found = list(sequences()), [[] for _ in PROMPT_LENS]
    while any(len(row) for row in left):
        take = [min(len(row), int(rng.choice([1, 3, 20, 30]))) for row in left]
        logits = run.step(
            [row[:size] for row, size in zip(left, take, strict=True)], **BUCKET
        )
        left = [row[size:] for row, size in zip(left, take, strict=True)]
        for rows, new in zip(found, logits, strict=True):
            rows.append(new)
    for rows, wanted in zip(found, expected(), strict=True):
        assert worst_row_error(np.concatenate(rows), wanted) < BOUND
