"""The trained tiny model behind the engine: it answers problems it never saw."""

import json
import re

import pytest

from models.checkpoint import Checkpoint
from models.mla import LatentAttention
from models.named import TINY, find_model, load_found, read_tokenizer
from models.weights import tensor_shapes
from scripts.arithmetic_problems.problem_set import problem_set
from scripts.arithmetic_problems.tokenizer import END, build_tokenizer
from scripts.refit_tiny import right_share, rows_of_another
from scripts.tiny_training.parameters import model_config
from tests.engine_runs import greedy, run_all
from tests.pools import POISON
from ukv.engine import Engine, EngineConfig


def test_its_files_are_those_that_the_scripts_write():
    tokenizer = build_tokenizer()
    stored = json.loads((TINY / "tokenizer.json").read_text())
    assert json.loads(tokenizer.to_str()) == stored
    config = model_config(
        tokenizer.get_vocab_size(),
        tokenizer.token_to_id(END),
        num_layers=8,
        hidden=192,
    )
    assert json.loads((TINY / "config.json").read_text()) == config
    assert sum(path.stat().st_size for path in TINY.iterdir()) < 12e6


def test_it_is_the_released_architecture():
    model = load_found(find_model("tiny"), dtype="float32", progress=False).model
    assert model.kda_layers == (0, 1, 2, 4, 5, 6)
    assert model.latent_layers == (3, 7)
    assert model.moe.layers == (1, 2, 3, 4, 5, 6, 7)
    assert model.moe.num_shared == 1


def test_its_log_says_how_it_was_trained():
    lines = (TINY / "train_log.jsonl").read_text().splitlines()
    run, *steps = map(json.loads, lines)
    assert {"device", "dtype", "jax", "parameters", "arguments"} <= run.keys()
    judged = [line for line in steps if "accuracy" in line]
    assert judged
    assert all(line["accuracy"] >= 0.9 for line in judged)


@pytest.mark.parametrize("num_problems", [5, pytest.param(8, marks=pytest.mark.slow)])
def test_latent_rows_of_another_problem_cost_the_answers(num_problems, monkeypatch):
    model = load_found(find_model("tiny"), dtype="float32", progress=False).model
    with Checkpoint(TINY) as checkpoint:
        tensors = {
            name: checkpoint.read(name, shape)
            for name, shape in tensor_shapes(model.weights()).items()
        }
    assert right_share(model, tensors, build_tokenizer(), num_problems) == 1.0
    wrong = rows_of_another(LatentAttention.attend_rows)
    monkeypatch.setattr(LatentAttention, "attend_rows", wrong)
    assert right_share(model, tensors, build_tokenizer(), num_problems) < 0.5


@pytest.mark.parametrize(
    ("num_problems", "num_rows"),
    [(8, 4), pytest.param(12, 8, marks=pytest.mark.slow)],
)
def test_the_engine_answers_held_out_problems(num_problems, num_rows):
    path = find_model("tiny")
    loaded = load_found(path, dtype="float32", progress=False)
    tokenizer = read_tokenizer(path)
    drawn = problem_set(1, num_problems, "test")
    engine = Engine(
        loaded.model,
        loaded.weights,
        pool_bytes=12 << 20,
        config=EngineConfig(
            page_size=64,
            dtype="float32",
            max_rows=num_rows,
            max_kv_len=512,
            max_step_tokens=256,
            decode_buckets=(num_rows,),
            prefill_buckets=(256,),
            fill_word=POISON,
        ),
    )
    found = run_all(
        engine,
        [tokenizer.encode(drawn.prompt(problem)) for problem in drawn.problems],
        [greedy(64, stop_token_ids=tuple(tokenizer.stop_tokens))] * num_problems,
    )
    num_right = 0
    for problem, tokens in zip(drawn.problems, found, strict=True):
        text = tokenizer.decode(tokens).removesuffix(END)
        num_right += re.findall(r"#### (\d+)$", text) == [str(problem.number)]
    assert num_right >= 0.9 * num_problems
    # The worked examples were computed once.
    assert engine.stats().prefix_hit_tokens >= (num_problems - num_rows) * 384
