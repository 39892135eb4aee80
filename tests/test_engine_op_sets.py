"""Whoever carries a translator carries the engine's own."""

import ast
import dataclasses
import functools as ft
import pathlib

import pytest

from tests.engine_runs import CONFIG, TIGHT_BYTES, loaded
from ukv.engine import Programs, engine_layout
from ukv.engine.op_sets import translators_of
from ukv.errors import SpecError
from ukv.translator import KVIndexTranslator

ROOT = pathlib.Path(__file__).parent.parent


@dataclasses.dataclass(frozen=True)
class OpSet:
    """Sends layers to their kind of op; what it wraps is the model."""

    model: object
    parts: tuple

    @property
    def vocab_size(self):
        return self.model.vocab_size

    def pool_specs(self, *, page_size, dtype):
        return self.model.pool_specs(page_size=page_size, dtype=dtype)

    def forward(self, weights, inputs, pool):
        return self.model.forward(weights, inputs, pool)


class Slotted:
    __slots__ = ("translator",)

    def __init__(self, translator):
        self.translator = translator


@ft.cache
def layout():
    return engine_layout(
        loaded("llama").model, pool_bytes=TIGHT_BYTES["llama"], config=CONFIG
    )


def op_set(translator):
    return OpSet(loaded("llama").model, ({"decode": Slotted(translator)},))


def test_the_engines_own_translator_is_accepted():
    translator = KVIndexTranslator(layout())
    programs = Programs(op_set(translator), layout(), CONFIG, translator=translator)
    assert programs.translator is translator


def test_another_translator_is_refused_with_its_place():
    # Equal in all but identity: what one of them is told, the other is not.
    wrapper = op_set(KVIndexTranslator(layout()))
    place = r"OpSet\.parts\[0\]\['decode'\]\.translator: carries another translator"
    with pytest.raises(SpecError, match=place):
        Programs(wrapper, layout(), CONFIG, translator=KVIndexTranslator(layout()))


def test_a_ring_of_objects_is_walked_once():
    ring = {"next": []}
    ring["next"].append(ring)
    assert translators_of(ring) == {}


def test_our_models_carry_none():
    for family in ("llama", "kimi_linear", "gemma3"):
        assert translators_of(loaded(family).model) == {}


def carriers(*folders):
    """Return the classes that keep a translator, from the source."""
    found = set()
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and keeps_translator(node):
                    found.add(node.name)
    return found


def keeps_translator(node):
    for part in ast.walk(node):
        targets = part.targets if isinstance(part, ast.Assign) else []
        if isinstance(part, ast.AnnAssign):
            targets = [part.target]
        for target in targets:
            name = getattr(target, "attr", getattr(target, "id", ""))
            if "translator" in name and not isinstance(target, ast.Subscript):
                return True
    return False


def test_nobody_else_keeps_a_translator():
    assert carriers("ukv", "models") == {"Programs"}
