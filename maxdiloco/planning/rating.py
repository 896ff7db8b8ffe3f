"""The ways to synchronise that a plan looks at, what each costs on a link, which comes first."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import jax

from maxdiloco.diloco.combinations import RADIAL
from maxdiloco.diloco.quantize import NAMES as WIRES
from maxdiloco.diloco.quantize import wire_format
from maxdiloco.diloco.schedule import ALL_GATHER, REDUCE_SCATTER
from maxdiloco.engine.calls import bytes_on_device, is_on_device
from maxdiloco.engine.layout import lay_out, plan_fragments, scatter_steps
from maxdiloco.engine.settings import AUTO, HOST, XLA, ExchangeSettings
from maxdiloco.parallel.mesh import devices_of_slice
from maxdiloco.planning import link_model
from maxdiloco.planning.forecast import Gap
from maxdiloco.planning.job import Choice, Job
from maxdiloco.planning.link_model import FULL
from maxdiloco.run import settings as run_settings

# [L] arXiv 2503.09799 and [S] 2501.18512 train with 30, [S] with 100, DiLoCo 2311.08105 with 500.
PERIODS = (30, 50, 100, 300, 500)
TAUS = (1, 2, 3, 4, 5)  # [S] section 3.3.2 advises 5 at most
LAYERS = 3  # of a fragment, [S] section 3.2
# Times to a loss that count as equal, as a factor: fitting the link may cost as much.
TIE = 1 / FULL
GRADIENT = 2  # bytes a parameter that data parallelism sends in a step, as the papers count


def families(job: Job, given: Collection[str]) -> list[list[Choice]]:
    """What there is to choose from: lists of choices that differ in H, tau and who takes the mean.

    The least change of training is first. given: keys that the user has set, whose values stay.
    """
    # int2 and topk, which lose much and rely on error feedback, are taken when asked for.
    wires = [name for name in WIRES if not wire_format(name).feedback]
    if "diloco_exchange_dtype" in given:
        wires = [job.asked.wire]
    periods = [job.asked.H] if "diloco_sync_period" in given else PERIODS
    out = []
    for overlap, streaming, taus in _modes(job, given):
        P, nonlayer = _fragments(job, given) if streaming else (1, 1)
        like = job.asked._replace(P=P, nonlayer=nonlayer, overlap=overlap, streaming=streaming)
        out += [
            [
                choice
                for H in periods
                for tau in taus
                if P <= H and tau < H
                for choice in _exchanges(job, given, like._replace(H=H, tau=tau, wire=wire))
            ]
            for wire in wires
        ]
    return [family for family in out if family]


def _exchanges(job: Job, given: Collection[str], choice: Choice) -> list[Choice]:
    """Return the choice with each collective, auto first.

    With two slices reduce-scatter sends as much as all-gather or more, and some settings refuse it.
    """
    settings = settings_of(job, choice)
    if "diloco_collective" in given or settings.no_reduce_scatter or job.slices < 3:
        return [choice]
    auto = choice._replace(collective=AUTO)
    chosen = settings_of(job, auto).collective
    return [auto, auto._replace(collective=ALL_GATHER if chosen != ALL_GATHER else REDUCE_SCATTER)]


def settings_of(job: Job, choice: Choice) -> ExchangeSettings:
    """Return the exchange settings of a choice, without 'auto'."""
    asked = run_settings.read_exchange(job.cfg, job.num_replicas)
    wire = wire_format(choice.wire)
    settings = dataclasses.replace(
        asked,
        sync_period=choice.H,
        num_fragments=choice.P,
        overlap_steps=choice.tau,
        round_overlap=choice.overlap,
        outer_lr=None,  # the default depends on the mode; it does not change the cost
        exchange_dtype=choice.wire,
        error_feedback=asked.error_feedback if wire.error else None,
        collective=choice.collective,
        transport=job.transport,
        num_nonlayer_fragments=choice.nonlayer,
        offsets=None,
        outer_memory=choice.memory,
    )
    return settings.resolve(num_slices=job.slices)


def _modes(job: Job, given: Collection[str]) -> Iterator[tuple[str, bool, tuple[int, ...]]]:
    """(overlap, streaming, taus): exact DiLoCo, fragments with some overlap, eager.

    Eager updates do best on the whole model at once (arXiv 2502.12996, Table 3), and need a plain
    mean: the trainer refuses them with the radial-directional mean.
    """
    asked = job.asked
    fixed_tau = "num_communication_overlapping_steps" in given
    overlaps = [asked.overlap]
    if "diloco_round_overlap" not in given:
        no_eager = (fixed_tau and asked.tau) or job.cfg.diloco_aggregation == RADIAL
        no_eager = no_eager or asked.collective == REDUCE_SCATTER
        overlaps = ["none"] if no_eager else ["none", "eager"]
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
    layers = job.model.config.num_layers
    in_layers = sum(math.prod(x.shape) for x in jax.tree.leaves(job.params["layers"]))
    each = in_layers / layers * min(LAYERS, layers)
    nonlayer = math.ceil((job.num_parameters - in_layers) / each)
    nonlayer = min(nonlayer, job.model.config.vocab_size)
    if "num_nonlayer_fragments" in given:
        nonlayer = job.asked.nonlayer
    return math.ceil(layers / LAYERS) + nonlayer, nonlayer


class Step(NamedTuple):
    """A plain inner step. peak: bytes that it needs, 0: unknown. origin: of its time, in words.

    is_guess: of a time that nothing was compiled or run for.
    """

    seconds: float
    peak: int = 0
    origin: str = "as given"
    is_guess: bool = False


class Traffic(NamedTuple):
    """Bytes that a device sends in a period, for one replica to one other slice.

    Attributes:
      fragments: of each fragment.
      chunks: of each chunk that a program carries in a period (transport xla).
      shared: reduce-scatter: the part of `fragments` that is means, sent `scatter_steps` steps
        after the rest; () with all-gather.
      alone: the part of the programs' bytes that no inner step hides.
      scatter_steps: see engine.layout.scatter_steps.
    """

    fragments: tuple[int, ...]
    chunks: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()
    alone: tuple[int, ...] = ()
    scatter_steps: int = 0


class Rated(NamedTuple):
    """A choice on a link. memory_bytes: of a device. times_less_traffic: than data parallelism.

    least_dcn_bandwidth_gbps: of a device, for FULL; infinity where the latency alone is too long.
    """

    choice: Choice
    exposed_seconds_per_period: float
    step_seconds: float
    tokens_per_second: float
    utilisation: float
    memory_bytes: int
    fits: bool
    staleness_steps: int
    times_less_traffic: float
    least_dcn_bandwidth_gbps: float

    @property
    def fits_link(self) -> bool:
        """Whether the devices compute nearly all of the time (FULL), so the link suffices."""
        return self.utilisation >= FULL


def traffic(job: Job, choice: Choice) -> Traffic:
    """Return the bytes that the trainer sends, as its table of fragments has them."""
    specs = tuple(x.sharding.spec for x in jax.tree.leaves(job.params))
    settings = settings_of(job, choice)
    plans = plan_fragments(
        job.params, settings, layer_axis=job.model.layer_axis, specs=specs, mesh=job.mesh
    )
    max_chunks = settings.schedule.max_chunks
    steps = scatter_steps(max_chunks, [plan.payload for plan in plans])

    def of_device(bytes_of_slice):
        return bytes_of_slice // devices_of_slice(job.mesh)

    if job.transport == HOST:
        parts = [(of_device(plan.scatter_bytes),) for plan in plans]
        shared = [(of_device(plan.gather_bytes),) for plan in plans]
    else:
        parts = [
            (of_device(plan.scatter_chunk_bytes),) * (plan.scatter.count if plan.scatter else 0)
            for plan in plans
        ]
        shared = [(of_device(plan.gather_chunk_bytes),) * plan.gather.count for plan in plans]
    whole = tuple(sum(a) + sum(b) for a, b in zip(parts, shared, strict=True))
    means = tuple(map(sum, shared)) if settings.collective == REDUCE_SCATTER else ()
    chunks, alone = [], ()
    if job.transport == XLA and max_chunks:
        chunks = [*parts, *shared]
        if steps == max_chunks:  # no step is left for the means
            chunks, alone = parts, means
    chunks = tuple(filter(None, itertools.chain(*chunks)))
    return Traffic(whole, chunks, means, alone, steps)


def exposed_s(
    job: Job, choice: Choice, sent: Traffic, *, step_s: float, gbps: float, latency_s: float = 0.0
) -> float:
    """Seconds that a period waits for the link. gbps: one device's share [Gbit/s]."""
    per_byte = job.copies * 8 / (gbps * 1e9)
    return link_model.exposed_s(
        *([size * per_byte for size in sizes] for sizes in sent[:4]),
        H=choice.H,
        lag=choice.schedule.lag,
        scatter_steps=sent.scatter_steps,
        step_s=step_s,
        latency_s=latency_s,
    )


