"""KDA and GDN: decode steps and chunked prefill on states in the pool.

A decode step is everything between a layer's projections and its output norm; a
prefill is what follows the short convolution. Steps go from layer to layer of the
pool, and at small batches to further slots, until they touch enough memory.

Compared is one head of one row with a float64 recurrence: its outputs for as many
tokens as that takes a second or two, and the state if that is all of them.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from scripts.kernel_benches.case import COLD_BYTES, BenchCase, Prepared
from ukv.ids import KernelBlocks
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
        """Return random parameters of a layer."""
        rng = np.random.default_rng(1)
        weight = rng.standard_normal((self.channels, CONV_WIDTH)) * 0.5
        a_log = jnp.asarray(np.log(rng.uniform(1, 16, self.heads)), jnp.float32)
        bias = jnp.asarray(rng.standard_normal(self.gates) - 4, jnp.float32)
        gate_type = KdaGate if self.kind == "kda" else GdnGate
        conv = ShortConv(weight=jnp.asarray(weight, jnp.float32))
        return conv, gate_type(a_log=a_log, dt_bias=bias)


@functools.partial(jax.jit, static_argnames=("rows", "words"))
def _random_buffer(rows: int, words: int) -> jax.Array:
    """Fill a pool with pairs of small bfloat16 numbers: small float32 numbers too."""

    def fill(number: jax.Array) -> jax.Array:
        # Cheap, and different in every row: what is in a state hardly matters.
        place = jnp.arange(2 * words, dtype=jnp.float32)
        values = 0.1 * jnp.sin(place + number.astype(jnp.float32))
        values = values.astype(jnp.bfloat16).reshape(words, 2)
        return jax.lax.bitcast_convert_type(values, jnp.uint32)

    return jax.vmap(fill)(jnp.arange(rows, dtype=jnp.uint32))


def _buffers(layout: PoolLayout) -> tuple[jax.Array, ...]:
    return tuple(
        _random_buffer(*buffer.shape) for buffer in pool_struct(layout).buffers
    )


def _random(rng: np.random.Generator, *shape: int) -> jax.Array:
    key = jax.random.key(int(rng.integers(1 << 30)))
    return jax.random.normal(key, shape, jnp.float32).astype(jnp.bfloat16)


def _slots(layout: PoolLayout, pages: np.ndarray) -> jax.Array:
    ids = pages.astype(np.int32) * layout.sub_pool("state").blocks_per_page
    return jnp.asarray(ids)


def _state_of(
    buffers: tuple[jax.Array, ...], view: PartView, slots: jax.Array, row: int
) -> np.ndarray:
    first_rows = slots[row : row + 1] + view.block_offset
    entry = read_entries(buffers[view.buffer_index], view, first_rows)
    return np.asarray(entry[0], np.float64)


def _recur(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    log_decay: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Run one head over its tokens, in float64; q and k are not normalised."""
    q = q / np.sqrt(np.sum(q * q, -1, keepdims=True) + 1e-6) * q.shape[-1] ** -0.5
    k = k / np.sqrt(np.sum(k * k, -1, keepdims=True) + 1e-6)
    outs = []
    for t in range(len(q)):
        state = state * np.exp(log_decay[t])
        state = state + np.outer(beta[t] * (v[t] - state @ k[t]), k[t])
        outs.append(state @ q[t])
    return np.stack(outs), state


