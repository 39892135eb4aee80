"""One jitted, donating step for each bucket: pages, forward pass, sampling.

A step takes the device state, the bucket's translated tables, the weights and one
packed int32 array, and returns state, tables and results. A decode step runs one or
more passes, each of which draws a token for every row; a step with prompts runs one
pass over packed tokens, among them one of each row that decodes.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from ukv.allocator import alloc_decode, alloc_extend
from ukv.engine.device_state import DeviceState
from ukv.engine.model import Model
from ukv.engine.plan import Chunk
from ukv.engine.prompt_scores import next_prompt_tokens, score_tokens
from ukv.engine.row_programs import release_behind_windows, rows_of
from ukv.engine.sampling import sample, unpack_params
from ukv.pytree import Leaf
from ukv.translator import (
    Bucket,
    KVIndexTranslator,
    StaticTables,
    StepBatch,
    translated_step,
)

NUM_COLUMNS = 5
"""Row, context length, query length, whether it decodes, whether it is sampled."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShape:
    """The static shape of a step: one compiled program.

    Attributes:
      bucket: Rows, pages of a row, tokens.
      num_passes: Decode passes; None for a step with prompts.
      scores_tokens: Whether a step with prompts scores the token after each.
    """

    bucket: Bucket
    num_passes: int | None
    scores_tokens: bool = False

    @property
    def is_decode(self) -> bool:
        """Whether every row has one token in each pass."""
        return self.num_passes is not None

    @property
    def name(self) -> str:
        """For messages and progress bars."""
        if self.is_decode:
            return f"decode of {self.bucket.num_rows} rows"
        return f"prefill of {self.bucket.num_tokens} tokens"


class StepResults(flax.struct.PyTreeNode):
    """What the host reads, one step behind.

    Attributes:
      drawn: int32 ``[passes, 4, rows]``: tokens, bits of their float32
        log-probabilities, whether a stop token, whether all logits are numbers.
      scores: int32 ``[2, num_tokens]``, as ``score_tokens`` returns them; no token
        where the step scores none.
      error: uint32 ``[sub_pools]``, the pool's error word.
    """

    drawn: Leaf
    scores: Leaf
    error: Leaf


def pack_chunks(shape: StepShape, chunks: Sequence[Chunk], max_rows: int) -> np.ndarray:
    """Return the one array that tells the device what to do.

    A table of rows, the tokens of prompts, and what follows each if that is scored.

    Args:
      shape: A shape that holds the chunks.
      chunks: The rows of the step.
      max_rows: Row id of padding.
    """
    num_rows = shape.bucket.num_rows
    num_tokens = 0 if shape.is_decode else shape.bucket.num_tokens
    num_lists = 2 if shape.scores_tokens else 1
    packed = np.zeros(num_rows * NUM_COLUMNS + num_lists * num_tokens, np.int32)
    table = packed[: num_rows * NUM_COLUMNS].reshape(num_rows, NUM_COLUMNS)
    tokens = packed[num_rows * NUM_COLUMNS :]
    table[:, 0] = max_rows
    start = 0
    for row, chunk in zip(table, chunks, strict=False):
        row[:] = (
            chunk.row,
            chunk.context_len,
            chunk.query_len,
            chunk.is_decoding,
            chunk.is_sampled,
        )
        if shape.is_decode:
            continue
        stop = start + chunk.query_len
        if not chunk.is_decoding:
            tokens[start:stop] = chunk.sequence.tokens(
                chunk.context_len, chunk.context_len + chunk.query_len
            )
            if shape.scores_tokens:
                targets = next_prompt_tokens(chunk)
                first = num_tokens + start
                tokens[first : first + len(targets)] = targets
        start = stop
    return packed


class _Rows(flax.struct.PyTreeNode):
    """The rows of one pass, unpacked."""

    ids: Leaf
    context_lens: Leaf
    query_lens: Leaf
    is_decoding: Leaf
    is_sampled: Leaf


def _with_pages(
    state: DeviceState, rows: _Rows, shape: StepShape
) -> tuple[DeviceState, dict]:
    """Allocate the pages of a pass; return the page tables of its rows too."""
    layout = state.pool.layout
    tables = {name: rows_of(t, rows.ids) for name, t in state.page_tables.items()}
    growing = {sub.name: tables[sub.name] for sub in layout.owners if sub.spec.grows}
    if not growing:
        return state, tables
    if shape.is_decode:
        pool, grown, _ = alloc_decode(
            state.pool, growing, rows.context_lens, rows.query_lens > 0
        )
    else:
        # Each row opens at most one page beyond those that its tokens fill.
        smallest = min(layout.owner(name).page_size for name in growing)
        most = shape.bucket.num_tokens // smallest + shape.bucket.num_rows
        pool, grown, _ = alloc_extend(
            state.pool, growing, rows.context_lens, rows.query_lens, max_new_pages=most
        )
    all_tables = dict(state.page_tables)
    for name, table in grown.items():
        whole = all_tables[name]
        all_tables[name] = whole.replace(
            ids=whole.ids.at[rows.ids].set(table.ids, mode="drop")
        )
    return state.replace(pool=pool, page_tables=all_tables), {**tables, **grown}


def _packed_tokens(
    state: DeviceState,
    rows: _Rows,
    cu_query_lens: Int32[Array, " ends"],
    tokens: Int32[Array, " num_tokens"],
) -> Int32[Array, " num_tokens"]:
    """Return the host's tokens with those that only the device has filled in."""
    last = state.last_tokens.at[rows.ids].get(mode="fill", fill_value=0)
    place = jnp.where(rows.is_decoding, cu_query_lens[:-1], tokens.shape[0])
    return tokens.at[place].set(last, mode="drop")


