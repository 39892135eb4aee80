"""The engine with a prefix cache: what hits changes no bit of what is drawn."""

import dataclasses

import numpy as np
import pytest

from tests.engine_runs import (
    CONFIG,
    engine,
    greedy,
    loaded,
    require_empty,
)
from tests.tagged_pools import state_spec
from ukv.engine import Engine
from ukv.errors import SpecError

COLD = dataclasses.replace(CONFIG, prefix_cache=False)
FAMILIES = ["llama", "kimi_linear", "gemma3", "hybrid"]
# A page each; states are left on a grid of 64 tokens.
ROOMY_BYTES = 1_500_000
GRID = {"llama": 16, "kimi_linear": 64, "gemma3": 16, "hybrid": 64}


def drawn(run, prompt, num_new=8, **fields):
    """Return tokens and log-probabilities of one request."""
    outputs = list(run.generate([prompt], greedy(num_new, logprobs=True, **fields)))
    run.verify()
    tokens = [token for output in outputs for token in output.new_tokens]
    return tokens, [x for output in outputs for x in output.new_logprobs]


@dataclasses.dataclass(frozen=True)
class StatesOnly:
    """A model whose memory does not grow."""

    vocab_size: int = 8

    def pool_specs(self, *, page_size, dtype):
        return (state_spec(),)

    def forward(self, weights, inputs, pool):
        raise NotImplementedError


def test_a_pool_without_prefixes_is_refused_with_what_to_do():
    with pytest.raises(SpecError, match="no prefix to keep: set prefix_cache=False"):
        Engine(StatesOnly(), {}, pool_bytes=10**6, config=CONFIG)
    Engine(StatesOnly(), {}, pool_bytes=10**6, config=COLD)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hit_gives_the_bits_of_a_cold_run(family):
    vocab = loaded(family).model.vocab_size
    rng = np.random.default_rng(3)
    first = rng.integers(vocab, size=131).tolist()
    other = [*first[:90], *rng.integers(vocab, size=30).tolist()]
    longer = [*first, *rng.integers(vocab, size=20).tolist()]
    # One keeps nothing, the others forget before each prompt and share their programs.
    config = COLD if family == "hybrid" else CONFIG
    cold = engine(family, pool_bytes=ROOMY_BYTES, config=config)
    warm = engine(family, pool_bytes=ROOMY_BYTES)
    grid, hit = GRID[family], 0
    # States and windows are left where a prompt ends, and where one branched off.
    branch = 90 if family == "llama" else 0
    cached_lens = [0, 130, branch, 119, 131]
    for prompt, cached_len in zip(
        [first, first, other, other, longer], cached_lens, strict=True
    ):
        cold.clear_prefix_cache()
        assert drawn(warm, prompt) == drawn(cold, prompt)
        now = warm.stats().prefix_hit_tokens
        assert now - hit == cached_len // grid * grid
        hit = now
    assert cold.stats().prefix_hit_tokens == 0
    require_empty(warm)


def test_a_hit_ends_before_the_first_token_whose_score_is_wanted():
    config = dataclasses.replace(CONFIG, scores_prompts=True)
    run = engine("llama", pool_bytes=ROOMY_BYTES, config=config)
    prompt = np.random.default_rng(5).integers(150, size=70).tolist()
    found, hits = [], []
    # The score of token 33 comes from the logits of token 32, the last of two pages.
    for first in (1, 1, 34, 33, 32, 69):
        hit = run.stats().prefix_hit_tokens
        outputs = run.generate([prompt], greedy(2, scores_from=first))
        (scores,) = [output.prompt_scores for output in outputs if output.prompt_scores]
        found.append(scores)
        hits.append(run.stats().prefix_hit_tokens - hit)
    assert hits == [0, 0, 32, 32, 16, 64]
    assert [len(scores) for scores in found] == [69, 69, 36, 37, 38, 1]
    for scores in found[1:]:
        assert scores == found[0][-len(scores) :]
