"""The candidates of a plan: combinations of mode, period, overlap, wire format and collective."""

import dataclasses
import math
from collections.abc import Collection, Iterator

import jax

from maxdiloco.diloco.combinations import RADIAL
from maxdiloco.diloco.quantize import NAMES as WIRES
from maxdiloco.diloco.quantize import wire_format
from maxdiloco.diloco.schedule import ALL_GATHER, REDUCE_SCATTER
from maxdiloco.engine.settings import AUTO, ExchangeSettings
from maxdiloco.planning.job import Candidate, Job
from maxdiloco.run import settings as run_settings

# arXiv 2503.09799 and 2501.18512 train with 30, 2501.18512 with 100, DiLoCo 2311.08105 with 500.
PERIODS = (30, 50, 100, 300, 500)
TAUS = (1, 2, 3, 4, 5)  # 2501.18512 section 3.3.2 advises at most 5
LAYERS = 3  # of a fragment, 2501.18512 section 3.2


def families(job: Job, user_keys: Collection[str]) -> list[list[Candidate]]:
    """Return a list of candidates for each mode and wire format. They differ in other settings.

    In each list, the candidate that changes training least is first.

    Args:
      job: the job.
      user_keys: names of the keys that the user has set; their values are kept.
    """
    # int2 and topk, which lose much and rely on error feedback, are candidates on request only.
    wires = [name for name in WIRES if not wire_format(name).feedback]
    if "diloco_exchange_dtype" in user_keys:
        wires = [job.configured.wire]
    periods = [job.configured.H] if "diloco_sync_period" in user_keys else PERIODS
    out = []
    for overlap, streaming, taus in _modes(job, user_keys):
        P, nonlayer = _fragments(job, user_keys) if streaming else (1, 1)
        mode = dict(P=P, nonlayer=nonlayer, overlap=overlap, streaming=streaming)
        out += [
            [
                candidate
                for H in periods
                for tau in taus
                if P <= H and tau < H
                for candidate in _collectives(
                    job,
                    user_keys,
                    dataclasses.replace(job.configured, H=H, tau=tau, wire=wire, **mode),
                )
            ]
            for wire in wires
        ]
    return [family for family in out if family]


def _collectives(job: Job, user_keys: Collection[str], candidate: Candidate) -> list[Candidate]:
    """Return the candidate with each collective, auto first.

    With two slices reduce-scatter does not send less than all-gather. Some settings refuse it.
    """
    settings = settings_of(job, candidate)
    if "diloco_collective" in user_keys or settings.no_reduce_scatter or job.slices < 3:
        return [candidate]
    auto = dataclasses.replace(candidate, collective=AUTO)
    chosen = settings_of(job, auto).collective
    other = ALL_GATHER if chosen != ALL_GATHER else REDUCE_SCATTER
    return [auto, dataclasses.replace(auto, collective=other)]


def settings_of(job: Job, candidate: Candidate) -> ExchangeSettings:
    """Return the exchange settings of a candidate, without 'auto'."""
    configured = run_settings.read_exchange(job.cfg, job.num_replicas)
    wire = wire_format(candidate.wire)
    settings = dataclasses.replace(
        configured,
        sync_period=candidate.H,
        num_fragments=candidate.P,
        overlap_steps=candidate.tau,
        round_overlap=candidate.overlap,
        outer_lr=None,  # the default depends on the mode; it does not change the cost
        exchange_dtype=candidate.wire,
        error_feedback=configured.error_feedback if wire.error else None,
        collective=candidate.collective,
        transport=job.transport,
        num_nonlayer_fragments=candidate.nonlayer,
        offsets=None,
        outer_memory=candidate.memory,
    )
    return settings.resolve(num_slices=job.slices)


def _modes(job: Job, user_keys: Collection[str]) -> Iterator[tuple[str, bool, tuple[int, ...]]]:
    """Yield (round overlap, streaming, taus): exact DiLoCo, fragments with some overlap, eager.

    Eager updates do best on the whole model at once (arXiv 2502.12996, Table 3), and need a plain
    mean: the trainer refuses them with the radial-directional mean.
    """
    configured = job.configured
    fixed_tau = "num_communication_overlapping_steps" in user_keys
    overlaps = [configured.overlap]
    if "diloco_round_overlap" not in user_keys:
        no_eager = (fixed_tau and configured.tau) or job.cfg.diloco_aggregation == RADIAL
        no_eager = no_eager or configured.collective == REDUCE_SCATTER
        overlaps = ["none"] if no_eager else ["none", "eager"]
    fixed_streaming = "enable_streaming_diloco" in user_keys or "num_diloco_fragments" in user_keys
    for overlap in overlaps:
        for streaming in [configured.streaming] if fixed_streaming else [False, True]:
            if overlap == "none":
                taus = (configured.tau,) if fixed_tau else TAUS if streaming else (0,)
                yield overlap, streaming, taus
            elif fixed_streaming or not streaming:
                yield overlap, streaming, (0,)


def _fragments(job: Job, user_keys: Collection[str]) -> tuple[int, int]:
    """Return P and the number of fragments without layers. Fragments have at most LAYERS layers."""
    if "num_diloco_fragments" in user_keys:
        return job.configured.P, job.configured.nonlayer
    layers = job.model.config.num_layers
    in_layers = sum(math.prod(x.shape) for x in jax.tree.leaves(job.params["layers"]))
    each = in_layers / layers * min(LAYERS, layers)
    nonlayer = math.ceil((job.num_parameters - in_layers) / each)
    nonlayer = min(nonlayer, job.model.config.vocab_size)
    if "num_nonlayer_fragments" in user_keys:
        nonlayer = job.configured.nonlayer
    return math.ceil(layers / LAYERS) + nonlayer, nonlayer
