"""What ahead-of-time compiled programs say: lines to read, a JSON object, and what is refused.

Times are the TPU compiler's estimates; nothing was run. See hlo/replay.py for how they are made.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from maxdiloco.aot.measure import Crossing, Measured
from maxdiloco.aot.topology import Chip
from maxdiloco.engine.calls import BESIDE, START, STEP
from maxdiloco.metrics.compiles import MAKE_ROOM
from maxdiloco.processes.output import aligned

MIB = 2**20


class Report(NamedTuple):
    """What was compiled. period: inner steps H that the programs' `runs` add up to.

    chip, gbps: None and the DCN share of a device [Gbit/s]; chip is None off TPU.
    """

    title: str
    period: int
    devices_per_slice: int
    chip: Chip | None
    gbps: float
    programs: Sequence[Measured]

    def those(self, when: str) -> list[Measured]:
        """The programs of the steps, or those beside them; see Call."""
        return [one for one in self.programs if one.when == when]

    @property
    def step_seconds(self) -> float | None:
        """Mean device time of a step over a period, waits for other slices included."""
        if self.chip is None or any(one.too_big for one in self.those(STEP)):
            return None
        return self.seconds(STEP) / self.period

    def seconds(self, when: str) -> float:
        """Device time of a period, on TPU."""
        return sum(p.runs * (p.seconds + p.exposed) for p in self.those(when) if not p.too_big)

    @property
    def exposed_seconds(self) -> float:
        """Seconds of a period in which the steps stand still for other slices."""
        return sum(p.runs * p.exposed for p in self.those(STEP))

    @property
    def busy_seconds(self) -> float:
        """Seconds of a period in which the steps keep the link between slices busy."""
        return sum(p.runs * p.busy for p in self.those(STEP))

    @property
    def bytes_per_step(self) -> float:
        """Bytes that leave one device for other slices, mean of a step over a period."""
        return self.bytes_sent(STEP) / self.period

    def bytes_sent(self, when: str) -> float:
        """Bytes that leave one device for other slices in a period."""
        return sum(p.runs * c.bytes_per_device * c.times for p in self.those(when)
                   for c in p.crossings)  # fmt: skip


def lines(report: Report) -> list[str]:
    """The report as tables: programs and memory, what crosses slices, what stays inside."""
    out = [f"== {report.title}", "", *_programs(report)]
    out += ["", f"what crosses slices{_at(report)}", *_crossings(report)]
    out += ["", "what crosses devices inside a slice, per run", *_inside(report)]
    return [*out, "", *_summary(report)]


def _at(report: Report) -> str:
    return f", at {report.gbps:g} Gbit/s a device" if report.chip else ""


def _programs(report: Report) -> list[str]:
    head = ("program", "runs/period", "compile s", "GFLOP", "est. ms", "arguments MiB",
            "temporary MiB", "peak MiB", "with the rest MiB")  # fmt: skip
    rows = [head]
    for one in report.programs:
        if one.too_big:
            rows.append((one.name, _runs(one), f"{one.compile_seconds:.1f}", *["-"] * 6))
            continue
        memory = one.memory
        rows.append(
            (
                one.name,
                _runs(one),
                f"{one.compile_seconds:.1f}",
                f"{one.flops / 1e9:,.1f}",
                "-" if one.seconds is None else f"{one.seconds * 1e3:.2f}",
                *(
                    f"{size / MIB:,.1f}"
                    for size in (
                        memory.arguments, memory.temporary, memory.peak, memory.needed,
                    )  # fmt: skip
                ),
            )
        )
    out = aligned(rows)
    if report.chip:
        out.append(f"per device; it has {report.chip.hbm / MIB:,.0f} MiB")
    out += [f"{one.name} does not fit: {one.too_big}" for one in report.programs if one.too_big]
    kernels = max((one.kernels for one in report.programs), default=0)
    if kernels:
        out.append(f"est. ms leaves out Pallas kernels, of which a step has {kernels}")
    return out


def _runs(one: Measured) -> str:
    return "once" if one.when == START else f"{one.runs:.4g}"


def _crossings(report: Report) -> list[str]:
    rows = [("program", "collective", "dtype", "over", "bytes/device", "bytes/slice", "padding",
             "starts", "ends", "hides behind", "link ms", "exposed ms")]  # fmt: skip
    for one in report.programs:
        for cross in one.crossings:
            sent = cross.bytes_per_device * cross.times
            kind = cross.kind + (" in a conditional" if cross.in_conditional else "")
            rows.append(
                (one.name, kind, cross.dtype, "+".join(cross.axes), f"{sent:,}",
                 f"{sent * report.devices_per_slice:,}", f"{cross.padding:,}",
                 *_times(one, cross))
            )  # fmt: skip
    return aligned(rows) if len(rows) > 1 else ["nothing"]


def placed(one: Measured, cross: Crossing) -> dict[str, float] | None:
    """Where a crossing lies in its program, as parts of the program's time; None off TPU.

    hides_behind: the part of the device's own time between start and end.
    """
    if cross.timing is None or one.seconds is None:
        return None
    whole, timing = one.seconds + one.exposed, cross.timing
    own = timing.done - timing.start - timing.waited
    return {
        "starts": timing.start / whole if whole else 0.0,
        "ends": timing.done / whole if whole else 0.0,
        "hides_behind": max(0.0, own / one.seconds) if one.seconds else 0.0,
    }


def _times(one: Measured, cross: Crossing) -> tuple[str, ...]:
    where = placed(one, cross)
    if where is None:
        return ("-",) * 5
    shares = (f"{where[key]:.0%}" for key in ("starts", "ends", "hides_behind"))
    return (*shares, f"{cross.timing.busy * 1e3:.3f}", f"{cross.timing.waited * 1e3:.3f}")


def inside(one: Measured) -> dict[tuple[str, str], tuple[int, int, bool]]:
    """{(axes, collective): (number, bytes that leave a device, all have start and done)}."""
    out: dict[tuple[str, str], tuple[int, int, bool]] = {}
    for found in one.inside:
        key = ("+".join(found.axes), f"{found.kind} {found.dtype}")
        count, sent, apart = out.get(key, (0, 0, True))
        out[key] = (
            count + found.times,
            sent + found.times * found.bytes_sent,
            apart and not found.waits,
        )
    return out


def _inside(report: Report) -> list[str]:
    rows = [("program", "over", "collective", "number", "MiB/device", "at all links ms")]
    for one in report.programs:
        for (axes, kind), (count, sent, apart) in inside(one).items():
            kind = kind if apart else f"{kind}, waited for"
            took = f"{sent * 8e-6 / report.chip.ici_gbps:.3f}" if report.chip else "-"
            rows.append((one.name, axes, kind, count, f"{sent / MIB:,.2f}", took))
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
        f"{report.exposed_seconds * 1e3:.2f} ms a period, {report.exposed_seconds / whole:.1%} of "
        f"the time and {exposed_share(report.exposed_seconds, report.busy_seconds):.1%} of the "
        f"link",
        f"{beside}, {report.seconds(BESIDE) * 1e3:.2f} ms, "
        f"{report.seconds(BESIDE) / whole:.1%} of the steps' time",
    ]


def exposed_share(exposed: float, busy: float) -> float:
    """Exposed over busy seconds, in [0, 1]; 0 when nothing crosses."""
    return min(1.0, exposed / busy) if busy else 0.0


def as_json(report: Report) -> dict[str, Any]:
    """The same figures: bytes, seconds, and parts of the whole."""
    return {
        "title": report.title,
        "period_steps": report.period,
        "devices_per_slice": report.devices_per_slice,
        "hbm_bytes": report.chip and report.chip.hbm,
        "dcn_bandwidth_gbps": report.gbps,
        "step_seconds": report.step_seconds,
        "dcn_bytes_per_device_and_step": report.bytes_per_step,
        "dcn_busy_seconds_per_period": report.busy_seconds if report.chip else None,
        "dcn_exposed_seconds_per_period": report.exposed_seconds if report.chip else None,
        "programs": [_program(report, one) for one in report.programs],
    }


def _program(report: Report, one: Measured) -> dict[str, Any]:
    return {
        "name": one.name,
        "runs_per_period": one.runs,
        "when": one.when,
        "compile_seconds": one.compile_seconds,
        "too_big": one.too_big,
        "flops_per_device": one.flops,
        "estimated_seconds": one.seconds,
        "pallas_kernels_not_estimated": one.kernels,
        "memory": one.memory._asdict() | {"needed": one.memory.needed},
        "dcn": [
            {
                "collective": cross.kind,
                "dtype": cross.dtype,
                "axes": list(cross.axes),
                "bytes_per_device": cross.bytes_per_device * cross.times,
                "bytes_per_slice": cross.bytes_per_device * cross.times * report.devices_per_slice,
                "padding_bytes": cross.padding,
                "in_conditional": cross.in_conditional,
                **(placed(one, cross) or {}),
                **({"link_seconds": cross.timing.busy, "exposed_seconds": cross.timing.waited}
                   if cross.timing else {}),
            }
            for cross in one.crossings
        ],
        "ici": [
            {"axes": axes.split("+"), "collective": kind, "number": count,
             "bytes_per_device": sent, "asynchronous": apart}
            for (axes, kind), (count, sent, apart) in inside(one).items()
        ],
    }  # fmt: skip


def refusals(report: Report, *, max_exposed_fraction: float) -> list[str]:
    """Why a job with these programs should not start; empty when nothing speaks against it."""
    out = []
    for one in report.programs:
        if one.too_big:
            out.append(
                f"{one.name} is too big for the chip: {one.too_big} {MAKE_ROOM}"
            )
        elif report.chip and one.memory.needed > report.chip.hbm:
            out.append(
                f"{one.name} needs {one.memory.needed / MIB:,.0f} MiB a device with the rest of "
                f"the run's state, but the chip has {report.chip.hbm / MIB:,.0f}. Use more devices "
                f"in a slice, a smaller per_device_batch_size or diloco_outer_memory=pinned_host."
            )
        share = exposed_share(one.exposed, one.busy)
        if one.when == STEP and share > max_exposed_fraction:
            out.append(
                f"max_exposed_fraction={max_exposed_fraction:g}: {one.name} exposes {share:.1%} of "
                f"its time on the link at {report.gbps:g} Gbit/s a device. Use more "
                f"num_communication_overlapping_steps or num_diloco_fragments, or a smaller "
                f"diloco_exchange_dtype."
            )
        if one.name == "inner" and any("diloco" in cross.axes for cross in one.crossings):
            out.append(
                "a plain step sends bytes to other slices over diloco, which only an exchange "
                "should. Look for what reads across replicas in the inner step."
            )
    return out
