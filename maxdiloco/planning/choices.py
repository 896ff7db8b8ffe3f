"""The ways to synchronise that a plan looks at, as keys of a run, and what each costs in loss."""

import math
import pathlib
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import jax
import yaml

from maxdiloco.diloco.quantize import NAMES as WIRES
from maxdiloco.diloco.quantize import wire_format
from maxdiloco.diloco.schedule import Schedule, offsets
from maxdiloco.flags import base_yml
from maxdiloco.planning.job import Job

# [L] arXiv 2503.09799 and [S] 2501.18512 train with 30, [S] with 100, DiLoCo 2311.08105 with 500.
PERIODS = (30, 50, 100, 300, 500)
TAUS = (1, 2, 3, 4, 5)  # [S] section 3.3.2 advises 5 at most
LAYERS = 3  # of a fragment, [S] section 3.2
LOSSES = pathlib.Path(__file__).parent / "losses.yml"


class Choice(NamedTuple):
    """One way to synchronise. nonlayer: fragments of what belongs to no layer.

    memory: where the outer state is kept.
    """

    H: int
    P: int
    nonlayer: int
    tau: int
    wire: str
    overlap: str
    streaming: bool
    memory: str = "device"

    @property
    def mode(self) -> str:
        """Its name in the table of modes of the README."""
        if self.overlap != "none":
            return self.overlap
        return "overlapped" if self.tau else "streaming" if self.streaming else "DiLoCo"

    @property
    def schedule(self) -> Schedule:
        """Its schedule."""
        return Schedule(self.H, self.tau, offsets(self.P, self.H), overlap=self.overlap)

    def keys(self) -> dict[str, Any]:
        """The keys of a run."""
        return {
            "diloco_sync_period": self.H,
            "enable_streaming_diloco": self.streaming,
            "num_diloco_fragments": self.P,
            "num_nonlayer_fragments": self.nonlayer,
            "num_communication_overlapping_steps": self.tau,
            "diloco_outer_overlap": self.overlap,
            "diloco_exchange_dtype": self.wire,
            "diloco_outer_memory": self.memory,
        }

    def arguments(self) -> list[str]:
        """key=value of what differs from base.yml, and H always."""
        declared = base_yml.declared()
        return [
            f"{name}={base_yml.show(value)}"
            for name, value in self.keys().items()
            if value != declared[name].default or name == "diloco_sync_period"
        ]


# DiLoCo without fragments or overlap, the reference.
EXACT = Choice(100, 1, 1, 0, "float32", "none", streaming=False)


def families(job: Job, given: Collection[str]) -> list[list[Choice]]:
    """What there is to choose from: lists of choices that differ in H and tau alone.

    The least change of training is first. given: keys that the user has set, whose values stay.
    """
    cfg = job.cfg
    # int2 and topk, which lose much and rely on error feedback, are taken when asked for.
    wires = [name for name in WIRES if not wire_format(name).feedback]
    if "diloco_exchange_dtype" in given:
        wires = [cfg.diloco_exchange_dtype]
    periods = [cfg.diloco_sync_period] if "diloco_sync_period" in given else PERIODS
    out = []
    for overlap, streaming, taus in _modes(job, given):
        P, nonlayer = _fragments(job, given) if streaming else (1, 1)
        out += [
            [
                Choice(H, P, nonlayer, tau, wire, overlap, streaming, cfg.diloco_outer_memory)
                for H in periods
                for tau in taus
                if P <= H and tau < H
            ]
            for wire in wires
        ]
    return [family for family in out if family]


def _modes(job: Job, given: Collection[str]) -> Iterator[tuple[str, bool, tuple[int, ...]]]:
    """(overlap, streaming, taus): exact DiLoCo, fragments with some overlap, eager.

    Eager updates do best on the whole model at once (arXiv 2502.12996, Table 3).
    """
    cfg = job.cfg
    tau = cfg.num_communication_overlapping_steps
    fixed_tau = "num_communication_overlapping_steps" in given
    overlaps = [cfg.diloco_outer_overlap]
    if "diloco_outer_overlap" not in given:
        overlaps = ["none"] if fixed_tau and tau else ["none", "eager"]
    fixed_streaming = "enable_streaming_diloco" in given or "num_diloco_fragments" in given
    for overlap in overlaps:
        for streaming in [cfg.enable_streaming_diloco] if fixed_streaming else [False, True]:
            if overlap == "none":
                taus = (tau,) if fixed_tau else TAUS if streaming else (0,)
                yield overlap, streaming, taus
            elif fixed_streaming or not streaming:
                yield overlap, streaming, (0,)


def _fragments(job: Job, given: Collection[str]) -> tuple[int, int]:
    """P, and how many of them hold what belongs to no layer: none larger than LAYERS layers."""
    cfg = job.cfg
    if "num_diloco_fragments" in given:
        return cfg.num_diloco_fragments, cfg.num_nonlayer_fragments
    layers = cfg.base_num_decoder_layers
    in_layers = sum(math.prod(x.shape) for x in jax.tree.leaves(job.params["layers"]))
    each = in_layers / layers * min(LAYERS, layers)
    nonlayer = min(math.ceil((job.num_parameters - in_layers) / each), cfg.vocab_size)
    if "num_nonlayer_fragments" in given:
        nonlayer = cfg.num_nonlayer_fragments
    return math.ceil(layers / LAYERS) + nonlayer, nonlayer


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


def measured(path: pathlib.Path = LOSSES) -> list[Loss]:
    """Every entry of the file. Raises TypeError for one with other fields."""
    return [Loss(**entry) for entry in yaml.safe_load(path.read_text(encoding="utf-8"))["measured"]]


def loss_of(choice: Choice, job: Job, known: list[Loss]) -> Loss | None:
    """What was measured for a choice: of the job's model and number of replicas if there is one,
    otherwise of another, which the table names. None: not measured.
    """
    of_choice = (choice.mode, choice.H, choice.tau, choice.wire)
    same = [loss for loss in known if (loss.mode, loss.H, loss.tau, loss.wire) == of_choice]
    asked = (job.cfg.model_name, job.num_replicas)
    same.sort(key=lambda loss: (loss.model != asked[0], loss.replicas != asked[1]))
    return same[0] if same else None
