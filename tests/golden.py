"""The goldens: tensors and metadata that the reference implementation left."""

import json
import pathlib

import numpy as np
from safetensors import safe_open

GOLDENS = pathlib.Path(__file__).parent / "goldens"


class Golden:
    """One family's golden: inputs, logits, states and how exact the reference is."""

    def __init__(self, family: str):
        self.folder = GOLDENS / family
        with safe_open(self.folder / "golden.safetensors", framework="np") as opened:
            self.tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no dict
            self.facts = json.loads(opened.metadata()["golden"])

    def prompt(self, index: int) -> np.ndarray:
        return self.tensors[f"prompt{index}.tokens"]

    def logits(self, index: int) -> np.ndarray:
        return self.tensors[f"prompt{index}.logits"]

    def decode_tokens(self, index: int) -> np.ndarray:
        return self.tensors[f"prompt{index}.decode_tokens"]

    def decode_logits(self, index: int) -> np.ndarray:
        return self.tensors[f"prompt{index}.decode_logits"]


def worst_row_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest relative error of a row, by the Euclidean norm."""
    assert actual.shape == expected.shape
    difference = np.linalg.norm(actual.astype(np.float64) - expected, axis=-1)
    return float(np.max(difference / np.linalg.norm(expected, axis=-1)))