def _activate(
    gate: KdaGate | GdnGate, logits: np.ndarray, beta_logits: np.ndarray, head: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return log decay and beta of one head, of logits that are its own."""
    bias = np.asarray(gate.dt_bias, np.float64)[head]
    rate = np.exp(np.asarray(gate.a_log, np.float64)[head])
    log_decay = -rate * np.logaddexp(logits + bias, 0)
    return log_decay, 1 / (1 + np.exp(-beta_logits))


def _error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.max(np.abs(actual - expected)) / np.max(np.abs(expected)))


def _num_slot_sets(shape: Shape) -> int:
    """Return on how many sets of slots a step runs, to touch enough memory."""
    touched = 2 * shape.rows * shape.state_bytes * shape.num_layers
    return min(-(-COLD_BYTES // touched), 4)


def _decode(shape: Shape, layout: PoolLayout, implementation, state):
    """Run every layer on every set of slots."""
    conv, gate = shape.parameters()
    op = kda_decode_step if shape.kind == "kda" else gdn_decode_step
    buffers, slot_sets, is_fresh, tokens, out = state
    for slots in slot_sets:
        for layer in range(shape.num_layers):
            views = DeltaViews(
                recurrent=layout.part_view("state", layer=layer, part="recurrent"),
                conv=layout.part_view("state", layer=layer, part="conv"),
            )
            buffers, out = op(
                buffers,
                views,
                tokens,
                conv,
                gate,
                StateSlots(slots=KernelBlocks(slots, "state"), is_fresh=is_fresh),
                implementation=implementation,
            )
    return buffers, slot_sets, is_fresh, tokens, out


def _refuse(config) -> None:
    if config is not None:
        raise ValueError("delta rule layers have no configuration to try")


def _prepare_decode(implementation, config, *, shape: Shape) -> Prepared:
    _refuse(config)
    rng, rows, sets = np.random.default_rng(0), shape.rows, _num_slot_sets(shape)
    layout = shape.layout(rows * sets)
    num_pages = layout.sub_pool("state").num_pages
    pages = 1 + rng.permutation(num_pages - 1)[: rows * sets].reshape(sets, rows)
    slot_sets = [_slots(layout, of_set) for of_set in pages]
    tokens = ProjectedTokens(
        qkv=_random(rng, rows, 1, shape.channels),
        gate_logits=_random(rng, rows, 1, *shape.gates),
        beta_logits=_random(rng, rows, 1, shape.heads),
    )
    buffers = _buffers(layout)
    out = jnp.zeros((rows, 1, shape.heads, shape.head_dim), jnp.bfloat16)
    # The output is that of the last call: the last layer on the last slots.
    views = [
        layout.part_view("state", layer=shape.num_layers - 1, part=part)
        for part in ("recurrent", "conv")
    ]
    row, head = rows - 1, shape.heads - 1
    before, window = (_state_of(buffers, view, slot_sets[-1], row) for view in views)
    step = functools.partial(_decode, shape, layout, implementation)
    jitted = jax.jit(step, donate_argnums=0)
    state = (buffers, slot_sets, jnp.zeros(rows, bool), tokens, out)
    state = jitted(state)
    conv, gate = shape.parameters()
    host = jax.tree.map(lambda x: np.asarray(x[row, 0], np.float64), state[3])
    raw = np.concatenate([window, host.qkv[None]]) * np.asarray(conv.weight).T
    y = np.sum(raw, axis=0)
    y = (y / (1 + np.exp(-y))).reshape(-1, shape.head_dim)
    key_head = head // (shape.heads // shape.key_heads)
    q, k = y[key_head], y[shape.key_heads + key_head]
    v = y[2 * shape.key_heads + head]
    gates = _activate(gate, host.gate_logits[head], host.beta_logits[head], head)
    gates = [np.asarray(x)[None] for x in gates]
    expected, after = _recur(q[None], k[None], v[None], *gates, before[head])
    found = _state_of(state[0], views[0], state[1][-1], row)[head]
    actual = np.asarray(state[4][row, :, head], np.float64)
    return Prepared(
        step=jitted,
        state=state,
        calls=sets * shape.num_layers,
        touched_bytes=2 * sets * shape.num_layers * rows * shape.state_bytes,
        error=max(_error(actual, expected), _error(found, after)),
    )


def _prefill(shape: Shape, layout: PoolLayout, implementation, state):
    """Run every layer on the same tokens."""
    _, gate = shape.parameters()
    op = kda_prefill if shape.kind == "kda" else gdn_prefill
    buffers, slots, is_fresh, cu_query_lens, tokens, out = state
    for layer in range(shape.num_layers):
        buffers, out = op(
            buffers,
            layout.part_view("state", layer=layer, part="recurrent"),
            tokens,
            gate,
            cu_query_lens,
            StateSlots(slots=KernelBlocks(slots, "state"), is_fresh=is_fresh),
            max_query_len=shape.tokens // shape.rows,
            implementation=implementation,
        )
    return buffers, slots, is_fresh, cu_query_lens, tokens, out


def _prepare_prefill(implementation, config, *, shape: Shape) -> Prepared:
    _refuse(config)
    rng, rows = np.random.default_rng(0), shape.rows
    layout = shape.layout(rows)
    pages = 1 + rng.permutation(layout.sub_pool("state").num_pages - 1)[:rows]
    slots = _slots(layout, pages)
    heads, key_heads, dim = shape.heads, shape.key_heads, shape.head_dim
    tokens = DeltaTokens(
        q=_random(rng, shape.tokens, key_heads, dim),
        k=_random(rng, shape.tokens, key_heads, dim),
        v=_random(rng, shape.tokens, heads, dim),
        gate_logits=_random(rng, shape.tokens, *shape.gates),
        beta_logits=_random(rng, shape.tokens, heads),
    )
    buffers = _buffers(layout)
    query_len = shape.tokens // rows
    cu_query_lens = jnp.arange(rows + 1, dtype=jnp.int32) * query_len
    view = layout.part_view("state", layer=shape.num_layers - 1, part="recurrent")
    row, head = rows - 1, heads - 1
    before = _state_of(buffers, view, slots, row)[head]
    step = functools.partial(_prefill, shape, layout, implementation)
    jitted = jax.jit(step, donate_argnums=0)
    state = (buffers, slots, jnp.zeros(rows, bool), cu_query_lens, tokens)
    state = jitted((*state, jnp.zeros_like(tokens.v)))
    checked = min(query_len, CHECKED_TOKENS)
    part = slice(row * query_len, row * query_len + checked)
    host = jax.tree.map(lambda x: np.asarray(x[part], np.float64), state[4])
    key_head = head // (heads // key_heads)
    gates = _activate(
        shape.parameters()[1],
        host.gate_logits[:, head],
        host.beta_logits[:, head],
        head,
    )
    expected, after = _recur(
        host.q[:, key_head], host.k[:, key_head], host.v[:, head], *gates, before
    )
    error = _error(np.asarray(state[5][part, head], np.float64), expected)
    if checked == query_len:
        found = _state_of(state[0], view, state[1], row)[head]
        error = max(error, _error(found, after))
    return Prepared(
        step=jitted,
        state=state,
        calls=shape.num_layers,
        touched_bytes=shape.num_layers * shape.tokens * shape.token_bytes,
        error=error,
    )


def _prefill_flops(shape: Shape) -> int:
    """Return the operations of the chunked form: products in a chunk and with it."""
    dim = shape.head_dim
    in_chunk = 2 * CHUNK * (2 * dim + 2 * dim + dim)
    with_state = 3 * 2 * dim * dim
    return shape.tokens * shape.heads * (in_chunk + with_state)


def _case(
    op: str, *, small: bool = False, with_xla: bool = False, **sizes
) -> BenchCase:
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
        prepare = functools.partial(_prepare_decode, shape=shape)
    else:
        names |= {"tokens": shape.tokens, "rows": shape.rows}
        flops = _prefill_flops(shape)
        prepare = functools.partial(_prepare_prefill, shape=shape)
    implementations = (
        ("xla",) if small else ("triton", "xla") if with_xla else ("triton",)
    )
    return BenchCase(
        op=op,
        shape=names,
        moved_bytes=moved_bytes,
        flops=flops,
        max_error=0.05,
        implementations=implementations,
        prepare=prepare,
        small=small,
    )


def cases() -> list[BenchCase]:
    """Return the shapes of Kimi-Linear-48B and of Qwen3-Next, and tiny ones."""
    found = [
        _case("kda_decode", batch=batch, with_xla=batch == 16)
        for batch in (1, 16, 64, 128, 256)
    ]
    found += [_case("kda_decode", batch=batch, dtype="bfloat16") for batch in (64, 256)]
    found += [_case("gdn_decode", batch=batch) for batch in (1, 64, 256)]
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
