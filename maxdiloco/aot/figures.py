"""The figures of programs compiled ahead of time: sums over a period, and all of them as JSON.

Memory is the compiler's. Times are its estimates, and those of hlo/replay.py; what would do in
place of what was compiled is arithmetic. Nothing was run, and nothing else was compiled.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from maxdiloco.aot import topology, wait
from maxdiloco.aot.measure import Crossing, Measured
from maxdiloco.engine.calls import EVALUATION, LOG, SAVE, STEP
from maxdiloco.metrics.speed import performance
from maxdiloco.parallel.chips import Chip


class Report(NamedTuple):
    """What was compiled, and for what.

    period: the H inner steps in which a program runs `runs` times. chip: None where what was
    compiled for is this machine. topology: name of a slice. gbps: one device's share of the DCN
    [Gbit/s]. devices_per_host: they share its link; 0 where that is not known. flags: of the
    compiler; the job needs the same. tokens_per_step: of all replicas. flops_per_token: of the
    model, see metrics/speed.py. overlap: diloco_outer_overlap; "" without DiLoCo. room: what makes
    room on a device and is not yet on. ici: sizes of the mesh axes inside a slice. by_hosts: bytes
    that a slice sends to others in a period beside its programs, exchange_carrier=host.
    """

    title: str
    period: int
    programs: Sequence[Measured]
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
    room: str
    ici: Mapping[str, int]
    by_hosts: float = 0.0

    @property
    def timed(self) -> bool:
        """Whether the compiler estimates times, which it does for TPUs."""
        return self.chip is not None and self.chip.timed

    def at(self, when: str) -> list[Measured]:
        """The programs that run at STEP, BESIDE or START; see Call."""
        return [program for program in self.programs if program.when == when]

    def missing(self, when: str) -> list[str]:
        """Names of the programs at `when` that were not compiled, as they are too big."""
        return [program.name for program in self.at(when) if program.too_big]

    @property
    def step_seconds(self) -> float | None:
        """Mean device time of a step, its waits for other slices included.

        None off TPU, and where a program of the steps was not compiled.
        """
        if not self.timed or self.missing(STEP):
            return None
        return self.seconds(STEP) / self.period

    def seconds(self, when: str) -> float:
        """Device time of a period. Only on TPU."""
        return sum(p.runs * (p.seconds + p.exposed) for p in self.at(when) if not p.too_big)

    @property
    def exposed_seconds(self) -> float:
        """Seconds of a period that the steps wait for other slices, at most."""
        return sum(p.runs * p.exposed for p in self.at(STEP))

    @property
    def exposed_seconds_least(self) -> float:
        """The same where a send-done waits for nothing; see hlo/replay.py."""
        return sum(p.runs * p.exposed_least for p in self.at(STEP))

    @property
    def busy_seconds(self) -> float:
        """Seconds of a period in which the steps keep the link between slices busy."""
        return sum(p.runs * p.busy for p in self.at(STEP))

    def bytes_sent(self, when: str) -> float:
        """Bytes that leave one device for other slices in a period."""
        return _sent(self.at(when))

    def of_events(self) -> dict[str, dict[str, float | None] | None]:
        """What a period's evaluations, saves and log steps cost a device. None: not compiled.

        dcn_bytes: that leave it for other slices. exposed_seconds: that it waits for them; seconds:
        its time; share: of the steps' time. These are None where the steps' time is not known.
        """
        return {event: self._of_event(event) for event in (EVALUATION, SAVE, LOG)}

    def _of_event(self, event: str) -> dict[str, float | None] | None:
        programs = [program for program in self.programs if program.event == event]
        if any(program.too_big for program in programs):
            return None
        cost = {"dcn_bytes": _sent(programs)}
        if self.step_seconds is None:
            return cost | dict.fromkeys(("exposed_seconds", "seconds", "share"))
        seconds = sum(p.runs * (p.seconds + p.exposed) for p in programs)
        cost["exposed_seconds"] = sum(p.runs * p.exposed for p in programs)
        return cost | {"seconds": seconds, "share": seconds / (self.step_seconds * self.period)}

    @property
    def bandwidth_enough(self) -> float | None:
        """One device's share of the link that would expose nothing of a step; see wait.py."""
        return wait.enough_gbps(self.gbps, [(p.busy, p.exposed) for p in self.at(STEP)])

    @property
    def tau_enough(self) -> int | None:
        """The tau that would expose nothing of a step; None where no tau of the period would."""
        plain = next((p for p in self.at(STEP) if p.name == "inner" and p.seconds), None)
        exposing = [program for program in self.at(STEP) if program.exposed]
        if plain is None or not exposing or self.overlap != "none":
            return None
        return wait.enough_tau(
            self.tau,
            H=self.period,
            step_s=plain.seconds,
            chunk_s=max(program.busy for program in exposing),
            busy_s=self.busy_seconds,
        )


