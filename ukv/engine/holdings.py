"""Who holds what: the rows and the prefix cache.

Every change of a hold is counted in the ledger and becomes an action for the device,
in order. What the cache holds has a *name*, a number that is chosen here; only the
device knows the virtual id behind it. So nothing has to be read back: what a row
computed can be matched as soon as the step that writes it was dispatched.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Iterable, Mapping

from ukv.engine.ledger import Ledger, Pages, add_pages
from ukv.engine.plan import (
    Action,
    Admission,
    Checkpoint,
    Keep,
    Release,
    Reuse,
    Room,
)
from ukv.engine.prefix_cache import PrefixCache
from ukv.engine.prefix_eviction import Dropped, drop_subtree
from ukv.engine.prefix_lease import Insertion, Lease, Match
from ukv.engine.radix_tree import Ids
from ukv.engine.request import FinishReason
from ukv.engine.sequence import Sequence


class _Names:
    """Numbers from 1 on; one that was given back is taken before a new one.

    Whoever has one holds a page, so there are never more than there are virtual ids.
    """

    def __init__(self) -> None:
        """Start with none taken."""
        self._free: list[int] = []
        self._num_taken = 0

    def take(self) -> int:
        """Return a name that nothing has."""
        if self._free:
            return self._free.pop()
        self._num_taken += 1
        return self._num_taken

    def give(self, names: Iterable[int]) -> None:
        """Take names back."""
        self._free += names


class Holdings:
    """Holds of rows and of the cache.

    Attributes:
      ledger: Counts them.
      cache: What is kept; None without a prefix cache.
      num_looked_up: Tokens of rows that began.
      num_hit: Those of them that were found in the cache.
    """

    def __init__(self, ledger: Ledger) -> None:
        """Start with an empty pool."""
        spec = ledger.prefix_spec
        self.ledger = ledger
        self.cache = None if spec is None else PrefixCache(spec)
        self.num_looked_up = self.num_hit = 0
        self._actions: list[Action] = []
        self._copying: list[Lease] = []
        self._page_names, self._state_names = _Names(), _Names()

    def emptied(self) -> "Holdings":
        """Return those of an empty pool, which go on counting."""
        empty = Holdings(Ledger(self.ledger.layout, self.ledger.prefix_spec))
        empty.num_looked_up, empty.num_hit = self.num_looked_up, self.num_hit
        return empty

    def take_actions(self) -> tuple[Action, ...]:
        """Return what has to be done since this was asked last."""
        actions = tuple(self._actions)
        self._actions.clear()
        if self.cache is not None:
            for lease in self._copying:
                self.cache.finish_copy(lease)
        self._copying.clear()
        return actions

    def can_serve(self, needs: Mapping[str, int]) -> bool:
        """Return whether pages can be allocated; evicts what they take the place of.

        Args:
          needs: By owner.
        """
        if self.ledger.can_serve(needs):
            return True
        if self.cache is None:
            return False
        dropped = self.cache.evict(ft.partial(self.ledger.would_serve, needs))
        if dropped is None:
            return False
        self._drop(dropped)
        return True

    def fits(
        self, running: Iterable[Sequence], most_held: Pages, match: Match | None
    ) -> bool:
        """Return whether one more row fits beside those that run.

        Args:
          running: Those; all that neither they nor the new row hold can be evicted.
          most_held: Pages by sub-pool, the sum of what each of them may hold alone.
          match: What the new row begins with; None without a prefix cache.
        """
        if self.cache is None or match is None:
            return self.ledger.fits(most_held)
        spec = self.cache.spec
        held, evictable = self.cache.held_pages(), self.cache.evictable_pages()
        leases = [found.lease for found in running if found.lease is not None]
        # Rows hold cached pages together. Not so halves: each row lets go of them
        # and takes its own. A state is held until its copy is made.
        twice = sum(len(lease.path) for lease in leases)
        twice += sum(node.pins > 0 for node in match.path)
        common = {name: held[name] - evictable[name] - twice for name in spec.owners}
        is_copied = bool(match.path) and not match.path[-1].state_pins
        copied = {
            name: held[name] - evictable[name] + is_copied for name in spec.states
        }
        return self.ledger.fits(add_pages(most_held, common, copied))

    def begin(
        self, sequence: Sequence, row: int, fits: Callable[[Match | None], bool]
    ) -> Admission | None:
        """Start a row with the longest cached prefix; None if it does not fit.

        Args:
          sequence: Who gets the row.
          row: The row.
          fits: Whether it fits with a match, whose tokens it has by then.
        """
        if self.cache is None:
            if not fits(None):
                return None
            sequence.row = row
            return Admission(sequence=sequence, row=row)
        for match in self._matches(self.cache, sequence):
            sequence.take_hit(match.hit_len)
            if fits(match):
                lease = sequence.lease = self.cache.pin(match)
                ends = self.cache.spec.chunk_ends(sequence.target_len, match.full_len)
                sequence.chunk_ends = tuple(end for end in ends if end > match.hit_len)
                self.num_looked_up += sequence.target_len
                self.num_hit += match.hit_len
                return self._start(sequence, row, lease)
            # Who waits uses its prefix too: others are evicted before it.
            self.cache.tree.touch(match.path[-1:])
            sequence.lose_row()
        return None

    def _matches(self, cache: PrefixCache, sequence: Sequence) -> list[Match]:
        """Return with what a row could start, the best first."""
        match = cache.match(
            sequence.tokens(0, sequence.target_len),
            num_computed=sequence.num_uncached,
        )
        matches = [match]
        if match.path and cache.spec.states:
            # While a state is copied there are two of it: there may be room for one.
            matches.append(dataclasses.replace(match, path=(), hit_len=0))
        return matches

    def _start(self, sequence: Sequence, row: int, lease: Lease) -> Admission:
        """Share the pages of a lease with its row, without the halves it never sees."""
        assert self.cache is not None
        sequence.row = row
        self._actions += [
            Reuse(row=row, column=column, name=node.ids[0])
            for column, node in enumerate(lease.path)
        ]
        unseen = Dropped()
        for window, half in enumerate(self.cache.spec.windows):
            unseen.halves[half.name] = [
                node.ids[half.owner]
                for node in lease.path[: lease.half_starts[window]]
                if node.halves[window]
            ]
        if any(unseen.halves.values()):
            self._actions.append(unseen)
        state = lease.state
        if state is not None:
            self._copying.append(lease)
        return Admission(sequence=sequence, row=row, state=state[0] if state else 0)

    def keep(self, sequence: Sequence) -> None:
        """Let the cache hold what a row computed, and its states where it stopped."""
        lease = sequence.lease
        if self.cache is None or lease is None:
            return
        tokens = sequence.tokens(0, sequence.num_computed)
        states = {}
        if sequence.context_len in sequence.chunk_ends and self.cache.spec.states:
            name = self._checkpoint(sequence, tokens)
            if name:
                states[len(tokens)] = (name,) * len(self.cache.spec.states)
        pages, columns = self._name_pages(lease, len(tokens))
        done = self.cache.insert(lease, tokens, pages, states)
        self._carry_out(sequence, done, columns)

    def _checkpoint(self, sequence: Sequence, tokens: list[int]) -> int:
        """Copy a row's states; return the copy's name, 0 if there is none to make."""
        assert self.cache is not None
        assert sequence.row is not None
        path = self.cache.tree.path(tokens)
        depth = len(tokens) // self.cache.spec.page_size
        is_there = len(path) == depth and path[-1].state is not None
        needs = self.ledger.state_pages
        if is_there or not self.can_serve(needs):
            return 0
        room = self.ledger.make_room(needs)
        if room is not None:
            self._actions.append(Room(num_pages=room))
        self.ledger.alloc(needs)
        name = self._state_names.take()
        self._actions.append(Checkpoint(row=sequence.row, name=name))
        return name

    def advance(self, sequence: Sequence) -> None:
        """Let go of the cached halves that a row's new tokens leave behind."""
        if self.cache is not None and sequence.lease is not None:
            self.cache.advance(sequence.lease, sequence.context_len)

    def release(self, sequences: Iterable[Sequence]) -> None:
        """Take rows from their sequences; the cache keeps what they computed.

        Nothing of a sequence that failed is kept, nor what begins as it did.
        """
        releases: list[Action] = []
        for sequence in sequences:
            assert sequence.row is not None
            outlives = self._finish(sequence)
            self.ledger.release(sequence.context_len, sequence.hit_len, outlives)
            releases.append(Release(row=sequence.row, context_len=sequence.context_len))
            sequence.lose_row()
        # One after the other, so that they share a program: nothing is allocated yet.
        self._actions += releases

    def _finish(self, sequence: Sequence) -> Mapping[str, int]:
        """Close a row's lease; return how many of its pages outlive it."""
        lease = sequence.lease
        if self.cache is None or lease is None:
            return {}
        if sequence.finish_reason is FinishReason.ERROR:
            outlives = self.cache.shared_pages(lease)
            first = lease.path[0] if lease.path else None
            self.cache.release(lease)
            if first is not None:
                self._drop(drop_subtree(self.cache.tree, first))
            return outlives
        tokens = sequence.tokens(0, sequence.num_computed)
        pages, columns = self._name_pages(lease, len(tokens))
        done = self.cache.finish(lease, tokens, pages)
        self._carry_out(sequence, done, columns)
        return done.outlives

    def _name_pages(
        self, lease: Lease, num_tokens: int
    ) -> tuple[list[Ids], dict[int, int]]:
        """Return names for the whole pages of a row, and the column of each new one."""
        assert self.cache is not None
        spec, num_cached = self.cache.spec, len(lease.path)
        num_pages = max(num_tokens // spec.page_size, num_cached)
        columns = {
            self._page_names.take(): column for column in range(num_cached, num_pages)
        }
        return lease.pages + [(name,) * len(spec.owners) for name in columns], columns

    def _carry_out(
        self, sequence: Sequence, done: Insertion, columns: dict[int, int]
    ) -> None:
        """Do what an insertion asks for; names that it did not use are free again."""
        assert self.cache is not None
        assert sequence.row is not None
        spec = self.cache.spec
        for name in done.shares.get(spec.owners[0], ()):
            self._actions.append(
                Keep(row=sequence.row, column=columns.pop(name), name=name)
            )
        self._page_names.give(columns)
        self._drop(done.dropped)
        unused = Dropped()
        for slots in done.unused_states:
            for name, slot in zip(spec.states, slots, strict=True):
                unused.add_slot(name, slot)
        self._drop(unused)

    def _drop(self, dropped: Dropped) -> None:
        """Count what the cache let go of as dead; its names are free again."""
        if not dropped.num_pages:
            return
        assert self.cache is not None
        spec = self.cache.spec
        self.ledger.drop(dropped.num_pages)
        self._actions.append(dropped)
        self._page_names.give(dropped.pages.get(spec.owners[0], ()))
        if spec.states:
            self._state_names.give(dropped.states.get(spec.states[0], ()))

    def clear(self) -> None:
        """Let the cache hold nothing that no row holds."""
        if self.cache is not None:
            self._drop(self.cache.clear())

    def evictable_pages(self) -> Pages:
        """Return the pages by sub-pool that only the cache holds."""
        return {} if self.cache is None else self.cache.evictable_pages()
