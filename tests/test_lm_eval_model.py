"""The engine as a model of lm-evaluation-harness: real tasks, run by the harness."""

import json
import logging
import os

import jax
import numpy as np
import pytest

# Datasets must not look for anything outside.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
lm_eval = pytest.importorskip("lm_eval", reason="needs the extra lm-eval")

from lm_eval.api.registry import get_model  # noqa: E402 - after the check
from lm_eval.tasks import TaskManager  # noqa: E402

from models.registry import load  # noqa: E402
from models.tokenizer import Tokenizer  # noqa: E402
from scripts.evaluation.lm_eval_model import (  # noqa: E402
    GenerationError,
    UkvModel,
)
from tests.model_runner import ModelRunner  # noqa: E402
from tests.untrained_checkpoint import write_untrained_checkpoint  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")

TEXTS = (
    "Anna buys 3 cups and 2 kites.",
    "How many dollars are left? Ben has 12 dollars.",
    "6 toys cost 6*7=42 dollars.\n#### 42",
)
CHOICES = (" 12 dollars", " kites and cups", " 7")
MAX_LENGTH = 48
TASKS = {
    "choose": """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list:
  - metric: acc
""",
    "continue": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{continuation}}"
generation_kwargs:
  until: ["dollars", "7"]
  do_sample: false
  max_gen_toks: 12
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
""",
    "read": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}} {{text}}"
metric_list:
  - metric: word_perplexity
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_untrained_checkpoint(tmp_path_factory.mktemp("lm_eval") / "model")


@pytest.fixture(scope="module")
def reference(folder):
    """Return a function from tokens to the log-probabilities after each of them."""
    loaded = load(folder, dtype="float32", progress=False)
    run = ModelRunner(loaded.model, loaded.weights, num_rows=1, max_tokens=96)
    translator = run.translator

    def logprobs(tokens):
        # Padded at the end, so that one program serves all lengths.
        padded = np.pad(np.array(tokens), (0, 64 - len(tokens)))
        run = ModelRunner(loaded.model, loaded.weights, num_rows=1, max_tokens=96)
        run.translator = translator
        (logits,) = run.step([padded])
        return np.asarray(jax.nn.log_softmax(logits, axis=-1))[: len(tokens)]

    return logprobs


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.from_checkpoint(folder)


@pytest.fixture(scope="module")
def model(folder):
    """The model as the harness makes it, from its name and its arguments."""
    kind = get_model("ukv")
    assert kind is UkvModel
    return kind.create_from_arg_string(
        f"model={folder},page_size=16,max_length={MAX_LENGTH},concurrency=4,"
        "max_step_tokens=64,dtype=float32",
        {"batch_size": 1, "max_batch_size": None, "device": None},
    )


def expected_score(reference, context, wanted):
    logprobs = reference([*context, *wanted])
    rows = logprobs[len(context) - 1 : -1]
    total = sum(row[token] for row, token in zip(rows, wanted, strict=True))
    return total, bool(np.all(np.argmax(rows, axis=-1) == wanted))


def greedy_text(reference, tokenizer, text, stops, count):
    tokens, start = tokenizer.encode(text), len(tokenizer.encode(text))
    while len(tokens) < start + count and tokens[-1] not in tokenizer.stop_tokens:
        tokens.append(int(np.argmax(reference(tokens)[-1])))
        found = tokenizer.decode(tokens[start:])
        places = [found.find(stop) for stop in stops if stop in found]
        if places:
            return found[: min(places)]
    return tokenizer.decode(tokens[start:])


def test_tasks_run_and_score_as_the_model_alone_does(
    tmp_path, monkeypatch, model, reference, tokenizer
):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    right = [i % len(CHOICES) for i in range(len(TEXTS))]
    continuations = [
        greedy_text(reference, tokenizer, text, ("dollars", "7"), 12) for text in TEXTS
    ]
    # The last one is made wrong.
    continuations[-1] += "?"
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(
            json.dumps(
                {
                    "text": text,
                    "choices": CHOICES,
                    "label": label,
                    "continuation": continuation,
                }
            )
            + "\n"
            for text, label, continuation in zip(
                TEXTS, right, continuations, strict=True
            )
        )
    )
    for name, task in TASKS.items():
        head = (
            f"task: {name}\ndataset_path: json\ntest_split: test\n"
            f"dataset_kwargs:\n  data_files:\n    test: {data}\n"
        )
        (tmp_path / f"{name}.yaml").write_text(head + task)
    found = lm_eval.simple_evaluate(
        model,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
        verbosity=logging.WARNING,
    )["results"]

    best = []
    for text in TEXTS:
        context = tokenizer.encode(text)
        scores = [
            expected_score(reference, context, tokenizer.encode(choice))[0]
            for choice in CHOICES
        ]
        best.append(int(np.argmax(scores)))
    assert found["choose"]["acc,none"] == pytest.approx(np.mean(np.equal(best, right)))
    assert found["continue"]["exact_match,none"] == pytest.approx(1 - 1 / len(TEXTS))

    (end,) = tokenizer.stop_tokens
    total = num_words = 0
    for text in TEXTS:
        tokens = tokenizer.encode(f"{text} {text}")
        total += expected_score(reference, [end], tokens)[0]
        num_words += len(f"{text} {text}".split())
    assert found["read"]["word_perplexity,none"] == pytest.approx(
        np.exp(-total / num_words), rel=1e-4
    )


class Request:
    """What the harness hands to a model."""

    def __init__(self, *args):
        self.args = args


def test_scores_tell_what_is_greedy(model, reference, tokenizer):
    context = tokenizer.encode(TEXTS[0])
    likely = []
    for _ in range(3):
        likely.append(int(np.argmax(reference([*context, *likely])[-1])))
    other = [likely[0], likely[1], likely[2] - 1]
    found = model._loglikelihood_tokens(
        [(("", ""), context, wanted) for wanted in (likely, other, [])],
        disable_tqdm=True,
    )
    for (logprob, is_greedy), wanted in zip(found, (likely, other), strict=False):
        expected = expected_score(reference, context, wanted)
        assert logprob == pytest.approx(expected[0], abs=1e-4)
        assert is_greedy == expected[1]
    assert [is_greedy for _, is_greedy in found] == [True, False, True]


def test_a_text_with_nothing_before_it(model, reference, tokenizer):
    (end,) = tokenizer.stop_tokens
    ((logprob, _),) = model.loglikelihood([Request("", TEXTS[0])], disable_tqdm=True)
    expected, _ = expected_score(reference, [end], tokenizer.encode(TEXTS[0]))
    assert logprob == pytest.approx(expected, abs=1e-4)


def test_a_long_text_is_scored_in_windows(model, reference, tokenizer):
    tokens = tokenizer.encode(" ".join(TEXTS) * 4)
    assert len(tokens) > 2 * MAX_LENGTH
    (end,) = tokenizer.stop_tokens
    size, expected, start = MAX_LENGTH - 1, 0.0, 0
    while start < len(tokens):
        stop = min(start + size, len(tokens))
        # The last window reaches back, to see as much as the others.
        first = max(stop - size, 0)
        context = [end] if not first else [tokens[first - 1]]
        seen = [*context, *tokens[first:start]]
        expected += expected_score(reference, seen, tokens[start:stop])[0]
        start = stop
    (found,) = model.loglikelihood_rolling(
        [Request(" ".join(TEXTS) * 4)], disable_tqdm=True
    )
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "num_beams"),
        ({"max_gen_toks": MAX_LENGTH}, "leaves nothing"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(model, options, message):
    with pytest.raises(GenerationError, match=message):
        model.generate_until([Request("a", options)], disable_tqdm=True)


def test_a_prompt_that_is_too_long_is_cut_at_its_left(model):
    long = " ".join(TEXTS) * 4
    options = {"until": [], "max_gen_toks": 5}
    found = model.generate_until(
        [Request(long, options), Request(long[len(long) // 3 :], options)],
        disable_tqdm=True,
    )
    assert found[0] == found[1]
