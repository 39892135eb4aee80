"""Who runs, who waits, who loses its pages: pure host code, exact byte counts.

A sequence is waiting, running, leaving (its row is released by the next plan) or
gone. Sequences are served by rank: priority, then arrival. Three rules follow:

    admit     the first that waits, if its known tokens and next step fit beside those
              of everyone who runs; nobody overtakes it
    serve     by rank; who finds no pages takes them from the prefix cache, then from
              the last in rank
    retract   give pages and row back and wait again, by the old rank; tokens drawn so
              far are kept and fed again

The first in rank can take everyone's pages, and a request that does not fit alone is
refused at once, so somebody always advances.
"""

import bisect
import functools as ft
from collections.abc import Iterable

from ukv.engine.config import EngineConfig
from ukv.engine.holdings import Holdings
from ukv.engine.ledger import Advance, Ledger, Pages, add_pages
from ukv.engine.plan import Admission, Chunk, Room, StepPlan
from ukv.engine.prefix_lease import Match
from ukv.engine.request import FinishReason, Request
from ukv.engine.sequence import Sequence
from ukv.errors import PoolStateError


class Scheduler:
    """The sequences of an engine.

    Attributes:
      holdings: What they hold, and the prefix cache.
      waiting: Those without a row, by rank.
      running: Those with a row, by rank.
      num_retractions: How often a sequence lost its pages.
    """

    def __init__(self, config: EngineConfig, ledger: Ledger) -> None:
        """Start with nobody; there is a prefix cache if the ledger has a spec of it."""
        self.holdings = Holdings(ledger)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_retractions = 0
        self._config = config
        self._max_decode_rows = config.max_rows
        self._max_step_tokens = config.max_step_tokens
        self._leaving: list[Sequence] = []
        self._to_keep: list[Sequence] = []
        self._free_rows = list(range(config.max_rows - 1, -1, -1))
        self._num_arrived = 0

    @property
    def ledger(self) -> Ledger:
        """The bytes that they hold."""
        return self.holdings.ledger

    @property
    def with_rows(self) -> list[Sequence]:
        """Those who hold pages."""
        return [*self.running, *self._leaving]

    @property
    def is_idle(self) -> bool:
        """Whether nobody runs or waits, and no pages are to be given back."""
        return not (self.waiting or self.running or self._leaving)

    def add(self, request: Request, seed: int) -> Sequence:
        """Queue a request.

        Raises:
          BudgetError: It could not run even if it were alone.
        """
        sequence = Sequence(request=request, arrival=self._num_arrived, seed=seed)
        pages = self.ledger.most_held(
            request.max_kv_len,
            max(self._config.max_step_tokens, self._config.decode_steps),
        )
        self.ledger.require_fits(request.request_id, pages)
        self._num_arrived += 1
        bisect.insort(self.waiting, sequence, key=lambda found: found.rank)
        return sequence

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence; its pages go back with the next plan."""
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason = reason
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self.running.remove(sequence)
            self._leaving.append(sequence)

    def use_smaller(self, num_tokens: int, *, is_decode: bool) -> bool:
        """Plan no more steps as large as a bucket; False if there is no smaller one."""
        config = self._config
        sizes = config.decode_sizes if is_decode else config.prefill_sizes
        smaller = [size for size in sizes if size < num_tokens]
        if smaller and is_decode:
            self._max_decode_rows = smaller[-1]
        elif smaller:
            self._max_step_tokens = smaller[-1]
        return bool(smaller)

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """Forget all rows and pages: these sequences wait, with the tokens they have.

        What they had in flight is lost, and is drawn again. What was cached is lost.
        """
        self.holdings = self.holdings.emptied()
        self.running.clear()
        self._leaving.clear()
        self._to_keep.clear()
        self._free_rows = list(range(self._config.max_rows - 1, -1, -1))
        self.waiting = sorted(sequences, key=lambda found: found.rank)
        for sequence in self.waiting:
            sequence.lose_row()
            sequence.num_sampled = len(sequence.generated)

    def plan(self) -> StepPlan | None:
        """Decide the next step and count it as done; None if there is nothing to do.

        Raises:
          PoolStateError: Somebody runs and nobody can be served.
        """
        for sequence in self._to_keep:
            self.holdings.keep(sequence)
        self._to_keep.clear()
        self._release(self._leaving)
        self._leaving.clear()
        admitted = self._admit()
        chunks = self._serve(admitted)
        if not chunks and self.running:
            first = self.running[0]
            raise PoolStateError(
                f"request {first.request.request_id!r} is first in rank and finds no "
                f"pages: {self.ledger.mirror.counters} in a pool of "
                f"{self.ledger.layout.pool_bytes:,} bytes"
            )
        actions = self.holdings.take_actions()
        if not chunks and not actions:
            return None
        is_decode = all(chunk.is_decoding for chunk in chunks)
        states = add_pages(*(self.ledger.state_pages for _ in admitted))
        room = self.ledger.spend(states, self._passes(chunks, is_decode))
        if room is not None:
            actions = (*actions, Room(num_pages=room))
        for chunk in chunks:
            self._advance(chunk)
        return StepPlan(
            actions=actions,
            admissions=tuple(admitted),
            chunks=tuple(chunks),
            is_decode=is_decode,
        )

    def _release(self, sequences: list[Sequence]) -> None:
        """Take the rows and pages of some sequences."""
        self._free_rows += [found.row for found in sequences if found.row is not None]
        self.holdings.release(sequences)

    def _most_held(self, sequence: Sequence) -> Pages:
        """Return the most pages it holds until all known tokens and one step are in."""
        num_tokens = min(
            sequence.target_len + self._config.decode_steps,
            sequence.request.max_kv_len,
        )
        chunk_len = max(
            min(sequence.num_left, self._max_step_tokens),
            self._config.decode_steps,
        )
        return self.ledger.most_held(num_tokens, chunk_len)

    def _admit(self) -> list[Admission]:
        """Give rows to those who wait, in order, as long as they fit."""
        admitted: list[Admission] = []
        if not (self.waiting and self._free_rows):
            return admitted
        held = add_pages(*(self._most_held(sequence) for sequence in self.running))
        budget = self._max_step_tokens
        budget -= sum(sequence.num_left for sequence in self.running)
        while self.waiting and self._free_rows and budget > 0:
            first = self.waiting[0]
            # A token in flight must be known before it can be fed again.
            if not first.is_settled:
                break
            fits = ft.partial(self._fits_beside, first, held)
            admission = self.holdings.begin(first, self._free_rows[-1], fits)
            if admission is None:
                break
            self.waiting.pop(0)
            self._free_rows.pop()
            bisect.insort(self.running, first, key=lambda found: found.rank)
            admitted.append(admission)
            held = add_pages(held, self._most_held(first))
            budget -= first.num_left
        return admitted

    def _fits_beside(
        self, sequence: Sequence, held: Pages, match: Match | None
    ) -> bool:
        """Return whether a sequence fits beside those who run and may hold ``held``."""
        together = add_pages(held, self._most_held(sequence))
        return self.holdings.fits(self.running, together, match)

    def _serve(self, admitted: list[Admission]) -> list[Chunk]:
        """Give rows their new tokens; if pages are short, by rank."""
        chosen = self._choose()
        growths = [self.ledger.growth(s.context_len, length) for s, length in chosen]
        states = add_pages(*(self.ledger.state_pages for _ in admitted))
        if self.holdings.can_serve(add_pages(states, *growths)):
            return [_chunk(sequence, length) for sequence, length in chosen]
        # Who was admitted just now fits beside all others.
        assert not admitted
        needs: Pages = {}
        chunks = []
        for (sequence, query_len), growth in zip(chosen, growths, strict=True):
            if sequence.row is None:
                continue  # it was retracted for one before it
            while not self.holdings.can_serve(add_pages(needs, growth)):
                last = self._last_in_rank(sequence)
                if last is None:
                    break
                self._retract(last)
            else:
                needs = add_pages(needs, growth)
                chunks.append(_chunk(sequence, query_len))
        return chunks

    def _choose(self) -> list[tuple[Sequence, int]]:
        """Choose who gets how many tokens, as if there were pages for all."""
        suspects = [sequence for sequence in self.running if sequence.is_suspect]
        served = suspects[:1] or self.running
        num_decoding = sum(sequence.has_last_token for sequence in served)
        is_decode = num_decoding == len(served)
        passes = self._config.decode_steps if is_decode else 1
        # Decoding rows go first, but not to the end of every prompt.
        budget = max(self._max_step_tokens - num_decoding, 1)
        most = self._max_decode_rows if is_decode else self._max_step_tokens
        chosen = []
        for sequence in served:
            if sequence.has_last_token:
                query_len, size = min(passes, sequence.num_unsampled), 1
            else:
                stop = next(
                    (end for end in sequence.chunk_ends if end > sequence.context_len),
                    sequence.target_len,
                )
                query_len = size = min(stop - sequence.context_len, budget)
                budget -= query_len
            if 0 < size <= most:
                chosen.append((sequence, query_len))
                most -= size
        return chosen

    def _last_in_rank(self, sequence: Sequence) -> Sequence | None:
        """Return who gives way to a sequence; None if nobody does."""
        last = self.running[-1]
        if last is not sequence:
            return last
        # A suspect runs alone, so that others wait for it whatever their rank.
        if sequence.is_suspect and len(self.running) > 1:
            return self.running[-2]
        return None

    def _retract(self, sequence: Sequence) -> None:
        """Take a sequence's pages and row; it waits again, by its old rank."""
        self.running.remove(sequence)
        self._release([sequence])
        sequence.num_retractions += 1
        self.num_retractions += 1
        bisect.insort(self.waiting, sequence, key=lambda found: found.rank)

    def _passes(self, chunks: list[Chunk], is_decode: bool) -> list[list[Advance]]:
        """Return every row in each pass on the device."""
        if not is_decode:
            return [[chunk.advance(0, chunk.query_len) for chunk in chunks]]
        return [
            [chunk.advance(done, 1) for chunk in chunks if done < chunk.query_len]
            for done in range(self._config.decode_steps)
        ]

    def _advance(self, chunk: Chunk) -> None:
        """Count a chunk's tokens; who needs no other step leaves."""
        sequence = chunk.sequence
        sequence.context_len += chunk.query_len
        self.holdings.advance(sequence)
        if not chunk.is_decoding:
            sequence.num_prefilled = sequence.context_len
            if chunk.is_sampled or sequence.context_len in sequence.chunk_ends:
                self._to_keep.append(sequence)
        if chunk.is_sampled:
            sequence.num_sampled += chunk.query_len if chunk.is_decoding else 1
            sequence.has_last_token = True
        if sequence.num_unsampled == 0:
            self.running.remove(sequence)
            self._leaving.append(sequence)


def _chunk(sequence: Sequence, query_len: int) -> Chunk:
    assert sequence.row is not None
    is_decoding = sequence.has_last_token
    return Chunk(
        sequence=sequence,
        row=sequence.row,
        context_len=sequence.context_len,
        query_len=query_len,
        is_decoding=is_decoding,
        is_sampled=is_decoding or query_len == sequence.num_left,
    )
