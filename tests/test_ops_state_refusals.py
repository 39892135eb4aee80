"""What the ops of recurrent layers refuse of a batch, and what they say."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tests import test_ops_mamba2 as mamba2
from tests import test_ops_short_conv as short_conv
from tests.delta_step_layers import Layer
from tests.recurrent_cases import KINDS, put_on_device
from ukv import ops
from ukv.ops import Mamba2Tokens, ProjectedTokens

BOUNDS = jnp.asarray([0, 2, 3], jnp.int32)


def on_device(kind, tokens):
    return kind(**{name: jnp.asarray(x) for name, x in tokens.items()})


def operands(op):
    """Arguments of a right call for two rows, all by name."""
    rng = np.random.default_rng(0)
    if op == "mamba2_decode":
        pool = mamba2.make_pool()
        found = {
            "tokens": on_device(Mamba2Tokens, mamba2.draw_tokens(rng, 2, 1)),
            "parameters": mamba2.make_parameters(rng),
        }
    elif op.startswith("short_conv"):
        pool = short_conv.make_pool()
        shape = (2, 1) if op == "short_conv_decode" else (3,)
        x = jnp.asarray(rng.standard_normal((*shape, short_conv.CHANNELS)), jnp.float32)
        found = {"x": x, "conv": short_conv.make_conv(rng, has_bias=True)}
    elif op.endswith("step"):
        layer = Layer(kind=op[:3], has_bias=True)
        pool = layer.pools[0]
        tokens = layer.tokens(rng, 2, 1)
        if "prefill" in op:
            tokens = {name: np.repeat(x[:, 0], 2, 0)[:3] for name, x in tokens.items()}
        found = {"tokens": on_device(ProjectedTokens, tokens), "views": layer.views}
        found |= {"conv": layer.conv, "gate": layer.gate}
    else:
        kind = KINDS[op[:3]]
        pool = kind.pool()
        shape = (2, 1) if op.endswith("decode") else (3,)
        found = {"tokens": put_on_device(kind.tokens(rng, *shape))}
        found["gate"] = kind.gate(rng)
    if "prefill" in op:
        found["cu_query_lens"] = BOUNDS
        if not op.startswith("short_conv"):
            found["max_query_len"] = 2
    if "views" not in found:
        found["view"] = pool.view
    slots = pool.slots([1, 2], [True, True])
    return found | {"buffers": pool.put({}), "slots": slots}


def changed(name, **fields):
    """A change of fields of an argument, each a function of the old one."""

    def change(old):
        new = {field: f(getattr(old[name], field)) for field, f in fields.items()}
        return {name: dataclasses.replace(old[name], **new)}

    return change


def one_more_row(slots):
    return dataclasses.replace(slots, ids=jnp.concatenate([slots.ids, slots.ids[:1]]))


DECODES = ("kda_decode", "gdn_decode")
STEPS = ("kda_decode_step", "gdn_decode_step")
PREFILLS = ("kda_prefill", "gdn_prefill")
PREFILL_STEPS = ("kda_prefill_step", "gdn_prefill_step")
OF_ROWS = (*DECODES, *STEPS, "short_conv_decode", "mamba2_decode")
PACKED = (*PREFILLS, *PREFILL_STEPS, "short_conv_prefill")
DELTA = (*DECODES, *PREFILLS)
PROJECTED = (*STEPS, *PREFILL_STEPS)
# Ops, what changes, and what is said about it.
WRONG = [
    (
        OF_ROWS,
        changed("slots", slots=one_more_row, is_fresh=lambda x: jnp.ones(3, bool)),
        r"slots has shape \(3,\), the tokens have 2 rows",
    ),
    (
        OF_ROWS + PACKED,
        changed("slots", is_fresh=lambda x: x[:1]),
        r"is_fresh has shape \(1,\), slots \(2,\)",
    ),
    (
        OF_ROWS + PACKED,
        lambda old: {"buffers": tuple(x[:-64] for x in old["buffers"])},
        "are not those of the pool",
    ),
    (
        PACKED,
        lambda old: {"cu_query_lens": BOUNDS[:2]},
        "has 2 entries, 2 rows need 3",
    ),
    (
        PACKED,
        lambda old: {"cu_query_lens": BOUNDS.astype(jnp.float32)},
        "cu_query_lens holds float32, must be int32",
    ),
    (DELTA, changed("tokens", k=lambda x: x[..., 1:]), "k has shape"),
    (
        DELTA + PROJECTED,
        changed("tokens", beta_logits=lambda x: x[..., 1:]),
        "beta_logits has shape",
    ),
    (
        DELTA + PROJECTED,
        changed("tokens", gate_logits=lambda x: x[:1]),
        "gate_logits has shape",
    ),
    (
        DELTA + PROJECTED,
        changed("gate", a_log=lambda x: x[1:]),
        "a_log has shape",
    ),
    (
        DELTA + PROJECTED,
        changed("gate", dt_bias=lambda x: x[1:]),
        "dt_bias has shape",
    ),
    (
        (*PROJECTED, "short_conv_decode", "short_conv_prefill"),
        changed("conv", bias=lambda x: x[1:]),
        "bias has shape",
    ),
    (("mamba2_decode",), changed("tokens", c=lambda x: x[:, :, 1:]), "c has shape"),
    (
        ("mamba2_decode",),
        changed("parameters", d_skip=lambda x: x[1:]),
        "d_skip has shape",
    ),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("op", "change", "message"), [(op, *case) for names, *case in WRONG for op in names]
)
def test_what_is_not_of_one_batch_is_refused(op, change, message):
    right = operands(op)
    with pytest.raises(ValueError, match=message):
        getattr(ops, op)(**right | change(right))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("op", OF_ROWS + PACKED)
def test_what_is_of_one_batch_is_taken(op):
    _, out = getattr(ops, op)(**operands(op))
    assert np.isfinite(np.asarray(out)).all()
