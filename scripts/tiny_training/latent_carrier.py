"""Makes a trained model need its pages: the last latent attention carries the stream.

Trained on word problems, the recurrent states solve everything, and latent attention
ends as an ornament: zeroed, it costs no answer. An instrument for memory must notice
wrong pages, so the last layer's latent attention is set anew, in closed form:

    u        the residual stream in front of the layer, at unit root mean square
    latent   its coordinates along the 128 directions that hold most of it
    q . k    their inner product, with a gain: largest for the token's own row
    output   the stream again, ``carried`` times as large as it is

So the layer adds to a token what its own row in the pool says about it, and that drowns
what came past the pool. With right pages the stream keeps its direction, which is all
that the norms behind it see; the experts behind it are scaled along.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from models.kimi_linear import KimiLinear
from models.mla import LatentAttention
from models.weights import assemble_weights
from scripts.tiny_training.parameters import Tensors

CARRIED = 4.0
"""How many times its own size is added to the stream."""

GAIN = 30.0
"""Factor of ``u . u``: a row at 10 degrees from the own one gets 1 % of its weight."""


def carry_stream(
    model: KimiLinear, tensors: Tensors, token_ids: Int32[np.ndarray, "rows time"]
) -> Tensors:
    """Return the tensors with the last latent attention set anew.

    Args:
      model: Its last layer is latent attention with experts behind, and
        the latent is twice as wide as a head's k without position, its k with
        position, and its v.
      tensors: Of the trained model.
      token_ids: Texts to fit on.
    """
    latent, index = model.latent, model.num_layers - 1
    assert model.moe is not None
    assert index in model.latent_layers
    assert index in model.moe.layers
    half = latent.latent_dim // 2
    assert latent.nope_dim == latent.rope_dim == latent.value_dim == half
    stream = _stream_before(model, tensors, token_ids, index)
    size = np.sqrt(np.mean(stream * stream, axis=1))
    units = stream / size[:, None]
    # [latent_dim, hidden], the first coordinates first.
    _, directions = np.linalg.eigh(units.T @ units)
    coordinates = directions.T[::-1][: latent.latent_dim]
    # The norm of the latent brings its mean square to 1.
    shrink = np.sqrt(latent.latent_dim / model.hidden_size)
    added = CARRIED * float(np.mean(size))
    prefix = f"model.layers.{index}"
    experts = f"{prefix}.block_sparse_moe."
    carrier = {
        f"{prefix}.input_layernorm.weight": np.ones(model.hidden_size),
        f"{prefix}.self_attn.kv_a_layernorm.weight": np.ones(latent.latent_dim),
        # The second half of the coordinates is the part that all heads share.
        f"{prefix}.self_attn.kv_a_proj_with_mqa.weight": np.concatenate(
            [coordinates, coordinates[half:]]
        ),
        f"{prefix}.self_attn.q_proj.weight": np.tile(
            GAIN * coordinates, (latent.num_heads, 1)
        ),
        f"{prefix}.self_attn.kv_b_proj.weight": _expansions(latent, shrink),
        f"{prefix}.self_attn.o_proj.weight": _outputs(
            latent, coordinates, added / shrink
        ),
    }
    scaled = {
        name: tensor * (1 + CARRIED)
        for name, tensor in tensors.items()
        if name.startswith(experts) and name.endswith(("w2.weight", "down_proj.weight"))
    }
    carried = {name: jnp.asarray(x, jnp.float32) for name, x in carrier.items()}
    return tensors | carried | scaled


def _stream_before(
    model: KimiLinear, tensors: Tensors, token_ids: np.ndarray, num_layers: int
) -> np.ndarray:
    """Return the residual stream of each token behind so many layers."""
    weights = assemble_weights(model.weights(), tensors, jnp.dtype("float32"))
    weights = weights | {"layers": weights["layers"][:num_layers]}
    is_token = np.ones(token_ids.shape, bool)
    stream, _ = jax.jit(model.residual_rows)(weights, token_ids, is_token)
    return np.asarray(stream, np.float64).reshape(-1, model.hidden_size)


def _expansions(latent: LatentAttention, shrink: float) -> np.ndarray:
    """Return the rows of k and v by head: k the first half, v either half."""
    whole = np.eye(latent.latent_dim)
    first, second = np.split(whole, 2)
    return np.concatenate(
        [
            np.concatenate([first / shrink, (first, second)[head % 2]])
            for head in range(latent.num_heads)
        ]
    )


def _outputs(
    latent: LatentAttention, coordinates: np.ndarray, factor: float
) -> np.ndarray:
    """Return the output projection: half of the heads for each half."""
    first, second = np.split(coordinates.T, 2, axis=1)
    by_head = [(first, second)[head % 2] for head in range(latent.num_heads)]
    return np.concatenate(by_head, axis=1) * (2 * factor / latent.num_heads)
