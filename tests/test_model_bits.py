"""The same request gives the same bits, wherever and with whomever its memory lies."""

import dataclasses
import functools as ft

import numpy as np
import pytest

from tests import tagged_pools as pools
from tests.model_runner import ModelRunner, forget_programs
from tests.short_models import load_short
from tests.test_model_hybrid import MODEL as HYBRID
from tests.test_model_hybrid import weights as hybrid_weights
from tests.test_model_parity import FAMILIES

# Of the request that is watched and of two others; each crosses a page in its decode.
PROMPT_LENS = (46, 34, 50)
NUM_DECODED = 4
NUM_ROWS = len(PROMPT_LENS)
# What is compiled as for a user takes long: a layer of each kind.
RECURRENT = {"hybrid": (0, 1, 3), "kimi_linear": (1, 3), "qwen3_next": (1, 3)}
NOBODY = np.zeros(0, np.int32)


@pytest.fixture(scope="module", params=[*FAMILIES, "hybrid"])
def family(request):
    # All tests of one family follow each other and share its four programs.
    yield request.param
    forget_programs()
    alone.cache_clear()


@ft.cache
def sizes_and_weights(family):
    layers = RECURRENT.get(family)
    if family == "hybrid":
        pattern = tuple(HYBRID.pattern[index] for index in layers)
        chosen = [hybrid_weights()["layers"][index] for index in layers]
        model = dataclasses.replace(HYBRID, pattern=pattern)
        return model, {**hybrid_weights(), "layers": chosen}
    loaded = load_short(family, layers)
    return loaded.model, loaded.weights


def new_runner(family, *, is_unified=True):
    return ModelRunner(
        *sizes_and_weights(family),
        num_rows=NUM_ROWS,
        max_tokens=64,
        spare_pages=3,
        is_unified=is_unified,
        # With the vector code that a user gets: without it a step that rounds one way
        # on a unified pool and another way on a static one would not show.
        is_optimized=family in RECURRENT,
    )


def requests(family):
    vocab_size = sizes_and_weights(family)[0].vocab_size
    rng = np.random.default_rng(11)
    return [rng.integers(0, vocab_size, size + NUM_DECODED) for size in PROMPT_LENS]


def logits_of(run, rows, *, watched, between=None):
    """Prefill and decode; return all logits of one row.

    Args:
      run: The runner.
      rows: Tokens of each row, perhaps none.
      watched: The row.
      between: Called with the runner before the third decode step.
    """

    def feed(start, stop):
        return run.step(
            [row[max(len(row) - start, 0) : len(row) - stop] for row in rows],
            num_tokens=136,
            max_query_len=64,
        )[watched]

    longest = max(len(row) for row in rows)
    found = [feed(longest, NUM_DECODED)]
    for left in range(NUM_DECODED, 0, -1):
        if left == 2 and between is not None:
            between(run)
        found.append(feed(left, left - 1))
    return np.concatenate(found)


@ft.cache
def alone(family):
    """The request in the first row of an untouched pool, other rows padded."""
    request, _, _ = requests(family)
    run = new_runner(family)
    return logits_of(run, [request, NOBODY, NOBODY], watched=0), places(run)


def places(run):
    """Physical pages and slot of the first row, by sub-pool."""
    found = {}
    for sub in run.layout.sub_pools:
        owner = run.layout.sub_pools[sub.owner].name
        ids = np.asarray(run.tables[owner].ids[0]).reshape(-1)
        found[sub.name] = pools.physical(run.pool, sub.name, ids[ids > 0])
    return found


def scramble(run, seed):
    """Take and release pages in disorder; return the runner's junk that stays.

    Every free id and every hole lies in another order afterwards, and the slots of
    the rows are taken anew.
    """
    rng = np.random.default_rng(seed)
    for sub in run.layout.owners:
        if not sub.spec.grows:
            slots = pools.held(run.tables[sub.name])
            run.pool = pools.free(run.pool, pools.pages(sub.name, *slots))
    # A row of each kind of memory is spare; as much junk stays.
    counts = {
        sub.name: 15 if sub.spec.grows else NUM_ROWS + 2 for sub in run.layout.owners
    }
    run.pool, _ = pools.make_room(run.pool, counts)
    run.pool, grant = pools.alloc(run.pool, counts)
    assert bool(grant.granted)
    junk = {}
    for name in counts:
        ids = rng.permutation(pools.held(grant.pages[name]))
        num_kept = 2 if run.layout.sub_pool(name).spec.grows else 1
        junk[name] = ids[:num_kept]
        run.pool = pools.free(run.pool, pools.pages(name, *ids[num_kept:]))
    for sub in run.layout.owners:
        if not sub.spec.grows:
            run.pool, grant = pools.alloc(run.pool, {sub.name: NUM_ROWS})
            table = run.tables[sub.name]
            ids = grant.pages[sub.name].ids[:NUM_ROWS]
            run.tables[sub.name] = table.replace(ids=ids)
    return junk


def assert_same_bits(found, expected):
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(
        found.view(np.uint32), expected.view(np.uint32), strict=True
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_any_permutation_of_pages_and_slots(family, seed):
    expected, first_places = alone(family)
    run = new_runner(family)
    scramble(run, seed)
    request, _, _ = requests(family)
    found = logits_of(run, [request, NOBODY, NOBODY], watched=0)
    now = places(run)
    assert all(now[name] != first_places[name] for name in now)
    assert_same_bits(found, expected)


def test_compaction_in_mid_sequence(family):
    run = new_runner(family)
    junk = scramble(run, seed=2)

    def release_and_compact(run):
        before = places(run)
        for name, ids in junk.items():
            run.pool = pools.free(run.pool, pools.pages(name, *ids))
        run.pool, made = pools.compact(run.pool)
        assert bool(made.fits)
        assert all(count > 0 for count in made.moved.tolist())
        assert places(run) != before

    found = logits_of(
        run,
        [requests(family)[0], NOBODY, NOBODY],
        watched=0,
        between=release_and_compact,
    )
    assert_same_bits(found, alone(family)[0])


@pytest.mark.parametrize("row", range(NUM_ROWS))
def test_alone_or_in_a_batch(family, row):
    request, *others = requests(family)
    others.insert(row, request)
    found = logits_of(new_runner(family), others, watched=row)
    assert_same_bits(found, alone(family)[0])


def test_unified_or_static_pool(family):
    run = new_runner(family, is_unified=False)
    found = logits_of(run, [requests(family)[0], NOBODY, NOBODY], watched=0)
    assert_same_bits(found, alone(family)[0])
