"""SIGTERM, a closed terminal and Ctrl-C: requests to save and leave after the step under way."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType

import jax
from jax.experimental import multihost_utils

from maxdiloco.processes.signals import hearing_ctrl_c, quit_now

# One press reaches a process twice behind timeout, mpirun or srun: a terminal sends it to a group
# of processes, and a launcher passes it on. A person who wants to quit is slower. Our choice.
SAME_PRESS_S = 1.0


class Preemption:
    """Whether SIGTERM, SIGHUP or Ctrl-C has asked the run to stop, at a step all processes share.

    A context manager, entered in the main thread after jax.distributed.initialize.
    One process: a signal sets a flag. Several: JAX's preemption service, which has its own
    handler of SIGTERM, names a step that no process has passed; SIGHUP and Ctrl-C are sent on to
    it as SIGTERM. SIGHUP does nothing where it is ignored, as under nohup.
    report: called with one line for the user at the first Ctrl-C. Another one ends the process at
    once, unless it comes within SAME_PRESS_S; no other signal cuts a save short.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._several = jax.process_count() > 1
        self._asked = False
        self._pressed_s: float | None = None  # when Ctrl-C was heard first
        self.by_ctrl_c = False  # whether Ctrl-C, and no other signal before it, asked this process
        self._stack = ExitStack()

    def __enter__(self) -> "Preemption":
        self._stack.enter_context(hearing_ctrl_c(self._on_ctrl_c))
        if not self._several:
            self._handle(signal.SIGTERM)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            self._handle(signal.SIGHUP)
        return self

    def __exit__(self, kind, exception, traceback) -> None:
        self._stack.close()

    def requested(self, step: int) -> bool:
        """Whether to save now and leave. Call it in every process after every inner step.

        step: the number of the step just taken; equal in all processes when it returns True.
        """
        if self._several:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._asked

    def _handle(self, number: signal.Signals) -> None:
        # None: a handler that Python has not installed and cannot restore.
        before = signal.signal(number, self._on_signal) or signal.SIG_DFL
        self._stack.callback(signal.signal, number, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._ask()

    def _on_ctrl_c(self) -> None:
        # Called in a thread of its own, one call at a time.
        now = time.monotonic()
        if self._pressed_s is not None:
            if now - self._pressed_s < SAME_PRESS_S:
                return
            quit_now()
        self._pressed_s = now
        self.by_ctrl_c = not self._asked
        self._report("Ctrl-C: stopping after this step; press it again to quit now.")
        self._ask()

    def _ask(self) -> None:
        self._asked = True
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
