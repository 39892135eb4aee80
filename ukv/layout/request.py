"""How much one request holds, from its lengths alone."""

import dataclasses

from ukv.errors import SpecError
from ukv.spec import SubPoolSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestShape:
    """Lengths of a request, for capacity questions.

    Attributes:
      num_tokens: Prompt and output together.
      chunk_len: Most tokens that one step adds; a window sub-pool holds the window
        and the chunk at once. 1 means decode only; a prompt that is prefilled whole
        has its own length.
    """

    num_tokens: int
    chunk_len: int = 1

    def __post_init__(self) -> None:
        """Check that both lengths are positive."""
        if self.num_tokens < 1 or self.chunk_len < 1:
            raise SpecError(
                f"num_tokens={self.num_tokens} and chunk_len={self.chunk_len} must "
                "be 1 or more"
            )


def spanned_pages(num_tokens: int, page_size: int) -> int:
    """Return the most pages that ``num_tokens`` tokens in a row can touch.

    Example: 17 tokens in pages of 16 touch at most 3, when they begin with the last
    token of a page.
    """
    return (num_tokens + page_size - 2) // page_size + 1


def pages_of_spec(spec: SubPoolSpec, shape: RequestShape) -> int:
    """Return the most pages of a sub-pool that such a request holds at once.

    A window of W tokens keeps the W - 1 tokens before a chunk visible to it.
    """
    if not spec.grows:
        return 1
    pages = -(-shape.num_tokens // spec.page_size)
    if spec.window is None:
        return pages
    held = min(spec.window - 1 + shape.chunk_len, shape.num_tokens)
    return min(pages, spanned_pages(held, spec.page_size))
