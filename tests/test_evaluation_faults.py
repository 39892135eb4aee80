"""What an accuracy is worth: with one fault in the memory system it falls.

The numbers that were seen are in docs/evaluation.md.
"""

import dataclasses
import functools as ft
import pathlib
import re

import jax
import pytest

from models.named import find_model, load_found, read_tokenizer
from scripts.evaluation.answers import last_number
from scripts.evaluation.generation import Job, generate_texts, stop_tokens_of
from scripts.evaluation.pools import default_pool_bytes, engine_config
from scripts.evaluation.questions import built_in_set
from tests.injected_faults import (
    FaultyModel,
    Sound,
    StaleTable,
    StateNotReset,
    UntranslatedReads,
    cache_states_a_page_late,
    with_fault,
)
from tests.pools import POISON
from ukv import allocator
from ukv.engine import Engine, Programs, SamplingParams, engine_layout

NUM_QUESTIONS, NUM_FEW = 24, 12
NUM_EARLY = 8
"""Questions that are answered before many pages have moved."""

MAX_NEW_TOKENS = 64
SMALLEST_FALL, TOLERANCE = 0.3, 0.2
DOCUMENT = pathlib.Path(__file__).parents[1] / "docs" / "evaluation.md"


@ft.cache
def questions():
    return built_in_set(limit=NUM_QUESTIONS, shots=4)


@ft.cache
def tiny():
    path = find_model("tiny")
    return load_found(path, dtype="float32", progress=False), read_tokenizer(path)


@ft.cache
def jobs():
    _, tokenizer = tiny()
    params = SamplingParams(
        max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=stop_tokens_of(tokenizer)
    )
    asked = questions()
    return {
        str(q.index): Job(
            prompt=tokenizer.encode(asked.prompt(q)), params=params, stops=asked.stops
        )
        for q in asked.questions
    }


@ft.cache
def programs():
    """Return the programs of a small pool; every run has the same."""
    model = tiny()[0].model
    config = engine_config(
        "unified",
        page_size=64,
        dtype="float32",
        concurrency=10,
        max_len=max(len(job.prompt) for job in jobs().values()) + MAX_NEW_TOKENS,
        max_stop_tokens=1,
        max_step_tokens=128,
        prefix_cache=True,
    )
    pool_bytes = default_pool_bytes(model, config)
    layout = engine_layout(model, pool_bytes=pool_bytes, config=config)
    blocks = tuple((sub.name, sub.blocks_per_page) for sub in layout.sub_pools)
    return Programs(FaultyModel(model, blocks), layout, config)


def accuracy(fault, asked=slice(0, NUM_FEW), **changed):
    """Return the share of right answers, pages moving whenever there is a hole.

    Args:
      fault: What is wrong.
      asked: Which questions count; those before them are asked as well.
      changed: Fields of the config.
    """
    loaded, tokenizer = tiny()
    config = dataclasses.replace(programs().config, **changed)
    engine = Engine(
        programs().model,
        loaded.weights,
        pool_bytes=programs().translator.layout.pool_bytes,
        config=config,
        programs=with_fault(programs(), fault, config),
    )
    num_moves = 0

    def move_pages():
        nonlocal num_moves
        ledger, device = engine.scheduler.ledger, engine._device
        mirror = ledger.mirror.compact()
        if mirror != ledger.mirror:
            pool, _ = compact(device.state.pool)
            device.state, ledger.mirror = device.state.replace(pool=pool), mirror
            num_moves += 1

    compact = jax.jit(allocator.compact)
    some = {str(i): jobs()[str(i)] for i in range(asked.stop)}
    done = dict(generate_texts(engine, tokenizer, some, after_step=move_pages))
    assert num_moves > 5
    if config.prefix_cache:
        assert engine.stats().prefix_hit_tokens > 0
    # Whatever the model was told, the pool itself is right.
    engine.verify()
    right = [
        last_number(done[str(q.index)].text) == q.number
        for q in questions().questions[asked]
    ]
    return sum(right) / len(right)


@ft.cache
def sound_accuracy(num_asked):
    return accuracy(Sound(), slice(0, num_asked))


def require_fall(name, found, num_asked=NUM_FEW):
    """Check a fall in accuracy, and that it is the recorded one."""
    recorded = {
        fault.strip(): float(value)
        for fault, value in re.findall(
            r"\| ([^|]+) \| (\d\.\d+) \|", DOCUMENT.read_text()
        )
    }
    sound = sound_accuracy(num_asked)
    assert sound == pytest.approx(recorded["none"], abs=TOLERANCE)
    assert sound - found > SMALLEST_FALL, f"{name}: {found}"
    assert found == pytest.approx(recorded[name], abs=TOLERANCE)


# Eight are one batch of ten rows, twelve are two.
@pytest.mark.parametrize(
    "num_asked", [8, pytest.param(NUM_FEW, marks=pytest.mark.slow)]
)
def test_untranslated_reads(num_asked):
    found = accuracy(UntranslatedReads(), slice(0, num_asked))
    require_fall("reads are not translated", found, num_asked)


@pytest.mark.slow
def test_a_stale_table():
    found = accuracy(StaleTable(), slice(NUM_EARLY, NUM_QUESTIONS))
    require_fall("a table is stale after pages moved", found)


@pytest.mark.slow
def test_a_state_that_is_not_reset():
    # All begin with zeros if nobody finds a prefix. What a slot holds before its
    # first use can be anything: here it is NaN.
    found = accuracy(StateNotReset(), prefix_cache=False, fill_word=POISON)
    require_fall("a state slot is not reset", found)


@pytest.mark.slow
def test_a_checkpoint_that_is_off_by_a_page(monkeypatch):
    sound_accuracy(NUM_FEW)
    cache_states_a_page_late(monkeypatch)
    require_fall("a checkpoint is off by one page", accuracy(Sound()))
