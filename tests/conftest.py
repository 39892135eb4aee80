"""Settings of every test run: strict JAX, one hypothesis profile, GPU skips."""

import gc
import os
from pathlib import Path

import hypothesis
import jax
import jaxtyping
import pytest

# `JAX_PLATFORMS=cpu` on a machine with a GPU means: test as if it had none.
HAS_GPU = os.environ.get("JAX_PLATFORMS") != "cpu" and any(
    Path(device).exists() for device in ("/dev/nvidia0", "/dev/nvidiactl")
)
# Triton kernels run on a CPU too, in a process that interprets them.
IS_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
GPU_SKIP_REASON = "marked gpu, and there is no NVIDIA GPU to use"

if not HAS_GPU:
    # The plugin that compiles for a GPU is installed and would look for one. The
    # variable is for child processes, the setting for this one: JAX reads the
    # variable when it is imported, but no device before the first use.
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    # Most of a test's time is compiling programs that run once. XLA reads the
    # variable when it makes its first backend, which is after this. The older of its
    # two ways to write loops takes half as long as the way through MLIR. Programs are
    # small, so that to compile one in parts costs more than it saves.
    hurried = (
        "--xla_backend_optimization_level=0",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    )
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *hurried])

# Every simulated warpgroup blocks a thread of XLA's pool while it waits for another
# one, and a pool of as many threads as a small machine has cores is soon used up.
os.environ.setdefault("PJRT_NPROC", str(max(16, os.cpu_count() or 1)))

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Each new shape compiles, so examples are few; a failure must come back when
# the test is run again.
hypothesis.settings.register_profile(
    "ukv", derandomize=True, deadline=None, max_examples=10
)
hypothesis.settings.load_profile("ukv")


MAPPINGS = Path("/proc/self/maps")
MOST_MAPPINGS = 15_000


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Drop compiled programs in time.

    Each maps memory, and in a process with more than 65,530 mappings, Linux's default,
    XLA's compiler crashes.
    """
    yield
    if MAPPINGS.exists() and len(MAPPINGS.read_text().splitlines()) > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def unchecked():
    """Switch annotation checks off, which cost time and hide errors of our own."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def pytest_collection_finish():
    # What imports made stays, and a program that is traced makes few cycles: to look
    # for them after every 700 objects took a tenth of the time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def pytest_configure(config):
    # Importing JAX with the plugin prints, once per library, that there is no CUDA
    # driver. Under xdist nobody reads what the controller captured so far, and it
    # would follow the summary.
    if not HAS_GPU:
        config.pluginmanager.getplugin("capturemanager").read_global_capture()


def pytest_collection_modifyitems(items):
    if HAS_GPU:
        return
    for item in items:
        if IS_INTERPRETING and item.get_closest_marker("triton"):
            continue
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=GPU_SKIP_REASON))


def pytest_terminal_summary(terminalreporter):
    num_skipped = sum(
        GPU_SKIP_REASON in str(report.longrepr)
        for report in terminalreporter.stats.get("skipped", [])
    )
    if num_skipped:
        terminalreporter.write_line(f"{num_skipped} tests skipped: {GPU_SKIP_REASON}")
