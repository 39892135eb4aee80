"""Counts what an engine's loop must not do: compile, or read the device in between.

A GPU refuses unplanned reads under ``jax.transfer_guard_device_to_host``; on a CPU the
guard lets everything pass, since host and device share their memory. So every way from
a ``jax.Array`` to host bytes is counted here instead.
"""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from ukv.engine import Engine

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts the programs that JAX compiles from now on, by JAX's own monitoring.

    Attributes:
      count: Programs compiled since ``start``.
    """

    def __init__(self) -> None:
        """Register with JAX, for as long as the process lives."""
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, *_: object, **__: object) -> None:
        self.count += event == COMPILE_EVENT

    def start(self) -> None:
        """Count from zero."""
        self.count = 0


class ReadCounter:
    """Counts the device arrays that a step of an engine reads.

    Attributes:
      one_behind: Reads of the results of the step before, with the next one dispatched.
      with_nothing_to_do: The same when there was no next one.
      others: All other reads.
      blocking: Reads that waited and were not one behind, and all calls that wait.
    """

    def __init__(self) -> None:
        """Start with no reads."""
        self.one_behind = self.with_nothing_to_do = self.others = self.blocking = 0
        # The class of arrays, whatever JAX calls it.
        self._kind = type(jnp.zeros(()))
        self._engine: Engine | None = None
        self._expected: set[int] = set()
        self._is_reading = False

    def _count(self, array: jax.Array) -> None:
        assert self._engine is not None
        if id(array) not in self._expected:
            self.others += 1
            self.blocking += not array.is_ready()
        elif self._engine.unread_results:
            self.one_behind += 1
        else:
            self.with_nothing_to_do += 1
            # Somebody runs: the device could have had its next step by now.
            self.blocking += bool(self._engine.scheduler.running)

    @contextlib.contextmanager
    def step(self, engine: Engine) -> Iterator[None]:
        """Count what happens inside; for one call of ``engine.step``."""
        with jax.transfer_guard_device_to_host("disallow"), self._patched():
            # Kept alive meanwhile, so that no other array gets one of their ids.
            expected = engine.unread_results
            self._engine = engine
            self._expected = {id(array) for array in expected}
            try:
                yield
            finally:
                self._engine, self._expected = None, set()

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        kind = self._kind
        ways = {
            name: kind.__dict__[name]
            for name in ("__buffer__", "_value", "__dlpack__", "block_until_ready")
        }

        def counted(name: str):
            way = ways[name]
            call = way.fget if isinstance(way, property) else way

            def read(array: jax.Array, *args: object, **options: object) -> object:
                # One way leads through another: the first one counts.
                if self._is_reading:
                    return call(array, *args, **options)
                self._is_reading = True
                try:
                    if name == "block_until_ready":
                        self.blocking += 1
                    else:
                        self._count(array)
                    return call(array, *args, **options)
                finally:
                    self._is_reading = False

            return property(read) if isinstance(way, property) else read

        for name in ways:
            setattr(kind, name, counted(name))
        try:
            yield
        finally:
            for name, way in ways.items():
                setattr(kind, name, way)
