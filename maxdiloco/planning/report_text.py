"""The report on programs compiled ahead of time: verdict, tables, and reasons not to start the job.

Its figures come from compile_report.as_json.
"""

import textwrap
from collections.abc import Callable
from typing import Any

from maxdiloco.engine.calls import OUTSIDE, START, STEP
from maxdiloco.output import aligned
from maxdiloco.planning import link_model
from maxdiloco.planning.compile_report import Report, as_json, verdict

MIB = 2**20
WIDTH = 100  # columns of a line of prose, and of the tables unless a number is very long
TIGHT = 0.9  # fraction of the memory above which another compiler version may not fit
# Devices of an axis over which XLA:TPU of libtpu 0.0.42 still makes all-gathers, on v5e and v5p
# (benchmarks/results/experts.md, Qwen3 30B-A3B).
MOST_GATHERED = 32
SEND_DONE = (
    "exposed ms: if a send is done when the other slice has the data; or: when its buffer",
    "  is free. Which is true was not measured on a TPU yet; the first one counts",
)
WITHOUT_GPU = (
    "compiled without a GPU: kernels are the compiler's default ones, none tried for its speed,",
    "  and no time is estimated. Memory is the share of a GPU that JAX allocates, 0.75 or",
    "  XLA_PYTHON_CLIENT_MEM_FRACTION",
)


