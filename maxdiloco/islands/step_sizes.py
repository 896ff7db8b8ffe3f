"""The tokens of an island's inner steps, which change as other islands join and leave."""

import bisect
import math

AHEAD = 17  # steps; one more than the batches that maxdiloco.data.read_ahead reads ahead


class StepSizes:
    """The tokens of each inner step, decided `AHEAD` steps before the step.

    A reader runs ahead of the steps, and all processes of an island read the same sequences. So a
    step cannot depend on the moment at which its data are read. One thread appends; any thread may
    call the other methods.
    """

    def __init__(self, t: int, tokens: int, *, fixed: bool):
        """Begin after inner step t.

        Args:
          t: inner steps done.
          tokens: tokens of the next AHEAD steps.
          fixed: whether all later steps have this number of tokens.
        """
        # For each change: the steps before it, the tokens in them, and the tokens of a step.
        self._changes = [(t, 0, tokens)]
        self._decided = math.inf if fixed else t + AHEAD

    def append(self, tokens: int) -> int:
        """Decide one more step. Returns its number if its tokens are new, else 0."""
        before, last = self._decided, self._changes[-1][2]
        if tokens != last:
            self._changes.append((before, self.until(before), tokens))
        self._decided = before + 1
        return self._decided if tokens != last else 0

    def of(self, t: int) -> int:
        """Return the tokens of inner step t. Raises ValueError if they are not decided."""
        return self.until(t) - self.until(t - 1)

    def until(self, t: int) -> int:
        """Return the tokens of all inner steps up to t. Raises ValueError as `of`."""
        if t > self._decided:
            raise ValueError(f"step {t} is more than {AHEAD} steps ahead. Read it later.")
        i = bisect.bisect_left(self._changes, t, lo=1, key=lambda change: change[0]) - 1
        first, before, tokens = self._changes[i]
        return before + (t - first) * tokens
