"""Requests over the goldens' models, run plainly and by the engine."""

import dataclasses
import functools as ft

import numpy as np

from models.registry import Loaded
from tests import test_model_hybrid
from tests.model_runner import ModelRunner
from tests.pools import POISON
from tests.short_models import load_short
from ukv.engine import Engine, EngineConfig, Programs, SamplingParams, engine_layout

CONFIG = EngineConfig(
    page_size=16,
    dtype="float32",
    max_rows=4,
    max_kv_len=192,
    max_step_tokens=160,
    decode_buckets=(4,),
    prefill_buckets=(160,),
    fill_word=POISON,
)
# Small enough that requests lose their pages, and that others are moved.
TIGHT_BYTES = {
    "llama": 230_000,
    "kimi_linear": 120_000,
    "gemma3": 280_000,
    "hybrid": 200_000,
}
STATIC_PAGES = {
    "llama": (("full", 13),),
    "kimi_linear": (("mla", 16), ("kda", 3)),
    "gemma3": (("full", 16), ("swa", 14)),
    "hybrid": (("full", 13), ("state", 4), ("swa", 13)),
}
LENGTHS = (131, 5, 70, 33, 47, 20)
NUM_NEW = (36, 12, 30, 36, 24, 36)


def static_config(family):
    return dataclasses.replace(
        CONFIG, is_unified=False, static_pages=STATIC_PAGES[family]
    )


@ft.cache
def loaded(family):
    if family == "hybrid":
        return Loaded(
            model=test_model_hybrid.MODEL, weights=test_model_hybrid.weights()
        )
    return load_short(family)


@ft.cache
def prompts(family):
    rng = np.random.default_rng(7)
    vocab = loaded(family).model.vocab_size
    return [rng.integers(vocab, size=length).tolist() for length in LENGTHS]


@ft.cache
def programs(family, pool_bytes, config):
    model = loaded(family).model
    layout = engine_layout(model, pool_bytes=pool_bytes, config=config)
    return Programs(model, layout, config)


def engine(family, *, pool_bytes=None, config=CONFIG):
    """Return a fresh engine; those of one kind share their programs."""
    pool_bytes = pool_bytes or TIGHT_BYTES[family]
    model = loaded(family)
    return Engine(
        model.model,
        model.weights,
        pool_bytes=pool_bytes,
        config=config,
        programs=programs(family, pool_bytes, config),
    )


@ft.cache
def plain_tokens(family):
    """Return the greedy tokens of each prompt, one request and token at a time."""
    model, found = loaded(family), []
    run = ModelRunner(model.model, model.weights, num_rows=1, max_tokens=192)
    translator = run.translator
    for prompt, num_new in zip(prompts(family), NUM_NEW, strict=True):
        run = ModelRunner(model.model, model.weights, num_rows=1, max_tokens=192)
        run.translator = translator  # steps are compiled once
        for token in prompt:
            (logits,) = run.step([np.array([token])])
        tokens = [int(np.argmax(logits[-1]))]
        while len(tokens) < num_new:
            (logits,) = run.step([np.array(tokens[-1:])])
            tokens.append(int(np.argmax(logits[-1])))
        found.append(tokens)
    return found


def drain(run, tokens, *, check=True):
    """Step until there is no work; collect tokens and reasons by request id."""
    reasons = {}
    while run.has_work:
        for output in run.step():
            tokens.setdefault(output.request_id, []).extend(output.new_tokens)
            if output.finish_reason is not None:
                assert output.request_id not in reasons
                reasons[output.request_id] = output.finish_reason
        if check:
            run.verify()
    return reasons


def run_all(run, wanted, params, *, check=True):
    """Run prompts to their end; return each one's tokens in order."""
    names = [
        run.add_request(prompt, param)
        for prompt, param in zip(wanted, params, strict=True)
    ]
    tokens = {}
    drain(run, tokens, check=check)
    require_empty(run)
    return [tokens[name] for name in names]


def require_empty(run):
    """Check that nothing is in the pool but what the prefix cache holds."""
    assert run.stats().used_bytes == run.stats().cached_bytes
    run.clear_prefix_cache()
    assert not any(run.stats().used_bytes.values())
    run.verify()


def greedy(num_new, **fields):
    return SamplingParams(max_new_tokens=num_new, **fields)


def all_greedy():
    return [greedy(num_new) for num_new in NUM_NEW]
