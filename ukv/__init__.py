"""One byte buffer with moving borders for the memory of hybrid language models.

Specs say what each sub-pool stores, a layout turns them and a budget into bytes, a
pool is a pytree of device arrays, and every operation on it is a pure function that
works under ``jit`` and donation. ``ukv.ops`` has the ops that read and write it,
``ukv.memory_map`` draws it, and ``Engine`` serves requests from it.
"""

from ukv.allocator import Compaction as Compaction
from ukv.allocator import ErrorBit as ErrorBit
from ukv.allocator import Grant as Grant
from ukv.allocator import PoolMirror as PoolMirror
from ukv.allocator import alloc as alloc
from ukv.allocator import alloc_decode as alloc_decode
from ukv.allocator import alloc_extend as alloc_extend
from ukv.allocator import append_pages as append_pages
from ukv.allocator import clear_error as clear_error
from ukv.allocator import compact as compact
from ukv.allocator import copy_page as copy_page
from ukv.allocator import describe_error as describe_error
from ukv.allocator import free as free
from ukv.allocator import free_full as free_full
from ukv.allocator import free_window as free_window
from ukv.allocator import make_room as make_room
from ukv.allocator import raise_on_error as raise_on_error
from ukv.allocator import share as share
from ukv.allocator import verify as verify
from ukv.engine import Engine as Engine
from ukv.engine import EngineConfig as EngineConfig
from ukv.engine import EngineStats as EngineStats
from ukv.engine import FinishReason as FinishReason
from ukv.engine import Model as Model
from ukv.engine import RequestError as RequestError
from ukv.engine import RequestOutput as RequestOutput
from ukv.engine import SamplingParams as SamplingParams
from ukv.engine import TokenScore as TokenScore
from ukv.errors import BudgetError as BudgetError
from ukv.errors import IdSpaceError as IdSpaceError
from ukv.errors import PoolStateError as PoolStateError
from ukv.errors import SpecError as SpecError
from ukv.errors import UkvError as UkvError
from ukv.errors import UnknownSubPoolError as UnknownSubPoolError
from ukv.errors import UnsupportedError as UnsupportedError
from ukv.ids import ABSENT_BLOCK as ABSENT_BLOCK
from ukv.ids import NULL_PAGE as NULL_PAGE
from ukv.ids import KernelBlocks as KernelBlocks
from ukv.ids import PhysicalPages as PhysicalPages
from ukv.ids import VirtualPages as VirtualPages
from ukv.ids import WriteLocations as WriteLocations
from ukv.layout import PartView as PartView
from ukv.layout import PoolLayout as PoolLayout
from ukv.layout import RequestShape as RequestShape
from ukv.layout import SubPoolLayout as SubPoolLayout
from ukv.layout import describe as describe
from ukv.layout import max_pages as max_pages
from ukv.layout import max_requests as max_requests
from ukv.layout import max_tokens as max_tokens
from ukv.layout import smallest_pool_bytes as smallest_pool_bytes
from ukv.layout import static_layout as static_layout
from ukv.layout import unified_layout as unified_layout
from ukv.pool import PoolState as PoolState
from ukv.pool import create_pool as create_pool
from ukv.spec import AttentionSpec as AttentionSpec
from ukv.spec import MLASpec as MLASpec
from ukv.spec import Part as Part
from ukv.spec import SlidingWindowSpec as SlidingWindowSpec
from ukv.spec import StateSpec as StateSpec
from ukv.spec import gdn_state_spec as gdn_state_spec
from ukv.spec import kda_state_spec as kda_state_spec
from ukv.spec import mamba2_state_spec as mamba2_state_spec
from ukv.translator import Bucket as Bucket
from ukv.translator import KVIndexTable as KVIndexTable
from ukv.translator import KVIndexTranslator as KVIndexTranslator
from ukv.translator import StaticTables as StaticTables
from ukv.translator import StepBatch as StepBatch
from ukv.translator import StepInputs as StepInputs
from ukv.translator import make_static_tables as make_static_tables
from ukv.translator import refresh_static_tables as refresh_static_tables
from ukv.translator import step_inputs as step_inputs
from ukv.translator import translated_step as translated_step
