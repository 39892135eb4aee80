"""Where sub-pools may lie: host and device agree, and both with plain integers."""

import functools as ft
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tagged_pools import full_spec, latent_spec, state_spec, window_spec
from ukv.layout import Placement, place, spans_fit, static_layout, unified_layout
from ukv.spec import MLASpec


def rows_of(name, num_rows):
    """A page of ``num_rows`` rows of 16 bytes, so that units are these rows."""
    return MLASpec(
        name=name, num_layers=num_rows, page_size=1, latent_dim=8, rope_dim=0
    )


# Pages of 1 to 700,000,001 units of 16 bytes, in pools of few units and of
# nearly 2^31.
UNITS = {
    "one": unified_layout([rows_of("a", 7)], pool_bytes=16 * 100),
    "two": unified_layout([rows_of("a", 7), rows_of("b", 5)], pool_bytes=16 * 100),
    "three": unified_layout(
        [rows_of("a", 3), rows_of("b", 7), rows_of("c", 5)], pool_bytes=16 * 100
    ),
    "five": unified_layout(
        [rows_of(name, n) for name, n in zip("abcde", (2, 7, 5, 3, 4), strict=True)],
        pool_bytes=16 * 120,
    ),
    "huge": unified_layout(
        [rows_of("a", 1), rows_of("b", 48_271), rows_of("c", 100), rows_of("d", 7)],
        pool_bytes=16 * (2**31 - 1),
    ),
    "huge pages": unified_layout(
        [rows_of("a", 7), rows_of("b", 700_000_001), rows_of("c", 100)],
        pool_bytes=16 * (2**31 - 1),
    ),
}


@ft.partial(jax.jit, static_argnums=0)
def place_on_device(layout, lo, pages):
    return place(layout, lo, pages, jnp)


@ft.partial(jax.jit, static_argnums=0)
def fit_on_device(layout, lo, hi):
    return spans_fit(layout, lo, hi, jnp)


def spans_are_apart(layout, lo, hi):
    """The definition: every span inside its grid, and none over another."""
    spans = []
    for sub, first, last in zip(layout.sub_pools, lo, hi, strict=True):
        if first < 0 or last > sub.num_pages:
            return False
        if first < last:
            base, page = sub.base_bytes, sub.page_bytes
            spans.append((base + first * page, base + last * page))
    return all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def packed_fits(layout, pages):
    """The linear inequality, in bytes: what fits if all may move."""
    border = 0
    for sub, count in zip(layout.sub_pools, pages, strict=True):
        if count > sub.num_pages:
            return False
        if sub.placement is Placement.FLOAT and count:
            border = -(-border // sub.page_bytes) * sub.page_bytes
        border += count * sub.page_bytes
    return border <= layout.pool_bytes


@st.composite
def counts(draw, layout, *, generous):
    """Pages of each sub-pool, around what is left by those before it."""
    found, left = [], layout.pool_bytes
    for sub in layout.sub_pools:
        most = max(left, 0) // sub.page_bytes + 2 * generous
        most = min(most, sub.num_pages + generous, 2**31 - 1)
        count = draw(st.integers(0, most))
        found.append(count)
        left -= count * sub.page_bytes
    return found


@pytest.mark.parametrize("name", UNITS)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60)
def test_place_on_host_and_device_agree(name, data):
    layout = UNITS[name]
    pages = data.draw(counts(layout, generous=True))
    lo = [data.draw(st.integers(0, sub.num_pages)) for sub in layout.sub_pools]
    wide = place(layout, np.asarray(lo, np.int64), np.asarray(pages, np.int64), np)
    narrow = place(layout, np.asarray(lo, np.int32), np.asarray(pages, np.int32), np)
    device = place_on_device(
        layout, jnp.asarray(lo, jnp.int32), jnp.asarray(pages, jnp.int32)
    )
    expected = packed_fits(layout, pages)
    assert [bool(fits) for _, fits in (wide, narrow, device)] == [expected] * 3
    if not expected:
        return
    new_lo = np.asarray(wide[0]).tolist()
    assert np.asarray(narrow[0]).tolist() == new_lo
    assert np.asarray(device[0]).tolist() == new_lo
    new_hi = [first + count for first, count in zip(new_lo, pages, strict=True)]
    assert spans_are_apart(layout, new_lo, new_hi)
    # A float that may stay stays.
    again, fits = place(layout, np.asarray(new_lo), np.asarray(pages), np)
    assert fits
    assert np.asarray(again).tolist() == new_lo


@pytest.mark.parametrize("name", UNITS)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60)
def test_spans_fit_on_host_and_device_agree(name, data):
    layout = UNITS[name]
    if data.draw(st.booleans()):
        pages = data.draw(counts(layout, generous=False))
        lo = np.asarray(
            place(layout, np.zeros(len(pages), np.int64), np.asarray(pages), np)[0]
        ).tolist()
        shift = [data.draw(st.integers(-1, 1)) for _ in lo]
        lo = [first + by for first, by in zip(lo, shift, strict=True)]
        hi = [first + count for first, count in zip(lo, pages, strict=True)]
    else:
        most = max(sub.num_pages for sub in layout.sub_pools) + 1
        edges = st.integers(-1, min(most, 2**31 - 1))
        lo = [data.draw(edges) for _ in layout.sub_pools]
        hi = [data.draw(edges) for _ in layout.sub_pools]
    expected = spans_are_apart(layout, lo, hi)
    for dtype in (np.int32, np.int64):
        found = spans_fit(layout, np.asarray(lo, dtype), np.asarray(hi, dtype), np)
        assert bool(found) == expected
    device = fit_on_device(layout, jnp.asarray(lo, jnp.int32), jnp.asarray(hi))
    assert bool(device) == expected


def test_float_leaves_an_equal_share_below_it():
    # 100 units: LOW 3 x 4 = 12, FLOAT 7 x 2 = 14, HIGH 5 x 2 = 10 leave 64 free.
    layout = UNITS["three"]
    lo, fits = place(layout, np.zeros(3, np.int64), np.asarray([4, 2, 2]), np)
    assert fits
    # 12 + 64 // 2 = 44, up to the grid of 7: page 7.
    assert np.asarray(lo).tolist() == [0, 7, layout.sub_pool("c").num_pages - 2]


def test_float_that_must_move_goes_no_further_than_the_end_allows():
    # LOW takes 24 of 100 units, HIGH 50: the float fits at 28 only, its grid's 4th.
    layout = UNITS["three"]
    lo, fits = place(layout, np.zeros(3, np.int64), np.asarray([8, 3, 10]), np)
    assert fits
    assert np.asarray(lo)[1] == 4
    assert not place(layout, np.zeros(3, np.int64), np.asarray([8, 4, 10]), np)[1]


def test_empty_span_takes_no_room():
    layout = unified_layout(
        [state_spec(), latent_spec(), full_spec()], pool_bytes=768 * 8
    )
    everything = layout.sub_pool("state").num_pages
    for at in (0, 3, layout.sub_pool("latent").num_pages):
        lo, hi = np.asarray([0, at, 24]), np.asarray([everything, at, 24])
        assert bool(spans_fit(layout, lo, hi, np))


def test_static_sub_pools_are_bounded_by_their_own_grids():
    layout = static_layout(
        [full_spec(), window_spec()], num_pages={"full": 10, "window": 4}
    )
    for hi, expected in [((0, 4), True), ((0, 5), False)]:
        found = spans_fit(layout, np.zeros(2, np.int64), np.asarray(hi), np)
        assert bool(found) == expected
