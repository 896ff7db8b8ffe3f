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
        """Rows of one replica, ascending, leaves [*their shape, L]; of these alone is read."""
        parts, start, rows_B = [], 0, np.asarray(rows)
        for first, count in self._ranges(step):
            here = order.Position(first, 1, 1, count, position.sources)
            own_B = rows_B[(rows_B >= start) & (rows_B < start + count)] - start
            parts.append(self._text.read(here, 1, np.zeros_like(own_B), own_B))
            start += count
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def metrics(self, position: order.Position, step: int) -> dict[str, Any]:
        """learning/tokens: of all islands."""
        return {"learning/tokens": self._tokens()}
