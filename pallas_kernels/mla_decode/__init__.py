"""MLA decode over the pages of a pool."""

from pallas_kernels.mla_decode.config import MlaDecodeConfig as MlaDecodeConfig
from pallas_kernels.mla_decode.decode import mla_decode as mla_decode
