"""The scheduler alone: who runs, who waits, who loses its pages, and that all end."""

import random

import pytest

from tests.pools import kda_mla_specs, window_specs
from ukv.engine import EngineConfig, FinishReason, Request, SamplingParams
from ukv.engine.ledger import Advance, Ledger
from ukv.engine.scheduler import Scheduler
from ukv.errors import BudgetError
from ukv.layout import packed_bytes, static_layout, unified_layout
from ukv.spec import AttentionSpec, SlidingWindowSpec

PAGE_SIZE = 4
CONFIG = EngineConfig(
    page_size=PAGE_SIZE, max_rows=5, max_kv_len=64, max_step_tokens=24
)
SPECS = {"kda_mla": kda_mla_specs(PAGE_SIZE), "window": window_specs(PAGE_SIZE)}
PAGES = {
    "kda_mla": {"mla": 20, "kda": 2},
    "window": {"full": 20, "state": 2, "swa": 16},
}


def make_scheduler(kind, *, is_unified=True, config=CONFIG):
    specs, pages = SPECS[kind], PAGES[kind]
    if is_unified:
        layout = unified_layout(specs, pool_bytes=packed_bytes(specs, pages))
    else:
        layout = static_layout(specs, num_pages=pages)
    return Scheduler(config, Ledger(layout))


def request(name, prompt_len, num_new, priority=0):
    return Request(
        request_id=str(name),
        prompt=(0,) * prompt_len,
        params=SamplingParams(max_new_tokens=num_new),
        priority=priority,
    )


class Loop:
    """Plays the device: results come one step behind, some tokens stop."""

    def __init__(self, scheduler, rng=None, stop_rate=0.0):
        self.scheduler, self.rng, self.stop_rate = scheduler, rng, stop_rate
        self.flying, self.order, self.num_steps = (), [], 0
        self.most_bytes = 0

    def step(self):
        plan = self.scheduler.plan()
        ledger = self.scheduler.ledger
        held = {}
        for sequence in [*self.scheduler.running, *self.scheduler._leaving]:
            for name, count in ledger.held(sequence.context_len).items():
                held[name] = held.get(name, 0) + count
        for sub in ledger.layout.sub_pools:
            assert ledger.mirror.live(sub.name) == held.get(sub.name, 0)
        self.most_bytes = max(self.most_bytes, ledger.mirror.bytes_in_use())
        if plan is not None:
            self._check(plan)
        for chunk in self.flying:
            count = chunk.query_len if chunk.is_decoding else int(chunk.is_sampled)
            for _ in range(count):
                if chunk.sequence.finish_reason is None:
                    self._draw(chunk.sequence)
        self.flying = plan.chunks if plan else ()
        self.num_steps += 1
        return plan

    def _check(self, plan):
        rows = [chunk.row for chunk in plan.chunks]
        assert len(set(rows)) == len(rows)
        assert all(chunk.query_len > 0 for chunk in plan.chunks)
        total = sum(chunk.query_len for chunk in plan.chunks)
        assert plan.is_decode or total <= self.scheduler._config.max_step_tokens

    def _draw(self, sequence):
        sequence.generated.append(0)
        is_last = len(sequence.generated) == sequence.request.params.max_new_tokens
        stops = self.rng is not None and self.rng.random() < self.stop_rate
        if is_last or stops:
            reason = FinishReason.LENGTH if is_last else FinishReason.STOP
            self.scheduler.finish(sequence, reason)
            self.order.append(sequence.request.request_id)

    def run(self, limit=5000):
        while self.flying or not self.scheduler.is_idle:
            self.step()
            assert self.num_steps < limit, "no progress"


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("is_unified", [True, False])
@pytest.mark.parametrize("decode_steps", [1, 5])
@pytest.mark.parametrize("seed", range(2))
def test_scenarios_b40_b44_everyone_ends_and_the_pool_is_empty(
    kind, is_unified, decode_steps, seed
):
    rng = random.Random(seed)
    config = EngineConfig(
        page_size=PAGE_SIZE,
        max_rows=5,
        max_kv_len=64,
        max_step_tokens=24,
        decode_steps=decode_steps,
    )
    scheduler = make_scheduler(kind, is_unified=is_unified, config=config)
    loop = Loop(scheduler, rng, stop_rate=0.02)
    added, aborted, most_running = [], 0, 0
    for name in range(60):
        prompt_len = rng.randint(1, 40)
        num_new = rng.randint(1, 65 - prompt_len)
        priority = rng.choice([0, 0, 0, 1])
        added.append(scheduler.add(request(name, prompt_len, num_new, priority), 0))
        for _ in range(rng.randint(0, 8)):
            loop.step()
            most_running = max(most_running, len(scheduler.running))
        victim = rng.choice(added)
        if rng.random() < 0.2 and victim.finish_reason is None:
            scheduler.finish(victim, FinishReason.ABORT)
            aborted += 1
    loop.run()
    assert all(sequence.finish_reason is not None for sequence in added)
    assert len(loop.order) + aborted == 60
    assert scheduler.ledger.mirror.bytes_in_use() == 0
    assert scheduler.num_retractions > 0
    assert most_running >= 2


def test_first_come_first_served_within_a_priority():
    scheduler = make_scheduler("kda_mla")
    for name, priority in [("a", 0), ("b", 0), ("c", 2), ("d", 0), ("e", 2)]:
        scheduler.add(request(name, 30, 10, priority), 0)
    loop = Loop(scheduler)
    loop.run()
    assert loop.order == ["c", "e", "a", "b", "d"]


