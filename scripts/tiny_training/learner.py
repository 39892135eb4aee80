"""One step of training and greedy answers, as jitted functions of tensors."""

import dataclasses
import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float32, Int16, Int32

from models.kimi_linear import KimiLinear
from models.weights import assemble_weights
from scripts.tiny_training.parameters import ROUTER_BIAS, Tensors

# A step moves the bias of a router by this share of the learning rate.
BIAS_SHARE = 0.5

OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.scale_by_adam(b1=0.9, b2=0.98),
    optax.add_decayed_weights(
        0.05, mask=lambda tensors: jax.tree.map(lambda t: t.ndim == 2, tensors)
    ),
)
"""AdamW with clipped gradients, before the learning rate."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner:
    """A model and how its parameters learn.

    Attributes:
      model: Sizes and forward pass.
      dtype: What is computed in; parameters and sums are float32.
      answer_token: The word before an answer; a colon follows.
      end_token: What ends an answer.
    """

    model: KimiLinear
    dtype: str
    answer_token: int
    end_token: int

    def is_answer(self, tokens: Int32[Array, "rows length"]) -> jax.Array:
        """Return which tokens belong to an answer, its end included."""
        place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        starts = jax.lax.cummax(
            jnp.where(tokens == self.answer_token, place, -1), axis=1
        )
        is_end = jnp.where(tokens == self.end_token, place, -1)
        ends = jax.lax.cummax(jnp.pad(is_end, ((0, 0), (1, 0)))[:, :-1], axis=1)
        return (starts > ends) & (place > starts + 1)

    def loss(
        self, tensors: Tensors, tokens: Int32[Array, "rows length"]
    ) -> tuple[Float32[Array, ""], Float32[Array, "moe_layers experts"]]:
        """Return the mean loss of the tokens of answers, and the experts' loads."""
        weights = assemble_weights(self.model.weights(), tensors, jnp.dtype(self.dtype))
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        counted = self.is_answer(tokens)[:, 1:].astype(jnp.float32)
        is_token = jnp.ones(inputs.shape, bool)
        logits, loads = self.model.forward_rows(weights, inputs, is_token)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.sum(losses * counted) / jnp.sum(counted), loads

    @ft.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
    def train(
        self,
        tensors: Tensors,
        state: optax.OptState,
        batches: Int16[Array, "steps rows length"],
        rates: Float32[Array, " steps"],
    ) -> tuple[Tensors, optax.OptState, jax.Array, jax.Array]:
        """Learn from batches, one step for each, at these learning rates.

        Returns:
          The tensors, the optimizer's state, the loss of each step, and of each the
          largest load of an expert over that of an even split.
        """

        def step(
            carry: tuple[Tensors, optax.OptState],
            inputs: tuple[jax.Array, jax.Array],
        ) -> tuple[tuple[Tensors, optax.OptState], tuple[jax.Array, jax.Array]]:
            tensors, state = carry
            tokens, rate = inputs
            (loss, loads), gradients = jax.value_and_grad(self.loss, has_aux=True)(
                tensors, tokens.astype(jnp.int32)
            )
            updates, state = OPTIMIZER.update(gradients, state, tensors)
            tensors = jax.tree.map(
                lambda t, update: t - rate * update, tensors, updates
            )
            tensors = tensors | self._balanced(tensors, loads, BIAS_SHARE * rate)
            even = jnp.mean(loads, axis=1, keepdims=True)
            return (tensors, state), (loss, jnp.max(loads / even))

        (tensors, state), (losses, peaks) = jax.lax.scan(
            step, (tensors, state), (batches, rates)
        )
        return tensors, state, losses, peaks

    def _balanced(self, tensors: Tensors, loads: jax.Array, by: jax.Array) -> Tensors:
        """Raise the bias of experts that were chosen too rarely, lower the others'.

        Source: DeepSeek-V3 (arXiv:2412.19437), section 2.1.2.
        """
        assert self.model.moe is not None
        moves = by * jnp.sign(jnp.mean(loads, axis=1, keepdims=True) - loads)
        names = (
            f"model.layers.{layer}.block_sparse_moe.gate{ROUTER_BIAS}"
            for layer in self.model.moe.layers
        )
        return {
            name: tensors[name] + move for name, move in zip(names, moves, strict=True)
        }

    @ft.partial(jax.jit, static_argnums=(0, 4))
    def answer(
        self,
        tensors: Tensors,
        tokens: Int32[Array, "rows length"],
        lens: Int32[Array, " rows"],
        max_new_tokens: int,
    ) -> Int32[Array, "rows length"]:
        """Continue prompts greedily; each token costs a whole forward pass.

        Args:
          tensors: By name.
          tokens: Prompts, padded behind by at least ``max_new_tokens``.
          lens: Tokens of each prompt.
          max_new_tokens: Tokens to add to each, whether or not it ended.
        """
        weights = assemble_weights(self.model.weights(), tensors, jnp.dtype(self.dtype))
        rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)

        def add(index: int, tokens: jax.Array) -> jax.Array:
            is_token = jnp.ones(tokens.shape, bool)
            logits, _ = self.model.forward_rows(weights, tokens, is_token)
            best = jnp.argmax(logits[rows, lens + index - 1], axis=-1)
            return tokens.at[rows, lens + index].set(best.astype(jnp.int32))

        return jax.lax.fori_loop(0, max_new_tokens, add, tokens)


def pad_prompts(prompts: list[list[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return prompts as rows of one length, padded behind, and their lengths."""
    tokens = np.zeros((len(prompts), length), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, np.array([len(prompt) for prompt in prompts], np.int32)
