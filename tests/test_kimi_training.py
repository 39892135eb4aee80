"""Training without a pool: the model's own forward pass, and it learns."""

import functools as ft
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.checkpoint import Checkpoint
from models.registry import load, read_model
from models.weights import assemble_weights, tensor_shapes
from scripts import refit_tiny, train_tiny
from scripts.arithmetic_problems.problem_set import problem_set, worked_block
from scripts.arithmetic_problems.tokenizer import END, build_tokenizer
from scripts.tiny_training.batches import training_batches
from scripts.tiny_training.learner import OPTIMIZER, Learner, pad_prompts
from scripts.tiny_training.parameters import (
    ROUTER_BIAS,
    init_tensors,
    model_config,
    save_checkpoint,
)
from tests.comparison import assert_matches
from tests.golden import GOLDENS, Golden, worst_row_error
from tests.model_runner import ModelRunner
from tests.oracles import recurrent as oracle
from ukv.ops import (
    DeltaTokens,
    KdaGate,
    ShortConv,
    kda_rows,
    normalize_qk,
    recurrent_delta_rule,
    short_conv_rows,
)
from ukv.ops.delta_training import delta_rule_rows


@ft.cache
def golden_model():
    return load(GOLDENS / "kimi_linear", dtype="float32", progress=False)


@ft.cache
def tokenizer():
    return build_tokenizer()


def small_config():
    """The tiny model's config with one layer of each kind, and small."""
    config = model_config(
        tokenizer().get_vocab_size(),
        tokenizer().token_to_id(END),
        num_layers=4,
        hidden=32,
    )
    config["num_hidden_layers"] = 2
    config["linear_attn_config"] |= {
        "kda_layers": [1],
        "full_attn_layers": [2],
        "head_dim": 16,
    }
    return config


def small_learner(folder):
    (folder / "config.json").write_text(json.dumps(small_config()))
    return Learner(
        model=read_model(folder),
        dtype="float32",
        answer_token=tokenizer().encode("Answer:").ids[0],
        end_token=tokenizer().token_to_id(END),
    )


def test_rows_without_a_pool_give_the_logits_of_a_prefill():
    model, weights = golden_model().model, golden_model().weights
    expected = Golden("kimi_linear")
    prompts = [expected.prompt(i) for i in range(4)]
    runner = ModelRunner(model, weights, num_rows=4, max_tokens=160)
    prefilled = runner.step(prompts)
    tokens, lens = pad_prompts([list(prompt) for prompt in prompts], 131)
    is_token = np.arange(131) < lens[:, None]
    logits, loads = jax.jit(model.forward_rows)(weights, tokens, is_token)
    for row, prompt in enumerate(prompts):
        found = np.asarray(logits[row, : len(prompt)])
        assert worst_row_error(found, prefilled[row]) < 1e-5
        assert worst_row_error(found, expected.logits(row)) < 1e-4
    # Eight layers have experts, and each token of a row chose two of them.
    assert loads.shape == (8, 8)
    np.testing.assert_allclose(loads.sum(axis=1), 2.0, rtol=1e-5)


def test_kda_rows_match_the_oracle():
    rows, time, heads, dim = 2, 150, 2, 24
    rng = np.random.default_rng(0)
    tokens = DeltaTokens(
        q=rng.normal(size=(rows, time, heads, dim)),
        k=rng.normal(size=(rows, time, heads, dim)),
        v=rng.normal(size=(rows, time, heads, dim)),
        gate_logits=rng.normal(size=(rows, time, heads, dim)),
        beta_logits=rng.normal(size=(rows, time, heads)),
    )
    tokens = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tokens)
    gate = KdaGate(
        a_log=jnp.asarray(np.log([0.5, 4.0]), jnp.float32),
        dt_bias=jnp.asarray(rng.normal(size=(heads, dim)) - 2, jnp.float32),
    )
    found = jax.jit(kda_rows)(tokens, gate)
    for row in range(rows):
        one = jax.tree.map(lambda x, row=row: np.asarray(x[row], np.float64), tokens)
        expected, _ = oracle.kda_recurrent(
            oracle.l2_normalize(one.q, eps=1e-6),
            oracle.l2_normalize(one.k, eps=1e-6),
            one.v,
            oracle.kda_log_decay(one.gate_logits, gate.a_log, gate.dt_bias),
            1 / (1 + np.exp(-one.beta_logits)),
            np.zeros((heads, dim, dim)),
            scale=dim**-0.5,
        )
        assert_matches(
            np.asarray(found[row]),
            expected,
            dtype="float32",
            reduced_len=time * dim,
            row_axes=(1,),
        )


