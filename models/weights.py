"""One description of a model's weights: for loading, for random values, for shapes.

A model describes its weights as a pytree of :class:`Weight`. ``load_weights`` fills
it from a checkpoint, ``init_weights`` with random values, ``abstract_weights`` with
shapes.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from models.checkpoint import CheckpointError, TensorSource

Weights = Any
"""A pytree: of ``Weight``, of arrays, or of shapes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
    """One array of a model, and the checkpoint tensors that it is made of.

    Attributes:
      names: Tensors of the checkpoint, in order.
      shapes: Their shapes there. Matrices stay ``[out, in]``.
      join: How several become one: end to end along axis 0, or stacked on a new one.
      shape: Of the array, after joining; None for whatever joining gives.
      decode: For tensors of another format or order: called with them and with
        ``dtype=``, and returns the array. It takes the place of joining.
      keeps_float32: Stay in float32 whatever the model's dtype: small parameters that
        enter exponentials, and routers.
      spread: Standard deviation of random values; 0 for ones, as of a norm.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    join: Literal["concatenate", "stack"] = "concatenate"
    shape: tuple[int, ...] | None = None
    decode: Callable[..., jax.Array] | None = None
    keeps_float32: bool = False
    spread: float = 0.02

    @property
    def final_shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        if self.shape is not None:
            return self.shape
        if self.join == "stack":
            return (len(self.names), *self.shapes[0])
        return (sum(shape[0] for shape in self.shapes), *self.shapes[0][1:])

    def dtype(self, model_dtype: jnp.dtype) -> jnp.dtype:
        """Return the dtype of the array in a model of that dtype."""
        return jnp.dtype("float32") if self.keeps_float32 else model_dtype


def weight(name: str, *shape: int, **options: Any) -> Weight:
    """Describe an array that is one tensor of the checkpoint."""
    return Weight(names=(name,), shapes=(shape,), **options)


def joined(names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> Weight:
    """Describe matrices that read the same input, fused into one along their rows."""
    return Weight(names=tuple(names), shapes=tuple(shapes))


def stacked(names: Sequence[str], *shape: int) -> Weight:
    """Describe equal matrices of many experts, as one array ``[experts, *shape]``."""
    return Weight(names=tuple(names), shapes=(shape,) * len(names), join="stack")


def _is_weight(node: object) -> bool:
    return isinstance(node, Weight)


def abstract_weights(description: Weights, dtype: jnp.dtype) -> Weights:
    """Return the shapes of all arrays."""
    return jax.tree.map(
        lambda w: jax.ShapeDtypeStruct(w.final_shape, w.dtype(dtype)),
        description,
        is_leaf=_is_weight,
    )


def weight_bytes(description: Weights, dtype: jnp.dtype) -> int:
    """Return the bytes of all arrays in a model of that dtype."""
    leaves = jax.tree.leaves(description, is_leaf=_is_weight)
    return sum(math.prod(w.final_shape) * w.dtype(dtype).itemsize for w in leaves)


def init_weights(description: Weights, key: jax.Array, dtype: jnp.dtype) -> Weights:
    """Return random arrays: normal with each weight's spread, ones where it is 0."""
    leaves, structure = jax.tree.flatten(description, is_leaf=_is_weight)
    keys = jax.random.split(key, len(leaves))

    def init(w: Weight, key: jax.Array) -> jax.Array:
        if w.spread == 0:
            return jnp.ones(w.final_shape, w.dtype(dtype))
        values = w.spread * jax.random.normal(key, w.final_shape, jnp.float32)
        return values.astype(w.dtype(dtype))

    arrays = [init(w, k) for w, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, arrays)


def tensor_shapes(description: Weights) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the checkpoint's tensors by name."""
    return {
        name: shape
        for w in jax.tree.leaves(description, is_leaf=_is_weight)
        for name, shape in zip(w.names, w.shapes, strict=True)
    }


def assemble_weights(
    description: Weights, tensors: Mapping[str, jax.Array], dtype: jnp.dtype
) -> Weights:
    """Make all arrays of tensors in memory, as ``load_weights`` does of a file.

    It is differentiable, so training can keep its parameters as the checkpoint will.

    Args:
      description: The model's weights.
      tensors: By their names in the checkpoint.
      dtype: The model's dtype.
    """
    return jax.tree.map(
        lambda w: _assemble(w, [tensors[name] for name in w.names], dtype, jnp),
        description,
        is_leaf=_is_weight,
    )


def _assemble(w: Weight, tensors: list, dtype: jnp.dtype, numpy: ModuleType) -> Any:
    """Join or decode the tensors of one array, with NumPy or with JAX's NumPy."""
    if w.decode is not None:
        value = w.decode(*map(jnp.asarray, tensors), dtype=w.dtype(dtype))
        assert value.shape == w.final_shape, f"{w.names}: {value.shape=}"
        return value
    if w.join == "stack":
        value = numpy.stack(tensors)
    else:
        value = tensors[0] if len(tensors) == 1 else numpy.concatenate(tensors)
    return value.reshape(w.final_shape).astype(w.dtype(dtype))


def _read(checkpoint: TensorSource, w: Weight, dtype: jnp.dtype) -> jax.Array:
    # On the host: only the finished array goes to the device.
    tensors = [
        np.asarray(checkpoint.read(name, shape))
        for name, shape in zip(w.names, w.shapes, strict=True)
    ]
    return jax.device_put(_assemble(w, tensors, dtype, np))


def load_weights(
    description: Weights,
    checkpoint: TensorSource,
    dtype: jnp.dtype,
    *,
    ignored: str | None = None,
    progress: bool = True,
) -> Weights:
    """Read every array from a checkpoint, straight to the device.

    Args:
      description: The model's weights.
      checkpoint: Where they are.
      dtype: The model's dtype.
      ignored: Regular expression of tensors that the model does not need; any other
        tensor that nobody reads is refused.
      progress: Whether to show a progress bar.

    Raises:
      CheckpointError: A tensor is missing, misshapen or unknown.
    """
    leaves, structure = jax.tree.flatten(description, is_leaf=_is_weight)
    bar = tqdm(leaves, desc="weights", unit="array", disable=not progress)
    arrays = [_read(checkpoint, w, dtype) for w in bar]
    unknown = [
        name
        for name in checkpoint.unread()
        if ignored is None or not re.fullmatch(ignored, name)
    ]
    if unknown:
        shown = ", ".join(unknown[:5]) + (", ..." if len(unknown) > 5 else "")
        raise CheckpointError(
            f"{checkpoint.folder}: {len(unknown)} tensors are unknown to this model: "
            f"{shown}"
        )
    return jax.tree.unflatten(structure, arrays)
