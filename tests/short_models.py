"""The goldens' models with fewer layers: two of each kind of memory.

For what compares a model with itself. A step's program is compiled layer after layer,
so it is ready in half the time; the parity tests run the whole models.
"""

import dataclasses
import functools as ft

from models.gemma3 import Gemma3
from models.kimi_linear import KimiLinear
from models.qwen3_next import Qwen3Next
from models.registry import Loaded, load
from tests.golden import GOLDENS

LAYERS = {
    "gemma3": (0, 2, 4, 5),
    # Of the two layers with a state, one has experts and one has not.
    "kimi_linear": (0, 1, 3, 8),
    "qwen3_next": (0, 1, 3, 7),
}


@ft.cache
def load_short(family: str, layers: tuple[int, ...] | None = None) -> Loaded:
    """Load a golden's model, of a long one only the layers above or those given."""
    loaded = load(GOLDENS / family, dtype="float32", progress=False)
    layers = layers or LAYERS.get(family)
    if layers is None:
        return loaded
    return Loaded(
        model=_with_layers(loaded.model, layers),
        weights={
            **loaded.weights,
            "layers": [loaded.weights["layers"][index] for index in layers],
        },
    )


def _with_layers(model, layers):
    def chosen(old):
        return tuple(new for new, index in enumerate(layers) if index in old)

    match model:
        case Gemma3(pattern=pattern):
            windowed = tuple(pattern.is_windowed[index] for index in layers)
            pattern = dataclasses.replace(pattern, is_windowed=windowed)
            return dataclasses.replace(model, pattern=pattern)
        case Qwen3Next(is_full=is_full):
            return dataclasses.replace(
                model, is_full=tuple(is_full[index] for index in layers)
            )
        case KimiLinear(moe=moe):
            return dataclasses.replace(
                model,
                num_layers=len(layers),
                kda_layers=chosen(model.kda_layers),
                moe=dataclasses.replace(moe, layers=chosen(moe.layers)),
            )
