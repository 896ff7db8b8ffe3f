"""The report on programs compiled ahead of time: its tables, and reasons not to start the job.

Times are estimates of the TPU compiler and of hlo/replay.py; nothing was run.
"""

import textwrap
from collections.abc import Mapping
from typing import Any

from maxdiloco.aot.figures import Report, as_json
from maxdiloco.engine.calls import BESIDE, START, STEP
from maxdiloco.processes.output import aligned

MIB = 2**20
WIDTH = 100  # columns of a line of prose, and of the tables unless a number is very long
SEND_DONE = (
    "exposed ms: if a send is done when the other slice has the data; or: when its buffer",
    "  is free. No TPU has told yet which; the first one counts",
)
WITHOUT_GPU = (
    "compiled without a GPU: kernels are the compiler's default ones, none tried for its speed,",
    "  and no time is estimated. Memory is the share of a GPU that JAX takes at its start, 0.75",
    "  unless XLA_PYTHON_CLIENT_MEM_FRACTION says another",
)


def lines(report: Report) -> list[str]:
    """The tables behind the verdict: programs and memory, what crosses slices, what stays inside.

    What was not compiled is named, never shown as zero.
    """
    programs = as_json(report)["programs"]
    out = [f"== {report.title}", ""]
    out += [f"compiled under {name}={flags}" for name, flags in report.flags.items() if flags]
    out += WITHOUT_GPU if report.chip and not report.timed else ()
    out += _programs(report, programs)
    unknown = [f"not known: {line}" for line in _wrapped(_names(programs))]
    out += ["", f"what crosses slices{_at(report)}", *_over_slices(programs), *unknown]
    out += ["", "what crosses devices inside a slice, per run", *_in_slice(report, programs)]
    return [*out, *unknown, "", *_summary(report)]


def _names(programs: list[dict[str, Any]]) -> str:
    return ", ".join(program["name"] for program in programs if program["too_big"])


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH - len("not known: "), break_on_hyphens=False)


def _at(report: Report) -> str:
    if not report.chip:
        return ""
    host, devices = report.gbps * report.devices_per_host, report.devices_per_host
    of_host = f", {host:g} a host of {devices}" if devices else ""
    return f", at {report.gbps:g} Gbit/s a device{of_host}"


def _programs(report: Report, programs: list[dict[str, Any]]) -> list[str]:
    rows = [("program", "runs", "GFLOP", "est. ms", "args", "temp", "peak", "total")]
    for program in programs:
        runs = "once" if program["when"] == START else f"{program['runs_per_period']:.4g}"
        figures = ["-"] * 6 if program["too_big"] else _figures(program)
        rows.append((program["name"], runs, *figures))
    has = f", which has {report.chip.hbm / MIB:,.0f}" if report.chip else ""
    out = [f"programs, runs in a period, memory in MiB a device{has}", *aligned(rows)]
    for program in programs:
        if program["too_big"]:
            out += textwrap.wrap(f"{program['name']} does not fit: {program['too_big']}", WIDTH,
                                 subsequent_indent="  ", break_on_hyphens=False)  # fmt: skip
    kernels = max((program["pallas_kernels_not_estimated"] or 0 for program in programs), default=0)
    if kernels:
        out.append(f"est. ms leaves out {kernels} Pallas kernels whose products are unknown")
    return out


def _figures(program: dict[str, Any]) -> list[str]:
    seconds, memory = program["estimated_seconds"], program["memory"]
    return [
        f"{program['flops_per_device'] / 1e9:,.{0 if program['flops_per_device'] > 1e12 else 1}f}",
        "-" if seconds is None else f"{seconds * 1e3:.2f}",
        *(f"{memory[key] / MIB:,.0f}" for key in ("arguments", "temporary", "peak", "needed")),
    ]


def _over_slices(programs: list[dict[str, Any]]) -> list[str]:
    header = ("collective", "dtype", "over", "bytes/device", "tiles", "starts", "ends", "hides",
              "link ms", "exposed ms", "or")  # fmt: skip
    groups: dict[str, list[tuple]] = {}
    for program in programs:
        for row in program["dcn"] or ():
            kind = row["collective"] + (" in a conditional" if row["in_conditional"] else "")
            sizes = (row[key] for key in ("bytes_per_device", "padding_bytes"))
            times = ["-"] * 6
            if "starts" in row:
                times = [f"{row[key]:.0%}" for key in ("starts", "ends", "hides_behind")]
                seconds = ("link_seconds", "exposed_seconds", "exposed_seconds_least")
                times += [f"{row[key] * 1e3:.3f}" for key in seconds]
            shown = (kind, row["dtype"], "+".join(row["axes"]), *(f"{x:,}" for x in sizes), *times)
            groups.setdefault(program["name"], []).append(shown)
    out = _grouped(header, groups, programs)
    if any(row["exposed_seconds"] != row["exposed_seconds_least"] for program in programs
           for row in program["dcn"] or () if "starts" in row):  # fmt: skip
        out += SEND_DONE
    return out


