"""Typed errors of the library: what went wrong, and what is allowed."""


class UkvError(Exception):
    """Root of every error that ukv raises on purpose."""


class SpecError(UkvError, ValueError):
    """A spec, or a combination of specs, describes no possible memory."""


class BudgetError(UkvError, ValueError):
    """A byte budget cannot hold what was asked for; the message has the numbers."""


class IdSpaceError(UkvError, TypeError):
    """Ids of one space were passed where ids of another space belong."""


class UnknownSubPoolError(UkvError, KeyError):
    """A name that no sub-pool of the pool has."""

    def __str__(self) -> str:
        """Return the message itself; ``KeyError`` would quote it."""
        return str(self.args[0])


class PoolStateError(UkvError, RuntimeError):
    """The device's error word is set, or the verifier found a broken invariant."""


class UnsupportedError(UkvError, NotImplementedError):
    """No implementation can do this input; the message names one that can."""
