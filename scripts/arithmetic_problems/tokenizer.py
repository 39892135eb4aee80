"""A tokenizer whose vocabulary is bytes, digits and the words of the problems."""

import random
from collections.abc import Iterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from scripts.arithmetic_problems.problem_set import training_text

END = "\n\n"
"""Token that ends a block, hence an answer."""

# One digit, or a run of letters or of signs, with the blank before it; or a blank.
_PIECE = r" ?\d| ?[A-Za-z]+| ?[^\sA-Za-z\d]+|\s"

_NUM_TEXTS = 4000
_MAX_VOCABULARY = 1024


def _texts() -> Iterator[str]:
    rng = random.Random("tokenizer")
    for _ in range(_NUM_TEXTS):
        yield training_text(rng)


def build_tokenizer() -> tokenizers.Tokenizer:
    """Return the tokenizer: the same for every call.

    Each byte has a token, so any text becomes tokens and back without loss. Of the
    problems each word is one token, each digit is one, both with the blank before
    them, and so is the blank line that ends a block.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_PIECE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_MAX_VOCABULARY,
        # Merges stop when every word of the problems is whole.
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.add_tokens([tokenizers.AddedToken(END, normalized=False)])
    return tokenizer
