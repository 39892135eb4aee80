"""Ops over the pool: each is one public function with several implementations."""

from ukv.ops.gqa import gqa_attention as gqa_attention
from ukv.ops.gqa import gqa_decode as gqa_decode
from ukv.ops.implementation import SUPPORT as SUPPORT
from ukv.ops.implementation import Implementation as Implementation
from ukv.ops.implementation import OpCase as OpCase
from ukv.ops.implementation import Support as Support
from ukv.ops.implementation import Target as Target
from ukv.ops.implementation import default_target as default_target
from ukv.ops.implementation import resolve as resolve
from ukv.ops.kv_write import write_kv as write_kv
from ukv.ops.mla import mla_decode as mla_decode
from ukv.ops.mla import mla_extend as mla_extend
from ukv.ops.mla import mla_extend_absorbed as mla_extend_absorbed
