"""Specs: what one sub-pool stores. Frozen, hashable, free of bytes and addresses.

One class per kind of memory, not per model:

    AttentionSpec       K and V rows that grow with every token (MHA, GQA)
    SlidingWindowSpec   K and V rows whose pages are released behind a window
    MLASpec             one latent row per token (multi-head latent attention)
    StateSpec           a fixed set of arrays per request (KDA, GDN, Mamba2)

All layers of a kind share one spec: a page holds its tokens for all these layers.
"""

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

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


def _require_positive(where: str, **sizes: object) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise SpecError(f"{where}: {name}={size!r} must be a positive integer")


def _require_name(name: object) -> None:
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
        _require_name(self.name)
        if not self.shape:
            raise SpecError(f"part {self.name!r}: shape=() must have a dimension")
        object.__setattr__(self, "shape", tuple(self.shape))
        _require_positive(
            f"part {self.name!r}",
            **{f"shape[{axis}]": size for axis, size in enumerate(self.shape)},
        )
        dtype = storage_dtype(self.dtype, where=f"part {self.name!r}")
        object.__setattr__(self, "dtype", dtype)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry of one layer, before any padding."""
        return math.prod(self.shape) * self.dtype.itemsize


@runtime_checkable
class SubPoolSpec(Protocol):
    """What every spec offers to the layout."""

    @property
    def name(self) -> str:
        """Name of the sub-pool, unique in a pool."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers whose memory lies in each page."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens per page; 1 for a state, whose page is one slot."""
        ...

    @property
    def parts(self) -> tuple[Part, ...]:
        """Arrays of one layer, in their order inside the page."""
        ...

    @property
    def id_space(self) -> str:
        """Name of the sub-pool whose virtual ids this one uses (often its own)."""
        ...

    @property
    def grows(self) -> bool:
        """Whether a request's pages grow with its tokens."""
        ...

    @property
    def window(self) -> int | None:
        """Tokens a query can see (its own included), or None for all of them."""
        ...


def _check_pages(spec: "AttentionSpec | MLASpec") -> None:
    _require_name(spec.name)
    _require_positive(
        f"spec {spec.name!r}", num_layers=spec.num_layers, page_size=spec.page_size
    )


