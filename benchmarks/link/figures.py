"""Compute reported figures from measurements: modes, predictions by arithmetic, the table."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from maxdiloco.diloco import quantize
from maxdiloco.diloco.schedule import Schedule, offsets
from maxdiloco.engine.layout import divide_steps
from maxdiloco.engine.reduce_scatter import MEAN_DTYPE
from maxdiloco.planning import link_model

UNLIMITED = "unlimited"
# Bytes on the link above those that the trainer claims, once the chatter is taken off. Headers of
# Ethernet, IPv4 and TCP are 66 of a frame's 1,514 bytes, 4.6 % of what it carries; an
# acknowledgement of as many bytes answers every second segment, after a pause every one: 2.3 to
# 4.6 %. The rest is for small segments and for bytes that are sent twice.
OVERHEAD = 0.12
BELOW = 0.01  # under the claim: messages that cross the ends of the window
# Targets for 4 bits with overlap, at rates where data parallelism has less than STARVED.
FULL_FAST, FULL_REAL, STARVED = 0.99, 0.95, 0.05
HIDING, FOUR_BITS = ("overlapped", "eager"), "float4_e3m0"


class Mode(NamedTuple):
    """A way to train, by its keys. exchanges: it has a wire and a carrier."""

    label: str
    keys: dict[str, Any]
    exchanges: bool = True


PLAIN = "plain"
DATA_PARALLEL = "data_parallel"
TAU = "num_communication_overlapping_steps"
STREAMING = {"enable_streaming_diloco": "true"}
MODES = {
    PLAIN: Mode("inner steps alone", {"diloco_sync_period": 1_000_000}, exchanges=False),
    DATA_PARALLEL: Mode("data parallel", {"enable_diloco": "false"}, exchanges=False),
    "diloco": Mode("DiLoCo", {}),
    "streaming": Mode("streaming, tau=0", STREAMING | {TAU: 0}),
    # By name: auto would be reduce_scatter for many hosts.
    "overlapped": Mode("streaming, tau={tau}", STREAMING | {"diloco_collective": "all_gather"}),
    "eager": Mode("eager", {"diloco_round_overlap": "eager"}),
    "reduce_scatter": Mode(
        "streaming, tau={tau}, reduce-scatter",
        STREAMING | {"diloco_collective": "reduce_scatter"},
    ),
}


def mode_keys(mode: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The trainer's keys in a mode. keys: those of every mode, P and tau among them."""
    chosen = dict(keys) | MODES[mode].keys
    if "enable_streaming_diloco" not in MODES[mode].keys:
        del chosen["num_diloco_fragments"]
        del chosen[TAU]
    return chosen


def label(row: Mapping[str, Any], tau: int) -> str:
    """The name of a row's line: mode, wire, carrier."""
    words = [MODES[row["mode"]].label.format(tau=tau), row["wire"], row["carrier"]]
    return ", ".join(word for word in words if word)


def shared_part(wire: str) -> float:
    """Return the part of the bytes of reduce-scatter that is means."""
    there, back = (
        quantize.encoded_size(name, 1 << 20) * quantize.wire_format(name).dtype.itemsize
        for name in (wire, quantize.finer(wire, MEAN_DTYPE))
    )
    return back / (there + back)


def all_reduce_bytes(gradients: int, num_hosts: int) -> float:
    """Bytes that each host sends in a ring over the gradients: 2 (M - 1) / M of them."""
    return gradients * 2 * (num_hosts - 1) / num_hosts


def gradient_bytes(row: Mapping[str, Any], setup: Mapping[str, Any]) -> int:
    """Bytes of the float32 gradients that data parallelism reduces in a step.

    XLA reduces the two gradients of a tied embedding, from the lookup and the head, one by one.
    """
    return 4 * (row["parameters"] + setup["tied_parameters"])


def lag(mode: str, *, H: int, tau: int) -> int:
    """Inner steps from a send to its use."""
    return {"diloco": 0, "streaming": 0, "overlapped": tau, "reduce_scatter": tau, "eager": H}[mode]


def mbit(row: Mapping[str, Any]) -> float:
    """The rate of a row's links [Mbit/s]; infinite where they were not shaped."""
    return math.inf if row["rate"] == UNLIMITED else float(row["rate"])


