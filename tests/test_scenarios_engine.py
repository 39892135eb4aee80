"""Reported failures of other engines, replayed on ours; named by their numbers.

Faults are here too, on a model with states, a window and full attention. What concerns
the pool alone, translation or the prefix cache is tested in the files named so.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.engine_checks.engines import CONFIG, make_engine
from scripts.engine_checks.models import HYBRID
from tests.pools import POISON, kda_mla_specs
from tests.test_engine_scheduler import CONFIG as SCHEDULER_CONFIG
from tests.test_engine_scheduler import PAGES, SPECS, Loop, make_scheduler, request
from ukv.allocator import compact
from ukv.engine import EngineConfig, FinishReason, Request, SamplingParams
from ukv.engine import row_programs as row_programs_module
from ukv.engine.ledger import Ledger
from ukv.engine.prefix_spec import PrefixSpec
from ukv.engine.scheduler import Scheduler
from ukv.layout import packed_bytes, static_layout, unified_layout
from ukv.pool import write_entries
from ukv.spec import AttentionSpec, SlidingWindowSpec

# ---------------------------------------------------------------------------
# Who runs: host code alone.


def test_scenario_08_a_prompt_far_longer_than_the_window_pool_runs():
    specs = [
        AttentionSpec(
            name="full", num_layers=1, page_size=16, num_kv_heads=1, head_dim=8
        ),
        SlidingWindowSpec(
            name="swa",
            num_layers=1,
            page_size=16,
            num_kv_heads=1,
            head_dim=8,
            window_size=1024,
            shares_ids="full",
        ),
    ]
    layout = static_layout(specs, num_pages={"full": 6_300, "swa": 193})
    config = EngineConfig(
        page_size=16, max_rows=2, max_kv_len=100_100, max_step_tokens=2048
    )
    scheduler = Scheduler(config, Ledger(layout))
    scheduler.add(request("long", 100_000, 40), 0)
    loop = Loop(scheduler)
    loop.run()
    assert loop.order == ["long"]
    assert loop.num_steps < 100_000 / 2048 + 45


def test_scenario_20_two_that_fit_alone_but_not_together_both_end():
    specs = kda_mla_specs(4)
    pool_bytes = packed_bytes(specs, {"mla": 100, "kda": 2})
    config = EngineConfig(
        page_size=4, max_rows=2, max_kv_len=240, max_step_tokens=64, decode_steps=1
    )
    scheduler = Scheduler(config, Ledger(unified_layout(specs, pool_bytes=pool_bytes)))
    # 30 pages each at first, 60 at the end.
    a, b = (scheduler.add(request(name, 120, 120), 0) for name in "ab")
    loop = Loop(scheduler)
    for _ in range(10):
        loop.step()
    assert scheduler.running == [a, b]
    loop.run()
    assert loop.order == ["a", "b"]
    assert (a.num_retractions, b.num_retractions) == (0, 1)
    assert len(a.generated) == len(b.generated) == 120


@pytest.mark.parametrize("is_unified", [True, False])
@pytest.mark.parametrize("kind", ["kda_mla", "window"])
def test_scenarios_b34_b47_the_first_in_rank_advances_in_every_step(kind, is_unified):
    rng = random.Random(3)
    scheduler = make_scheduler(kind, is_unified=is_unified)
    bound = 0
    for name in range(40):
        prompt_len, num_new = rng.randint(1, 40), rng.randint(1, 24)
        scheduler.add(request(name, prompt_len, num_new, rng.randint(0, 2)), 0)
        # Once first, it is never retracted: its tokens in chunks beside at most four
        # other rows, then one by one; two more steps until the host has read them.
        bound += -(-(prompt_len + num_new) // 20) + num_new + 2
    loop = Loop(scheduler)
    while loop.flying or not scheduler.is_idle:
        plan = loop.step()
        assert loop.num_steps <= bound
        if plan is not None and plan.chunks:
            ranks = [chunk.sequence.rank for chunk in plan.chunks]
            running = [sequence.rank for sequence in scheduler.running]
            assert min(ranks) <= min(running, default=min(ranks))
    assert len(loop.order) == 40
    assert scheduler.num_retractions > 0
    assert scheduler.ledger.mirror.bytes_in_use() == 0


@pytest.mark.parametrize("kind", ["kda_mla", "window"])
def test_scenario_70_prompts_that_share_nothing_pay_at_most_one_step_each(kind):
    # Room for all rows: what the cache costs is steps, not bytes.
    specs, pages = SPECS[kind], PAGES[kind]
    roomy = {name: 5 * count for name, count in pages.items()}
    layout = unified_layout(specs, pool_bytes=packed_bytes(specs, roomy))
    num_steps = {}
    for spec in (None, PrefixSpec.of(layout)):
        rng = random.Random(5)
        scheduler = Scheduler(SCHEDULER_CONFIG, Ledger(layout, spec))
        for name in range(30):
            prompt = tuple(rng.randrange(1000) for _ in range(rng.randint(1, 40)))
            params = SamplingParams(max_new_tokens=rng.randint(1, 24))
            scheduler.add(
                Request(request_id=str(name), prompt=prompt, params=params), 0
            )
        loop = Loop(scheduler)
        loop.run()
        assert sorted(map(int, loop.order)) == [*range(30)]
        num_steps[spec is not None] = loop.num_steps
    # That step ends a chunk where the states of the prompt are kept.
    assert num_steps[True] <= num_steps[False] + 30


# ---------------------------------------------------------------------------
# What is read and written: a model with every kind of memory.

MODEL = "hybrid"
LENGTHS = (90, 5, 70, 33, 61, 20, 48)
NUM_NEW = (30, 40, 24, 36, 20, 36, 60)
PARAMS = [SamplingParams(max_new_tokens=num_new) for num_new in NUM_NEW]


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(11)
    return [rng.integers(HYBRID.vocab_size, size=n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def expected(prompts):
    """The tokens of each request when it runs alone."""
    engine = make_engine(MODEL, CONFIG)
    found = []
    for prompt, params in zip(prompts, PARAMS, strict=True):
        outputs = engine.generate([prompt], params)
        found.append([token for output in outputs for token in output.new_tokens])
    return found


class Run:
    """Runs requests together, and something else after each step."""

    def __init__(self, prompts, after_step=lambda engine: None, engine=None):
        self.engine = engine or make_engine(MODEL, CONFIG)
        self.after_step = after_step
        self.names = [
            self.engine.add_request(prompt, params)
            for prompt, params in zip(prompts, PARAMS, strict=True)
        ]
        self.tokens = {name: [] for name in self.names}
        self.reasons, self.errors = {}, {}

    def step(self):
        for output in self.engine.step():
            name = output.request_id
            self.tokens[name].extend(output.new_tokens)
            if output.finish_reason is not None:
                self.reasons[name] = output.finish_reason
            if output.error is not None:
                self.errors[name] = output.error
        self.engine.verify()
        self.after_step(self.engine)

    def to_end(self):
        while self.engine.has_work:
            self.step()
        return [self.tokens[name] for name in self.names]

    def until(self, condition):
        """Step until the sequence of a request is in some condition; return it."""
        while self.engine.has_work:
            self.step()
            for sequence in self.engine.scheduler.running:
                if condition(sequence):
                    return sequence
        raise AssertionError("it never came to that")


def host_words(engine):
    """Return a writable copy of the pool's buffer."""
    (buffer,) = engine._device.state.pool.buffers
    return np.array(buffer)


