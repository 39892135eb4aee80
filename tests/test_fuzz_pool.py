"""The fuzzer is clean on every shape, and sees operations that are broken."""

import importlib
import io
import json

import jax.numpy as jnp
import pytest
from tqdm import tqdm

from scripts.fuzz_pool import fuzz_one, is_clean, main
from scripts.pool_fuzzing.shapes import PAGE_SIZES, SHAPES
from ukv.allocator import PoolMirror
from ukv.pool import HOLES, LIVE

# The package exports functions of the same names.
MODULES = {
    name: importlib.import_module(f"ukv.allocator.{name}")
    for name in ("alloc", "compact", "copy_page", "free")
}


def run(shape: str, page_size: int, num_ops: int) -> dict:
    with tqdm(file=io.StringIO()) as progress:
        return fuzz_one(shape, page_size, num_ops=num_ops, seed=0, progress=progress)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "page_size"),
    [
        ("kda_mla", 16),
        ("swa_full", 1),
        ("state_swa_full", 64),
        ("four", 128),
        ("alone", 1),
        ("static", 16),
    ],
    ids=lambda value: str(value),
)
def test_histories_are_clean(shape, page_size):
    report = run(shape, page_size, 300)
    assert report["messages"] == []
    assert is_clean(report)
    assert report["ops"] >= 300
    assert (report["pages_moved"] > 0) == (shape != "static")
    kinds = report["kinds"]
    for kind in ("alloc", "alloc refused", "decode", "extend", "free", "share", "copy"):
        assert kinds[kind] > 0


def test_every_shape_is_run():
    assert set(SHAPES) >= {"kda_mla", "swa_full", "state_swa_full", "four", "alone"}
    assert PAGE_SIZES == (1, 16, 64, 128)
    floats = [sub.placement.value for sub in SHAPES["four"](16).sub_pools]
    assert floats == ["low", "float", "float", "high"]


def test_command_writes_its_report(tmp_path, capsys):
    target = tmp_path / "out" / "fuzz.json"
    arguments = ["--ops", "40", "--seed", "3", "--shape", "alone", "--page-size", "16"]
    assert main([*arguments, "--json", str(target)]) == 0
    report = json.loads(target.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
    assert report["ops"] >= 40
    assert report["violations"] == 0
    assert report["refused_although_bytes_fit"] == 0
    assert report["granted_although_refused_by_mirror"] == 0
    assert {"pages_moved", "seconds", "versions", "pools"} <= report.keys()
    assert [pool["shape"] for pool in report["pools"]] == ["alone"]


def test_command_refuses_no_operations(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--ops", "0"])
    assert "--ops 0 must be 1 or more" in capsys.readouterr().err


def keep_old_table(field):
    """Break an operation on a sub-pool: one of its tables stays as it was."""

    def wrap(operation):
        def broken(state, sub, *rest):
            found = operation(state, sub, *rest)
            after = found[0] if isinstance(found, tuple) else found
            old = getattr(state.tables[sub.index], field)
            tables = list(after.tables)
            tables[sub.index] = tables[sub.index].replace(**{field: old})
            after = after.replace(tables=tuple(tables))
            return (after, *found[1:]) if isinstance(found, tuple) else after

        return broken

    return wrap


def push_holes_twice(unbind):
    def broken(state, sub, ids, dies):
        state = unbind(state, sub, ids, dies)
        holes = state.counters[sub.index, HOLES]
        is_pushed = jnp.any(dies) & (holes > 0)
        tables = list(state.tables)
        found = tables[sub.index].holes
        top = found.at[holes - 1].get(mode="clip")
        slot = jnp.where(is_pushed, holes, sub.num_pages)
        tables[sub.index] = tables[sub.index].replace(
            holes=found.at[slot].set(top, mode="drop")
        )
        counters = state.counters.at[sub.index, HOLES].add(is_pushed.astype(jnp.int32))
        return state.replace(tables=tuple(tables), counters=counters)

    return broken


def lose_a_live_page(unbind):
    def broken(state, sub, ids, dies):
        state = unbind(state, sub, ids, dies)
        less = jnp.any(dies).astype(jnp.int32)
        return state.replace(counters=state.counters.at[sub.index, LIVE].add(-less))

    return broken


def copy_nothing(copy_pages):
    def broken(buffers, *rest, **options):
        return buffers

    return broken


def copy_one_page_less(copy_pages):
    def broken(buffers, layout, sub, src, dst, num_copies, **options):
        return copy_pages(buffers, layout, sub, src, dst, num_copies - 1, **options)

    return broken


def always_fits(fits_in_place):
    def broken(state, needs):
        return jnp.asarray(True)

    return broken


MUTATIONS = {
    "bind-forgets-p2v": ("alloc", "bind", keep_old_table("p2v"), "I1"),
    "bind-forgets-v2p": ("alloc", "bind", keep_old_table("v2p"), "I1"),
    "bind-counts-no-holder": ("alloc", "bind", keep_old_table("refcounts"), "I10"),
    "free-pushes-holes-twice": ("free", "_unbind", push_holes_twice, "I2"),
    "free-forgets-ids": ("free", "_unbind", keep_old_table("free_ids"), "I5"),
    "free-miscounts": ("free", "_unbind", lose_a_live_page, "I12"),
    "compaction-skips-v2p": (
        "compact",
        "_move_into_band",
        keep_old_table("v2p"),
        "I1",
    ),
    "compaction-moves-no-bytes": ("compact", "copy_pages", copy_nothing, "I7, I8"),
    "compaction-leaves-one": ("compact", "copy_pages", copy_one_page_less, "I7, I8"),
    "copy-on-write-copies-nothing": (
        "copy_page",
        "copy_pages",
        copy_nothing,
        "differ from their source",
    ),
    "alloc-grants-anything": ("alloc", "fits_in_place", always_fits, "mirror"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_broken_operation_is_seen(mutation, monkeypatch):
    module, name, wrap, text = MUTATIONS[mutation]
    broken = wrap(getattr(MODULES[module], name))
    # Where another module took the function by name, it is broken too.
    for found in MODULES.values():
        if name != "copy_pages" and hasattr(found, name):
            monkeypatch.setattr(found, name, broken)
    monkeypatch.setattr(MODULES[module], name, broken)
    report = run("alone", 16, 600)
    assert not is_clean(report)
    assert any(text in line for line in report["messages"]), report["messages"]


@pytest.mark.slow
def test_mirror_that_refuses_what_fits_is_seen(monkeypatch):
    monkeypatch.setattr(
        PoolMirror,
        "can_allocate",
        lambda self, counts, *, may_move=True: self.fits_in_place(counts),
    )
    report = run("swa_full", 1, 600)
    assert report["refused_although_bytes_fit"] > 0
    assert not is_clean(report)