def _run_pass(
    model: Model,
    translator: KVIndexTranslator,
    shape: StepShape,
    weights: Any,
    state: DeviceState,
    static: StaticTables,
    rows: _Rows,
    tokens: Int32[Array, " num_tokens"],
    targets: Int32[Array, " num_tokens"] | None,
) -> tuple[DeviceState, StaticTables, Int32[Array, "4 rows"], Int32[Array, "2 scored"]]:
    """Give rows their pages, compute their tokens, draw and score the next ones."""
    num_rows, num_tokens = shape.bucket.num_rows, shape.bucket.num_tokens
    state, tables = _with_pages(state, rows, shape)
    is_stopped = state.is_stopped.at[rows.ids].get(mode="fill", fill_value=True)
    # A stopped row keeps the pages that the host counted, and writes nothing.
    kv_lens = jnp.where(
        (rows.query_lens > 0) & ~is_stopped, rows.context_lens + rows.query_lens, 0
    )
    if shape.is_decode:
        cu_query_lens = jnp.arange(num_rows + 1, dtype=jnp.int32)
    else:
        ends = jnp.cumsum(rows.query_lens, dtype=jnp.int32)
        cu_query_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    pool, static, inputs = translated_step(
        translator,
        static,
        state.pool,
        StepBatch(
            page_tables=tables,
            cu_query_lens=cu_query_lens,
            kv_lens=kv_lens,
            num_tokens=num_tokens,
        ),
        _packed_tokens(state, rows, cu_query_lens, tokens),
        max_query_len=1 if shape.is_decode else num_tokens,
        logit_tokens=None if targets is None else jnp.arange(num_tokens),
    )
    logits, pool = model.forward(weights, inputs, pool)
    scores = jnp.zeros((2, 0), jnp.int32)
    if targets is not None:
        scores = score_tokens(logits, targets)
        logits = logits[jnp.maximum(cu_query_lens[1:] - 1, 0)]
    pool = release_behind_windows(
        pool,
        state,
        rows.ids,
        tables,
        rows.context_lens,
        rows.query_lens,
        1 if shape.is_decode else num_tokens,
    )
    params = state.params.at[rows.ids].get(mode="clip")
    drawn = sample(logits, unpack_params(params), kv_lens)
    max_rows = state.is_stopped.shape[0]
    target = jnp.where(rows.is_sampled & (kv_lens > 0), rows.ids, max_rows)
    state = state.replace(
        pool=pool,
        last_tokens=state.last_tokens.at[target].set(drawn.tokens, mode="drop"),
        is_stopped=state.is_stopped.at[target].set(
            drawn.is_stop | ~drawn.is_finite, mode="drop"
        ),
    )
    bits = jax.lax.bitcast_convert_type(drawn.logprobs, jnp.int32)
    columns = (drawn.tokens, bits, drawn.is_stop, drawn.is_finite)
    table = jnp.stack([column.astype(jnp.int32) for column in columns])
    return state, static, table, scores


def make_step(model: Model, translator: KVIndexTranslator, shape: StepShape):
    """Return the jitted step of one shape: it donates state and tables.

    Args:
      model: The model.
      translator: Of the pool's layout.
      shape: Rows, tokens and passes.

    Returns:
      ``step(state, static, weights, packed) -> (state, static, results)``.
    """
    num_rows = shape.bucket.num_rows

    def step(
        state: DeviceState,
        static: StaticTables,
        weights: Any,
        packed: Int32[Array, " packed"],
    ) -> tuple[DeviceState, StaticTables, StepResults]:
        table = packed[: num_rows * NUM_COLUMNS].reshape(num_rows, NUM_COLUMNS)
        rows = _Rows(
            ids=table[:, 0],
            context_lens=table[:, 1],
            query_lens=table[:, 2],
            is_decoding=table[:, 3] > 0,
            is_sampled=table[:, 4] > 0,
        )
        if shape.num_passes is None:
            tokens, targets = packed[num_rows * NUM_COLUMNS :], None
            if shape.scores_tokens:
                tokens, targets = jnp.split(tokens, 2)
            state, static, drawn, scores = _run_pass(
                model, translator, shape, weights, state, static, rows, tokens, targets
            )
            return state, static, _results(state, drawn[None], scores)

        def decode_pass(carry, done):
            state, static = carry
            is_active = done < rows.query_lens
            now = rows.replace(
                context_lens=rows.context_lens + done,
                query_lens=is_active.astype(jnp.int32),
                is_sampled=rows.is_sampled & is_active,
            )
            tokens = jnp.zeros(num_rows, jnp.int32)
            state, static, drawn, _ = _run_pass(
                model, translator, shape, weights, state, static, now, tokens, None
            )
            return (state, static), drawn

        carry = (state, static)
        if shape.num_passes == 1:
            carry, drawn = decode_pass(carry, jnp.int32(0))
            drawn = drawn[None]
        else:
            done = jnp.arange(shape.num_passes, dtype=jnp.int32)
            carry, drawn = jax.lax.scan(decode_pass, carry, done)
        return *carry, _results(carry[0], drawn, jnp.zeros((2, 0), jnp.int32))

    return jax.jit(step, donate_argnums=(0, 1))


def _results(
    state: DeviceState,
    drawn: Int32[Array, "passes 4 rows"],
    scores: Int32[Array, "2 scored"],
) -> StepResults:
    # A copy of its own: the state is donated to the next step before this is read.
    error = state.pool.error | jnp.uint32(0)
    return StepResults(drawn=drawn, scores=scores, error=error)
