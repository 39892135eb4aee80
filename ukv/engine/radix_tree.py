"""A radix tree over token ids: a node for each page, and who needs it.

An edge is exactly a page long, so no node is ever split and every component lies in
one node. A node at which a request ended, or is expected to branch off, is an *anchor*
while all components of its prefix are there. What no anchor needs is *loose* and goes
first; a match may use it until then:

    state    loose unless its node is an anchor
    half     loose unless it lies in the tail of an anchor: ``tail_uses`` counts these
    page     loose if it is a leaf and no anchor: only then all it holds is loose

What is pinned is never loose. The counts change in steps, so nothing is searched for.
"""

import dataclasses
import heapq
import itertools as it
from collections.abc import Iterable, Iterator, Sequence

from ukv.engine.prefix_spec import PrefixSpec

PageTokens = tuple[int, ...]
Ids = tuple[int, ...]


@dataclasses.dataclass(eq=False, kw_only=True, slots=True)
class PageNode:
    """A page of tokens after all those of its parents.

    Attributes:
      parent: The page before; None for the root, which has no page.
      tokens: Of this page.
      depth: Pages from the root, this one included.
      ids: Virtual id of each owner.
      halves: By window, whether the half is there.
      state: Slot of each state after this page's tokens; None if there is none.
      children: The pages that follow.
      last_used: When a prefix through this node was last used, if it is an anchor.
      pins: Rows that use the path through this node.
      half_pins: By window, rows that still see this page.
      state_pins: Rows whose copy of the state is not dispatched.
      is_anchor: Whether a prefix that ends here is kept.
      num_needed: Children that are needed, and one for itself if it is an anchor.
      tail_uses: By window, the anchors whose tail this page is in.
    """

    parent: "PageNode | None"
    tokens: PageTokens
    depth: int
    ids: Ids
    halves: list[bool]
    state: Ids | None = None
    children: dict[PageTokens, "PageNode"] = dataclasses.field(default_factory=dict)
    last_used: int = 0
    pins: int = 0
    half_pins: list[int]
    state_pins: int = 0
    is_anchor: bool = False
    num_needed: int = 0
    tail_uses: list[int]
    _counted: tuple[int, ...] = ()


