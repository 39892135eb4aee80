"""Bytes of what a spec stores, against numbers computed by hand."""

import jax.numpy as jnp
import pytest

from ukv.layout import unified_layout
from ukv.layout.sub_pool import padded_entry_bytes, page_bytes_of, row_bytes_of
from ukv.spec import (
    STORAGE_DTYPES,
    AttentionSpec,
    MLASpec,
    Part,
    SlidingWindowSpec,
    StateSpec,
    gdn_state_spec,
    kda_state_spec,
    mamba2_state_spec,
)

FP8_DTYPES = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]


def kimi_latent(**changes):
    fields = {
        "name": "latent",
        "num_layers": 7,
        "page_size": 64,
        "latent_dim": 512,
        "rope_dim": 64,
    }
    return MLASpec(**{**fields, **changes})


def kimi_state(**changes):
    fields = {
        "name": "kda",
        "num_layers": 20,
        "num_heads": 32,
        "key_dim": 128,
        "value_dim": 128,
        "conv_width": 4,
    }
    return kda_state_spec(**{**fields, **changes})


def entry_bytes(spec):
    return {part.name: padded_entry_bytes(spec, part) for part in spec.parts}


def test_kimi_latent_token_and_page():
    spec = kimi_latent()
    # (512 + 64) bfloat16 = 1,152 bytes a layer; 7 layers; 64 tokens.
    assert row_bytes_of(spec) == 1_152
    assert page_bytes_of(spec) // spec.page_size == 7 * 1_152 == 8_064
    assert page_bytes_of(spec) == 516_096


def test_kimi_state_slot():
    spec = kimi_state()
    recurrent, conv = spec.parts
    # 32 heads of 128 x 128 float32, and 3 inputs of 32 * (128 + 128 + 128) channels.
    assert (recurrent.name, recurrent.shape) == ("recurrent", (32, 128, 128))
    assert (conv.name, conv.shape) == ("conv", (3, 12_288))
    assert recurrent.entry_bytes == 2_097_152
    assert conv.entry_bytes == 73_728
    assert page_bytes_of(spec) == 20 * (2_097_152 + 73_728) == 43_417_600
    # 2^21 and 2^13 * 9: the longest row that divides both is 2^13.
    assert row_bytes_of(spec) == 8_192
    # As many bytes as 5,384 tokens.
    assert 43_417_600 // 8_064 == 5_384


def test_gdn_state_has_value_heads_and_narrow_conv():
    # Qwen3-Next: 16 key heads, 32 value heads, 36 layers.
    spec = gdn_state_spec(
        name="gdn",
        num_layers=36,
        num_key_heads=16,
        num_value_heads=32,
        key_dim=128,
        value_dim=128,
        conv_width=4,
    )
    assert [part.shape for part in spec.parts] == [(32, 128, 128), (3, 8_192)]
    assert page_bytes_of(spec) == 36 * (2_097_152 + 49_152) == 77_266_944


def test_mamba2_state():
    spec = mamba2_state_spec(
        name="mamba",
        num_layers=2,
        num_heads=8,
        head_dim=64,
        state_dim=128,
        num_groups=1,
        conv_width=4,
    )
    # 8 * 64 channels of x and 2 * 128 of B and C.
    assert [part.shape for part in spec.parts] == [(8, 64, 128), (3, 768)]
    assert entry_bytes(spec) == {"recurrent": 262_144, "conv": 4_608}
    assert page_bytes_of(spec) == 2 * (262_144 + 4_608)


def test_convolution_of_width_one_keeps_nothing():
    assert [part.name for part in kimi_state(conv_width=1).parts] == ["recurrent"]


def test_state_dtypes_are_chosen_apart():
    spec = kimi_state(state_dtype="bfloat16", conv_dtype="float32")
    assert entry_bytes(spec) == {"recurrent": 1_048_576, "conv": 147_456}


def test_gqa_page():
    # Llama 3 8B: 32 layers, 8 heads of 128, K and V.
    spec = AttentionSpec(
        name="full", num_layers=32, page_size=16, num_kv_heads=8, head_dim=128
    )
    assert entry_bytes(spec) == {"k": 2_048, "v": 2_048}
    assert page_bytes_of(spec) == 32 * 16 * 4_096 == 2_097_152


def test_keys_and_values_of_different_width():
    # K 192 and V 128: rows of 128 bytes divide both.
    spec = AttentionSpec(
        name="full",
        num_layers=3,
        page_size=16,
        num_kv_heads=2,
        head_dim=192,
        value_dim=128,
    )
    assert entry_bytes(spec) == {"k": 768, "v": 512}
    assert row_bytes_of(spec) == 256
    assert page_bytes_of(spec) == 3 * 16 * (768 + 512)


@pytest.mark.parametrize("dtype", FP8_DTYPES)
def test_fp8_halves_the_bytes(dtype):
    assert page_bytes_of(kimi_latent(dtype=jnp.dtype(dtype))) == 516_096 // 2
    assert kimi_latent(dtype=jnp.dtype(dtype)).parts[0].dtype == jnp.dtype(dtype)


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_every_storage_dtype_by_name_and_by_type(dtype):
    spec = kimi_state(state_dtype=dtype)
    assert spec == kimi_state(state_dtype=jnp.dtype(dtype))
    assert spec == kimi_state(state_dtype=getattr(jnp, dtype))
    assert hash(spec) == hash(kimi_state(state_dtype=jnp.dtype(dtype)))
    assert kimi_latent(dtype=jnp.dtype(dtype)).parts[0].dtype == jnp.dtype(dtype)


def test_rows_are_padded_to_sixteen_bytes_and_states_to_128():
    # 5 bfloat16 are 10 bytes; TMA wants rows that start on 16.
    assert page_bytes_of(kimi_latent(latent_dim=5, rope_dim=0)) == 7 * 64 * 16
    odd = StateSpec(
        name="odd",
        num_layers=2,
        parts=(Part(name="s", shape=(3, 11), dtype=jnp.dtype("float32")),),
    )
    assert odd.parts[0].entry_bytes == 132
    assert page_bytes_of(odd) == 2 * 256


def test_what_each_kind_says_of_itself():
    window = SlidingWindowSpec(
        name="window",
        num_layers=1,
        page_size=16,
        num_kv_heads=1,
        head_dim=16,
        window_size=1024,
        shares_ids="full",
    )
    alone = SlidingWindowSpec(
        name="alone",
        num_layers=1,
        page_size=16,
        num_kv_heads=1,
        head_dim=16,
        window_size=1024,
    )
    full = AttentionSpec(
        name="full", num_layers=1, page_size=16, num_kv_heads=1, head_dim=16
    )
    facts = {
        spec.name: (spec.page_size, spec.grows, spec.window, spec.id_space)
        for spec in [kimi_latent(), kimi_state(), window, alone, full]
    }
    assert facts == {
        "latent": (64, True, None, "latent"),
        "kda": (1, False, None, "kda"),
        "window": (16, True, 1024, "full"),
        "alone": (16, True, 1024, "alone"),
        "full": (16, True, None, "full"),
    }


def test_specs_are_hashable_and_equal_by_value():
    assert len({kimi_latent(), kimi_latent(), kimi_latent(page_size=16)}) == 2
    assert len({kimi_state(), kimi_state()}) == 1
    layouts = {unified_layout([kimi_latent()], pool_bytes=2**30) for _ in range(2)}
    assert len(layouts) == 1
