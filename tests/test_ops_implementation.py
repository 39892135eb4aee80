"""The dispatch rule and the one table behind it."""

import typing

import pytest

from ukv import implementation as module
from ukv.errors import UnsupportedError
from ukv.ops import SUPPORT, Implementation, OpCase, Support, Target, resolve

CASE = OpCase(
    page_size=64, storage_dtype="bfloat16", compute_dtype="bfloat16", widths=(576, 512)
)
CPU = Target(platform="cpu", capability=0)
A100 = Target(platform="gpu", capability=80)
B200 = Target(platform="gpu", capability=100)
H200 = Target(platform="gpu", capability=90)


@pytest.fixture
def table(monkeypatch):
    """A table with an op that has all three implementations, within limits."""
    lines = (
        Support(
            implementation="mosaic_gpu",
            platforms=("gpu",),
            min_capability=90,
            max_capability=90,
            page_sizes=(64, 128),
            storage_dtypes=("bfloat16",),
            widths=((576, 512),),
        ),
        Support(implementation="triton", platforms=("gpu",), min_capability=80),
        Support(implementation="xla", compute_dtypes=("float32", "bfloat16")),
    )
    monkeypatch.setattr(module, "SUPPORT", {"op": lines})


def case(**changed):
    facts = {
        "page_size": 64,
        "storage_dtype": "bfloat16",
        "compute_dtype": "bfloat16",
        "widths": (576, 512),
    }
    return OpCase(**facts | changed)


@pytest.mark.parametrize("op", SUPPORT)
def test_every_op_has_a_reference_that_runs_anywhere(op):
    for target in (CPU, A100, H200, None):
        assert resolve(op, "xla", CASE, target=target) == "xla"
    names = [line.implementation for line in SUPPORT[op]]
    assert set(names) <= set(typing.get_args(Implementation))
    assert names[-1] == "xla"


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("target", "changed", "chosen"),
    [
        (CPU, {}, "xla"),
        (A100, {}, "triton"),
        (H200, {}, "mosaic_gpu"),
        (B200, {}, "triton"),
        (H200, {"page_size": 16}, "triton"),
        (H200, {"storage_dtype": "float32"}, "triton"),
        (H200, {"widths": (192, 128)}, "triton"),
    ],
)
def test_none_takes_the_best_that_covers_the_case(target, changed, chosen):
    assert resolve("op", None, case(**changed), target=target) == chosen
    assert resolve("op", "xla", case(**changed), target=target) == "xla"


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("target", "changed", "message"),
    [
        (CPU, {}, "runs on gpu, not on cpu; for page_size=64.* works 'xla'$"),
        (A100, {}, r"needs compute capability 9\.0, the device has 8\.0"),
        (B200, {}, r"up to compute capability 9\.0, the device has 10\.0"),
        (H200, {"page_size": 16}, "has page_size 64, 128, not 16"),
        (H200, {"storage_dtype": "float16"}, "has storage_dtype bfloat16, not float16"),
        (H200, {"widths": (1, 2)}, r"widths \(576, 512\), not .* 'triton', 'xla'$"),
    ],
)
def test_a_refusal_says_why_and_what_works(target, changed, message):
    with pytest.raises(UnsupportedError, match=message):
        resolve("op", "mosaic_gpu", case(**changed), target=target)


@pytest.mark.parametrize(
    "changed",
    [
        {"widths": (256, 192)},
        {"widths": (288, 256)},
        {"widths": (192, 128), "storage_dtype": "float8_e4m3fn"},
    ],
)
def test_latent_rows_without_a_kernel_for_hopper_are_for_triton(changed):
    for op in ("mla_decode", "mla_extend_absorbed"):
        assert resolve(op, None, case(**changed), target=H200) == "triton"
        with pytest.raises(UnsupportedError, match=r"works 'triton', 'xla'$"):
            resolve(op, "mosaic_gpu", case(**changed), target=H200)


def test_a_line_on_request_is_not_taken_by_default(monkeypatch):
    lines = (
        Support(implementation="triton", by_default=False),
        Support(implementation="xla"),
    )
    monkeypatch.setattr(module, "SUPPORT", {"op": lines})
    assert resolve("op", None, CASE, target=H200) == "xla"
    assert resolve("op", "triton", CASE, target=H200) == "triton"


def test_a_line_for_calls_without_a_window(monkeypatch):
    lines = (
        Support(implementation="mosaic_gpu", windows=False),
        Support(implementation="xla"),
    )
    monkeypatch.setattr(module, "SUPPORT", {"op": lines})
    assert resolve("op", None, case(), target=H200) == "mosaic_gpu"
    windowed = case(has_window=True)
    assert resolve("op", None, windowed, target=H200) == "xla"
    with pytest.raises(
        UnsupportedError, match=r"is for calls without a window; .*'xla'"
    ):
        resolve("op", "mosaic_gpu", windowed, target=H200)


@pytest.mark.usefixtures("table")
def test_no_implementation_at_all_is_refused():
    with pytest.raises(
        UnsupportedError, match=r"no implementation of op covers .*'xla' has compute"
    ):
        resolve("op", None, case(compute_dtype="float16"), target=CPU)


def test_one_that_does_not_exist_is_refused():
    with pytest.raises(
        UnsupportedError, match="short_conv_decode: implementation 'triton' does not"
    ):
        resolve(
            "short_conv_decode",
            "triton",
            CASE,
            target=Target(platform="tpu", capability=0),
        )
