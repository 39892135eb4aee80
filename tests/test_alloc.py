"""Allocation: exact ids, transactions, and the same under jit, scan and cond."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tagged_pools as pools
from tests.tagged_pools import (
    check,
    errors,
    full_spec,
    held,
    latent_spec,
    new_pool,
    physical,
    poisoned,
    row,
    state_spec,
    take,
    window_spec,
)
from ukv import allocator
from ukv.allocator import ErrorBit
from ukv.allocator.alloc import page_growth
from ukv.ids import VirtualPages
from ukv.layout import static_layout

KDA_MLA = [state_spec(), latent_spec()]
SWA_FULL = [full_spec(), window_spec()]


def kda_mla():
    return poisoned(pools.KDA_MLA)


def swa_full():
    return poisoned(pools.SWA_FULL)


def table(rows, width, space="latent"):
    return VirtualPages(ids=jnp.zeros((rows, width), jnp.int32), space=space)


def int32(values):
    return jnp.asarray(values, jnp.int32)


def test_scripted_history_has_these_ids_and_places():
    state = kda_mla()
    # 15,872 bytes: 20 slots of 768 grow up, 31 pages of 512 grow down.
    state, ids = take(state, state=2, latent=3)
    assert ids == {"state": [1, 2], "latent": [1, 2, 3]}
    assert physical(state, "state", [1, 2]) == [0, 1]
    assert physical(state, "latent", [1, 2, 3]) == [30, 29, 28]
    state = pools.free(state, pools.pages("latent", 2))
    assert row(state, "latent") == {"live": 2, "holes": 1, "lo": 28, "hi": 31}
    # The id freed last goes first, and so does the hole freed last.
    state, ids = take(state, latent=2)
    assert ids == {"latent": [2, 4]}
    assert physical(state, "latent", [2, 4]) == [29, 27]
    state = pools.free(state, pools.pages("latent", 1, 4, 3))
    assert row(state, "latent") == {"live": 1, "holes": 3, "lo": 27, "hi": 31}
    state, ids = take(state, latent=4, state=1)
    assert ids == {"latent": [3, 4, 1, 5], "state": [3]}
    assert physical(state, "latent", [3, 4, 1, 5]) == [28, 27, 30, 26]
    assert errors(state) == {}
    check(state)


def test_every_id_of_an_empty_pool_can_be_had():
    state = new_pool([latent_spec(num_layers=1)], 256 * 16)
    state, ids = take(state, latent=16)
    assert ids == {"latent": list(range(1, 17))}
    assert physical(state, "latent", range(1, 17)) == list(range(16))
    check(state)
    state, grant = pools.alloc(state, {"latent": 1})
    assert not bool(grant.granted)
    assert errors(state) == {"latent": ErrorBit.OUT_OF_PAGES}
    check(state)


def test_exact_fit_to_the_last_byte():
    # 9 slots of 768 bytes and 10 pages of 512 are 12,032 of 12,032 bytes.
    state = new_pool(KDA_MLA, 12_032)
    assert state.layout.pool_bytes == 12_032
    state, _ = take(state, state=9, latent=10)
    assert row(state, "state")["hi"] * 768 == 12_032 - 10 * 512
    for name in ("state", "latent"):
        state, grant = pools.alloc(state, {name: 1})
        assert not bool(grant.granted)
        assert held(grant.pages[name]) == []
    check(state)


def test_refused_transaction_changes_nothing_but_the_error_word():
    state, _ = take(kda_mla(), state=10, latent=10)
    before = jax.device_get((state.tables, state.counters, state.buffers))
    # 5 pages fit, and so do 4 slots; not both.
    state, grant = pools.alloc(state, {"state": 4, "latent": 5})
    assert not bool(grant.granted)
    assert [held(found) for found in grant.pages.values()] == [[], []]
    after = jax.device_get((state.tables, state.counters, state.buffers))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert errors(state) == {
        "state": ErrorBit.OUT_OF_PAGES,
        "latent": ErrorBit.OUT_OF_PAGES,
    }
    state = allocator.clear_error(state)
    assert errors(state) == {}
    # What is left fits to the byte.
    state, _ = take(state, state=2, latent=3)
    check(state)


def test_only_sub_pools_that_were_asked_are_blamed():
    state, _ = take(kda_mla(), latent=14)
    state, grant = pools.alloc(state, {"latent": 16, "state": 15})
    assert not bool(grant.granted)
    state = allocator.clear_error(state)
    state, grant = pools.alloc(state, {"latent": 0, "state": 15})
    assert not bool(grant.granted)
    assert errors(state) == {"state": ErrorBit.OUT_OF_PAGES}


def test_nothing_is_granted_for_nothing():
    state, grant = pools.alloc(kda_mla(), {"state": 0, "latent": 0})
    assert bool(grant.granted)
    assert row(state, "latent") == {"live": 0, "holes": 0, "lo": 31, "hi": 31}


@pytest.mark.parametrize("count", [-1, 17, 2**31 - 1])
def test_counts_on_the_device_out_of_bounds_are_refused(count):
    # Traced counts cannot raise.
    state, grant = pools.alloc(kda_mla(), {"latent": int32(count)})
    assert not bool(grant.granted)
    assert row(state, "latent")["live"] == 0
    check(state)


def test_page_has_a_half_in_each_sub_pool_that_shares_its_ids():
    state, ids = take(swa_full(), full=3)
    assert ids == {"full": [1, 2, 3]}
    assert physical(state, "full", [1, 2, 3]) == [0, 1, 2]
    assert physical(state, "window", [1, 2, 3]) == [20, 19, 18]
    check(state)
    # 10,752 bytes hold 14 pages with both halves.
    state, _ = take(state, full=11)
    state, grant = pools.alloc(state, {"full": 1})
    assert not bool(grant.granted)
    assert errors(state) == {
        "full": ErrorBit.OUT_OF_PAGES,
        "window": ErrorBit.OUT_OF_PAGES,
    }


def test_static_pool_needs_no_tables():
    layout = static_layout(KDA_MLA, num_pages={"state": 2, "latent": 5})
    state, ids = take(poisoned(layout), state=2, latent=3)
    assert ids == {"state": [1, 2], "latent": [1, 2, 3]}
    state = pools.free(state, pools.pages("latent", 2))
    state, ids = take(state, latent=3)
    assert ids == {"latent": [2, 4, 5]}
    state, grant = pools.alloc(state, {"state": 1})
    assert not bool(grant.granted)
    check(state)


def test_static_window_runs_out_before_its_owner():
    layout = static_layout(SWA_FULL, num_pages={"full": 8, "window": 3})
    state, ids = take(poisoned(layout), full=3)
    state, grant = pools.alloc(state, {"full": 1})
    assert not bool(grant.granted)
    state = pools.free_window(state, "window", pools.pages("full", ids["full"][0]))
    state, ids = take(allocator.clear_error(state), full=1)
    assert ids == {"full": [4]}
    assert physical(state, "window", [4]) == [0]
    check(state)


@pytest.mark.parametrize(
    ("context_lens", "query_lens", "first", "count"),
    [
        ([20], [15], [2], [1]),
        ([0, 16, 17], [1, 1, 1], [0, 1, 2], [1, 1, 0]),
        ([0, 31, 5], [64, 2, 0], [0, 2, 1], [4, 1, 0]),
    ],
)
def test_pages_that_new_tokens_need(context_lens, query_lens, first, count):
    found = page_growth(16, int32(context_lens), int32(query_lens))
    assert [np.asarray(part).tolist() for part in found] == [first, count]


def test_extend_fills_rows_one_after_the_other():
    tables = {"latent": table(3, 4)}
    state, tables, granted = pools.alloc_extend(
        kda_mla(), tables, int32([0, 0, 0]), int32([5, 0, 9]), max_new_pages=8
    )
    assert bool(granted)
    assert tables["latent"].ids.tolist() == [[1, 2, 0, 0], [0] * 4, [3, 4, 5, 0]]
    # 5 + 3 tokens fit the two pages; 9 + 4 need a fourth.
    state, tables, granted = pools.alloc_extend(
        state, tables, int32([5, 0, 9]), int32([3, 4, 4]), max_new_pages=8
    )
    assert bool(granted)
    assert tables["latent"].ids.tolist() == [[1, 2, 0, 0], [6, 0, 0, 0], [3, 4, 5, 7]]
    check(state)


def test_extend_past_the_table_or_the_bound_is_refused_whole():
    tables = {"latent": table(3, 4)}
    zeros = int32([0, 0, 0])
    for query_lens in ([1, 0, 17], [16, 16, 16]):
        state, found, granted = pools.alloc_extend(
            kda_mla(), tables, zeros, int32(query_lens), max_new_pages=8
        )
        assert not bool(granted)
        assert not found["latent"].ids.any()
        assert errors(state) == {"latent": ErrorBit.TABLE_OVERFLOW}
        assert row(state, "latent")["live"] == 0


def test_extend_out_of_pages_leaves_the_tables_alone():
    state, _ = take(kda_mla(), state=16, latent=6)
    tables = {
        "latent": table(3, 4).replace(ids=int32([[1, 2, 0, 0], [3] * 4, [0] * 4]))
    }
    state, found, granted = pools.alloc_extend(
        state, tables, int32([8, 16, 0]), int32([4, 0, 1]), max_new_pages=8
    )
    assert not bool(granted)
    assert found["latent"].ids.tolist() == tables["latent"].ids.tolist()
    assert errors(state) == {"latent": ErrorBit.OUT_OF_PAGES}
    check(state)


def decode(state, tables, context_lens, *, steps):
    def step(carry, _):
        state, tables, lens = carry
        is_active = lens > 0
        state, tables, granted = allocator.alloc_decode(state, tables, lens, is_active)
        return (state, tables, lens + is_active.astype(jnp.int32)), granted

    carry, granted = jax.lax.scan(step, (state, tables, context_lens), length=steps)
    return *carry, granted


scan_decode = jax.jit(
    decode, static_argnames="steps", donate_argnames=("state", "tables")
)


def test_decode_steps_in_one_dispatch_cross_page_borders():
    state, tables, granted = pools.alloc_extend(
        kda_mla(),
        {"latent": table(3, 8)},
        int32([0, 0, 0]),
        int32([3, 0, 8]),
        max_new_pages=8,
    )
    assert tables["latent"].ids[:, :2].tolist() == [[1, 0], [0, 0], [2, 3]]
    state, tables, lens, granted = scan_decode(
        state, tables, int32([3, 0, 8]), steps=11
    )
    assert granted.all()
    assert lens.tolist() == [14, 0, 19]
    # Row 2 crosses at 8, 12 and 16; row 0 at 4, 8 and 12.
    assert tables["latent"].ids.tolist() == [
        [1, 5, 7, 9, 0, 0, 0, 0],
        [0] * 8,
        [2, 3, 4, 6, 8, 0, 0, 0],
    ]
    assert errors(state) == {}
    check(state)


def test_scan_equals_the_same_steps_one_by_one():
    state, tables, _ = pools.alloc_extend(
        kda_mla(),
        {"latent": table(3, 8)},
        int32([0, 0, 0]),
        int32([3, 0, 8]),
        max_new_pages=8,
    )
    lens = int32([3, 0, 8])
    for _ in range(11):
        state, tables, granted = pools.alloc_decode(state, tables, lens, lens > 0)
        assert bool(granted)
        lens = lens + (lens > 0).astype(jnp.int32)
    again, tables_again, _ = pools.alloc_extend(
        kda_mla(),
        {"latent": table(3, 8)},
        int32([0, 0, 0]),
        int32([3, 0, 8]),
        max_new_pages=8,
    )
    again, tables_again, *_ = scan_decode(
        again, tables_again, int32([3, 0, 8]), steps=11
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get((state, tables)),
        jax.device_get((again, tables_again)),
    )


def test_decode_that_runs_dry_inside_a_scan_stops_growing():
    # 2 pages are left: the third border is refused, and every one after it.
    state, _ = take(kda_mla(), state=16, latent=5)
    tables = {
        "latent": table(3, 8).replace(
            ids=int32([[1], [0], [2]]) * int32([[1] + [0] * 7])
        )
    }
    state, tables, _, granted = scan_decode(state, tables, int32([4, 0, 4]), steps=11)
    assert granted.tolist() == [True] * 4 + [False] + [True] * 3 + [False] + [True] * 2
    assert errors(state) == {"latent": ErrorBit.OUT_OF_PAGES}
    check(state)


@ft.partial(jax.jit, donate_argnums=0)
def alloc_if(state, wants):
    return jax.lax.cond(
        wants,
        lambda s: allocator.alloc(
            s, {"latent": 2, "state": 1}, max_pages={"latent": 2, "state": 1}
        )[0],
        lambda s: allocator.free(s, pools.pages("latent", 1)),
        state,
    )


def test_alloc_and_free_under_cond():
    state = alloc_if(kda_mla(), True)
    assert (pools.live(state, "latent"), pools.live(state, "state")) == (2, 1)
    state = alloc_if(state, False)
    assert (pools.live(state, "latent"), pools.live(state, "state")) == (1, 1)
    assert errors(state) == {}
    check(state)


def test_donated_pool_keeps_its_buffers_for_100_steps():
    state = kda_mla()
    leaves = {
        jax.tree_util.keystr(path): leaf.unsafe_buffer_pointer()
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if leaf.size
    }
    for step in range(100):
        state, ids = take(state, latent=3, state=1)
        state = pools.free(state, pools.pages("latent", *ids["latent"][:2]))
        if step % 5 == 4:
            state, _ = pools.compact(state)
            kept = pools.held_pages(state)
            state = pools.free(state, pools.pages("latent", *kept["latent"]))
            state = pools.free(state, pools.pages("state", *kept["state"]))
    assert errors(state) == {}
    pointers = {
        jax.tree_util.keystr(path): leaf.unsafe_buffer_pointer()
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if leaf.size
    }
    assert pointers[".buffers[0]"] == leaves[".buffers[0]"]
    check(state)


def test_unjitted_calls_give_the_same_answer():
    state, grant = allocator.alloc(
        kda_mla(), {"latent": 2, "state": 1}, max_pages={"latent": 4, "state": 1}
    )
    assert grant.pages["latent"].ids.tolist() == [1, 2, 0, 0]
    assert grant.pages["state"].ids.tolist() == [1]
    check(state)


@pytest.mark.parametrize("shape", [(16,), (4, 4), (0,)])
def test_ids_of_any_shape_are_freed(shape):
    state, ids = take(kda_mla(), latent=16)
    chosen = int32(ids["latent"])[: int(np.prod(shape))].reshape(shape)
    state = jax.jit(allocator.free)(state, VirtualPages(ids=chosen, space="latent"))
    assert pools.live(state, "latent") == 16 - chosen.size
    assert errors(state) == {}
    check(state)
