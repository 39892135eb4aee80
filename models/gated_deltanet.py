"""Gated DeltaNet layer: projections, short convolution, recurrence, gated norm.

The recurrent state and the convolution's window of each request stay in the pool.

Source: Gated Delta Networks (arXiv:2412.06464); huggingface/transformers,
  src/transformers/models/qwen3_next/modeling_qwen3_next.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from models.layers import linear, rms_norm
from models.weights import Weights, joined, weight
from ukv.ops import (
    DeltaViews,
    GdnGate,
    Implementation,
    ProjectedTokens,
    ShortConv,
    StateSlots,
    gdn_decode_step,
    gdn_prefill_step,
)
from ukv.pool import PoolState
from ukv.spec import StateSpec, gdn_state_spec
from ukv.translator import StepInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaNet:
    """Sizes of the Gated DeltaNet layers of a model, all alike.

    Attributes:
      hidden_size: Width of the residual stream.
      num_key_heads: Heads of q and k.
      num_value_heads: Heads of v and of the state, a multiple of ``num_key_heads``.
      key_dim: Elements of a q or k head.
      value_dim: Elements of a v head.
      conv_width: Taps of the short convolution.
      epsilon: Of the output norm.
      implementation: How ops run; None for the default device's best.
    """

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    epsilon: float
    implementation: Implementation | None = None

    @property
    def values_per_key(self) -> int:
        """Value heads of each key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def channels(self) -> int:
        """Channels of the convolution: all of q, then k, then v."""
        keys = self.num_key_heads * self.key_dim
        return 2 * keys + self.num_value_heads * self.value_dim

    def state_spec(self, name: str, num_layers: int, conv_dtype: np.dtype) -> StateSpec:
        """Return what the layers keep in the pool; the state stays in float32.

        Args:
          name: Of the sub-pool.
          num_layers: Layers of this kind.
          conv_dtype: Storage dtype of the windows of raw inputs.
        """
        return gdn_state_spec(
            name=name,
            num_layers=num_layers,
            num_key_heads=self.num_key_heads,
            num_value_heads=self.num_value_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            conv_width=self.conv_width,
            conv_dtype=conv_dtype,
        )

    def weights(self, prefix: str) -> Weights:
        """Describe the arrays of one layer whose tensors start with ``prefix``."""
        hidden, heads = self.hidden_size, self.num_value_heads
        values = heads * self.value_dim
        return {
            "in": joined(
                [f"{prefix}.in_proj_qkvz.weight", f"{prefix}.in_proj_ba.weight"],
                [(self.channels + values, hidden), (2 * heads, hidden)],
            ),
            "conv": weight(
                f"{prefix}.conv1d.weight",
                *(self.channels, 1, self.conv_width),
                shape=(self.channels, self.conv_width),
            ),
            "a_log": weight(f"{prefix}.A_log", heads, keeps_float32=True),
            "dt_bias": weight(f"{prefix}.dt_bias", heads, keeps_float32=True),
            "norm": weight(f"{prefix}.norm.weight", self.value_dim, spread=0.0),
            "out": weight(f"{prefix}.out_proj.weight", hidden, values),
        }

    def forward(
        self,
        layer: Weights,
        x: Float[Array, "num_tokens hidden"],
        inputs: StepInputs,
        pool: PoolState,
        *,
        sub_pool: str,
        index: int,
    ) -> tuple[Float[Array, "num_tokens hidden"], PoolState]:
        """Run one layer on the step's tokens and advance the states of its rows.

        Args:
          layer: Arrays in the structure of ``weights()``.
          x: Normalised residual stream.
          inputs: The step.
          pool: The pool.
          sub_pool: Where the states are.
          index: Of the layer among those of the sub-pool.
        """
        mixed, z, gate_logits, beta_logits = self._project(layer, x)
        views = DeltaViews(
            recurrent=pool.layout.part_view(sub_pool, layer=index, part="recurrent"),
            conv=pool.layout.part_view(sub_pool, layer=index, part="conv"),
        )
        conv = ShortConv(weight=layer["conv"])
        gate = GdnGate(a_log=layer["a_log"], dt_bias=layer["dt_bias"])
        slots = state_slots(inputs, sub_pool)
        projected = ProjectedTokens(
            qkv=mixed, gate_logits=gate_logits, beta_logits=beta_logits
        )
        if inputs.is_decode:
            buffers, out = gdn_decode_step(
                pool.buffers,
                views,
                jax.tree.map(lambda of_token: of_token[:, None], projected),
                conv,
                gate,
                slots,
                implementation=self.implementation,
            )
            out = out[:, 0]
        else:
            buffers, out = gdn_prefill_step(
                pool.buffers,
                views,
                projected,
                conv,
                gate,
                inputs.cu_query_lens,
                slots,
                max_query_len=inputs.max_query_len,
                implementation=self.implementation,
            )
        out = rms_norm(out.astype(jnp.float32), layer["norm"], self.epsilon)
        out = (out * jax.nn.silu(z.astype(jnp.float32))).astype(x.dtype)
        out = linear(out.reshape(x.shape[0], -1), layer["out"])
        return out, pool.replace(buffers=buffers)

    def _project(
        self, layer: Weights, x: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Return the channels q|k|v, z by value head, gate logits and beta logits.

        The released matrices hold, for each key head, the rows of q, k, its v heads
        and its z heads, and after those of all heads, for each, of beta and gate.
        """
        num_tokens, ratio = x.shape[0], self.values_per_key
        projected = linear(x, layer["in"])
        num_qkvz = self.channels + self.num_value_heads * self.value_dim
        qkvz, ba = jnp.split(projected, [num_qkvz], axis=-1)
        qkvz = qkvz.reshape(num_tokens, self.num_key_heads, -1)
        ends = np.cumsum([self.key_dim, self.key_dim, ratio * self.value_dim])
        q, k, v, z = jnp.split(qkvz, ends, axis=-1)
        mixed = [part.reshape(num_tokens, -1) for part in (q, k, v)]
        ba = ba.reshape(num_tokens, self.num_key_heads, 2, ratio)
        beta, gate = (ba[:, :, i].reshape(num_tokens, -1) for i in range(2))
        z = z.reshape(num_tokens, self.num_value_heads, self.value_dim)
        return jnp.concatenate(mixed, axis=-1), z, gate, beta


def state_slots(inputs: StepInputs, sub_pool: str) -> StateSlots:
    """Return the slots of the step's rows; a row that begins starts from zeros."""
    return StateSlots(slots=inputs.slots[sub_pool], is_fresh=inputs.is_fresh)
