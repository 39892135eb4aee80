"""The engine as a model of lm-evaluation-harness, under the name ``ukv``.

Importing this module registers it::

    import lm_eval
    import scripts.evaluation.lm_eval_model

    lm_eval.simple_evaluate("ukv", model_args="model=tiny,page_size=16", tasks=[...])

All requests of a call go to the engine at once, which batches them, shares what their
prompts have in common, and keeps them in one pool. Needs the extra ``lm-eval``.
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from models.named import find_model, load_found, read_tokenizer
from scripts.evaluation.generation import Job, generate_texts, stop_tokens_of
from scripts.evaluation.pools import (
    PoolKind,
    default_pool_bytes,
    engine_config,
    with_implementation,
)
from ukv.engine import Engine, SamplingParams
from ukv.errors import UkvError

MAX_GEN_TOKS = 256
"""Tokens to generate where a task does not say."""

# How tasks name the same number.
_MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class GenerationError(UkvError, ValueError):
    """A task asks for a way of generating that the engine does not have."""


@register_model("ukv")
class UkvModel(TemplateLM):
    """A model behind an engine, for tasks of lm-evaluation-harness.

    Attributes:
      engine: The engine; its ``stats()`` say what a run did to the pool.
    """

    def __init__(
        self,
        model: str = "tiny",
        *,
        pool: PoolKind = "unified",
        pool_mib: float | None = None,
        page_size: int = 64,
        max_length: int = 2048,
        concurrency: int = 16,
        max_step_tokens: int = 256,
        prefix_cache: bool = True,
        implementation: Literal["xla", "mosaic_gpu", "triton"] | None = None,
        dtype: Literal["float32", "bfloat16"] | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        """Load a model and make its engine.

        Args:
          model: ``tiny``, ``smollm2``, the folder of a checkpoint, or a GGUF file.
          pool: Kind of pool.
          pool_mib: Its size; None for half of ``concurrency`` requests, full length.
          page_size: Tokens per page.
          max_length: Most tokens of a request, prompt and output together.
          concurrency: Requests that run at once.
          max_step_tokens: Tokens of a step.
          prefix_cache: Whether prompts share what they have in common.
          implementation: How ops run; None for the best of the device.
          dtype: Of weights and pool; None for float32 on a CPU, else bfloat16.
          batch_size: The harness hands it over; the engine batches by itself.
          max_batch_size: As ``batch_size``.
          device: As ``batch_size``; JAX has chosen it.

        Raises:
          UkvError: The model cannot be read, or the pool is too small.
        """
        super().__init__()
        del batch_size, max_batch_size, device
        path = find_model(model)
        self._tokenizer = read_tokenizer(path)
        dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
        loaded = load_found(path, dtype=dtype)
        config = engine_config(
            pool,
            page_size=page_size,
            dtype=dtype,
            concurrency=concurrency,
            max_len=max_length,
            max_stop_tokens=len(self._tokenizer.stop_tokens),
            max_step_tokens=max_step_tokens,
            prefix_cache=prefix_cache,
            scores_prompts=True,
        )
        ops = with_implementation(loaded.model, implementation)
        pool_bytes = (
            default_pool_bytes(ops, config)
            if pool_mib is None
            else int(pool_mib * 2**20)
        )
        self.engine = Engine(ops, loaded.weights, pool_bytes=pool_bytes, config=config)
        self._max_length = max_length
        self._name = model

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return min(self._tokenizer.stop_tokens)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it."""
        begin = self._tokenizer.encode("", adds_special_tokens=True)
        return begin[0] if begin else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """For the harness' cache of requests."""
        return self._name.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a chat, up to where the answer begins."""
        if not add_generation_prompt:
            raise GenerationError("a chat is rendered up to the answer only")
        return self._tokenizer.chat_text(chat_history)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the tokens of a text; as of plain text unless told otherwise."""
        del kwargs
        adds = True if add_special_tokens is None else add_special_tokens
        return self._tokenizer.encode(string, adds_special_tokens=adds)

    def generate_until(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[str]:
        """Continue each context until one of its stop strings."""
        jobs = {}
        for index, request in enumerate(requests):
            context, options = request.args
            jobs[str(index)] = self._job(context, dict(options))
        texts = [""] * len(jobs)
        with tqdm(total=len(jobs), desc="generate", disable=disable_tqdm) as bar:
            for name, done in generate_texts(self.engine, self._tokenizer, jobs):
                if done.error is not None:
                    raise GenerationError(f"request {name}: {done.error}")
                texts[int(name)] = done.text
                self.cache_hook.add_partial(
                    "generate_until", requests[int(name)].args, done.text
                )
                bar.update()
        return texts

    def _job(self, context: str, options: dict[str, Any]) -> Job:
        """Read how a task wants a context to be continued."""
        stops = options.pop("until", None) or ()
        stops = (stops,) if isinstance(stops, str) else tuple(stops)
        given = [options.pop(name, None) for name in _MAX_TOKENS]
        max_tokens = next((int(found) for found in given if found), MAX_GEN_TOKS)
        temperature = float(options.pop("temperature", None) or 0.0)
        if not options.pop("do_sample", temperature > 0):
            temperature = 0.0
        params = SamplingParams(
            temperature=temperature,
            top_p=float(options.pop("top_p", 1.0)),
            top_k=options.pop("top_k", None),
            min_p=float(options.pop("min_p", 0.0)),
            max_new_tokens=max_tokens,
            stop_token_ids=stop_tokens_of(self._tokenizer),
        )
        if options:
            raise GenerationError(
                f"generation_kwargs {sorted(options)} are not supported; it can be "
                f"until, do_sample, temperature, top_p, top_k, min_p, {_MAX_TOKENS[0]}"
            )
        if max_tokens >= self._max_length:
            raise GenerationError(
                f"max_gen_toks={max_tokens} leaves nothing of {self._max_length=} for "
                "the prompt"
            )
        # As all models of the harness do: what does not fit is cut off at the left.
        prompt = self.tok_encode(context)[-(self._max_length - max_tokens) :]
        return Job(prompt=prompt, params=params, stops=stops)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Score each continuation after its context."""
        del kwargs
        pairs = [(context, wanted) for _, context, wanted in requests]
        found = self._score(pairs, disable_tqdm=disable_tqdm)
        for (texts, _, _), result in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, result)
        return found

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Score each whole text, in windows of ``max_length`` tokens."""
        windows, owners = [], []
        for index, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            for window in get_rolling_token_windows(
                token_list=tokens,
                prefix_token=self.prefix_token_id,
                max_seq_len=self._max_length - 1,
                context_len=1,
            ):
                windows.append(make_disjoint_window(window))
                owners.append(index)
        totals = [0.0] * len(requests)
        scores = self._score(windows, disable_tqdm=disable_tqdm)
        for index, (logprob, _) in zip(owners, scores, strict=True):
            totals[index] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _score(
        self, pairs: Sequence[tuple[list[int], list[int]]], *, disable_tqdm: bool
    ) -> list[tuple[float, bool]]:
        """Return how likely the second tokens are after the first, and if greedy."""
        found: dict[str, tuple[float, bool]] = {}
        for index, (context, wanted) in enumerate(pairs):
            if not wanted:
                found[str(index)] = (0.0, True)
                continue
            if len(wanted) >= self._max_length:
                raise GenerationError(
                    f"a continuation of {len(wanted)} tokens does not fit into "
                    f"max_length={self._max_length}"
                )
            tokens = [*context, *wanted][-self._max_length :]
            self.engine.add_request(
                tokens,
                SamplingParams(max_new_tokens=1, scores_from=len(tokens) - len(wanted)),
                request_id=str(index),
            )
        with tqdm(total=len(pairs), desc="score", disable=disable_tqdm) as bar:
            bar.update(len(found))
            while self.engine.has_work:
                for output in self.engine.step():
                    if output.error is not None:
                        raise GenerationError(
                            f"request {output.request_id}: {output.error}"
                        )
                    scores = output.prompt_scores
                    found[output.request_id] = (
                        sum(score.logprob for score in scores),
                        all(score.is_greedy for score in scores),
                    )
                    bar.update()
        return [found[str(index)] for index in range(len(pairs))]
