"""States of the recurrent layers that are known by name."""

from ukv.spec.kinds import StateSpec
from ukv.spec.part import Part, require_positive, storage_dtype


def kda_state_spec(
    *,
    name: str,
    num_layers: int,
    num_heads: int,
    key_dim: int,
    value_dim: int,
    conv_width: int,
    state_dtype: object = "float32",
    conv_dtype: object = "bfloat16",
) -> StateSpec:
    """State of Kimi Delta Attention layers.

    Parts: ``recurrent`` ``[num_heads, value_dim, key_dim]`` (V-first) and ``conv``
    ``[conv_width - 1, channels]``, the last raw inputs of q, k and v, oldest first.

    Source: Kimi Linear (arXiv:2510.26692).

    Raises:
      SpecError: A size is not positive, or a dtype cannot be stored.
    """
    require_positive(
        f"spec {name!r}",
        num_heads=num_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_width=conv_width,
    )
    channels = num_heads * (2 * key_dim + value_dim)
    return _delta_spec(
        name,
        num_layers,
        (num_heads, value_dim, key_dim),
        (conv_width - 1, channels),
        state_dtype,
        conv_dtype,
    )


def gdn_state_spec(
    *,
    name: str,
    num_layers: int,
    num_key_heads: int,
    num_value_heads: int,
    key_dim: int,
    value_dim: int,
    conv_width: int,
    state_dtype: object = "float32",
    conv_dtype: object = "bfloat16",
) -> StateSpec:
    """State of Gated DeltaNet layers, whose q and k may have fewer heads than v.

    Parts: ``recurrent`` ``[num_value_heads, value_dim, key_dim]`` (V-first) and
    ``conv`` ``[conv_width - 1, channels]``, oldest first.

    Source: Gated Delta Networks (arXiv:2412.06464).

    Raises:
      SpecError: A size is not positive, or a dtype cannot be stored.
    """
    require_positive(
        f"spec {name!r}",
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_width=conv_width,
    )
    channels = 2 * num_key_heads * key_dim + num_value_heads * value_dim
    return _delta_spec(
        name,
        num_layers,
        (num_value_heads, value_dim, key_dim),
        (conv_width - 1, channels),
        state_dtype,
        conv_dtype,
    )


def mamba2_state_spec(
    *,
    name: str,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    state_dim: int,
    num_groups: int,
    conv_width: int,
    state_dtype: object = "float32",
    conv_dtype: object = "bfloat16",
) -> StateSpec:
    """State of Mamba2 layers.

    Parts: ``recurrent`` ``[num_heads, head_dim, state_dim]`` and ``conv``
    ``[conv_width - 1, num_heads * head_dim + 2 * num_groups * state_dim]``.

    Source: Transformers are SSMs (arXiv:2405.21060).

    Raises:
      SpecError: A size is not positive, or a dtype cannot be stored.
    """
    require_positive(
        f"spec {name!r}",
        num_heads=num_heads,
        head_dim=head_dim,
        state_dim=state_dim,
        num_groups=num_groups,
        conv_width=conv_width,
    )
    channels = num_heads * head_dim + 2 * num_groups * state_dim
    return _delta_spec(
        name,
        num_layers,
        (num_heads, head_dim, state_dim),
        (conv_width - 1, channels),
        state_dtype,
        conv_dtype,
    )


def _delta_spec(
    name: str,
    num_layers: int,
    recurrent: tuple[int, ...],
    conv: tuple[int, ...],
    state_dtype: object,
    conv_dtype: object,
) -> StateSpec:
    where = f"spec {name!r}"
    parts = [
        Part(
            name="recurrent",
            shape=recurrent,
            dtype=storage_dtype(state_dtype, where=where),
        )
    ]
    # A convolution of width 1 has no past inputs to keep.
    if conv[0] > 0:
        dtype = storage_dtype(conv_dtype, where=where)
        parts.append(Part(name="conv", shape=conv, dtype=dtype))
    return StateSpec(name=name, num_layers=num_layers, parts=tuple(parts))
