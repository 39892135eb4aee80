"""A device that is played on the host: it does what plans say, and knows what it reads.

Every page remembers the tokens that it was computed from, the first of the row
included, and every state too. So a row that begins with another's prefix is noticed
at once, and so is a page that is read after it was given back.
"""

import random

from tests.prefix_rows import HolderPool
from ukv.engine import FinishReason, Request, SamplingParams
from ukv.engine.plan import Checkpoint, Keep, Release, Reuse, Room
from ukv.engine.prefix_eviction import Dropped
from ukv.engine.prefix_spec import PrefixSpec

STOP = 0


class PlayedDevice:
    """Rows, names and holders as the device has them."""

    def __init__(self, layout, vocab_size):
        self.layout, self.vocab_size = layout, vocab_size
        self.spec = PrefixSpec.of(layout)
        limits = {
            sub.name: sub.num_pages - (not layout.is_unified and sub.owns_ids)
            for sub in layout.sub_pools
        }
        self.pool = HolderPool(self.spec, limits)
        self.written = {}  # by page ids: the tokens that the page was computed from
        self.state_after = {}  # the same by a state's slots
        self.pages, self.states = {}, {}  # by name
        self.rows = {}

    def run(self, plan):
        """Carry out a plan; return the tokens that each of its chunks drew."""
        for action in plan.actions:
            self._act(action)
        for admission in plan.admissions:
            self._admit(admission)
        drawn = [[] for _ in plan.chunks]
        num_passes = max((c.query_len for c in plan.chunks), default=0)
        for done in range(num_passes if plan.is_decode else 1):
            for chunk, tokens in zip(plan.chunks, drawn, strict=True):
                if done < chunk.query_len:
                    tokens += self._advance(chunk, done)
        for name, limit in self.pool.limits.items():
            assert len(self.pool.holders[name]) <= limit
        return drawn

    def _act(self, action):
        spec, pool = self.spec, self.pool
        match action:
            case Keep(row=row, column=column, name=name):
                assert name not in self.pages
                self.pages[name] = self.rows[row].pages[column]
                self._share(self.pages[name])
            case Reuse(row=row, column=column, name=name):
                found = self.rows.setdefault(row, Row(len(spec.windows)))
                assert len(found.pages) == column
                found.pages.append(self.pages[name])
                self._share(self.pages[name])
            case Checkpoint(row=row, name=name):
                assert name not in self.states
                self.states[name] = pool.new_state()
                self.state_after[self.states[name]] = self.state_after[
                    self.rows[row].state
                ]
            case Dropped():
                self._drop(action)
            case Release(row=row, context_len=context_len):
                self._release(self.rows.pop(row), context_len)
            case Room():
                assert self.layout.is_unified

    def _share(self, ids):
        for name, page in zip(self.spec.owners, ids, strict=True):
            self.pool.share(name, page)

    def _drop(self, dropped):
        """Drop names: each is an id of its own there."""
        spec, pool = self.spec, self.pool
        for name in dropped.states.get(spec.states[0] if spec.states else "", ()):
            pool.free_state(self.states.pop(name))
        for half in spec.windows:
            for name in dropped.halves.get(half.name, ()):
                pool.free_window(half.name, self.pages[name][half.owner])
        for name in dropped.pages.get(spec.owners[0], ()):
            for owner, page in zip(spec.owners, self.pages.pop(name), strict=True):
                pool.free_page(owner, page)

    def _release(self, row, context_len):
        spec, pool = self.spec, self.pool
        assert row.context_len == context_len
        for window, half in enumerate(spec.windows):
            for ids in row.pages[row.half_starts[window] :]:
                pool.free_window(half.name, ids[half.owner])
        for ids in row.pages:
            for name, page in zip(spec.owners, ids, strict=True):
                pool.free_full(name, page)
        pool.free_state(row.state)

    def _admit(self, admission):
        spec, sequence = self.spec, admission.sequence
        row = self.rows.setdefault(admission.row, Row(len(spec.windows)))
        known = tuple(sequence.tokens(0, sequence.hit_len))
        for column, ids in enumerate(row.pages):
            assert self.written[ids] == known[: (column + 1) * spec.page_size]
        assert len(row.pages) * spec.page_size == sequence.hit_len < sequence.target_len
        row.tokens, row.context_len = list(known), sequence.hit_len
        row.half_starts = [
            spec.tail_start(half, len(row.pages)) for half in spec.windows
        ]
        row.state = self.pool.new_state()
        if admission.state:
            assert self.state_after[self.states[admission.state]] == known
        else:
            assert not (spec.states and known)
        self.state_after[row.state] = known

    def _advance(self, chunk, done):
        row, sequence = self.rows[chunk.row], chunk.sequence
        assert row.context_len == chunk.context_len + done
        if chunk.is_decoding:
            # A row that stopped gets its pages, and writes nothing.
            fed = [] if row.is_stopped else [row.last_token]
            self._compute(row, fed, row.context_len + 1)
        else:
            end = chunk.context_len + chunk.query_len
            self._compute(row, sequence.tokens(chunk.context_len, end), end)
        return [self._draw(row)] if chunk.is_sampled else []

    def _compute(self, row, tokens, context_len):
        spec, size = self.spec, self.spec.page_size
        row.pages += [
            self.pool.new_page()
            for _ in range(-(-context_len // size) - len(row.pages))
        ]
        if tokens:
            assert not spec.states or self.state_after[row.state] == tuple(row.tokens)
            for window, half in enumerate(spec.windows):
                first_seen = max(len(row.tokens) - half.size + 1, 0) // size
                assert row.half_starts[window] <= first_seen
                for ids in row.pages[first_seen:]:
                    assert ids[half.owner] in self.pool.holders[half.name]
        start = len(row.tokens)
        row.tokens += tokens
        for column in range(start // size, -(-len(row.tokens) // size)):
            self.written[row.pages[column]] = tuple(row.tokens[: (column + 1) * size])
        self.state_after[row.state] = tuple(row.tokens)
        row.context_len = context_len
        for window, half in enumerate(spec.windows):
            start = max(row.half_starts[window], spec.kept_start(half, context_len))
            for ids in row.pages[row.half_starts[window] : start]:
                self.pool.free_window(half.name, ids[half.owner])
            row.half_starts[window] = start

    def _draw(self, row):
        """Draw what a greedy model would: it depends on all tokens before."""
        if not row.is_stopped:
            drawn = random.Random(repr(row.tokens)).randrange(self.vocab_size)
            row.last_token, row.is_stopped = drawn, drawn == STOP
        return row.last_token


class Row:
    """A row of the device."""

    def __init__(self, num_windows):
        self.pages, self.tokens = [], []
        self.half_starts = [0] * num_windows
        self.context_len, self.state = 0, ()
        self.last_token, self.is_stopped = None, False


class PlayedEngine:
    """A scheduler over a played device; results come one step behind."""

    def __init__(self, scheduler, *, vocab_size):
        self.scheduler = scheduler
        self.device = PlayedDevice(scheduler.ledger.layout, vocab_size)
        self.num_steps, self.flying = 0, []
        self.ended = []

    def add(self, name, prompt, num_new, priority=0):
        request = Request(
            request_id=str(name),
            prompt=tuple(prompt),
            params=SamplingParams(max_new_tokens=num_new),
            priority=priority,
        )
        return self.scheduler.add(request, 0)

    def step(self):
        plan = self.scheduler.plan()
        drawn = [] if plan is None else self.device.run(plan)
        self.check()
        for chunk, tokens in self.flying:
            self._read(chunk.sequence, tokens)
        self.flying = [] if plan is None else list(zip(plan.chunks, drawn, strict=True))
        self.num_steps += 1
        return plan

    def _read(self, sequence, tokens):
        for token in tokens:
            if sequence.finish_reason is not None:
                return
            sequence.generated.append(token)
            most = sequence.request.params.max_new_tokens
            if token == STOP:
                self._finish(sequence, FinishReason.STOP)
            elif len(sequence.generated) == most:
                self._finish(sequence, FinishReason.LENGTH)

    def _finish(self, sequence, reason):
        self.scheduler.finish(sequence, reason)
        self.ended.append(sequence.request.request_id)

    def run(self, limit=3000):
        while self.flying or not self.scheduler.is_idle:
            self.step()
            assert self.num_steps < limit, "no progress"

    def check(self):
        """Compare what the host counts with what the device holds."""
        mirror = self.scheduler.ledger.mirror
        for name, held in self.device.pool.holders.items():
            assert mirror.live(name) == len(held), name
        cache = self.scheduler.holdings.cache
        if cache is not None:
            nodes = list(cache.tree.nodes())
            assert {node.ids[0] for node in nodes} == set(self.device.pages)
            states = {node.state[0] for node in nodes if node.state}
            assert states == set(self.device.states)
            for node in nodes:
                ids = self.device.pages[node.ids[0]]
                for half, is_there in zip(cache.spec.windows, node.halves, strict=True):
                    held = self.device.pool.holders[half.name]
                    assert is_there <= (ids[half.owner] in held)

    def close(self):
        """End; check that the cache can give all back."""
        self.run()
        holdings = self.scheduler.holdings
        assert holdings.ledger.mirror.bytes_in_use() == sum(
            count * holdings.ledger.layout.sub_pool(name).page_bytes
            for name, count in holdings.evictable_pages().items()
        )
        holdings.clear()
        for action in holdings.take_actions():
            self.device._act(action)
        self.check()
        assert holdings.ledger.mirror.bytes_in_use() == 0
        assert not self.device.rows
