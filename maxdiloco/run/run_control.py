"""Control a run between its steps, by the number of the step or by the log of the islands."""

from collections.abc import Callable
from typing import Any, Protocol


class RunControl(Protocol):
    """Decides the learning rate, the data, the evaluations and the end of a run."""

    def join(self, state: Any) -> Any:
        """Wait until the first step may begin, and return the state for it. state: donated."""

    def reads(self, text: Any) -> Any:
        """Return the data that the steps read instead of a text. Call it after `join`."""

    def learning_rate(self, rate: Callable[[float], float], t: int) -> float:
        """Return the learning rate of inner step t.

        Args:
          rate: returns the rate of the schedule, given the number of inner steps done.
          t: number of the step, from 1.
        """

    def tokens(self, steps: range, step_tokens: int) -> int:
        """Return the tokens of some steps in this program.

        Args:
          steps: numbers of steps that were taken, from 1.
          step_tokens: tokens of a step, in all islands with a global batch.
        """

    def evaluates(self, t: int, interval: int) -> bool:
        """Tell whether this process evaluates the outer parameters after inner step t.

        Args:
          t: number of the step, from 1.
          interval: eval_interval [steps].
        """

    def ended(self) -> bool:
        """Tell whether the run has ended before its last step."""

    def leave(self) -> None:
        """Stop waiting for others, because no step follows."""


class StepControl:
    """The run control of a run that counts its steps."""

    def join(self, state: Any) -> Any:
        """Return the state at once."""
        return state

    def reads(self, text: Any) -> Any:
        """Return the text."""
        return text

    def learning_rate(self, rate: Callable[[float], float], t: int) -> float:
        """See RunControl."""
        return rate(t - 1)

    def tokens(self, steps: range, step_tokens: int) -> int:
        """See RunControl."""
        return len(steps) * step_tokens

    def evaluates(self, t: int, interval: int) -> bool:
        """See RunControl."""
        return t % interval == 0

    def ended(self) -> bool:
        """Return False."""
        return False

    def leave(self) -> None:
        """Do nothing, because this control never waits."""
