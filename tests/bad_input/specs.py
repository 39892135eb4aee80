"""Specs, their parts, sizes and dtypes; how to make right ones."""

import jax.numpy as jnp
import numpy as np

from tests.bad_input.case import Case
from tests.tagged_pools import latent_spec, window_spec
from ukv.errors import SpecError
from ukv.spec import (
    AttentionSpec,
    MLASpec,
    Part,
    StateSpec,
    gdn_state_spec,
    kda_state_spec,
    mamba2_state_spec,
)

FLOAT32 = jnp.dtype("float32")


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


CASES = {
    "parts that are none": Case(
        SpecError,
        r"spec 's': parts=\('a',\) must be Parts",
        lambda: StateSpec(name="s", num_layers=1, parts=("a",)),
    ),
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
}
