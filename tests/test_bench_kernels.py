"""The kernel benchmark: wrong results are not timed, peers are matched by shape."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from scripts import bench_kernels, benchmark_table, benchmarking, tune_kernels
from scripts.kernel_benches import roofline
from scripts.kernel_benches.case import (
    COLD_BYTES,
    BenchCase,
    MergedCallsError,
    Program,
    WrongResultError,
    check,
    compile_program,
    launches,
    measure,
)
from scripts.kernel_benches.comparison import (
    Line,
    as_markdown,
    as_text,
    best_peer,
    read_lines,
    rows,
    verdict,
)
from scripts.kernel_benches.precompile import Job, compiled_programs, pack_programs
from scripts.kernel_benches.random_words import random_words
from scripts.kernel_benches.registry import all_cases, select
from tests.gpu_compile import compile_for_h200, requires_h200_compiler
from ukv.implementation import SUPPORT, Target

CASES = all_cases()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Width:
    """A configuration of a made-up kernel."""

    width: int


def made_up_case(error=0.0, slow_default=False, small=True, configs=()):
    def program(implementation, config):
        del implementation
        size = 1 << 12 if config is not None or not slow_default else 1 << 21
        return Program(
            make=lambda: jnp.ones(size),
            step=lambda x: jnp.sin(x) + 1,
            error=lambda x: jnp.float32(error),
            calls=1,
            touched_bytes=8,
        )

    return BenchCase(
        op="mla_decode",
        shape={"heads": 4, "batch": 2, "context": 64},
        moved_bytes=8,
        flops=2,
        max_error=1e-3,
        implementations=("xla",),
        program=program,
        configs={"xla": configs} if configs else {},
        small=small,
    )


@pytest.mark.parametrize("case", [c for c in CASES if c.small], ids=str)
def test_small_case_is_right_and_timed(case):
    result = measure(case, "xla", seconds=0.01)
    # What calls add to a step of other work may be less than the noise.
    assert result.us > 0 or case.program("xla", None).without is not None
    assert result.error <= case.max_error


def test_the_step_without_the_calls_is_subtracted(monkeypatch):
    case = made_up_case()
    program = case.program("xla", None)
    program = dataclasses.replace(program, without=lambda x: x, calls=3)
    compiled = compile_program(program)
    times = {compiled.step: 10.0, compiled.without: 4.0}
    monkeypatch.setattr(
        "scripts.kernel_benches.case.step_us",
        lambda step, state, seconds: (times[step], state),
    )
    assert measure(case, "xla", compiled=compiled).us == 2


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "implementation"),
    [(c, name) for c in CASES for name in c.implementations if not c.small],
    ids=str,
)
def test_case_is_right_on_the_card(case, implementation):
    check(case, implementation, compile_program(case.program(implementation, None)))


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


@pytest.mark.parametrize("case", [c for c in CASES if not c.small], ids=str)
def test_a_step_touches_more_than_the_cache_holds(case):
    for implementation in case.implementations:
        program = case.program(implementation, None)
        assert program.touched_bytes >= COLD_BYTES


def first_of_each(implementation):
    cases = {case.op: case for case in reversed(CASES) if not case.small}
    return [c for c in cases.values() if implementation in c.implementations]


@requires_h200_compiler
@pytest.mark.parametrize(
    ("case", "implementation"),
    [
        *((case, "triton") for case in first_of_each("triton")),
        *((c, "mosaic_gpu") for c in first_of_each("mosaic_gpu") if "extend" in c.op),
    ],
    ids=lambda x: x if isinstance(x, str) else x.op,
)
def test_no_two_calls_of_a_step_are_merged(case, implementation):
    program = case.program(implementation, None)
    state = jax.eval_shape(program.make)
    found = launches(compile_for_h200(program.step, state, donate_argnums=0).hlo_text)
    assert found
    assert {name: n for name, n in found.items() if n % program.calls} == {}


def test_a_step_of_merged_calls_is_refused(monkeypatch):
    monkeypatch.setattr(
        "scripts.kernel_benches.case.launches", lambda _: {"gate": 2, "scan": 3}
    )
    program = dataclasses.replace(made_up_case().program("xla", None), calls=2)
    with pytest.raises(MergedCallsError, match="scan is launched 3 times in 2 calls"):
        compile_program(program)


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
        for n, b, us in [*lines, ("target", 64, 4.0), ("unmeasured", 64, None)]
    ]
    path = tmp_path / "peers.json"
    path.write_text(json.dumps({"results": results}))
    peers = read_lines(path)
    best = best_peer(peers, "mla_decode", {"batch": 64, "context": 8192})
    assert best is not None
    assert (best.name, best.us) == ("fast", 5.0)
    assert best_peer(peers, "gqa_decode", {"batch": 64}) is None
    assert best_peer(peers, "mla_decode", {"context": 8192}) is None
    path.write_text("{}")
    with pytest.raises(ValueError, match="not a benchmark record"):
        read_lines(path)


def line(name, **fields):
    return Line(op="mla_decode", name=name, shape={"batch": 64}, **fields)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ({"us": 5.0}, "<= 5 us: yes"),
        ({"us": 4.0}, "<= 4 us: no"),
        ({"us": None, "tflops": 560.0}, ">= 560 TFLOP/s: yes"),
        ({"us": None, "of_ceiling": 0.9}, ">= 90%: no"),
    ],
)
def test_target_says_whether_it_is_reached(target, said):
    mine = line("triton", us=5.0, tflops=570.0, of_ceiling=0.85)
    assert verdict([line("target", **target), line("peer", us=1.0)], mine) == said


def test_table_has_peer_and_target():
    mine = line("triton", us=5.0, of_ceiling=0.85, error=1e-3)
    peers = [line("fast", us=10.0), line("target", us=6.0)]
    table = rows([mine, line("absent", us=None)], peers)
    wanted = "batch=64", "triton", "5.0", "85.0%", "1.0e-03", "10 us, fast", "2.00"
    assert table[1:] == [("mla_decode", *wanted, "<= 6 us: yes")]
    assert as_text(table).splitlines()[1].startswith("mla_decode")
    assert as_markdown(table).splitlines()[1].count("---") == len(table[0])


def test_a_record_is_printed_as_markdown(monkeypatch, capsys):
    records = benchmark_records()
    arguments = ["table", str(records / "kernels_h200.json"), "--op", "gqa_decode"]
    for name in ("peers_h200.json", "targets_h200.json"):
        arguments += ["--against", str(records / name)]
    monkeypatch.setattr("sys.argv", [*arguments, "--with-target"])
    benchmark_table.main()
    header, _, *lines = capsys.readouterr().out.splitlines()
    assert header.startswith("| op | shape |")
    assert lines
    assert all("<= " in line or ">= " in line for line in lines)


@pytest.mark.parametrize(
    "name", ["peers_h200.json", "peers_fla_h200.json", "targets_h200.json"]
)
def test_recorded_peers_and_targets_belong_to_cases(name):
    lines = read_lines(benchmark_records() / name)
    timed = [case for case in CASES if not case.small]
    without = [
        (line.op, dict(line.shape))
        for line in lines
        if not any(
            case.op == line.op
            and line.shape.keys() <= case.shape.keys()
            and all(case.shape[key] == value for key, value in line.shape.items())
            for case in timed
        )
    ]
    assert without == []


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
)
def test_random_words_are_numbers_of_both_signs(dtype):
    words = jax.jit(random_words, static_argnums=(0, 1))((64, 33), dtype)
    values = np.asarray(words).view(jnp.dtype(dtype)).astype(np.float32)
    assert np.abs(values).min() >= 0.5
    assert np.abs(values).max() < 2
    assert 0.45 < np.mean(values > 0) < 0.55
    with pytest.raises(ValueError, match="ends in 1"):
        random_words((2, 2), dtype, smallest=0.25)


def test_programs_of_another_process_are_measured():
    where = {"layers": "2"}
    (case,) = select(CASES, ops=["kv_write"], where=where, small=True)
    jobs = [Job(case=case, implementation=name) for name in ("xla", "mosaic_gpu")]
    good, refused = pack_programs(jobs, 1)
    assert "UnsupportedError" in refused.refusal
    result = measure(case, "xla", compiled=good.load(), seconds=0.01)
    assert result.error == 0


def benchmark_records():
    return tuning.TUNED.parents[1] / "docs" / "benchmarks"


def test_a_run_writes_its_record_as_it_goes(tmp_path, monkeypatch, capsys):
    path = tmp_path / "record.json"
    arguments = ["bench", "--small", "--op", "page_move", "--op", "mla_decode"]
    arguments += ["--implementation", "xla", "--seconds", "0.01", "--commit", "c"]
    target = {"op": "mla_decode", "implementation": "target", "us": 1e6}
    targets = tmp_path / "targets.json"
    targets.write_text(json.dumps({"results": [target | {"shape": {"query": 3}}]}))
    arguments += ["--json", str(path), "--against", str(targets)]
    monkeypatch.setattr("sys.argv", arguments)
    written, write = [], benchmarking.write_record
    monkeypatch.setattr(
        benchmarking,
        "write_record",
        lambda *given: written.append(len(given[2])) or write(*given),
    )
    # Times of a machine that may be busy, or fast, decide nothing here.
    limits = {"read_gbps": 1.0, "copy_gbps": 1.0, "matmul_tflops": 1.0}
    monkeypatch.setattr(benchmarking, "ceilings", lambda **sizes: limits)
    measure = bench_kernels.measure
    monkeypatch.setattr(
        bench_kernels,
        "measure",
        lambda *given, **options: dataclasses.replace(
            measure(*given, **options), us=100.0
        ),
    )
    assert bench_kernels.main() == 0
    *table, last = capsys.readouterr().out.splitlines()
    record = json.loads(path.read_text())
    assert json.loads(last) == record
    assert written == [1, 2, 3, 4]
    # The case with a target came first.
    assert record["results"][0]["shape"]["query"] == 3
    assert table[1].rstrip().endswith("<= 1e+06 us: yes")
    assert record["ceilings"] == limits
    first = record["results"][0]
    (case,) = select(CASES, ops=["mla_decode"], where={"query": "3"}, small=True)
    assert first["of_ceiling"] == round(case.share(100, limits), 4) > 0


def test_ceilings_are_measured():
    found = benchmarking.ceilings(num_bytes=1 << 16, size=16)
    assert sorted(found) == ["copy_gbps", "matmul_tflops", "read_gbps"]
    assert min(found["copy_gbps"], found["read_gbps"]) > 0


def test_roofline_is_drawn(tmp_path):
    lines = [line("xla", us=1.0, gbps=40.0, tflops=2.0), line("triton", us=1.0)]
    path = tmp_path / "roofline.png"
    limits = {"read_gbps": 4500.0, "matmul_tflops": 700.0}
    roofline.draw(lines, limits, "card", path)
    assert path.stat().st_size > 1000


def candidates(case):
    configs = (None, *case.configs["xla"])
    jobs = [Job(case=case, implementation="xla", config=config) for config in configs]
    programs = compiled_programs(jobs, 1)
    return tune_kernels.Candidates(case=case, implementation="xla", programs=programs)


def test_tuning_keeps_the_faster_configuration_with_its_evidence(tmp_path, monkeypatch):
    facts = {"driver": "1", "versions": {}, "commit": "c", "command": "tune"}
    case = made_up_case(slow_default=True, configs=(Width(width=3),))
    entry = tune_kernels.tune(candidates(case), facts)
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


def test_tuning_keeps_the_default_of_other_batches():
    def entry(heads, batch, **config):
        names = {
            "op": "mla_decode",
            "implementation": "triton",
            "key": {"heads": heads},
        }
        return {**names, "batch": batch, "config": config}

    found = [entry(8, 1, width=3), entry(8, 64), entry(16, 1), entry(16, 64)]
    assert tune_kernels.worth_keeping(found) == found[:2]
    # Two contexts of a batch that do not agree.
    found += [entry(8, 1, width=4), entry(8, 16, width=4)]
    kept = tune_kernels.worth_keeping(found)
    assert kept == [entry(8, 1), entry(8, 64), entry(8, 16, width=4)]


def test_tuning_writes_nothing_that_no_kernel_reads(capsys):
    names = ("op", "implementation")
    pairs = [("kda_prefill", "triton"), *sorted(tuning.ASKED_FOR)]
    found = [dict(zip(names, pair, strict=True)) for pair in pairs]
    assert tune_kernels.asked_for(found) == found[1:]
    assert "kda_prefill on triton reads no table" in capsys.readouterr().err
    asking = {
        (call[0], call[1])
        for path in tuning.TUNED.parent.rglob("*.py")
        for call in re.findall(r'tuned_config\(\s*"(\w+)", "(\w+)"', path.read_text())
    }
    assert asking == tuning.ASKED_FOR


def test_a_gain_that_is_not_seen_twice_is_none(monkeypatch):
    facts = {"driver": "1", "versions": {}, "commit": "c", "command": "tune"}
    case = made_up_case(configs=(Width(width=3), Width(width=4)))
    times = {0: [10.0, 9.0], 1: [8.0, 8.9], 2: [9.9]}
    monkeypatch.setattr(
        tune_kernels.Candidates,
        "measured",
        lambda _, place: benchmarking.Result(
            op="mla_decode", implementation="xla", shape={}, us=times[place].pop(0)
        ),
    )
    entry = tune_kernels.tune(candidates(case), facts)
    assert entry is not None
    assert entry["config"] == {}
    assert entry["evidence"]["us"] == 9


@pytest.mark.parametrize("op", ["gqa_decode", "mla_decode"])
def test_the_key_of_a_case_is_what_its_kernel_asks_for(op, monkeypatch):
    h200 = Target(platform="gpu", capability=90)
    monkeypatch.setattr("ukv.implementation.default_target", lambda: h200)
    asked = []
    monkeypatch.setattr(
        f"pallas_kernels.{op}_triton.tuned_config",
        lambda *names, key, batch: asked.append((*names, key, batch)),
    )
    case = select(CASES, ops=[op], where={}, small=True)[0]
    program = case.program("triton", None)
    jax.eval_shape(program.step, jax.eval_shape(program.make))
    wanted = op, "triton", tune_kernels.key_of(case), case.shape["batch"]
    assert asked[0] == wanted


@pytest.mark.parametrize(
    "entry",
    [
        entry
        for path in sorted(tuning.TUNED.glob("*.json"))
        for entry in json.loads(path.read_text())["entries"]
    ],
    ids=lambda e: f"{e['op']}-{e['key']['page_size']}-{e['batch']}",
)
def test_a_kernel_runs_as_it_was_tuned(entry, monkeypatch):
    h200 = Target(platform="gpu", capability=90)
    monkeypatch.setattr("ukv.implementation.default_target", lambda: h200)
    op, kernels = entry["op"], f"pallas_kernels.{entry['op']}_triton"
    monkeypatch.setattr(
        f"{kernels}.tuned_config",
        functools.partial(tuning.tuned_config, device_kind="NVIDIA H200"),
    )
    launched = []

    def record(kernel, *operands, outputs, **options):
        del kernel, operands
        launched.append(options)
        return [jnp.zeros(out.shape, out.dtype) for out in outputs]

    monkeypatch.setattr(f"{kernels}.launch", record)
    cases = select(CASES, ops=[op], where={}, small=False)
    case = next(
        case for case in cases if dict(case.shape) == entry["evidence"]["shape"]
    )
    assert tune_kernels.key_of(case) == entry["key"]
    program = case.program("triton", None)
    jax.eval_shape(program.step, jax.eval_shape(program.make))
    wanted = entry["config"]
    first = launched[0]
    assert first["num_stages"] == wanted.get("num_stages", first["num_stages"])
    assert first["grid"][0] <= wanted.get("num_programs", first["grid"][0])
    evidence = entry["evidence"]
    is_default_kept = evidence["us"] == evidence["default_us"]
    assert is_default_kept == (not wanted)
    least = 1 - tune_kernels.LEAST_GAIN
    assert is_default_kept or evidence["us"] < least * evidence["default_us"]


def test_tuning_takes_no_wrong_configuration():
    case = made_up_case(error=1.0, slow_default=True, configs=(Width(width=3),))
    facts = {"driver": "1", "versions": {}, "commit": "c", "command": "tune"}
    assert tune_kernels.tune(candidates(case), facts) is None


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
