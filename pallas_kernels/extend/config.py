"""Static facts of an extend kernel: what it computes, and how it is cut."""

import dataclasses
from typing import NamedTuple

WARPGROUP_ROWS = 64
"""Query tokens of a consumer warpgroup: the rows of a wgmma."""

NUM_CONSUMERS = 2
COLUMN_TILE = 64
"""Columns of 2 bytes in a swizzled row of 128 bytes."""

MAX_SMEM_BYTES = 227 * 1024
_BARRIER_BYTES = 1024
ELEMENT_BYTES = 2


class Source(NamedTuple):
    """Columns of an array of cached rows that make keys or values.

    Attributes:
      column: First column, a multiple of 64.
      width: Columns, a multiple of 64.
      head_axis: Axis of the heads: 1 in ``[rows, kv_heads, columns]``, 0 in
        ``[kv_heads, rows, columns]``; None in ``[rows, columns]``, which all heads
        share.
    """

    column: int
    width: int
    head_axis: int | None


class Problem(NamedTuple):
    """What is computed.

    Attributes:
      num_q_heads: Query heads.
      num_kv_heads: Key/value heads, a divisor.
      keys: Sources whose columns, in order, make a key.
      value: Source of the values.
      page_size: Tokens per page, a multiple of 8.
      softmax_scale: Factor of ``q . k``, positive.
      window: Tokens a query sees, its own included, or None.
      soft_cap: ``c`` in ``c * tanh(s / c)`` of scaled scores, or None.
      has_sinks: Whether each head has a logit that joins the denominator only.
    """

    num_q_heads: int
    num_kv_heads: int
    keys: tuple[Source, ...]
    value: Source
    page_size: int
    softmax_scale: float
    window: int | None
    soft_cap: float | None
    has_sinks: bool

    @property
    def key_width(self) -> int:
        """Elements of a key."""
        return sum(source.width for source in self.keys)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtendConfig:
    """Tuning of an extend kernel.

    Attributes:
      block_kv: Keys of a block, a multiple of 64.
      stages: Blocks of keys and of values in shared memory.
      q_stages: Tiles of queries in shared memory. With 2 the next tile's queries
        arrive while the last one's outputs leave, which on an H200 gains nothing.
      num_ctas: Persistent CTAs, one per multiprocessor.
    """

    block_kv: int = 128
    stages: int = 2
    q_stages: int = 1
    num_ctas: int = 132

    def __post_init__(self):
        """Checks the ranges."""
        if self.block_kv < 64 or self.block_kv % 64 or self.block_kv > 256:
            raise ValueError(f"{self.block_kv=} must be a multiple of 64, up to 256")
        if self.stages < 2:
            raise ValueError(f"{self.stages=} must be at least 2")
        if self.q_stages not in (1, 2):
            raise ValueError(f"{self.q_stages=} must be 1 or 2")
        if self.num_ctas < 1:
            raise ValueError(f"{self.num_ctas=} must be at least 1")


class Plan(NamedTuple):
    """How a problem is cut for a configuration.

    Attributes:
      problem: What is computed.
      config: Tuning.
      heads_per_cta: 2 where both consumers take the same tokens, for two heads that
        share keys; 1 where the second takes the next tokens of the same head.
    """

    problem: Problem
    config: ExtendConfig
    heads_per_cta: int

    @property
    def block_q(self) -> int:
        """Query tokens of a tile."""
        return WARPGROUP_ROWS * NUM_CONSUMERS // self.heads_per_cta

    @property
    def copy_rows(self) -> int:
        """Rows that one asynchronous copy brings."""
        return min(self.problem.page_size, self.config.block_kv)

    @property
    def copies(self) -> int:
        """Copies that make a block, of one source."""
        return self.config.block_kv // self.copy_rows

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA."""
        problem, config = self.problem, self.config
        rows = WARPGROUP_ROWS * NUM_CONSUMERS
        q = config.q_stages * rows * problem.key_width
        block = config.block_kv * (problem.key_width + problem.value.width)
        staging = WARPGROUP_ROWS * problem.value.width
        elements = q + config.stages * block + staging
        return ELEMENT_BYTES * elements + _BARRIER_BYTES


def make_plan(problem: Problem, config: ExtendConfig) -> Plan:
    """Cut a problem.

    Raises:
      ValueError: The sizes are none that the kernel can do, or it would need more
        shared memory than there is.
    """
    if problem.num_q_heads % problem.num_kv_heads:
        raise ValueError(
            f"{problem.num_q_heads=} must be a multiple of {problem.num_kv_heads=}"
        )
    for source in (*problem.keys, problem.value):
        if source.width % COLUMN_TILE or source.column % COLUMN_TILE:
            raise ValueError(f"{source} must start and end at multiples of 64 columns")
    if problem.value.width != problem.keys[0].width:
        raise ValueError(
            f"values of {problem.value.width} must be as wide as the first part of "
            f"keys, {problem.keys[0].width}"
        )
    size = problem.page_size
    if size % 8 or (config.block_kv % size and size % config.block_kv):
        raise ValueError(
            f"page_size={size} must be a multiple of 8 and divide "
            f"{config.block_kv=}, or be a multiple of it"
        )
    if not problem.softmax_scale > 0:
        raise ValueError(f"softmax_scale={problem.softmax_scale} must be positive")
    if problem.window is not None and problem.window < 1:
        raise ValueError(f"window={problem.window} must be 1 or more, or None")
    if problem.soft_cap is not None and not problem.soft_cap > 0:
        raise ValueError(f"soft_cap={problem.soft_cap} must be positive, or None")
    group = problem.num_q_heads // problem.num_kv_heads
    plan = Plan(problem, config, 2 if group % 2 == 0 else 1)
    if plan.smem_bytes > MAX_SMEM_BYTES:
        raise ValueError(
            f"{config} needs {plan.smem_bytes} bytes of shared memory for {problem}, "
            f"more than {MAX_SMEM_BYTES}"
        )
    return plan


def default_config(problem: Problem) -> ExtendConfig:
    """Return the configuration with as many stages as fit, up to 4."""
    found = ExtendConfig()
    for stages in range(found.stages + 1, 5):
        more = dataclasses.replace(found, stages=stages)
        if Plan(problem, more, 1).smem_bytes > MAX_SMEM_BYTES:
            break
        found = more
    return found
