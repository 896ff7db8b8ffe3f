"""The sequences of a text in the order in which an island leases blocks of them.

    # B sequences of a step  L tokens
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from maxdiloco.data import order
from maxdiloco.data.mixture import TrainingData
from maxdiloco.data.pipeline import Batch


class LeasedText:
    """A text as data.pipeline.batches reads one; blocks of an epoch follow each other.

    ranges(step) -> places (first, count) in the text of what the step reads, once they are leased.
    tokens() -> those that count so far.
    """

    def __init__(
        self,
        text: TrainingData,
        ranges: Callable[[int], list[tuple[int, int]]],
        tokens: Callable[[], int],
    ):
        self._text, self._ranges, self._tokens = text, ranges, tokens
        self.computed = text.computed

    @property
    def requests(self) -> int:
        """As of the text."""
        return self._text.requests

    def check_size(self, position: order.Position) -> None:
        """As of the text."""
        self._text.check_size(position)

    def read(
        self, position: order.Position, step: int, replicas: ArrayLike, rows: ArrayLike
    ) -> Batch:
        """The rows of one replica, leaves [B, L]."""
        parts = []
        for first, count in self._ranges(step):
            here = order.Position(first, 1, 1, count, position.sources)
            parts.append(self._text.read(here, 1, np.zeros(count, int), np.arange(count)))
        rows_B = np.asarray(rows)
        return {name: np.concatenate([part[name] for part in parts])[rows_B] for name in parts[0]}

    def metrics(self, position: order.Position, step: int) -> dict[str, Any]:
        """learning/tokens: of all islands."""
        return {"learning/tokens": self._tokens()}
