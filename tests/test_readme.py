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


DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]


def anchors(path):
    """What a link may name behind `#`, as GitHub makes it of a heading."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", x).lower().replace(" ", "-") for x in headings}


@pytest.mark.parametrize("document", sorted(DOCUMENTS), ids=lambda path: path.name)
def test_local_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^):]+)\)", document.read_text()):
        name, _, anchor = target.partition("#")
        path = document.parent / name if name else document
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


@pytest.mark.parametrize("document", sorted(DOCUMENTS), ids=lambda path: path.name)
def test_files_that_are_named_exist(document):
    named = re.findall(
        r"(?:scripts|docs|tests|ukv|models|pallas_kernels)/[\w/]+\.\w+",
        document.read_text(),
    )
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing
