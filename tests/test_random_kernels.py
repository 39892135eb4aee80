"""Random cases of every kernel: 2,000 on a card, some in Triton's interpreter."""

import os
import sys

import pytest

from scripts.sanitize_kernels import outcome
from tests.delta_step_layers import without_clusters
from tests.gpu_compile import H200, requires_h200_compiler
from tests.random_kernels import copies
from tests.random_kernels.runner import (
    DRAW,
    Structure,
    all_structures,
    run_all,
    run_structure,
)
from tests.triton_interpreter import (
    IS_INTERPRETING,
    assert_passes_in_the_interpreter,
    interpret_launches,
)
from ukv.implementation import Target

INTERPRETED = {
    "gqa_decode": ("gqa_decode_triton", (0, 1, 2)),
    "gqa_attention": ("gqa_extend_triton", (0, 3)),
    "mla_decode": ("mla_decode_triton", (4,)),
    "write_kv": ("kv_write_triton", (0, 1)),
    "copy_pages": ("page_copy_triton", (0, 1)),
    "kda_decode_step": ("delta.decode", (1, 4)),
    "gdn_decode_step": ("delta.decode", (1, 4)),
}
"""Ops whose Triton kernels the interpreter runs, their modules, and which structures:
some that it gets through within a second or two."""

INTERPRETED_CASES = [
    (op, index) for op, (_, indices) in INTERPRETED.items() for index in indices
]
NUM_CASES = 2000


def assert_passed(structure, seeds):
    report = run_structure(structure, seeds)
    assert report.failures == {}, report.facts
    assert report.passed == len(seeds)


@pytest.mark.triton
@pytest.mark.skipif(not IS_INTERPRETING, reason="a card runs more, in its own test")
@pytest.mark.parametrize(("op", "index"), INTERPRETED_CASES)
def test_random_cases_interpreted(op, index, monkeypatch):
    monkeypatch.setattr("tests.random_kernels.runner.default_target", lambda: H200)
    # Rows of one token in a packed batch go to the kernel of another op.
    interpret_launches(monkeypatch, *(module for module, _ in INTERPRETED.values()))
    without_clusters(monkeypatch)
    structure = Structure(op=op, implementation="triton", index=index, max_len=150)
    assert_passed(structure, range(2))


@pytest.mark.skipif(IS_INTERPRETING, reason="this is that process")
@requires_h200_compiler
def test_random_cases_in_the_interpreter():
    found = assert_passes_in_the_interpreter(__file__)
    assert f"{len(INTERPRETED_CASES)} passed" in found


@pytest.mark.parametrize("op", sorted({*DRAW} - {*INTERPRETED}))
def test_random_cases_of_the_reference(op):
    structure = Structure(op=op, implementation="xla", index=0, max_len=150)
    assert_passed(structure, range(2))


def test_a_wrong_result_is_reported(monkeypatch):
    monkeypatch.setattr(copies, "_copy", lambda buffers, *_, **__: buffers)
    structure = Structure(op="copy_pages", implementation="xla", index=0)
    report = run_structure(structure, range(4))
    # A case without moves is right even so.
    assert 0 < len(report.failures) == 4 - report.passed
    assert "Mismatched elements" in next(iter(report.failures.values()))


def test_what_no_kernel_covers_is_not_drawn_for_ever(monkeypatch):
    cpu = Target(platform="cpu", capability=0)
    monkeypatch.setattr("tests.random_kernels.runner.default_target", lambda: cpu)
    monkeypatch.setattr("tests.random_kernels.runner.MOST_DRAWS", 3)
    assert all_structures(2) == []
    with pytest.raises(LookupError, match="write_kv-triton-0: none of"):
        Structure(op="write_kv", implementation="triton", index=0).draw()


@pytest.mark.gpu
@pytest.mark.slow
def test_two_thousand_cases_on_a_card(capfd):
    structures = all_structures(5)
    assert {structure.op for structure in structures} >= {*INTERPRETED, "kda_prefill"}
    passed, failures = 0, {}
    num_processes = min(16, len(os.sched_getaffinity(0)))
    for report in run_all(structures, NUM_CASES, num_processes):
        passed += report.passed
        if report.failures:
            failures[report.structure] = report.failures
        with capfd.disabled():
            sys.stdout.write(f"{report.structure}: {report.passed} passed\n")
            sys.stdout.flush()
    assert failures == {}
    assert passed == NUM_CASES


CLEAN = "= COMPUTE-SANITIZER\n1 passed, 0 failed\n= ERROR SUMMARY: 0 errors\n"


@pytest.mark.parametrize(
    ("text", "exit_code", "is_clean", "summary"),
    [
        (CLEAN, 0, True, "ERROR SUMMARY: 0 errors"),
        (CLEAN.replace("Y: 0", "Y: 3"), 9, False, "ERROR SUMMARY: 3 errors; exit"),
        (CLEAN.replace("1 passed", "0 passed"), 0, False, "ERROR SUMMARY: 0 errors;"),
        (CLEAN.split("= ERROR", maxsplit=1)[0], 0, False, "no summary"),
        ("", -2, False, "no summary; exit code -2; no output"),
    ],
    ids=["clean", "reported", "none-passed", "cut", "killed"],
)
def test_a_case_is_clean_if_it_passed_and_the_tool_says_so(
    text, exit_code, is_clean, summary
):
    found = outcome("write_kv-triton-0", text, exit_code, 1.0)
    assert found.is_clean == is_clean
    assert found.summary.startswith(summary)


def test_structures_are_found_by_their_names():
    structure = Structure(op="kda_prefill", implementation="triton", index=12)
    assert Structure.named(str(structure)) == structure
    for name in (
        "kda_prefill-triton",
        "kda-triton-1",
        "kda_prefill-cuda-1",
        "kda_prefill-xla-x",
    ):
        with pytest.raises(ValueError, match=f"is named '{name}'"):
            Structure.named(name)
