"""The interface of a trainer: what the training loop, checkpoints and train_compile ask of it.

DiLoCo and DataParallel have it; tests/engine/test_trainer.py holds both to it.

    # R replicas: M with DiLoCo, 1 with data parallelism
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jax.sharding import Mesh

from maxdiloco.engine.calls import Call
from maxdiloco.parallel.program import Program

OUTER_PARAMS = "outer_params"  # the checkpoint item that load_parameters_path and generation read


class SavedLayout(NamedTuple):
    """How the state in a checkpoint is laid out.

    num_replicas, mesh (sizes of the axes) and dropped_until: from Trainer.note. same_rules: whether
    the run that saved it had the logical axis rules of this run.
    """

    num_replicas: int
    mesh: dict[str, int]
    same_rules: bool
    dropped_until: int


class Description(NamedTuple):
    """Texts for the user. title: the mode in a few words.

    fragments: lines of the fragment table. start: lines that a run prints at its start. resident:
    what a device keeps beyond plain training, "" for nothing.
    """

    title: str
    fragments: tuple[str, ...]
    start: tuple[str, ...]
    resident: str


class Trainer(Protocol):
    """A trainer that is laid out for the parameters of one run.

    num_replicas: R of the metrics, and of the state where its leaves have an R. period: inner
    steps after which the same programs run again. abstract_state, abstract_outer_params: the state
    and `outer_params` as ShapeDtypeStructs with shardings. replica_items: the items of a
    checkpoint whose leaves begin with R.
    """

    mesh: Mesh
    num_replicas: int
    period: int
    abstract_state: Any
    abstract_outer_params: Any
    replica_items: tuple[str, ...]

    def init_program(self, make: Callable[..., tuple[Any, Any]], **options) -> Program:
        """The program that makes the state before the first step.

        make(*args) -> (params, opt_state), one replica's; the program takes its arguments. options:
        of Program.
        """

    def calls(self, batch: Any) -> list[Call]:
        """Every program that the steps of a run call. batch: ShapeDtypeStructs, leaves [R, ...]."""

    def outer_calls(self, runs: float) -> list[Call]:
        """The programs that `outer_params` calls. runs: how often in a period."""

    def abstract_metrics(self, batch: Any) -> Any:
        """ShapeDtypeStructs of the metrics of a step, leaves [R]. batch: as for `calls`."""

    def step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """One inner step: the new state, and metrics with leaves [R]. state is donated."""

    def check_finite(self, state: Any) -> None:
        """Raise NumericsError if an exchange up to this state met a value that is not finite."""

    def outer_params(self, state: Any) -> Any:
        """The parameters to evaluate and export, leaves [...], in device memory."""

    def bytes_sent(self, t: int) -> float:
        """Bytes that inner step t makes a replica (without DiLoCo a slice) send to others."""

    def extra_metrics(self, state: Any, steps: range) -> dict[str, float]:
        """Metrics of the trainer itself. steps: the inner steps since the last log point."""

    def description(self) -> Description:
        """What to tell the user before the first step."""

    def closing_line(self, state: Any) -> str:
        """The line at the end of a run."""

    def saved_items(self, state: Any) -> dict[str, Any]:
        """{item of a checkpoint: tree of arrays}; OUTER_PARAMS is one, to be read alone."""

    def note(self, state: Any) -> dict[str, Any]:
        """What a checkpoint says of the state besides its arrays: JSON, see SavedLayout."""

    def abstract_items(self, saved_layout: SavedLayout) -> dict[str, Any]:
        """The items to read of a checkpoint, as ShapeDtypeStructs of this run's state."""

    def restored(self, items: dict[str, Any], saved_layout: SavedLayout, *, t: int) -> Any:
        """The state after inner step t from the items of `abstract_items`."""

    def close(self) -> None:
        """End the threads of the trainer, if it has any."""

    def dropped_lines(self, saved_layout: SavedLayout, t: int) -> list[str]:
        """The line on what was in flight after step t and `restored` drops, if anything was."""
