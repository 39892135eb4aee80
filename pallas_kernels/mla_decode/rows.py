"""How the narrow kernel cuts its work, by the sizes of a row."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

REGISTERS = {
    1: {"scores": 160, "values": 240, "loads": 40},
    2: {"scores": 120, "values": 232, "loads": 40},
}
"""Of a thread, by the warpgroups of scores and by role; a thread of each of the three
or four warpgroups have 512 together."""


class Cut(NamedTuple):
    """How the work on a tile is cut.

    Attributes:
      chunks: Chunks of a tile.
      ring: Chunks in shared memory. With two warpgroups of scores an even number of
        tiles, so that the same one waits for a slot whenever it is filled: a barrier
        is waited for by parity.
      scorers: Warpgroups of scores, which take every second tile if they are two.
    """

    chunks: int
    ring: int
    scorers: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentRows:
    """What rows of all dtypes have.

    Attributes:
      latent_dim: Elements of a row that are key and value.
    """

    latent_dim: int

    CUTS: ClassVar[Mapping[int, Cut]]
    """By ``latent_dim``: those that there are."""

    @property
    def chunks(self) -> int:
        """Chunks of a tile."""
        return self.CUTS[self.latent_dim].chunks

    @property
    def ring(self) -> int:
        """Chunks of the ring."""
        return self.CUTS[self.latent_dim].ring

    @property
    def scorers(self) -> int:
        """Warpgroups of scores."""
        return self.CUTS[self.latent_dim].scorers

    @property
    def registers(self) -> Mapping[str, int]:
        """Registers of a thread, by role."""
        return REGISTERS[self.scorers]
