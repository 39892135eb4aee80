"""The parity tests would notice: each mistake here makes their check fail widely."""

import jax.numpy as jnp
import pytest

import models.layers
import ukv.ops.delta_prefill_step
import ukv.ops.short_conv
from tests.model_runner import forget_programs
from tests.test_model_parity import BOUND, chunked_error
from ukv.ids import KernelBlocks, VirtualPages
from ukv.layout import PoolLayout
from ukv.translator import KVIndexTranslator, StepInputs


@pytest.fixture
def patch(monkeypatch):
    """Patch code that steps are compiled from; no program outlives its patch."""
    forget_programs()
    yield monkeypatch
    monkeypatch.undo()
    forget_programs()


def parity_error(family):
    """The check of the parity tests: five chunks beside a prompt that ends first."""
    bucket = {"num_tokens": 32, "max_query_len": 16}
    return chunked_error(family, lambda: 16, prompts=(0, 2), bucket=bucket)


def leave_table_untranslated(patch):
    def fill(self, out, state, pages, num_pages):
        column = jnp.arange(pages.ids.shape[1], dtype=jnp.int32)
        is_live = column[None, :] < num_pages[:, None]
        ids = jnp.where(is_live, pages.ids, out.ids)
        return state, KernelBlocks(ids=ids, sub_pool=out.sub_pool)

    patch.setattr(KVIndexTranslator, "fill_read_table", fill)


def translate_twice(patch):
    once = KVIndexTranslator._lookup

    def lookup(self, state, sub, pages):
        blocks, is_page = once(self, state, sub, pages)
        ids = jnp.where(is_page, blocks, 0)
        again, _ = once(self, state, sub, VirtualPages(ids=ids, space=pages.space))
        return again, is_page

    patch.setattr(KVIndexTranslator, "_lookup", lookup)


def use_the_layer_before(patch):
    right = PoolLayout.part_view

    def part_view(self, name, *, layer, part):
        return right(self, name, layer=max(layer - 1, 0), part=part)

    patch.setattr(PoolLayout, "part_view", part_view)


def keep_stale_slots(patch):
    is_fresh = property(lambda inputs: jnp.zeros_like(inputs.is_live))
    patch.setattr(StepInputs, "is_fresh", is_fresh)


def shift_convolution_windows(patch):
    right = ukv.ops.short_conv.read_states

    def read_states(buffers, view, slots):
        return jnp.roll(right(buffers, view, slots), 1, axis=1)

    patch.setattr(ukv.ops.short_conv, "read_states", read_states)


def swap_k_and_v(patch):
    right = models.layers.write_kv

    def write_kv(buffers, views, locations, values, **options):
        return right(buffers, views, locations, values[::-1], **options)

    patch.setattr(models.layers, "write_kv", write_kv)


def swap_k_and_v_of_states(patch):
    right = ukv.ops.delta_prefill_step.DeltaTokens

    def tokens(*, k, v, **others):
        return right(k=v, v=k, **others)

    patch.setattr(ukv.ops.delta_prefill_step, "DeltaTokens", tokens)


CASES = [
    ("llama", leave_table_untranslated),
    ("llama", translate_twice),
    ("llama", use_the_layer_before),
    ("llama", swap_k_and_v),
    # Llama shows these too, for a third of the price.
    pytest.param("kimi_linear", leave_table_untranslated, marks=pytest.mark.slow),
    pytest.param("kimi_linear", translate_twice, marks=pytest.mark.slow),
    pytest.param("kimi_linear", use_the_layer_before, marks=pytest.mark.slow),
    ("kimi_linear", keep_stale_slots),
    ("kimi_linear", shift_convolution_windows),
    ("kimi_linear", swap_k_and_v_of_states),
]


@pytest.mark.parametrize("family", ["llama", "kimi_linear"])
def test_the_check_passes_without_a_mistake(patch, family):
    assert parity_error(family) < BOUND


@pytest.mark.parametrize(("family", "mistake"), CASES)
def test_a_mistake_fails_the_check(patch, family, mistake):
    mistake(patch)
    # A row may be NaN, which is below nothing.
    assert not parity_error(family) < 100 * BOUND