def set_pool(engine, **fields):
    state = engine._device.state
    engine._device.state = state.replace(pool=state.pool.replace(**fields))


jitted_compact = jax.jit(compact, donate_argnums=0)


def test_scenarios_42_43_45_51_b1_b4_b5_pages_may_move_after_every_step(
    prompts, expected
):
    moved = []

    def compact_now(engine):
        before = [np.array(t.v2p) for t in engine._device.state.pool.tables]
        pool, _ = jitted_compact(engine._device.state.pool)
        engine._device.state = engine._device.state.replace(pool=pool)
        ledger = engine.scheduler.ledger
        ledger.mirror = ledger.mirror.compact()
        engine.verify()
        after = [np.array(t.v2p) for t in pool.tables]
        moved.append(sum(np.sum(a != b) for a, b in zip(before, after, strict=True)))

    assert Run(prompts, compact_now).to_end() == expected
    assert np.count_nonzero(moved) > 4


def test_scenarios_b13_b14_b15_b28_b55_bytes_of_free_pages_are_never_read(
    prompts, expected
):
    def poison_what_is_free(engine):
        words = host_words(engine)
        is_live = np.zeros(words.nbytes, bool)
        pool = engine._device.state.pool
        for sub, tables in zip(engine.layout.sub_pools, pool.tables, strict=True):
            for page in np.flatnonzero(np.array(tables.p2v)):
                start = sub.base_bytes + page * sub.page_bytes
                assert not is_live[start : start + sub.page_bytes].any()
                is_live[start : start + sub.page_bytes] = True
        words.view(np.uint8).reshape(-1)[~is_live] = 0xFF
        set_pool(engine, buffers=(jnp.asarray(words),))

    run = Run(prompts, poison_what_is_free)
    assert run.to_end() == expected
    assert run.engine.stats().num_retractions > 0
    assert run.engine.stats().num_moves > 0


def test_scenario_b19_the_warm_up_writes_nothing():
    engine = make_engine(MODEL, CONFIG)
    engine.warm_up(progress=False)
    engine.verify()
    assert np.all(host_words(engine) == np.uint32(POISON))


def test_scenario_69_every_buffer_keeps_its_address(prompts):
    # Nobody verifies here: a buffer that was read on a CPU cannot be donated.
    engine = Run(prompts).engine
    engine.step()

    def pointers():
        device = engine._device
        tree = (device.state, list(device._static.values()))
        return {
            jax.tree_util.keystr(path): leaf.unsafe_buffer_pointer()
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }

    before = pointers()
    while engine.has_work:
        engine.step()
    assert pointers() == before
    assert engine.stats().num_moves > 0


