"""What an engine is built for: sizes that fix its buffers and its programs."""

import dataclasses
import itertools as it

from ukv.errors import SpecError
from ukv.spec.part import require_positive, storage_dtype


def _doubling(first: int, last: int) -> tuple[int, ...]:
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of an engine. Each bucket is one compiled program.

    Attributes:
      page_size: Tokens per page.
      dtype: Storage dtype of K, V and latents.
      is_unified: Whether all memory shares one buffer; False is the static baseline.
      static_pages: Pages of each sub-pool of a static pool, as ``(name, pages)``;
        None splits the bytes for requests of ``max_kv_len`` tokens.
      max_rows: Requests that run at once.
      max_kv_len: Most tokens of a request, prompt and output together.
      max_step_tokens: Token budget of a step: decoding rows first, then prompts.
      decode_buckets: Batch sizes of decode steps, ascending, the last ``max_rows``;
        None doubles up from 1.
      prefill_buckets: Token counts of steps with prompts, ascending, the last
        ``max_step_tokens``; None doubles up from 64.
      decode_steps: Decode steps in one dispatch.
      prefix_cache: Whether what requests computed is kept and used again by those
        that begin with the same tokens.
      max_stop_tokens: Stop tokens that a request can have.
      scores_prompts: Whether requests may ask for the scores of their prompt; steps
        with prompts then hold the logits of all their tokens.
      seed: Where the seeds of requests without one come from.
      fill_word: What each word of the pool holds at first; tests pass NaN.
    """

    page_size: int = 64
    dtype: str = "bfloat16"
    is_unified: bool = True
    static_pages: tuple[tuple[str, int], ...] | None = None
    max_rows: int = 64
    max_kv_len: int = 8192
    max_step_tokens: int = 2048
    decode_buckets: tuple[int, ...] | None = None
    prefill_buckets: tuple[int, ...] | None = None
    decode_steps: int = 1
    prefix_cache: bool = True
    max_stop_tokens: int = 4
    scores_prompts: bool = False
    seed: int = 0
    fill_word: int = 0

    def __post_init__(self) -> None:
        """Check the sizes and fill in the buckets."""
        names = ("page_size", "max_rows", "max_kv_len", "max_step_tokens")
        sizes = {name: getattr(self, name) for name in (*names, "decode_steps")}
        require_positive("EngineConfig", **sizes)
        most = self.max_stop_tokens
        if not isinstance(most, int) or most < 0:
            raise SpecError(f"max_stop_tokens={most!r} must be an integer of 0 or more")
        if self.max_step_tokens <= self.max_rows:
            raise SpecError(
                f"max_step_tokens={self.max_step_tokens} must be more than "
                f"max_rows={self.max_rows}, so that prompts go on beside decoding rows"
            )
        if self.is_unified and self.static_pages is not None:
            raise SpecError("static_pages are for is_unified=False")
        storage_dtype(self.dtype, where="EngineConfig")
        self._fill("decode_buckets", 1, self.max_rows)
        self._fill("prefill_buckets", 64, self.max_step_tokens)
        # One token per row means a decode step, which is another program.
        if self.prefill_sizes[0] < 2:
            raise SpecError(f"prefill_buckets={self.prefill_buckets} must be 2 or more")

    def _fill(self, name: str, first: int, last: int) -> None:
        sizes = getattr(self, name)
        sizes = _doubling(first, last) if sizes is None else sizes
        if (
            not isinstance(sizes, tuple | list)
            or not all(type(size) is int for size in sizes)
            or not all(a < b for a, b in it.pairwise((0, *sizes)))
            or last not in sizes[-1:]
        ):
            raise SpecError(
                f"{name}={sizes} must be positive integers that ascend and end with "
                f"{last}"
            )
        sizes = tuple(sizes)
        object.__setattr__(self, name, sizes)

    @property
    def decode_sizes(self) -> tuple[int, ...]:
        """Batch sizes of decode steps."""
        return self.decode_buckets or ()

    @property
    def prefill_sizes(self) -> tuple[int, ...]:
        """Token counts of steps with prompts."""
        return self.prefill_buckets or ()

    @property
    def max_pages(self) -> int:
        """Pages of a row of a page table."""
        return -(-self.max_kv_len // self.page_size)
