"""How decode work is cut, and sizes that the Triton kernels refuse."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import kv_write_triton
from pallas_kernels.gqa_decode_triton import GqaDecodeTritonConfig, plan_decode
from pallas_kernels.gqa_extend_triton import GqaExtendTritonConfig
from pallas_kernels.kv_write_triton import EntryPlace, KvWriteConfig
from pallas_kernels.paged_rows import PagedPart, next_power_of_2

CONFIG = GqaDecodeTritonConfig(num_programs=528)


def place(*, kv_heads=8, width=128, page_size=64, dtype="bfloat16"):
    return PagedPart(
        dtype=jnp.dtype(dtype),
        num_heads=kv_heads,
        width=width,
        page_size=page_size,
        block=0,
        row_elements=kv_heads * width,
        entry_elements=kv_heads * width,
    )


def plan(*, rows, most_seen, query_len=1, group=4, window=None, part=None):
    part = place() if part is None else part
    return plan_decode(
        num_rows=rows,
        query_len=query_len,
        group=group,
        most_seen=most_seen,
        window=window,
        k=part,
        v=part,
        config=CONFIG,
    )


def chunk_length(seen, found):
    """As the kernel computes it."""
    most = max(-(-seen // found.max_chunks), CONFIG.most_chunk)
    length = max(min(-(-seen // found.even_chunks), most), found.least_chunk)
    return -(-length // found.block_kv) * found.block_kv


@pytest.mark.parametrize("rows", [1, 3, 16, 64, 128, 1000])
@pytest.mark.parametrize("most_seen", [64, 2048, 8192, 131072])
@pytest.mark.parametrize("window", [None, 1000])
def test_no_row_has_more_chunks_than_there_is_room_for(rows, most_seen, window):
    for query_len, width in itertools.product((1, 4), (64, 128)):
        found = plan(
            rows=rows,
            most_seen=most_seen,
            query_len=query_len,
            window=window,
            part=place(width=width),
        )
        longest = most_seen if window is None else min(most_seen, window + 3)
        lens = {0, 1, 63, 64, 65, 100, 127, 128, 129, 1000, 2048, 2049, longest // 3}
        for seen in sorted(lens | {longest - 1, longest}):
            if seen <= longest and found.part_chunks > 1:
                chunk = chunk_length(seen, found)
                assert -(-seen // chunk) <= found.part_chunks
                assert chunk % found.block_kv == 0


def test_partial_results_of_many_rows_stay_small():
    found = plan(rows=1000, most_seen=131072)
    # 32 query heads of 128 float32 numbers, of every chunk of every row.
    assert 1000 * found.part_chunks * 32 * 128 * 4 <= 64 << 20


def test_short_windows_are_one_launch():
    for rows in (1, 16, 64, 128):
        assert plan(rows=rows, most_seen=1 << 17, window=128).part_chunks == 1
    assert plan(rows=64, most_seen=1 << 17, window=4096).part_chunks > 1


def test_narrow_heads_share_a_product():
    narrow = place(width=64)
    assert plan(rows=64, most_seen=8192, group=8, part=narrow).heads == 2
    assert plan(rows=64, most_seen=8192, group=16, part=narrow).heads == 1
    odd = place(kv_heads=3, width=64)
    assert plan(rows=64, most_seen=8192, group=2, part=odd).heads == 1
    # Few rows of a window need every program.
    window = {"most_seen": 8192, "group": 8, "part": narrow, "window": 128}
    assert plan(rows=16, **window).heads == 1
    assert plan(rows=128, **window).heads == 2


def test_equal_rows_fill_the_rounds_of_the_programs():
    for rows in (1, 16, 64, 128, 256):
        found = plan(rows=rows, most_seen=8192)
        rounds = found.num_items * found.even_chunks / found.num_programs
        assert rounds / -(-rounds // 1) > 0.9


def test_programs_that_follow_each_other_have_more_in_flight():
    many = plan(rows=128, most_seen=2048)
    assert (many.part_chunks, many.num_stages) == (1, 4)
    assert many.num_items > many.num_programs
    few = plan(rows=64, most_seen=1024)
    assert few.num_items <= few.num_programs
    for found in (few, plan(rows=64, most_seen=8192)):
        assert found.num_stages == 3


def test_powers_of_2():
    assert [next_power_of_2(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GqaDecodeTritonConfig(num_warps=0), "num_warps=0 is below 1"),
        (lambda: GqaDecodeTritonConfig(num_programs=0), "num_programs=0 is below 1"),
        (lambda: GqaDecodeTritonConfig(tile_bytes=100), "tile_bytes=100 must be a"),
        (lambda: GqaExtendTritonConfig(block_m=48), "block_m=48 must be a power of"),
        (lambda: GqaExtendTritonConfig(block_kv=8), "block_kv=8 must be a power of"),
        (lambda: KvWriteConfig(program_words=24), "program_words=24 must be a power"),
    ],
)
def test_configs_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_writes_that_do_not_fit_their_places_are_refused():
    pool = jnp.zeros((4, 64), jnp.uint32)
    tokens = jnp.zeros(2, jnp.int32)
    words = jnp.zeros((2, 8), jnp.uint32)
    good = EntryPlace(block=0, block_words=32, entry_words=8)
    write = kv_write_triton.write_entries
    with pytest.raises(ValueError, match="1 values and 2 places"):
        write(pool, tokens, tokens, (words,), (good, good), page_size=4)
    with pytest.raises(ValueError, match="3 values and 3 places: 1 or 2 each"):
        write(pool, tokens, tokens, (words,) * 3, (good,) * 3, page_size=4)
    for entry_words in (16, 6):
        bad = EntryPlace(block=0, block_words=32, entry_words=entry_words)
        values = jnp.zeros((2, min(entry_words, 8)), jnp.uint32)
        with pytest.raises(ValueError, match=f"entries of {entry_words}, which must"):
            write(pool, tokens, tokens, (values,), (bad,), page_size=4)


def test_no_token_is_no_write():
    pool = jnp.zeros((4, 64), jnp.uint32)
    none, words = jnp.zeros(0, jnp.int32), jnp.zeros((0, 8), jnp.uint32)
    good = EntryPlace(block=0, block_words=32, entry_words=8)
    found = kv_write_triton.write_entries(
        pool, none, none, (words,), (good,), page_size=4
    )
    assert isinstance(found, jax.Array)
    assert found is pool