def test_a_large_request_is_not_overtaken_by_small_ones():
    scheduler = make_scheduler("kda_mla")
    scheduler.add(request("first", 40, 20), 0)
    scheduler.add(request("large", 60, 4), 0)
    for name in range(20):
        scheduler.add(request(name, 4, 8), 0)
    loop = Loop(scheduler)
    loop.run()
    assert loop.order[:2] == ["first", "large"]


def test_the_last_in_rank_gives_its_pages_and_keeps_its_tokens():
    scheduler = make_scheduler("kda_mla")
    first = scheduler.add(request("first", 30, 34), 0)
    last = scheduler.add(request("last", 28, 34), 0)
    loop = Loop(scheduler)
    while not scheduler.num_retractions:
        loop.step()
        known = list(last.generated)
    assert first.num_retractions == 0
    assert last.row is None
    assert last.generated[: len(known)] == known != []
    loop.run()
    assert len(last.generated) == len(first.generated) == 34
    assert loop.order == ["first", "last"]
    # It waited until it fitted with room to go on, so it was not sent off again.
    assert last.num_retractions <= 2


def test_scenario_b46_who_waits_is_tried_again_when_pages_come_back():
    scheduler = make_scheduler("kda_mla")
    scheduler.add(request("a", 60, 4), 0)
    late = scheduler.add(request("b", 60, 4), 0)
    loop = Loop(scheduler)
    for _ in range(4):
        loop.step()
        assert late in scheduler.waiting
    loop.run()
    assert loop.order == ["a", "b"]


def test_scenario_08_a_window_is_charged_and_not_the_sequence():
    # 16 window pages of 4 tokens do not hold a sequence of 64 and a chunk beside it.
    scheduler = make_scheduler("window")
    held = scheduler.ledger.most_held(64, 24)
    assert held == {"full": 16, "state": 1, "swa": 12}
    # Window 20: 19 tokens before the next one lie in at most 6 pages.
    assert scheduler.ledger.held(63)["swa"] == 16 - (63 - 20 + 1) // 4 == 5
    scheduler.add(request("a", 60, 4), 0)
    loop = Loop(scheduler)
    loop.run()
    layout = scheduler.ledger.layout
    whole = sum(
        count * layout.sub_pool(name).page_bytes
        for name, count in {"full": 16, "state": 1, "swa": 16}.items()
    )
    assert loop.most_bytes < whole


def test_scenario_31_a_prompt_holds_a_window_and_a_chunk():
    # Window 1000, chunks of 2000, pages of one token: 999 + 2000 halves at most.
    specs = [
        AttentionSpec(
            name="full", num_layers=1, page_size=1, num_kv_heads=1, head_dim=8
        ),
        SlidingWindowSpec(
            name="swa",
            num_layers=1,
            page_size=1,
            num_kv_heads=1,
            head_dim=8,
            window_size=1000,
            shares_ids="full",
        ),
    ]
    pages = {"full": 6000, "swa": 2999}
    ledger = Ledger(unified_layout(specs, pool_bytes=packed_bytes(specs, pages)))
    assert ledger.most_held(6000, 2000) == pages
    for context_len in (0, 2000, 4000):
        needs = ledger.growth(context_len, 2000)
        assert ledger.can_serve(needs)
        ledger.spend({}, [[Advance(context_len, 2000)]])
        assert ledger.mirror.live("swa") == 999
    ledger.release(6000)
    assert ledger.mirror.bytes_in_use() == 0


def test_scenario_02_free_rows_and_slots_admit_nobody_without_bytes():
    scheduler = make_scheduler("kda_mla")
    scheduler.add(request("a", 60, 4), 0)
    scheduler.add(request("b", 40, 4), 0)
    loop = Loop(scheduler)
    for _ in range(3):
        loop.step()
    # Rows and state slots are free, and so are bytes, but not enough of them.
    mirror = scheduler.ledger.mirror
    assert mirror.can_allocate({"kda": 1})
    assert [s.request.request_id for s in scheduler.running] == ["a"]
    loop.run()
    assert loop.order == ["a", "b"]


def test_prompts_go_on_beside_decoding_rows():
    scheduler = make_scheduler("kda_mla")
    scheduler.add(request("a", 4, 20), 0)
    loop = Loop(scheduler)
    loop.step()
    scheduler.add(request("b", 40, 4), 0)
    plan = loop.step()
    assert [chunk.query_len for chunk in plan.chunks] == [1, 23]
    assert [chunk.is_decoding for chunk in plan.chunks] == [True, False]
    plan = loop.step()
    assert [chunk.query_len for chunk in plan.chunks] == [1, 17]
    assert plan.chunks[1].is_sampled
    assert loop.step().is_decode


def test_scenarios_b43_b57_who_can_never_run_is_refused_and_leaves_nothing():
    pages = PAGES["window"] | {"full": 15}
    layout = static_layout(SPECS["window"], num_pages=pages)
    scheduler = Scheduler(CONFIG, Ledger(layout))
    with pytest.raises(BudgetError, match=r"'x' can never run: .* full 16 x .* 15"):
        scheduler.add(request("x", 61, 4), 0)
    assert scheduler.is_idle
