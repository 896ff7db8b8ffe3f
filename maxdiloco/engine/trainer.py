"""The interface of a trainer: what the training loop, checkpoints and train_compile ask of it.

DiLoCo and DataParallel have it; tests/engine/test_trainer.py holds both to it.

    # R replicas: M with DiLoCo, 1 with data parallelism
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh

from maxdiloco.diloco.schedule import GATHER, Schedule
from maxdiloco.engine.calls import BESIDE, EVALUATION, Call
from maxdiloco.errors import CheckpointError
from maxdiloco.parallel.program import Program
from maxdiloco.parallel.sharding import shardings_of

# The checkpoint item with theta; and that of eager updates, one for each replica, [R, ...].
OUTER_PARAMS, OUTER_OF_EACH = "outer_params", "outer"
# The item with what is only logged. A run resumes without a leaf of it, which then begins at zero,
# so that versions may differ in what they log.
DIAGNOSTICS = "diagnostics"


class SavedLayout(NamedTuple):
    """How the state in a checkpoint is laid out, as Trainer.note has it.

    mesh: sizes of the axes. same_rules: whether the run that saved it had the logical axis rules of
    this run. exchange: ExchangeSettings as a dict. chunk_pieces: Layout.pieces. theta_item: of
    saved.items_of. rule: alpha, merge, rate and momentum, to tell what has changed. records: of the
    log of fragment 0 that an island knew.
    """

    num_replicas: int
    mesh: dict[str, int]
    same_rules: bool
    exchange: dict[str, Any]
    dropped_until: int
    schedule_since: int
    chunk_pieces: Sequence[int] | None = None
    theta_item: str = OUTER_PARAMS
    rule: dict[str, Any] | None = None
    records: int | None = None


class ExchangeSettings(NamedTuple):
    """When which fragment is exchanged and how it travels: the arguments of class DiLoCo."""

    sync_period: int
    overlap_steps: int
    offsets: tuple[int, ...]
    outer_overlap: str
    exchange_dtype: str
    num_nonlayer_fragments: int
    sequential_layers: bool
    error_feedback: bool = False
    exchange: str = GATHER

    @property
    def partition(self) -> dict[str, Any]:
        """Arguments of fragments.partition."""
        return dict(
            num_fragments=len(self.offsets),
            num_nonlayer=self.num_nonlayer_fragments,
            sequential=self.sequential_layers,
        )

    @property
    def schedule(self) -> Schedule:
        """The schedule, with as many chunks as a fragment may have."""
        return Schedule(self.sync_period, self.overlap_steps, self.offsets, self.outer_overlap)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "ExchangeSettings":
        """The settings of a SavedLayout. Raises CheckpointError for unknown or missing ones."""
        if later := fields.keys() - set(cls._fields):
            raise CheckpointError(
                f"exchange of the checkpoint has {', '.join(sorted(later))}, which this version of "
                "maxdiloco does not know. Use the version that wrote it."
            )
        if missing := set(cls._fields) - cls._field_defaults.keys() - fields.keys():
            raise CheckpointError(
                f"exchange of the checkpoint has no {', '.join(sorted(missing))}. "
                "Use the checkpoint of a DiLoCo run."
            )
        return cls(**fields | {"offsets": tuple(fields["offsets"])})


class ThetaView(NamedTuple):
    """theta as an export or an evaluation takes it, on the device: `like`, ShapeDtypeStructs.

    kept: state -> theta as it lies. mean: of the replicas' thetas, eager; None where theta has one
    copy, or each slot its own. of_slots: whether each slot of the mesh has one, [slots, ...].
    """

    like: Any
    kept: Callable[[Any], Any]
    mean: Program | None = None
    of_slots: bool = False

    def of(self, state: Any) -> Any:
        """Of a state; what the state has where it is such."""
        theta = self.kept(state)
        return self.mean(theta) if self.mean else jax.device_put(theta, shardings_of(self.like))

    def calls(self, state: Any, runs: float) -> list[Call]:
        """The programs that `of` calls. state: abstract; runs: how often in a period."""
        return [Call(self.mean, (self.kept(state),), runs, BESIDE, EVALUATION)] if self.mean else []


class Reading(NamedTuple):
    """How a trainer reads a checkpoint.

    items: those to read, as ShapeDtypeStructs of this run's state. state_of(items, t=): the state
    after inner step t from them. replica_items: those whose leaves begin with R of this run.
    lines(t): what `state_of` changes.
    """

    items: dict[str, Any]
    state_of: Callable[..., Any]
    replica_items: tuple[str, ...] = ()
    lines: Callable[[int], list[str]] = lambda t: []


class Description(NamedTuple):
    """Texts for the user: the mode, the fragment table, the lines of a start.

    resident: what a device keeps beyond plain training, "" for nothing. owners: whether slots own
    parts of the fragments.
    """

    title: str
    fragments: tuple[str, ...]
    start: tuple[str, ...] = ()
    resident: str = ""
    owners: bool = False


class Trainer(Protocol):
    """A trainer that is laid out for the parameters of one run.

    num_replicas: R of the metrics, and of the state where its leaves have an R. period: inner
    steps after which the same programs run again. abstract_state: ShapeDtypeStructs with
    shardings. exported, evaluated: of its parameters. description: for the user.
    """

    mesh: Mesh
    num_replicas: int
    period: int
    abstract_state: Any
    exported: ThetaView
    evaluated: ThetaView
    description: Description

    def init_program(self, make: Callable[..., tuple[Any, Any]], **options) -> Program:
        """The program that makes the state before the first step. options: of Program.

        make(*args) -> (params, opt_state), one replica's; the program takes its arguments.
        """

    def calls(self, batch: Any) -> list[Call]:
        """Every program of the steps, the plain one first. batch: ShapeDtypeStructs, [R, ...]."""

    def join(self, state: Any) -> Any:
        """The state to take the first step from, once that step may be taken. state: donated."""
        return state

    def reads(self, text: Any) -> Any:
        """What the steps read in place of a text; after `join`."""
        return text

    def learning_rate(self, rate: Callable[[float], float], t: int) -> float:
        """Of inner step t. rate: of the schedule, by the inner steps done."""
        return rate(t - 1)

    def evaluates(self, t: int, interval: int) -> bool:
        """Whether theta is evaluated here after inner step t. interval: of the run [steps]."""
        return t % interval == 0

    def ended(self) -> bool:
        """Whether the run is over before its last step."""
        return False

    def leave(self) -> None:
        """No step follows: whatever waits for more goes on."""

    def abstract_metrics(self, batch: Any) -> Any:
        """ShapeDtypeStructs of the metrics of a step, leaves [R]. batch: as for `calls`."""
        plain = self.calls(batch)[0]
        return plain.program.out_shapes(*plain.args)[2]

    def step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """One inner step: the new state, and metrics with leaves [R]. state is donated."""

    def check_exchanges(self, state: Any) -> None:
        """Raise NumericsError if an exchange up to this state met a value that is not finite."""

    def check_finite(self, state: Any) -> None:
        """As check_exchanges, and if parameters that this process holds are not finite now."""

    def bytes_sent(self, t: int) -> float:
        """Bytes that inner step t makes a replica (without DiLoCo a slice) send to others."""

    def extra_metrics(self, state: Any) -> dict[str, float]:
        """Metrics of the trainer itself, by default none."""
        return {}

    def closing_line(self, state: Any) -> str:
        """The line at the end of a run."""
        return f"done: step {state.t}"

    def saved_items(self, state: Any) -> dict[str, Any]:
        """{item of a checkpoint: tree of arrays}; the item of theta can be read alone."""

    def note(self, state: Any) -> dict[str, Any]:
        """What a checkpoint says of the state besides its arrays: JSON, see SavedLayout."""

    def reading(self, saved_layout: SavedLayout) -> Reading:
        """How this run reads a state that is laid out so."""

    def close(self) -> None:
        """End the threads of the trainer, if it has any."""
