"""The evaluation as a command: from questions to a report, and what can go wrong."""

import importlib
import json
import re
import shutil

import jax
import pytest

from scripts.evaluation import evaluation
from scripts.evaluation.records import Records
from tests.untrained_checkpoint import write_untrained_checkpoint

OPTIONS = (
    *("--limit", 6, "--shots", 2, "--max-new-tokens", 8, "--page-size", 16),
    *("--concurrency", 5, "--max-step-tokens", 64),
)


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """Keep programs from one run of the command to the next."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("xla")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    yield
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_untrained_checkpoint(
        tmp_path_factory.mktemp("evaluated") / "model", num_shards=2
    )


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs the command here: (exit code, out, err)."""

    def run(*options):
        monkeypatch.setattr("sys.argv", ["eval_gsm8k.py", *map(str, options)])
        code, message = 0, ""
        try:
            importlib.import_module("scripts.eval_gsm8k").main()
        except SystemExit as stop:
            # Python prints a message and exits with 1.
            code = stop.code if isinstance(stop.code, int) else 1
            message = "" if isinstance(stop.code, int) else stop.code
        out, err = capsys.readouterr()
        return code, out, err + message

    return run


@pytest.fixture
def places(tmp_path):
    return (
        *("--records", tmp_path / "records"),
        *("--html", tmp_path / "report.html", "--json", tmp_path / "report.json"),
    )


@pytest.fixture
def no_engine(monkeypatch):
    """Nothing may be asked any more."""

    def refuse(*args, **kwargs):
        raise AssertionError("an engine was built")

    monkeypatch.setattr(evaluation, "Engine", refuse)


def numbers_of(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    return {line["index"]: line["text"] for line in lines}


def test_both_pools_and_their_report(run, places, folder, tmp_path, monkeypatch):
    options = ("--model", folder, *OPTIONS, *places)
    code, out, err = run(*options)
    assert code == 0, err
    record = json.loads((tmp_path / "report.json").read_text())
    last_line = json.loads(out.splitlines()[-1])
    assert last_line.items() <= record.items()
    assert record["questions"] == 6
    assert record["different_answers"] == record["different_texts"] == 0
    assert record["prefix_hit_tokens"] > 0
    assert record["peak_concurrency_unified"] > record["peak_concurrency_static"]
    assert record["pool_bytes_unified"] >= record["pool_bytes_static"]
    assert {"accuracy_unified", "accuracy_static", "compactions", "retractions"} <= {
        *record
    }
    assert {"device", "versions", "commit"} <= {*record}
    assert record["settings"]["implementation"] == "best for the device"

    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 3
    assert page.count("<tr class=") == 6
    # Namespaces are names; nothing is loaded from anywhere.
    assert not re.search(r'(?:src|href)="(?!#)', page)
    assert not re.search(r"url\((?!#)", page)
    for name in ("accuracy", "compactions", "hit rate", "requests at once"):
        assert name in page

    # All is answered: the same command only writes the report again.
    monkeypatch.setattr(evaluation, "Engine", None)
    (tmp_path / "report.html").unlink()
    code, out, err = run(*options)
    assert code == 0, err
    assert "all answers are in" in err
    assert (tmp_path / "report.html").read_text() == page

    code, out, err = run(*options, "--page-size", 32)
    assert code != 0
    assert "page_size was 16 and is now 32" in err

    # A full disk: the report is lost, and no answer.
    for option in ("--html", "--json"):
        code, out, err = run(*options, option, "/dev/full")
        assert code != 0
        assert "/dev/full: the report cannot be written: [Errno 28] No space" in err
        assert f"kept in {tmp_path / 'records'}" in err
    assert len(numbers_of(tmp_path / "records" / "static.jsonl")) == 6


def test_a_run_that_was_stopped_goes_on(run, places, folder, tmp_path, monkeypatch):
    options = ("--model", folder, *OPTIONS, "--pool", "unified", *places)
    add = Records.add

    def stop_at_the_third(self, answer, counters):
        if len(self.answers) == 2:
            raise KeyboardInterrupt
        add(self, answer, counters)

    monkeypatch.setattr(Records, "add", stop_at_the_third)
    code, _, err = run(*options)
    assert code != 0
    assert "the same command continues" in err
    path = tmp_path / "records" / "unified.jsonl"
    first = numbers_of(path)
    assert len(first) == 2

    monkeypatch.setattr(Records, "add", add)
    code, _, err = run(*options)
    assert code == 0, err
    assert "2 answers are in" in err
    found = numbers_of(path)
    assert first.items() <= found.items()
    record = json.loads((tmp_path / "report.json").read_text())
    assert record["pools"]["unified"]["runs"] == 2

    code, _, err = run(*options, "--fresh")
    assert code == 0, err
    assert numbers_of(path) == found


def damaged(folder, tmp_path, name):
    """Copy a checkpoint without one of its files."""
    copy = tmp_path / "damaged"
    shutil.copytree(folder, copy)
    (copy / name).unlink()
    return copy


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model-00002-of-00002.safetensors", "shard model-00002-of-00002.* is missing"),
        ("tokenizer.json", "has no tokenizer.json"),
        ("config.json", "config.json"),
    ],
)
def test_a_damaged_checkpoint(run, places, folder, tmp_path, no_engine, name, message):
    copy = damaged(folder, tmp_path, name)
    code, out, err = run("--model", copy, *OPTIONS, *places)
    assert code == 1
    assert re.search(message, err)
    assert not out


def test_bad_paths_and_damaged_data(run, places, folder, tmp_path, no_engine):
    truncated = tmp_path / "truncated.jsonl"
    line = '{"question": "How many?", "answer": "#### 4"}\n'
    truncated.write_text(line + line[:30])
    for options, message in (
        (("--model", "no/where"), "no/where: no such file or folder"),
        (("--model", folder, "--data", "no.jsonl"), "no.jsonl: cannot be read"),
        (
            ("--model", folder, "--data", truncated, "--shots", 0),
            "line 2 of 2: is no whole JSON record",
        ),
        (("--model", folder, "--pool-mib", 0.01), "bytes"),
        (("--model", folder, "--limit", 0), "--limit 0: must be 1 or more"),
    ):
        code, out, err = run(*OPTIONS, *places, *options)
        assert code != 0, options
        assert message in err
        assert "Traceback" not in err
        assert not out


def test_help_states_the_conventions(run):
    code, out, _ = run("--help")
    assert code == 0
    for convention in ("last number", "stop token", "Wilson", "continues where it"):
        assert convention in out
