"""The report on programs compiled ahead of time: tables, JSON, and reasons not to start the job.

Times are estimates of the TPU compiler and of hlo/replay.py; nothing was run.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from maxdiloco.aot.measure import Crossing, Measured
from maxdiloco.engine.calls import BESIDE, START, STEP
from maxdiloco.metrics.compiles import MAKE_ROOM
from maxdiloco.parallel.chips import Chip
from maxdiloco.processes.output import aligned

MIB = 2**20
SEND_DONE = (
    "exposed ms: if a send is done when the other slice has the data; or: when its buffer is free. "
    "No TPU has told yet which; the first one counts below"
)


class Report(NamedTuple):
    """What was compiled, and for what.

    period: the H inner steps in which a program runs `runs` times. chip: None off TPU.
    gbps: one device's share of the DCN [Gbit/s]. flags: of the compiler; the job needs the same.
    """

    title: str
    period: int
    devices_per_slice: int
    chip: Chip | None
    gbps: float
    programs: Sequence[Measured]
    flags: Mapping[str, str]

    def at(self, when: str) -> list[Measured]:
        """The programs that run at STEP, BESIDE or START; see Call."""
        return [program for program in self.programs if program.when == when]

    @property
    def step_seconds(self) -> float | None:
        """Mean device time of a step, its waits for other slices included; None off TPU."""
        if self.chip is None or any(program.too_big for program in self.at(STEP)):
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

    @property
    def bytes_per_step(self) -> float:
        """Bytes that leave one device for other slices, mean of a step over a period."""
        return self.bytes_sent(STEP) / self.period

    def bytes_sent(self, when: str) -> float:
        """Bytes that leave one device for other slices in a period."""
        return sum(p.runs * c.bytes_per_device * c.times for p in self.at(when)
                   for c in p.crossings)  # fmt: skip


def lines(report: Report) -> list[str]:
    """The report as tables: programs and memory, what crosses slices, what stays inside."""
    programs = as_json(report)["programs"]
    out = [f"== {report.title}", ""]
    out += [f"compiled under {name}={flags}" for name, flags in report.flags.items() if flags]
    out += _programs(report, programs)
    out += ["", f"what crosses slices{_at(report)}", *_over_slices(programs)]
    out += ["", "what crosses devices inside a slice, per run", *_in_slice(report, programs)]
    return [*out, "", *_summary(report)]


def _at(report: Report) -> str:
    return f", at {report.gbps:g} Gbit/s a device" if report.chip else ""


def _programs(report: Report, programs: list[dict[str, Any]]) -> list[str]:
    rows = [("program", "runs/period", "compile s", "GFLOP", "est. ms", "arguments MiB",
             "temporary MiB", "peak MiB", "with the rest MiB")]  # fmt: skip
    for program in programs:
        runs = "once" if program["when"] == START else f"{program['runs_per_period']:.4g}"
        figures = ["-"] * 6 if program["too_big"] else _figures(program)
        rows.append((program["name"], runs, f"{program['compile_seconds']:.1f}", *figures))
    out = aligned(rows)
    if report.chip:
        out.append(f"per device; it has {report.chip.hbm / MIB:,.0f} MiB")
    out += [f"{p['name']} does not fit: {p['too_big']}" for p in programs if p["too_big"]]
    kernels = max((program["pallas_kernels_not_estimated"] for program in programs), default=0)
    if kernels:
        out.append(f"est. ms leaves out {kernels} Pallas kernels that are no attention")
    return out


def _figures(program: dict[str, Any]) -> list[str]:
    seconds, memory = program["estimated_seconds"], program["memory"]
    return [
        f"{program['flops_per_device'] / 1e9:,.1f}",
        "-" if seconds is None else f"{seconds * 1e3:.2f}",
        *(f"{memory[key] / MIB:,.1f}" for key in ("arguments", "temporary", "peak", "needed")),
    ]


def _over_slices(programs: list[dict[str, Any]]) -> list[str]:
    rows = [("program", "collective", "dtype", "over", "bytes/device", "bytes/slice", "padding",
             "starts", "ends", "hides behind", "link ms", "exposed ms", "or")]  # fmt: skip
    for program in programs:
        for row in program["dcn"]:
            kind = row["collective"] + (" in a conditional" if row["in_conditional"] else "")
            sizes = (row[key] for key in ("bytes_per_device", "bytes_per_slice", "padding_bytes"))
            times = ["-"] * 6
            if "starts" in row:
                times = [f"{row[key]:.0%}" for key in ("starts", "ends", "hides_behind")]
                seconds = ("link_seconds", "exposed_seconds", "exposed_seconds_least")
                times += [f"{row[key] * 1e3:.3f}" for key in seconds]
            rows.append((program["name"], kind, row["dtype"], "+".join(row["axes"]),
                         *(f"{size:,}" for size in sizes), *times))  # fmt: skip
    if len(rows) == 1:
        return ["nothing"]
    out = aligned(rows)
    if any(row["exposed_seconds"] != row["exposed_seconds_least"] for program in programs
           for row in program["dcn"] if "starts" in row):  # fmt: skip
        out.append(SEND_DONE)
    return out


def _in_slice(report: Report, programs: list[dict[str, Any]]) -> list[str]:
    rows = [("program", "over", "collective", "number", "MiB/device", "at its links ms")]
    for program in programs:
        for row in program["ici"]:
            kind = row["collective"] + ("" if row["asynchronous"] else ", waited for")
            sent = row["bytes_per_device"]
            took = f"{sent * 8e-6 / report.chip.ici_gbps:.3f}" if report.chip else "-"
            rows.append((program["name"], "+".join(row["axes"]), kind, row["number"],
                         f"{sent / MIB:,.2f}", took))  # fmt: skip
    return aligned(rows) if len(rows) > 1 else ["nothing"]


def _summary(report: Report) -> list[str]:
    sent = f"{report.bytes_per_step:,.0f} bytes/device"
    beside = f"beside the steps: {report.bytes_sent(BESIDE):,.0f} bytes/device a period"
    if report.step_seconds is None:
        return [f"a step, mean of a period of {report.period}: {sent} to other slices", beside]
    whole = report.step_seconds * report.period
    return [
        f"a step, mean of a period of {report.period}: {report.step_seconds * 1e3:.2f} ms, {sent} "
        f"to other slices; link busy {report.busy_seconds / whole:.1%} of the time; exposed "
        f"{report.exposed_seconds * 1e3:.2f} ms a period (or "
        f"{report.exposed_seconds_least * 1e3:.2f}), {report.exposed_seconds / whole:.1%} of the "
        f"time and {exposed_share(report.exposed_seconds, report.busy_seconds):.1%} of the link",
        f"{beside}, {report.seconds(BESIDE) * 1e3:.2f} ms, "
        f"{report.seconds(BESIDE) / whole:.1%} of the steps' time",
    ]


def exposed_share(exposed: float, busy: float) -> float:
    """Exposed over busy seconds, in [0, 1]; 0 when nothing crosses."""
    return min(1.0, exposed / busy) if busy else 0.0


def as_json(report: Report) -> dict[str, Any]:
    """The figures of the report, which `lines` prints: bytes, seconds, and parts of the whole."""
    return {
        "title": report.title,
        "period_steps": report.period,
        "devices_per_slice": report.devices_per_slice,
        "hbm_bytes": report.chip and report.chip.hbm,
        "dcn_bandwidth_gbps": report.gbps,
        "compiler_flags": dict(report.flags),
        "step_seconds": report.step_seconds,
        "dcn_bytes_per_device_and_step": report.bytes_per_step,
        "dcn_busy_seconds_per_period": report.busy_seconds if report.chip else None,
        "dcn_exposed_seconds_per_period": report.exposed_seconds if report.chip else None,
        "dcn_exposed_seconds_per_period_least": (
            report.exposed_seconds_least if report.chip else None
        ),
        "programs": [_program(report, program) for program in report.programs],
    }


def _program(report: Report, program: Measured) -> dict[str, Any]:
    return {
        "name": program.name,
        "runs_per_period": program.runs,
        "when": program.when,
        "compile_seconds": program.compile_seconds,
        "too_big": program.too_big,
        "flops_per_device": program.flops,
        "estimated_seconds": program.seconds,
        "pallas_kernels_not_estimated": program.kernels,
        "memory": program.memory._asdict() | {"needed": program.memory.needed},
        "dcn": [_crossing(report, program, crossing) for crossing in program.crossings],
        "ici": _collectives(program),
    }


def _crossing(report: Report, program: Measured, crossing: Crossing) -> dict[str, Any]:
    sent = crossing.bytes_per_device * crossing.times
    return {
        "collective": crossing.kind,
        "dtype": crossing.dtype,
        "axes": list(crossing.axes),
        "bytes_per_device": sent,
        "bytes_per_slice": sent * report.devices_per_slice,
        "padding_bytes": crossing.padding,
        "in_conditional": crossing.in_conditional,
        **_position(program, crossing),
    }


def _position(program: Measured, crossing: Crossing) -> dict[str, float]:
    """Where a crossing lies in its program, as parts of the program's time; {} off TPU.

    hides_behind: the part of the device's own time between start and end.
    """
    if crossing.timing is None:
        return {}
    timing, own_seconds = crossing.timing, program.seconds
    seconds = own_seconds + program.exposed
    between = timing.done - timing.start - timing.waited
    return {
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


def refusals(report: Report, *, max_exposed_fraction: float) -> list[str]:
    """Why a job with these programs should not start; empty when it may."""
    out = []
    for program in report.programs:
        if program.too_big:
            out.append(f"{program.name} is too big for the chip: {program.too_big} {MAKE_ROOM}")
        elif report.chip and program.memory.needed > report.chip.hbm:
            out.append(
                f"{program.name} needs {program.memory.needed / MIB:,.0f} MiB a device with the "
                f"rest of the run's state, but the chip has {report.chip.hbm / MIB:,.0f}. Use more "
                f"devices in a slice, a smaller per_device_batch_size or "
                f"diloco_outer_memory=pinned_host."
            )
        share = exposed_share(program.exposed, program.busy)
        if program.when == STEP and share > max_exposed_fraction:
            out.append(
                f"max_exposed_fraction={max_exposed_fraction:g}: {program.name} exposes "
                f"{share:.1%} of its time on the link at {report.gbps:g} Gbit/s a device. Use more "
                f"num_communication_overlapping_steps or num_diloco_fragments, or a smaller "
                f"diloco_exchange_dtype."
            )
        axes = {axis for crossing in program.crossings for axis in crossing.axes}
        if program.name == "inner" and "diloco" in axes:
            out.append(
                "a plain step sends bytes to other slices over diloco, which only an exchange "
                "should. Look for what reads across replicas in the inner step."
            )
    return out
