"""Bytes and offsets of a whole pool: what follows from specs and a budget."""

import dataclasses
import functools as ft
import math
import numbers
from collections.abc import Mapping, Sequence

from ukv.errors import BudgetError, SpecError, UnknownSubPoolError
from ukv.layout.part_view import PartView
from ukv.layout.request import RequestShape, pages_of_spec
from ukv.layout.sub_pool import (
    Placement,
    SubPoolLayout,
    padded_entry_bytes,
    page_bytes_of,
    row_bytes_of,
)
from ukv.spec import SubPoolSpec

MAX_ROWS = 2**31


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolLayout:
    """Static facts of a pool. Hashable, so that it can be pytree metadata.

    Build one with :func:`unified_layout` or :func:`static_layout`.

    Attributes:
      sub_pools: In their order in the buffer, low end first, high end last.
      buffer_bytes: Bytes of each buffer: one for a unified pool, one for each part
        of each sub-pool for a static pool.
      buffer_words: uint32 words of a row of each buffer.
      unit_bytes: Common measure of all page and base offsets.
    """

    sub_pools: tuple[SubPoolLayout, ...]
    buffer_bytes: tuple[int, ...]
    buffer_words: tuple[int, ...]
    unit_bytes: int

    @property
    def is_unified(self) -> bool:
        """Whether all sub-pools share one buffer with moving borders."""
        return self.sub_pools[0].placement is not Placement.OWN

    @property
    def pool_bytes(self) -> int:
        """Bytes of all buffers together."""
        return sum(self.buffer_bytes)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sub-pools, in their order."""
        return tuple(sub.name for sub in self.sub_pools)

    @property
    def total_units(self) -> int:
        """Units of the unified buffer."""
        return self.buffer_bytes[0] // self.unit_bytes

    @ft.cached_property
    def page_units(self) -> tuple[int, ...]:
        """Units of a page of each sub-pool."""
        return tuple(sub.page_bytes // self.unit_bytes for sub in self.sub_pools)

    @ft.cached_property
    def base_units(self) -> tuple[int, ...]:
        """Units before physical page 0 of each sub-pool."""
        return tuple(sub.base_bytes // self.unit_bytes for sub in self.sub_pools)

    @ft.cached_property
    def owners(self) -> tuple[SubPoolLayout, ...]:
        """The sub-pools that own an id space."""
        return tuple(sub for sub in self.sub_pools if sub.owns_ids)

    def members(self, owner: SubPoolLayout) -> tuple[SubPoolLayout, ...]:
        """Return the sub-pools that use the ids of ``owner``, itself first."""
        rest = (s for s in self.sub_pools if s.owner == owner.index and s != owner)
        return (owner, *rest)

    def sub_pool(self, name: str) -> SubPoolLayout:
        """Return the sub-pool of that name.

        Raises:
          UnknownSubPoolError: No sub-pool has it.
        """
        for sub in self.sub_pools:
            if sub.name == name:
                return sub
        raise UnknownSubPoolError(
            f"no sub-pool {name!r}; this pool has {', '.join(self.names)}"
        )

    def owner(self, name: str) -> SubPoolLayout:
        """Return the sub-pool of that name, which must own its id space.

        Raises:
          UnknownSubPoolError: No sub-pool has it, or it uses another one's ids.
        """
        sub = self.sub_pool(name)
        if not sub.owns_ids:
            raise UnknownSubPoolError(
                f"sub-pool {name!r} uses the ids of {sub.spec.id_space!r}: allocate "
                f"and free pages through {sub.spec.id_space!r}"
            )
        return sub

    @ft.lru_cache(maxsize=4096)  # noqa: B019 - layouts are few and live as long
    def part_view(self, name: str, *, layer: int, part: str) -> PartView:
        """Return where one part of one layer lies.

        Args:
          name: The sub-pool.
          layer: Index among the layers of this sub-pool.
          part: Name of the part (``k``, ``v``, ``latent``, ``recurrent``, ``conv``).

        Raises:
          UnknownSubPoolError: No sub-pool has that name.
          SpecError: The sub-pool has no such layer or part.
        """
        sub = self.sub_pool(name)
        spec = sub.spec
        if not isinstance(layer, numbers.Integral) or not 0 <= layer < spec.num_layers:
            raise SpecError(
                f"{layer=} of {name!r} must be an integer in [0, {spec.num_layers})"
            )
        part_names = [p.name for p in spec.parts]
        if part not in part_names:
            raise SpecError(f"{part=} of {name!r} must be one of {part_names}")
        position = part_names.index(part)
        entries = [padded_entry_bytes(spec, p) for p in spec.parts]
        if sub.placement is Placement.OWN:
            # Layer-major: [layers, pages, page_size], one buffer for each part.
            first = sum(len(s.spec.parts) for s in self.sub_pools[: sub.index])
            buffer_index = first + position
            row_bytes = entries[position]
            rows_per_entry = 1
            block_offset = layer * sub.num_pages
        else:
            # Page-major: inside a page, layers in order, in a layer parts in order.
            buffer_index = 0
            row_bytes = sub.row_bytes
            rows_per_entry = entries[position] // row_bytes
            before = layer * sum(entries) + sum(entries[:position])
            base_blocks = sub.base_bytes // (sub.page_size * row_bytes)
            block_offset = base_blocks + before // row_bytes
        return PartView(
            sub_pool=name,
            part=part,
            layer=layer,
            shape=spec.parts[position].shape,
            dtype=spec.parts[position].dtype,
            page_size=sub.page_size,
            row_bytes=row_bytes,
            rows_per_entry=rows_per_entry,
            block_offset=block_offset,
            buffer_index=buffer_index,
            num_rows=self.buffer_bytes[buffer_index] // row_bytes,
        )


def _owner_index(spec: SubPoolSpec, specs: Sequence[SubPoolSpec]) -> int:
    """Return the index of the spec that owns the ids of ``spec``."""
    names = [other.name for other in specs]
    if spec.id_space not in names:
        raise SpecError(
            f"spec {spec.name!r} shares the ids of {spec.id_space!r}, "
            f"but the pool has only {', '.join(names)}"
        )
    owner = specs[names.index(spec.id_space)]
    if owner.name == spec.name:
        return names.index(spec.name)
    if owner.id_space != owner.name or not owner.grows or owner.window is not None:
        raise SpecError(
            f"spec {spec.name!r} must share the ids of a full-attention or MLA "
            f"sub-pool, not of {owner.name!r}"
        )
    if owner.page_size != spec.page_size:
        raise SpecError(
            f"spec {spec.name!r} has page_size={spec.page_size}, but shares the ids of "
            f"{owner.name!r} with page_size={owner.page_size}: make them equal"
        )
    return names.index(owner.name)


def _owner_indices(specs: Sequence[SubPoolSpec]) -> list[int]:
    if not specs:
        raise SpecError("specs must describe at least one sub-pool")
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise SpecError(f"sub-pool names {names} must be distinct")
    return [_owner_index(spec, specs) for spec in specs]


def _placements(num_sub_pools: int) -> list[Placement]:
    if num_sub_pools == 1:
        return [Placement.LOW]
    floats = [Placement.FLOAT] * (num_sub_pools - 2)
    return [Placement.LOW, *floats, Placement.HIGH]


def _block_bytes(spec: SubPoolSpec) -> int:
    return spec.page_size * row_bytes_of(spec)


def packed_bytes(specs: Sequence[SubPoolSpec], pages: Mapping[str, int]) -> int:
    """Return the bytes of the smallest unified pool that holds ``pages``.

    Counts what a float loses to its page grid and the rounding of the whole buffer
    to a common multiple of all row blocks. A name that is absent holds no page.
    """
    border = 0
    for spec, placement in zip(specs, _placements(len(specs)), strict=True):
        page, count = page_bytes_of(spec), pages.get(spec.name, 0)
        if placement is Placement.FLOAT and count:
            border = -(-border // page) * page
        border += count * page
    step = math.lcm(*(_block_bytes(spec) for spec in specs))
    return max(-(-border // step), 1) * step


def smallest_pool_bytes(
    specs: Sequence[SubPoolSpec], *, num_tokens: int = 1, chunk_len: int | None = None
) -> int:
    """Return the bytes of the smallest pool that can run one request.

    Args:
      specs: The sub-pools.
      num_tokens: Tokens of that request, prompt and output together.
      chunk_len: Most tokens that one step adds; a window sub-pool holds the window
        and the chunk at once. None means that the prompt is prefilled whole.

    Raises:
      SpecError: The specs cannot stand together, or a length is below 1.
    """
    _owner_indices(specs)
    chunk = num_tokens if chunk_len is None else chunk_len
    shape = RequestShape(num_tokens=num_tokens, chunk_len=chunk)
    return packed_bytes(specs, {s.name: pages_of_spec(s, shape) for s in specs})


def unified_layout(specs: Sequence[SubPoolSpec], *, pool_bytes: int) -> PoolLayout:
    """Lay all sub-pools out in one buffer of at most ``pool_bytes`` bytes.

    The first spec gets the low end, the last the high end, the others float between.
    The buffer is rounded down to a common multiple of all row blocks.

    Args:
      specs: What each sub-pool stores. Put the two kinds that grow most at the ends.
      pool_bytes: Budget in bytes.

    Raises:
      SpecError: The specs cannot stand together.
      BudgetError: The budget cannot run one request, or needs row ids past int32.
    """
    owners = _owner_indices(specs)
    if not isinstance(pool_bytes, int):
        raise BudgetError(f"{pool_bytes=} must be a whole number of bytes")
    needed = smallest_pool_bytes(specs)
    if pool_bytes < needed:
        pages = ", ".join(f"{s.name} {page_bytes_of(s):,}" for s in specs)
        raise BudgetError(
            f"pool_bytes={pool_bytes:,} is less than the {needed:,} bytes that one "
            f"request needs (bytes of a page: {pages}); give at least that"
        )
    step = math.lcm(*(_block_bytes(spec) for spec in specs))
    buffer_bytes = pool_bytes // step * step
    for spec in specs:
        _require_rows(spec.name, buffer_bytes // row_bytes_of(spec))
    # The buffer's own rows are the shortest of all, and a unit is at least as long.
    row_bytes = math.gcd(*(_block_bytes(spec) for spec in specs))
    if buffer_bytes // row_bytes >= MAX_ROWS:
        raise BudgetError(
            f"pool_bytes={pool_bytes:,} is {buffer_bytes // row_bytes:,} rows of "
            f"{row_bytes} bytes, the common measure of the row blocks; int32 counts "
            f"fewer than {MAX_ROWS:,}: take a larger page_size or a budget below "
            f"{MAX_ROWS * row_bytes:,}"
        )
    unit = math.gcd(buffer_bytes, *(page_bytes_of(spec) for spec in specs))
    counts = [buffer_bytes // page_bytes_of(spec) for spec in specs]
    sub_pools = tuple(
        SubPoolLayout(
            spec=spec,
            index=index,
            owner=owners[index],
            placement=placement,
            page_bytes=page_bytes_of(spec),
            row_bytes=row_bytes_of(spec),
            base_bytes=(
                buffer_bytes % page_bytes_of(spec) if placement is Placement.HIGH else 0
            ),
            num_pages=counts[index],
            # An empty float waits where it has its share of room on both sides.
            first_page=counts[index] * index // max(len(specs) - 1, 1),
            num_virtual=counts[owners[index]] + 1,
            is_translating=True,
        )
        for index, (spec, placement) in enumerate(
            zip(specs, _placements(len(specs)), strict=True)
        )
    )
    return PoolLayout(
        sub_pools=sub_pools,
        buffer_bytes=(buffer_bytes,),
        buffer_words=(row_bytes // 4,),
        unit_bytes=unit,
    )


def static_layout(
    specs: Sequence[SubPoolSpec], *, num_pages: Mapping[str, int]
) -> PoolLayout:
    """Lay each part of each sub-pool out in a buffer of its own: the baseline.

    Virtual ids are physical ids, so nothing is translated, but for a sub-pool that
    shares another one's ids: it has fewer pages than there are ids.

    Args:
      specs: What each sub-pool stores.
      num_pages: Pages of each sub-pool by name. Page 0 of a sub-pool that owns its
        ids is the null page and comes on top.

    Raises:
      SpecError: The specs cannot stand together, or a count is missing or below 1.
      BudgetError: A sub-pool needs row ids past int32.
    """
    owners = _owner_indices(specs)
    if sorted(num_pages) != sorted(spec.name for spec in specs):
        raise SpecError(
            f"num_pages has {sorted(num_pages)}, the specs are "
            f"{sorted(spec.name for spec in specs)}: give a count for each"
        )
    bad = {
        name: count
        for name, count in num_pages.items()
        if not isinstance(count, numbers.Integral) or count < 1
    }
    if bad:
        raise SpecError(f"num_pages={bad} must be integers of 1 or more")
    grid = [
        num_pages[spec.name] + (owners[index] == index)
        for index, spec in enumerate(specs)
    ]
    buffer_bytes, buffer_words = [], []
    for index, spec in enumerate(specs):
        for part in spec.parts:
            rows = spec.num_layers * grid[index] * spec.page_size
            _require_rows(spec.name, rows)
            entry = padded_entry_bytes(spec, part)
            buffer_bytes.append(rows * entry)
            buffer_words.append(entry // 4)
    return PoolLayout(
        sub_pools=tuple(
            SubPoolLayout(
                spec=spec,
                index=index,
                owner=owners[index],
                placement=Placement.OWN,
                page_bytes=page_bytes_of(spec),
                row_bytes=row_bytes_of(spec),
                base_bytes=0,
                num_pages=grid[index],
                first_page=0,
                num_virtual=grid[owners[index]],
                is_translating=owners[index] != index,
            )
            for index, spec in enumerate(specs)
        ),
        buffer_bytes=tuple(buffer_bytes),
        buffer_words=tuple(buffer_words),
        unit_bytes=math.gcd(*buffer_bytes),
    )


def _require_rows(name: str, rows: int) -> None:
    if rows >= MAX_ROWS:
        raise BudgetError(
            f"sub-pool {name!r} would have {rows:,} kernel rows; int32 row ids allow "
            f"fewer than {MAX_ROWS:,}: take a smaller budget or wider rows"
        )