def _wrapped(text: str, width: int = WIDTH, indent: str = "  ") -> list[str]:
    how = dict(subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return textwrap.wrap(text, width, **how)


# -- the verdict: memory, speed, exposed time, remedies --------------------------------------------


def verdict_lines(report: Report) -> list[str]:
    """Return the verdict, in lines of at most WIDTH columns."""
    found = verdict(report)
    texts = [f"verdict on {report.title}", *_memory(report, found), _speed(report, found)]
    texts += [*_exposed(report, found), *_long_axis(report)]
    return [line for text in texts for line in _wrapped(text)]


def _memory(report: Report, found: dict[str, Any]) -> list[str]:
    needed, name = found["memory_needed_bytes"], found["memory_program"]
    if report.chip is None:
        return [f"memory: {needed / MIB:,.0f} MiB a device, in {name}"]
    used = f"{needed / MIB:,.0f} of {report.chip.hbm / MIB:,.0f} MiB a device"
    if found["fits"]:
        tightly = " tightly" if found["memory_share"] > TIGHT else ""
        return [f"fits{tightly}: {used} ({found['memory_share']:.0%}), most in {name}"]
    missing = [program for program in report.programs if program.too_big]
    least, parts = "at least " if missing else "", ""
    for memory in (program.memory for program in missing if program.name == name):
        temporary = f"{memory.temporary / MIB:,.0f}" if memory.temporary else "unknown"
        state = (memory.arguments + memory.elsewhere) / MIB
        parts = f": {state:,.0f} of state, {temporary} of temporaries"
    enough = found["topology_enough"]
    would = f"it fits {enough}" if enough else "it fits no known slice of this kind"
    out = [
        f"does not fit: {name} needs {least}{used}{parts}",
        f"by arithmetic {would}, if more devices share all of it (not compiled). "
        f"{report.remedy.removesuffix('.')}",
    ]
    if missing:
        names = ", ".join(program.name for program in missing)
        out.append(f"not compiled, so not known below: {names}")
    return out


def _speed(report: Report, found: dict[str, Any]) -> str:
    if report.step_seconds is None:
        return "speed: not known" + ("" if report.timed else " off TPU")
    unknown = {name for program in report.programs for name in program.unknown_calls}
    without = f" without {', '.join(sorted(unknown))}" if unknown else ""
    return (
        f"speed: {report.step_seconds * 1e3:,.1f} ms a step, {found['tokens_per_second']:,.0f} "
        f"tokens/s, {found['mfu']:.1%} MFU (estimate{without}; nothing was run)"
    )


def _exposed(report: Report, found: dict[str, Any]) -> list[str]:
    if report.step_seconds is None:
        return ["exposed: not known" + ("" if report.timed else " off TPU")]
    steps = report.cost(STEP)
    exposed, least = steps.exposed, steps.least
    if not exposed:
        return [f"exposed: nothing, at {report.gbps:g} Gbit/s a device"]
    other = f" (or {least * 1e3:,.2f})" if least != exposed else ""
    out = [
        f"exposed: {exposed * 1e3:,.2f} ms{other} a period of {report.period} steps, "
        f"{exposed / (report.step_seconds * report.period):.2%} of the time, at {report.gbps:g} "
        f"Gbit/s a device"
    ]
    would = []
    if found["bandwidth_enough_gbps"]:
        would.append(f"dcn_bandwidth_gbps={found['bandwidth_enough_gbps']:g}")
    if found["tau_enough"]:
        would.append(f"num_communication_overlapping_steps={found['tau_enough']}")
    if would:
        out.append(f"nothing would be exposed with {' or '.join(would)} (estimate)")
    elif report.overlap:
        out.append(
            "no bandwidth and no num_communication_overlapping_steps within a period hides it: use "
            "a longer diloco_sync_period or a smaller diloco_exchange_dtype"
        )
    return out


def _long_axis(report: Report) -> list[str]:
    """Return a remedy for an axis that is too long for the compiler to gather weights over it."""
    data, fsdp = (report.ici.get(axis, 1) for axis in ("data", "fsdp"))
    if not report.timed or fsdp <= MOST_GATHERED or fsdp % MOST_GATHERED:
        return []
    parts = fsdp // MOST_GATHERED
    return [
        f"fsdp has {fsdp} devices in a slice: over more than {MOST_GATHERED} XLA:TPU gathers a "
        f"weight by zeros and an all-reduce of twice the bytes. Compare with ici_data_parallelism="
        f"{data * parts} ici_fsdp_parallelism={MOST_GATHERED}, which gathers, for {parts} times "
        f"the state a device (not compiled)"
    ]


# -- the tables: programs and memory, traffic between slices, traffic inside -----------------------


def lines(report: Report) -> list[str]:
    """Return the tables behind the verdict. A missing program is named instead of counted as 0."""
    found = as_json(report)
    programs = found["programs"]
    out = [f"== {report.title}", ""]
    out += [f"compiled under {name}={flags}" for name, flags in report.flags.items() if flags]
    out += WITHOUT_GPU if report.chip and not report.timed else ()
    out += _programs(report, programs)
    names = ", ".join(program["name"] for program in programs if program["too_big"])
    wrapped = _wrapped(names, WIDTH - len("not known: "), "")
    unknown = [f"not known: {line}" for line in wrapped]
    at = ""
    if report.chip:
        at = f", at {report.gbps:g} Gbit/s a device"
        if hosts := report.devices_per_host:
            at += f", {report.gbps * hosts:g} a host of {hosts}"
    out += ["", f"traffic between slices{at}", *_over_slices(programs), *unknown]
    out += ["", "traffic between the devices of a slice, per run", *_in_slice(report, programs)]
    return [*out, *unknown, "", *_summary(report), *_events(found["outside_the_steps"])]


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
            out += _wrapped(f"{program['name']} does not fit: {program['too_big']}")
        for name, times in sorted((program["unknown_calls"] or {}).items()):
            out += _wrapped(
                f"unknown kernel in {program['name']}: {name}, {times} times a run. est. ms leaves "
                f"it out, and traffic of it between slices is not seen"
            )
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

    def cells(row: dict[str, Any]) -> tuple:
        kind = row["collective"] + (" in a conditional" if row["in_conditional"] else "")
        sizes = (f"{row[key]:,}" for key in ("bytes_per_device", "padding_bytes"))
        times = ["-"] * 6
        if "starts" in row:
            times = [f"{row[key]:.0%}" for key in ("starts", "ends", "hides_behind")]
            seconds = ("link_seconds", "exposed_seconds", "exposed_seconds_least")
            times += [f"{row[key] * 1e3:.3f}" for key in seconds]
        return kind, row["dtype"], "+".join(row["axes"]), *sizes, *times

    timed = [row for p in programs for row in p["dcn"] or () if "starts" in row]
    differ = any(row["exposed_seconds"] != row["exposed_seconds_least"] for row in timed)
    return [*_grouped(header, programs, "dcn", cells), *(SEND_DONE if differ else ())]


def _in_slice(report: Report, programs: list[dict[str, Any]]) -> list[str]:
    header = ("collective", "over", "number", "MiB/device", "at its links ms")

    def cells(row: dict[str, Any]) -> tuple:
        kind = row["collective"] + ("" if row["asynchronous"] else ", waited for")
        sent = row["bytes_per_device"]
        took = f"{sent * 8e-6 / report.chip.ici_gbps:.3f}" if report.chip else "-"
        return kind, "+".join(row["axes"]), row["number"], f"{sent / MIB:,.2f}", took

    return _grouped(header, programs, "ici", cells)


def _grouped(
    header: tuple, programs: list[dict[str, Any]], key: str, cells: Callable[[dict], tuple]
) -> list[str]:
    """Return one table for all programs, each program's name on a line above its rows."""
    groups: dict[str, list[tuple]] = {}
    for program in programs:
        for row in program[key] or ():
            groups.setdefault(program["name"], []).append(cells(row))
    if not groups:
        return [] if any(program["too_big"] for program in programs) else ["nothing"]
    table = aligned([header, *(row for rows in groups.values() for row in rows)])
    out, at = [f"  {table[0]}"], 1
    for name, rows in groups.items():
        out += [name, *(f"  {line}" for line in table[at : at + len(rows)])]
        at += len(rows)
    return out


def _summary(report: Report) -> list[str]:
    """Return the sums of a period: for the steps, and for the other programs."""
    steps, outside = report.cost(STEP), report.cost(OUTSIDE)
    sent, aside = (
        f"{each.dcn_bytes:,.0f} bytes" if each.known else "not known" for each in (steps, outside)
    )
    out = [f"to other slices, a device and period of {report.period} steps: {sent}"]
    if report.by_hosts:
        gbps = report.gbps * report.devices_per_slice
        out += [
            f"outside the programs the hosts of a slice send (diloco_transport=host) "
            f"{report.by_hosts:,.0f} bytes a period,",
            f"  {report.by_hosts * 8e-9 / gbps:.2f} s at {gbps:g} Gbit/s a slice",
        ]
    if report.step_seconds is not None:
        whole = report.step_seconds * report.period
        share = link_model.share(steps.exposed, steps.busy)
        out.append(f"link busy {steps.busy / whole:.1%} of the time, {share:.1%} of it exposed")
        if outside.known:
            aside += f", {outside.seconds * 1e3:.2f} ms"
            aside += f", {outside.seconds / whole:.1%} of the steps' time"
    return [*out, f"in addition to the steps: {aside}"]


def _events(events: dict[str, dict[str, Any] | None]) -> list[str]:
    """Return a line for a period's evaluations, saves and log steps: their traffic and time."""
    out = []
    for name, event in events.items():
        cost = "not known" if event is None else f"{event['dcn_bytes']:,.0f} bytes to other slices"
        if event and event["share"] is not None:
            cost += f", {event['seconds'] * 1e3:.2f} ms, {event['share']:.1%} of the steps' time"
            cost += f", {event['exposed_seconds'] * 1e3:.2f} ms of it exposed"
        out.append(f"  {name}: {cost}")
    return out


# -- the gate --------------------------------------------------------------------------------------


def refusals(report: Report, *, max_exposed_fraction: float) -> list[str]:
    """Return the reasons not to start a job with these programs; empty when it may start.

    The first reason has the remedy for a run that does not fit the chip.
    """
    out = []
    found = verdict(report)
    if found["fits"] is False:
        out.append(". ".join(_memory(report, found)) + ".")
    for program in report.programs:
        if program.too_big:
            out.append(f"{program.name} is too big for the chip: {program.too_big}")
        elif report.chip and program.memory.needed > report.chip.hbm:
            out.append(
                f"{program.name} needs {program.memory.needed / MIB:,.0f} MiB a device with the "
                f"rest of the run's state, but the chip has {report.chip.hbm / MIB:,.0f}."
            )
        share = link_model.share(program.exposed, program.busy)
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
                "should. Look for a read across replicas in the inner step."
            )
    return out
