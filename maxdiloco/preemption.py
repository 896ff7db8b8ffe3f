"""SIGTERM and Ctrl-C: requests to save and leave after the step under way."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

import jax
from jax.experimental import multihost_utils


class Preemption:
    """Whether SIGTERM has asked the run to stop, at a step that all processes share.

    A context manager, entered in the main thread after jax.distributed is initialised.
    One process: SIGTERM sets a flag. Several: JAX's preemption service catches SIGTERM in any of
    them and names a step that none has passed; that service installs its own handler when
    jax.distributed starts and this class leaves it alone.
    """

    def __init__(self) -> None:
        self._several = jax.process_count() > 1
        self._asked = False
        self._previous: object = signal.SIG_DFL

    def __enter__(self) -> "Preemption":
        if not self._several:
            # None: a handler that Python did not install and cannot put back.
            self._previous = signal.signal(signal.SIGTERM, self._on_sigterm) or signal.SIG_DFL
        return self

    def __exit__(self, kind, exception, traceback) -> None:
        if not self._several:
            signal.signal(signal.SIGTERM, self._previous)

    def requested(self, step: int) -> bool:
        """Whether to save now and leave. Call it in every process after every inner step.

        step: the number of the step just taken; equal in all processes when it returns True.
        """
        if self._several:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._asked

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._asked = True


class Interrupt:
    """Ctrl-C: the first asks for an end after this step, the second ends at once."""

    def __init__(self) -> None:
        self.asked = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take Ctrl-C in one process; several are left to their KeyboardInterrupt."""
        # Several processes get Ctrl-C at different steps and cannot save together: they just end.
        if jax.process_count() > 1:
            yield
            return
        previous = signal.signal(signal.SIGINT, self._on_sigint)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
