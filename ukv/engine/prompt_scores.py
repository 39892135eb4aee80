"""How likely a prompt is, token by token: for evaluation by log-likelihood.

A step with prompts computes the logits of all its tokens then, not only of the last
of each row, and looks up the token that really follows.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from ukv.engine.plan import Chunk
from ukv.engine.request import TokenScore


def score_tokens(
    logits: Float32[Array, "tokens vocab"], targets: Int32[Array, " tokens"]
) -> Int32[Array, "2 tokens"]:
    """Return the bits of each target's log-probability, and whether it is the largest.

    Args:
      logits: Of every token of a step.
      targets: The token that follows; anything where none is known.
    """
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1, mode="clip")[:, 0]
    logprobs = chosen - jax.nn.logsumexp(logits, axis=-1)
    bits = jax.lax.bitcast_convert_type(logprobs, jnp.int32)
    is_greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32) == targets
    return jnp.stack([bits, is_greedy.astype(jnp.int32)])


def next_prompt_tokens(chunk: Chunk) -> tuple[int, ...]:
    """Return the tokens that follow those of a prompt's chunk, as far as there are."""
    start = chunk.context_len + 1
    return chunk.sequence.request.prompt[start : start + chunk.query_len]


def keep_scores(chunks: Sequence[Chunk], scores: np.ndarray) -> None:
    """Add what a step with prompts scored to its sequences.

    Args:
      chunks: Of the step, in their order.
      scores: As ``score_tokens`` returns them.
    """
    logprobs, is_greedy = scores[0].view(np.float32), scores[1].astype(bool)
    start = 0
    for chunk in chunks:
        first = chunk.sequence.request.params.scores_from
        if first is not None:
            count = len(next_prompt_tokens(chunk))
            for place in range(max(first - chunk.context_len - 1, 0), count):
                # A retracted prompt is fed again, and scores the same.
                chunk.sequence.prompt_scores[chunk.context_len + 1 + place] = (
                    TokenScore(
                        logprob=float(logprobs[start + place]),
                        is_greedy=bool(is_greedy[start + place]),
                    )
                )
        start += chunk.query_len
