"""Which layers of a model see every token, and which see a window only."""

import dataclasses

import numpy as np

from models.config_fields import ConfigError, ConfigFields
from ukv.spec import AttentionSpec, SlidingWindowSpec, SubPoolSpec

_IS_WINDOWED = {"full_attention": False, "sliding_attention": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowPattern:
    """The order of full and sliding-window layers.

    Full layers keep their K and V in the sub-pool ``full``, the others in ``swa``,
    which shares the ids of ``full``.

    Attributes:
      is_windowed: For each layer, whether it sees a window only.
      window_size: Tokens that such a layer sees, the query's own included.
    """

    is_windowed: tuple[bool, ...]
    window_size: int

    @classmethod
    def from_config(
        cls, fields: ConfigFields, *, num_layers: int, default_period: int
    ) -> "WindowPattern":
        """Read ``layer_types``, or the period at which full layers come.

        Args:
          fields: The config.
          num_layers: Layers of the model.
          default_period: Without either field, every so many-th layer is full.

        Raises:
          ConfigError: A layer has another type, or there is not one for each layer.
        """
        named = fields.take("_sliding_window_pattern", int, None)
        period = fields.take("sliding_window_pattern", int, None) or named
        types = fields.take("layer_types", list, None)
        if types is None:
            period = period or default_period
            windowed = [(index + 1) % period != 0 for index in range(num_layers)]
        else:
            unknown = sorted({str(kind) for kind in types if kind not in _IS_WINDOWED})
            if unknown:
                raise ConfigError(
                    f"layer_types: {', '.join(unknown)} is not supported; a layer can "
                    f"be {' or '.join(_IS_WINDOWED)}"
                )
            windowed = [_IS_WINDOWED[kind] for kind in types]
        if len(windowed) != num_layers:
            raise ConfigError(
                f"layer_types has {len(windowed)} entries, num_hidden_layers is "
                f"{num_layers}"
            )
        window_size = fields.take("sliding_window", int)
        return cls(is_windowed=tuple(windowed), window_size=window_size)

    def place(self, index: int) -> tuple[str, int]:
        """Return a layer's sub-pool, and its index among the layers there.

        Example: of the layers swa, swa, full, swa, the last is layer 2 of ``swa``.
        """
        kind = self.is_windowed[index]
        return "swa" if kind else "full", self.is_windowed[:index].count(kind)

    def pool_specs(
        self, *, num_kv_heads: int, head_dim: int, page_size: int, dtype: np.dtype
    ) -> tuple[SubPoolSpec, ...]:
        """Return the sub-pools: ``full``, then ``swa``, each if it has layers.

        Args:
          num_kv_heads: Heads of K and V.
          head_dim: Elements per head.
          page_size: Tokens per page.
          dtype: Storage dtype of K and V.
        """
        num_windowed = sum(self.is_windowed)
        num_full = len(self.is_windowed) - num_windowed
        specs: list[SubPoolSpec] = []
        if num_full:
            specs.append(
                AttentionSpec(
                    name="full",
                    num_layers=num_full,
                    page_size=page_size,
                    num_kv_heads=num_kv_heads,
                    head_dim=head_dim,
                    dtype=dtype,
                )
            )
        if num_windowed:
            specs.append(
                SlidingWindowSpec(
                    name="swa",
                    num_layers=num_windowed,
                    page_size=page_size,
                    num_kv_heads=num_kv_heads,
                    head_dim=head_dim,
                    dtype=dtype,
                    window_size=self.window_size,
                    shares_ids="full" if num_full else None,
                )
            )
        return tuple(specs)
