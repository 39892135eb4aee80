"""Layouts: budgets, names, borders, what fits."""

import functools as ft

from tests.bad_input.case import Case
from tests.bad_input.specs import attention, latent
from tests.tagged_pools import full_spec, latent_spec, state_spec, window_spec
from ukv.errors import BudgetError, SpecError, UnknownSubPoolError
from ukv.layout import (
    RequestShape,
    max_pages,
    max_tokens,
    smallest_pool_bytes,
    static_layout,
    unified_layout,
)


@ft.cache
def layout():
    return unified_layout([state_spec(), latent_spec()], pool_bytes=512 * 31)


@ft.cache
def windows():
    return unified_layout([full_spec(), window_spec()], pool_bytes=512 * 21)


CASES = {
    "tokens of no request": Case(
        SpecError,
        r"num_requests=0 must be 1 or more",
        lambda: max_tokens(layout(), num_requests=0),
    ),
    "no specs": Case(
        SpecError,
        r"specs must describe at least one sub-pool",
        lambda: unified_layout([], pool_bytes=2**20),
    ),
    "name twice": Case(
        SpecError,
        r"sub-pool names \['latent', 'latent'\] must be distinct",
        lambda: unified_layout([latent(), latent()], pool_bytes=2**20),
    ),
    "owner that is not there": Case(
        SpecError,
        r"'window' shares the ids of 'full', but the pool has only latent, window",
        lambda: unified_layout([latent_spec(), window_spec()], pool_bytes=2**20),
    ),
    "owner that does not grow": Case(
        SpecError,
        r"must share the ids of a full-attention or MLA sub-pool, not of 'state'",
        lambda: unified_layout(
            [state_spec(), window_spec(shares_ids="state")], pool_bytes=2**20
        ),
    ),
    "owner that is a window": Case(
        SpecError,
        r"must share the ids of a full-attention or MLA sub-pool, not of 'other'",
        lambda: unified_layout(
            [window_spec("other", shares_ids=None), window_spec(shares_ids="other")],
            pool_bytes=2**20,
        ),
    ),
    "owner of another page size": Case(
        SpecError,
        r"has page_size=8, but shares the ids of 'full' with page_size=4: make them",
        lambda: unified_layout(
            [full_spec(), window_spec(page_size=8)], pool_bytes=2**20
        ),
    ),
    "budget": Case(
        BudgetError,
        r"pool_bytes=1,279 is less than the 1,280 bytes that one request needs "
        r"\(bytes of a page: state 768, latent 512\); give at least that",
        lambda: unified_layout([state_spec(), latent_spec()], pool_bytes=1_279),
    ),
    "fractional budget": Case(
        BudgetError,
        r"pool_bytes=80000000000.0 must be a whole number of bytes",
        lambda: unified_layout([latent_spec()], pool_bytes=80e9),
    ),
    "negative budget": Case(
        BudgetError,
        r"pool_bytes=-1 is less than",
        lambda: unified_layout([latent_spec()], pool_bytes=-1),
    ),
    "too many rows": Case(
        BudgetError,
        r"sub-pool 'latent' would have 2,147,483,648 kernel rows; int32 row ids "
        r"allow fewer than 2,147,483,648: take a smaller budget or wider rows",
        lambda: unified_layout(
            [latent(latent_dim=8, rope_dim=0)], pool_bytes=2**31 * 16
        ),
    ),
    "too many rows in the buffer": Case(
        BudgetError,
        r"rows of 16 bytes, the common measure of the row blocks; .* budget below "
        r"34,359,738,368",
        lambda: unified_layout(
            [
                latent(latent_dim=24, rope_dim=0, page_size=1),
                attention(head_dim=40, page_size=1),
            ],
            pool_bytes=2**31 * 17,
        ),
    ),
    "too many rows of a static sub-pool": Case(
        BudgetError,
        r"sub-pool 'latent' would have 2,147,483,664 kernel rows",
        lambda: static_layout([latent()], num_pages={"latent": 2**27}),
    ),
    "smallest pool of no token": Case(
        SpecError,
        r"num_tokens=0 and chunk_len=0 must be 1 or more",
        lambda: smallest_pool_bytes([latent_spec()], num_tokens=0),
    ),
    "static pool without a count": Case(
        SpecError,
        r"num_pages has \['latent'\], the specs are \['latent', 'state'\]: give a",
        lambda: static_layout([state_spec(), latent_spec()], num_pages={"latent": 1}),
    ),
    "static pool without pages": Case(
        SpecError,
        r"num_pages=\{'latent': 0\} must be integers of 1 or more",
        lambda: static_layout([latent_spec()], num_pages={"latent": 0}),
    ),
    "static count that is no integer": Case(
        SpecError,
        r"num_pages=\{'latent': 1\.5\} must be integers of 1 or more",
        lambda: static_layout([latent_spec()], num_pages={"latent": 1.5}),
    ),
    "layer that is no integer": Case(
        SpecError,
        r"layer=0\.5 of 'latent' must be an integer in \[0, ",
        lambda: layout().part_view("latent", layer=0.5, part="latent"),
    ),
    "unknown sub-pool": Case(
        UnknownSubPoolError,
        r"^no sub-pool 'kv'; this pool has state, latent$",
        lambda: layout().sub_pool("kv"),
    ),
    "sub-pool that owns no ids": Case(
        UnknownSubPoolError,
        r"'window' uses the ids of 'full': allocate and free pages through 'full'",
        lambda: windows().owner("window"),
    ),
    "layer": Case(
        SpecError,
        r"layer=2 of 'latent' must be an integer in \[0, 2\)",
        lambda: layout().part_view("latent", layer=2, part="latent"),
    ),
    "negative layer": Case(
        SpecError,
        r"layer=-1 of 'latent' must be an integer in \[0, 2\)",
        lambda: layout().part_view("latent", layer=-1, part="latent"),
    ),
    "part": Case(
        SpecError,
        r"part='k' of 'state' must be one of \['recurrent', 'conv'\]",
        lambda: layout().part_view("state", layer=0, part="k"),
    ),
    "page size of a view": Case(
        SpecError,
        r"latent.latent cannot be read in pages of 3: that must divide page_size=4",
        lambda: layout().part_view("latent", layer=0, part="latent").with_page_size(3),
    ),
    "request of no token": Case(
        SpecError,
        r"num_tokens=0 and chunk_len=1 must be 1 or more",
        lambda: RequestShape(num_tokens=0),
    ),
    "chunk of no token": Case(
        SpecError,
        r"num_tokens=9 and chunk_len=0 must be 1 or more",
        lambda: RequestShape(num_tokens=9, chunk_len=0),
    ),
    "tokens of windows and states": Case(
        SpecError,
        r"no sub-pool keeps every token: .* ask max_requests instead",
        lambda: max_tokens(
            unified_layout(
                [state_spec(), window_spec(shares_ids=None)], pool_bytes=2**16
            )
        ),
    ),
    "capacity of an unknown sub-pool": Case(
        UnknownSubPoolError,
        r"no sub-pool 'kv'",
        lambda: max_pages(layout(), "latent", {"kv": 1}),
    ),
}
