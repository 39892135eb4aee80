"""What the sources may not say: who translates, and who may know of it."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent

# The pool holds the tables, the allocator owns them, the translator reads them.
TABLE_OWNERS = (
    "ukv/pool/state.py",
    "ukv/allocator/",
    "ukv/translator/translator.py",
    "ukv/memory_map.py",  # draws where pages lie
)
TABLES = {"v2p", "p2v"}
# Below the translator's output nobody holds an id that could be translated again.
KERNEL_SIDE = ("ukv/ops/", "pallas_kernels/", "models/")
UNTRANSLATED = {"VirtualPages", "PhysicalPages", "translate", "_lookup", *TABLES}


def sources(*folders):
    return [
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


def names_in(source):
    """Return every identifier of a file: names, attributes, arguments, imports."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / source).read_text())):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.add(node.name.rpartition(".")[2])
    return found


@pytest.mark.parametrize("source", sources("ukv", "pallas_kernels", "models"))
def test_only_the_owners_name_the_tables(source):
    if source.startswith(TABLE_OWNERS):
        return
    assert not names_in(source) & TABLES


@pytest.mark.parametrize("source", sources(*KERNEL_SIDE))
def test_ops_kernels_and_models_never_translate(source):
    assert not names_in(source) & UNTRANSLATED


def test_the_scan_sees_an_offender():
    assert {"VirtualPages", "v2p", "_lookup"} <= names_in(
        "ukv/translator/translator.py"
    )


def test_one_class_translates():
    classes = [
        (source, node.name)
        for source in sources("ukv")
        for node in ast.walk(ast.parse((ROOT / source).read_text()))
        if isinstance(node, ast.ClassDef)
        and any(
            isinstance(part, ast.FunctionDef) and part.name == "translate"
            for part in node.body
        )
    ]
    assert classes == [("ukv/translator/translator.py", "KVIndexTranslator")]
