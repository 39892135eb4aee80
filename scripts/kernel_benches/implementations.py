"""Which kernels a case of the benchmark runs: all that the table has for the card."""

from typing import get_args

from ukv.implementation import SUPPORT, Implementation, OpCase, Target

H200 = Target(platform="gpu", capability=90)


def kernels(op: str, case: OpCase) -> tuple[Implementation, ...]:
    """Return the kernels that cover a case on an H200, on request or by default.

    The reference in plain JAX is no kernel: at full size it gathers more than a card
    holds, or takes longer than anyone waits.

    Args:
      op: Key of ``SUPPORT``.
      case: The facts of the call.
    """
    return tuple(
        name
        for name in get_args(Implementation)
        if name != "xla"
        and any(
            line.implementation == name and line.refusal(case, H200) is None
            for line in SUPPORT[op]
        )
    )
