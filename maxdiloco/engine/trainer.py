"""The interface of a trainer, for the training loop, checkpoints and train_compile.

DiLoCo, DataParallel and the trainer of an island implement it.

    # R replicas: M with DiLoCo, 1 with data parallelism
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh

from maxdiloco.engine.calls import EVALUATION, OUTSIDE, Call
from maxdiloco.parallel.program import Program
from maxdiloco.parallel.sharding import shardings_of

# The checkpoint item with the outer parameters, and the item with the outer parameters of each
# replica, [R, ...], which eager updates have instead.
OUTER_PARAMS, OUTER_OF_EACH = "outer_params", "outer"
# The item with values that are only logged. A leaf that a checkpoint lacks begins at zero, so that
# versions may log different values.
DIAGNOSTICS = "diagnostics"


class SavedLayout(NamedTuple):
    """The layout of the state in a checkpoint: the metadata of Trainer.checkpoint.

    Attributes:
      num_replicas: R of the run that wrote it.
      mesh: sizes of the axes of its mesh.
      same_rules: whether that run had the same logical axis rules as this one.
      exchange: ExchangeSettings.to_json; {} for data parallelism.
      dropped_until, schedule_since: see engine.layout.State.
      chunk_lengths: Layout.chunk_lengths.
      outer_item: the item that has the outer parameters.
      records: number of log records of fragment 0 that an island had applied; None for other runs.
    """

    num_replicas: int
    mesh: dict[str, int]
    same_rules: bool
    exchange: dict[str, Any]
    dropped_until: int
    schedule_since: int
    chunk_lengths: Sequence[int] = ()
    outer_item: str = OUTER_PARAMS
    records: int | None = None


class OuterParamsView(NamedTuple):
    """How an export or an evaluation reads the outer parameters.

    Attributes:
      like: ShapeDtypeStructs of the result of `read`, on the device.
      select: state -> the outer parameters as they are in the state.
      mean: eager: the program that averages them over the replicas. None if the state has one copy,
        or if every slice reads its own.
      per_position: whether every slice of the mesh reads its own, leaves [slices, ...].
    """

    like: Any
    select: Callable[[Any], Any]
    mean: Program | None = None
    per_position: bool = False

    def read(self, state: Any) -> Any:
        """Return the outer parameters of a state. They are copied only if necessary."""
        outer_params = self.select(state)
        return (
            self.mean(outer_params)
            if self.mean
            else jax.device_put(outer_params, shardings_of(self.like))
        )

    def calls(self, state: Any, runs: float) -> list[Call]:
        """Return the programs that `read` calls.

        Args:
          state: ShapeDtypeStructs.
          runs: how often `read` is called in a period.
        """
        return (
            [Call(self.mean, (self.select(state),), runs, OUTSIDE, EVALUATION)] if self.mean else []
        )


class RestorePlan(NamedTuple):
    """How a trainer restores a checkpoint.

    Attributes:
      items: the items to read, as ShapeDtypeStructs with this run's shardings.
      state_of: (items, t=) -> the state after inner step t.
      replica_items: names of the items whose leaves begin with R of this run.
      lines: t -> log lines on the differences between checkpoint and restored state.
    """

    items: dict[str, Any]
    state_of: Callable[..., Any]
    replica_items: tuple[str, ...] = ()
    lines: Callable[[int], list[str]] = lambda t: []


class Description(NamedTuple):
    """Texts for the user.

    Attributes:
      title: the mode in a few words.
      fragments: lines of the table of fragments.
      start: lines at the start of a run.
      resident: memory on a device in addition to plain training; "" for none.
      reduce_scatter: whether the collective is reduce-scatter.
    """

    title: str
    fragments: tuple[str, ...]
    start: tuple[str, ...] = ()
    resident: str = ""
    reduce_scatter: bool = False


class Trainer(Protocol):
    """A trainer that is laid out for the parameters of one run.

    Attributes:
      mesh: the mesh.
      num_replicas: R of the metrics, and of the leaves of the state that have an R.
      period: number of inner steps after which the same programs run again.
      abstract_state: ShapeDtypeStructs with shardings.
      exported, evaluated: views of the outer parameters.
      description: texts for the user.
    """

    mesh: Mesh
    num_replicas: int
    period: int
    abstract_state: Any
    exported: OuterParamsView
    evaluated: OuterParamsView
    description: Description

    def init_program(self, make: Callable[..., tuple[Any, Any]], **options) -> Program:
        """Return the program that makes the state before the first step.

        Args:
          make: (*args) -> one replica's (params, opt_state). The program has the same arguments.
          **options: options of Program.
        """

    def calls(self, batch: Any) -> list[Call]:
        """Return every program of the steps, the plain inner step first.

        Args:
          batch: ShapeDtypeStructs, leaves [R, ...].
        """

    def step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Take one inner step: (the new state, metrics with leaves [R]). state is donated."""

    def check_finite(self, state: Any, *, exchanges_only: bool = False) -> None:
        """Raise NumericsError for a NaN or infinity in an exchange so far, or in the parameters.

        Args:
          state: the run's state.
          exchanges_only: do not read the parameters that this process holds. All processes then
            raise together.
        """

    def bytes_sent(self, t: int) -> float:
        """Return the bytes that a replica (data parallel: a slice) sends in inner step t."""

    def extra_metrics(self, state: Any) -> dict[str, float]:
        """Return the trainer's own metrics since the last call."""

    def closing_line(self, state: Any) -> str:
        """Return the line at the end of a run."""

    def checkpoint(self, state: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return ({item: tree of arrays}, metadata as JSON, see SavedLayout).

        The item of the outer parameters can be read without the others.
        """

    def restore_plan(self, saved: SavedLayout) -> RestorePlan:
        """Return how this run restores a state with the layout `saved`."""

    def close(self) -> None:
        """Stop the trainer's threads, if it has any."""


def abstract_metrics(trainer: Trainer, batch: Any) -> Any:
    """Return ShapeDtypeStructs of the metrics of a step, leaves [R]. batch: see Trainer.calls."""
    plain = trainer.calls(batch)[0]
    return plain.program.out_shapes(*plain.args)[2]
