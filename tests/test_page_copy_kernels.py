"""Page copy kernels: against NumPy in the simulator, and on a card at full size."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import page_copy, page_copy_triton
from pallas_kernels.page_copy import PageCopyConfig

WORDS = 64
BEYOND = 1 << 20  # a page id that no test buffer has

# Small rings and few CTAs: every CTA goes around its ring, and some have no work.
SMALL = functools.partial(
    PageCopyConfig,
    chunk_bytes=256,
    ring_bytes=1024,
    num_ctas=3,
    vector_units=1,
    vector_ctas_factor=1,
)
# page_words, base_words: a page of whole chunks; chunks that overlap at the page's
# end; sizes that are multiples of 16 bytes and of nothing more.
SIZES = {"even": (1280, 128), "overlap": (1312, 64), "odd": (1300, 20)}


def random_buffer(page_words: int, base_words: int, num_pages: int) -> np.ndarray:
    rng = np.random.default_rng(page_words + base_words)
    total = base_words + page_words * num_pages + 12
    shape = (-(-total // WORDS), WORDS)
    return rng.integers(0, 1 << 32, shape, dtype=np.uint32)


def expected_copy(buffer, src, dst, num_moves, page_words, base_words) -> np.ndarray:
    flat = buffer.reshape(-1).copy()
    for source, target in zip(src[:num_moves], dst[:num_moves], strict=True):
        start, to = base_words + source * page_words, base_words + target * page_words
        flat[to : to + page_words] = flat[start : start + page_words]
    return flat.reshape(buffer.shape)


def draw_moves(num_pages: int, num_moves: int, max_moves: int):
    order = np.random.default_rng(num_moves).permutation(num_pages)
    src = np.full(max_moves, BEYOND, np.int32)
    dst = np.full(max_moves, BEYOND + 1, np.int32)
    src[:num_moves] = order[:num_moves]
    dst[:num_moves] = order[num_moves : 2 * num_moves]
    return src, dst


@functools.partial(
    jax.jit, static_argnames=("page_words", "base_words", "config", "interpret")
)
def simulate(
    buffer, src, dst, num_moves, *, page_words, base_words, config, interpret=True
):
    return page_copy.copy_pages(
        buffer,
        src,
        dst,
        num_moves,
        page_words=page_words,
        base_words=base_words,
        config=config,
        interpret=interpret,
    )


@pytest.mark.parametrize("kernel", ["bulk", "vector"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_moves", [0, 1, 4, 6])
def test_copies_the_pages_and_nothing_else(kernel, size, num_moves):
    page_words, base_words = SIZES[size]
    buffer = random_buffer(page_words, base_words, num_pages=13)
    src, dst = draw_moves(13, num_moves, max_moves=6)
    result = simulate(
        buffer,
        src,
        dst,
        jnp.int32(num_moves),
        page_words=page_words,
        base_words=base_words,
        config=SMALL(kernel=kernel),
    )
    expected = expected_copy(buffer, src, dst, num_moves, page_words, base_words)
    np.testing.assert_array_equal(np.asarray(result), expected)


def test_no_chunk_is_loaded_before_its_last_store_has_read_it(capfd):
    # Chunks that overlap at a page's end are written twice, with the same words, which
    # the simulator calls a race: this page has none.
    page_words, base_words = SIZES["even"]
    buffer = random_buffer(page_words, base_words, num_pages=13)
    src, dst = draw_moves(13, 6, max_moves=6)
    result = simulate(
        buffer,
        src,
        dst,
        jnp.int32(6),
        page_words=page_words,
        base_words=base_words,
        config=SMALL(),
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    expected = expected_copy(buffer, src, dst, 6, page_words, base_words)
    np.testing.assert_array_equal(np.asarray(result), expected)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("page_words", [4, 20, 64])
def test_pages_smaller_than_a_chunk(page_words):
    buffer = random_buffer(page_words, 4, num_pages=40)
    src, dst = draw_moves(40, 20, max_moves=20)
    result = simulate(
        buffer,
        src,
        dst,
        jnp.array([20], jnp.int32),
        page_words=page_words,
        base_words=4,
        config=SMALL(),
    )
    expected = expected_copy(buffer, src, dst, 20, page_words, 4)
    np.testing.assert_array_equal(np.asarray(result), expected)


def test_no_room_for_moves_is_no_move():
    buffer = jnp.zeros((2, WORDS), jnp.uint32)
    none = jnp.zeros((0,), jnp.int32)
    sizes = {"page_words": 16, "base_words": 0}
    assert page_copy.copy_pages(buffer, none, none, jnp.int32(0), **sizes) is buffer


@pytest.mark.parametrize("kernel", ["bulk", "vector"])
@pytest.mark.parametrize("fault", ["count", "swapped", "base", "page"])
def test_a_wrong_copy_is_seen(kernel, fault):
    page_words, base_words = SIZES["even"]
    buffer = random_buffer(page_words, base_words, num_pages=13)
    src, dst = draw_moves(13, 4, max_moves=6)
    expected = expected_copy(buffer, src, dst, 4, page_words, base_words)
    count = 3 if fault == "count" else 4
    if fault == "swapped":
        src, dst = dst, src
    result = simulate(
        buffer,
        src,
        dst,
        jnp.int32(count),
        page_words=page_words - 4 * (fault == "page"),
        base_words=base_words + 4 * (fault == "base"),
        config=SMALL(kernel=kernel),
    )
    assert not np.array_equal(np.asarray(result), expected)


@pytest.mark.parametrize("row_units", [1, 100, 4096])
@pytest.mark.parametrize("page_units", [128, 4609, 2_713_600])
def test_units_beyond_int32_are_located(row_units, page_units):
    base_units = 5 + (row_units << 20)
    last_row_units = ((1 << 31) - 1) * row_units
    last_page = min((last_row_units - base_units) // page_units, 1 << 31) - 1
    for page in (0, 1, last_page // 3, last_page):
        for first in (0, 1, page_units // 2, page_units - 1):
            row, unit = page_copy.locate_unit(
                jnp.int32(page), jnp.int32(first), page_units, base_units, row_units
            )
            wanted = divmod(base_units + page * page_units + first, row_units)
            assert (int(row), int(unit)) == wanted


def test_the_kernel_follows_from_the_sizes():
    gib = 1 << 28  # words
    select = page_copy.select_kernel
    assert select(128 * gib, page_words=18_432, base_words=288) == "bulk"
    assert select(128 * gib, page_words=18_436, base_words=0) == "vector"
    assert select(31 * gib, page_words=18_436, base_words=0) == "bulk"
    sizes = {"page_words": 18_432, "base_words": 0}
    assert select(gib, **sizes, kernel="vector") == "vector"
    with pytest.raises(NotImplementedError, match="share only rows of 4 words"):
        select(128 * gib, page_words=18_436, base_words=0, kernel="bulk")
    with pytest.raises(NotImplementedError, match="page_words=508: the vector kernel"):
        select(128 * gib, page_words=508, base_words=0)
    with pytest.raises(NotImplementedError, match="too many rows for int32"):
        select(128 * gib + 4, page_words=18_436, base_words=0)


@pytest.mark.parametrize("module", [page_copy, page_copy_triton])
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"page_words": 6, "base_words": 0}, "page_words=6 must be a multiple of 4"),
        ({"page_words": 8, "base_words": 2}, "base_words=2 must be a multiple of 4"),
        ({"page_words": 0, "base_words": 0}, "page_words=0 at base_words=0"),
        ({"page_words": 64, "base_words": 128}, "page_words=64 at base_words=128"),
    ],
)
def test_sizes_that_describe_no_page_are_refused(module, sizes, message):
    buffer = jnp.zeros((2, WORDS), jnp.uint32)
    moves = jnp.zeros((3,), jnp.int32)
    with pytest.raises(ValueError, match=message):
        module.copy_pages(buffer, moves, moves, jnp.int32(0), **sizes)


@pytest.mark.parametrize("module", [page_copy, page_copy_triton])
def test_a_move_has_a_source_and_a_destination(module):
    buffer = jnp.zeros((2, WORDS), jnp.uint32)
    src, dst = jnp.zeros((3,), jnp.int32), jnp.zeros((2,), jnp.int32)
    with pytest.raises(Exception, match=r"src.shape=\(3,\)|max_moves"):
        module.copy_pages(buffer, src, dst, jnp.int32(0), page_words=8, base_words=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_ctas": 0}, "num_ctas=0 must be at least 1"),
        ({"chunk_bytes": 64}, "chunk_bytes=64 must hold a row"),
        ({"ring_bytes": 1 << 20}, "ring_bytes=1048576 must be at most"),
        ({"ring_bytes": 65_536}, "ring_bytes=65536 must hold 3"),
    ],
)
def test_configs_out_of_range_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        PageCopyConfig(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"chunk_words": 96}, "chunk_words=96 must be a power of two"),
        ({"num_programs": 0}, "num_programs=0 must be at least 1"),
    ],
)
def test_triton_configs_out_of_range_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        page_copy_triton.PageCopyTritonConfig(**values)


# On a card. The buffer counts its own words, so that the word at flat address `a` is
# `a` modulo 2**32, and every page differs from every other within 16 GiB of it in
# every word.
ON_CARD = {
    "bulk": functools.partial(
        page_copy.copy_pages, config=PageCopyConfig(kernel="bulk")
    ),
    "vector": functools.partial(
        page_copy.copy_pages, config=PageCopyConfig(kernel="vector")
    ),
    "triton": page_copy_triton.copy_pages,
}
CARD_WORDS = 1152
CARD_SIZES = {
    "mla": (18_432, 0),
    "mha": (129_024, 288),
    "state": (10_854_400, 1_024),
    "odd": (18_436, 20),
    "small": (1_024, 4),
}


@functools.partial(jax.jit, static_argnames="num_rows")
def counting_buffer(num_rows):
    row = jax.lax.broadcasted_iota(jnp.uint32, (num_rows, CARD_WORDS), 0)
    word = jax.lax.broadcasted_iota(jnp.uint32, (num_rows, CARD_WORDS), 1)
    return row * jnp.uint32(CARD_WORDS) + word


@jax.jit
def count_changed(buffer):
    changed = buffer != counting_buffer(buffer.shape[0])
    return changed.sum(dtype=jnp.uint32)


@jax.jit
def read_words(buffer, rows):
    return buffer[rows]


def page_on_card(buffer, page: int, page_words: int, base_words: int) -> np.ndarray:
    """The words of one page, by whole rows: a row number fits int32."""
    start = base_words + page * page_words
    first = start // CARD_WORDS
    last = -(-(start + page_words) // CARD_WORDS)
    rows = read_words(buffer, jnp.arange(first, last, dtype=jnp.int32))
    skip = start - first * CARD_WORDS
    return np.asarray(rows).reshape(-1)[skip : skip + page_words]


def check_on_card(copy, page_words, base_words, total_words, num_moves=24):
    needed = total_words * 4 + (1 << 30)
    if jax.devices()[0].memory_stats()["bytes_limit"] < needed:
        pytest.skip(f"needs {needed >> 30} GiB of GPU memory")
    buffer = counting_buffer(total_words // CARD_WORDS)
    num_pages = (buffer.size - base_words) // page_words
    num_moves = min(num_moves, num_pages // 2)
    # Half of the moves go from the last pages to the first ones, half back.
    near = np.arange(num_moves, dtype=np.int32)
    far = np.int32(num_pages - 1) - near
    src, dst = np.where(near % 2, near, far), np.where(near % 2, far, near)
    padding = np.full(5, num_pages, np.int32)
    step = jax.jit(
        functools.partial(copy, page_words=page_words, base_words=base_words),
        donate_argnums=0,
    )
    pointer = buffer.unsafe_buffer_pointer()
    arrays = (jnp.asarray(np.concatenate([ids, padding])) for ids in (src, dst))
    src_ids, dst_ids = arrays

    buffer = step(buffer, src_ids, dst_ids, jnp.int32(0))
    assert int(count_changed(buffer)) == 0
    buffer = step(buffer, src_ids, dst_ids, jnp.int32(num_moves))
    assert buffer.unsafe_buffer_pointer() == pointer
    offsets = np.arange(page_words, dtype=np.int64) + base_words
    for source, target in zip(src.tolist(), dst.tolist(), strict=True):
        wanted = (offsets + source * page_words).astype(np.uint32)
        got = page_on_card(buffer, target, page_words, base_words)
        np.testing.assert_array_equal(got, wanted)
    assert int(count_changed(buffer)) == num_moves * page_words


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ON_CARD)
@pytest.mark.parametrize("size", CARD_SIZES)
def test_far_pages_of_a_large_buffer(kernel, size):
    total_words = (1 << 31) // CARD_WORDS * CARD_WORDS + (1 << 20) // 8 * CARD_WORDS
    check_on_card(ON_CARD[kernel], *CARD_SIZES[size], total_words)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["vector", "triton"])
def test_odd_pages_with_more_than_2_31_units(kernel):
    total_words = (33 << 28) // (CARD_WORDS * 1024) * CARD_WORDS * 1024
    check_on_card(ON_CARD[kernel], *CARD_SIZES["odd"], total_words)
