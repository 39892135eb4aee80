"""The scripts about models, as a new user would try them."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.golden import GOLDENS, Golden

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"


@pytest.fixture
def script(monkeypatch, capsys):
    """Return a function that runs a script here and returns (exit code, out, err)."""
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def run(name, *arguments):
        monkeypatch.setattr("sys.argv", [f"{name}.py", *map(str, arguments)])
        code, message = 0, ""
        try:
            importlib.import_module(name).main()
        except SystemExit as stop:
            # Python prints a message and exits with 1.
            code = stop.code if isinstance(stop.code, int) else 1
            message = "" if isinstance(stop.code, int) else stop.code
        out, err = capsys.readouterr()
        return code, out, err + message

    return run


@pytest.mark.parametrize("name", ["generate", "inspect_model"])
def test_help_has_examples(name):
    shown = subprocess.run(
        [sys.executable, SCRIPTS / f"{name}.py", "--help"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert shown.returncode == 0, shown.stderr
    assert f"python scripts/{name}.py" in shown.stdout


@pytest.mark.parametrize(
    "family", ["gpt_oss_mxfp4", pytest.param("kimi_linear", marks=pytest.mark.slow)]
)
def test_generate_follows_the_reference(script, family):
    golden = Golden(family)
    prompt = " ".join(map(str, golden.prompt(1)))
    code, out, err = script(
        "generate",
        *("--model", golden.folder, "--token-ids", prompt),
        *("--max-new-tokens", 4, "--page-size", 8),
    )
    assert code == 0, err
    tokens = [int(word) for word in out.split()]
    assert len(tokens) == 4
    assert tokens[0] == np.argmax(golden.logits(1)[-1])
    assert "33 tokens of prompt" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "no/where", "hello"], "no such file or folder"),
        (["--model", SCRIPTS, "hello"], "config.json"),
        (["--model", SCRIPTS / "generate.py", "hello"], "is no GGUF file"),
        (["--model", "smollm2", "--top-p", "0", "hello"], "--top-p 0.0: must be"),
        (["--model", GOLDENS / "llama", "hello"], "has no tokenizer.json"),
        (
            ["--model", GOLDENS / "llama", "--token-ids", "1 two"],
            "must be numbers with blanks",
        ),
        (
            ["--model", GOLDENS / "llama", "--token-ids", "1 999"],
            "not in the vocabulary of 150",
        ),
        (["--model", GOLDENS / "llama", "--token-ids", ""], "the prompt is empty"),
        (
            ["--model", GOLDENS / "llama", "--token-ids", "1", "--pool-mib", "0.05"],
            "can never run",
        ),
    ],
)
def test_generate_says_what_is_wrong(script, options, message):
    code, out, err = script("generate", *options)
    assert code != 0
    assert message in err
    assert not out


def test_inspect_a_folder_without_weights(script, tmp_path):
    config = (GOLDENS / "gemma3" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    code, out, err = script(
        "inspect_model",
        tmp_path,
        "--tokens",
        100,
        "--page-size",
        16,
        "--pool-gib",
        0.01,
    )
    assert code == 0, err
    # 2 full layers of 2 heads of 24, K and V, bf16: 384 bytes a token; 7 pages of 16.
    assert "full            7 pages     42.00 KiB  384 B per token" in out
    assert "for the last 20 and the step's" in out
    assert "such requests at once" in out


@pytest.mark.parametrize(
    ("name", "params", "per_token"),
    [
        ("kimi-linear-48b", 49.1e9, "7.88 KiB per token"),
        ("gemma-3-27b", 27.0e9, "80.00 KiB per token"),
        ("gpt-oss-20b", 20.9e9, "24.00 KiB per token"),
        ("qwen3-next-80b-a3b", 79.7e9, "24.00 KiB per token"),
    ],
)
def test_inspect_a_released_model(script, name, params, per_token):
    code, out, err = script("inspect_model", name)
    assert code == 0, err
    found = int(out.split("weights: ")[1].split("(")[1].split()[0].replace(",", ""))
    assert found / 2 == pytest.approx(params, rel=5e-3)
    assert per_token in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nowhere"], "does not exist; give a folder that has one, or one of gemma-3"),
        ([SCRIPTS], "has no config.json"),
        (["gpt-oss-20b", "--tokens", "0"], "--tokens 0: must be 1 or more"),
    ],
)
def test_inspect_says_what_is_wrong(script, options, message):
    code, out, err = script("inspect_model", *options)
    assert code != 0
    assert message in err
    assert not out
