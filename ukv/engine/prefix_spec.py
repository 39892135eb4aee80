"""What a cached prefix consists of, and where in it a request can go on."""

import dataclasses
import math
from collections.abc import Sequence

from ukv.errors import SpecError
from ukv.layout import PoolLayout
from ukv.ops.state_slots import CHECKPOINT_GRID


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowHalf:
    """The halves of a window in cached pages.

    Attributes:
      name: The window's sub-pool.
      size: Tokens that a token sees, itself included.
      owner: Which of ``PrefixSpec.owners`` has the ids.
    """

    name: str
    size: int
    owner: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixSpec:
    """Components of a prefix: pages, window halves and states.

    Attributes:
      page_size: Tokens of a page, the same for all owners.
      owners: Sub-pools that own ids and grow with tokens; a page has one id of each.
      windows: Window halves of these pages.
      states: Sub-pools of states; a checkpoint has one slot of each.
    """

    page_size: int
    owners: tuple[str, ...]
    windows: tuple[WindowHalf, ...] = ()
    states: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check that there are pages."""
        if not self.owners:
            raise SpecError(
                "no sub-pool grows with tokens, so there is no prefix to keep: set "
                "prefix_cache=False"
            )

    @classmethod
    def of(cls, layout: PoolLayout) -> "PrefixSpec":
        """Return the spec of a pool's layout.

        Raises:
          SpecError: Page sizes differ, or nothing grows with tokens; the message
            says what to do without.
        """
        owners = [sub for sub in layout.owners if sub.spec.grows]
        sizes = {sub.name: sub.page_size for sub in owners}
        if len(set(sizes.values())) > 1:
            raise SpecError(
                f"cached prefixes need one page size, got {sizes}: set "
                "prefix_cache=False, or give all sub-pools that grow the same"
            )
        places = {owner.index: place for place, owner in enumerate(owners)}
        return cls(
            page_size=owners[0].page_size if owners else 1,
            owners=tuple(sizes),
            windows=tuple(
                WindowHalf(name=sub.name, size=sub.spec.window, owner=places[sub.owner])
                for sub in layout.sub_pools
                if sub.spec.window is not None and not sub.owns_ids
            ),
            states=tuple(sub.name for sub in layout.owners if not sub.spec.grows),
        )

    @property
    def grid(self) -> int:
        """Tokens from one place where a prefix can end to the next.

        A checkpoint lies on a page's end and on the grid of the state ops.
        """
        if not self.states:
            return self.page_size
        return math.lcm(CHECKPOINT_GRID, self.page_size)

    @property
    def kept_tokens(self) -> int:
        """Tokens for which a row holds halves longer than its window sees them."""
        return self.grid if self.windows else 0

    def last_end(self, num_tokens: int, *, num_computed: int = 1) -> int:
        """Return where the longest usable prefix of a prompt could end.

        Example: 500 tokens on a grid of 64: 448. 512 tokens: 448 too, since the
        last token has to be computed.

        Args:
          num_tokens: Length of the prompt.
          num_computed: Tokens at its end that have to be computed.
        """
        return max(num_tokens - num_computed, 0) // self.grid * self.grid

    def tail_start(self, window: WindowHalf, num_pages: int) -> int:
        """Return the first page that a window sees from the end of a prefix.

        Example: window 20, page 16, 3 pages: token 48 sees tokens 29 to 48, so the
        tail starts with page 1.
        """
        first_token = num_pages * self.page_size - window.size + 1
        return max(first_token, 0) // self.page_size

    def kept_start(self, window: WindowHalf, context_len: int) -> int:
        """Return the first page whose half a row keeps, so that it can be cached.

        One grid step more than its own next token sees: the tail of ``last_end``.
        """
        first_token = context_len - window.size - self.kept_tokens + 1
        return max(first_token, 0) // self.page_size

    def chunk_ends(self, prompt_len: int, full_len: int) -> Sequence[int]:
        """Return where a prefill ends a chunk, inserts, and leaves its states if any.

        That is where it branches from what is cached, so that the next branch hits,
        and for states the end of the prompt. A prefix of pages alone can end anywhere.

        Args:
          prompt_len: Tokens of the prompt.
          full_len: Tokens whose pages are cached, whether usable or not.
        """
        ends = set()
        if self.states or self.windows:
            ends.add(min(full_len, prompt_len) // self.grid * self.grid)
        if self.states:
            ends.add(self.last_end(prompt_len))
        return sorted(ends - {0})