def _sent(programs: Sequence[Measured]) -> float:
    return sum(p.runs * c.bytes_per_device * c.times for p in programs for c in p.crossings)


def as_json(report: Report) -> dict[str, Any]:
    """The figures of the report's tables: bytes, seconds, and parts of the whole.

    None: not known, as a program was not compiled, or there is no TPU.
    """
    unknown = bool(report.missing(STEP))
    untimed = unknown or not report.timed
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
        "dcn_bytes_per_device_and_step": (
            None if unknown else report.bytes_sent(STEP) / report.period
        ),
        "dcn_bytes_by_hosts_per_slice_and_period": report.by_hosts,
        "dcn_busy_seconds_per_period": None if untimed else report.busy_seconds,
        "dcn_exposed_seconds_per_period": None if untimed else report.exposed_seconds,
        "dcn_exposed_seconds_per_period_least": None if untimed else report.exposed_seconds_least,
        "beside_the_steps": report.of_events(),
        "programs": [_program(report, program) for program in report.programs],
        "verdict": verdict(report),
    }


def verdict(report: Report) -> dict[str, Any]:
    """What fits, how fast it is, and what would expose nothing. None: not known, or not wanted.

    topology_enough: a slice whose devices hold what these need, if all of it is shared by more of
    them; "" where no known slice of the kind would do.
    """
    largest = max(report.programs, key=lambda program: program.memory.needed)
    needed, hbm = largest.memory.needed, report.chip and report.chip.hbm
    fits = hbm and needed <= hbm and not any(program.too_big for program in report.programs)
    enough = None
    if fits is False:
        devices = math.ceil(report.devices_per_slice * needed / hbm)
        enough = topology.larger(report.topology, devices)
    speed = report.step_seconds and performance(
        step_time=report.step_seconds,
        tokens_per_step=report.tokens_per_step,
        flops_per_token=report.flops_per_token,
        num_devices=report.num_devices,
        device_kind=report.chip.kinds[0],
    )
    return {
        "memory_needed_bytes": needed,
        "memory_share": hbm and needed / hbm,
        "memory_program": largest.name,
        "fits": fits,
        "topology_enough": enough,
        "tokens_per_second": speed and speed["perf/tokens_per_second"],
        "mfu": speed and speed["perf/mfu"],
        "bandwidth_enough_gbps": report.bandwidth_enough if report.exposed_seconds else None,
        "tau_enough": report.tau_enough if report.exposed_seconds else None,
    }


def _program(report: Report, program: Measured) -> dict[str, Any]:
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
        "pallas_kernels_not_estimated": program.kernels,
        "memory": memory,
        "dcn": [_crossing(report, program, crossing) for crossing in program.crossings],
        "ici": _collectives(program),
    }
    unknown = ("flops_per_device", "pallas_kernels_not_estimated", "dcn", "ici")
    return found | dict.fromkeys(unknown) if program.too_big else found


def _crossing(report: Report, program: Measured, crossing: Crossing) -> dict[str, Any]:
    """starts, ends: parts of the program's time. hides_behind: the part of the device's own time
    between them. These and the times are left out off TPU.
    """
    sent = crossing.bytes_per_device * crossing.times
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


def _collectives(program: Measured) -> list[dict[str, Any]]:
    """What stays inside a slice: a row for each kind and dtype of collective over the same axes.

    asynchronous: each of them has its start and its end apart.
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
