"""The parts of the evaluation: data, answers, records, numbers."""

import dataclasses
import json
import math

import pytest

from scripts.evaluation.answers import as_number, cut_at_stop, last_number
from scripts.evaluation.comparison import Comparison, PoolResult, wilson_interval
from scripts.evaluation.counters import Counters
from scripts.evaluation.page import render_page
from scripts.evaluation.questions import (
    DataError,
    Question,
    built_in_set,
    gsm8k_set,
)
from scripts.evaluation.records import Answer, Records, RecordsError
from scripts.evaluation.table import text_table, verdict

SETTINGS = {"pool": "unified", "page_size": 16}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (" 6 toys cost 6*7=42 dollars.\n#### 42", "42"),
        ("She pays $1,200.50 in all.", "1200.5"),
        ("that is 18.00", "18"),
        ("from 9-4", "4"),
        ("so x = -5.", "-5"),
        ("it drops by (-3)", "-3"),
        ("1,2 and 3,456,789", "3456789"),
        ("-$7", "-7"),
        ("a 0", "0"),
        ("0.50", "0.5"),
        ("no number", None),
        ("", None),
    ],
)
def test_the_answer_is_the_last_number(text, number):
    assert last_number(text) == number


def test_a_right_answer_is_one_number():
    assert as_number(" 1,000\n") == "1000"
    for text in ("", "two", "1 or 2"):
        with pytest.raises(ValueError, match="is not one number"):
            as_number(text)


def test_the_first_stop_string_cuts():
    assert cut_at_stop("5\n\nQuestion: 6", ("Question:", "\n\n")) == "5"
    assert cut_at_stop("5\n", ("Question:", "\n\n")) is None
    assert cut_at_stop("5", ()) is None


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    # The first line is in Agresti and Coull (1998); at the ends one border is exact.
    [(9, 10, 0.5958, 0.9821), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0)],
)
def test_wilson_interval(successes, trials, low, high):
    found = wilson_interval(successes, trials)
    assert found == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize("trials", range(1, 100))
def test_wilson_holds_the_share_itself(trials):
    for successes in {0, 1, trials // 2, trials}:
        low, high = wilson_interval(successes, trials)
        assert 0 <= low <= successes / trials <= high <= 1


def test_wilson_borders_solve_the_equation():
    for border in wilson_interval(37, 64):
        spread = math.sqrt(border * (1 - border) / 64)
        assert abs(37 / 64 - border) == pytest.approx(1.959964 * spread, abs=1e-6)


def gsm8k_line(index, number="72"):
    return json.dumps(
        {
            "question": f"How many are {index}?",
            "answer": f"They are <<70+2=72>>{index}.\n#### {number}",
        }
    )


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text("".join(f"{gsm8k_line(i)}\n" for i in range(6)))
    return path


def test_a_file_in_the_form_of_gsm8k(data):
    found = gsm8k_set(data, limit=3, shots=2)
    # The first two are solved before the others.
    assert [question.index for question in found.questions] == [2, 3, 4]
    assert found.questions[0].number == "72"
    assert found.prompt(found.questions[0]) == (
        "Question: How many are 0?\nAnswer: They are 0.\n#### 72\n\n"
        "Question: How many are 1?\nAnswer: They are 1.\n#### 72\n\n"
        "Question: How many are 2?\nAnswer:"
    )
    assert found.digest != gsm8k_set(data, limit=2, shots=2).digest
    assert found.digest != gsm8k_set(data, limit=3, shots=1).digest


def test_solved_examples_come_from_the_training_file(data):
    (data.parent / "train.jsonl").write_text(f"{gsm8k_line('train', '1,000')}\n")
    found = gsm8k_set(data, limit=None, shots=1)
    assert len(found.questions) == 6
    assert found.prefix.endswith("They are train.\n#### 1,000\n\n")
    assert found.shots_from.endswith("train.jsonl")
    (data.parent / "other.jsonl").write_text(f"{gsm8k_line('other')}\n")
    found = gsm8k_set(data, limit=1, shots=1, shots_path=data.parent / "other.jsonl")
    assert "They are other." in found.prefix


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        (f"{gsm8k_line(0)}\n{gsm8k_line(1)[:-20]}", "line 2 of 2.*truncated"),
        ("[1]\n", "has no texts 'question' and 'answer'"),
        ('{"question": "a", "answer": 4}\n', "has no texts"),
        ('{"question": "a", "answer": "it is 4"}\n', "has no line '#### number'"),
        (f"{gsm8k_line(0)}\n", "too few for 2 solved examples"),
        (b"\xff\xfe\n", "cannot be read"),
    ],
)
def test_damaged_data_is_named(tmp_path, content, message):
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        gsm8k_set(path, limit=None, shots=2)


def test_data_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match=r"cannot be read: .*No such file"):
        gsm8k_set(tmp_path / "none.jsonl", limit=None, shots=0)