class RadixTree:
    """All cached pages.

    Attributes:
      spec: The components of a prefix.
      root: Before the first page.
      num_held: By component (states, halves of each window, pages) how many there are.
      num_evictable: By component how many are not pinned.
      loose: By component what is not pinned and not needed, as the keys of a dict.
    """

    def __init__(self, spec: PrefixSpec) -> None:
        """Start empty."""
        self.spec = spec
        self.num_components = 2 + len(spec.windows)
        self.root = self._node(None, (), (), [False] * len(spec.windows))
        self.num_held = [0] * self.num_components
        self.num_evictable = [0] * self.num_components
        self.loose: list[dict[PageNode, None]] = [{} for _ in self.num_held]
        self._now = it.count(1)
        self._serial = it.count()
        self._num_anchors = 0
        self._by_age: list[tuple[int, int, int, PageNode]] = []

    def _node(
        self, parent: PageNode | None, tokens: PageTokens, ids: Ids, halves: list[bool]
    ) -> PageNode:
        return PageNode(
            parent=parent,
            tokens=tokens,
            depth=0 if parent is None else parent.depth + 1,
            ids=ids,
            halves=halves,
            half_pins=[0] * len(halves),
            tail_uses=[0] * len(halves),
        )

    def pages_of(self, tokens: Sequence[int]) -> Iterator[PageTokens]:
        """Yield the whole pages of some tokens."""
        size = self.spec.page_size
        for start in range(0, len(tokens) - size + 1, size):
            yield tuple(tokens[start : start + size])

    def path(self, tokens: Sequence[int]) -> list[PageNode]:
        """Return the nodes of the cached pages that tokens start with."""
        nodes, node = [], self.root
        for page in self.pages_of(tokens):
            found = node.children.get(page)
            if found is None:
                break
            nodes.append(found)
            node = found
        return nodes

    def nodes(self) -> Iterator[PageNode]:
        """Yield every node, parents first."""
        todo = [self.root]
        while todo:
            node = todo.pop()
            if node.parent is not None:
                yield node
            todo.extend(node.children.values())

    def usable_depths(
        self, halves: Iterable[Sequence[bool]], has_state: Iterable[bool]
    ) -> Iterator[int]:
        """Yield how many pages of a path make a prefix with all its components.

        The one criterion, of what is cached and of what would be.

        Args:
          halves: For each page whether it has a half, by window.
          has_state: For each page whether there is a state after it.
        """
        spec = self.spec
        starts = [0] * len(spec.windows)
        pages = zip(halves, has_state, strict=True)
        for depth, (present, has_end) in enumerate(pages, start=1):
            starts = [
                start if is_there else depth
                for start, is_there in zip(starts, present, strict=True)
            ]
            if (has_end or not spec.states) and all(
                start <= spec.tail_start(window, depth)
                for start, window in zip(starts, spec.windows, strict=True)
            ):
                yield depth

    def usable_on(self, path: Sequence[PageNode]) -> list[PageNode]:
        """Return the nodes of a path, from the root, where a prefix can end."""
        depths = self.usable_depths(
            (node.halves for node in path), (node.state is not None for node in path)
        )
        return [path[depth - 1] for depth in depths]

    def add(self, parent: PageNode, tokens: PageTokens, ids: Ids) -> PageNode:
        """Add a page without halves and state."""
        node = self._node(parent, tokens, ids, [False] * len(self.spec.windows))
        parent.children[tokens] = node
        self.update(node)
        self.update(parent)
        return node

    def remove(self, node: PageNode) -> None:
        """Take out a leaf that nobody needs or pins."""
        parent = node.parent
        assert parent is not None
        assert not any((node.children, node.pins, node.num_needed))
        del parent.children[node.tokens]
        for component, counted in enumerate(node._counted):
            self.num_held[component] -= counted > 0
            self.num_evictable[component] -= counted > 1
            self.loose[component].pop(node, None)
        node.parent, node._counted = None, ()
        self.update(parent)

    def update(self, node: PageNode) -> None:
        """Count a node anew, after any of its components or pins changed."""
        if node.parent is None:
            return
        # For each component: is it there, is it pinned, is it needed.
        facts = [
            (node.state is not None, node.state_pins, node.is_anchor),
            *zip(node.halves, node.half_pins, node.tail_uses, strict=True),
            (True, node.pins, node.num_needed or bool(node.children)),
        ]
        counted = tuple(is_there * (1 + (not pins)) for is_there, pins, _ in facts)
        before = node._counted or (0,) * len(counted)
        for component, (_, _, is_needed) in enumerate(facts):
            old, new = before[component], counted[component]
            self.num_held[component] += (new > 0) - (old > 0)
            self.num_evictable[component] += (new > 1) - (old > 1)
            if new > 1 and not is_needed:
                self.loose[component][node] = None
            else:
                self.loose[component].pop(node, None)
        node._counted = counted

    def tail(self, node: PageNode, window: int) -> Iterator[PageNode]:
        """Yield the pages that a window sees from the end of a node's prefix."""
        start = self.spec.tail_start(self.spec.windows[window], node.depth)
        found: PageNode | None = node
        while found is not None and found.depth > start:
            yield found
            found = found.parent

    def is_usable(self, node: PageNode) -> bool:
        """Return whether a prefix can end at a node."""
        return (node.state is not None or not self.spec.states) and all(
            page.halves[window]
            for window in range(len(self.spec.windows))
            for page in self.tail(node, window)
        )

    def set_anchor(self, node: PageNode, *, is_anchor: bool) -> None:
        """Keep what a prefix that ends at a node needs, or need it no more."""
        if node.is_anchor == is_anchor:
            return
        node.is_anchor = is_anchor
        change = 1 if is_anchor else -1
        self._num_anchors += change
        for window in range(len(self.spec.windows)):
            for page in self.tail(node, window):
                page.tail_uses[window] += change
                self.update(page)
        found: PageNode | None = node
        while found is not None:
            was_needed = found.num_needed > 0
            found.num_needed += change
            self.update(found)
            if was_needed == (found.num_needed > 0):
                break
            found = found.parent
        if is_anchor:
            self._push(node)

    def touch(self, nodes: Iterable[PageNode]) -> None:
        """Keep the prefixes that end at these nodes, as the last ones used."""
        now = next(self._now)
        for node in nodes:
            node.last_used = now
            if node.is_anchor:
                self._push(node)
            else:
                self.set_anchor(node, is_anchor=True)

    def _push(self, node: PageNode) -> None:
        entry = (node.last_used, -node.depth, next(self._serial), node)
        heapq.heappush(self._by_age, entry)
        if len(self._by_age) > 4 * self._num_anchors + 64:
            self._by_age = [found for found in self._by_age if _is_current(found)]
            heapq.heapify(self._by_age)

    def pop_oldest_anchor(self) -> PageNode | None:
        """Need the anchor no more that was used longest ago, and return it.

        Of several on one path the deepest goes first.
        """
        while self._by_age:
            entry = heapq.heappop(self._by_age)
            if _is_current(entry):
                self.set_anchor(entry[-1], is_anchor=False)
                return entry[-1]
        return None


def _is_current(entry: tuple[int, int, int, PageNode]) -> bool:
    last_used, _, _, node = entry
    return node.is_anchor and node.last_used == last_used
