"""What the report on compiled programs comes to, in the lines that stand before its tables.

Memory is the compiler's. Speed, and what would do in place of what was compiled, are estimates by
arithmetic on its figures: nothing was run, and nothing else was compiled.
"""

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from maxdiloco.aot import topology
from maxdiloco.aot.figures import Report
from maxdiloco.aot.measure import Measured
from maxdiloco.aot.report import MIB, WIDTH
from maxdiloco.engine.calls import STEP
from maxdiloco.metrics.speed import performance

TIGHT = 0.9  # part of the memory; above it another version of the compiler may not fit. Our choice
HIDDEN = 0.02  # of a transfer's time: with less of it hidden, none is hidden by design. Our choice
# Devices of an axis over which XLA:TPU of libtpu 0.0.42 still makes all-gathers, on v5e and v5p
# (benchmarks/log, Qwen3 30B-A3B).
MOST_GATHERED = 32


def lines(report: Report) -> list[str]:
    """The verdict, at most WIDTH columns wide: memory, speed, what is exposed, what would do."""
    found = as_json(report)
    out = [f"verdict on {report.title}", *_memory(report, found), *_speed(report, found)]
    out += _exposed(report, found)
    out += _long_axis(report)
    return [
        line
        for text in out
        for line in textwrap.wrap(
            text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    ]


def does_not_fit(report: Report) -> str:
    """The line on a run that the chip does not hold: total, slice and remedy; "" where it fits."""
    found = as_json(report)
    return "" if found["fits"] is not False else ". ".join(_memory(report, found)) + "."


def as_json(report: Report) -> dict[str, Any]:
    """The verdict's figures. None: not known, or not wanted.

    topology_enough: "" where no known slice of the kind would do.
    """
    largest = max(report.programs, key=lambda program: program.memory.needed)
    needed = largest.memory.needed
    fits = report.chip and needed <= report.chip.hbm and not _not_compiled(report.programs)
    speed = _performance(report)
    exposed = report.exposed_seconds
    return {
        "memory_needed_bytes": needed,
        "memory_share": report.chip and needed / report.chip.hbm,
        "memory_program": largest.name,
        "fits": fits,
        "topology_enough": None if fits is not False else _topology_enough(report, needed),
        "tokens_per_second": speed and speed["perf/tokens_per_second"],
        "mfu": speed and speed["perf/mfu"],
        "bandwidth_enough_gbps": bandwidth_enough(report) if exposed else None,
        "tau_enough": tau_enough(report) if exposed else None,
    }


def bandwidth_enough(report: Report) -> float | None:
    """One device's share of the link that would expose nothing of a step; None where none would.

    An exchange that the program waits for by design, as with tau=0, is exposed on every link.
    """
    factors = [
        program.busy / (program.busy - program.exposed)
        if program.busy - program.exposed > HIDDEN * program.busy
        else math.inf
        for program in report.at(STEP)
        if program.exposed
    ]
    factor = max(factors, default=1.0)
    return None if factor == math.inf else _two_digits(report.gbps * factor)


def tau_enough(report: Report) -> int | None:
    """The tau whose steps are as long as a fragment's exchange; None where no tau of H would do."""
    plain = next((p for p in report.at(STEP) if p.name == "inner" and p.seconds), None)
    exposing = [program for program in report.at(STEP) if program.exposed]
    if plain is None or not exposing or report.job is None or report.job.overlap != "none":
        return None
    if report.busy_seconds > report.period * plain.seconds:
        return None
    chunk = max(program.busy for program in exposing)
    tau = math.ceil(max(report.job.tau, 1) * chunk / plain.seconds)
    return tau if report.job.tau < tau < report.period else None


def _two_digits(x: float) -> float:
    """x rounded up to two digits."""
    unit = 10.0 ** (math.floor(math.log10(x)) - 1)
    return round(math.ceil(x / unit - 1e-9) * unit, 6)


def _not_compiled(programs: Sequence[Measured]) -> list[str]:
    return [program.name for program in programs if program.too_big]


def _topology_enough(report: Report, needed: int) -> str | None:
    """A slice whose devices hold what these need, if all of it is shared by more of them."""
    if report.chip is None or report.job is None:
        return None
    devices = math.ceil(report.devices_per_slice * needed / report.chip.hbm)
    return topology.larger(report.job.topology, devices)


def _memory(report: Report, found: dict[str, Any]) -> list[str]:
    needed, name = found["memory_needed_bytes"], found["memory_program"]
    if report.chip is None:
        return [f"memory: {needed / MIB:,.0f} MiB a device, in {name}"]
    used = f"{needed / MIB:,.0f} of {report.chip.hbm / MIB:,.0f} MiB a device"
    if found["fits"]:
        tightly = " tightly" if found["memory_share"] > TIGHT else ""
        return [f"fits{tightly}: {used} ({found['memory_share']:.0%}), most in {name}"]
    missing = _not_compiled(report.programs)
    least = "at least " if missing else ""
    out = [f"does not fit: {name} needs {least}{used}{_parts(report, name)}"]
    if report.job is not None:
        enough = found["topology_enough"]
        would = f"{enough} would do" if enough else "no known slice of this kind would do"
        out.append(
            f"by arithmetic {would}, if all of it is shared by more devices (not compiled). "
            f"{report.job.room.removesuffix('.')}"
        )
    if missing:
        out.append(f"not compiled, so not known below: {', '.join(missing)}")
    return out


def _parts(report: Report, name: str) -> str:
    """What the memory of a program that was not compiled is made of."""
    program = next(program for program in report.programs if program.name == name)
    if not program.too_big:
        return ""
    memory = program.memory
    state = (memory.arguments + memory.elsewhere) / MIB
    temporary = f"{memory.temporary / MIB:,.0f}" if memory.temporary else "unknown"
    return f": {state:,.0f} of state, {temporary} of temporaries"


def _performance(report: Report) -> dict[str, float] | None:
    if report.step_seconds is None or report.job is None:
        return None
    return performance(
        step_time=report.step_seconds,
        tokens_per_step=report.job.tokens_per_step,
        flops_per_token=report.job.flops_per_token,
        num_devices=report.job.num_devices,
        device_kind=report.chip.kinds[0],
    )


def _speed(report: Report, found: dict[str, Any]) -> list[str]:
    if found["tokens_per_second"] is None:
        return ["speed: not known" + ("" if report.timed else " off TPU")]
    kernels = max((program.kernels for program in report.programs), default=0)
    without = f" without {kernels} Pallas kernels" if kernels else ""
    return [
        f"speed: {report.step_seconds * 1e3:,.1f} ms a step, {found['tokens_per_second']:,.0f} "
        f"tokens/s, {found['mfu']:.1%} MFU (estimate{without}; nothing was run)"
    ]


def _long_axis(report: Report) -> list[str]:
    """Where an axis is so long that weights are not gathered, how to make two of it."""
    if not report.timed or report.job is None:
        return []
    data, fsdp = (report.job.ici.get(axis, 1) for axis in ("data", "fsdp"))
    if fsdp <= MOST_GATHERED or fsdp % MOST_GATHERED:
        return []
    parts = fsdp // MOST_GATHERED
    return [
        f"fsdp has {fsdp} devices in a slice: over more than {MOST_GATHERED} XLA:TPU gathers a "
        f"weight by zeros and an all-reduce of twice the bytes. Compare with ici_data_parallelism="
        f"{data * parts} ici_fsdp_parallelism={MOST_GATHERED}, which gathers, for {parts} times "
        f"the state a device (not compiled)"
    ]


def _exposed(report: Report, found: dict[str, Any]) -> list[str]:
    if report.step_seconds is None:
        return ["exposed: not known" + ("" if report.timed else " off TPU")]
    exposed, least = report.exposed_seconds, report.exposed_seconds_least
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
    elif report.job is not None and report.job.overlap != "":
        out.append(
            "no bandwidth and no tau within a period would hide it: use a longer "
            "diloco_sync_period or a smaller diloco_exchange_dtype"
        )
    return out
