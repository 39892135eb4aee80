"""The capacity benchmark: traces, layouts, and a simulation that loses nothing."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from scripts import bench_capacity
from scripts.capacity.comparison import SYSTEMS, find_best_split
from scripts.capacity.geometry import Card, read_geometry, used_bytes
from scripts.capacity.simulation import simulate
from scripts.capacity.systems import (
    default_share,
    group_layers,
    padded_layout,
    padded_specs,
    padding_waste,
    request_bytes,
    share_bounds,
    split_layout,
)
from scripts.capacity.traces import (
    MIXES,
    Arrival,
    Trace,
    TraceError,
    generate_mix,
    read_trace,
)
from ukv.engine import EngineConfig
from ukv.layout import unified_layout
from ukv.layout.sub_pool import page_bytes_of

ROOT = pathlib.Path(__file__).parents[1]
CARD = Card(name="test", copy_gbps=1000.0, matmul_tflops=100.0)
CONFIG = EngineConfig(max_rows=64, max_step_tokens=256, decode_steps=4)

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:18:04.2299600,110,0
2023-11-16 18:18:04.4799600,110,27
"""
MOONCAKE = (
    '{"timestamp": 500, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]}\n'
    '{"timestamp": 3500, "input_length": 700, "output_length": 6, "hash_ids": [7, 9]}\n'
)


def geometry(name):
    folder = bench_capacity.CONFIGS / name
    return read_geometry(folder, page_size=64)


@pytest.fixture(scope="module")
def kimi():
    return geometry("kimi-linear-48b")


@pytest.fixture(scope="module")
def gemma():
    return geometry("gemma-3-27b")


def trace_of(lens):
    return Trace(
        name="test",
        arrivals=tuple(
            Arrival(seconds=index * 1e-6, prompt_len=prompt, output_len=output)
            for index, (prompt, output) in enumerate(lens)
        ),
    )


def run(model, layout, trace, **options):
    return simulate(model, layout, trace, config=CONFIG, card=CARD, **options)


