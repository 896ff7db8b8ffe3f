"""The loss differences of planning/losses.yml."""

import pathlib
from typing import Any, NamedTuple

import yaml

from maxdiloco.planning.choices import Choice

FOLDER = pathlib.Path(__file__).parent


class Loss(NamedTuple):
    """A measured difference to data parallelism [nats a token]; see losses.yml."""

    model: str
    replicas: int
    mode: str
    H: int
    P: int
    tau: int
    wire: str
    difference: float
    source: str


def measured(path: pathlib.Path = FOLDER / "losses.yml") -> list[Loss]:
    """Every entry of the file. Raises TypeError for one with other fields."""
    entries: list[dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))["measured"]
    return [Loss(**entry) for entry in entries]


def of_choice(choice: Choice, *, model: str, replicas: int, known: list[Loss]) -> Loss | None:
    """What was measured for a choice: of the same model and number of replicas if there is one,
    otherwise of another, which the table names. None: not measured.
    """
    same = [
        loss
        for loss in known
        if (loss.mode, loss.H, loss.tau, loss.wire)
        == (choice.mode, choice.H, choice.tau, choice.wire)
    ]
    same.sort(key=lambda loss: (loss.model != model, loss.replicas != replicas))
    return same[0] if same else None
