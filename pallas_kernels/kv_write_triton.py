"""Writes the entries of new tokens into a raw buffer, in place (Triton).

Entries come as words, so one kernel serves every storage type: all tokens of a step
and up to two parts of a layer, K and V, are one launch. Importing this module imports
Triton.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Int32, UInt32

from pallas_kernels.paged_rows import next_power_of_2
from pallas_kernels.triton_launch import launch


@dataclasses.dataclass(frozen=True, kw_only=True)
class KvWriteConfig:
    """Tuning of the write.

    Attributes:
        program_words: words that a program writes at a time, a power of two.
        num_warps: warps of a program.
    """

    program_words: int = 1024
    num_warps: int = 4

    def __post_init__(self):
        """Checks the ranges."""
        words = self.program_words
        if words < 16 or words & (words - 1):
            raise ValueError(f"program_words={words} must be a power of two from 16 up")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntryPlace:
    """Where the entries of one part of one layer lie, in words.

    The entry at place `i` of block `b` starts at
    `(b + block) * block_words + i * entry_words`.

    Attributes:
        block: the layer's constant, in blocks.
        block_words: words of a row block.
        entry_words: words of an entry, padding included, a multiple of 4.
    """

    block: int
    block_words: int
    entry_words: int


# Triton compiles the source: a checking wrapper would hide the module's names from it.
@triton.jit
@typing.no_type_check
def _write_part(
    blocks_ptr,
    offsets_ptr,
    values_ptr,
    pool_ptr,
    block,
    num_blocks,
    BLOCK_WORDS: tl.constexpr,
    ENTRY_WORDS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < NUM_TOKENS
    page = tl.load(blocks_ptr + token, mask=is_token, other=-1)
    offset = tl.load(offsets_ptr + token, mask=is_token, other=-1)
    # A place outside the buffer is a lane of padding: it writes nothing.
    is_token &= (page >= 0) & (page < num_blocks)
    is_token &= (offset >= 0) & (offset < PAGE_SIZE)
    to = (page.to(tl.int64) + block) * BLOCK_WORDS + offset * ENTRY_WORDS
    for first in tl.static_range(0, ENTRY_WORDS, WORDS):
        word = first + tl.arange(0, WORDS)
        is_word = is_token[:, None] & (word < ENTRY_WORDS)[None, :]
        # The values are loaded before it is known where they go.
        words = tl.load(
            values_ptr + token[:, None] * ENTRY_WORDS + word[None, :],
            mask=(token < NUM_TOKENS)[:, None] & (word < ENTRY_WORDS)[None, :],
        )
        tl.store(pool_ptr + to[:, None] + word[None, :], words, mask=is_word)


@triton.jit
@typing.no_type_check
def _write_kernel(
    blocks_ptr,
    offsets_ptr,
    places_ptr,
    first_ptr,
    second_ptr,
    _pool_in_ptr,
    pool_ptr,
    FIRST_BLOCK_WORDS: tl.constexpr,
    FIRST_ENTRY_WORDS: tl.constexpr,
    SECOND_BLOCK_WORDS: tl.constexpr,
    SECOND_ENTRY_WORDS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
    FIRST_WORDS: tl.constexpr,
    SECOND_WORDS: tl.constexpr,
):
    part = tl.program_id(1)
    block = tl.load(places_ptr + 2 * part)
    num_blocks = tl.load(places_ptr + 2 * part + 1)
    if part == 0:
        _write_part(
            blocks_ptr, offsets_ptr, first_ptr, pool_ptr, block, num_blocks,
            FIRST_BLOCK_WORDS, FIRST_ENTRY_WORDS, PAGE_SIZE, NUM_TOKENS, TOKENS,
            FIRST_WORDS,
        )  # fmt: skip
    else:
        _write_part(
            blocks_ptr, offsets_ptr, second_ptr, pool_ptr, block, num_blocks,
            SECOND_BLOCK_WORDS, SECOND_ENTRY_WORDS, PAGE_SIZE, NUM_TOKENS, TOKENS,
            SECOND_WORDS,
        )  # fmt: skip


def write_entries(
    buffer: UInt32[Array, "_ _"],
    blocks: Int32[Array, " tokens"],
    offsets: Int32[Array, " tokens"],
    values: tuple[UInt32[Array, "tokens _"], ...],
    places: tuple[EntryPlace, ...],
    *,
    page_size: int,
    config: KvWriteConfig | None = None,
) -> UInt32[Array, "_ _"]:
    """Writes one entry of each part for each token, in place.

    Args:
        buffer: the whole pool.
        blocks: kernel block id of each token's page; one outside the buffer, and its
            token writes nothing.
        offsets: places inside the pages, from 0 to `page_size - 1`; another one
            writes nothing.
        values: for each part, the words of the entries, padding included.
        places: for each of the one or two parts, where its entries lie.
        page_size: tokens per page.
        config: tuning.

    Returns:
        The buffer after the writes.

    Raises:
        ValueError: there are not one or two parts, or a part's words do not fit.
    """
    config = KvWriteConfig() if config is None else config
    if len(values) != len(places) or not 0 < len(places) < 3:
        raise ValueError(f"{len(values)} values and {len(places)} places: 1 or 2 each")
    for place, words in zip(places, values, strict=True):
        if words.shape[1] != place.entry_words or place.entry_words % 4:
            raise ValueError(
                f"values of {words.shape[1]} words do not fill entries of "
                f"{place.entry_words}, which must be a multiple of 4"
            )
    num_tokens = blocks.shape[0]
    if num_tokens == 0:
        return buffer
    first, second = places[0], places[-1]
    widths = [
        min(config.program_words, next_power_of_2(place.entry_words))
        for place in (first, second)
    ]
    # Short entries share a program, as soon as every multiprocessor has some.
    tokens = max(1, min(config.program_words // max(widths), num_tokens // 256))
    tokens = 1 << (tokens.bit_length() - 1)
    limits = [
        (place.block, buffer.size // place.block_words - place.block)
        for place in (first, second)
    ]
    (written,) = launch(
        _write_kernel,
        blocks,
        offsets,
        jnp.asarray(limits, jnp.int32),
        values[0],
        values[-1],
        buffer,
        outputs=[jax.ShapeDtypeStruct(buffer.shape, buffer.dtype)],
        grid=(-(-num_tokens // tokens), len(places)),
        aliases={5: 0},
        num_warps=config.num_warps,
        FIRST_BLOCK_WORDS=first.block_words,
        FIRST_ENTRY_WORDS=first.entry_words,
        SECOND_BLOCK_WORDS=second.block_words,
        SECOND_ENTRY_WORDS=second.entry_words,
        PAGE_SIZE=page_size,
        NUM_TOKENS=num_tokens,
        TOKENS=tokens,
        FIRST_WORDS=widths[0],
        SECOND_WORDS=widths[1],
    )
    return written
