"""Lines on how far a long import or export is."""

import time
from collections.abc import Callable

_PERIOD_S = 10.0  # between two lines: our choice; a small model has none


class Progress:
    """Says every _PERIOD_S how much of some bytes is done, and how long the rest may take.

    verb: what is done to them, as imported.
    """

    def __init__(
        self,
        verb: str,
        total: int,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._verb, self._total, self._say, self._clock = verb, max(total, 1), say, clock
        self._done, self._begun = 0, clock()
        self._said = self._begun

    def more(self, size: int) -> None:
        """So many more bytes are done."""
        self._done = min(self._done + size, self._total)
        now = self._clock()
        if now - self._said < _PERIOD_S or not self._done:
            return
        self._said = now
        left = (now - self._begun) * (self._total / self._done - 1)
        self._say(
            f"{self._verb} {self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB "
            f"({self._done / self._total:.0%}), about {left:.0f} s left"
        )

    def last(self, what: str) -> None:
        """All bytes are done; says what follows, where it took long so far."""
        if self._clock() - self._begun >= _PERIOD_S:
            self._say(f"{self._verb} {self._total / 1e9:.1f} GB; {what}")
