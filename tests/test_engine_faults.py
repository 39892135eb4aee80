"""One bad request ends with an error; the others do not notice."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine_runs import (
    CONFIG,
    TIGHT_BYTES,
    all_greedy,
    drain,
    engine,
    greedy,
    loaded,
    plain_tokens,
    programs,
    prompts,
    require_empty,
)
from ukv.engine import Engine, FinishReason, Programs
from ukv.errors import PoolStateError
from ukv.pool import write_entries


class FailingStep:
    """A compiled step that raises when it should."""

    def __init__(self, step, should_fail, text="the wire was cut"):
        self.step, self.should_fail, self.text = step, should_fail, text
        self.num_failures = 0

    def __call__(self, state, static, weights, packed):
        if self.should_fail(packed):
            self.num_failures += 1
            # As if it had been dispatched: what was donated is gone.
            jax.tree.map(lambda leaf: leaf.delete(), state)
            raise jax.errors.JaxRuntimeError(self.text)
        return self.step(state, static, weights, packed)


def failing_engine(should_fail, *, config=CONFIG, is_decode=False, **options):
    """Return an engine whose largest step of a kind fails now and then."""
    base = programs("llama", TIGHT_BYTES["llama"], config)
    own = Programs(base.model, base.translator.layout, base.config)
    own.translator, own.steps = base.translator, dict(base.steps)
    shape = [shape for shape in own.shapes if shape.is_decode == is_decode][-1]
    own.steps[shape] = FailingStep(base.steps[shape], should_fail, **options)
    model = loaded("llama")
    run = Engine(
        model.model,
        model.weights,
        pool_bytes=TIGHT_BYTES["llama"],
        config=config,
        programs=own,
    )
    return run, own.steps[shape]


def add_all(run, params=None):
    return [
        run.add_request(prompt, param)
        for prompt, param in zip(prompts("llama"), params or all_greedy(), strict=True)
    ]


def run_to_end(run, names):
    tokens = {}
    errors = {}
    while run.has_work:
        for output in run.step():
            tokens.setdefault(output.request_id, []).extend(output.new_tokens)
            if output.error is not None:
                errors[output.request_id] = output.error
        run.verify()
    require_empty(run)
    return [tokens.get(name, []) for name in names], errors


def test_a_step_that_raises_once_costs_no_token():
    left = [3]

    def third_time(packed):
        left[0] -= 1
        return left[0] == 0

    run, step = failing_engine(third_time)
    found, errors = run_to_end(run, add_all(run))
    assert step.num_failures == run.stats().num_restarts == 1
    assert errors == {}
    assert found == plain_tokens("llama")


def test_the_request_that_makes_a_step_raise_is_found_and_ends():
    bad = 2
    tokens = prompts("llama")[bad]

    def has_bad_prompt(packed):
        return np.asarray(tokens[:8], np.int32).tobytes() in packed.tobytes()

    run, step = failing_engine(has_bad_prompt)
    names = add_all(run)
    found, errors = run_to_end(run, names)
    assert list(errors) == [names[bad]]
    assert errors[names[bad]] == "JaxRuntimeError: the wire was cut"
    # Once in company, once alone.
    assert step.num_failures == run.stats().num_restarts == 2
    expected = plain_tokens("llama")
    assert found[:bad] + found[bad + 1 :] == expected[:bad] + expected[bad + 1 :]


def test_a_step_that_always_raises_ends_everyone():
    run, _ = failing_engine(lambda packed: True)
    names = add_all(run)
    found, errors = run_to_end(run, names)
    assert sorted(errors) == sorted(names)
    assert found == [[]] * len(names)


@pytest.mark.parametrize("is_decode", [False, True])
def test_out_of_memory_turns_to_a_smaller_step(is_decode):
    config = dataclasses.replace(
        CONFIG, decode_buckets=(2, 4), prefill_buckets=(40, 160)
    )
    run, step = failing_engine(
        lambda packed: True,
        config=config,
        is_decode=is_decode,
        text="RESOURCE_EXHAUSTED: out of memory",
    )
    found, errors = run_to_end(run, add_all(run))
    assert step.num_failures == run.stats().num_restarts == 1
    assert errors == {}
    assert found == plain_tokens("llama")


def test_a_poisoned_page_ends_its_own_request():
    run = engine("llama")
    names = add_all(run)
    tokens, victim = {}, 1
    for _ in range(6):
        for output in run.step():
            tokens.setdefault(output.request_id, []).extend(output.new_tokens)
    sequence = run._sequences[names[victim]]
    assert sequence.has_last_token
    poison(run, sequence.row)
    errors = {}
    while run.has_work:
        for output in run.step():
            tokens.setdefault(output.request_id, []).extend(output.new_tokens)
            if output.finish_reason is FinishReason.ERROR:
                errors[output.request_id] = output.error
        run.verify()
    assert list(errors) == [names[victim]]
    assert "are not finite numbers" in errors[names[victim]]
    for name, expected in zip(names, plain_tokens("llama"), strict=True):
        found = tokens[name]
        is_victim = name == names[victim]
        assert found == (expected[: len(found)] if is_victim else expected)
    assert run.stats().num_restarts == 0


def poison(run, row):
    """Fill the values of a row's first page, in one layer, with NaN."""
    state = run._device.state
    (sub,), (buffer,) = run.layout.sub_pools, state.pool.buffers
    view = run.layout.part_view(sub.name, layer=1, part="v")
    page = state.pool.tables[0].v2p[state.page_tables[sub.name].ids[row, 0]]
    first = (page * sub.blocks_per_page + view.block_offset) * sub.page_size
    rows = first + jnp.arange(sub.page_size) * view.rows_per_entry
    nan = jnp.full((sub.page_size, *view.shape), jnp.nan, view.dtype)
    buffer = write_entries(buffer, view, rows.astype(jnp.int32), nan)
    run._device.state = state.replace(pool=state.pool.replace(buffers=(buffer,)))


def test_an_error_word_of_the_pool_is_raised():
    run = engine("llama")
    run.add_request(prompts("llama")[0], greedy(9))
    run.step()
    state = run._device.state
    pool = state.pool.replace(error=jnp.full_like(state.pool.error, 2))
    run._device.state = state.replace(pool=pool)
    with pytest.raises(PoolStateError, match="'full': DOUBLE_FREE"):
        drain(run, {}, check=False)
