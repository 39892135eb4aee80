"""Every error that the specs, layouts and pool operations raise says what is wrong.

Each case is a call and the telling part of its message. The last test compares the
statements that the cases reach with all ``raise`` statements of the source, so that
a new message without a case fails.
"""

import ast
import dataclasses
import functools as ft
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ukv
from tests.tagged_pools import (
    full_spec,
    latent_spec,
    pages,
    poisoned,
    state_spec,
    window_spec,
)
from ukv import allocator
from ukv.allocator import PoolMirror
from ukv.errors import (
    BudgetError,
    IdSpaceError,
    PoolStateError,
    SpecError,
    UkvError,
    UnknownSubPoolError,
    UnsupportedError,
)
from ukv.ids import KernelBlocks, PhysicalPages, VirtualPages, require_ids
from ukv.layout import (
    RequestShape,
    max_pages,
    max_tokens,
    smallest_pool_bytes,
    static_layout,
    unified_layout,
)
from ukv.pool import LIVE, copy_pages
from ukv.pool.entries import entries_to_words
from ukv.pool.page_copy import _copy_with_kernel
from ukv.spec import (
    AttentionSpec,
    MLASpec,
    Part,
    StateSpec,
    gdn_state_spec,
    kda_state_spec,
    mamba2_state_spec,
)

# What a user without annotation checks would see.
pytestmark = pytest.mark.usefixtures("unchecked")

SOURCE = Path(ukv.__file__).parent
FLOAT32 = jnp.dtype("float32")


@dataclasses.dataclass(frozen=True)
class Case:
    """A call that must fail.

    Attributes:
      error: The type that it raises.
      match: A pattern in the message.
      call: The call.
    """

    error: type[Exception]
    match: str
    call: Callable[[], object]


def attention(**changes):
    fields = {"num_layers": 1, "page_size": 16, "num_kv_heads": 1, "head_dim": 16}
    return AttentionSpec(name="full", **{**fields, **changes})


def latent(**changes):
    fields = {"num_layers": 1, "page_size": 16, "latent_dim": 16, "rope_dim": 8}
    return MLASpec(name="latent", **{**fields, **changes})


def kda(**changes):
    fields = {"num_layers": 1, "num_heads": 1, "key_dim": 8, "value_dim": 8}
    return kda_state_spec(name="kda", **{**fields, "conv_width": 4, **changes})


def gdn(**changes):
    fields = {"num_layers": 1, "num_key_heads": 1, "num_value_heads": 1}
    fields |= {"key_dim": 8, "value_dim": 8, "conv_width": 4}
    return gdn_state_spec(name="gdn", **{**fields, **changes})


def mamba(**changes):
    fields = {"num_layers": 1, "num_heads": 1, "head_dim": 8, "state_dim": 8}
    fields |= {"num_groups": 1, "conv_width": 4}
    return mamba2_state_spec(name="mamba", **{**fields, **changes})


def part(name="s", shape=(4,), dtype=FLOAT32):
    return Part(name=name, shape=shape, dtype=dtype)


@ft.cache
def layout():
    return unified_layout([state_spec(), latent_spec()], pool_bytes=512 * 31)


