"""The engine: continuous batching over the pool in jitted, donating steps."""

from ukv.engine.config import EngineConfig as EngineConfig
from ukv.engine.engine import Engine as Engine
from ukv.engine.layout import engine_layout as engine_layout
from ukv.engine.model import Model as Model
from ukv.engine.programs import Programs as Programs
from ukv.engine.request import FinishReason as FinishReason
from ukv.engine.request import Request as Request
from ukv.engine.request import RequestError as RequestError
from ukv.engine.request import RequestOutput as RequestOutput
from ukv.engine.request import SamplingParams as SamplingParams
from ukv.engine.request import TokenScore as TokenScore
from ukv.engine.stats import EngineStats as EngineStats
