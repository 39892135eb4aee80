"""One request on a pool of its own: a host loop over translated steps.

For demonstrations only, and the place where to see a step from begin to end. It holds
all its pages from the start and serves nobody else; an engine will replace it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from models.registry import Model
from ukv.allocator import alloc, make_room, raise_on_error
from ukv.errors import BudgetError
from ukv.ids import VirtualPages
from ukv.layout import (
    PoolLayout,
    RequestShape,
    max_requests,
    packed_bytes,
    unified_layout,
)
from ukv.pool import PoolState, create_pool
from ukv.translator import (
    Bucket,
    KVIndexTranslator,
    StaticTables,
    StepBatch,
    make_static_tables,
    translated_step,
)

MAX_CHUNK = 256


def layout_for(
    model: Model,
    *,
    num_tokens: int,
    page_size: int,
    dtype: np.dtype,
    pool_bytes: int | None,
) -> PoolLayout:
    """Return a unified pool that holds one request.

    Args:
      model: Says what it keeps.
      num_tokens: Prompt and output together.
      page_size: Tokens per page.
      dtype: Storage dtype of K, V and latents.
      pool_bytes: Budget; None for just enough.

    Raises:
      BudgetError: The request does not fit into the budget.
    """
    specs = model.pool_specs(page_size=page_size, dtype=dtype)
    pages = {s.name: -(-num_tokens // page_size) if s.grows else 1 for s in specs}
    needed = packed_bytes(specs, pages)
    layout = unified_layout(
        specs, pool_bytes=needed if pool_bytes is None else pool_bytes
    )
    # No window is released here, so a chunk may be as long as the request.
    shape = RequestShape(num_tokens=num_tokens, chunk_len=num_tokens)
    if max_requests(layout, shape) < 1:
        raise BudgetError(
            f"{num_tokens} tokens need {needed:,} bytes, the pool has "
            f"{layout.pool_bytes:,}: give more, or fewer tokens"
        )
    return layout


def sample(
    logits: Float32[Array, " vocabulary"],
    key: jax.Array,
    temperature: Float32[Array, ""],
    top_p: Float32[Array, ""],
) -> Int32[Array, ""]:
    """Draw a token from the fewest that hold ``top_p`` of the probability.

    Args:
      logits: Of one position.
      key: Random key.
      temperature: Divides the logits; 0 takes the best.
      top_p: In (0, 1].
    """
    order = jnp.argsort(-logits)
    sorted_logits = logits[order] / jnp.maximum(temperature, 1e-6)
    probabilities = jax.nn.softmax(sorted_logits)
    # A token stays if those before it do not hold top_p yet: the first always does.
    is_kept = jnp.cumsum(probabilities) - probabilities < top_p
    drawn = jax.random.categorical(key, jnp.where(is_kept, sorted_logits, -jnp.inf))
    return order[jnp.where(temperature > 0, drawn, 0)].astype(jnp.int32)


class SingleRequest:
    """Feeds one request to a model, chunk by chunk, then token by token."""

    def __init__(
        self,
        model: Model,
        weights: Any,
        layout: PoolLayout,
        *,
        num_tokens: int,
        seed: int,
    ) -> None:
        """Create the pool and take the request's pages and slots.

        Args:
          model: The model.
          weights: Its arrays.
          layout: From ``layout_for``.
          num_tokens: Prompt and output together.
          seed: Of the sampling.
        """
        self._model, self._weights = model, weights
        self._translator = KVIndexTranslator(layout)
        self._key = jax.random.key(seed)
        self._num_tokens, self._context_len = num_tokens, 0
        counts = {
            sub.name: -(-num_tokens // sub.page_size) if sub.spec.grows else 1
            for sub in layout.owners
        }

        def take(pool: PoolState) -> tuple[PoolState, dict[str, VirtualPages]]:
            pool, _ = make_room(pool, counts)
            pool, grant = alloc(pool, counts, max_pages=counts)
            # One row: of pages where they grow, of one slot where they do not.
            rows = {
                name: pages.replace(ids=pages.ids[None, :])
                if layout.sub_pool(name).spec.grows
                else pages
                for name, pages in grant.pages.items()
            }
            return pool, rows

        self._pool, self._tables = jax.jit(take, donate_argnums=0)(create_pool(layout))
        raise_on_error(self._pool)
        self._max_pages = max(counts.values())
        self._step = jax.jit(
            self._run, static_argnames="num_tokens", donate_argnames="pool"
        )
        self._static: dict[int, StaticTables] = {}

    def _run(
        self,
        weights: Any,
        pool: PoolState,
        static: StaticTables,
        tables: dict[str, VirtualPages],
        tokens: jax.Array,
        lens: jax.Array,
        sampling: tuple[jax.Array, jax.Array, jax.Array],
        *,
        num_tokens: int,
    ) -> tuple[jax.Array, PoolState]:
        context_len, query_len = lens[0], lens[1]
        batch = StepBatch(
            page_tables=tables,
            cu_query_lens=jnp.stack([jnp.zeros_like(query_len), query_len]),
            kv_lens=(context_len + query_len)[None],
            num_tokens=num_tokens,
        )
        pool, _, inputs = translated_step(
            self._translator, static, pool, batch, tokens, max_query_len=num_tokens
        )
        logits, pool = self._model.forward(weights, inputs, pool)
        return sample(logits[0], *sampling), pool

    def _feed(
        self, tokens: Sequence[int], size: int, temperature: float, top_p: float
    ) -> jax.Array:
        """Run one step on ``tokens``, padded to ``size``, and sample what follows."""
        if size not in self._static:
            bucket = Bucket(num_rows=1, max_pages=self._max_pages, num_tokens=size)
            tables = make_static_tables(self._translator, [bucket])
            self._static[size] = tables[bucket]
        padded = np.zeros(size, np.int32)
        padded[: len(tokens)] = tokens
        self._key, key = jax.random.split(self._key)
        sampling = (key, jnp.float32(temperature), jnp.float32(top_p))
        token, self._pool = self._step(
            self._weights,
            pool=self._pool,
            static=self._static[size],
            tables=self._tables,
            tokens=jnp.asarray(padded),
            lens=jnp.asarray([self._context_len, len(tokens)], jnp.int32),
            sampling=sampling,
            num_tokens=size,
        )
        self._context_len += len(tokens)
        return token

    def generate(
        self,
        prompt: Sequence[int],
        *,
        stop_tokens: frozenset[int],
        temperature: float,
        top_p: float,
    ) -> Iterator[int]:
        """Yield tokens one by one, the stop token last, while there is room.

        Args:
          prompt: At least one token.
          stop_tokens: Tokens that end the answer.
          temperature: 0 for the best token.
          top_p: Share of the probability to draw from.
        """
        # One size for all chunks, so that two programs are compiled in all.
        size = 1 << (min(len(prompt), MAX_CHUNK) - 1).bit_length()
        token = None
        for start in range(0, len(prompt), size):
            chunk = prompt[start : start + size]
            token = self._feed(chunk, size, temperature, top_p)
        assert token is not None, "the prompt has no token"
        while True:
            found = int(token)
            yield found
            if found in stop_tokens or self._context_len + 1 > self._num_tokens:
                break
            token = self._feed([found], 1, temperature, top_p)
        raise_on_error(self._pool)
