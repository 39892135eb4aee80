"""The engine gives each request the tokens that it would get alone."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.engine_runs import (
    CONFIG,
    NUM_NEW,
    all_greedy,
    drain,
    engine,
    greedy,
    loaded,
    plain_tokens,
    prompts,
    require_empty,
    run_all,
    static_config,
)
from ukv.engine import Engine, FinishReason, RequestError, engine_layout
from ukv.errors import BudgetError, SpecError

FAMILIES = ["llama", "kimi_linear", "gemma3", "hybrid"]
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
compiled = []


@jax.monitoring.register_event_duration_secs_listener
def _count_compiles(event, *_, **__):
    if event == COMPILE_EVENT:
        compiled.append(event)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_crowded_pool_changes_no_token(family):
    run = engine(family)
    found = run_all(run, prompts(family), all_greedy())
    assert found == plain_tokens(family)
    stats = run.stats()
    assert stats.num_retractions > 0
    # One sub-pool has no neighbour that its holes could help.
    assert stats.num_moves > 0 or len(run.layout.sub_pools) == 1
    assert stats.num_tokens == sum(NUM_NEW)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_request_at_a_time(family):
    run = engine(family)
    for prompt, expected in zip(prompts(family), plain_tokens(family), strict=True):
        # Alone, a prompt is prefilled whole; in the crowd it was split.
        assert run_all(run, [prompt], [greedy(len(expected))]) == [expected]
    assert run.stats().num_retractions == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_static_pool_gives_the_same_tokens(family):
    run = engine(family, config=static_config(family))
    found = run_all(run, prompts(family), all_greedy())
    assert found == plain_tokens(family)
    stats = run.stats()
    assert stats.num_moves == 0
    assert stats.num_retractions > 0


def test_a_static_pool_is_split_for_the_longest_requests():
    config = dataclasses.replace(CONFIG, is_unified=False)
    model = loaded("gemma3").model
    layout = engine_layout(model, pool_bytes=4_000_000, config=config)
    assert not layout.is_unified
    assert 3_800_000 < layout.pool_bytes <= 4_000_000
    # 192 tokens are 12 pages; the window of 20 and a chunk of 160 span 13, at most 12.
    full, swa = (sub.num_pages for sub in layout.sub_pools)
    assert abs((full - 1) - swa) <= 1


def test_nothing_compiles_after_the_warm_up():
    run = engine("llama")
    run.warm_up(progress=False)
    run.verify()
    compiled.clear()
    params = [greedy(9), greedy(9, temperature=1.0, top_k=5, seed=3), greedy(3)]
    names = [
        run.add_request(prompt, param)
        for prompt, param in zip(prompts("llama"), params, strict=False)
    ]
    run.step()
    run.abort(names[0])
    drain(run, {}, check=False)
    assert compiled == []
    assert jax.jit(lambda x: x + 41)(1) == 42
    assert compiled  # the count counts


def test_stop_tokens_end_a_request_and_change_no_other():
    run = engine("llama")
    expected = plain_tokens("llama")
    stop = expected[1][10]
    at = expected[1].index(stop)
    params = all_greedy()
    params[1] = dataclasses.replace(params[1], stop_token_ids=(stop,))
    found = run_all(run, prompts("llama"), params)
    assert found[1] == expected[1][: at + 1]
    assert found[:1] + found[2:] == expected[:1] + expected[2:]


def test_a_request_that_never_fits_is_refused_with_the_numbers():
    run = engine("llama", pool_bytes=100_000)
    with pytest.raises(BudgetError, match=r"184,320 bytes at once .*full 12 x 15,360"):
        run.add_request([1] * 180, greedy(5))
    with pytest.raises(RequestError, match="200 tokens in the pool, max_kv_len=192"):
        run.add_request([1] * 190, greedy(11))
    assert not run.has_work


@pytest.mark.usefixtures("unchecked")
def test_one_prompt_is_no_list_of_prompts():
    with pytest.raises(RequestError, match="prompt=1 must be token ids, one prompt a"):
        list(engine("llama").generate([1, 2], greedy(1)))


def test_malformed_requests_are_refused():
    run = engine("llama")
    run.add_request([1], request_id="a")
    with pytest.raises(RequestError, match="'a' is taken"):
        run.add_request([1], request_id="a")
    with pytest.raises(RequestError, match="empty prompt"):
        run.add_request([])
    with pytest.raises(RequestError, match=r"token=150 is not in \[0, 150\)"):
        run.add_request([0, 150])
    with pytest.raises(RequestError, match="5 stop_token_ids, max_stop_tokens=4"):
        run.add_request([1], greedy(1, stop_token_ids=(1, 2, 3, 4, 5)))
    with pytest.raises(RequestError, match="no unfinished request has the id 'b'"):
        run.abort("b")


def test_programs_of_another_engine_are_refused():
    model = loaded("llama")
    with pytest.raises(SpecError, match="another model, pool or config"):
        Engine(
            model.model,
            model.weights,
            pool_bytes=100_000,
            config=CONFIG,
            programs=engine("llama").programs,
        )


def test_abort_frees_everything_and_changes_no_other():
    run = engine("llama")
    names = [
        run.add_request(prompt, param)
        for prompt, param in zip(prompts("llama"), all_greedy(), strict=True)
    ]
    tokens, aborted = {}, []
    for num_steps in range(12):
        for output in run.step():
            tokens.setdefault(output.request_id, []).extend(output.new_tokens)
        # One mid-prefill, one waiting, one decoding.
        if num_steps in (0, 1, 8):
            aborted.append(names[(0, 5, 1)[(0, 1, 8).index(num_steps)]])
            run.abort(aborted[-1])
        run.verify()
    reasons = drain(run, tokens)
    assert all(reasons.get(name, FinishReason.ABORT) for name in aborted)
    require_empty(run)
    for name, expected in zip(names, plain_tokens("llama"), strict=True):
        found = tokens.get(name, [])
        assert found == (expected[: len(found)] if name in aborted else expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["kimi_linear", "hybrid"])
def test_random_arrivals_and_aborts_leak_nothing(family):
    rng = np.random.default_rng(1)
    run = engine(family)
    vocab = loaded(family).model.vocab_size
    unfinished, reasons = [], {}
    for _ in range(300):
        if rng.random() < 0.4 and run.stats().num_waiting < 6:
            prompt = rng.integers(vocab, size=rng.integers(1, 60)).tolist()
            params = greedy(
                int(rng.integers(1, 120)),
                temperature=float(rng.choice([0.0, 1.0])),
                stop_token_ids=(int(rng.integers(vocab)),),
            )
            priority = int(rng.integers(2))
            unfinished.append(run.add_request(prompt, params, priority=priority))
        if rng.random() < 0.03 and unfinished:
            run.abort(unfinished[rng.integers(len(unfinished))])
        for output in run.step():
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
                unfinished.remove(output.request_id)
        run.verify()
    reasons |= drain(run, {})
    require_empty(run)
    stats = run.stats()
    assert stats.num_retractions > 0
    assert stats.num_moves > 0
    assert set(reasons.values()) == {
        FinishReason.STOP,
        FinishReason.LENGTH,
        FinishReason.ABORT,
    }


def test_generate_streams_every_token():
    run = engine("llama")
    found = {}
    for output in run.generate(prompts("llama")[:2], greedy(4)):
        assert len(output.new_tokens) == 1
        found.setdefault(output.request_id, []).extend(output.new_tokens)
    assert list(found.values()) == [t[:4] for t in plain_tokens("llama")[:2]]


def test_priorities_come_first():
    run = engine("llama")
    low = [run.add_request(prompts("llama")[0], greedy(8)) for _ in range(3)]
    high = run.add_request(prompts("llama")[0], greedy(8), priority=1)
    order = list(drain(run, {}))
    assert order == [high, *low]


@pytest.mark.parametrize("family", ["kimi_linear"])
def test_drawn_tokens_depend_on_the_seed_and_not_on_the_batch(family):
    params = [
        greedy(24, temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=seed)
        for seed in range(6)
    ]
    crowded = engine(family)
    together = run_all(crowded, prompts(family), params)
    run = engine(family)
    alone = [
        run_all(run, [prompt], [param])[0]
        for prompt, param in zip(prompts(family), params, strict=True)
    ]
    assert together == alone
    other = dataclasses.replace(params[0], seed=99)
    assert run_all(run, [prompts(family)[0]], [other]) != [alone[0]]


def test_logprobs_are_the_models_own():
    run = engine("llama")
    outputs = list(run.generate([prompts("llama")[1]], greedy(5, logprobs=True)))
    logprobs = np.concatenate([output.new_logprobs for output in outputs])
    assert logprobs.shape == (5,)
    assert np.all(logprobs < 0)
    assert np.all(logprobs > -np.log(150))  # a greedy token beats the average
