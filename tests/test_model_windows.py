"""Pages behind the window are released while a model runs, and no logit changes."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.golden import Golden
from tests.model_runner import ModelRunner
from tests.short_models import load_short
from ukv.allocator import free_window
from ukv.ids import VirtualPages
from ukv.pool import page_counts

CHUNK = 40
PAGE_SIZE = 16


class ReleasingRunner(ModelRunner):
    """Releases after each step what the next one cannot see."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.released = np.zeros(self.num_rows, np.int64)
        self.num_released = 0

    def step(self, tokens, **options):
        logits = super().step(tokens, **options)
        window = self.layout.sub_pool("swa").spec.window
        # The next query of a row of n tokens sees tokens n - window + 1 and later.
        gone = np.maximum(self.lens - window + 1, 0) // PAGE_SIZE
        page = np.arange(self.per_row)
        is_new = (page < gone[:, None]) & (page >= self.released[:, None])
        self.released = gone
        self.num_released += int(is_new.sum())
        ids = jnp.where(jnp.asarray(is_new), self.tables["full"].ids, 0)
        self.pool = _release(self.pool, VirtualPages(ids=ids, space="full"))
        return logits


@ft.partial(jax.jit, donate_argnums=0)
def _release(pool, pages):
    return free_window(pool, "swa", pages)


def run_all(run, golden):
    """Return the logits of all prompts in chunks, then of all decoded tokens."""
    prompts = [golden.prompt(i) for i in range(4)]
    found = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), CHUNK):
        chunks = [prompt[start : start + CHUNK] for prompt in prompts]
        for rows, new in zip(
            found, run.step(chunks, num_tokens=4 * CHUNK), strict=True
        ):
            rows.append(new)
    for j in range(len(golden.decode_tokens(0))):
        step = [golden.decode_tokens(i)[j : j + 1] for i in range(4)]
        for rows, new in zip(found, run.step(step), strict=True):
            rows.append(new)
    return [np.concatenate(rows) for rows in found]


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss_mxfp4"])
def test_released_windows_change_no_logit(family):
    golden = Golden(family)
    loaded = load_short(family)
    options = {"num_rows": 4, "max_tokens": 160, "page_size": PAGE_SIZE}
    keeping = ModelRunner(loaded.model, loaded.weights, **options)
    releasing = ReleasingRunner(loaded.model, loaded.weights, **options)
    # One translator, so that the steps are compiled once.
    releasing.translator = keeping.translator
    expected, found = run_all(keeping, golden), run_all(releasing, golden)
    for i in range(4):
        assert np.isfinite(expected[i]).all()
        np.testing.assert_array_equal(found[i], expected[i])
    # Some were released, and their bytes went to later tokens.
    assert releasing.num_released > 10
    held = {run: int(page_counts(run.pool)["swa"]) for run in (keeping, releasing)}
    assert held[releasing] == held[keeping] - releasing.num_released
    swa = releasing.layout.sub_pool("swa").index
    low, high = releasing.pool.counters[swa, 2:]
    assert int(high - low) < held[keeping]
