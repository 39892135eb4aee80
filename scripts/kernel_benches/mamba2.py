"""Mamba2 decode: one token of every row on states in the pool.

A step goes from layer to layer of the pool. Compared is one head of one row of the
first layer with the update in float32.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from scripts.kernel_benches.case import (
    COLD_BYTES,
    BenchCase,
    Program,
    relative_error,
)
from scripts.kernel_benches.random_words import random_values, random_words
from ukv.ids import KernelBlocks
from ukv.layout import PoolLayout, unified_layout
from ukv.ops import Mamba2Parameters, Mamba2Tokens, StateSlots, mamba2_decode
from ukv.pool import pool_struct, read_entries
from ukv.spec import mamba2_state_spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One shape; the names are those of the record.

    Attributes:
      heads: Heads.
      head_dim: Inputs and outputs of a head.
      state_dim: Elements of a state for each of them.
      groups: Groups of heads that share their projections.
      batch: Rows.
      dtype: Of the states.
    """

    heads: int
    head_dim: int
    state_dim: int
    groups: int
    batch: int
    dtype: str = "float32"

    @property
    def state_bytes(self) -> int:
        """Bytes of a row's state in one layer."""
        elements = self.heads * self.head_dim * self.state_dim
        return elements * jnp.dtype(self.dtype).itemsize

    def layout(self, num_layers: int) -> PoolLayout:
        """Return a pool with a slot for each row and a few more."""
        spec = mamba2_state_spec(
            name="state",
            num_layers=num_layers,
            num_heads=self.heads,
            head_dim=self.head_dim,
            state_dim=self.state_dim,
            num_groups=self.groups,
            conv_width=4,
            state_dtype=self.dtype,
        )
        channels = self.heads * self.head_dim + 2 * self.groups * self.state_dim
        slot_bytes = num_layers * (self.state_bytes + 6 * channels)
        return unified_layout(
            [spec], pool_bytes=(self.batch + 3) * slot_bytes * 21 // 20
        )


def _parameters(shape: Shape) -> Mamba2Parameters:
    rng = np.random.default_rng(1)
    values = {
        "a_log": np.log(rng.uniform(1, 16, shape.heads)),
        "dt_bias": rng.standard_normal(shape.heads) - 4,
        "d_skip": rng.standard_normal(shape.heads),
    }
    return Mamba2Parameters(
        **{name: jnp.asarray(value, jnp.float32) for name, value in values.items()}
    )


def _program(implementation, config, *, shape: Shape, num_layers: int) -> Program:
    if config is not None:
        raise ValueError("Mamba2 layers have no configuration to try")
    layout = shape.layout(num_layers)
    sub = layout.sub_pool("state")
    order = 1 + np.random.default_rng(0).permutation(sub.num_pages - 1)[: shape.batch]
    slots = (order * sub.blocks_per_page).astype(np.int32)
    views = [
        layout.part_view("state", layer=layer, part="recurrent")
        for layer in range(num_layers)
    ]
    row, head = shape.batch - 1, shape.heads - 1

    def state_of(buffers, slots):
        first_rows = slots[row:] + views[0].block_offset
        entry = read_entries(buffers[views[0].buffer_index], views[0], first_rows)
        return entry[0, head].astype(jnp.float32)

    def make():
        buffers = tuple(
            random_words(buffer.shape, "bfloat16", smallest=2**-5)
            for buffer in pool_struct(layout).buffers
        )
        ids = jnp.asarray(slots)
        lead, group = (shape.batch, 1), (shape.groups, shape.state_dim)
        ends = (shape.heads, shape.head_dim), (shape.heads,), group, group
        x, dt_logits, b, c = (
            random_values((*lead, *end), "bfloat16", seed=1 + i)
            for i, end in enumerate(ends)
        )
        tokens = Mamba2Tokens(x=x, dt_logits=dt_logits, b=b, c=c)
        before = state_of(buffers, ids)
        outs = jnp.zeros_like(x), jnp.zeros_like(x)
        return buffers, ids, jnp.zeros(shape.batch, bool), tokens, outs, before

    def step(state):
        buffers, ids, is_fresh, tokens, _, before = state
        held = StateSlots(slots=KernelBlocks(ids, "state"), is_fresh=is_fresh)
        outs = []
        for view in views:
            buffers, out = mamba2_decode(
                buffers,
                view,
                tokens,
                _parameters(shape),
                held,
                implementation=implementation,
            )
            outs.append(out)
        return buffers, ids, is_fresh, tokens, (outs[0], outs[-1]), before

    def error(state):
        buffers, ids, _, tokens, outs, before = state
        token = jax.tree.map(lambda leaf: leaf[row, 0].astype(jnp.float32), tokens)
        of_head = jax.tree.map(lambda leaf: leaf[head], _parameters(shape))
        x, group = token.x[head], head // (shape.heads // shape.groups)
        dt = jnp.logaddexp(token.dt_logits[head] + of_head.dt_bias, 0.0)
        added = dt * x[:, None] * token.b[group][None]
        after = before * jnp.exp(-jnp.exp(of_head.a_log) * dt) + added
        wanted = jnp.sum(after * token.c[group][None], 1) + of_head.d_skip * x
        return jnp.maximum(
            relative_error(outs[0][row, 0, head], wanted),
            relative_error(state_of(buffers, ids), after),
        )

    return Program(
        make=make,
        step=step,
        error=error,
        calls=len(views),
        touched_bytes=2 * len(views) * shape.batch * shape.state_bytes,
    )


def _case(*, small: bool = False, **numbers) -> BenchCase:
    shape = Shape(**numbers)
    # Enough of them to touch more than the cache holds.
    num_layers = max(-(-COLD_BYTES // (2 * shape.batch * shape.state_bytes)), 8)
    x_elements = 2 * shape.heads * shape.head_dim + shape.heads
    elements = x_elements + 2 * shape.groups * shape.state_dim
    return BenchCase(
        op="mamba2_decode",
        shape=dataclasses.asdict(shape),
        moved_bytes=shape.batch * (2 * shape.state_bytes + 2 * elements),
        flops=5 * shape.batch * shape.heads * shape.head_dim * shape.state_dim,
        # bfloat16 rounds outputs, and states of its own, by up to 2**-9.
        max_error=1e-2,
        implementations=("xla",) if small else ("triton",),
        program=functools.partial(
            _program, shape=shape, num_layers=2 if small else num_layers
        ),
        bandwidth="copy",
        small=small,
    )


def cases() -> list[BenchCase]:
    """Return the shape of Nemotron-H-8B, and a tiny one."""
    nemotron = {"heads": 128, "head_dim": 64, "state_dim": 128, "groups": 8}
    tiny = {"heads": 4, "head_dim": 8, "state_dim": 16, "groups": 2, "small": True}
    found = [_case(**nemotron, batch=batch) for batch in (1, 16, 64, 256)]
    return [*found, _case(**tiny, batch=3)]
