"""The ways to synchronise that a plan looks at, as keys of a run, and what each costs in loss."""

import math
import pathlib
from collections.abc import Collection, Iterator
from typing import NamedTuple

import jax
import yaml

from maxdiloco.diloco.quantize import NAMES as WIRES
from maxdiloco.diloco.quantize import wire_format
from maxdiloco.planning.job import Choice, Job

# [L] arXiv 2503.09799 and [S] 2501.18512 train with 30, [S] with 100, DiLoCo 2311.08105 with 500.
PERIODS = (30, 50, 100, 300, 500)
TAUS = (1, 2, 3, 4, 5)  # [S] section 3.3.2 advises 5 at most
LAYERS = 3  # of a fragment, [S] section 3.2
LOSSES = pathlib.Path(__file__).parent / "losses.yml"


def families(job: Job, given: Collection[str]) -> list[list[Choice]]:
    """What there is to choose from: lists of choices that differ in H and tau alone.

    The least change of training is first. given: keys that the user has set, whose values stay.
    """
    # int2 and topk, which lose much and rely on error feedback, are taken when asked for.
    wires = [name for name in WIRES if not wire_format(name).feedback]
    if "diloco_exchange_dtype" in given:
        wires = [job.asked.wire]
    periods = [job.asked.H] if "diloco_sync_period" in given else PERIODS
    out = []
    for overlap, streaming, taus in _modes(job.asked, given):
        P, nonlayer = _fragments(job, given) if streaming else (1, 1)
        out += [
            [
                Choice(H, P, nonlayer, tau, wire, overlap, streaming, job.asked.memory)
                for H in periods
                for tau in taus
                if P <= H and tau < H
            ]
            for wire in wires
        ]
    return [family for family in out if family]


def _modes(asked: Choice, given: Collection[str]) -> Iterator[tuple[str, bool, tuple[int, ...]]]:
    """(overlap, streaming, taus): exact DiLoCo, fragments with some overlap, eager.

    Eager updates do best on the whole model at once (arXiv 2502.12996, Table 3).
    """
    fixed_tau = "num_communication_overlapping_steps" in given
    overlaps = [asked.overlap]
    if "diloco_outer_overlap" not in given:
        overlaps = ["none"] if fixed_tau and asked.tau else ["none", "eager"]
    fixed_streaming = "enable_streaming_diloco" in given or "num_diloco_fragments" in given
    for overlap in overlaps:
        for streaming in [asked.streaming] if fixed_streaming else [False, True]:
            if overlap == "none":
                taus = (asked.tau,) if fixed_tau else TAUS if streaming else (0,)
                yield overlap, streaming, taus
            elif fixed_streaming or not streaming:
                yield overlap, streaming, (0,)


def _fragments(job: Job, given: Collection[str]) -> tuple[int, int]:
    """P, and how many of them hold what belongs to no layer: none larger than LAYERS layers."""
    if "num_diloco_fragments" in given:
        return job.asked.P, job.asked.nonlayer
    layers = job.model.spec.num_layers
    in_layers = sum(math.prod(x.shape) for x in jax.tree.leaves(job.params["layers"]))
    each = in_layers / layers * min(LAYERS, layers)
    nonlayer = math.ceil((job.num_parameters - in_layers) / each)
    nonlayer = min(nonlayer, job.model.spec.vocab_size)
    if "num_nonlayer_fragments" in given:
        nonlayer = job.asked.nonlayer
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
    """What was measured for a choice, of the job's model and number of replicas if possible."""
    of_choice = (choice.mode, choice.H, choice.tau, choice.wire)
    same = [loss for loss in known if (loss.mode, loss.H, loss.tau, loss.wire) == of_choice]
    others = [(loss.model != job.name, loss.replicas != job.num_replicas) for loss in same]
    return same[others.index(min(others))] if same else None
