"""Copies pages of a pool buffer to other pages of the same buffer, in place (Triton).

The same contract as `pallas_kernels.page_copy`, for cards without Mosaic GPU's bulk
copies. Importing this module imports Triton.
"""

import dataclasses
import typing

import jax
import triton
import triton.language as tl
from jaxtyping import Array, Int32, UInt32

from pallas_kernels.triton_launch import launch

_UNIT_WORDS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageCopyTritonConfig:
    """Tuning of the page copy.

    Attributes:
        chunk_words: words that one program copies at a time, a power of two.
        num_programs: persistent programs.
        num_warps: warps per program.
    """

    chunk_words: int = 4096
    num_programs: int = 132 * 8
    num_warps: int = 4

    def __post_init__(self):
        """Checks the ranges."""
        words = self.chunk_words
        if words < _UNIT_WORDS or words & (words - 1):
            raise ValueError(f"chunk_words={words} must be a power of two, at least 4")
        if self.num_programs < 1:
            raise ValueError(f"{self.num_programs=} must be at least 1")


# Triton compiles the source: a checking wrapper would hide the module's names from it.
@triton.jit
@typing.no_type_check
def _page_copy_kernel(
    src_ptr,
    dst_ptr,
    num_moves_ptr,
    _pool_in_ptr,
    pool_ptr,
    BASE_UNITS: tl.constexpr,
    PAGE_UNITS: tl.constexpr,
    CHUNK_WORDS: tl.constexpr,
    CHUNKS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
):
    pieces = tl.load(num_moves_ptr) * CHUNKS
    for piece in range(tl.program_id(0), pieces, NUM_PROGRAMS):
        move = piece // CHUNKS
        # Both directions go through the output, which is the input's memory.
        # Addresses are units times 4, in int64: the compiler sees 16-byte alignment.
        src_unit = tl.load(src_ptr + move).to(tl.int64) * PAGE_UNITS + BASE_UNITS
        dst_unit = tl.load(dst_ptr + move).to(tl.int64) * PAGE_UNITS + BASE_UNITS
        word = (piece % CHUNKS) * CHUNK_WORDS + tl.arange(0, CHUNK_WORDS)
        inside = word < PAGE_UNITS * 4
        words = tl.load(pool_ptr + src_unit * 4 + word, mask=inside)
        tl.store(pool_ptr + dst_unit * 4 + word, words, mask=inside)


def copy_pages(
    buffer: UInt32[Array, "rows words"],
    src: Int32[Array, " max_moves"],
    dst: Int32[Array, " max_moves"],
    num_moves: Int32[Array, ""] | Int32[Array, "1"],
    *,
    page_words: int,
    base_words: int,
    config: PageCopyTritonConfig | None = None,
) -> UInt32[Array, "rows words"]:
    """Copies page `src[i]` to page `dst[i]` for every `i < num_moves`, in place.

    See `pallas_kernels.page_copy.copy_pages` for the contract.

    Args:
        buffer: the whole pool.
        src: page ids to read.
        dst: page ids to write.
        num_moves: entries of `src` and `dst` to use; 0 copies nothing.
        page_words: words of a page, a multiple of 4 (16 bytes).
        base_words: word where page 0 starts, a multiple of 4.
        config: tuning; the default suits a Hopper card of 132 multiprocessors.

    Returns:
        The buffer after the copies.

    Raises:
        ValueError: the sizes do not describe pages inside the buffer.
    """
    config = PageCopyTritonConfig() if config is None else config
    if src.shape != dst.shape:
        raise ValueError(f"{src.shape=} and {dst.shape=} must be equal")
    for name, words in (("page_words", page_words), ("base_words", base_words)):
        if words < 0 or words % _UNIT_WORDS:
            raise ValueError(f"{name}={words} must be a multiple of {_UNIT_WORDS}")
    if page_words == 0 or base_words + page_words > buffer.size:
        raise ValueError(
            f"{page_words=} at {base_words=} does not fit {buffer.size} words"
        )
    if src.size == 0:
        return buffer
    (copied,) = launch(
        _page_copy_kernel,
        src,
        dst,
        num_moves.reshape(1),
        buffer,
        outputs=[jax.ShapeDtypeStruct(buffer.shape, buffer.dtype)],
        aliases={3: 0},
        grid=(config.num_programs,),
        num_warps=config.num_warps,
        BASE_UNITS=base_words // _UNIT_WORDS,
        PAGE_UNITS=page_words // _UNIT_WORDS,
        CHUNK_WORDS=config.chunk_words,
        CHUNKS=-(-page_words // config.chunk_words),
        NUM_PROGRAMS=config.num_programs,
    )
    return copied