def test_the_built_in_set():
    found = built_in_set(limit=5, shots=2)
    assert len(found.questions) == 5
    assert found.prefix.count("Question:") == 2
    assert found.prompt(found.questions[4]).endswith("\nAnswer:")
    assert found.questions == built_in_set(limit=9, shots=4).questions[:5]
    with pytest.raises(DataError, match="built-in set"):
        built_in_set(limit=10**6, shots=2)


def answer(index, **fields):
    whole = {
        "index": index,
        "expected": "7",
        "found": "7",
        "text": " it is 7",
        "prompt_tokens": 30,
        "tokens": 4,
        "finish": "stop",
    }
    return Answer(**(whole | fields))


def test_records_are_continued(tmp_path):
    path = tmp_path / "folder" / "unified.jsonl"
    with Records(path, SETTINGS) as records:
        records.add(answer(0), Counters(tokens=4, peak_running=3, seconds=1.0))
        records.add(answer(4), Counters(tokens=8, peak_running=5, seconds=2.0))
    with path.open("a") as file:
        file.write('{"run": 0, "index": 5, "te')  # the machine stopped here
    with Records(path, SETTINGS) as records:
        assert sorted(records.answers) == [0, 4]
        records.add(answer(5), Counters(tokens=4, peak_running=1, seconds=0.5))
    with Records(path, SETTINGS) as records:
        assert records.answers[5] == answer(5)
        assert Counters.together(records.runs) == Counters(
            tokens=12, peak_running=5, seconds=2.5
        )
    with Records(path, SETTINGS, fresh=True) as records:
        assert not records.answers


def test_records_of_other_settings_are_not_mixed(tmp_path):
    path = tmp_path / "unified.jsonl"
    with Records(path, SETTINGS) as records:
        records.add(answer(0), Counters())
    before = path.read_bytes()
    with pytest.raises(RecordsError, match="page_size was 16 and is now 64"):
        Records(path, {**SETTINGS, "page_size": 64})
    assert path.read_bytes() == before


@pytest.mark.parametrize("line", ["{}", "no json", '{"run": 0, "counters": {"a": 1}}'])
def test_damaged_records_are_named(tmp_path, line):
    path = tmp_path / "unified.jsonl"
    with Records(path, SETTINGS):
        pass
    with path.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(RecordsError, match="line 2: is damaged"):
        Records(path, SETTINGS)


def test_a_full_disk_loses_no_answer(tmp_path):
    path = tmp_path / "unified.jsonl"
    with Records(path, SETTINGS) as records:
        records.add(answer(0), Counters())
        with open("/dev/full", "wb", buffering=0) as full:
            whole, records._file = records._file, full
            with pytest.raises(
                RecordsError, match=r"No space left.*1 answers are kept"
            ):
                records.add(answer(1), Counters())
            records._file = whole
    with Records(path, SETTINGS) as records:
        assert sorted(records.answers) == [0]
    with pytest.raises(RecordsError, match="cannot be opened"):
        Records(path / "below a file", SETTINGS)


def comparison(**changed):
    questions = [Question(index=i, text=f"<{i}>?", number="7") for i in range(3)]
    answers = {i: answer(i) for i in range(3)}
    steps = [
        {"seconds": 0.1 * i, "num_running": i, "used_bytes": {"mla": i, "kda": 9}}
        for i in range(5)
    ]
    results = [
        PoolResult(
            kind=kind,
            pool_bytes=2**20,
            answers=found,
            counters=Counters(
                tokens=12, seconds=2.0, steps=4, running=10, compactions=2
            ),
            num_runs=1,
            trace=steps,
        )
        for kind, found in (
            ("unified", answers),
            ("static", answers | {1: dataclasses.replace(answer(1), **changed)}),
        )
    ]
    return Comparison(
        questions=questions,
        results=results,
        settings={"model": "tiny", "data": "built-in"},
        facts={"device": "cpu"},
    )


def test_pools_that_agree():
    same = comparison()
    record = same.record()
    assert record["different_answers"] == record["different_texts"] == 0
    assert record["accuracy_unified"] == record["accuracy_static"] == 1.0
    assert record["compactions"] == 2
    assert record["mean_concurrency_static"] == 2.5
    assert "the same text on all 3 questions" in verdict(same)
    assert "6.0" in text_table(same)


def test_pools_that_differ():
    other = comparison(found="8", text="<script>8")
    assert [question.index for question in other.differing("found")] == [1]
    assert other.record()["accuracy_static"] == pytest.approx(2 / 3, abs=1e-4)
    assert "differ on 1 answers and 1 texts" in verdict(other)
    page = render_page(other)
    assert page.count('class="differs"') == 1
    assert "<script" not in page
    assert "&lt;1&gt;?" in page


def test_an_error_is_no_right_answer():
    other = comparison(finish="error", error="not finite")
    assert other.record()["pools"]["static"]["errors"] == 1
    assert other.record()["accuracy_static"] < 1


def test_one_pool_alone():
    both = comparison()
    alone = dataclasses.replace(both, results=both.results[:1])
    assert alone.record()["different_answers"] is None
    assert alone.record()["accuracy_static"] is None
    assert "3 questions, one pool" in text_table(alone)
    render_page(alone)
