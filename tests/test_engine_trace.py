"""The trace has one line for each step, and can be drawn."""

import json
import subprocess
import sys

from tests.engine_runs import (
    CONFIG,
    TIGHT_BYTES,
    all_greedy,
    loaded,
    programs,
    prompts,
    run_all,
)
from ukv.engine import Engine


def test_a_traced_run_can_be_drawn(tmp_path):
    path = tmp_path / "trace.jsonl"
    model = loaded("llama")
    run = Engine(
        model.model,
        model.weights,
        pool_bytes=TIGHT_BYTES["llama"],
        config=CONFIG,
        programs=programs("llama", TIGHT_BYTES["llama"], CONFIG),
        trace_path=path,
    )
    run_all(run, prompts("llama"), all_greedy(), check=False)
    stats = run.stats()
    run.close()
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    assert [step["num_steps"] for step in steps] == [*range(1, stats.num_steps + 1)]
    assert steps[-1]["num_retractions"] == stats.num_retractions > 0
    assert all(0 < step["used_bytes"]["full"] <= stats.pool_bytes for step in steps)
    assert {step["shape"] for step in steps} == {
        "decode of 4 rows",
        "prefill of 160 tokens",
    }
    done = subprocess.run(
        [sys.executable, "scripts/plot_trace.py", str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{stats.num_steps} steps" in done.stdout
    assert steps[-1]["prefix_hit_tokens"] == stats.prefix_hit_tokens > 0
    assert f"{stats.prefix_hit_rate:.0%} of the tokens found" in done.stdout
    assert path.with_suffix(".png").stat().st_size > 10_000


def test_a_damaged_trace_is_named(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"num_steps": 1}\nno json\n')
    done = subprocess.run(
        [sys.executable, "scripts/plot_trace.py", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "trace.jsonl, line 2" in done.stderr
