"""What the documentation shows must run."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_python_block_of_the_readme_runs(code, capsys):
    exec(compile(code, "README.md", "exec"), {})
    assert "mla" in capsys.readouterr().out


def test_there_is_a_quick_start():
    assert len(BLOCKS) == 1


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/pool.md"])
def test_local_links_lead_somewhere(document):
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target
