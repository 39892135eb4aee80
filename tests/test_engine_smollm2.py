"""A released model behind the engine: the reference's tokens, under pressure."""

import functools as ft
import json

import jax.numpy as jnp
import pytest

from models.gguf_file import load_gguf
from models.smollm2 import find_smollm2
from tests.engine_runs import greedy, run_all
from tests.golden import GOLDENS
from tests.pools import POISON
from ukv.engine import Engine, EngineConfig
from ukv.layout.sub_pool import page_bytes_of

CONFIG = EngineConfig(
    page_size=16,
    dtype="float32",
    max_rows=8,
    max_kv_len=160,
    max_step_tokens=64,
    decode_buckets=(8,),
    prefill_buckets=(64,),
    fill_word=POISON,
)


@ft.cache
def golden():
    return json.loads((GOLDENS / "smollm2" / "greedy.json").read_text())


@pytest.mark.slow
def test_greedy_tokens_are_those_of_the_reference():
    model = load_gguf(find_smollm2(), dtype="float32", progress=False)
    (spec,) = model.model.pool_specs(page_size=16, dtype=jnp.dtype("float32"))
    # Eight prompts fit, and their outputs do not.
    run = Engine(
        model.model,
        model.weights,
        pool_bytes=24 * page_bytes_of(spec),
        config=CONFIG,
    )
    wanted = golden()["prompts"]
    params = greedy(
        golden()["max_new_tokens"], stop_token_ids=(golden()["eos_token_id"],)
    )
    found = run_all(
        run, [prompt["tokens"] for prompt in wanted], [params] * len(wanted)
    )
    for tokens, prompt in zip(found, wanted, strict=True):
        assert tokens == prompt["output_tokens"], prompt["text"]
    assert run.stats().num_retractions > 0
