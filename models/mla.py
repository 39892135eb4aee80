"""Multi-head latent attention of a model: its sizes, weights, memory and two forms.

A token leaves one row ``[latent | key part]`` in the pool, which all heads share. A
decode reads rows as they are (absorbed), a prefill makes keys and values of them again
(expanded); see ``ukv.ops.mla``.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from models.config_fields import ConfigFields
from models.weights import Weight, weight
from ukv.ops import Implementation, mla_decode, mla_extend, write_kv
from ukv.pool import PoolState
from ukv.spec import MLASpec
from ukv.translator import StepInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Sizes of latent attention, the same in every layer.

    Attributes:
      num_heads: Heads.
      nope_dim: Elements of a head's q and k that never carry a position.
      rope_dim: Elements that may, whose k all heads share.
      value_dim: Elements of a head's v.
      latent_dim: Elements that k and v are compressed to.
      softmax_scale: Factor of ``q . k``; by itself one over the root of its elements.
    """

    num_heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    latent_dim: int
    softmax_scale: float

    @classmethod
    def from_config(cls, fields: ConfigFields) -> "LatentAttention":
        """Read the sizes from a ``config.json``.

        Raises:
          ConfigError: A size is missing or of another type, or k and v are said to
            have other heads than q.
        """
        num_heads = fields.take("num_attention_heads", int)
        fields.expect("num_key_value_heads", num_heads)
        nope_dim = fields.take("qk_nope_head_dim", int)
        rope_dim = fields.take("qk_rope_head_dim", int)
        return cls(
            num_heads=num_heads,
            nope_dim=nope_dim,
            rope_dim=rope_dim,
            value_dim=fields.take("v_head_dim", int),
            latent_dim=fields.take("kv_lora_rank", int),
            softmax_scale=(nope_dim + rope_dim) ** -0.5,
        )

    @property
    def key_dim(self) -> int:
        """Elements of a head's q and k."""
        return self.nope_dim + self.rope_dim

    @property
    def row_width(self) -> int:
        """Elements of a row in the pool."""
        return self.latent_dim + self.rope_dim

    def expansions(self, name: str) -> dict[str, Weight]:
        """Describe both halves of the matrix that makes k and v of latents.

        Args:
          name: Its tensor; the rows are by head, those of k before those of v.
        """
        heads, nope, value = self.num_heads, self.nope_dim, self.value_dim

        def half(tensor: jax.Array, rows: slice, dtype: jnp.dtype) -> jax.Array:
            by_head = tensor.reshape(heads, nope + value, self.latent_dim)
            return by_head[:, rows].astype(dtype)

        def key_half(tensor: jax.Array, *, dtype: jnp.dtype) -> jax.Array:
            return half(tensor, slice(None, nope), dtype)

        def value_half(tensor: jax.Array, *, dtype: jnp.dtype) -> jax.Array:
            return half(tensor, slice(nope, None), dtype)

        sizes = (heads * (nope + value), self.latent_dim)
        return {
            "w_kc": weight(
                name, *sizes, shape=(heads, nope, self.latent_dim), decode=key_half
            ),
            "w_vc": weight(
                name, *sizes, shape=(heads, value, self.latent_dim), decode=value_half
            ),
        }

    def pool_spec(
        self, name: str, *, num_layers: int, page_size: int, dtype: np.dtype
    ) -> MLASpec:
        """Return what these layers keep in the pool.

        Args:
          name: Of the sub-pool.
          num_layers: Layers with latent attention.
          page_size: Tokens per page.
          dtype: Storage dtype.
        """
        return MLASpec(
            name=name,
            num_layers=num_layers,
            page_size=page_size,
            latent_dim=self.latent_dim,
            rope_dim=self.rope_dim,
            dtype=dtype,
        )

    def attend(
        self,
        q: Float[Array, "num_tokens num_heads key_dim"],
        rows: Float[Array, "num_tokens row_width"],
        w_kc: Float[Array, "num_heads nope_dim latent_dim"],
        w_vc: Float[Array, "num_heads value_dim latent_dim"],
        inputs: StepInputs,
        pool: PoolState,
        *,
        sub_pool: str,
        layer: int,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "num_tokens num_heads value_dim"], PoolState]:
        """Write the rows of the step's tokens, then attend what each token sees.

        Args:
          q: Queries, the part without position first, the other rotated if any is.
          rows: What the tokens leave in the pool.
          w_kc: Key expansion.
          w_vc: Value expansion.
          inputs: The step.
          pool: The pool.
          sub_pool: Where the rows lie.
          layer: Index of the layer among those of the sub-pool.
          implementation: None for the default device's best.
        """
        view = pool.layout.part_view(sub_pool, layer=layer, part="latent")
        buffers = write_kv(
            pool.buffers,
            (view,),
            inputs.writes[sub_pool],
            (rows,),
            implementation=implementation,
        )
        table = inputs.reads[sub_pool]
        if inputs.is_decode:
            nope, rope = jnp.split(q, [self.nope_dim], axis=-1)
            absorbed = _per_head(nope, w_kc)
            latents, _ = mla_decode(
                jnp.concatenate([absorbed, rope], axis=-1)[:, None],
                buffers,
                view,
                table,
                kv_lens=inputs.kv_lens,
                latent_dim=self.latent_dim,
                softmax_scale=self.softmax_scale,
                implementation=implementation,
            )
            out = _per_head(latents[:, 0], w_vc.transpose(0, 2, 1))
        else:
            out, _ = mla_extend(
                q,
                w_kc,
                w_vc,
                buffers,
                view,
                table,
                cu_query_lens=inputs.cu_query_lens,
                kv_lens=inputs.kv_lens,
                max_query_len=inputs.max_query_len,
                softmax_scale=self.softmax_scale,
                implementation=implementation,
            )
        return out, pool.replace(buffers=buffers)

    def attend_rows(
        self,
        q: Float[Array, "rows time num_heads key_dim"],
        latents: Float[Array, "rows time row_width"],
        w_kc: Float[Array, "num_heads nope_dim latent_dim"],
        w_vc: Float[Array, "num_heads value_dim latent_dim"],
    ) -> Float[Array, "rows time num_heads value_dim"]:
        """Attend whole rows without a pool, expanded; differentiable, for training.

        Args:
          q: As in ``attend``.
          latents: What each token would leave in the pool.
          w_kc: Key expansion.
          w_vc: Value expansion.
        """
        compressed, rope = jnp.split(latents, [self.latent_dim], axis=-1)
        keys, values = (
            _products("rtl,hdl->rthd", compressed, expansion).astype(q.dtype)
            for expansion in (w_kc, w_vc)
        )
        of_all_heads = jnp.broadcast_to(
            rope[:, :, None], (*keys.shape[:-1], self.rope_dim)
        )
        keys = jnp.concatenate([keys, of_all_heads], axis=-1)
        scores = _products("rihd,rjhd->rhij", q, keys)
        place = np.arange(q.shape[1])
        is_seen = jnp.asarray(place[:, None] >= place[None, :])
        scores = jnp.where(is_seen, scores * self.softmax_scale, -jnp.inf)
        shares = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
        return _products("rhij,rjhd->rihd", shares, values).astype(q.dtype)


def _products(
    subscripts: str, left: Float[Array, "..."], right: Float[Array, "..."]
) -> Float32[Array, "..."]:
    """Multiply and add up as ``linear`` does, with float32 sums."""
    return jnp.einsum(
        subscripts,
        left,
        right,
        precision=jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _per_head(
    x: Float[Array, "num_tokens num_heads inputs"],
    matrices: Float[Array, "num_heads inputs outputs"],
) -> Float[Array, "num_tokens num_heads outputs"]:
    """Multiply each head by its own matrix: float32 sums, the dtype of ``x`` out."""
    # The barrier keeps XLA from folding the transposition into the product: for CPUs
    # it has no such product of bfloat16 with float32 sums (jaxlib 0.11.2).
    by_head = jax.lax.optimization_barrier(x.transpose(1, 0, 2))
    product = jax.lax.dot_general(
        by_head,
        matrices,
        (((2,), (1,)), ((0,), (0,))),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return product.astype(x.dtype).transpose(1, 0, 2)
