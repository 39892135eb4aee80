"""Problems as text: what a model is trained on, and prompts that share a prefix.

A text is a run of blocks, each ended by a blank line, which nothing else contains:

    Prices in dollars: cups 4, kites 7, ...

    Question: Anna buys 3 cups and 2 kites. How many dollars does Anna pay?
    Answer: 3 cups cost 3*4=12 dollars. 2 kites cost 2*7=14 dollars. ...
    #### 26

A price list holds until the next one. The prompts of a set have worked examples, with
price lists of their own, then the list that the questions refer to: whoever reads the
examples and not the last list answers with stale prices.
"""

import dataclasses
import random

from scripts.arithmetic_problems.problems import (
    Prices,
    Problem,
    Split,
    draw_prices,
    draw_problem,
)

MAX_SHOTS_OF_LIST = 2
"""Worked examples in a row that share a price list."""


MAX_PROBLEMS = 10_000
"""Of a set. One price list has enough questions, and few are drawn in vain."""


def price_block(prices: Prices) -> str:
    """Return a price list as a block."""
    listed = ", ".join(f"{item} {price}" for item, price in prices.items())
    return f"Prices in dollars: {listed}.\n\n"


def question_block(question: str) -> str:
    """Return the open block of a question: the answer follows."""
    return f"Question: {question}\nAnswer:"


def worked_block(problem: Problem) -> str:
    """Return a question and its answer as a block."""
    return f"{question_block(problem.question)} {problem.answer}\n\n"


@dataclasses.dataclass(frozen=True)
class ProblemSet:
    """Problems that refer to one price list, and the text that comes before each.

    Attributes:
      prefix: Worked examples and the price list, whole blocks.
      problems: All of one split, and no two with the same question.
    """

    prefix: str
    problems: tuple[Problem, ...]

    def prompt(self, problem: Problem) -> str:
        """Return the whole prompt of a problem."""
        return self.prefix + question_block(problem.question)


def problem_set(
    seed: int, count: int, split: Split = "test", *, shots: int = 4
) -> ProblemSet:
    """Draw problems that share a prefix.

    The price list depends on the seed alone; fewer shots are the last ones of more.

    Args:
      seed: Of all draws.
      count: Problems, at most ``MAX_PROBLEMS``; one price list has only so many.
      split: Of the problems; worked examples are always of the training split.
      shots: Worked examples in the prefix.

    Raises:
      ValueError: ``count`` or ``shots`` is out of range.
    """
    if not 0 <= count <= MAX_PROBLEMS:
        raise ValueError(f"{count=} must be in 0 ... {MAX_PROBLEMS}")
    if shots < 0:
        raise ValueError(f"{shots=} must not be negative")
    # Each of the three has a source of its own, so that none shifts the others.
    prices = draw_prices(random.Random(f"prices {seed}"))
    rng = random.Random(f"problems {seed} {split}")
    problems: dict[str, Problem] = {}
    while len(problems) < count:
        problem = draw_problem(rng, prices, split)
        problems.setdefault(problem.question, problem)
    rng = random.Random(f"shots {seed}")
    prefix, left = price_block(prices), shots
    while left:
        earlier = draw_prices(rng)
        drawn = [
            worked_block(draw_problem(rng, earlier, "train"))
            for _ in range(MAX_SHOTS_OF_LIST)
        ]
        taken = drawn[-left:]
        left -= len(taken)
        prefix = price_block(earlier) + "".join(taken) + prefix
    return ProblemSet(prefix=prefix, problems=tuple(problems.values()))


def generate(seed: int, count: int, split: Split = "test") -> list[dict[str, str]]:
    """Return the problems of ``problem_set`` as records of GSM8K.

    Args:
      seed: Of all draws.
      count: Problems.
      split: Of the problems.

    Returns:
      Records with ``question`` and ``answer``. The questions need the price list,
      which is in the set's prefix.
    """
    return [
        {"question": problem.question, "answer": problem.answer}
        for problem in problem_set(seed, count, split).problems
    ]


def training_text(rng: random.Random) -> str:
    """Draw an endless text's next piece: a price list and worked problems of it."""
    prices = draw_prices(rng)
    count = rng.randint(1, MAX_SHOTS_OF_LIST)
    problems = (draw_problem(rng, prices, "train") for _ in range(count))
    return price_block(prices) + "".join(map(worked_block, problems))
