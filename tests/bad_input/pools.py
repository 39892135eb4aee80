"""Ids, the pool and its allocator."""

import functools as ft
import sys

import jax.numpy as jnp
import numpy as np

from tests.bad_input.case import Case
from tests.bad_input.layouts import layout, windows
from tests.tagged_pools import latent_spec, pages, poisoned, state_spec
from ukv import allocator
from ukv.allocator import PoolMirror
from ukv.errors import (
    BudgetError,
    IdSpaceError,
    PoolStateError,
    SpecError,
    UnknownSubPoolError,
    UnsupportedError,
)
from ukv.ids import KernelBlocks, PhysicalPages, VirtualPages, require_ids
from ukv.layout import static_layout
from ukv.pool import LIVE, copy_pages
from ukv.pool.entries import entries_to_words
from ukv.pool.page_copy import _copy_with_kernel


def state():
    return poisoned(layout())


def static():
    return poisoned(
        static_layout(
            [state_spec(), latent_spec()], num_pages={"state": 2, "latent": 2}
        )
    )


def copy_between(src, dst):
    pool = state()
    sub = pool.layout.sub_pool("latent")
    return copy_pages(pool.buffers, pool.layout, sub, src, dst, jnp.int32(1))


def copy_with_triton():
    # As on a machine without Triton. On a CPU the dispatch refuses before.
    name = "pallas_kernels.page_copy_triton"
    saved = sys.modules.get(name)
    sys.modules[name] = None
    try:
        pool = state()
        sub = pool.layout.sub_pool("latent")
        ids = jnp.zeros(1, jnp.int32)
        _copy_with_kernel(pool.buffers[0], ids, ids, jnp.int32(0), sub, "triton")
    finally:
        del sys.modules[name]
        if saved is not None:
            sys.modules[name] = saved


def wide_write():
    view = layout().part_view("latent", layer=0, part="latent")
    return entries_to_words(jnp.zeros((3, 31), jnp.bfloat16), view)


def raise_on_double_free():
    pool = allocator.free(state(), pages("latent", 3))
    allocator.raise_on_error(pool)


def extend_with(space):
    table = VirtualPages(ids=jnp.zeros((1, 4), jnp.int32), space=space)
    ones = jnp.ones(1, jnp.int32)
    return allocator.alloc_extend(
        state(), {"latent": table}, ones, ones, max_new_pages=1
    )


def append_of_another_space():
    table = VirtualPages(ids=jnp.zeros((1, 4), jnp.int32), space="latent")
    ones = jnp.ones(1, jnp.int32)
    return allocator.append_pages(table, pages("state", 1), ones, ones)


PHYSICAL = PhysicalPages(ids=np.zeros(1, np.int32), sub_pool="latent")
KERNEL = KernelBlocks(ids=np.zeros(1, np.int32), sub_pool="latent")
VIRTUAL = VirtualPages(ids=np.zeros(1, np.int32), space="latent")
require_latent = ft.partial(
    require_ids, kind=VirtualPages, owner="latent", argument="pages"
)

