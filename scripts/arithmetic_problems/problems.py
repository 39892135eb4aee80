"""Word problems with two to four steps whose prices stand elsewhere in the text.

A question says how many of what; what one costs stands in a price list before it, and
only there. The worked answer is in the form of GSM8K: steps, then ``#### N``. All
numbers are whole and between 0 and 99.

Training and test draws share no problem by construction: what a problem computes, names
and things aside and in any order, decides by its checksum which of the two may have it.
"""

import dataclasses
import random
import zlib
from collections.abc import Callable, Mapping
from typing import Literal

Split = Literal["train", "test"]

ITEMS = (
    "apples",
    "bags",
    "balls",
    "books",
    "boxes",
    "cakes",
    "caps",
    "cards",
    "chairs",
    "coats",
    "cups",
    "eggs",
    "hats",
    "jars",
    "kites",
    "lamps",
    "masks",
    "nuts",
    "pens",
    "plates",
    "rings",
    "roses",
    "shirts",
    "toys",
)
PEOPLE = {
    "Anna": "She",
    "Ben": "He",
    "Clara": "She",
    "David": "He",
    "Emma": "She",
    "Felix": "He",
    "Grace": "She",
    "Henry": "He",
    "Ida": "She",
    "Jack": "He",
    "Lucy": "She",
    "Tom": "He",
}
NUM_PRICES = 12
MAX_NUMBER = 99

# One checksum in so many belongs to the test split.
_TEST_SHARE = 8

Prices = Mapping[str, int]
"""Dollars of one of each item, in the order of the list."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A question and its worked answer.

    Attributes:
      question: One to three sentences.
      answer: Worked steps, then a line ``#### N``.
      number: N.
      arithmetic: What the steps compute, such as ``3*4``; smaller operands first and
        the steps sorted, so that nothing else tells two problems apart.
    """

    question: str
    answer: str
    number: int
    arithmetic: tuple[str, ...]

    @property
    def split(self) -> Split:
        """Which draws may have a problem with this arithmetic."""
        checksum = zlib.crc32(";".join(self.arithmetic).encode())
        return "train" if checksum % _TEST_SHARE else "test"


class _OutOfRangeError(Exception):
    """The drawn numbers lead outside 0 ... 99."""


class _Draft:
    """A problem in the making: draws its parts and keeps its steps."""

    def __init__(self, rng: random.Random, prices: Prices) -> None:
        self.rng = rng
        self.prices = prices
        self.name = rng.choice(tuple(PEOPLE))
        self.pronoun = PEOPLE[self.name]
        self.first, self.second = rng.sample(tuple(prices), 2)
        self._sentences: list[str] = []
        self._arithmetic: list[str] = []

    def count(self) -> int:
        return self.rng.randint(2, 9)

    def money(self) -> int:
        return self.rng.randint(10, MAX_NUMBER)

    def step(self, sentence: str, left: int, sign: str, right: int) -> int:
        """Compute; ``{}`` in the sentence is where the computation stands."""
        result = {"+": left + right, "-": left - right, "*": left * right}[sign]
        if not 0 <= result <= MAX_NUMBER:
            raise _OutOfRangeError
        self._sentences.append(sentence.format(f"{left}{sign}{right}={result}"))
        if sign != "-":
            left, right = sorted((left, right))
        self._arithmetic.append(f"{left}{sign}{right}")
        return result

    def cost(self, count: int, item: str) -> int:
        return self.step(
            f"{count} {item} cost {{}} dollars.", count, "*", self.prices[item]
        )

    def finish(self, questions: list[str], number: int) -> Problem:
        return Problem(
            question=self.rng.choice(questions),
            answer=f"{' '.join(self._sentences)}\n#### {number}",
            number=number,
            arithmetic=tuple(sorted(self._arithmetic)),
        )


