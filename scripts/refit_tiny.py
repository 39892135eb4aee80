"""Makes a trained tiny model need its latent pages, and shows that it does.

    python scripts/refit_tiny.py --checkpoint models/tiny_kimi_linear

The second step after scripts/train_tiny.py; minutes on a CPU. The last latent attention
is set in closed form (scripts/tiny_training/latent_carrier.py). The model stays if all
is answered as before; its log gets one more line, with the share of held-out answers
that are right word for word when each word follows the right ones: before, after, and
with the latent rows of another problem.
"""

import argparse
import functools as ft
import json
import pathlib
import random
import sys
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from models.checkpoint import Checkpoint
from models.kimi_linear import KimiLinear
from models.mla import LatentAttention
from models.registry import read_model
from models.weights import assemble_weights, tensor_shapes
from scripts.arithmetic_problems.problem_set import problem_set, worked_block
from scripts.tiny_training.batches import Rows
from scripts.tiny_training.latent_carrier import carry_stream
from scripts.tiny_training.learner import pad_prompts
from scripts.tiny_training.parameters import Tensors, save_checkpoint, stored_tensors

NUM_ROWS = 10
ROW_TOKENS = 448
PROBLEM_SEED = 1


def right_share(
    model: KimiLinear,
    tensors: Tensors,
    tokenizer: tokenizers.Tokenizer,
    num_problems: int,
) -> float:
    """Return the share of worked answers whose every token is the likeliest."""
    problems = problem_set(PROBLEM_SEED, num_problems, "test")
    texts = [problems.prefix + worked_block(p) for p in problems.problems]
    encoded = [tokenizer.encode(text).ids for text in texts]
    tokens, lens = pad_prompts(encoded, max(map(len, encoded)))
    weights = assemble_weights(model.weights(), tensors, jnp.dtype("float32"))
    # A new function each time: what it calls may have been replaced.
    logits, _ = jax.jit(lambda *inputs: model.forward_rows(*inputs))(
        weights, tokens, np.ones(tokens.shape, bool)
    )
    best = np.asarray(logits).argmax(axis=-1)
    num_right = 0
    for row, problem in enumerate(problems.problems):
        answer = slice(len(tokenizer.encode(problems.prompt(problem)).ids), lens[row])
        given = best[row, answer.start - 1 : answer.stop - 1]
        num_right += bool((given == tokens[row, answer]).all())
    return num_right / num_problems


def rows_of_another(attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return latent attention over the rows of the problem before."""

    def wrong(
        self: LatentAttention, q: jax.Array, latents: jax.Array, *expansions: jax.Array
    ) -> jax.Array:
        return attend(self, q, jnp.roll(latents, 1, axis=0), *expansions)

    return wrong


def main() -> None:
    """Refit, judge, store."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--checkpoint", type=pathlib.Path, required=True, metavar="FOLDER"
    )
    parser.add_argument("--problems", type=int, default=32, help="default %(default)s")
    arguments = parser.parse_args()
    folder = arguments.checkpoint
    model = read_model(folder)
    if not isinstance(model, KimiLinear):
        parser.error(f"--checkpoint {folder}: is no Kimi Linear")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    with Checkpoint(folder) as checkpoint:
        trained = {
            name: checkpoint.read(name, shape).astype(jnp.float32)
            for name, shape in tensor_shapes(model.weights()).items()
        }
    rows = Rows(tokenizer.to_str(), ROW_TOKENS)
    texts = [rows.draw(random.Random(f"carrier {row}")) for row in range(NUM_ROWS)]
    carried = carry_stream(model, trained, np.array(texts, np.int32))
    carried = {
        name: tensor.astype(jnp.float32)
        for name, tensor in stored_tensors(carried).items()
    }
    share = ft.partial(
        right_share, model, tokenizer=tokenizer, num_problems=arguments.problems
    )
    facts = {"before": share(trained), "after": share(carried)}
    wrong = rows_of_another(LatentAttention.attend_rows)
    with mock.patch.object(LatentAttention, "attend_rows", wrong):
        facts["rows_of_another"] = share(carried)
    line = json.dumps({"refit": facts, "problems": arguments.problems})
    print(line)
    if facts["after"] < facts["before"]:
        sys.exit(
            "refit_tiny.py: error: answers were lost; the checkpoint stays as it was"
        )
    config = json.loads((folder / "config.json").read_text())
    save_checkpoint(folder, config, carried, tokenizer)
    with (folder / "train_log.jsonl").open("a") as log:
        print(line, file=log)


if __name__ == "__main__":
    main()
