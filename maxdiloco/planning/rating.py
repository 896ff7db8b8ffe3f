"""The costs of a candidate on a link, and the order of candidates."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax

from maxdiloco.diloco.quantize import wire_format
from maxdiloco.diloco.schedule import REDUCE_SCATTER
from maxdiloco.engine.calls import bytes_on_device, is_on_device
from maxdiloco.engine.layout import lay_out, plan_fragments, scatter_steps
from maxdiloco.engine.settings import HOST, XLA
from maxdiloco.parallel.mesh import devices_of_slice
from maxdiloco.planning import link_model
from maxdiloco.planning.candidates import settings_of
from maxdiloco.planning.forecast import Forecast
from maxdiloco.planning.job import Candidate, Job
from maxdiloco.planning.link_model import FULL

# Factor within which times to a loss count as equal. Fitting the link may cost this factor.
TIE = 1 / FULL
GRADIENT = 2  # bytes a parameter that data parallelism sends in a step, as the papers count


@dataclass(frozen=True)
class Step:
    """A plain inner step."""

    seconds: float
    peak: int = 0  # bytes of a device that it needs; 0: unknown
    origin: str = "as given"  # of its time, in words
    is_guess: bool = False  # no program was compiled or run for its time


@dataclass(frozen=True)
class Link:
    """A link between slices."""

    gbps: float  # one device's share [Gbit/s]
    latency_s: float = 0.0  # one way


@dataclass(frozen=True)
class Traffic:
    """Bytes that a device sends in a period, for one replica to one other slice."""

    fragments: tuple[int, ...]  # of each fragment
    chunks: tuple[int, ...] = ()  # of each chunk that a program carries (transport xla)
    # Reduce-scatter: the part of `fragments` that is means, sent `scatter_steps` steps after the
    # rest. Empty with all-gather.
    shared: tuple[int, ...] = ()
    always_exposed: tuple[int, ...] = ()  # the part of the programs' bytes that no inner step hides
    scatter_steps: int = 0  # see engine.layout.scatter_steps


@dataclass(frozen=True)
class RatedCandidate:
    """The costs of a candidate on a link."""

    candidate: Candidate
    exposed_seconds_per_period: float
    step_seconds: float  # with its share of the exposed time
    tokens_per_second: float
    utilisation: float  # part of the time that the devices compute
    memory_bytes: int  # of a device
    fits: bool  # the memory of the chip
    times_less_traffic: float  # than bfloat16 gradients in every step
    least_dcn_bandwidth_gbps: float  # of a device, for FULL; inf if the latency is too long

    @property
    def fits_link(self) -> bool:
        """Whether the devices compute nearly all of the time (FULL)."""
        return self.utilisation >= FULL


def traffic(job: Job, candidate: Candidate) -> Traffic:
    """Return the bytes that the trainer sends, as in its table of fragments."""
    specs = tuple(x.sharding.spec for x in jax.tree.leaves(job.params))
    settings = settings_of(job, candidate)
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
    chunks, always_exposed = [], ()
    if job.transport == XLA and max_chunks:
        chunks = [*parts, *shared]
        if steps == max_chunks:  # no step is left for the means
            chunks, always_exposed = parts, means
    chunks = tuple(filter(None, itertools.chain(*chunks)))
    return Traffic(whole, chunks, means, always_exposed, steps)


def exposed_seconds(
    job: Job, candidate: Candidate, sent: Traffic, *, step_s: float, link: Link
) -> float:
    """Return the seconds that a period waits for the link."""
    per_byte = job.copies * 8 / (link.gbps * 1e9)
    sizes = (sent.fragments, sent.chunks, sent.shared, sent.always_exposed)
    return link_model.exposed_s(
        *([size * per_byte for size in group] for group in sizes),
        H=candidate.H,
        lag=candidate.schedule.lag,
        scatter_steps=sent.scatter_steps,
        step_s=step_s,
        latency_s=link.latency_s,
    )


def rate(
    job: Job, candidate: Candidate, sent: Traffic, *, step: Step, link: Link
) -> RatedCandidate:
    """Compute the costs of a candidate. sent: see `traffic`."""

    def exposed(gbps: float) -> float:
        at = dataclasses.replace(link, gbps=gbps)
        return exposed_seconds(job, candidate, sent, step_s=step.seconds, link=at)

    def utilisation(gbps: float) -> float:
        return link_model.utilisation(step.seconds, exposed(gbps), candidate.H)

    waited, memory = exposed(link.gbps), _memory(job, candidate, step)
    seconds = step.seconds + waited / candidate.H
    gradients = GRADIENT * job.num_parameters * candidate.H
    return RatedCandidate(
        candidate,
        exposed_seconds_per_period=waited,
        step_seconds=seconds,
        tokens_per_second=job.tokens / seconds,
        utilisation=utilisation(link.gbps),
        memory_bytes=memory,
        fits=job.chip is None or memory <= job.chip.hbm,
        times_less_traffic=gradients / (sum(sent.fragments) * job.per_slice * job.copies),
        least_dcn_bandwidth_gbps=link_model.least_gbps(utilisation),
    )


def _memory(job: Job, candidate: Candidate, step: Step) -> int:
    """Return the bytes of a device: the outer state, and the compiled step or the inner state."""
    settings = settings_of(job, candidate)
    state = lay_out(
        job.params, job.opt_state, settings, layer_axis=job.model.layer_axis, mesh=job.mesh
    ).state
    kept = [state.outer, state.outer_opt, state.residual, state.in_flight]
    if not step.peak:
        kept += [state.params, state.opt_state]
    return step.peak + sum(map(bytes_on_device, filter(is_on_device, jax.tree.leaves(kept))))


def utilisations(
    job: Job, sent: Mapping[Candidate, Traffic], *, step: Step, link: Link
) -> dict[Candidate, float]:
    """Return the utilisation of each candidate: the part of the time that its devices compute."""
    out = {}
    for candidate, its in sent.items():
        waited = exposed_seconds(job, candidate, its, step_s=step.seconds, link=link)
        out[candidate] = link_model.utilisation(step.seconds, waited, candidate.H)
    return out


def rank(
    job: Job,
    families: Sequence[Sequence[Candidate]],
    *,
    sent: Mapping[Candidate, Traffic],
    step: Step,
    link: Link,
    loss: Callable[[Candidate], Forecast],
) -> list[RatedCandidate]:
    """Rate one candidate of each family, sorted by the time to the loss of data parallelism.

    Candidates within TIE of the shortest time count as equal; among them, the candidate that
    changes training least is first. Candidates with settings outside the measured range follow the
    others, and candidates that do not fit the chip come last. A candidate is left out if another
    candidate of its mode is equally soon and changes training less.

    Args:
      job: the job.
      families: see candidates.families.
      sent: the traffic of each candidate.
      step: a plain step.
      link: the link between slices.
      loss: returns the forecast of a candidate.
    """
    busy = utilisations(job, sent, step=step, link=link)

    def time_to_loss(candidate: Candidate) -> tuple[int, float]:
        found = loss(candidate)
        return len(found.outside), found.times_tokens / busy[candidate]

    times = {each: time_to_loss(each) for each in itertools.chain.from_iterable(families)}
    fewest, soonest = min(times.values())

    def late(candidate: Candidate) -> tuple[int, float]:
        beyond, time = times[candidate]
        return beyond, 0.0 if beyond == fewest and time <= TIE * soonest else time

    # A family begins with the candidate that changes training least.
    firsts = [min(family, key=late) for family in families]
    rows = [_in_memory(job, each, sent[each], step=step, link=link) for each in firsts]
    keys = [(late(first), _change(row)) for first, row in zip(firsts, rows, strict=True)]
    kept = [
        (not row.fits, *key, k)
        for k, (row, key) in enumerate(zip(rows, keys, strict=True))
        if not any(
            j != k and rows[j].candidate.mode == row.candidate.mode and _beats(keys[j], key)
            for j in range(len(rows))
        )
    ]
    return [rows[k] for *_, k in sorted(kept)]


def _beats(other: tuple, key: tuple) -> bool:
    """Tell whether a sort key puts a row at least as early and no further from exact DiLoCo."""
    (late, change), (later, changed) = other, key
    return late <= later and all(a <= b for a, b in zip(change, changed, strict=True))


def least_demanding(
    job: Job,
    families: Sequence[Sequence[Candidate]],
    *,
    sent: Mapping[Candidate, Traffic],
    step: Step,
    link: Link,
) -> RatedCandidate:
    """Rate the candidate that fits the link and changes training least.

    Without one, the candidate that needs the least bandwidth. For the arguments see `rank`.
    """
    busy = utilisations(job, sent, step=step, link=link)
    rows = []
    for family in families:
        candidate = next((each for each in family if busy[each] >= FULL), None)
        candidate = candidate or max(family, key=lambda each: busy[each])
        rows.append(_in_memory(job, candidate, sent[candidate], step=step, link=link))
    fitting = [row for row in rows if row.fits and row.fits_link]
    if fitting:
        return min(fitting, key=_change)
    return min(rows, key=lambda row: (not row.fits, row.least_dcn_bandwidth_gbps))


def _in_memory(
    job: Job, candidate: Candidate, sent: Traffic, *, step: Step, link: Link
) -> RatedCandidate:
    """Rate a candidate, with its outer state in host memory if it does not fit otherwise."""
    row = rate(job, candidate, sent, step=step, link=link)
    if row.fits or candidate.memory != "device":
        return row
    on_host = dataclasses.replace(candidate, memory="pinned_host")
    moved = rate(job, on_host, sent, step=step, link=link)
    return moved if moved.fits else row


def _change(row: RatedCandidate) -> tuple[bool, int, int, float]:
    """Return how far a candidate is from exact DiLoCo with a short period, in four respects."""
    candidate, wire = row.candidate, wire_format(row.candidate.wire)
    return candidate.overlap != "none", candidate.H, candidate.tau, wire.error
