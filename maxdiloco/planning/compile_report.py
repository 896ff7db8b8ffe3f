"""The figures of programs compiled ahead of time: sums over a period, and JSON of all figures.

The memory is reported by the compiler. Times are the compiler's estimates, or come from
hlo/replay.py. Remedies are computed. No program was run, and none was compiled for a remedy.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from maxdiloco.engine.calls import EVALUATION, LOG, SAVE, STEP
from maxdiloco.metrics.speed import performance
from maxdiloco.parallel.chips import Chip
from maxdiloco.planning import link_model, topology
from maxdiloco.planning.hlo.traffic import Collective
from maxdiloco.planning.program_costs import ProgramCost


class Report(NamedTuple):
    """The programs of a run, and the hardware they were compiled for.

    Attributes:
      title: title of the report.
      period: H inner steps, in which a program runs `runs` times.
      programs: compiled.
      chip: type of a device; None for this machine's devices.
      topology: name of a slice.
      devices_per_slice: number of them.
      devices_per_host: number of devices that share a host's link; 0 if unknown.
      num_devices: number of devices of all slices.
      gbps: one device's share of the DCN [Gbit/s].
      flags: flags of the compiler; the job needs the same flags.
      tokens_per_step: tokens of all replicas.
      flops_per_token: FLOPs of the model, see metrics/speed.py.
      tau: overlap steps.
      overlap: diloco_round_overlap; "" without DiLoCo.
      remedy: remedies for a lack of memory that are not yet active.
      ici: sizes of the mesh axes inside a slice.
      by_hosts: bytes that the hosts of a slice send in a period with diloco_transport=host.
    """

    title: str
    period: int
    programs: Sequence[ProgramCost]
    chip: Chip | None
    topology: str
    devices_per_slice: int
    devices_per_host: int
    num_devices: int
    gbps: float
    flags: Mapping[str, str]
    tokens_per_step: int
    flops_per_token: float
    tau: int
    overlap: str
    remedy: str
    ici: Mapping[str, int]
    by_hosts: float = 0.0

    @property
    def timed(self) -> bool:
        """Whether the compiler estimates times, which it does for TPUs."""
        return self.chip is not None and self.chip.timed

    def cost(self, kind: str) -> "Cost":
        """Add up the programs of a kind, times their runs. See `when` and `event` of Call."""
        ran = [program for program in self.programs if kind in (program.when, program.event)]
        sends = [(p.runs, crossing) for p in ran for crossing in p.crossings]
        return Cost(
            known=not any(p.too_big for p in ran),
            dcn_bytes=sum(runs * c.bytes_sent * c.times for runs, c in sends),
            seconds=sum(p.runs * (p.seconds + p.exposed) for p in ran if p.seconds is not None),
            exposed=sum(p.runs * p.exposed for p in ran),
            least=sum(runs * c.waited_least for runs, c in sends),
            busy=sum(p.runs * p.busy for p in ran),
        )

    @property
    def step_seconds(self) -> float | None:
        """Mean device time of a step, including its waits for other slices [s].

        None off TPU, or if a program of the steps was not compiled.
        """
        steps = self.cost(STEP)
        return steps.seconds / self.period if self.timed and steps.known else None


class Cost(NamedTuple):
    """Costs of programs for a device in a period.

    Attributes:
      known: whether all of them were compiled; the other fields count the compiled ones.
      dcn_bytes: bytes that leave the device for other slices.
      seconds: device time with waits; 0 off TPU.
      exposed: upper bound on the seconds that the device waits for other slices.
      least: the same if a send-done never waits, see hlo/replay.py.
      busy: seconds that the link is busy.
    """

    known: bool
    dcn_bytes: float
    seconds: float
    exposed: float
    least: float
    busy: float


def as_json(report: Report) -> dict[str, Any]:
    """Return the figures of the report's tables: bytes, seconds, and fractions.

    None stands for an unknown figure: a program was not compiled, or the hardware is not a TPU.
    """
    steps, untimed = report.cost(STEP), report.step_seconds is None
    return {
        "title": report.title,
        "period_steps": report.period,
        "devices_per_slice": report.devices_per_slice,
        "hbm_bytes": report.chip and report.chip.hbm,
        "dcn_bandwidth_gbps": report.gbps,
        "devices_per_host": report.devices_per_host or None,
        "dcn_bandwidth_gbps_per_host": report.gbps * report.devices_per_host or None,
        "compiler_flags": dict(report.flags),
        "step_seconds": report.step_seconds,
        "dcn_bytes_per_device_and_step": steps.dcn_bytes / report.period if steps.known else None,
        "dcn_bytes_by_hosts_per_slice_and_period": report.by_hosts,
        "dcn_busy_seconds_per_period": None if untimed else steps.busy,
        "dcn_exposed_seconds_per_period": None if untimed else steps.exposed,
        "dcn_exposed_seconds_per_period_least": None if untimed else steps.least,
        "outside_the_steps": {name: _event(report, name) for name in (EVALUATION, SAVE, LOG)},
        "programs": [_program(report, program) for program in report.programs],
        "verdict": verdict(report),
    }


def _event(report: Report, event: str) -> dict[str, float | None] | None:
    """Return the costs of a period's evaluations, saves or log steps; None if not compiled.

    share: relative to the steps' time. Times are None if the steps' time is unknown.
    """
    found = report.cost(event)
    if not found.known:
        return None
    if report.step_seconds is None:
        times = dict.fromkeys(("exposed_seconds", "seconds", "share"))
    else:
        share = found.seconds / (report.step_seconds * report.period)
        times = {"exposed_seconds": found.exposed, "seconds": found.seconds, "share": share}
    return {"dcn_bytes": found.dcn_bytes} | times


def verdict(report: Report) -> dict[str, Any]:
    """Return whether the run fits, its speed, and settings without exposed communication.

    None stands for an unknown figure, or for a remedy that is not needed.
    topology_enough: a slice whose devices hold the run if they share all of it; "" if no known
    slice of the kind suffices. bandwidth_enough_gbps: one device's share of a link that the steps
    would hide. tau_enough: the tau within a period; see link_model.py.
    """
    largest = max(report.programs, key=lambda program: program.memory.needed)
    needed, hbm = largest.memory.needed, report.chip and report.chip.hbm
    fits = hbm and needed <= hbm and not any(program.too_big for program in report.programs)
    enough = None
    if fits is False:
        devices = math.ceil(report.devices_per_slice * needed / hbm)
        enough = topology.larger(report.topology, devices)
    gbps, tau, steps = None, None, [p for p in report.programs if p.when == STEP]
    if report.cost(STEP).exposed:
        gbps = link_model.enough_gbps(report.gbps, [(p.busy, p.exposed) for p in steps])
        plain = next((p for p in steps if p.name == "inner" and p.seconds), None)
        if plain is not None and report.overlap == "none":
            tau = link_model.enough_tau(
                report.tau,
                H=report.period,
                step_s=plain.seconds,
                chunk_s=max(program.busy for program in steps if program.exposed),
                busy_s=report.cost(STEP).busy,
            )
    speed = report.step_seconds and performance(
        step_time=report.step_seconds,
        tokens_per_step=report.tokens_per_step,
        flops_per_token=report.flops_per_token,
        num_devices=report.num_devices,
        device_kind=report.chip.device_kinds[0],
    )
    return {
        "memory_needed_bytes": needed,
        "memory_share": hbm and needed / hbm,
        "memory_program": largest.name,
        "fits": fits,
        "topology_enough": enough,
        "tokens_per_second": speed and speed["perf/tokens_per_second"],
        "mfu": speed and speed["perf/mfu"],
        "bandwidth_enough_gbps": gbps,
        "tau_enough": tau,
    }


def _program(report: Report, program: ProgramCost) -> dict[str, Any]:
    memory = program.memory._asdict() | {"needed": program.memory.needed}
    if program.too_big:
        memory |= {"outputs": None, "peak": None, "temporary": program.memory.temporary or None}
    found = {
        "name": program.name,
        "runs_per_period": program.runs,
        "when": program.when,
        "compile_seconds": program.compile_seconds,
        "too_big": program.too_big,
        "flops_per_device": program.flops,
        "estimated_seconds": program.seconds,
        "unknown_calls": dict(program.unknown_calls),
        "memory": memory,
        "dcn": [_crossing(report, program, crossing) for crossing in program.crossings],
        "ici": _collectives(program),
    }
    unknown = ("flops_per_device", "unknown_calls", "dcn", "ici")
    return found | dict.fromkeys(unknown) if program.too_big else found


def _crossing(report: Report, program: ProgramCost, crossing: Collective) -> dict[str, Any]:
    """Return the figures of a collective between slices.

    starts, ends: parts of the program's time. hides_behind: the part of the device's own time
    between them. Only programs for TPUs have these and the times.
    """
    sent = crossing.bytes_sent * crossing.times
    row = {
        "collective": crossing.kind,
        "dtype": crossing.dtype,
        "axes": list(crossing.axes),
        "bytes_per_device": sent,
        "bytes_per_slice": sent * report.devices_per_slice,
        "padding_bytes": crossing.padding,
        "in_conditional": crossing.in_conditional,
    }
    if crossing.timing is None:
        return row
    timing, own_seconds = crossing.timing, program.seconds
    seconds = own_seconds + program.exposed
    between = timing.done - timing.start - timing.waited
    return row | {
        "starts": timing.start / seconds if seconds else 0.0,
        "ends": timing.done / seconds if seconds else 0.0,
        "hides_behind": max(0.0, between / own_seconds) if own_seconds else 0.0,
        "link_seconds": timing.busy,
        "exposed_seconds": timing.waited,
        "exposed_seconds_least": crossing.waited_least,
    }


def _collectives(program: ProgramCost) -> list[dict[str, Any]]:
    """Return a row for each kind and dtype of collective over the same axes inside a slice.

    asynchronous: whether each of them has separate operations for its start and its end.
    """
    rows: dict[tuple, dict[str, Any]] = {}
    for item in program.inside:
        kind = f"{item.kind} {item.dtype}"
        empty = {"axes": list(item.axes), "collective": kind, "number": 0, "bytes_per_device": 0}
        row = rows.setdefault((item.axes, kind), empty | {"asynchronous": True})
        row["number"] += item.times
        row["bytes_per_device"] += item.times * item.bytes_sent
        row["asynchronous"] &= not item.waits
    return list(rows.values())
