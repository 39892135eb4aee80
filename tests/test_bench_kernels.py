"""The kernel benchmark: wrong results are not timed, peers are matched by shape."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import tuning
from scripts import tune_kernels
from scripts.benchmarking import Result
from scripts.kernel_benches import roofline
from scripts.kernel_benches.case import (
    BenchCase,
    Prepared,
    WrongResultError,
    measure,
)
from scripts.kernel_benches.registry import all_cases, best_peer, read_peers, select
from ukv.implementation import SUPPORT

CASES = all_cases()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Width:
    """A configuration of a made-up kernel."""

    width: int


def made_up_case(error=0.0, slow_default=False, small=True, configs=()):
    def prepare(implementation, config):
        del implementation
        size = 1 << 12 if config is not None or not slow_default else 1 << 21
        step = jax.jit(lambda x: jnp.sin(x) + 1, donate_argnums=0)
        return Prepared(
            step=step, state=jnp.ones(size), calls=1, touched_bytes=8, error=error
        )

    return BenchCase(
        op="mla_decode",
        shape={"heads": 4, "batch": 2, "context": 64},
        moved_bytes=8,
        flops=2,
        max_error=1e-3,
        implementations=("xla",),
        prepare=prepare,
        configs={"xla": configs} if configs else {},
        small=small,
    )


@pytest.mark.parametrize("case", [c for c in CASES if c.small], ids=str)
def test_small_case_is_right_and_timed(case):
    result = measure(case, "xla", seconds=0.01)
    assert result.us > 0
    assert result.error <= case.max_error


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "implementation"),
    [(c, name) for c in CASES for name in c.implementations if not c.small],
    ids=str,
)
def test_case_is_right_on_the_card(case, implementation):
    prepared = case.prepare(implementation, None)
    assert prepared.error <= case.max_error


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case_names_what_exists(case):
    op = {
        "page_move": "copy_pages",
        "kv_write": "write_kv",
        "gqa_extend": "gqa_attention",
        "kda_decode": "kda_decode_step",
        "gdn_decode": "gdn_decode_step",
    }.get(case.op, case.op)
    assert set(case.implementations) <= {line.implementation for line in SUPPORT[op]}
    assert case.moved_bytes > 0
    json.dumps(dict(case.shape))


@pytest.mark.parametrize("error", [2e-3, float("nan")])
def test_a_wrong_result_is_not_timed(error):
    with pytest.raises(WrongResultError, match="is above"):
        measure(made_up_case(error=error), "xla")


def test_a_warm_cache_is_refused():
    with pytest.raises(ValueError, match="raise its calls"):
        measure(made_up_case(small=False), "xla")


def test_select_refuses_what_is_not_there():
    with pytest.raises(ValueError, match="no op 'mla'; there are"):
        select(CASES, ops=["mla"], where={}, small=False)
    with pytest.raises(ValueError, match="--list"):
        select(CASES, ops=[], where={"page_bytes": "7"}, small=False)


def test_peers_are_matched_by_every_key_of_theirs(tmp_path):
    lines = [("slow", 64, 9.0), ("fast", 64, 5.0), ("other", 128, 1.0)]
    results = [
        {"op": "mla_decode", "implementation": n, "shape": {"batch": b}, "us": us}
        for n, b, us in lines
    ]
    path = tmp_path / "peers.json"
    path.write_text(json.dumps({"results": results}))
    peers = read_peers(path)
    best = best_peer(peers, "mla_decode", {"batch": 64, "context": 8192})
    assert best is not None
    assert (best.name, best.us) == ("fast", 5.0)
    assert best_peer(peers, "gqa_decode", {"batch": 64}) is None
    assert best_peer(peers, "mla_decode", {"context": 8192}) is None
    path.write_text("{}")
    with pytest.raises(ValueError, match="not a benchmark record"):
        read_peers(path)


def test_recorded_peers_are_read():
    assert len(read_peers(benchmark_records() / "peers_h200.json")) > 100


def benchmark_records():
    return tuning.TUNED.parents[1] / "docs" / "benchmarks"


def test_roofline_is_drawn(tmp_path):
    result = Result(op="a", implementation="xla", shape={}, us=1.0, tflops=2.0)
    path = tmp_path / "roofline.png"
    limits = {"read_gbps": 4500.0, "matmul_tflops": 700.0}
    roofline.draw([result], [60.0], limits, "card", path)
    assert path.stat().st_size > 1000


def test_tuning_keeps_the_faster_configuration_with_its_evidence(tmp_path, monkeypatch):
    facts = {"driver": "1", "versions": {}, "commit": "c", "command": "tune"}
    case = made_up_case(slow_default=True, configs=(Width(width=3),))
    entry = tune_kernels.tune(case, "xla", facts)
    assert entry is not None
    assert entry["config"] == {"width": 3}
    assert entry["evidence"]["us"] < entry["evidence"]["default_us"]
    monkeypatch.setattr(tuning, "TUNED", tmp_path)
    tune_kernels.merge(tuning.tuned_path("Card 1"), "Card 1", [entry])
    tune_kernels.merge(tuning.tuned_path("Card 1"), "Card 1", [entry])
    table = json.loads((tmp_path / "card_1.json").read_text())
    assert len(table["entries"]) == 1
    found = tuning.tuned_config(
        "mla_decode", "xla", key={"heads": 4}, batch=9, device_kind="Card 1"
    )
    assert found == {"width": 3}


def test_tuning_takes_no_wrong_configuration():
    case = made_up_case(error=1.0, slow_default=True, configs=(Width(width=3),))
    facts = {"driver": "1", "versions": {}, "commit": "c", "command": "tune"}
    assert tune_kernels.tune(case, "xla", facts) is None


def test_nearest_batch_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "TUNED", tmp_path)
    entries = [
        {
            "op": "gqa_decode",
            "implementation": "triton",
            "key": {"heads": 8},
            "batch": batch,
            "config": {"splits": batch},
            "evidence": {},
        }
        for batch in (1, 16, 128)
    ]
    tune_kernels.merge(tuning.tuned_path("Card 2"), "Card 2", entries)

    def splits(batch, **key):
        found = tuning.tuned_config(
            "gqa_decode", "triton", key=key, batch=batch, device_kind="Card 2"
        )
        return found and found["splits"]

    assert [splits(n, heads=8) for n in (1, 3, 12, 50, 4096)] == [1, 1, 16, 128, 128]
    assert splits(1, heads=9) is None