def _two_purchases(draft: _Draft) -> Problem:
    name, a, b = draft.name, draft.count(), draft.count()
    x, y = draft.first, draft.second
    total = draft.step(
        f"{name} pays {{}} dollars.", draft.cost(a, x), "+", draft.cost(b, y)
    )
    return draft.finish(
        [
            f"{name} buys {a} {x} and {b} {y}. How many dollars does {name} pay?",
            f"{name} wants {a} {x} and also {b} {y}. How much is that in dollars?",
        ],
        total,
    )


def _money_left(draft: _Draft) -> Problem:
    name, money, a, x = draft.name, draft.money(), draft.count(), draft.first
    left = draft.step(f"{name} has {{}} dollars left.", money, "-", draft.cost(a, x))
    return draft.finish(
        [
            f"{name} has {money} dollars and buys {a} {x}. How many dollars are left?",
            f"{name} buys {a} {x} and had {money} dollars. How many dollars are left?",
        ],
        left,
    )


def _two_purchases_and_money_left(draft: _Draft) -> Problem:
    name, money, a, b = draft.name, draft.money(), draft.count(), draft.count()
    x, y = draft.first, draft.second
    total = draft.step(
        f"{name} pays {{}} dollars.", draft.cost(a, x), "+", draft.cost(b, y)
    )
    left = draft.step(f"{name} has {{}} dollars left.", money, "-", total)
    return draft.finish(
        [
            f"{name} has {money} dollars. {draft.pronoun} buys {a} {x} and {b} {y}. "
            "How many dollars are left?",
            f"{name} takes {money} dollars to the shop for {a} {x} and {b} {y}. How "
            "many dollars are left?",
        ],
        left,
    )


def _sale(draft: _Draft) -> Problem:
    name, a, b = draft.name, draft.count(), draft.count()
    x, y = draft.first, draft.second
    left = draft.step(
        f"{name} has {{}} dollars left.", draft.cost(a, x), "-", draft.cost(b, y)
    )
    return draft.finish(
        [
            f"{name} sells {a} {x} and then buys {b} {y}. How many dollars are left?",
            f"{name} gets the money for {a} {x} and pays for {b} {y}. How many dollars "
            "are left?",
        ],
        left,
    )


def _present(draft: _Draft) -> Problem:
    name, a, x = draft.name, draft.count(), draft.first
    money, more = draft.money(), draft.money()
    total = draft.step(f"{name} has {{}} dollars.", money, "+", more)
    cost = draft.cost(a, x)
    left = draft.step(f"{name} has {{}} dollars left.", total, "-", cost)
    return draft.finish(
        [
            f"{name} has {money} dollars and gets {more} more. {draft.pronoun} buys "
            f"{a} {x}. How many dollars are left?",
            f"{name} has {money} dollars and finds {more} dollars. Then {name} pays "
            f"for {a} {x}. How many dollars are left?",
        ],
        left,
    )


def _two_days(draft: _Draft) -> Problem:
    name, x = draft.name, draft.first
    total = draft.count()
    a = draft.rng.randint(1, total - 1)
    count = draft.step(f"{name} buys {{}} {x}.", a, "+", total - a)
    cost = draft.cost(count, x)
    return draft.finish(
        [
            f"{name} buys {a} {x} on Monday and {total - a} more on Tuesday. How many "
            f"dollars does {name} pay?",
            f"{name} wants {a} {x} and then {total - a} more. How much is that in "
            "dollars?",
        ],
        cost,
    )


KINDS: tuple[Callable[[_Draft], Problem], ...] = (
    _two_purchases,
    _money_left,
    _two_purchases_and_money_left,
    _sale,
    _present,
    _two_days,
)


def draw_prices(rng: random.Random) -> dict[str, int]:
    """Draw a price list."""
    return {item: rng.randint(2, 9) for item in rng.sample(ITEMS, NUM_PRICES)}


def draw_problem(rng: random.Random, prices: Prices, split: Split) -> Problem:
    """Draw a problem of a split.

    Args:
      rng: Where all choices come from.
      prices: The list that it refers to.
      split: Whose arithmetic it may have.
    """
    kind = rng.choice(KINDS)
    while True:
        try:
            problem = kind(_Draft(rng, prices))
        except _OutOfRangeError:
            continue
        if problem.split == split:
            return problem
