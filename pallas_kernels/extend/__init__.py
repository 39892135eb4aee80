"""Attention of packed rows over paged keys and values, for Hopper."""

from pallas_kernels.extend.call import attend_packed
from pallas_kernels.extend.config import (
    ExtendConfig,
    Problem,
    Source,
    make_plan,
)
from pallas_kernels.extend.expand import expand_heads

__all__ = [
    "ExtendConfig",
    "Problem",
    "Source",
    "attend_packed",
    "expand_heads",
    "make_plan",
]
