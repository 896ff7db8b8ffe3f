"""The control of a run between its steps: by the number of the step, or by the log of islands."""

from collections.abc import Callable
from typing import Any, Protocol


class RunControl(Protocol):
    """Decides when a run steps, evaluates and ends, with which learning rate and data."""

    def join(self, state: Any) -> Any:
        """Return the state for the first step, once that step may be taken. state: donated."""

    def reads(self, text: Any) -> Any:
        """Return what the steps read in place of a text; after `join`."""

    def learning_rate(self, rate: Callable[[float], float], t: int) -> float:
        """Return the learning rate of inner step t.

        Args:
          rate: of the schedule, by the inner steps done.
          t: from 1.
        """

    def evaluates(self, t: int, interval: int) -> bool:
        """Tell whether this process evaluates the outer parameters after inner step t.

        Args:
          t: from 1.
          interval: eval_interval [steps].
        """

    def ended(self) -> bool:
        """Tell whether the run is over before its last step."""

    def leave(self) -> None:
        """Stop waiting for others: no step follows."""


class StepControl:
    """The run control of a run that counts its steps."""

    def join(self, state: Any) -> Any:
        """Return the state: the first step may be taken at once."""
        return state

    def reads(self, text: Any) -> Any:
        """Return the text."""
        return text

    def learning_rate(self, rate: Callable[[float], float], t: int) -> float:
        """See RunControl."""
        return rate(t - 1)

    def evaluates(self, t: int, interval: int) -> bool:
        """See RunControl."""
        return t % interval == 0

    def ended(self) -> bool:
        """Return False."""
        return False

    def leave(self) -> None:
        """Nothing: it waits for nobody."""
