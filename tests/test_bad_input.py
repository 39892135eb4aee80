"""Every error that the specs, layouts and pool operations raise says what is wrong.

Each case is a call and the telling part of its message. The last test compares the
statements that the cases reach with all ``raise`` statements of the source, so that
a new message without a case fails.
"""

import ast
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import ukv
from tests.bad_input import layouts, pools, specs
from ukv import allocator
from ukv.errors import (
    BudgetError,
    IdSpaceError,
    PoolStateError,
    SpecError,
    UkvError,
    UnknownSubPoolError,
    UnsupportedError,
)
from ukv.ids import VirtualPages

# What a user without annotation checks would see.
pytestmark = pytest.mark.usefixtures("unchecked")

SOURCE = Path(ukv.__file__).parent
CASES = {**specs.CASES, **layouts.CASES, **pools.CASES}


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
        step.trace(pools.state(), table)


def raise_statements():
    """(file, first line, last line) of each raise of these modules."""
    files = [SOURCE / "ids.py"]
    for package in ("spec", "layout", "pool", "allocator"):
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
