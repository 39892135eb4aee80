"""Attention of packed rows over paged keys and values, for Hopper."""

from pallas_kernels.extend.call import attend_packed
from pallas_kernels.extend.config import (
    ExtendConfig,
    Problem,
    Source,
    make_plan,
)

__all__ = ["ExtendConfig", "Problem", "Source", "attend_packed", "make_plan"]