def rated(job: Job, choice: Choice, *, step: Step, gbps: float, latency_s: float = 0.0) -> Rated:
    """What a choice costs."""
    sent = traffic(job, choice)

    def waited(at: float) -> float:
        return exposed_s(job, choice, sent, step_s=step.seconds, gbps=at, latency_s=latency_s)

    def utilisation(at: float) -> float:
        return link_model.utilisation(step.seconds, waited(at), choice.H)

    memory, hbm = _memory(job, choice, step), job.chip and job.chip.hbm
    seconds = step.seconds + waited(gbps) / choice.H
    whole = GRADIENT * job.num_parameters * choice.H
    return Rated(
        choice,
        exposed_seconds_per_period=waited(gbps),
        step_seconds=seconds,
        tokens_per_second=job.tokens / seconds,
        utilisation=utilisation(gbps),
        memory_bytes=memory,
        fits=hbm is None or memory <= hbm,
        staleness_steps=choice.schedule.lag,
        times_less_traffic=whole / (sum(sent.fragments) * job.per_slice * job.copies),
        least_dcn_bandwidth_gbps=link_model.least_gbps(utilisation),
    )


def _memory(job: Job, choice: Choice, step: Step) -> int:
    """Return the bytes of a device: the compiled step's, if there is one, and the other state."""
    layout = lay_out(
        job.params,
        job.opt_state,
        settings_of(job, choice),
        layer_axis=job.model.layer_axis,
        mesh=job.mesh,
    )
    state = layout.state
    kept = [state.outer, state.outer_opt, state.residual, state.in_flight]
    if not step.peak:
        kept += [state.params, state.opt_state]
    return step.peak + sum(map(bytes_on_device, filter(is_on_device, jax.tree.leaves(kept))))


