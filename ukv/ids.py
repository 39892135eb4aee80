"""The three id spaces of a page, as three types that cannot be mixed.

A virtual id and a physical id overlap in value, so a forgotten or doubled
translation reads plausible garbage instead of failing. Here each space is a pytree
type of its own, and every function that takes ids checks the type and the name of
the sub-pool while it is traced:

    VirtualPages  --translator-->  KernelBlocks      (what kernels index with)
    VirtualPages  --allocator--->  PhysicalPages     (what page moves index with)

Ids are int32 arrays of any shape. Virtual id 0 is the null page: never allocated,
used as padding.
"""

from typing import Any

import flax.struct

from ukv.errors import IdSpaceError
from ukv.pytree import Leaf

NULL_PAGE = 0

ABSENT_BLOCK = 2**31 - 1
"""The block id of a padded write: past the end of every pool."""


class VirtualPages(flax.struct.PyTreeNode):
    """Ids that callers hold; they never change while the page lives.

    Attributes:
      ids: int32, any shape; 0 is the null page (padding).
      space: Name of the sub-pool that owns the id space.
    """

    ids: Leaf
    space: str = flax.struct.field(pytree_node=False)


class PhysicalPages(flax.struct.PyTreeNode):
    """Where pages lie now, on the page grid of one sub-pool.

    Attributes:
      ids: int32, any shape; at or past the sub-pool's ``num_pages`` means absent.
      sub_pool: Name of the sub-pool whose grid the ids count.
    """

    ids: Leaf
    sub_pool: str = flax.struct.field(pytree_node=False)


class KernelBlocks(flax.struct.PyTreeNode):
    """Block ids that kernels index with, the same for all layers of a sub-pool.

    Attributes:
      ids: int32, any shape; entries past a row's live pages hold the padding value
        of the backend that reads them.
      sub_pool: Name of the sub-pool whose row blocks the ids count.
    """

    ids: Leaf
    sub_pool: str = flax.struct.field(pytree_node=False)


class WriteLocations(flax.struct.PyTreeNode):
    """Where the new tokens of a step go: translated once, the same for all layers.

    Attributes:
      blocks: int32, any shape; block id of each token's page, ``ABSENT_BLOCK`` for a
        token that must not be written.
      offsets: int32, same shape; place of the token in its page.
      sub_pool: Name of the sub-pool whose row blocks the ids count.
    """

    blocks: Leaf
    offsets: Leaf
    sub_pool: str = flax.struct.field(pytree_node=False)


_NAMES = {
    VirtualPages: "virtual page ids",
    PhysicalPages: "physical page ids",
    KernelBlocks: "kernel block ids",
    WriteLocations: "write locations",
}


def virtual_space(pages: Any, *, argument: str) -> str:
    """Return the name of the sub-pool that owns some virtual ids.

    Args:
      pages: What the caller passed.
      argument: Name of the caller's argument, for the message.

    Raises:
      IdSpaceError: They are no virtual ids.
    """
    if not isinstance(pages, VirtualPages):
        found = _NAMES.get(type(pages), f"{type(pages).__name__} without a space")
        raise IdSpaceError(f"{argument} takes {_NAMES[VirtualPages]}, not {found}")
    return pages.space


def require_ids[T](value: Any, kind: type[T], *, owner: str, argument: str) -> T:
    """Return ``value`` after checking its space and owner.

    Args:
      value: What the caller passed.
      kind: One of the id types of this module.
      owner: Name of the sub-pool that the ids must belong to.
      argument: Name of the caller's argument, for the message.

    Raises:
      IdSpaceError: ``value`` is of another space, or belongs to another sub-pool.
    """
    if not isinstance(value, kind):
        found = _NAMES.get(type(value), f"{type(value).__name__} without a space")
        raise IdSpaceError(
            f"{argument} takes {_NAMES[kind]} of {owner!r}, not {found}; "
            "only the translator turns one space into the next"
        )
    found_owner = getattr(value, "space" if kind is VirtualPages else "sub_pool")
    if found_owner != owner:
        raise IdSpaceError(
            f"{argument} takes {_NAMES[kind]} of {owner!r}, not of {found_owner!r}"
        )
    return value
