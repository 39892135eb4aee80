"""Extend of MLA with the heads of a model, by kernels: which form, and when.

Expanded, a cached row costs its expansion once and then little for each query token;
absorbed, it costs nothing once and 3.4 times as much for each query token (512 + 64
latent elements, heads of 128 + 64). So rows of many query tokens are expanded.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from ukv.implementation import OpCase, resolve
from ukv.layout import PartView
from ukv.ops.cached_rows import Buffers
from ukv.ops.decode_rows import find_decode_rows
from ukv.ops.extend_kernels import mla_packed
from ukv.ops.mla_absorbed import Kernel, mla_rows, mla_tiles
from ukv.ops.online_softmax import multiply

MOST_ABSORBED = 256
"""Query tokens of a row up to which a batch is absorbed."""

MOST_ABSORBED_TOKENS = 2048
"""Query tokens of a batch up to which it is: each takes 300 KB for 32 heads."""


def extend_heads(
    kernel: Kernel,
    q: Float[Array, "num_tokens num_heads key_dim"],
    w_kc: Float[Array, "num_heads nope_dim latent_dim"],
    w_vc: Float[Array, "num_heads value_dim latent_dim"],
    buffers: Buffers,
    view: PartView,
    table_ids: Int32[Array, "rows max_pages"],
    *,
    cu_query_lens: Int32[Array, " bounds"],
    kv_lens: Int32[Array, " rows"],
    max_query_len: int,
    softmax_scale: float,
) -> tuple[
    Float[Array, "num_tokens num_heads value_dim"],
    Float32[Array, "num_tokens num_heads"],
]:
    """Attend packed rows with the heads of a model.

    A batch of rows of few query tokens is absorbed. In another batch the rows of one
    query token, which decode, are absorbed and the others expanded. Triton has no
    expanded form, and pages of one token or rows of e5m2 have no absorbed one on
    Mosaic GPU.

    Args:
      kernel: Who.
      q: Queries, the part without position and then the rope part.
      w_kc: Key expansion.
      w_vc: Value expansion.
      buffers: All buffers of the pool.
      view: Where the latent rows of this layer lie.
      table_ids: Read table.
      cu_query_lens: Exclusive prefix sum of the query lengths.
      kv_lens: Tokens of each row, its query tokens included.
      max_query_len: Bound of the query lengths.
      softmax_scale: Factor of ``q . k``.

    Returns:
      As ``mla_extend``.
    """
    nope_dim, latent_dim = w_kc.shape[1:]
    can_absorb = kernel == "triton" or _can_absorb(q, view, latent_dim)
    options = {"latent_dim": latent_dim, "softmax_scale": softmax_scale}

    def absorb(heads: jax.Array) -> jax.Array:
        nope, rope = heads[..., :nope_dim], heads[..., nope_dim:]
        return jnp.concatenate([_per_head(nope, w_kc), rope], axis=-1)

    def values(latents: jax.Array) -> jax.Array:
        return _per_head(latents, w_vc.transpose(0, 2, 1))

    is_short = max_query_len <= MOST_ABSORBED and q.shape[0] <= MOST_ABSORBED_TOKENS
    if kernel == "triton" or (can_absorb and is_short):
        latents, lse = mla_tiles(
            kernel,
            absorb(q),
            buffers,
            view,
            table_ids,
            cu_query_lens=cu_query_lens,
            kv_lens=kv_lens,
            max_query_len=max_query_len,
            **options,
        )
        return values(latents), lse
    decode = find_decode_rows(cu_query_lens, kv_lens, num_tokens=q.shape[0])
    is_mixed = can_absorb and kv_lens.shape[0] > 1
    out, lse = mla_packed(
        q,
        w_kc,
        w_vc,
        buffers,
        view,
        table_ids,
        cu_query_lens=cu_query_lens,
        kv_lens=decode.other_lens if is_mixed else kv_lens,
        is_absent=decode.is_decode if is_mixed else None,
        softmax_scale=softmax_scale,
    )
    if not is_mixed:
        return out, lse
    latents, decode_lse = mla_rows(
        kernel,
        absorb(decode.take(q)[:, 0])[:, None],
        buffers,
        view,
        table_ids,
        kv_lens=decode.kv_lens,
        **options,
    )
    return (
        decode.put(out, values(latents[:, 0])[:, None]),
        decode.put(lse, decode_lse),
    )


def _can_absorb(q: jax.Array, view: PartView, latent_dim: int) -> bool:
    """Return whether the absorbed kernel for Hopper covers these rows."""
    case = OpCase(
        page_size=view.page_size,
        storage_dtype=view.dtype.name,
        compute_dtype=q.dtype.name,
        widths=(view.num_elements, latent_dim),
    )
    return resolve("mla_extend_absorbed", None, case) == "mosaic_gpu"


def _per_head(
    x: Float[Array, "num_tokens num_heads inputs"],
    matrices: Float[Array, "num_heads inputs outputs"],
) -> Float[Array, "num_tokens num_heads outputs"]:
    """Multiply each head by its own matrix: float32 sums, the dtype of ``x`` out."""
    by_head = multiply(
        x.transpose(1, 0, 2), matrices.astype(x.dtype), (((2,), (1,)), ((0,), (0,)))
    )
    return by_head.astype(x.dtype).transpose(1, 0, 2)
