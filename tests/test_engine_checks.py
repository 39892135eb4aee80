"""The soak and the comparison of all ways to run, in short; that they see faults.

What a soak replays, each request alone and cold, is the comparison of CI.
"""

import io
import json

import jax.numpy as jnp
import pytest
from tqdm import tqdm

from scripts import engine_identity, soak_engine
from scripts.engine_checks.engines import CONFIG, make_engine
from scripts.engine_checks.watch import CompileCounter, ReadCounter
from ukv.engine import SamplingParams

MODEL = "hybrid"  # states, windows and full attention in one buffer


def quiet():
    return tqdm(file=io.StringIO())


@pytest.mark.usefixtures("unchecked")  # as the command runs
@pytest.mark.parametrize("num_steps", [180, pytest.param(300, marks=pytest.mark.slow)])
def test_scenarios_40_b36_b41_b56_a_short_soak_is_clean(num_steps):
    run = soak_engine.Soak(MODEL, config=CONFIG, seed=0)
    run.run(num_steps, quiet())
    counts = run.counts
    assert run.messages == []
    assert {name: counts[name] for name in soak_engine.FAULTS} == dict.fromkeys(
        soak_engine.FAULTS, 0
    )
    for name in soak_engine.COUNTS:
        assert counts[name] > 0, name


def test_counters_see_a_compilation_and_every_read():
    engine = make_engine(MODEL, CONFIG)
    compiles, reads = CompileCounter(), ReadCounter()
    engine.add_request([1, 2, 3], SamplingParams(max_new_tokens=4))
    for way in (int, float, bool, lambda x: x.item(), lambda x: x.block_until_ready()):
        before = reads.others + reads.blocking
        plan = engine.scheduler.plan

        def planned(plan=plan, way=way):
            way(jnp.arange(3).sum())
            return plan()

        engine.scheduler.plan = planned
        with reads.step(engine):
            engine.step()
        engine.scheduler.plan = plan
        assert reads.others + reads.blocking > before
    assert reads.one_behind > 0
    assert compiles.count > 0


def test_commands_write_their_reports(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(soak_engine, "SOAKS", {MODEL: CONFIG})
    # No other programs than those of the soak.
    monkeypatch.setattr(engine_identity, "WAYS", ("prefix",))
    monkeypatch.setattr(engine_identity, "COLD", CONFIG)
    for script, arguments in (
        (soak_engine, ["--steps", "60"]),
        (engine_identity, ["--requests", "12", "--model", MODEL]),
    ):
        target = tmp_path / "out" / f"{script.__name__}.json"
        code = script.main([*arguments, "--seed", "5", "--json", str(target)])
        report = json.loads(target.read_text())
        assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
        assert [model["model"] for model in report["models"]] == [MODEL]
        if script is engine_identity:
            # Nothing differs, but no prompt was split: the exit code says so.
            assert report["differing"] == report["split"] == 0
            assert report["retracted"] > 0
            assert report["hit_tokens"] > 0
        assert code == (script is engine_identity)


def test_commands_refuse_to_do_nothing(capsys):
    for script, option in ((soak_engine, "--steps"), (engine_identity, "--requests")):
        with pytest.raises(SystemExit, match="2"):
            script.main([option, "0"])
        assert f"{option} 0 must be 1 or more" in capsys.readouterr().err


@pytest.mark.slow
def test_every_model_in_every_way():
    *_, report = engine_identity.compare(
        engine_identity.MODELS, num_requests=19, seed=0, ways=engine_identity.WAYS
    )
    assert report["requests"] >= 200
    assert engine_identity.is_shown(report)
