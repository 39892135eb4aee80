"""A part, one array that a layer keeps, and the checks of its name, sizes and dtype."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from ukv.errors import SpecError

STORAGE_DTYPES = (
    "float32",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
)


# A spec takes whatever NumPy takes for a dtype and holds a NumPy dtype, so the
# annotation says what one reads, and the run-time check lets every spelling pass.
if TYPE_CHECKING:
    StorageDtype = np.dtype
else:
    StorageDtype = Any


def storage_dtype(dtype: object, *, where: str) -> np.dtype:
    """Return ``dtype`` as a NumPy dtype that the pool can store.

    Raises:
      SpecError: The dtype is unknown or not one of ``STORAGE_DTYPES``.
    """
    try:
        found = jnp.dtype(dtype)  # type: ignore[arg-type]
    except TypeError as error:
        raise SpecError(
            f"{where}: {dtype!r} is no dtype; allowed: {', '.join(STORAGE_DTYPES)}"
        ) from error
    if found.name not in STORAGE_DTYPES:
        raise SpecError(
            f"{where}: dtype {found.name} cannot be stored; "
            f"allowed: {', '.join(STORAGE_DTYPES)}"
        )
    return found


def require_positive(where: str, **sizes: object) -> None:
    """Raise SpecError unless every size is a positive integer."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise SpecError(f"{where}: {name}={size!r} must be a positive integer")


def require_name(name: object) -> None:
    """Raise SpecError unless a name is a Python identifier."""
    if not isinstance(name, str) or not name.isidentifier():
        raise SpecError(f"name={name!r} must be a Python identifier")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One array that a layer keeps per token (K, V, latent) or per request (state).

    Attributes:
      name: Unique inside its spec.
      shape: Elements of one token's, or one request's, entry in one layer.
      dtype: Storage dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: StorageDtype

    def __post_init__(self) -> None:
        """Check the name, the sizes and the dtype."""
        require_name(self.name)
        if not self.shape:
            raise SpecError(f"part {self.name!r}: shape=() must have a dimension")
        object.__setattr__(self, "shape", tuple(self.shape))
        require_positive(
            f"part {self.name!r}",
            **{f"shape[{axis}]": size for axis, size in enumerate(self.shape)},
        )
        dtype = storage_dtype(self.dtype, where=f"part {self.name!r}")
        object.__setattr__(self, "dtype", dtype)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry of one layer, before any padding."""
        return math.prod(self.shape) * self.dtype.itemsize
