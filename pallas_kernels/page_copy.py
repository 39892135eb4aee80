"""Copies pages of a pool buffer within that buffer, in place (Pallas Mosaic GPU).

Two kernels behind `copy_pages`:

* bulk: one warpgroup per CTA issues asynchronous bulk copies, global memory -> a
  ring of shared-memory chunks -> global memory, several in each direction in
  flight. The data never passes through registers.
* vector: 16-byte loads and stores through registers. It serves pools whose page and
  base share so small a divisor that row numbers would not fit int32.

Both are persistent: CTA `c` of `num_ctas` takes the pieces c, c + num_ctas, ... of
the list that puts the chunks of all moved pages one after the other.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int32, UInt32

Kernel = Literal["bulk", "vector"]

WORD_BYTES = 4
UNIT_WORDS = 4  # 16 bytes: the granule of bulk copies and of the widest vector access
_INT32_LIMIT = 1 << 31
_MAX_ROW_WORDS = 32
_MAX_RING_BYTES = 224 * 1024
_MAX_STAGES = 32
_WARPGROUP_UNITS = 128  # one unit per thread
_SPLIT_BITS = 16
_MAX_SPLIT_UNITS = 1 << 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageCopyConfig:
    """Tuning of the page copy.

    Attributes:
        chunk_bytes: largest piece of a page that one bulk copy moves.
        ring_bytes: shared memory of a CTA's ring of chunks. A third of the chunks
            may be on their way out while the others are on their way in.
        num_ctas: persistent CTAs. Two per multiprocessor need half the ring.
        kernel: which kernel to use; None means bulk where it can address the buffer.
        vector_units: 16-byte units that a thread of the vector kernel moves at once.
        vector_ctas_factor: CTAs of the vector kernel per `num_ctas`.
    """

    chunk_bytes: int = 32 * 1024
    ring_bytes: int = 208 * 1024
    num_ctas: int = 132
    kernel: Kernel | None = None
    vector_units: int = 8
    vector_ctas_factor: int = 8

    def __post_init__(self):
        """Checks the ranges."""
        for name in ("num_ctas", "vector_units", "vector_ctas_factor"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.chunk_bytes < _MAX_ROW_WORDS * WORD_BYTES:
            raise ValueError(f"{self.chunk_bytes=} must hold a row of 128 bytes")
        if self.ring_bytes > _MAX_RING_BYTES:
            raise ValueError(f"{self.ring_bytes=} must be at most {_MAX_RING_BYTES}")
        if self.ring_bytes < 3 * self.chunk_bytes:
            raise ValueError(f"{self.ring_bytes=} must hold 3 of {self.chunk_bytes=}")


def copy_pages(
    buffer: UInt32[Array, "rows words"],
    src: Int32[Array, " max_moves"],
    dst: Int32[Array, " max_moves"],
    num_moves: Int32[Array, ""] | Int32[Array, "1"],
    *,
    page_words: int,
    base_words: int,
    config: PageCopyConfig | None = None,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> UInt32[Array, "rows words"]:
    """Copies page `src[i]` to page `dst[i]` for every `i < num_moves`, in place.

    Page `p` is the `page_words` words from word `base_words + p * page_words` of the
    flattened buffer. Under a `jit` that donates the buffer the result is the same
    memory, and the call needs no temporary memory.

    The caller guarantees what would need a device read to check: ids are in range,
    destinations are distinct, and no destination is also a source. Entries at or
    past `num_moves` are not looked at.

    Args:
        buffer: the whole pool, of any size that row numbers of int32 can address.
        src: page ids to read.
        dst: page ids to write.
        num_moves: entries of `src` and `dst` to use; 0 copies nothing.
        page_words: words of a page, a multiple of 4 (16 bytes).
        base_words: word where page 0 starts, a multiple of 4.
        config: tuning; the default suits a Hopper card of 132 multiprocessors.
        interpret: simulate the kernel on the CPU, for tests; parameters of the
            simulator, or True for its defaults.

    Returns:
        The buffer after the copies.

    Raises:
        ValueError: the sizes do not describe pages inside the buffer.
        NotImplementedError: no kernel addresses this buffer.
    """
    config = PageCopyConfig() if config is None else config
    if src.shape != dst.shape:
        raise ValueError(f"{src.shape=} and {dst.shape=} must be equal")
    if src.size == 0:
        return buffer
    kernel = select_kernel(
        buffer.size, page_words=page_words, base_words=base_words, kernel=config.kernel
    )
    copy = {"bulk": _copy_bulk, "vector": _copy_vector}[kernel]
    return copy(
        buffer,
        src,
        dst,
        num_moves.reshape(1),
        page_words=page_words,
        base_words=base_words,
        config=config,
        interpret=interpret,
    )


def select_kernel(
    total_words: int, *, page_words: int, base_words: int, kernel: Kernel | None = None
) -> Kernel:
    """Says which kernel `copy_pages` uses for a buffer, or why there is none.

    The bulk kernel addresses rows of `g` words, where `g` divides the page, the base
    and the buffer, and needs fewer than 2**31 of them: with `g` of 16 bytes a buffer
    below 34 GB, of 64 bytes one below 137 GB, of 128 bytes any.

    Args:
        total_words: words of the buffer.
        page_words: words of a page.
        base_words: word where page 0 starts.
        kernel: the kernel to use, if not the best one.

    Returns:
        The name of the kernel.

    Raises:
        ValueError: the sizes do not describe pages inside the buffer.
        NotImplementedError: no kernel, or not the wanted one, addresses this buffer.
    """
    for name, words in (
        ("page_words", page_words),
        ("base_words", base_words),
        ("total_words", total_words),
    ):
        if words < 0 or words % UNIT_WORDS:
            raise ValueError(f"{name}={words} must be a multiple of {UNIT_WORDS}")
    if page_words == 0 or base_words + page_words > total_words:
        raise ValueError(f"{page_words=} at {base_words=} is not in {total_words=}")
    row_words = _row_words(total_words, page_words, base_words)
    if kernel != "vector":
        if total_words // row_words < _INT32_LIMIT:
            return "bulk"
        if kernel == "bulk":
            raise NotImplementedError(
                f"{page_words=}, {base_words=} and {total_words=} share only rows of "
                f"{row_words} words, too many for int32; the vector kernel can"
            )
    if page_words < _WARPGROUP_UNITS * UNIT_WORDS:
        raise NotImplementedError(
            f"{page_words=}: the vector kernel needs {_WARPGROUP_UNITS * UNIT_WORDS}"
        )
    if total_words // (_split_units(total_words) * UNIT_WORDS) >= _INT32_LIMIT:
        raise NotImplementedError(
            f"{total_words=} has too many rows for int32: make it a multiple of "
            f"{_MAX_SPLIT_UNITS * UNIT_WORDS}"
        )
    return "vector"


def _row_words(total_words: int, page_words: int, base_words: int) -> int:
    return math.gcd(total_words, page_words, base_words, _MAX_ROW_WORDS)


def _split_units(total_words: int) -> int:
    return math.gcd(total_words // UNIT_WORDS, _MAX_SPLIT_UNITS)


def _even_chunks(size: int, largest: int) -> tuple[int, int]:
    """Cuts `size` into equal chunks of at most `largest`: (count, chunk).

    A page of 10 rows and chunks of at most 4: 3 chunks of 4 rows at rows 0, 4 and 6.
    The last chunk starts early enough to end with the page, so rows 6 and 7 are
    copied twice, to the same values.
    """
    count = -(-size // largest)
    return count, -(-size // count)


def locate_unit(page, first, page_units, base_units, row_units):
    """Row and unit within the row where unit `first` of a page lies, in int32.

    The unit's number, `base_units + page * page_units + first`, may not fit. With
    rows of 100 units and pages of 250, page 70,000 = 65,536 + 4,464 is unit
    17,500,000: 65,536 pages are 163,840 rows, 4,464 pages are 2 * 4,464 rows and
    4,464 * 50 units, in all row 175,000, unit 0.

    Args:
        page: page id.
        first: unit of the page.
        page_units: units in a page.
        base_units: unit where page 0 starts.
        row_units: units in a row, at most 2**12.

    Returns:
        The row, and the unit within it.
    """
    high = lax.shift_right_logical(page, _SPLIT_BITS)
    low = lax.bitwise_and(page, (1 << _SPLIT_BITS) - 1)
    row, unit = divmod(base_units, row_units)
    for count, units in (
        (high, page_units << _SPLIT_BITS),
        (low, page_units),
        (first, 1),
    ):
        rows, rest = divmod(units, row_units)
        if rows >= _INT32_LIMIT:  # 2**16 such pages fit no buffer: `high` is 0
            continue
        unit = unit + count * rest
        row = row + count * rows + lax.div(unit, row_units)
        unit = lax.rem(unit, row_units)
    return row, unit


def _mosaic_call(
    body, view, src, dst, num_moves, *, num_ctas, name, interpret, scratch
):
    ref = jax.new_ref(view)
    plgpu.kernel(
        body,
        out_type=(),
        grid=(num_ctas,),
        grid_names=("cta",),
        kernel_name=name,
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(),
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret,
    )(src, dst, num_moves, ref)
    return jax.freeze(ref)


def _copy_bulk(
    buffer, src, dst, num_moves, *, page_words, base_words, config, interpret
):
    row_words = _row_words(buffer.size, page_words, base_words)
    page_rows, base_row = page_words // row_words, base_words // row_words
    row_bytes = row_words * WORD_BYTES
    chunks, chunk_rows = _even_chunks(
        page_rows, max(1, config.chunk_bytes // row_bytes)
    )
    stages = min(config.ring_bytes // (chunk_rows * row_bytes), _MAX_STAGES)
    stores_in_flight = stages // 3
    loads_ahead = stages - stores_in_flight
    num_ctas = config.num_ctas

    def body(src_ref, dst_ref, num_moves_ref, pool_ref, ring_ref, loaded_ref):
        cta = lax.axis_index("cta")
        pieces = num_moves_ref[0] * chunks
        steps = lax.div(lax.max(pieces - cta + (num_ctas - 1), 0), num_ctas)

        def piece_rows(page_ids_ref, step):
            piece = cta + step * num_ctas
            first = lax.min(lax.rem(piece, chunks) * chunk_rows, page_rows - chunk_rows)
            page = page_ids_ref[lax.div(piece, chunks)]
            return pool_ref.at[pl.ds(base_row + page * page_rows + first, chunk_rows)]

        def load(step):
            stage = lax.rem(step, stages)
            plgpu.copy_gmem_to_smem(
                piece_rows(src_ref, step),
                ring_ref.at[stage],
                loaded_ref.at[stage],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

        def store(step):
            stage = lax.rem(step, stages)
            plgpu.barrier_wait(loaded_ref.at[stage])
            plgpu.copy_smem_to_gmem(ring_ref.at[stage], piece_rows(dst_ref, step))

        def steady(step, _):
            store(step)
            # The chunk that the next load overwrites was stored `stores_in_flight`
            # steps ago; older stores are all that this waits for.
            plgpu.wait_smem_to_gmem(stores_in_flight, wait_read_only=True)
            pl.when(step + loads_ahead < steps)(lambda: load(step + loads_ahead))

        lax.fori_loop(0, lax.min(steps, loads_ahead), lambda i, _: load(i), None)
        lax.fori_loop(0, steps, steady, None)
        plgpu.wait_smem_to_gmem(0)

    view = _mosaic_call(
        body,
        buffer.reshape(-1, row_words),
        src,
        dst,
        num_moves,
        num_ctas=num_ctas,
        name="page_copy_bulk",
        interpret=interpret,
        scratch=(
            plgpu.SMEM((stages, chunk_rows, row_words), jnp.uint32),
            plgpu.Barrier(num_barriers=stages),
        ),
    )
    return view.reshape(buffer.shape)


def _copy_vector(
    buffer, src, dst, num_moves, *, page_words, base_words, config, interpret
):
    page_units, base_units = page_words // UNIT_WORDS, base_words // UNIT_WORDS
    row_units = _split_units(buffer.size)
    chunk_units = _WARPGROUP_UNITS * min(
        config.vector_units, page_units // _WARPGROUP_UNITS
    )
    chunks = -(-page_units // chunk_units)
    num_ctas = config.num_ctas * config.vector_ctas_factor
    num_rows = buffer.size // (row_units * UNIT_WORDS)
    window_rows = min(-(-chunk_units // row_units) + 1, num_rows)
    layout = plgpu.Layout.WG_STRIDED((chunk_units, UNIT_WORDS), vec_size=UNIT_WORDS)

    def body(src_ref, dst_ref, num_moves_ref, pool_ref):
        cta = lax.axis_index("cta")
        pieces = num_moves_ref[0] * chunks
        steps = lax.div(lax.max(pieces - cta + (num_ctas - 1), 0), num_ctas)

        def piece_units(page_ids_ref, step):
            piece = cta + step * num_ctas
            first = lax.min(
                lax.rem(piece, chunks) * chunk_units, page_units - chunk_units
            )
            page = page_ids_ref[lax.div(piece, chunks)]
            row, unit = locate_unit(page, first, page_units, base_units, row_units)
            if interpret:  # the simulator cannot reshape, and its pools are small
                return pool_ref.at[pl.ds(row * row_units + unit, chunk_units)]
            top = lax.min(row, num_rows - window_rows)
            window = pool_ref.at[pl.ds(top, window_rows)]
            window = window.reshape(window_rows * row_units, UNIT_WORDS)
            return window.at[pl.ds((row - top) * row_units + unit, chunk_units)]

        def step(i, _):
            values = plgpu.load(piece_units(src_ref, i), layout=layout, optimized=False)
            piece_units(dst_ref, i)[...] = values

        lax.fori_loop(0, steps, step, None)

    view_shape = (-1,) if interpret else (num_rows, row_units)
    view = _mosaic_call(
        body,
        buffer.reshape(*view_shape, UNIT_WORDS),
        src,
        dst,
        num_moves,
        num_ctas=num_ctas,
        name="page_copy_vector",
        interpret=interpret,
        scratch=(),
    )
    return view.reshape(buffer.shape)
