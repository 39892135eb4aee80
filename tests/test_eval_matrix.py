"""The comparison of all ways to run: what counts as a tie, and what runs."""

import json
import math
import subprocess

import pytest

from scripts import eval_matrix
from ukv import implementation

HALF, SURE = math.log(0.5), math.log(0.99)
REFERENCE = {
    "tokens": [[1, 2, 3], [4, 5]],
    "logprobs": [[SURE, HALF, SURE], [SURE] * 2],
}


@pytest.mark.parametrize(
    ("tokens", "logprobs", "expected"),
    [
        ([[1, 2, 3], [4, 5]], [[SURE] * 3, [SURE] * 2], (5, 0, 0)),
        # The second token was as likely as another; what follows does not count.
        ([[1, 9, 9], [4, 5]], [[SURE, HALF, SURE], [SURE] * 2], (3, 1, 0)),
        ([[1, 9, 9], [4, 5]], [[SURE, SURE, SURE], [SURE] * 2], (3, 0, 1)),
        # Here only the reference was sure.
        ([[1, 2, 9], [4, 5]], [[SURE, HALF, HALF], [SURE] * 2], (4, 0, 1)),
        ([[1, 2, 3], [4]], [[SURE] * 3, [SURE]], (4, 0, 1)),
    ],
)
def test_a_tie_is_told_from_a_fault(tokens, logprobs, expected):
    found = eval_matrix.compare({"tokens": tokens, "logprobs": logprobs}, REFERENCE)
    assert tuple(found.values()) == expected


def test_a_backend_is_preferred_and_the_others_stay(monkeypatch):
    before = implementation.SUPPORT
    monkeypatch.setattr(implementation, "SUPPORT", before)
    eval_matrix.prefer("triton")
    assert implementation.SUPPORT["copy_pages"][0].implementation == "triton"
    for op, lines in implementation.SUPPORT.items():
        assert len(lines) == len(before[op])
        assert all(line.by_default for line in lines if line.implementation == "triton")
    target = implementation.Target(platform="gpu", capability=90)
    case = implementation.OpCase(
        page_size=1, storage_dtype="float32", compute_dtype="bfloat16", widths=(64, 64)
    )
    ran = eval_matrix.watch_dispatch()
    assert implementation.resolve("kda_prefill", None, case, target=target) == "triton"
    assert ran == {"kda_prefill": {"triton"}}


def run_matrix(monkeypatch, capsys, *options, results):
    """Run the command on workers that do nothing."""
    left = iter(results)
    monkeypatch.setattr(eval_matrix, "spawn", lambda *args: dict(next(left)))
    monkeypatch.setattr("sys.argv", ["eval_matrix.py", *map(str, options)])
    code = 0
    try:
        eval_matrix.main()
    except SystemExit as stop:
        code = stop.code
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_report_has_every_run(monkeypatch, capsys, tmp_path):
    options = ("--backends", "xla", "best", "--page-sizes", 16, "--json")
    whole = REFERENCE | {"accuracy": 1.0}
    code, report = run_matrix(
        monkeypatch, capsys, *options, tmp_path / "a.json", results=[whole] * 4
    )
    assert code == 0
    assert report["runs"] == 4
    assert report["faults"] == report["failed"] == report["tie_rate"] == 0
    assert json.loads((tmp_path / "a.json").read_text()) == report
    assert "tokens" not in report["results"][0]

    tie = whole | {"tokens": [[1, 9, 3], [4, 5]]}
    error = {"error": "UnsupportedError: no"}
    code, report = run_matrix(
        monkeypatch,
        capsys,
        *options,
        tmp_path / "a.json",
        results=[whole, tie, error, whole],
    )
    assert code == 1
    assert report["failed"] == 1
    assert report["tie_rate"] == pytest.approx(1 / 13)


def test_a_worker_that_fails_says_why(monkeypatch):
    done = subprocess.CompletedProcess([], 1, "", "Traceback\n  ...\nValueError: x\n")
    monkeypatch.setattr(eval_matrix.subprocess, "run", lambda *a, **k: done)
    arguments = eval_matrix.parse_arguments([])
    variant = eval_matrix.Variant(backend="xla", page_size=16, prefix_cache=True)
    assert eval_matrix.spawn(variant, arguments) == {"error": "ValueError: x"}