CASES = {
    # Ids.
    "ids without a space": Case(
        IdSpaceError,
        r"pages takes virtual page ids of 'latent', not ndarray without a space; only "
        r"the translator turns one space into the next",
        lambda: require_latent(np.zeros(1, np.int32)),
    ),
    "physical for virtual ids": Case(
        IdSpaceError,
        r"pages takes virtual page ids of 'latent', not physical page ids",
        lambda: require_latent(PHYSICAL),
    ),
    "kernel for virtual ids": Case(
        IdSpaceError,
        r"pages takes virtual page ids of 'latent', not kernel block ids",
        lambda: require_latent(KERNEL),
    ),
    "virtual for physical ids": Case(
        IdSpaceError,
        r"src takes physical page ids of 'latent', not virtual page ids",
        lambda: require_ids(VIRTUAL, PhysicalPages, owner="latent", argument="src"),
    ),
    "pages of another sub-pool": Case(
        IdSpaceError,
        r"pages takes virtual page ids of 'latent', not of 'state'",
        append_of_another_space,
    ),
    "table of another sub-pool": Case(
        IdSpaceError,
        r"tables\['latent'\] takes virtual page ids of 'latent', not of 'state'",
        lambda: extend_with("state"),
    ),
    "source of another sub-pool": Case(
        IdSpaceError,
        r"src takes physical page ids of 'latent', not of 'state'",
        lambda: copy_between(PHYSICAL.replace(sub_pool="state"), PHYSICAL),
    ),
    "destination of another sub-pool": Case(
        IdSpaceError,
        r"dst takes physical page ids of 'latent', not of 'state'",
        lambda: copy_between(PHYSICAL, PHYSICAL.replace(sub_pool="state")),
    ),
    # The pool.
    "triton that is not installed": Case(
        UnsupportedError,
        r"'triton' needs Triton, which is not installed; install ukv\[cuda12\]",
        copy_with_triton,
    ),
    "values of another width": Case(
        ValueError,
        r"values of latent.latent have shape \(3, 31\), the last dimensions must be "
        r"\(32,\)",
        wide_write,
    ),
    "error word": Case(
        PoolStateError,
        r"sub-pool 'latent': DOUBLE_FREE: a page was released more often than",
        raise_on_double_free,
    ),
    # The allocator.
    "names that differ": Case(
        SpecError,
        r"num_pages has \['latent'\], max_pages \['state'\]: name the same sub-pools",
        lambda: allocator.alloc(state(), {"latent": 1}, max_pages={"state": 1}),
    ),
    "count above its bound": Case(
        SpecError,
        r"num_pages\['latent'\]=5 must be in \[0, 4\]",
        lambda: allocator.alloc(state(), {"latent": 5}, max_pages={"latent": 4}),
    ),
    "negative count": Case(
        SpecError,
        r"num_pages\['latent'\]=-1 must be in \[0, 4\]",
        lambda: allocator.alloc(state(), {"latent": -1}, max_pages={"latent": 4}),
    ),
    "alloc of an unknown sub-pool": Case(
        UnknownSubPoolError,
        r"no sub-pool 'kv'; this pool has state, latent",
        lambda: allocator.alloc(state(), {"kv": 1}, max_pages={"kv": 4}),
    ),
    "alloc of a window": Case(
        UnknownSubPoolError,
        r"'window' uses the ids of 'full'",
        lambda: allocator.alloc(
            poisoned(windows()), {"window": 1}, max_pages={"window": 4}
        ),
    ),
    "free of an unknown sub-pool": Case(
        UnknownSubPoolError,
        r"no sub-pool 'kv'",
        lambda: allocator.free(state(), pages("kv", 1)),
    ),
    "free through a window": Case(
        UnknownSubPoolError,
        r"free pages through 'full'",
        lambda: allocator.free(poisoned(windows()), pages("window", 1)),
    ),
    "window half of a sub-pool without": Case(
        SpecError,
        r"sub-pool 'latent' owns its ids, so its pages have no second half: call free",
        lambda: allocator.free_window(state(), "latent", pages("latent", 1)),
    ),
    "window half by the ids of another space": Case(
        IdSpaceError,
        r"pages takes virtual page ids of 'full', not of 'window'",
        lambda: allocator.free_window(
            poisoned(windows()), "window", pages("window", 1)
        ),
    ),
    "copy in an unknown sub-pool": Case(
        UnknownSubPoolError,
        r"no sub-pool 'kv'",
        lambda: allocator.copy_page(state(), pages("kv", 1)),
    ),
    "compaction of a static pool": Case(
        SpecError,
        r"a static pool has fixed borders and nothing to compact: use a",
        lambda: allocator.compact(static()),
    ),
    "room in a static pool": Case(
        SpecError,
        r"a static pool has fixed borders and nothing to compact",
        lambda: allocator.make_room(static(), {"latent": 1}),
    ),
    "broken invariant": Case(
        PoolStateError,
        r"sub-pool 'latent'",
        lambda: allocator.verify(
            state().replace(counters=state().counters.at[1, LIVE].add(1))
        ),
    ),
    "holders of another length": Case(
        SpecError,
        r"holders\['latent'\] is int32\[3\], must be int32\[32\]: one count for each",
        lambda: allocator.verify(state(), holders={"latent": np.zeros(3, np.int32)}),
    ),
    "holders of an unknown sub-pool": Case(
        UnknownSubPoolError,
        r"no sub-pool 'kv'",
        lambda: allocator.verify(state(), holders={"kv": np.zeros(3, np.int32)}),
    ),
    "mirror of a negative count": Case(
        SpecError,
        r"num_pages\['latent'\]=-1 must be an integer of 0 or more",
        lambda: PoolMirror.create(layout()).can_allocate({"latent": -1}),
    ),
    "mirror of half a page": Case(
        SpecError,
        r"num_pages\['latent'\]=1\.5 must be an integer of 0 or more",
        lambda: PoolMirror.create(layout()).can_allocate({"latent": 1.5}),
    ),
    "half a page": Case(
        SpecError,
        r"num_pages\['latent'\]=1\.5 must be an integer",
        lambda: allocator.alloc(state(), {"latent": 1.5}, max_pages={"latent": 2}),
    ),
    "free of physical ids": Case(
        IdSpaceError,
        r"pages takes virtual page ids, not physical page ids",
        lambda: allocator.free(
            state(), PhysicalPages(ids=jnp.zeros(1, jnp.int32), sub_pool="latent")
        ),
    ),
    "share of an array": Case(
        IdSpaceError,
        r"pages takes virtual page ids, not ArrayImpl without a space",
        lambda: allocator.share(state(), jnp.zeros(1, jnp.int32)),
    ),
    "copy of an array": Case(
        IdSpaceError,
        r"pages takes virtual page ids, not ArrayImpl without a space",
        lambda: allocator.copy_page(state(), jnp.zeros(1, jnp.int32)),
    ),
    "mirror of too many pages": Case(
        BudgetError,
        r"\{'latent': 32\} pages do not fit in place: 15,872 of 15,872 bytes are free",
        lambda: PoolMirror.create(layout()).alloc({"latent": 32}),
    ),
    "mirror that releases too many": Case(
        BudgetError,
        r"3 pages of 'latent' cannot be released: 2 live",
        lambda: PoolMirror.create(layout()).alloc({"latent": 2}).release({"latent": 3}),
    ),
}