def utilisations(
    job: Job, families: list[list[Choice]], *, step: Step, gbps: float, latency_s: float = 0.0
) -> dict[Choice, float]:
    """The part of its time that each choice computes."""
    link = dict(step_s=step.seconds, gbps=gbps, latency_s=latency_s)
    waited = {
        choice: exposed_s(job, choice, traffic(job, choice), **link)
        for family in families
        for choice in family
    }
    return {
        choice: link_model.utilisation(step.seconds, seconds, choice.H)
        for choice, seconds in waited.items()
    }


def ranked(
    job: Job,
    families: list[list[Choice]],
    *,
    step: Step,
    gbps: float,
    latency_s: float = 0.0,
    busy: Mapping[Choice, float],
    gap: Callable[[Choice], Gap],
) -> list[Rated]:
    """One choice of each family, the soonest at the loss of data parallelism first.

    Choices within TIE of the soonest count as equally soon. Of these the one that changes training
    least is first: by period, overlap and wire, the widest first. Choices that lie further outside
    of what was measured follow the others, and choices that the chip does not hold come last. A
    choice is left out where another one of its mode is as soon and changes training less.

    Args:
      busy: of `utilisations`.
      gap: the forecast of the loss of a choice.
    """
    link = dict(gbps=gbps, latency_s=latency_s)

    def time_to_loss(choice: Choice) -> tuple[int, float]:
        found = gap(choice)
        return found.num_beyond, found.times_tokens / busy[choice]

    times = {choice: time_to_loss(choice) for family in families for choice in family}
    fewest, soonest = min(times.values())

    def late(choice: Choice) -> tuple[int, float]:
        beyond, time = times[choice]
        return beyond, 0.0 if beyond == fewest and time <= TIE * soonest else time

    rows = []
    for family in families:
        choice = min(family, key=late)  # a family begins with what changes training least
        row = _in_memory(job, choice, step=step, **link)
        rows.append(((not row.fits, *late(choice)), _change(row), row))
    rows = [each for each in rows if not any(_beats(other, each) for other in rows)]
    return [row for *_, row in sorted(rows, key=lambda each: each[:2])]


def _beats(other: tuple, each: tuple) -> bool:
    """Whether another row of the same mode is as soon and at least as close to exact DiLoCo."""
    (late, change, row), (later, changed, of) = other, each
    as_close = all(a <= b for a, b in zip(change, changed, strict=True))
    return row is not of and row.choice.mode == of.choice.mode and late <= later and as_close


def nearest_to_fitting(
    job: Job,
    families: list[list[Choice]],
    *,
    step: Step,
    gbps: float,
    latency_s: float = 0.0,
    busy: Mapping[Choice, float],
) -> Rated:
    """The choice that fits the link and changes training least, or else needs the least bandwidth.

    busy: of `utilisations`.
    """
    link = dict(gbps=gbps, latency_s=latency_s)
    rows = []
    for family in families:
        choice = next((each for each in family if busy[each] >= FULL), None)
        choice = choice or max(family, key=lambda each: busy[each])
        rows.append(_in_memory(job, choice, step=step, **link))
    fitting = [row for row in rows if row.fits and row.fits_link]
    if fitting:
        return min(fitting, key=_change)
    return min(rows, key=lambda row: (not row.fits, row.least_dcn_bandwidth_gbps))


def _in_memory(job: Job, choice: Choice, *, step: Step, gbps: float, latency_s: float) -> Rated:
    """The choice rated, with its outer state in host memory where it fits only so."""
    link = dict(step=step, gbps=gbps, latency_s=latency_s)
    row = rated(job, choice, **link)
    if row.fits or choice.memory != "device":
        return row
    return max(row, rated(job, choice._replace(memory="pinned_host"), **link), key=lambda x: x.fits)


def _change(row: Rated) -> tuple[bool, int, int, float]:
    """How much a choice changes training: exact DiLoCo with a short period changes it least."""
    choice, wire = row.choice, wire_format(row.choice.wire)
    return choice.overlap != "none", choice.H, choice.tau, wire.error
