"""Eviction from the prefix cache: as little as makes an allocation fit.

    1. If all that is not pinned were not enough, nothing goes.
    2. Of each component goes first what no other one could make up for: the side that
       is short. If bytes are short, whatever it is, any component goes then.
    3. Of a component, what no prefix needs goes first, wherever it lies in the tree.
       Then the prefix that was used longest ago is needed no more, from its end.

Every round drops something or takes an anchor off, so it ends.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from ukv.engine.prefix_spec import PrefixSpec
from ukv.engine.radix_tree import PageNode, RadixTree

Fits = Callable[[Mapping[str, int]], bool]
"""Whether an allocation fits once these pages, by sub-pool, are free as well."""


@dataclasses.dataclass(kw_only=True)
class Dropped:
    """Holds that the cache let go of, for the device to free, in this order.

    Nobody else holds any of it, so all of it dies.

    Attributes:
      states: By sub-pool, slots to ``free``.
      halves: By window, pages to ``free_window``.
      pages: By owner, pages to ``free``, with the halves that they still have.
      num_pages: By sub-pool, how many pages die.
    """

    states: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    halves: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    pages: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    num_pages: dict[str, int] = dataclasses.field(default_factory=dict)

    def _add(self, into: dict[str, list[int]], name: str, page: int) -> None:
        into.setdefault(name, []).append(page)
        self.num_pages[name] = self.num_pages.get(name, 0) + 1

    def add_slot(self, name: str, slot: int) -> None:
        """Drop a slot of a state."""
        self._add(self.states, name, slot)

    def add_state(self, tree: RadixTree, node: PageNode) -> None:
        """Drop the state of a node."""
        assert node.state is not None
        for name, slot in zip(tree.spec.states, node.state, strict=True):
            self.add_slot(name, slot)
        node.state = None
        tree.update(node)

    def add_half(self, tree: RadixTree, node: PageNode, window: int) -> None:
        """Drop a window half of a node."""
        half = tree.spec.windows[window]
        self._add(self.halves, half.name, node.ids[half.owner])
        node.halves[window] = False
        tree.update(node)

    def add_page(self, spec: PrefixSpec, node: PageNode) -> None:
        """Drop the page of a node; the node itself is the caller's."""
        for name, page in zip(spec.owners, node.ids, strict=True):
            self._add(self.pages, name, page)
        for half, is_there in zip(spec.windows, node.halves, strict=True):
            if is_there:
                self.num_pages[half.name] = self.num_pages.get(half.name, 0) + 1

    def add_loose(self, tree: RadixTree, component: int) -> None:
        """Drop one loose thing of a component."""
        node = next(iter(tree.loose[component]))
        if component == 0:
            self.add_state(tree, node)
        elif component < tree.num_components - 1:
            self.add_half(tree, node, component - 1)
        else:
            if node.state is not None:
                self.add_state(tree, node)
            self.add_page(tree.spec, node)
            tree.remove(node)


def count_pages(
    tree: RadixTree, counts: list[int], components: Iterable[int] | None = None
) -> dict[str, int]:
    """Return counts of components as pages by sub-pool.

    Args:
      tree: Whose components they are.
      counts: By component.
      components: Those to count; None for all.
    """
    spec = tree.spec
    names = [spec.states, *((half.name,) for half in spec.windows), spec.owners]
    wanted = range(len(counts)) if components is None else components
    return {name: counts[which] for which in wanted for name in names[which]}


def evict(tree: RadixTree, fits: Fits) -> Dropped | None:
    """Drop from the tree until an allocation fits.

    Args:
      tree: All cached pages.
      fits: Asked for what was dropped so far, and for what could be.

    Returns:
      What to free before the allocation, nothing if it fits anyway; None if eviction
      cannot make it fit, and then nothing was dropped.
    """
    dropped = Dropped()
    if fits({}):
        return dropped
    every = range(tree.num_components)
    if not fits(count_pages(tree, tree.num_evictable)):
        return None
    # Pages first: each takes along what else it has.
    for component in reversed(every):
        others = [other for other in every if other != component]
        while not fits(_with_evictable(tree, dropped, others)):
            if not _drop_one(tree, dropped, [component]):
                break
    while not fits(dropped.num_pages):
        if not _drop_one(tree, dropped, every):
            break
    return dropped


def _with_evictable(
    tree: RadixTree, dropped: Dropped, components: Iterable[int]
) -> dict[str, int]:
    """Return what was dropped and what else could be of some components."""
    counts = count_pages(tree, tree.num_evictable, components)
    for name, count in dropped.num_pages.items():
        counts[name] = counts.get(name, 0) + count
    return counts


def _drop_one(tree: RadixTree, dropped: Dropped, components: Sequence[int]) -> bool:
    """Drop one thing of some components; False if there is none."""
    while True:
        for component in components:
            if tree.loose[component]:
                dropped.add_loose(tree, component)
                return True
        # It may free nothing here, say because a row uses it. What it held is loose
        # then, and goes before what is newer, unless the prefix is used again.
        if tree.pop_oldest_anchor() is None:
            return False


def drop_all(tree: RadixTree) -> Dropped:
    """Drop all that is not pinned."""
    dropped = Dropped()
    while _drop_one(tree, dropped, range(tree.num_components)):
        pass
    return dropped


def drop_subtree(tree: RadixTree, top: PageNode) -> Dropped:
    """Drop a page and all that follow it, as far as no row holds them."""
    dropped, nodes, todo = Dropped(), [], [top]
    while todo:
        node = todo.pop()
        nodes.append(node)
        todo.extend(node.children.values())
    for node in reversed(nodes):
        if not (node.children or node.pins):
            tree.set_anchor(node, is_anchor=False)
            if node.state is not None:
                dropped.add_state(tree, node)
            dropped.add_page(tree.spec, node)
            tree.remove(node)
    return dropped