def predicted_ms(row: Mapping[str, Any], setup: Mapping[str, Any], plain_ms: float) -> float:
    """Milliseconds a step that a row's mode waits for the link, by arithmetic.

    No header and no congestion control; see link_model.exposed_s.
    """
    if row["mode"] == DATA_PARALLEL:  # nothing hides; a ring has 2 (M - 1) turns
        sent = all_reduce_bytes(gradient_bytes(row, setup), setup["hosts"])
        return sent * 8e-3 / mbit(row) + 2 * (setup["hosts"] - 1) * setup["delay_ms"]
    H, tau = int(setup["keys"]["diloco_sync_period"]), int(setup["keys"][TAU])
    # A fragment's payload crosses the host's link once for each other host.
    seconds = [size * (setup["hosts"] - 1) * 8e-6 / mbit(row) for size in row["fragment_bytes"]]
    means, scatter_steps = [], 0
    if row["mode"] == "reduce_scatter":
        shared = shared_part(row["wire"])
        means = [shared * each for each in seconds]
        steps = Schedule(H, tau, offsets(len(seconds), H)).max_chunks
        scatter_steps = divide_steps(steps, scattered=1 - shared, gathered=shared)
    waited = link_model.exposed_s(
        seconds,
        shared=means,
        H=H,
        lag=lag(row["mode"], H=H, tau=tau),
        scatter_steps=scatter_steps,
        step_s=plain_ms / 1000,
        latency_s=setup["delay_ms"] / 1000,
    )
    return 1000 * waited / H


class Result(NamedTuple):
    """A row compared with the plain step. claimed_ratio: None where the trainer claims no bytes."""

    utilisation: float
    exposed_ms: float
    predicted_ms: float
    claimed_ratio: float | None
    bytes_agree: bool


def plain_ms(rows: Sequence[Mapping[str, Any]]) -> float:
    """The step without an exchange on an unlimited link: the mean of the times it was measured."""
    measured = [row["step_ms"] for row in rows if row["mode"] == PLAIN]
    return sum(measured) / len(measured)


def chatter(rows: Sequence[Mapping[str, Any]]) -> float:
    """Bytes a step and host that cross the link when nothing is exchanged."""
    sent = [row["sent_per_step"] for row in rows if row["mode"] == PLAIN]
    return sum(map(sum, sent)) / sum(map(len, sent))


def result(
    row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], setup: Mapping[str, Any]
) -> Result:
    """Beside the plain steps among `rows`."""
    plain = plain_ms(rows)
    sent = sum(row["sent_per_step"]) / len(row["sent_per_step"])
    ratio, agree = None, True
    if row["claimed_per_step"]:
        ratio, most = (sent - chatter(rows)) / row["claimed_per_step"], 1 + OVERHEAD
        if row["mode"] == DATA_PARALLEL:  # the claim may hold a tied embedding once
            ring = all_reduce_bytes(gradient_bytes(row, setup), setup["hosts"])
            most *= max(1, ring / row["claimed_per_step"])
        agree = 1 - BELOW <= ratio <= most
    return Result(
        plain / row["step_ms"],
        row["step_ms"] - plain,
        predicted_ms(row, setup, plain),
        ratio,
        agree,
    )


def share_of_unlimited_speed(rows: Sequence[Mapping[str, Any]], tau: int) -> list[str]:
    """Of each exchange that was measured on an unlimited link too: what a thin one leaves of its
    speed. The work of the hosts is in both."""
    names, lines = ("mode", "wire", "carrier"), []
    for row in rows:
        same = [one for one in rows if all(one[name] == row[name] for name in names)]
        free = [one["step_ms"] for one in same if one["rate"] == UNLIMITED]
        if row["wire"] and free and row["rate"] != UNLIMITED:
            lines.append(
                f"At {row['rate']} Mbit/s {label(row, tau)} has {free[0] / row['step_ms']:.1%} of "
                f"its speed on an unlimited link."
            )
    return lines


