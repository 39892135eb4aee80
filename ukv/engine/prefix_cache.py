"""The prefix cache: pages, window halves and states of tokens that were seen before.

It is plain Python over virtual ids. The cache is one holder of each of its pages, the
rows that use them are others; each method says what the device has to do. In the
life of a row:

    match      the longest prefix with all its components; changes nothing
    pin        before anything is allocated, so that eviction leaves it alone
    advance    the row's windows move on: it sees the first halves no more
    insert     what was computed so far is kept, say after a prefill
    finish     the same at the end; or release, if nothing more is to be kept

A lease pins only what its row holds itself, so whoever admits rows by what each of
them may hold knows that all else can be evicted. A cached state is never written: a
row that starts from it gets a copy.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from ukv.engine.prefix_eviction import Dropped, Fits, count_pages, drop_all, evict
from ukv.engine.prefix_lease import Insertion, Lease, Match
from ukv.engine.prefix_spec import PrefixSpec
from ukv.engine.radix_tree import Ids, PageNode, RadixTree


@dataclasses.dataclass(eq=False, kw_only=True)
class _Page:
    """A page of a path as it would be after an insertion."""

    node: PageNode | None
    ids: Ids
    halves: list[bool]
    state: Ids | None


class PrefixCache:
    """Prefixes of earlier requests.

    Attributes:
      spec: The components of a prefix.
      tree: All cached pages.
    """

    def __init__(self, spec: PrefixSpec) -> None:
        """Start empty."""
        self.spec = spec
        self.tree = RadixTree(spec)

    def match(self, tokens: Sequence[int], *, num_computed: int = 1) -> Match:
        """Return the longest usable prefix; changes nothing.

        Args:
          tokens: Of a prompt.
          num_computed: Tokens at its end that have to be computed whatever is
            cached: one for its logits, more if a draft needs them.
        """
        path = self.tree.path(tokens)
        most = max(len(tokens) - num_computed, 0) // self.spec.page_size
        usable = self.tree.usable_on(path[:most])
        depth = usable[-1].depth if usable else 0
        return Match(
            path=tuple(path[:depth]),
            hit_len=depth * self.spec.page_size,
            full_len=len(path) * self.spec.page_size,
        )

    def pin(self, match: Match) -> Lease:
        """Hold a match for a row; the device shares its pages with the row.

        A row that starts with nothing gets a lease too.

        Raises:
          ValueError: Something of the match was evicted since.
        """
        depth, path = len(match.path), match.path
        if any(node.parent is None for node in path):
            raise ValueError("the match is stale: pin it before anything is evicted")
        starts = [self.spec.tail_start(half, depth) for half in self.spec.windows]
        lease = Lease(path=[], half_starts=starts)
        self._extend(lease, path)
        if path and self.spec.states:
            lease.source = path[-1]
            path[-1].state_pins += 1
            self.tree.update(path[-1])
        self.tree.touch(path[-1:])
        return lease

    def _extend(self, lease: Lease, nodes: Sequence[PageNode]) -> None:
        """Pin more pages for a lease, with the halves that its row holds."""
        for node in nodes:
            node.pins += 1
            for window, start in enumerate(lease.half_starts):
                node.half_pins[window] += node.depth > start
            self.tree.update(node)
            lease.path.append(node)

    def finish_copy(self, lease: Lease) -> None:
        """Let go of the state that the row has its copy of."""
        node, lease.source = lease.source, None
        if node is not None:
            node.state_pins -= 1
            self.tree.update(node)

    def advance(self, lease: Lease, context_len: int) -> None:
        """Let go of the halves that a row keeps no more.

        Args:
          lease: Of the row.
          context_len: Tokens that it has in the pool now.
        """
        for window, half in enumerate(self.spec.windows):
            start = self.spec.kept_start(half, context_len)
            self._drop_half_pins(lease, window, start)

    def _drop_half_pins(self, lease: Lease, window: int, stop: int) -> None:
        start = lease.half_starts[window]
        for node in lease.path[start:stop]:
            node.half_pins[window] -= 1
            self.tree.update(node)
        lease.half_starts[window] = max(start, stop)

    def shared_pages(self, lease: Lease) -> dict[str, int]:
        """Return the pages by sub-pool that outlive a row that is released now."""
        return self._outliving(lease, [True] * len(lease.path))

    def _outliving(self, lease: Lease, is_shared: Sequence[bool]) -> dict[str, int]:
        pages = dict.fromkeys(self.spec.owners, sum(is_shared))
        for half, start in zip(self.spec.windows, lease.half_starts, strict=True):
            pages[half.name] = sum(is_shared[start:])
        return pages

    def insert(
        self,
        lease: Lease,
        tokens: Sequence[int],
        pages: Sequence[Ids],
        states: Mapping[int, Ids] | None = None,
    ) -> Insertion:
        """Keep what a row computed, up to the last place where a prefix can end.

        All or nothing: what a match could not use is not kept. The cache shares the
        row's pages, the row goes on with them. Where it has the same tokens in a page
        of its own, the row's page takes its place, if no row uses the old one and no
        half is lost; if not, no more pages are kept, but checkpoints after those there.

        Args:
          lease: Of the row, advanced to the tokens that it has in the pool.
          tokens: Tokens of the row in the pool, from the first.
          pages: Its page ids; at least one for each whole page of tokens.
          states: Checkpoints by number of tokens; the cache takes over the row's
            hold of them.

        Raises:
          ValueError: A checkpoint lies off the grid, or pages are missing.
        """
        states = dict(states or {})
        self._require(lease, tokens, pages, states)
        would_be = self._after_insertion(lease, tokens, pages, states)
        num_own = next(
            (
                column
                for column, page in enumerate(would_be)
                if page.ids != tuple(pages[column])
            ),
            len(would_be),
        )
        # A state belongs to the tokens before it, whoever computed their pages.
        others = [
            dataclasses.replace(page, ids=page.node.ids, halves=list(page.node.halves))
            for page in would_be[num_own:]
            if page.node is not None
        ]
        path, shares, dropped = self._keep(
            [*would_be[:num_own], *others], tokens, states
        )
        self._extend(lease, path[len(lease.path) : num_own])
        return Insertion(
            shares=shares,
            dropped=dropped,
            unused_states=list(states.values()),
            outlives=self.shared_pages(lease),
        )

    def finish(
        self,
        lease: Lease,
        tokens: Sequence[int],
        pages: Sequence[Ids],
        states: Mapping[int, Ids] | None = None,
    ) -> Insertion:
        """Keep what a row computed and release its lease.

        The row gives back its pages after what the insertion asks for. As ``insert``,
        but goes on beyond pages that the cache has already.
        """
        states = dict(states or {})
        self._require(lease, tokens, pages, states)
        would_be = self._after_insertion(lease, tokens, pages, states)
        path, shares, dropped = self._keep(would_be, tokens, states)
        is_shared = [
            node.ids == tuple(ids) for node, ids in zip(path, pages, strict=False)
        ]
        is_shared[: len(lease.path)] = [True] * len(lease.path)
        outlives = self._outliving(lease, is_shared)
        self.release(lease)
        return Insertion(
            shares=shares,
            dropped=dropped,
            unused_states=list(states.values()),
            outlives=outlives,
        )

    def _keep(
        self, would_be: list[_Page], tokens: Sequence[int], states: dict[int, Ids]
    ) -> tuple[list[PageNode], dict[str, list[int]], Dropped]:
        """Make a path what it would be, as far as a match can use it.

        Returns:
          The path, what to share, what was dropped; ``states`` keeps what is unused.
        """
        depths = set(
            self.tree.usable_depths(
                (page.halves for page in would_be),
                (page.state is not None for page in would_be),
            )
        )
        shares: dict[str, list[int]] = {}
        path, dropped, ends = [], Dropped(), []
        keys = self.tree.pages_of(tokens)
        for page, key in zip(would_be[: max(depths, default=0)], keys, strict=False):
            node = page.node
            if node is None:
                parent = path[-1] if path else self.tree.root
                node = self.tree.add(parent, key, page.ids)
                self._share(shares, page.ids)
            elif node.ids != page.ids:
                dropped.add_page(self.spec, node)
                self._share(shares, page.ids)
            path.append(node)
            node.ids, node.halves = page.ids, page.halves
            if node.state is None and page.state and len(path) in depths:
                node.state = states.pop(len(path) * self.spec.page_size)
                ends.append(node)
            self.tree.update(node)
        # The same prompt again ends before its last token, a longer one after it.
        last_page = self.spec.last_end(len(tokens)) // self.spec.page_size
        for end in (last_page, len(path)):
            ends += self.tree.usable_on(path[:end])[-1:]
        self.tree.touch(ends)
        return path, shares, dropped

    def _require(
        self,
        lease: Lease,
        tokens: Sequence[int],
        pages: Sequence[Ids],
        states: Mapping[int, Ids],
    ) -> None:
        if not lease.is_open:
            raise ValueError("the lease was released before")
        num_pages = len(tokens) // self.spec.page_size
        if len(pages) < num_pages:
            raise ValueError(
                f"{len(tokens)} tokens fill {num_pages} pages, "
                f"got {len(pages)} page ids"
            )
        for num_tokens in states:
            if num_tokens % self.spec.grid or not 0 < num_tokens <= len(tokens):
                raise ValueError(
                    f"a checkpoint after {num_tokens} tokens: it must lie on the grid "
                    f"of {self.spec.grid}, inside the {len(tokens)} tokens"
                )

    def _after_insertion(
        self,
        lease: Lease,
        tokens: Sequence[int],
        pages: Sequence[Ids],
        states: Mapping[int, Ids],
    ) -> list[_Page]:
        """Return the path of some tokens as it would be with a row's pages."""
        size, path = self.spec.page_size, self.tree.path(tokens)
        would_be = []
        for column in range(len(tokens) // size):
            own = [column >= start for start in lease.half_starts]
            ids, state = tuple(pages[column]), states.get((column + 1) * size)
            if column >= len(path):
                page = _Page(node=None, ids=ids, halves=own, state=state)
            else:
                node = path[column]
                has_all = all(
                    mine or not its for mine, its in zip(own, node.halves, strict=True)
                )
                # Rows that use the old page would have to be told.
                is_replaced = has_all and not node.pins
                page = _Page(
                    node=node,
                    ids=ids if is_replaced else node.ids,
                    halves=own if is_replaced else list(node.halves),
                    state=node.state or state,
                )
            would_be.append(page)
        return would_be

    def _share(self, shares: dict[str, list[int]], ids: Ids) -> None:
        for name, page in zip(self.spec.owners, ids, strict=True):
            shares.setdefault(name, []).append(page)

    def release(self, lease: Lease) -> None:
        """Let go of all that a row holds; the cache keeps it until it is evicted.

        Raises:
          ValueError: It was released before.
        """
        if not lease.is_open:
            raise ValueError("the lease was released before")
        self.finish_copy(lease)
        for window in range(len(self.spec.windows)):
            self._drop_half_pins(lease, window, len(lease.path))
        for node in lease.path:
            node.pins -= 1
            self.tree.update(node)
        lease.path.clear()
        lease.is_open = False

    def evict(self, fits: Fits) -> Dropped | None:
        """Drop as little as makes an allocation fit; None if nothing would.

        Args:
          fits: Whether the allocation fits once these pages by sub-pool are free as
            well, say ``mirror.release(pages).can_allocate(needs)``.
        """
        return evict(self.tree, fits)

    def clear(self) -> Dropped:
        """Drop all that no row holds."""
        return drop_all(self.tree)

    def held_pages(self) -> dict[str, int]:
        """Return the pages by sub-pool that the cache holds."""
        return count_pages(self.tree, self.tree.num_held)

    def evictable_pages(self) -> dict[str, int]:
        """Return those of them that no row holds."""
        return count_pages(self.tree, self.tree.num_evictable)
