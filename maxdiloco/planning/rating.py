"""The ways to synchronise that a plan looks at, what each costs on a link, which comes first."""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import jax

from maxdiloco.aot import wait
from maxdiloco.aot.wait import FULL
from maxdiloco.diloco import outer
from maxdiloco.diloco.quantize import NAMES as WIRES
from maxdiloco.diloco.quantize import wire_format
from maxdiloco.diloco.schedule import GATHER, OWNERS
from maxdiloco.engine.arguments import refuses_owners
from maxdiloco.engine.calls import bytes_on_device, is_on_device
from maxdiloco.engine.describe import in_flight
from maxdiloco.engine.exchanges import CARRIERS, chunks_on_device
from maxdiloco.engine.plans import plan_fragments
from maxdiloco.engine.state import lay_out
from maxdiloco.engine.trainer import ExchangeSettings
from maxdiloco.exchange import payload
from maxdiloco.flags import checks, config
from maxdiloco.parallel.mesh import devices_of_slice
from maxdiloco.planning.forecast import Gap
from maxdiloco.planning.job import Choice, Job
from maxdiloco.trainer import assemble

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
    """With what diloco_exchange may be, auto first. Of two slices owners send as much or more, and
    with some merges and wires they do not go.
    """
    refused = refuses_owners(job.cfg.diloco_merge, choice.wire)
    if "diloco_exchange" in given or refused or job.slices < 3:
        return [choice]
    auto = choice._replace(exchange="auto")
    return [auto, auto._replace(exchange=GATHER if exchange(job, auto) == OWNERS else OWNERS)]


def exchange(job: Job, choice: Choice) -> str:
    """gather or owners, of a choice."""
    return assemble.exchange(
        choice.exchange,
        slots=job.slices,
        merge=job.cfg.diloco_merge,
        wire=choice.wire,
        schedule=choice.schedule,
    )


def _modes(job: Job, given: Collection[str]) -> Iterator[tuple[str, bool, tuple[int, ...]]]:
    """(overlap, streaming, taus): exact DiLoCo, fragments with some overlap, eager.

    Eager updates do best on the whole model at once (arXiv 2502.12996, Table 3), and need a plain
    mean: the trainer refuses them with diloco_merge=rda.
    """
    asked = job.asked
    fixed_tau = "num_communication_overlapping_steps" in given
    overlaps = [asked.overlap]
    if "diloco_outer_overlap" not in given:
        no_eager = (fixed_tau and asked.tau) or job.cfg.diloco_merge == "rda"
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
    layers = job.model.spec.num_layers
    in_layers = sum(math.prod(x.shape) for x in jax.tree.leaves(job.params["layers"]))
    each = in_layers / layers * min(LAYERS, layers)
    nonlayer = math.ceil((job.num_parameters - in_layers) / each)
    nonlayer = min(nonlayer, job.model.spec.vocab_size)
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

    Of each fragment, and of each chunk that a period carries (program). shared: of those of each
    fragment what owners send, `scatter_steps` steps after the rest; () without. alone: of the bytes
    of a program those that no step hides.
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
    """The bytes that the trainer puts on the wire, as its table of fragments has them."""
    specs = tuple(x.sharding.spec for x in jax.tree.leaves(job.params))
    settings, layer_axis = _settings(job, choice), job.model.layer_axis
    travel = plan_fragments(job.params, settings, layer_axis, specs, job.mesh, job.num_replicas)
    plans, steps, owned = travel.plans, travel.scatter_steps, travel.plans[0].payload.owned

    def of_device(bytes_of_slice):
        return bytes_of_slice // devices_of_slice(job.mesh)

    if job.carrier == "host":
        parts, shared = (
            [(of_device(payload.sent_bytes(plan.payload, first)),) for plan in plans]
            for first in (True, False)
        )
    else:
        parts = [(of_device(travel.part_bytes(plan)),) * plan.scattered[0] for plan in plans]
        shared = [(of_device(travel.chunk_bytes(plan)),) * plan.num_chunks for plan in plans]
    whole = tuple(sum(a) + sum(b) for a, b in zip(parts, shared, strict=True))
    of_owners, chunks, alone = tuple(map(sum, shared)) if owned else (), [], ()
    if job.carrier == "program" and travel.pieces:
        chunks = [*parts, *shared]
        if steps == choice.schedule.max_chunks:  # none is left for what owners share
            chunks, alone = parts, of_owners
    chunks = tuple(filter(None, itertools.chain(*chunks)))
    return Traffic(whole, chunks, of_owners, alone, steps)


def _settings(job: Job, choice: Choice) -> ExchangeSettings:
    wire, wanted = wire_format(choice.wire), checks.FEEDBACK[job.cfg.diloco_error_feedback]
    return ExchangeSettings(
        sync_period=choice.H,
        overlap_steps=choice.tau,
        offsets=choice.schedule.offsets,
        outer_overlap=choice.overlap,
        exchange_dtype=choice.wire,
        num_nonlayer_fragments=choice.nonlayer,
        sequential_layers=job.cfg.use_sequential_layers,
        error_feedback=wire.feedback if wanted is None else wanted and wire.error > 0,
        exchange=exchange(job, choice),
    )


def exposed_s(
    job: Job, choice: Choice, sent: Traffic, *, step_s: float, gbps: float, latency_s: float = 0.0
) -> float:
    """Seconds that a period waits for the link. gbps: one device's share [Gbit/s]."""
    per_byte = job.copies * 8 / (gbps * 1e9)
    return wait.exposed_s(
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
        return wait.utilisation(step.seconds, waited(at), choice.H)

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
        least_dcn_bandwidth_gbps=wait.least_gbps(utilisation),
    )


def _memory(job: Job, choice: Choice, step: Step) -> int:
    """Bytes of a device: the compiled step's, if there is one, and the rest of the state."""
    cfg = config.with_replicas(job.cfg, job.num_replicas)
    lr, momentum = cfg.diloco_outer_lr, cfg.diloco_outer_momentum
    layout = lay_out(
        job.params,
        job.opt_state,
        _settings(job, choice),
        layer_axis=job.model.layer_axis,
        num_replicas=job.num_replicas,
        mesh=job.mesh,
        optimizer=outer.outer_optimizer(cfg.diloco_outer_optimizer, lr=lr, momentum=momentum),
        outer_memory=None if choice.memory == "device" else choice.memory,
    )
    state = layout.state
    kept = [state.outer, state.outer_opt, state.residual, in_flight(state)]
    if not step.peak:
        kept += [state.params, state.opt_state]
    on_device = [x for x in jax.tree.leaves(kept) if is_on_device(x)]
    on_device += chunks_on_device(layout, CARRIERS[job.carrier].steps_on_device)
    return step.peak + sum(map(bytes_on_device, on_device))


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
        choice: wait.utilisation(step.seconds, seconds, choice.H)
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