def _kv_parts(spec: "AttentionSpec") -> tuple[Part, Part]:
    heads, value_dim = spec.num_kv_heads, spec.value_dim or spec.head_dim
    return (
        Part(name="k", shape=(heads, spec.head_dim), dtype=spec.dtype),
        Part(name="v", shape=(heads, value_dim), dtype=spec.dtype),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """K and V rows of all full-attention layers (MHA or GQA).

    Attributes:
      name: Name of the sub-pool.
      num_layers: Layers of this kind.
      page_size: Tokens per page.
      num_kv_heads: Heads of K and V.
      head_dim: Elements of a K head.
      value_dim: Elements of a V head; None means ``head_dim``.
      dtype: Storage dtype of K and V.
    """

    name: str
    num_layers: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    dtype: StorageDtype = dataclasses.field(
        default_factory=lambda: jnp.dtype("bfloat16")
    )

    def __post_init__(self) -> None:
        """Check every size and the dtype."""
        _check_pages(self)
        where = f"spec {self.name!r}"
        _require_positive(where, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        if self.value_dim is not None:
            _require_positive(where, value_dim=self.value_dim)
        object.__setattr__(self, "dtype", storage_dtype(self.dtype, where=where))

    @property
    def parts(self) -> tuple[Part, ...]:
        """K, then V."""
        return _kv_parts(self)

    @property
    def id_space(self) -> str:
        """Its own."""
        return self.name

    @property
    def grows(self) -> bool:
        """True: every token adds a row."""
        return True

    @property
    def window(self) -> int | None:
        """None: every earlier token stays visible."""
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """K and V rows of all sliding-window layers.

    The sub-pool shares the virtual ids of the full-attention sub-pool ``shares_ids``:
    a token has one virtual page, which may have a full half and a window half. A page
    whose window half was released is a tombstone. A model without full-attention
    layers leaves ``shares_ids`` None, and the sub-pool owns its ids.

    Attributes:
      window_size: Tokens a query can see, its own included.
      shares_ids: Name of the sub-pool that owns the virtual ids, or None.
    """

    window_size: int
    shares_ids: str | None = None

    def __post_init__(self) -> None:
        """Check every size, the dtype and the name of the owner."""
        AttentionSpec.__post_init__(self)
        _require_positive(f"spec {self.name!r}", window_size=self.window_size)
        if self.shares_ids is not None:
            _require_name(self.shares_ids)
            if self.shares_ids == self.name:
                raise SpecError(
                    f"spec {self.name!r}: shares_ids={self.shares_ids!r} must name "
                    "another sub-pool, or be None"
                )

    @property
    def id_space(self) -> str:
        """The full-attention sub-pool's, unless there is none."""
        return self.shares_ids or self.name

    @property
    def window(self) -> int | None:
        """``window_size``."""
        return self.window_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLASpec:
    """Latent rows of all MLA layers: compressed K/V, then the shared rotary key.

    Attributes:
      name: Name of the sub-pool.
      num_layers: Layers of this kind.
      page_size: Tokens per page.
      latent_dim: Elements of the compressed K/V (``kv_lora_rank``).
      rope_dim: Elements of the shared key (``qk_rope_head_dim``); may be 0.
      dtype: Storage dtype.
    """

    name: str
    num_layers: int
    page_size: int
    latent_dim: int
    rope_dim: int
    dtype: StorageDtype = dataclasses.field(
        default_factory=lambda: jnp.dtype("bfloat16")
    )

    def __post_init__(self) -> None:
        """Check every size and the dtype."""
        _check_pages(self)
        where = f"spec {self.name!r}"
        _require_positive(where, latent_dim=self.latent_dim)
        is_count = isinstance(self.rope_dim, int) and not isinstance(
            self.rope_dim, bool
        )
        if not is_count or self.rope_dim < 0:
            raise SpecError(
                f"{where}: rope_dim={self.rope_dim!r} must be an integer of 0 or more"
            )
        object.__setattr__(self, "dtype", storage_dtype(self.dtype, where=where))

    @property
    def parts(self) -> tuple[Part, ...]:
        """One latent row of ``latent_dim + rope_dim`` elements."""
        width = self.latent_dim + self.rope_dim
        return (Part(name="latent", shape=(width,), dtype=self.dtype),)

    @property
    def id_space(self) -> str:
        """Its own."""
        return self.name

    @property
    def grows(self) -> bool:
        """True: every token adds a row."""
        return True

    @property
    def window(self) -> int | None:
        """None: every earlier token stays visible."""
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateSpec:
    """Recurrent states of all layers of one kind; a page is one request's slot.

    Attributes:
      name: Name of the sub-pool.
      num_layers: Layers of this kind.
      parts: Arrays that a layer keeps per request, each with its shape and dtype.
    """

    name: str
    num_layers: int
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        """Check the sizes and that the parts have distinct names."""
        _require_name(self.name)
        _require_positive(f"spec {self.name!r}", num_layers=self.num_layers)
        object.__setattr__(self, "parts", tuple(self.parts))
        names = [part.name for part in self.parts]
        if not names or len(set(names)) != len(names):
            raise SpecError(
                f"spec {self.name!r}: parts {names} must be one or more distinct names"
            )

    @property
    def page_size(self) -> int:
        """1: a slot is a page of one entry."""
        return 1

    @property
    def id_space(self) -> str:
        """Its own."""
        return self.name

    @property
    def grows(self) -> bool:
        """False: a request holds one slot, whatever its length."""
        return False

    @property
    def window(self) -> int | None:
        """None: a state has no rows to leave behind."""
        return None


def kda_state_spec(
    *,
    name: str,
    num_layers: int,
    num_heads: int,
    key_dim: int,
    value_dim: int,
    conv_width: int,
    state_dtype: object = "float32",
    conv_dtype: object = "bfloat16",
) -> StateSpec:
    """State of Kimi Delta Attention layers.

    Parts: ``recurrent`` ``[num_heads, value_dim, key_dim]`` (V-first) and ``conv``
    ``[conv_width - 1, channels]``, the last raw inputs of q, k and v, oldest first.

    Source: Kimi Linear (arXiv:2510.26692).

    Raises:
      SpecError: A size is not positive, or a dtype cannot be stored.
    """
    _require_positive(
        f"spec {name!r}",
        num_heads=num_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_width=conv_width,
    )
    channels = num_heads * (2 * key_dim + value_dim)
    return _delta_spec(
        name,
        num_layers,
        (num_heads, value_dim, key_dim),
        (conv_width - 1, channels),
        state_dtype,
        conv_dtype,
    )


def gdn_state_spec(
    *,
    name: str,
    num_layers: int,
    num_key_heads: int,
    num_value_heads: int,
    key_dim: int,
    value_dim: int,
    conv_width: int,
    state_dtype: object = "float32",
    conv_dtype: object = "bfloat16",
) -> StateSpec:
    """State of Gated DeltaNet layers, whose q and k may have fewer heads than v.

    Parts: ``recurrent`` ``[num_value_heads, value_dim, key_dim]`` (V-first) and
    ``conv`` ``[conv_width - 1, channels]``, oldest first.

    Source: Gated Delta Networks (arXiv:2412.06464).

    Raises:
      SpecError: A size is not positive, or a dtype cannot be stored.
    """
    _require_positive(
        f"spec {name!r}",
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_width=conv_width,
    )
    channels = 2 * num_key_heads * key_dim + num_value_heads * value_dim
    return _delta_spec(
        name,
        num_layers,
        (num_value_heads, value_dim, key_dim),
        (conv_width - 1, channels),
        state_dtype,
        conv_dtype,
    )


def mamba2_state_spec(
    *,
    name: str,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    state_dim: int,
    num_groups: int,
    conv_width: int,
    state_dtype: object = "float32",
    conv_dtype: object = "bfloat16",
) -> StateSpec:
    """State of Mamba2 layers.

    Parts: ``recurrent`` ``[num_heads, head_dim, state_dim]`` and ``conv``
    ``[conv_width - 1, num_heads * head_dim + 2 * num_groups * state_dim]``.

    Source: Transformers are SSMs (arXiv:2405.21060).

    Raises:
      SpecError: A size is not positive, or a dtype cannot be stored.
    """
    _require_positive(
        f"spec {name!r}",
        num_heads=num_heads,
        head_dim=head_dim,
        state_dim=state_dim,
        num_groups=num_groups,
        conv_width=conv_width,
    )
    channels = num_heads * head_dim + 2 * num_groups * state_dim
    return _delta_spec(
        name,
        num_layers,
        (num_heads, head_dim, state_dim),
        (conv_width - 1, channels),
        state_dtype,
        conv_dtype,
    )


def _delta_spec(
    name: str,
    num_layers: int,
    recurrent: tuple[int, ...],
    conv: tuple[int, ...],
    state_dtype: object,
    conv_dtype: object,
) -> StateSpec:
    where = f"spec {name!r}"
    parts = [
        Part(
            name="recurrent",
            shape=recurrent,
            dtype=storage_dtype(state_dtype, where=where),
        )
    ]
    # A convolution of width 1 has no past inputs to keep.
    if conv[0] > 0:
        dtype = storage_dtype(conv_dtype, where=where)
        parts.append(Part(name="conv", shape=conv, dtype=dtype))
    return StateSpec(name=name, num_layers=num_layers, parts=tuple(parts))
