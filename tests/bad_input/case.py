"""What a call that must fail is."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Case:
    """A call that must fail.

    Attributes:
      error: The type that it raises.
      match: A pattern in the message.
      call: The call.
    """

    error: type[Exception]
    match: str
    call: Callable[[], object]
