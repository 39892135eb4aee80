"""Kimi Delta Attention layer: projections, short convolution, recurrence, gated norm.

The recurrent state and the convolution's window of each request stay in the pool. In
training each row begins with empty ones and there is no pool.

Source: Kimi Linear (arXiv:2510.26692).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from models.layers import linear, rms_norm
from models.weights import Weight, Weights, joined, weight
from ukv.ops import (
    DeltaTokens,
    DeltaViews,
    Implementation,
    KdaGate,
    ProjectedTokens,
    ShortConv,
    StateSlots,
    kda_decode_step,
    kda_prefill_step,
    kda_rows,
    short_conv_rows,
)
from ukv.pool import PoolState
from ukv.spec import StateSpec, kda_state_spec
from ukv.translator import StepInputs

# Of the norm behind the recurrence; no config has a field for it.
OUTPUT_NORM_EPSILON = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiDeltaAttention:
    """Sizes of the KDA layers of a model, all alike.

    Attributes:
      hidden_size: Width of the residual stream.
      num_heads: Heads.
      head_dim: Elements of a head's q, k and v, and rank of the gates.
      conv_width: Taps of the short convolution.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    conv_width: int

    @property
    def width(self) -> int:
        """Elements of q, of k or of v of all heads."""
        return self.num_heads * self.head_dim

    def state_spec(self, name: str, num_layers: int, conv_dtype: np.dtype) -> StateSpec:
        """Return what the layers keep in the pool; the state stays in float32.

        Args:
          name: Of the sub-pool.
          num_layers: Layers of this kind.
          conv_dtype: Storage dtype of the windows of raw inputs.
        """
        return kda_state_spec(
            name=name,
            num_layers=num_layers,
            num_heads=self.num_heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            conv_width=self.conv_width,
            state_dtype="float32",
            conv_dtype=conv_dtype,
        )

    def weights(self, prefix: str) -> Weights:
        """Describe the arrays of one layer whose tensors start with ``prefix``."""
        hidden, heads, dim = self.hidden_size, self.num_heads, self.head_dim
        width, taps = self.width, self.conv_width
        return {
            "qkv_beta_gates": joined(
                [
                    f"{prefix}.{n}_proj.weight"
                    for n in ("q", "k", "v", "b", "f_a", "g_a")
                ],
                [(rows, hidden) for rows in (width, width, width, heads, dim, dim)],
            ),
            "conv": Weight(
                names=tuple(f"{prefix}.{n}_conv1d.weight" for n in "qkv"),
                shapes=((width, 1, taps),) * 3,
                shape=(3 * width, taps),
                keeps_float32=True,
            ),
            "decay_gate": weight(f"{prefix}.f_b_proj.weight", width, dim),
            "a_log": weight(
                f"{prefix}.A_log", 1, 1, heads, 1, shape=(heads,), keeps_float32=True
            ),
            "dt_bias": weight(
                f"{prefix}.dt_bias", width, shape=(heads, dim), keeps_float32=True
            ),
            "output_gate": weight(f"{prefix}.g_b_proj.weight", width, dim),
            "output_norm": weight(f"{prefix}.o_norm.weight", dim, spread=0.0),
            "o": weight(f"{prefix}.o_proj.weight", hidden, width),
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
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "num_tokens hidden"], PoolState]:
        """Run one layer on the step's tokens and advance the states of its rows.

        Args:
          layer: Arrays in the structure of ``weights``.
          x: Normalised residual stream.
          inputs: The step.
          pool: The pool.
          sub_pool: Where the states are.
          index: Of the layer among those of the sub-pool.
          implementation: None for the default device's best.
        """
        projected, output_gate = self._project(layer, x)
        slots = StateSlots(slots=inputs.slots[sub_pool], is_fresh=inputs.is_fresh)
        conv = ShortConv(weight=layer["conv"])
        gate = KdaGate(a_log=layer["a_log"], dt_bias=layer["dt_bias"])
        views = DeltaViews(
            recurrent=pool.layout.part_view(sub_pool, layer=index, part="recurrent"),
            conv=pool.layout.part_view(sub_pool, layer=index, part="conv"),
        )
        if inputs.is_decode:
            buffers, out = kda_decode_step(
                pool.buffers,
                views,
                jax.tree.map(lambda of_token: of_token[:, None], projected),
                conv,
                gate,
                slots,
                implementation=implementation,
            )
            out = out[:, 0]
        else:
            buffers, out = kda_prefill_step(
                pool.buffers,
                views,
                projected,
                conv,
                gate,
                inputs.cu_query_lens,
                slots,
                max_query_len=inputs.max_query_len,
                implementation=implementation,
            )
        return self._finish(layer, output_gate, out), pool.replace(buffers=buffers)

    def forward_rows(
        self,
        layer: Weights,
        x: Float[Array, "num_tokens hidden"],
        num_rows: int,
    ) -> Float[Array, "num_tokens hidden"]:
        """Run one layer on whole rows without a pool; differentiable, for training.

        Args:
          layer: Arrays in the structure of ``weights``.
          x: Normalised residual stream, rows of equal length one after the other.
          num_rows: Rows.
        """

        def by_row(of_tokens: jax.Array) -> jax.Array:
            return of_tokens.reshape(num_rows, -1, *of_tokens.shape[1:])

        projected, output_gate = self._project(layer, x)
        conv = ShortConv(weight=layer["conv"])
        qkv = short_conv_rows(by_row(projected.qkv), conv)
        tokens = self._tokens(projected, qkv.reshape(projected.qkv.shape))
        gate = KdaGate(a_log=layer["a_log"], dt_bias=layer["dt_bias"])
        out = kda_rows(jax.tree.map(by_row, tokens), gate)
        return self._finish(layer, output_gate, out.reshape(tokens.v.shape))

    def _project(
        self, layer: Weights, x: Float[Array, "num_tokens hidden"]
    ) -> tuple[ProjectedTokens, Float[Array, "num_tokens heads dim"]]:
        """Project what the layer needs of each token; the output gate is apart."""
        heads, dim = self.num_heads, self.head_dim
        qkv, beta_logits, decay, gate = jnp.split(
            linear(x, layer["qkv_beta_gates"]),
            np.cumsum([3 * self.width, heads, dim]).tolist(),
            axis=1,
        )
        by_head = (x.shape[0], heads, dim)
        tokens = ProjectedTokens(
            qkv=qkv,
            gate_logits=linear(decay, layer["decay_gate"]).reshape(by_head),
            beta_logits=beta_logits,
        )
        return tokens, linear(gate, layer["output_gate"]).reshape(by_head)

    def _tokens(self, projected: ProjectedTokens, qkv: jax.Array) -> DeltaTokens:
        """Return what enters the recurrence, with q, k and v after the convolution."""
        by_head = qkv.reshape(qkv.shape[0], 3 * self.num_heads, self.head_dim)
        q, k, v = jnp.split(by_head, 3, axis=1)
        return DeltaTokens(
            q=q,
            k=k,
            v=v,
            gate_logits=projected.gate_logits,
            beta_logits=projected.beta_logits,
        )

    def _finish(
        self, layer: Weights, output_gate: jax.Array, out: jax.Array
    ) -> jax.Array:
        """Normalise and gate what the recurrence gives, and project it back."""
        normed = rms_norm(
            out.astype(jnp.float32), layer["output_norm"], OUTPUT_NORM_EPSILON
        )
        gate = jax.nn.sigmoid(output_gate.astype(jnp.float32))
        gated = (normed * gate).astype(out.dtype)
        return linear(gated.reshape(out.shape[0], self.width), layer["o"])