def _in_slice(report: Report, programs: list[dict[str, Any]]) -> list[str]:
    header = ("collective", "over", "number", "MiB/device", "at its links ms")
    groups: dict[str, list[tuple]] = {}
    for program in programs:
        for row in program["ici"] or ():
            kind = row["collective"] + ("" if row["asynchronous"] else ", waited for")
            sent = row["bytes_per_device"]
            took = f"{sent * 8e-6 / report.chip.ici_gbps:.3f}" if report.chip else "-"
            shown = (kind, "+".join(row["axes"]), row["number"], f"{sent / MIB:,.2f}", took)
            groups.setdefault(program["name"], []).append(shown)
    return _grouped(header, groups, programs)


def _grouped(
    header: tuple, groups: Mapping[str, list[tuple]], programs: list[dict[str, Any]]
) -> list[str]:
    """One table for all programs, each program's name on a line above its rows."""
    if not groups:
        return [] if _names(programs) else ["nothing"]
    table = aligned([header, *(row for rows in groups.values() for row in rows)])
    out, at = [f"  {table[0]}"], 1
    for name, rows in groups.items():
        out += [name, *(f"  {line}" for line in table[at : at + len(rows)])]
        at += len(rows)
    return out


def _summary(report: Report) -> list[str]:
    """The sums of a period: the steps, and what runs beside them."""
    sent, aside = ("not known" if report.missing(when) else f"{report.bytes_sent(when):,.0f} bytes"
                   for when in (STEP, BESIDE))  # fmt: skip
    steps = f"to other slices, a device and period of {report.period} steps: {sent}"
    beside = f"beside the steps: {aside}"
    if report.step_seconds is None:
        return [steps, *_by_hosts(report), beside, *_events(report)]
    whole = report.step_seconds * report.period
    share = exposed_share(report.exposed_seconds, report.busy_seconds)
    if not report.missing(BESIDE):
        beside += f", {report.seconds(BESIDE) * 1e3:.2f} ms"
        beside += f", {report.seconds(BESIDE) / whole:.1%} of the steps' time"
    return [
        steps,
        *_by_hosts(report),
        f"link busy {report.busy_seconds / whole:.1%} of the time, {share:.1%} of it exposed",
        beside,
        *_events(report),
    ]


def _by_hosts(report: Report) -> list[str]:
    """The line on exchanges that no program holds."""
    if not report.by_hosts:
        return []
    gbps = report.gbps * report.devices_per_slice
    return [
        f"beside the programs the hosts of a slice send (exchange_carrier=host) "
        f"{report.by_hosts:,.0f} bytes a period,",
        f"  {report.by_hosts * 8e-9 / gbps:.2f} s at {gbps:g} Gbit/s a slice",
    ]


def _events(report: Report) -> list[str]:
    """A line for a period's evaluations, saves and log steps: what they send, and how long."""
    rows = []
    for name, event in report.of_events().items():
        if event is None:
            rows.append((f"  {name}", "not known"))
            continue
        row = (f"  {name}", f"{event.dcn_bytes:,.0f} bytes to other slices")
        if event.share is not None:
            exposed = f"{event.exposed_seconds * 1e3:.2f} ms of it exposed"
            row += (f"{event.seconds * 1e3:.2f} ms, {event.share:.1%} of the steps' time", exposed)
        rows.append(row)
    return [": ".join((row[0], ", ".join(row[1:]))) for row in rows]


def exposed_share(exposed: float, busy: float) -> float:
    """Exposed over busy seconds, in [0, 1]; 0 when nothing crosses."""
    return min(1.0, exposed / busy) if busy else 0.0


def refusals(report: Report, *, max_exposed_fraction: float) -> list[str]:
    """Why a job with these programs should not start; empty when it may.

    What would make room is in verdict.does_not_fit.
    """
    out = []
    for program in report.programs:
        if program.too_big:
            out.append(f"{program.name} is too big for the chip: {program.too_big}")
        elif report.chip and program.memory.needed > report.chip.hbm:
            out.append(
                f"{program.name} needs {program.memory.needed / MIB:,.0f} MiB a device with the "
                f"rest of the run's state, but the chip has {report.chip.hbm / MIB:,.0f}."
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