def test_a_trace_of_azure(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    trace = read_trace(path, num_requests=10)
    # The third one generates nothing.
    assert [(a.prompt_len, a.output_len) for a in trace.arrivals] == [
        (4808, 10),
        (3180, 8),
        (110, 27),
    ]
    assert [a.seconds for a in trace.arrivals] == pytest.approx([0, 0.052, 60.5])
    assert trace.name == "azure"
    assert trace.longest == 4818
    assert trace.repeated_fraction() == 0
    first, second = (trace.arrivals[i].prompt(-1 - i) for i in range(2))
    assert (len(first), len(second)) == (4808, 3180)
    assert first[0] != second[0]


def test_a_trace_of_mooncake_has_equal_tokens_where_hashes_are_equal(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    path.write_text(MOONCAKE)
    trace = read_trace(path, num_requests=10)
    assert [a.seconds for a in trace.arrivals] == [0.0, 3.0]
    first, second = (trace.arrivals[i].prompt(-1 - i) for i in range(2))
    assert (len(first), len(second)) == (1000, 700)
    assert first[:512] == second[:512]
    assert not set(first[512:]) & set(second[512:])
    assert trace.repeated_fraction() == 1 / 4
    assert len(read_trace(path, num_requests=2).arrivals) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello\n", "neither a csv of Azure"),
        ("", "neither a csv of Azure"),
        ("".join(AZURE.splitlines(keepends=True)[:2]), "1 requests"),
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:17:03,4\n", "GeneratedTokens"),
        ('{"timestamp": 0}\n', "input_length"),
        (MOONCAKE + "{broken\n", "JSONDecodeError"),
        (AZURE.replace("3180", "many"), "ValueError"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_its_name(tmp_path, text, message):
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(TraceError, match=rf"file: .*{message}"):
        read_trace(path, num_requests=10)


@pytest.mark.parametrize("mix", MIXES)
def test_a_mix_depends_on_its_seed_alone(mix):
    first = generate_mix(mix, num_requests=50, seed=3)
    assert first == generate_mix(mix, num_requests=50, seed=3)
    assert first != generate_mix(mix, num_requests=50, seed=4)
    assert all(a.prompt_len > 0 and a.output_len > 0 for a in first.arrivals)


def test_a_rate_scales_time_and_nothing_else():
    trace = generate_mix("chat", num_requests=50, seed=0)
    faster = trace.at_rate(20.0)
    assert faster.rate == pytest.approx(20.0)
    for one, other in zip(trace.arrivals, faster.arrivals, strict=True):
        assert dataclasses.replace(other, seconds=one.seconds) == one


def test_padding_of_kimi_linear_by_hand(kimi):
    # 7 latent and 20 state layers: groups of 7, so 21 state layers, one of them empty.
    assert group_layers(kimi.specs) == 7
    latent, state = padded_specs(kimi.specs)
    # A state of a layer is 2 MiB + 73,728 = 2,170,880 bytes, a latent row 1,152:
    # 1,884.4 tokens, rounded up to a multiple of 16.
    assert latent.page_size == 1888
    assert (latent.num_layers, state.num_layers) == (7, 21)
    assert page_bytes_of(latent) == 7 * 1888 * 1152 == 15_224_832
    assert page_bytes_of(state) == 3 * 15_224_832
    # 1,000 tokens hold one page and three groups' states.
    used = 1000 * 7 * 1152 + 20 * 2_170_880
    assert used_bytes(kimi.specs, 1000) == used
    assert padding_waste(kimi.specs, 1000) == 4 * 15_224_832 - used == 9_417_728


def test_padding_of_windows_by_hand(gemma):
    # 10 full and 52 window layers of equal rows: 6 groups of 10, 8 layers empty.
    assert group_layers(gemma.specs) == 10
    full, window = padded_specs(gemma.specs)
    assert (full.page_size, window.page_size) == (64, 64)
    assert (full.num_layers, window.num_layers) == (10, 60)
    row = 2 * 16 * 128 * 2
    # 2,048 tokens: 32 pages, and 16 of the window of 1,024.
    assert padding_waste(gemma.specs, 2048) == 8 * 1024 * row
    # gpt-oss has as many of both, and wastes nothing but the ends of pages.
    specs = geometry("gpt-oss-20b").specs
    assert padded_specs(specs) == specs
    assert padding_waste(specs, 2048) == 0


@pytest.mark.parametrize("model", bench_capacity.MODELS)
def test_no_system_has_more_bytes_than_the_budget(model):
    specs = geometry(model).specs
    budget = 5 * 2**30
    assert unified_layout(specs, pool_bytes=budget).pool_bytes <= budget
    assert padded_layout(specs, budget).pool_bytes <= budget
    for share in (0.1, default_share(specs), 0.9):
        static = split_layout(specs, budget, share)
        slack = 2 * sum(page_bytes_of(spec) for spec in specs)
        assert budget - slack <= static.pool_bytes <= budget


def test_default_shares_are_those_of_the_ratios(kimi, gemma):
    assert default_share(kimi.specs) == pytest.approx(1 / 1.9)
    assert default_share(gemma.specs) == pytest.approx(10 / (10 + 0.8 * 52))


def test_a_pass_costs_what_its_rows_read(kimi):
    one = np.array([1])
    short = kimi.pass_cost(np.array([1000]), one, 1)
    long = kimi.pass_cost(np.array([2000]), one, 1)
    assert long[0] - short[0] == 1000 * 7 * 1152
    assert long[1] - short[1] == 1000 * 2 * 7 * 32 * (2 * 512 + 64)


@pytest.mark.parametrize("system", ["unified", "static", "padded"])
@pytest.mark.parametrize("model", ["kimi", "gemma"])
def test_nothing_is_lost_and_the_pool_is_never_exceeded(model, system, request):
    found = request.getfixturevalue(model)
    trace = generate_mix("chat", num_requests=15, seed=1)
    trace = Trace(
        name="mixed",
        # One that no pool here can hold.
        arrivals=(*trace.arrivals, Arrival(seconds=30, prompt_len=10**6, output_len=1)),
    )
    pool_bytes = int(3.5 * request_bytes(found.specs, 3000, chunk_len=256))
    layout = {
        "unified": unified_layout(found.specs, pool_bytes=pool_bytes),
        "static": split_layout(found.specs, pool_bytes, 0.4),
        "padded": padded_layout(found.specs, pool_bytes),
    }[system]
    most = []

    def look(scheduler):
        mirror = scheduler.ledger.mirror
        most.append(mirror.bytes_in_use())
        assert mirror.bytes_in_use() <= layout.pool_bytes <= pool_bytes
        held = sum(
            scheduler.ledger.bytes_of(scheduler.ledger.held(s.context_len))
            for s in scheduler.running
        )
        assert held <= mirror.bytes_in_use()

    outcome = run(
        found,
        layout,
        trace.at_rate(1e4),
        has_borders=system == "unified",
        on_step=look,
    )
    assert outcome.num_finished + outcome.num_refused == 16
    assert outcome.num_refused >= 1
    assert "can never run: it needs" in outcome.refusal
    assert outcome.num_steps == len(most)
    assert outcome.peak_held == max(most) / layout.pool_bytes <= 1
    assert outcome.mean_used <= outcome.mean_held
    assert outcome.mean_concurrency <= outcome.peak_concurrency
    if system == "padded":
        assert outcome.num_moves == 0


def test_unified_admits_all_that_a_split_of_the_same_bytes_does(kimi):
    # Requests of 800 tokens in a pool of 12: every split holds at most as many.
    lens = [(600, 200)] * 24
    # The buffer is rounded down to whole blocks of rows.
    pool_bytes = 12 * request_bytes(kimi.specs, 800) + 2**20
    unified = run(
        kimi, unified_layout(kimi.specs, pool_bytes=pool_bytes), trace_of(lens)
    )
    assert unified.peak_concurrency >= 12
    for share in (0.05, 0.1, 0.15, 0.3, 0.6):
        split = run(kimi, split_layout(kimi.specs, pool_bytes, share), trace_of(lens))
        assert split.peak_concurrency <= unified.peak_concurrency
        assert split.mean_concurrency <= unified.mean_concurrency
        assert split.tokens_per_second <= unified.tokens_per_second


def test_a_split_refuses_what_the_whole_pool_holds(gemma):
    pool_bytes = int(1.1 * request_bytes(gemma.specs, 40000, chunk_len=256))
    trace = trace_of([(39000, 8), (500, 8)])
    unified = run(gemma, unified_layout(gemma.specs, pool_bytes=pool_bytes), trace)
    assert unified.num_refused == 0
    split = run(gemma, split_layout(gemma.specs, pool_bytes, 0.5), trace)
    assert split.num_refused == 1
    assert "request '0' can never run" in split.refusal
    low, high = share_bounds(gemma.specs, pool_bytes, 39008, 256)
    assert 0.5 < low < high
    held = run(gemma, split_layout(gemma.specs, pool_bytes, (low + high) / 2), trace)
    assert held.num_refused == 0


def test_the_search_prefers_no_refusal_to_speed(kimi):
    outcome = run(
        kimi,
        unified_layout(kimi.specs, pool_bytes=2**30),
        trace_of([(100, 4)] * 2),
    )
    tried = []

    def fake(share):
        tried.append(share)
        speed = 1000 - abs(share - 0.6) * 100
        return dataclasses.replace(
            outcome,
            num_refused=int(share > 0.55),
            num_tokens=round(1000 * speed),
            seconds=1000.0,
        )

    share, best = find_best_split(fake, start=0.3, bounds=(0.1, 0.9), num_splits=12)
    assert len(tried) == len(set(tried)) == 12
    assert best.num_refused == 0
    assert 0.5 < share <= 0.55


def test_a_run_from_end_to_end(tmp_path, monkeypatch, capsys):
    trace = tmp_path / "some_folder" / "azure.csv"
    trace.parent.mkdir()
    trace.write_text(AZURE)
    words = [
        *("--models", "gpt-oss-20b", "--trace", str(trace), "--mixes", "chat"),
        *("--requests", "4", "--splits", "2"),
        *("--json", str(tmp_path / "out.json"), "--png", str(tmp_path / "out.png")),
    ]
    monkeypatch.setattr("sys.argv", ["bench_capacity.py", *words])
    bench_capacity.main()
    first = capsys.readouterr().out
    assert "gpt-oss-20b, azure: pool" in first
    assert "What the unified pool does not win" in first
    record = json.loads((tmp_path / "out.json").read_text())
    assert "some_folder" not in json.dumps(record)
    assert record["ceilings"]["copy_gbps"] > 1000
    systems = [result["implementation"] for result in record["results"]]
    assert systems == 2 * list(SYSTEMS)
    for result in record["results"]:
        assert result["num_finished"] + result["num_refused"] in (3, 4)
        assert 0 < result["mean_used"] <= result["peak_held"] <= 1
        assert result["tokens_per_second"] > 0
    assert (tmp_path / "out.png").stat().st_size > 10_000
    bench_capacity.main()
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--requests", "1"], "--requests 1: must be 2 or more"),
        (["--splits", "0"], "--splits 0: must be 1 or more"),
        (["--step-tokens", "8"], "--step-tokens 8: must be 64 or more"),
        (["--mixes"], "there is nothing to serve"),
        (["--models", "none"], "invalid choice"),
    ],
)
def test_options_that_make_no_sense(words, message, capsys):
    with pytest.raises(SystemExit):
        bench_capacity.parse_arguments(words)
    assert message in capsys.readouterr().err


def test_errors_are_one_line(monkeypatch, tmp_path):
    missing = tmp_path / "missing.csv"
    monkeypatch.setattr("sys.argv", ["bench_capacity.py", "--trace", str(missing)])
    with pytest.raises(SystemExit, match=r"error: .*No such file"):
        bench_capacity.main()


def test_help_has_examples():
    shown = subprocess.run(
        [sys.executable, ROOT / "scripts" / "bench_capacity.py", "--help"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert shown.returncode == 0, shown.stderr
    assert "python scripts/bench_capacity.py --trace" in shown.stdout
