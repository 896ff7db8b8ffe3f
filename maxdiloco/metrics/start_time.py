"""The phases of a program's time until the end of its first step, for one line."""

import time
from collections.abc import Callable


class StartClock:
    """Divides the time since the program started among its phases.

    Attributes:
      begun: time of the clock at the start [s].
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter):
        """Start now. clock: returns seconds, monotonic."""
        self._clock, self._spent = clock, {}
        self.begun = self._since = clock()

    def lap(self, what: str) -> float:
        """The time since the last lap went to `what`. Returns the seconds since the start."""
        now = self._clock()
        self._spent[what] = self._spent.get(what, 0.0) + now - self._since
        self._since = now
        return now - self.begun

    def line(self, last: str) -> str:
        """`started in 8.4 s: imports 1.9, data 0.1, compile 5.9, first step 0.5`; ends `last`."""
        seconds = self.lap(last)
        parts = ", ".join(f"{what} {spent:.1f}" for what, spent in self._spent.items())
        return f"started in {seconds:.1f} s: {parts}"