def claims(rows: Sequence[Mapping[str, Any]], setup: Mapping[str, Any]) -> list[str]:
    """Whether overlapped modes reach their targets: a line for each rate that starves DP."""
    full = FULL_FAST if setup["fast_device_ms"] else FULL_REAL
    lines = []
    for base in rows:
        if base["mode"] != DATA_PARALLEL or result(base, rows, setup).utilisation >= STARVED:
            continue
        words = []
        for row in rows:
            if row["rate"] == base["rate"] and row["mode"] in HIDING and row["wire"] == FOUR_BITS:
                one = result(row, rows, setup).utilisation
                words.append(
                    f"{label(row, int(setup['keys'][TAU]))} {one:.1%} over {len(row['period_ms'])} "
                    f"periods ({'at least' if one >= full else 'below'} {full:.0%})"
                )
        if words:
            lines.append(
                f"At {base['rate']} Mbit/s data parallelism has "
                f"{result(base, rows, setup).utilisation:.1%}; {', '.join(words)}."
            )
    return lines or [f"No rate here leaves data parallelism less than {STARVED:.0%}."]


COLUMNS = (
    "mode", "Mbit/s", "steps", "step, ms", "utilisation", "exposed, ms", "predicted, ms", "ratio",
    "sent a step, KB", "of the claim", "peak, Mbit/s",
)  # fmt: skip


def cells(
    row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], setup: Mapping[str, Any]
) -> list[str]:
    """One row of the table."""
    one = result(row, rows, setup)
    predicted = one.predicted_ms > 0.05  # less is shown as 0.0
    return [
        label(row, int(setup["keys"][TAU])),
        row["rate"],
        f"{row['steps']:,}",
        f"{row['step_ms']:,.1f}",
        f"{one.utilisation:.1%}",
        f"{one.exposed_ms:,.1f}",
        f"{one.predicted_ms:,.1f}",
        f"{one.exposed_ms / one.predicted_ms:.2f}" if predicted else "-",
        f"{sum(row['sent_per_step']) / len(row['sent_per_step']) / 1000:,.1f}",
        "-" if one.claimed_ratio is None else f"{one.claimed_ratio:.3f}",
        f"{row['peak_mbit']:,.1f}",
    ]


def device(setup: Mapping[str, Any]) -> str:
    """The work of a step."""
    if setup["fast_device_ms"]:
        return f"fast device ({setup['fast_device_ms']:g} ms of sleep instead of compute)"
    return "real compute"


def conditions(rows: Sequence[Mapping[str, Any]], setup: Mapping[str, Any]) -> tuple[str, str]:
    """The caption of a figure about its measurement, in two lines."""
    keys = setup["keys"]
    spread = [row["step_ms"] for row in rows if row["mode"] == PLAIN]
    return (
        f"{device(setup)}; {setup['hosts']} hosts, {keys['model_name']}, "
        f"H={keys['diloco_sync_period']}, P={keys['num_diloco_fragments']}, "
        f"tau={keys[TAU]}, a log every {keys['log_period']} steps",
        f"TCP {', '.join(sorted({row['congestion'] for row in rows}))}; delay "
        f"{setup['delay_ms']:g} ms one way, {setup['loss_pct']:g}% of frames lost; plain step "
        f"{', '.join(f'{x:.1f}' for x in spread)} "
        f"ms; commit {', '.join(sorted({row['commit'] for row in rows}))}",
    )


def table(rows: Sequence[Mapping[str, Any]], setup: Mapping[str, Any]) -> str:
    """The figures of a run as Markdown. rows: the plain steps and at least one other."""
    lines = [
        f"{'; '.join(conditions(rows, setup))}.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|---{'|--:' * (len(COLUMNS) - 1)}|",
    ]
    shown = [row for row in rows if row["mode"] != PLAIN]
    lines += [f"| {' | '.join(cells(row, rows, setup))} |" for row in shown]
    lines += [
        "",
        f"Chatter when nothing is exchanged: {chatter(rows):,.0f} bytes a step and host. "
        f"Exposed: above the plain step, a step. Predicted: what the schedule's arithmetic leaves "
        f"exposed; ratio: exposed / predicted. Of the claim: bytes on the link less the chatter / "
        f"`dcn/bytes_sent`, {1 - BELOW:.2f} to {1 + OVERHEAD:.2f} with the protocol. Peak: over "
        f"100 ms.",
        "",
        *share_of_unlimited_speed(rows, int(setup["keys"][TAU])),
        *claims(rows, setup),
    ]
    return "\n".join(lines) + "\n"
