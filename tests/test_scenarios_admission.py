"""Reported failures of other systems, replayed on the pool: admission and sizing.

Each test is named by the number of its failure. Those of frees are in
``test_scenarios_free``, those of moves in ``test_scenarios_moves``.

Left to the engine, whose policy they are: 3, 19, 34, 36, 56, 58, 59, 61, 62, 63, 67
(what to evict, prefix cache, checkpoints), B29, B34, B35, B38, B40, B43, B45 to B47,
B49, B51 to B53, B55 and B59 to B71. Of 2, 20, 26, 32, B32 and B57 the part of the pool
is here. Translation, 15, 42 to 46, 49 to 51 and B1 to B13, is tested with the
translator; B15, B19, B21 to B28 with the ops and the steps; 69, a donated pool that
keeps its pointer, in test_alloc.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tagged_pools as pools
from tests.test_alloc import kda_mla, swa_full
from tests.test_spec import kimi_latent, kimi_state
from tests.window_requests import run_request, tiny_window_specs
from ukv import allocator
from ukv.allocator import PoolMirror
from ukv.errors import PoolStateError
from ukv.layout import (
    RequestShape,
    max_pages,
    max_requests,
    max_tokens,
    packed_bytes,
    pages_of_request,
    static_layout,
    unified_layout,
)
from ukv.pool import HI, HOLES, LIVE, LO
from ukv.spec import AttentionSpec, MLASpec, Part, SlidingWindowSpec, StateSpec

GIB = 2**30


def test_scenario_02_free_ids_alone_never_imply_capacity():
    # 100 units of 256 bytes; F pages of 1, M slots of 10; F holds 94.
    slot = Part(name="recurrent", shape=(640,), dtype=jnp.dtype("float32"))
    slots = StateSpec(name="state", num_layers=1, parts=(slot,))
    state = pools.new_pool([pools.full_spec(), slots], 25_600)
    state, grant = pools.alloc(state, {"full": 94}, max_pages=94)
    ids = pools.held(grant.pages["full"])
    state = pools.write_tags(state, "full", ids)
    mirror = PoolMirror.read(state)
    assert mirror.free_bytes() == 6 * 256
    # Ten ids of M are free, and not one slot.
    assert state.layout.sub_pool("state").num_virtual - 1 == 10
    assert not mirror.can_allocate({"state": 1})
    state, made = pools.make_room(state, {"state": 1})
    assert not bool(made.fits)
    # Evicting M frees nothing; four scattered pages of F are enough.
    evicted = []
    for virtual in np.random.default_rng(0).permutation(ids)[:60]:
        if PoolMirror.read(state).can_allocate({"state": 1}):
            break
        state = pools.free(state, pools.pages("full", int(virtual)))
        evicted.append(int(virtual))
    assert len(evicted) == 4
    before = pools.contents(state)["full"]
    state, ids = pools.grow(state, state=1)
    assert ids["state"] == [1]
    assert pools.contents(state)["full"] == before
    assert PoolMirror.read(state).free_bytes() == 0
    pools.check(state)


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.8])
def test_scenario_04_sizing_loses_less_than_a_page(ratio):
    # Tokens of 24 and 10 bytes are rows of 32 and 16.
    shape = {"num_layers": 1, "page_size": 16, "rope_dim": 0}
    specs = [
        MLASpec(name="full", latent_dim=12, **shape),
        MLASpec(name="swa", latent_dim=5, **shape),
    ]
    budget = 1_000_003
    layout = unified_layout(specs, pool_bytes=budget)
    page = layout.sub_pool("full").page_bytes
    assert (page, layout.sub_pool("swa").page_bytes) == (512, 256)
    full = int(budget * ratio) // page
    swa = max_pages(layout, "swa", {"full": full})
    mirror = PoolMirror.create(layout).alloc({"full": full, "swa": swa})
    assert budget - page < mirror.bytes_in_use() <= budget
    assert not mirror.can_allocate({"swa": 1})


@pytest.mark.parametrize("column", [LIVE, HOLES, LO, HI])
@pytest.mark.parametrize("name", ["state", "latent"])
def test_scenario_06_conservation_names_the_sub_pool(name, column):
    state, _ = pools.take(kda_mla(), state=2, latent=3)
    allocator.verify(state)
    index = state.layout.sub_pool(name).index
    broken = state.replace(counters=state.counters.at[index, column].add(1))
    with pytest.raises(PoolStateError, match=f"sub-pool '{name}'"):
        allocator.verify(broken)


def test_scenario_07_borrower_is_never_negative():
    # Room for 100 pages with both halves; windows give bytes back to F.
    state = pools.new_pool([pools.full_spec(), pools.window_spec()], 100 * 768)
    state, grant = pools.alloc(state, {"full": 100}, max_pages=128)
    ids = pools.held(grant.pages["full"])
    assert PoolMirror.read(state).free_bytes() == 0
    state = pools.free_window(
        state, "window", pools.pages("full", *ids[:90], length=128)
    )
    state, _ = pools.make_room(state, {"full": 20})
    state, grant = pools.alloc(state, {"full": 20}, max_pages=128)
    assert bool(grant.granted)
    mirror = PoolMirror.read(state)
    assert mirror.live("full") == 120
    assert mirror.free_bytes() == 76_800 - 120 * 256 - 30 * 512
    # 30,720 bytes are 40 pages more, to the byte.
    assert mirror.can_allocate({"full": 40})
    assert not mirror.can_allocate({"full": 41})
    pools.check(state)


def test_scenario_08_prompt_longer_than_the_window_pool_is_admitted():
    specs = tiny_window_specs(
        full_layers=1, window_layers=1, window_size=1_024, page_size=16
    )
    layout = static_layout(specs, num_pages={"full": 6_250, "window": 193})
    shape = RequestShape(num_tokens=100_000, chunk_len=2_048)
    assert pages_of_request(layout.sub_pool("window"), shape) == 193
    assert max_requests(layout, shape) == 1
    # The 1,023 tokens before a chunk that starts on a page touch 64 pages.
    state, ids, peak = run_request(
        pools.poisoned(layout), 6_250, chunk_pages=128, window_pages=64
    )
    assert len(ids) == 6_250
    assert peak == 192
    assert pools.errors(state) == {}


@jax.jit
def grants(state, counts):
    """What ``alloc`` and ``make_room`` say to each count, on the device."""

    def ask(count):
        _, grant = allocator.alloc(state, {"full": count}, max_pages={"full": 64})
        _, made = allocator.make_room(state, {"full": count})
        return grant.granted, made.fits

    return jax.vmap(ask)(counts)


def test_scenario_10_can_allocate_is_what_allocate_does():
    rng = np.random.default_rng(0)
    state, asked = swa_full(), 0
    while asked < 10_000:
        counts = rng.integers(0, 33, 500)
        mirror = PoolMirror.read(state)
        in_place, after_a_move = grants(state, jnp.asarray(counts, jnp.int32))
        numbers = [int(n) for n in counts]
        assert np.asarray(in_place).tolist() == [
            mirror.fits_in_place({"full": n}) for n in numbers
        ]
        assert np.asarray(after_a_move).tolist() == [
            mirror.can_allocate({"full": n}) for n in numbers
        ]
        asked += len(counts)
        # The next state: some pages more, some window halves and some pages less.
        state, _ = pools.alloc(state, {"full": int(rng.integers(0, 8))})
        found = pools.held_pages(state)
        slid = [i for i in found["window"] if rng.random() < 0.2][:16]
        state = pools.free_window(state, "window", pools.pages("full", *slid))
        gone = [i for i in found["full"] if rng.random() < 0.2][:16]
        state = pools.free(state, pools.pages("full", *gone))
    pools.check(state)


def test_scenario_12_gpt_oss_window_counts_once():
    # gpt-oss-20b: 12 + 12 layers of 8 heads of 64, window 128; length 8,192, batch 32.
    def bytes_of(window_size, page_size):
        shape = {"num_layers": 12, "num_kv_heads": 8, "head_dim": 64}
        shape["page_size"] = page_size
        specs = [
            AttentionSpec(name="full", **shape),
            SlidingWindowSpec(
                name="window", window_size=window_size, shares_ids="full", **shape
            ),
        ]
        layout = unified_layout(specs, pool_bytes=16 * GIB)
        request = RequestShape(num_tokens=8_192)
        needs = {s.name: 32 * pages_of_request(s, request) for s in layout.sub_pools}
        needed = packed_bytes(specs, needs)
        assert max_requests(unified_layout(specs, pool_bytes=needed), request) == 32
        smaller = unified_layout(specs, pool_bytes=needed - 1)
        assert max_requests(smaller, request) == 31
        return needed / GIB

    assert bytes_of(128, 1) == 6.09375
    assert bytes_of(128, 16) == pytest.approx(6.09, abs=0.02)
    assert bytes_of(8_192, 16) == 12.0


@pytest.mark.parametrize(
    ("full_layers", "window_layers", "window_size"),
    [(12, 12, 128), (10, 50, 1_024), (1, 5, 512)],
    ids=["gpt-oss-20b", "gemma-4-31B", "gemma-3"],
)
def test_scenario_12_capacity_is_the_peak_of_the_allocator(
    full_layers, window_layers, window_size
):
    specs = tiny_window_specs(
        full_layers=full_layers,
        window_layers=window_layers,
        window_size=window_size,
        page_size=16,
    )
    # Chunks of 256 tokens that start on a page: W - 1 tokens before it are W / 16.
    request = RequestShape(num_tokens=4_096, chunk_len=256)
    window_pages = window_size // 16
    needs = {"full": 256, "window": window_pages + 16}
    layout = unified_layout(specs, pool_bytes=packed_bytes(specs, needs))
    (_, window) = layout.sub_pools
    # The worst case of the closed form starts inside a page: one page more.
    assert pages_of_request(window, request) == needs["window"] + 1
    state, _, peak = run_request(
        pools.poisoned(layout), 256, chunk_pages=16, window_pages=window_pages
    )
    assert peak == needs["window"]
    assert pools.live(state, "full") == 256
    assert pools.errors(state) == {}


def test_scenario_13_tokens_depend_on_full_layers_only():
    # F 10 layers, S 50 layers with a window of 1,024, and states.
    full, window = tiny_window_specs(
        full_layers=10, window_layers=50, window_size=1_024, page_size=16
    )
    specs = [full, window, pools.state_spec(slot_bytes=76_800)]
    layout = unified_layout(specs, pool_bytes=256 * 2**20)
    full_page, window_page = 10 * 16 * 32, 50 * 16 * 32
    for num_requests in (1, 16):
        # 1,024 tokens touch 65 pages; a float may lose less than one page to its grid.
        caps = num_requests * (65 * window_page + 76_800)
        tokens = max_tokens(layout, num_requests=num_requests)
        exact = (layout.pool_bytes - caps) // full_page * 16
        assert exact - window_page // full_page * 16 <= tokens <= exact


def test_scenario_14_window_bytes_are_counted_once():
    # Different head counts for F and S.
    full = AttentionSpec(
        name="full", num_layers=3, page_size=4, num_kv_heads=4, head_dim=8
    )
    specs = [full, pools.window_spec(num_layers=5, head_dim=8)]
    layout = unified_layout(specs, pool_bytes=2**17)
    page = 3 * 4 * 4 * 32 + 5 * 4 * 32
    count = layout.pool_bytes // page
    mirror = PoolMirror.create(layout)
    assert mirror.can_allocate({"full": count})
    assert not mirror.can_allocate({"full": count + 1})
    assert 0 <= mirror.alloc({"full": count}).free_bytes() < page


def test_scenario_16_window_table_spans_the_ids_of_its_owner():
    specs = [pools.full_spec(page_size=1), pools.window_spec(page_size=1)]
    layout = static_layout(specs, num_pages={"full": 4_095, "window": 512})
    state = pools.poisoned(layout)
    assert state.tables[1].v2p.shape == (4_096,)
    seen = []
    for _ in range(8):
        count = min(512, 4_095 - len(seen))
        state, grant = pools.alloc(state, {"full": count}, max_pages=512)
        assert bool(grant.granted)
        new = pools.held(grant.pages["full"])
        assert all(0 <= page < 512 for page in pools.physical(state, "window", new))
        seen += new
        if len(seen) < 4_095:
            state = pools.free_window(
                state, "window", pools.pages("full", *new, length=512)
            )
    assert sorted(seen) == list(range(1, 4_096))
    # F-id 4,095 has a half, F-id 1 is a tombstone; neither reads out of range.
    assert pools.physical(state, "window", [4_095])[0] < 512
    assert pools.physical(state, "window", [1]) == [512]
    pools.check(state)


def test_scenario_17_states_are_deducted_before_tokens():
    layout = unified_layout([kimi_state(), kimi_latent()], pool_bytes=100 * GIB)
    states = 64 * 43_417_600
    assert states / GIB == pytest.approx(2.59, abs=0.01)
    tokens = max_tokens(layout, num_requests=64)
    assert tokens == pytest.approx(12.97e6, abs=0.01e6)
    assert tokens <= (100 * GIB - states) // 8_064
    mirror = PoolMirror.create(layout).alloc({"kda": 64, "latent": tokens // 64})
    assert not mirror.can_allocate({"latent": 1})
    assert not mirror.can_allocate({"kda": 1})


def test_scenario_20_one_finishes_and_then_the_other():
    layout = unified_layout([pools.latent_spec()], pool_bytes=100 * 512)
    mirror = PoolMirror.create(layout).alloc({"latent": 30}).alloc({"latent": 30})
    # A and B hold 30 each and need 30 more each: 40 are left, so one of them runs.
    assert mirror.can_allocate({"latent": 30})
    mirror = mirror.alloc({"latent": 30})
    assert not mirror.can_allocate({"latent": 30})
    mirror = mirror.release({"latent": 60})
    assert mirror.can_allocate({"latent": 30})


def test_scenario_b32_b33_feasibility_is_joint():
    # Halves of one size, 21 of them; 7 pages live, and 3 holes on either side.
    state = pools.new_pool(
        [pools.full_spec(), pools.window_spec(num_layers=1)], 21 * 256
    )
    state, _ = pools.take(state, full=10)
    state = pools.free(state, pools.pages("full", 2, 5, 8))
    mirror = PoolMirror.read(state)
    # F alone has 4 and S alone has 4: three holes and the gap of one page.
    assert mirror.free_bytes() == (3 + 3 + 1) * 256
    assert mirror.can_allocate({"full": 3})
    assert not mirror.can_allocate({"full": 4})
    state, made = pools.make_room(state, {"full": 4})
    assert not bool(made.fits)
    state, grant = pools.alloc(state, {"full": 4})
    assert not bool(grant.granted)
    # One page less is enough, and no more is evicted.
    evicted = 0
    for virtual in (1, 3, 4):
        if PoolMirror.read(state).can_allocate({"full": 4}):
            break
        state = pools.free(state, pools.pages("full", virtual))
        evicted += 1
    assert evicted == 1
    state, _ = pools.grow(allocator.clear_error(state), full=4)
    pools.check(state)


def test_scenario_b44_row_state_and_track_come_together_or_not_at_all():
    specs = [
        pools.state_spec("state"),
        pools.latent_spec("row"),
        pools.state_spec("track"),
    ]
    layout = static_layout(specs, num_pages={"state": 4, "row": 8, "track": 1})
    state, _ = pools.take(pools.poisoned(layout), state=1, row=2, track=1)
    before = jax.device_get((state.tables, state.counters))
    state, grant = pools.alloc(state, {"state": 1, "row": 2, "track": 1})
    assert not bool(grant.granted)
    jax.tree.map(
        np.testing.assert_array_equal,
        before,
        jax.device_get((state.tables, state.counters)),
    )
    # The request returns to its queue and comes again.
    state = pools.free(allocator.clear_error(state), pools.pages("track", 1))
    state, _ = pools.take(state, state=1, row=2, track=1)
    pools.check(state)


def test_scenario_b57_request_that_never_fits_is_known_at_admission():
    layout = unified_layout([kimi_state(), kimi_latent()], pool_bytes=4 * GIB)
    empty = PoolMirror.create(layout)
    most = max_tokens(layout)
    assert empty.can_allocate({"kda": 1, "latent": most // 64})
    assert not empty.can_allocate({"kda": 1, "latent": most // 64 + 1})
    assert max_requests(layout, RequestShape(num_tokens=most)) == 1
    assert max_requests(layout, RequestShape(num_tokens=most + 1)) == 0