def test_gradients_are_those_of_the_recurrence():
    rows, time, heads, dim = 2, 90, 2, 8
    rng = np.random.default_rng(1)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    q, k = normalize_qk(draw(rows, time, heads, dim), draw(rows, time, heads, dim), 2)
    v, slope = draw(rows, time, heads, dim), draw(rows, time, heads, dim)
    # From nearly none to all: what it forgets has no gradient left to lose.
    log_decay = -jnp.exp(3 * draw(rows, time, heads, dim) - 2)
    beta = jax.nn.sigmoid(draw(rows, time, heads))
    state, lens = jnp.zeros((rows, heads, dim, dim)), jnp.full(rows, time, jnp.int32)

    def recurrent(*inputs):
        return jnp.sum(recurrent_delta_rule(*inputs, state, lens)[0] * slope)

    def training(*inputs):
        return jnp.sum(delta_rule_rows(*inputs) * slope)

    expected, found = (
        jax.jit(jax.grad(form, argnums=range(5)))(q, k, v, log_decay, beta)
        for form in (recurrent, training)
    )
    for wanted, got in zip(expected, found, strict=True):
        error = np.abs(np.asarray(wanted - got)).max()
        assert error < 2e-4 * np.abs(np.asarray(wanted)).max()


def test_short_conv_rows_begin_with_zeros():
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(2, 9, 5)), rng.normal(size=(5, 4))
    conv = ShortConv(weight=jnp.asarray(weight, jnp.float32))
    found = short_conv_rows(jnp.asarray(x, jnp.float32), conv)
    padded = np.pad(x, ((0, 0), (3, 0), (0, 0)))
    summed = sum(padded[:, j : j + 9] * weight[:, j] for j in range(4))
    np.testing.assert_allclose(found, summed / (1 + np.exp(-summed)), atol=1e-5)


def test_arrays_of_tensors_in_memory_are_those_of_the_file():
    folder = GOLDENS / "kimi_linear"
    description = golden_model().model.weights()
    with Checkpoint(folder) as checkpoint:
        tensors = {
            name: checkpoint.read(name, shape)
            for name, shape in tensor_shapes(description).items()
        }
        assert checkpoint.unread() == []
    found = assemble_weights(description, tensors, jnp.dtype("float32"))
    jax.tree.map(np.testing.assert_array_equal, found, golden_model().weights)


def test_a_stored_checkpoint_loads_as_a_released_one(tmp_path):
    config = small_config()
    learner = small_learner(tmp_path)
    shapes = tensor_shapes(learner.model.weights())
    tensors = init_tensors(shapes, 0, num_layers=2)
    save_checkpoint(tmp_path, config, tensors, tokenizer())
    loaded = load(tmp_path, dtype="bfloat16", progress=False)
    assert loaded.model == learner.model
    gate = loaded.weights["layers"][0]["mixer"]["a_log"]
    name = "model.layers.0.self_attn.A_log"
    np.testing.assert_array_equal(gate, tensors[name].reshape(-1))


def test_only_answers_are_learned(tmp_path):
    learner = small_learner(tmp_path)
    drawn = problem_set(0, 1)
    text = drawn.prefix + worked_block(drawn.problems[0])
    tokens = tokenizer().encode(text).ids
    is_answer = np.asarray(learner.is_answer(jnp.asarray([tokens], jnp.int32)))[0]
    # What is left of the text when all else is taken away.
    kept = tokenizer().decode(np.array(tokens)[is_answer].tolist())
    answers = [
        block.split("Answer:")[1] for block in text.split(END) if "Answer" in block
    ]
    assert kept == "".join(answer + END for answer in answers)