@ft.cache
def windows():
    return unified_layout([full_spec(), window_spec()], pool_bytes=512 * 21)


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
    # Specs.
    "unknown dtype": Case(
        SpecError,
        r"spec 'kda': 'float7' is no dtype; allowed: float32, bfloat16",
        lambda: kda(state_dtype="float7"),
    ),
    "integer dtype": Case(
        SpecError,
        r"part 's': dtype int32 cannot be stored; allowed: float32",
        lambda: part(dtype=jnp.dtype("int32")),
    ),
    "dtype of attention": Case(
        SpecError,
        r"spec 'full': dtype float64 cannot be stored",
        lambda: attention(dtype=np.dtype("float64")),
    ),
    "dtype of a latent": Case(
        SpecError,
        r"spec 'latent': dtype bool cannot be stored",
        lambda: latent(dtype=np.dtype("bool")),
    ),
    "dtype of a convolution": Case(
        SpecError,
        r"spec 'kda': dtype int8 cannot be stored",
        lambda: kda(conv_dtype="int8"),
    ),
    "name of a spec": Case(
        SpecError,
        r"name='two words' must be a Python identifier",
        lambda: latent_spec("two words"),
    ),
    "name of a part": Case(
        SpecError, r"name='' must be a Python identifier", lambda: part(name="")
    ),
    "shape of a part": Case(
        SpecError,
        r"part 's': shape=\(\) must have a dimension",
        lambda: part(shape=()),
    ),
    "size of a part": Case(
        SpecError,
        r"part 's': shape\[1\]=0 must be a positive integer",
        lambda: part(shape=(4, 0)),
    ),
    "page size": Case(
        SpecError,
        r"spec 'latent': page_size=0 must be a positive integer",
        lambda: latent(page_size=0),
    ),
    "boolean size": Case(
        SpecError,
        r"spec 'full': num_layers=True must be a positive integer",
        lambda: attention(num_layers=True),
    ),
    "heads": Case(
        SpecError,
        r"spec 'full': num_kv_heads=-1 must be a positive integer",
        lambda: attention(num_kv_heads=-1),
    ),
    "value width": Case(
        SpecError,
        r"spec 'full': value_dim=0 must be a positive integer",
        lambda: attention(value_dim=0),
    ),
    "latent width": Case(
        SpecError,
        r"spec 'latent': latent_dim=0 must be a positive integer",
        lambda: latent(latent_dim=0),
    ),
    "rotary width": Case(
        SpecError,
        r"spec 'latent': rope_dim=-1 must be an integer of 0 or more",
        lambda: latent(rope_dim=-1),
    ),
    "window size": Case(
        SpecError,
        r"spec 'window': window_size=0 must be a positive integer",
        lambda: window_spec(window_size=0),
    ),
    "window that shares its own ids": Case(
        SpecError,
        r"shares_ids='window' must name another sub-pool, or be None",
        lambda: window_spec(shares_ids="window"),
    ),
    "window that shares the ids of no name": Case(
        SpecError,
        r"name='a b' must be a Python identifier",
        lambda: window_spec(shares_ids="a b"),
    ),
    "state without parts": Case(
        SpecError,
        r"spec 's': parts \[\] must be one or more distinct names",
        lambda: StateSpec(name="s", num_layers=1, parts=()),
    ),
    "state with a part twice": Case(
        SpecError,
        r"spec 's': parts \['s', 's'\] must be one or more distinct names",
        lambda: StateSpec(name="s", num_layers=1, parts=(part(), part())),
    ),
    "state without layers": Case(
        SpecError,
        r"spec 's': num_layers=0 must be a positive integer",
        lambda: StateSpec(name="s", num_layers=0, parts=(part(),)),
    ),
    "kda heads": Case(
        SpecError,
        r"spec 'kda': num_heads=0 must be a positive integer",
        lambda: kda(num_heads=0),
    ),
    "gdn heads": Case(
        SpecError,
        r"spec 'gdn': num_key_heads=0 must be a positive integer",
        lambda: gdn(num_key_heads=0),
    ),
    "mamba groups": Case(
        SpecError,
        r"spec 'mamba': num_groups=0 must be a positive integer",
        lambda: mamba(num_groups=0),
    ),
    # Layouts.
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
        r"num_pages=\{'latent': 0\} must be 1 or more",
        lambda: static_layout([latent_spec()], num_pages={"latent": 0}),
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
        r"layer=2 of 'latent' must be in \[0, 2\)",
        lambda: layout().part_view("latent", layer=2, part="latent"),
    ),
    "negative layer": Case(
        SpecError,
        r"layer=-1 of 'latent' must be in \[0, 2\)",
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
        r"num_pages\['latent'\]=-1 must be 0 or more",
        lambda: PoolMirror.create(layout()).can_allocate({"latent": -1}),
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


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_message(case):
    with pytest.raises(case.error, match=case.match) as caught:
        case.call()
    assert isinstance(caught.value, UkvError | ValueError)


def test_errors_are_the_built_in_kinds_too():
    assert issubclass(SpecError, ValueError)
    assert issubclass(BudgetError, ValueError)
    assert issubclass(IdSpaceError, TypeError)
    assert issubclass(UnknownSubPoolError, KeyError)
    assert issubclass(PoolStateError, RuntimeError)
    assert issubclass(UnsupportedError, NotImplementedError)


def test_wrong_ids_fail_while_tracing():
    table = VirtualPages(ids=jnp.zeros((1, 4), jnp.int32), space="state")
    ones = jnp.ones(1, jnp.int32)
    step = jax.jit(
        lambda pool, ids: allocator.alloc_extend(
            pool, {"latent": ids}, ones, ones, max_new_pages=1
        )
    )
    with pytest.raises(IdSpaceError, match="not of 'state'"):
        step.trace(state(), table)


def raise_statements():
    """(file, first line, last line) of each raise of these modules."""
    files = [SOURCE / "spec.py", SOURCE / "ids.py"]
    for package in ("layout", "pool", "allocator"):
        files += sorted((SOURCE / package).glob("*.py"))
    return {
        (file.relative_to(SOURCE).as_posix(), node.lineno, node.end_lineno)
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Raise)
    }


def test_every_raise_has_a_case():
    expected, reached = raise_statements(), set()
    assert len(expected) > 30
    for name, case in CASES.items():
        with pytest.raises(case.error) as caught:
            case.call()
        origin = traceback.extract_tb(caught.value.__traceback__)[-1]
        file = Path(origin.filename)
        assert file.is_relative_to(SOURCE), name
        reached |= {
            (path, first, last)
            for path, first, last in expected
            if path == file.relative_to(SOURCE).as_posix()
            and first <= origin.lineno <= last
        }
    missing = sorted(expected - reached)
    assert not missing, f"no case reaches {missing}"
