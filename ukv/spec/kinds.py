"""One class for each kind of memory, and what all of them offer to the layout."""

import dataclasses
from typing import Protocol, runtime_checkable

import jax.numpy as jnp

from ukv.errors import SpecError
from ukv.spec.part import (
    Part,
    StorageDtype,
    require_name,
    require_positive,
    storage_dtype,
)


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
    require_name(spec.name)
    require_positive(
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
        require_positive(where, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        if self.value_dim is not None:
            require_positive(where, value_dim=self.value_dim)
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
        require_positive(f"spec {self.name!r}", window_size=self.window_size)
        if self.shares_ids is not None:
            require_name(self.shares_ids)
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
        require_positive(where, latent_dim=self.latent_dim)
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
        require_name(self.name)
        require_positive(f"spec {self.name!r}", num_layers=self.num_layers)
        object.__setattr__(self, "parts", tuple(self.parts))
        if not all(isinstance(part, Part) for part in self.parts):
            raise SpecError(f"spec {self.name!r}: parts={self.parts} must be Parts")
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