def test_it_learns_a_batch_by_heart_and_balances_its_experts(tmp_path):
    learner = small_learner(tmp_path)
    shapes = tensor_shapes(learner.model.weights())
    tensors = init_tensors(shapes, 0, num_layers=2)
    before = jax.tree.map(np.array, tensors)
    (drawn,) = training_batches(
        tokenizer().to_str(),
        seed=0,
        num_batches=1,
        batch_rows=2,
        length=161,
        processes=1,
    )
    batches = np.repeat(drawn[None], 40, axis=0)
    rates = np.full(40, 0.01, np.float32)
    # Optax counts its steps in int32 and lets JAX promote.
    with jax.numpy_dtype_promotion("standard"):
        tensors, _, losses, peaks = learner.train(
            tensors, OPTIMIZER.init(tensors), batches, rates
        )
    assert losses[0] > 4
    assert losses[-1] < losses[0] / 4
    (bias,) = [name for name in tensors if name.endswith(ROUTER_BIAS)]
    # The bias moves by its own rule, in equal steps, and nothing stays as it was.
    moves = np.asarray(tensors[bias]) / 0.005
    np.testing.assert_allclose(moves, np.round(moves), atol=1e-2)
    assert all((np.asarray(tensors[name]) != before[name]).any() for name in before)
    assert peaks.shape == (40,)


def test_batches_depend_on_the_seed_and_their_index():
    def drawn(**options):
        options = {"seed": 0, "num_batches": 3, "processes": 1} | options
        return list(
            training_batches(tokenizer().to_str(), batch_rows=2, length=100, **options)
        )

    first, other = drawn(), drawn(seed=1)
    assert all(batch.shape == (2, 100) for batch in first)
    assert len({batch.tobytes() for batch in first + other}) == 6
    again = drawn(num_batches=2, processes=2)
    assert all((a == b).all() for a, b in zip(first, again, strict=False))


def test_greedy_answers_are_those_of_the_prefill(tmp_path):
    learner = small_learner(tmp_path)
    shapes = tensor_shapes(learner.model.weights())
    tensors = init_tensors(shapes, 1, num_layers=2)
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3]]
    tokens, lens = pad_prompts(prompts, 16)
    found = np.asarray(learner.answer(tensors, tokens, lens, 4))
    weights = assemble_weights(learner.model.weights(), tensors, jnp.dtype("float32"))
    runner = ModelRunner(learner.model, weights, num_rows=2, max_tokens=16)
    logits = runner.step([np.array(prompt, np.int32) for prompt in prompts])
    for index in range(4):
        best = [int(rows[-1].argmax()) for rows in logits]
        assert [found[row, lens[row] + index] for row in range(2)] == best
        logits = runner.step([np.array([token], np.int32) for token in best])


@pytest.mark.parametrize("script", [train_tiny, refit_tiny])
def test_scripts_explain_themselves(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script", "--help"])
    with pytest.raises(SystemExit, match="0"):
        script.main()
    assert "python scripts/" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--steps 0", "--layers 6", "--batch-rows 0"])
def test_options_out_of_range_are_refused(option, tmp_path, monkeypatch, capsys):
    words = ["train_tiny.py", "--out", str(tmp_path), *option.split()]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="2"):
        train_tiny.main()
    assert option.split()[0] in capsys.readouterr().err


@pytest.mark.slow
def test_the_script_trains_and_stores(tmp_path, monkeypatch):
    options = "--steps 1 --batch-rows 1 --layers 4 --hidden 32 --problems 2"
    words = ["train_tiny.py", "--out", str(tmp_path), *options.split()]
    monkeypatch.setattr(sys, "argv", [*words, "--processes", "1"])
    with jax.numpy_dtype_promotion("standard"):
        train_tiny.main()
    lines = (tmp_path / "train_log.jsonl").read_text().splitlines()
    run, step, *judged = map(json.loads, lines)
    assert run["arguments"]["steps"] == 1
    assert step["step"] == train_tiny.STEPS_PER_CALL
    assert [line["shots"] for line in judged] == [4, 4, 0]
    assert load(tmp_path, progress=False).model.num_layers == 4