# ---------------------------------------------------------------------------
# Faults: the request that is to blame ends, and nobody else notices.


def require_only_the_victim_ended(run, prompts, expected, name, reason):
    """Check every request after a fault, and that the pool has no trace of it."""
    found = run.to_end()
    victim = run.names.index(name)
    assert run.reasons.pop(name) is reason
    assert set(run.reasons.values()) == {FinishReason.LENGTH}
    assert found[victim] == expected[victim][: len(found[victim])]
    assert found[:victim] + found[victim + 1 :] == (
        expected[:victim] + expected[victim + 1 :]
    )
    # Whoever gets its pages next does not notice either.
    assert Run(prompts, engine=run.engine).to_end() == expected


def test_a_request_that_is_killed_in_the_middle_of_its_prompt(prompts, expected):
    run = Run(prompts)
    victim = run.until(lambda s: 0 < s.context_len < len(s.request.prompt))
    name = victim.request.request_id
    run.engine.abort(name)
    require_only_the_victim_ended(run, prompts, expected, name, FinishReason.ABORT)
    assert run.tokens[name] == []


def write_nan(engine, sub_name, part, page):
    """Write NaN to a part of a physical page, in its first layer."""
    (buffer,) = engine._device.state.pool.buffers
    sub = engine.layout.sub_pool(sub_name)
    view = engine.layout.part_view(sub_name, layer=0, part=part)
    first = (page * sub.blocks_per_page + view.block_offset) * sub.page_size
    rows = first + np.arange(sub.page_size) * view.rows_per_entry
    nan = jnp.full((sub.page_size, *view.shape), jnp.nan, view.dtype)
    buffer = write_entries(buffer, view, jnp.asarray(rows, jnp.int32), nan)
    set_pool(engine, buffers=(buffer,))


@pytest.mark.parametrize(
    ("sub_name", "part"),
    [("full", "v"), ("swa", "v"), ("state", "recurrent"), ("state", "conv")],
)
def test_a_poisoned_page_ends_its_own_request(prompts, expected, sub_name, part):
    run = Run(prompts)
    victim = run.until(lambda s: s.has_last_token and s.context_len > 50)
    state = run.engine._device.state
    sub = run.engine.layout.sub_pool(sub_name)
    table = state.page_tables[sub.spec.id_space if sub_name == "swa" else sub_name].ids
    # The last page: of a window it is one that the next token sees.
    column = (victim.context_len - 1) // CONFIG.page_size
    virtual = table[victim.row] if sub_name == "state" else table[victim.row, column]
    page = int(state.pool.tables[sub.index].v2p[virtual])
    write_nan(run.engine, sub_name, part, page)
    name = victim.request.request_id
    require_only_the_victim_ended(run, prompts, expected, name, FinishReason.ERROR)
    assert "are not finite numbers" in run.errors[name]
    assert run.engine.stats().num_restarts == 0


@pytest.mark.parametrize("program", ["admit", "release", "move_pages"])
def test_a_program_between_steps_that_raises_costs_no_token(
    prompts, expected, program, monkeypatch
):
    works = getattr(row_programs_module, f"jitted_{program}")
    calls = []

    def second_time(state, packed):
        calls.append(program)
        if len(calls) == 2:
            jax.tree.map(lambda leaf: leaf.delete(), state)
            raise jax.errors.JaxRuntimeError("the wire was cut")
        return works(state, packed)

    monkeypatch.setattr(row_programs_module, f"jitted_{program}", second_time)
    run = Run(prompts)
    assert run.to_end() == expected
    assert len(calls) > 2
    assert run.errors == {}
    assert run.engine.stats().num_restarts == 1


class BrokenResult:
    """A result of a step that failed on the device: nobody knows before it is read."""

    def copy_to_host_async(self):
        pass

    def is_ready(self):
        return True

    def __array__(self):
        raise jax.errors.JaxRuntimeError("the device fell off the bus")


def test_a_step_that_fails_on_the_device_is_noticed_one_step_late(
    prompts, expected, monkeypatch
):
    run = Run(prompts)
    steps, calls = run.engine.programs.steps, []

    def breaking(step):
        def run_step(*arguments):
            state, static, results = step(*arguments)
            calls.append(step)
            if len(calls) == 5:
                results = results.replace(drawn=BrokenResult())
            return state, static, results

        return run_step

    for shape in steps:
        monkeypatch.setitem(steps, shape, breaking(steps[shape]))
    assert run.to_end() == expected
    assert run.errors == {}
    assert run.engine.stats().num_restarts == 1


def test_out_of_memory_in_every_bucket_ends_all_and_the_engine_goes_on(
    prompts, expected, monkeypatch
):
    run = Run(prompts)
    steps = run.engine.programs.steps

    def no_memory(state, static, weights, packed):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as patch:
        for shape in steps:
            patch.setitem(steps, shape, no_memory)
        assert run.to_end() == [[]] * len(prompts)
    assert sorted(run.errors) == sorted(run.names)
    assert all("RESOURCE_EXHAUSTED" in error for error in run.errors.values())
    assert Run(prompts, engine=run.engine).to_end() == expected
