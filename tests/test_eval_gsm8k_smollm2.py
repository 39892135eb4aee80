"""The evaluation on the published questions with a released model: both pools agree."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from models.checkpoint import CheckpointError
from models.smollm2 import find_smollm2

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data" / "gsm8k" / "test.jsonl"


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_file(), reason="needs GSM8K's test file")
def test_both_pools_answer_alike(tmp_path):
    try:
        find_smollm2()
    except CheckpointError as error:
        pytest.skip(str(error))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "scripts.eval_gsm8k", "--model", "smollm2"),
            *("--data", DATA, "--limit", "3", "--shots", "2"),
            *("--max-new-tokens", "48", "--concurrency", "3", "--page-size", "16"),
            *("--json", tmp_path / "a.json", "--html", tmp_path / "a.html"),
            *("--records", tmp_path / "records"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["questions"] == 3
    assert record["different_answers"] == record["different_texts"] == 0
    assert record["prefix_hit_tokens"] > 0
    assert "train.jsonl" in record["settings"]["shots_from"]
