"""What counts as a model's answer: the last number before anything that stops it."""

import decimal
import re
from collections.abc import Sequence

# A sign belongs to a number unless it stands between two, as in 9-4.
_NUMBER = re.compile(
    r"(?:(?<![\w.)])-)?\$?(?P<digits>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)"
)


def as_number(text: str) -> str:
    """Return a number in one way of writing: no sign of money, commas, or ``.0``.

    Raises:
      ValueError: The text holds no number, or more than one.
    """
    found = last_number(text)
    if found is None or len(_NUMBER.findall(text)) != 1:
        raise ValueError(f"{text!r} is not one number")
    return found


def last_number(text: str) -> str | None:
    """Return the last number in a text, as ``as_number`` writes it; None if none.

    Example: "3*4=12 and $1,200.50 in all." gives "1200.5".
    """
    every = list(_NUMBER.finditer(text))
    if not every:
        return None
    found = every[-1]
    sign = "-" if found.group().startswith("-") else ""
    number = decimal.Decimal(sign + found["digits"].replace(",", ""))
    return f"{number.normalize():f}" if number else "0"


def cut_at_stop(text: str, stops: Sequence[str]) -> str | None:
    """Return a text up to the first stop string; None if it has none.

    Args:
      text: What was generated so far.
      stops: Texts that end an answer.
    """
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else None
