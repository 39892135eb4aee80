"""KDA and GDN: decode steps and chunked prefill on states in the pool.

A decode step is everything between a layer's projections and its output norm; a
prefill is what follows the short convolution. Steps go from layer to layer of the
pool, and at small batches to further slots, until they touch enough memory.

Compared is one head of one row with a float32 recurrence: its outputs for at most 8,192
tokens, and the state if those are all.
"""

import dataclasses
import functools
import math
from typing import Any

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
from ukv.implementation import Implementation
from ukv.layout import PartView, PoolLayout, unified_layout
from ukv.ops import (
    DeltaTokens,
    DeltaViews,
    GdnGate,
    KdaGate,
    ProjectedTokens,
    ShortConv,
    StateSlots,
    gdn_decode_step,
    gdn_prefill,
    kda_decode_step,
    kda_prefill,
)
from ukv.ops.gpu_kernels import triton_kernels
from ukv.ops.state_places import place_of
from ukv.pool import pool_struct, read_entries
from ukv.spec import gdn_state_spec, kda_state_spec

CONV_WIDTH = 4
CHUNK = 64
CHECKED_TOKENS = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One shape of either kind of layer.

    Attributes:
      kind: "kda" or "gdn".
      heads: Heads of v.
      key_heads: Heads of q and of k.
      head_dim: Elements of a head of q, k or v.
      rows: Rows of the batch.
      tokens: Tokens of all rows together.
      dtype: Of the states.
      num_layers: Layers in the pool.
    """

    kind: str
    heads: int
    key_heads: int
    head_dim: int
    rows: int
    tokens: int
    dtype: str = "float32"
    num_layers: int = 20

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return (2 * self.key_heads + self.heads) * self.head_dim

    @property
    def gates(self) -> tuple[int, ...]:
        """Shape of a token's gate logits."""
        return (self.heads, self.head_dim) if self.kind == "kda" else (self.heads,)

    @property
    def state_bytes(self) -> int:
        """Bytes of a row's state in one layer."""
        return self.heads * self.head_dim**2 * jnp.dtype(self.dtype).itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes that a token brings and takes: q, k, v, logits and output."""
        num_gates = math.prod(self.gates)
        out = self.heads * self.head_dim
        return 2 * (self.channels + num_gates + self.heads + out)

    def layout(self, num_slots: int) -> PoolLayout:
        """Return a pool of this many slots."""
        sizes = {"key_dim": self.head_dim, "value_dim": self.head_dim}
        sizes |= {"conv_width": CONV_WIDTH, "num_layers": self.num_layers}
        sizes |= {"name": "state", "state_dtype": self.dtype}
        if self.kind == "kda":
            spec = kda_state_spec(num_heads=self.heads, **sizes)
        else:
            spec = gdn_state_spec(
                num_key_heads=self.key_heads, num_value_heads=self.heads, **sizes
            )
        window_bytes = 2 * (CONV_WIDTH - 1) * self.channels
        slot_bytes = self.num_layers * (self.state_bytes + window_bytes)
        pool_bytes = (num_slots + 3) * slot_bytes * 21 // 20
        return unified_layout([spec], pool_bytes=pool_bytes)

    def parameters(self) -> tuple[ShortConv, KdaGate | GdnGate]:
        """Return random parameters of a layer, as NumPy arrays."""
        rng = np.random.default_rng(1)
        weight = rng.standard_normal((self.channels, CONV_WIDTH)) * 0.5
        a_log = np.log(rng.uniform(1, 16, self.heads)).astype(np.float32)
        bias = (rng.standard_normal(self.gates) - 4).astype(np.float32)
        gate_type = KdaGate if self.kind == "kda" else GdnGate
        conv = ShortConv(weight=weight.astype(np.float32))
        return jax.tree.map(jnp.asarray, (conv, gate_type(a_log=a_log, dt_bias=bias)))


def _buffers(layout: PoolLayout) -> tuple[jax.Array, ...]:
    """Return a pool of pairs of small bfloat16 numbers: small float32 numbers too."""
    return tuple(
        random_words(buffer.shape, "bfloat16", smallest=2**-5)
        for buffer in pool_struct(layout).buffers
    )


def _values(seed: int, *shape: int) -> jax.Array:
    return random_values(shape, "bfloat16", seed=1 + seed)


def _slots(layout: PoolLayout, pages: np.ndarray) -> np.ndarray:
    return pages.astype(np.int32) * layout.sub_pool("state").blocks_per_page


def _state_of(
    buffers: tuple[jax.Array, ...], view: PartView, slots: jax.Array, row: int
) -> jax.Array:
    first_rows = slots[row : row + 1] + view.block_offset
    entry = read_entries(buffers[view.buffer_index], view, first_rows)
    return entry[0].astype(jnp.float32)


def _normalized(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def _recur(q, k, v, log_decay, beta, state) -> tuple[jax.Array, jax.Array]:
    """Run one head over its tokens, in float32; q and k are not normalised."""

    def step(state: jax.Array, token: tuple) -> tuple[jax.Array, jax.Array]:
        q, k, v, log_decay, beta = token
        state = state * jnp.exp(log_decay).reshape(1, -1)
        missing = beta * (v - jnp.sum(state * k[None], -1))
        state = state + missing[:, None] * k[None]
        return state, jnp.sum(state * q[None], -1)

    q = _normalized(q) * q.shape[-1] ** -0.5
    tokens = q, _normalized(k), v, log_decay, beta
    # A turn of the loop is launched by the host.
    state, outs = jax.lax.scan(step, state, tokens, unroll=min(16, len(q)))
    return outs, state


def _activate(
    gate: KdaGate | GdnGate, logits: jax.Array, beta_logits: jax.Array, head: int
) -> tuple[jax.Array, jax.Array]:
    """Return log decay and beta of one head, of logits that are its own."""
    bias = jnp.broadcast_to(gate.dt_bias[head], logits.shape)
    steps = jnp.logaddexp(logits + bias, 0.0)
    return -jnp.exp(gate.a_log[head]) * steps, jax.nn.sigmoid(beta_logits)


def _num_slot_sets(shape: Shape) -> int:
    """Return on how many sets of slots a step runs, to touch enough memory."""
    touched = 2 * shape.rows * shape.state_bytes * shape.num_layers
    return min(-(-COLD_BYTES // touched), 6)


def _views(layout: PoolLayout, layer: int) -> DeltaViews:
    return DeltaViews(
        recurrent=layout.part_view("state", layer=layer, part="recurrent"),
        conv=layout.part_view("state", layer=layer, part="conv"),
    )


def _decode_program(implementation, config, *, shape: Shape) -> Program:
    if config is not None:
        raise ValueError("a decode step has no configuration to try")
    rng, rows, sets = np.random.default_rng(0), shape.rows, _num_slot_sets(shape)
    layout = shape.layout(rows * sets)
    num_pages = layout.sub_pool("state").num_pages
    pages = 1 + rng.permutation(num_pages - 1)[: rows * sets].reshape(sets, rows)
    op = kda_decode_step if shape.kind == "kda" else gdn_decode_step
    # Looked at: the last row and head of the first call, which finds what make wrote.
    row, head = rows - 1, shape.heads - 1
    views = _views(layout, 0)

    def make():
        buffers = _buffers(layout)
        slot_sets = [jnp.asarray(_slots(layout, of_set)) for of_set in pages]
        tokens = ProjectedTokens(
            qkv=_values(0, rows, 1, shape.channels),
            gate_logits=_values(1, rows, 1, *shape.gates),
            beta_logits=_values(2, rows, 1, shape.heads),
        )
        before = tuple(
            _state_of(buffers, view, slot_sets[0], row)
            for view in (views.recurrent, views.conv)
        )
        out = jnp.zeros((rows, 1, shape.heads, shape.head_dim), jnp.bfloat16)
        return buffers, slot_sets, jnp.zeros(rows, bool), tokens, (out, out), before

    def step(state):
        conv, gate = shape.parameters()
        buffers, slot_sets, is_fresh, tokens, _, before = state
        outs = []
        for slots in slot_sets:
            ids = StateSlots(slots=KernelBlocks(slots, "state"), is_fresh=is_fresh)
            for layer in range(shape.num_layers):
                buffers, out = op(
                    buffers,
                    _views(layout, layer),
                    tokens,
                    conv,
                    gate,
                    ids,
                    implementation=implementation,
                )
                outs.append(out)
        return buffers, slot_sets, is_fresh, tokens, (outs[0], outs[-1]), before

    def error(state):
        conv, gate = shape.parameters()
        buffers, slot_sets, _, tokens, outs, (before, window) = state
        token = jax.tree.map(lambda x: x[row, 0].astype(jnp.float32), tokens)
        raw = jnp.concatenate([window, token.qkv[None]]) * conv.weight.T
        y = jax.nn.silu(jnp.sum(raw, axis=0)).reshape(-1, shape.head_dim)
        key_head = head // (shape.heads // shape.key_heads)
        q, k = y[key_head], y[shape.key_heads + key_head]
        v = y[2 * shape.key_heads + head]
        gates = _activate(gate, token.gate_logits[head], token.beta_logits[head], head)
        one = (x[None] for x in (q, k, v, *gates))
        wanted, after = _recur(*one, before[head])
        found = _state_of(buffers, views.recurrent, slot_sets[0], row)[head]
        return jnp.maximum(
            relative_error(outs[0][row, :, head], wanted), relative_error(found, after)
        )

    return Program(
        make=make,
        step=step,
        error=error,
        calls=sets * shape.num_layers,
        touched_bytes=2 * sets * shape.num_layers * rows * shape.state_bytes,
    )


def _prefill_op(shape: Shape, implementation, config):
    """Return a prefill as a model does it, or with a configuration of its kernels."""
    if config is None:
        op = kda_prefill if shape.kind == "kda" else gdn_prefill
        query_len = shape.tokens // shape.rows
        return functools.partial(
            op, max_query_len=query_len, implementation=implementation
        )
    run = triton_kernels("delta.prefill").delta_prefill

    def prefill(buffers, view, tokens, gate, bounds, slots):
        written = list(buffers)
        written[view.buffer_index], out = run(
            buffers[view.buffer_index],
            tokens.q,
            tokens.k,
            tokens.v,
            tokens.gate_logits.reshape(shape.tokens, -1),
            tokens.beta_logits,
            gate.a_log,
            gate.dt_bias.reshape(-1),
            bounds,
            slots.slots.ids,
            slots.is_fresh,
            None,
            state=place_of(view),
            config=config,
        )
        return tuple(written), out

    return prefill


def _prefill_program(implementation, config, *, shape: Shape) -> Program:
    rng, rows = np.random.default_rng(0), shape.rows
    layout = shape.layout(rows)
    pages = 1 + rng.permutation(layout.sub_pool("state").num_pages - 1)[:rows]
    heads, key_heads, dim = shape.heads, shape.key_heads, shape.head_dim
    op = _prefill_op(shape, implementation, config)
    query_len = shape.tokens // rows
    checked = min(query_len, CHECKED_TOKENS)
    # Looked at: the last row and head of the first layer.
    row, head, key_head = rows - 1, heads - 1, key_heads - 1
    view = _views(layout, 0).recurrent

    def make():
        buffers = _buffers(layout)
        slots = jnp.asarray(_slots(layout, pages))
        # Each layer has its own: XLA would run what two have in common only once.
        tokens = tuple(
            DeltaTokens(
                q=_values(5 * layer, shape.tokens, key_heads, dim),
                k=_values(5 * layer + 1, shape.tokens, key_heads, dim),
                v=_values(5 * layer + 2, shape.tokens, heads, dim),
                gate_logits=_values(5 * layer + 3, shape.tokens, *shape.gates),
                beta_logits=_values(5 * layer + 4, shape.tokens, heads),
            )
            for layer in range(shape.num_layers)
        )
        before = _state_of(buffers, view, slots, row)[head]
        bounds = jnp.arange(rows + 1, dtype=jnp.int32) * query_len
        out = jnp.zeros_like(tokens[0].v)
        ids = slots, jnp.zeros(rows, bool), bounds
        return buffers, ids, tokens, (out, out), before

    def step(state):
        _, gate = shape.parameters()
        buffers, ids, tokens, _, before = state
        slots, is_fresh, bounds = ids
        outs = []
        for layer in range(shape.num_layers):
            buffers, out = op(
                buffers,
                _views(layout, layer).recurrent,
                tokens[layer],
                gate,
                bounds,
                StateSlots(slots=KernelBlocks(slots, "state"), is_fresh=is_fresh),
            )
            outs.append(out)
        return buffers, ids, tokens, (outs[0], outs[-1]), before

    def error(state):
        _, gate = shape.parameters()
        buffers, (slots, _, _), tokens, outs, before = state
        part = slice(row * query_len, row * query_len + checked)
        of_row = jax.tree.map(lambda x: x[part].astype(jnp.float32), tokens[0])
        gates = _activate(
            gate, of_row.gate_logits[:, head], of_row.beta_logits[:, head], head
        )
        q, k, v = of_row.q[:, key_head], of_row.k[:, key_head], of_row.v[:, head]
        wanted, after = _recur(q, k, v, *gates, before)
        worst = relative_error(outs[0][part, head], wanted)
        if checked == query_len:
            found = _state_of(buffers, view, slots, row)[head]
            worst = jnp.maximum(worst, relative_error(found, after))
        return worst

    return Program(
        make=make,
        step=step,
        error=error,
        calls=shape.num_layers,
        touched_bytes=shape.num_layers * shape.tokens * shape.token_bytes,
    )


def _configs() -> dict[Implementation, tuple[Any, ...]]:
    make = triton_kernels("delta.prefill").DeltaPrefillConfig
    ways = ({"language": "triton"}, {"block_v": 64}, {"block_v": 128})
    return {"triton": tuple(make(**way) for way in ways)}


def _prefill_flops(shape: Shape) -> int:
    """Return the operations of the chunked form: products in a chunk and with it."""
    dim = shape.head_dim
    in_chunk = 2 * CHUNK * (2 * dim + 2 * dim + dim)
    with_state = 3 * 2 * dim * dim
    return shape.tokens * shape.heads * (in_chunk + with_state)


def _case(op: str, *, small: bool = False, **sizes) -> BenchCase:
    kind, _, phase = op.partition("_")
    sizes = {"heads": 32, "head_dim": 128, **sizes}
    if phase == "decode":
        sizes["rows"] = sizes["tokens"] = sizes.pop("batch")
    heads = sizes["heads"]
    shape = Shape(kind=kind, key_heads=heads if kind == "kda" else heads // 2, **sizes)
    names = {"heads": heads, "head_dim": shape.head_dim}
    state_bytes = 2 * shape.rows * shape.state_bytes
    moved_bytes = state_bytes + shape.tokens * shape.token_bytes
    if phase == "decode":
        names |= {"batch": shape.rows, "dtype": shape.dtype}
        # The window and the output of the convolution's inputs.
        moved_bytes += 2 * shape.rows * 2 * (CONV_WIDTH - 1) * shape.channels
        flops = 7 * shape.rows * shape.heads * shape.head_dim**2
        program = functools.partial(_decode_program, shape=shape)
    else:
        names |= {"tokens": shape.tokens, "rows": shape.rows}
        flops = _prefill_flops(shape)
        program = functools.partial(_prefill_program, shape=shape)
    return BenchCase(
        op=op,
        shape=names,
        moved_bytes=moved_bytes,
        flops=flops,
        max_error=0.02,
        implementations=("xla",) if small else ("triton",),
        program=program,
        configs={} if small or phase == "decode" else _configs(),
        bandwidth="copy",
        small=small,
    )


def cases() -> list[BenchCase]:
    """Return the shapes of Kimi-Linear-48B and of Qwen3-Next, and tiny ones."""
    found = [
        _case("kda_decode", batch=batch, dtype=dtype)
        for dtype in ("float32", "bfloat16")
        for batch in (1, 16, 64, 128, 256)
    ]
    found += [_case("gdn_decode", batch=batch) for batch in (1, 16, 64, 256)]
    for op in ("kda_prefill", "gdn_prefill"):
        found += [
            _case(op, tokens=tokens, rows=rows, num_layers=2)
            for tokens in (8192, 32768)
            for rows in (1, 16)
        ]
    tiny = {"heads": 4, "head_dim": 16, "num_layers": 2, "small": True}
    for kind in ("kda", "gdn"):
        found.append(_case(f"{kind}_decode", batch=3, **tiny))
        found.append(_case(f"{kind}_prefill", tokens=160, rows=2, **tiny))
    return found
