"""How much of a thin link's slowness the trainer hides: utilisation, bytes and peaks, by mode.

    PYTHONPATH=. python benchmarks/thin_link.py [name=value ...] [key=value ...]

Linux, root, iproute2. Hosts are network namespaces whose links are shaped (link/hosts.py), with one
process of maxdiloco.train on each. For every mode, wire, carrier and rate a run of its own:
the mean step over whole periods after the first two, of the slowest process, logs included.
Utilisation is the plain step (no exchange, an unlimited link) / that mean. OWN has the names and
their defaults; further keys are the trainer's, as max_target_length=512.

Writes rows.json, table.md and two figures into `out`. A run that was ended goes on at its next row.
Exit code 1: a row failed, or the link carried other bytes than the trainer claims.
"""

import json
import os
import pathlib
import signal
import sys
from collections.abc import Sequence
from typing import Any

import yaml

from benchmarks.link import draw, figures
from benchmarks.link.hosts import Link, check, hosts
from benchmarks.link.rows import ROOT, Row, RowError, measure
from maxdiloco.errors import ConfigError

WIRES = ("float32", "bfloat16", "int8", "float4_e3m0")
MODES = tuple(mode for mode in figures.MODES if mode != figures.PLAIN)
CARRIERS = ("program", "host")
OWN = {
    "hosts": "2",
    "modes": ",".join(MODES),
    "wires": "float32,float4_e3m0",  # of all WIRES
    "carriers": "all",  # CARRIERS that the trainer has
    "rates": "unlimited,100,20,10",  # Mbit/s, each direction
    "delay_ms": "0",  # from host to host, one way
    "fast_device_ms": "0",  # so long a step, slept beside a small one; 0: real compute
    "periods": "5",  # that are measured, of H steps
    "congestion": "",  # TCP's congestion control; empty: the system's
    "queue_ms": "400",  # of a link
    "row_limit_s": "1800",  # then a row has failed
    "out": "runs/thin_link",
}
KEYS = {
    "hardware": "cpu",
    "model_name": "tiny",
    "dataset_type": "synthetic",
    "max_target_length": "256",
    "per_device_batch_size": "4",
    "diloco_sync_period": "20",
    "num_diloco_fragments": "4",
    "num_communication_overlapping_steps": "4",
    "log_period": "20",
    "enable_checkpointing": "false",
    "enable_tensorboard": "false",
}
SMALL_STEP = {"max_target_length": "64", "per_device_batch_size": "1"}  # beside a fast device
SET_HERE = {
    "steps", "run_name", "base_output_directory", "num_slices", "enable_diloco", "exchange_carrier",
    "enable_streaming_diloco", "diloco_outer_overlap", "diloco_exchange_dtype",
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)  # an exception, so that the hosts are removed
    try:
        return _main(argv)
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("Interrupted. The same command goes on at this row.", file=sys.stderr)
        return 128 + signal.SIGINT


def _end(number: int, _) -> None:
    raise SystemExit(128 + number)


def _main(argv: Sequence[str]) -> int:
    if any(argument in ("-h", "--help") for argument in argv):
        print(__doc__, *(f"  {name}={value}" for name, value in OWN.items()), sep="\n")
        return 0
    setup, rows, out = arguments(argv)
    check()
    done = stored(out, setup)
    thin = any(row.rate != figures.UNLIMITED for row in rows)
    link = Link(1.0 if thin else None, setup["delay_ms"], congestion=setup["congestion"])
    with hosts(1, link):  # refused now rather than in the midst of the rows
        print(f"{len(rows)} rows in {out}, {len(done)} of them measured before", flush=True)
    failed = []
    for row in rows:
        if not run(row, setup, out, done):
            failed.append(row.name())
            if row == rows[0]:
                break  # nothing can be compared with it
    if failed:
        print(f"failed: {', '.join(failed)}. The same command tries again.", file=sys.stderr)
    return report(out, setup, done) or int(bool(failed))


def arguments(argv: Sequence[str]) -> tuple[dict[str, Any], list[Row], pathlib.Path]:
    """What is the same for all rows, the rows in their order, and the folder for results.

    Raises ConfigError.
    """
    given = dict(argument.partition("=")[::2] for argument in argv)
    known = yaml.safe_load((ROOT / "configs" / "base.yml").read_text(encoding="utf-8"))
    for name in given:
        if name in SET_HERE or name not in {*OWN, *known}:
            why = "chosen for every row" if name in SET_HERE else "no key of the trainer"
            raise ConfigError(
                f"{name}={given[name]}: {name} is {why}. Use {', '.join(OWN)}, or another key of "
                f"configs/base.yml."
            )
    own = OWN | {name: value for name, value in given.items() if name in OWN}
    setup: dict[str, Any] = {
        "hosts": _number("hosts", own, int, 2),
        "periods": _number("periods", own, int, 1),
        "delay_ms": _number("delay_ms", own, float, 0),
        "fast_device_ms": _number("fast_device_ms", own, float, 0),
        "queue_ms": _number("queue_ms", own, float, 1),
        "row_limit_s": _number("row_limit_s", own, float, 1),
        "congestion": own["congestion"],
        "has_carriers": "exchange_carrier" in known,
    }
    small = SMALL_STEP if setup["fast_device_ms"] else {}
    keys = KEYS | small | {name: value for name, value in given.items() if name not in OWN}
    H, log = (_number(name, keys, int, 1) for name in ("diloco_sync_period", "log_period"))
    _number(figures.TAU, keys, int, 0)
    if H % log:
        raise ConfigError(
            f"log_period={log} does not divide diloco_sync_period={H}: a period would not be as "
            f"long as the next. Use log_period={H}."
        )
    out = pathlib.Path(own["out"]).resolve()
    setup["keys"] = keys | {"jax_cache_dir": str(out / "jax_cache")}
    carriers = _choices("carriers", own, CARRIERS if setup["has_carriers"] else CARRIERS[:1])
    rates = _rates(own["rates"])
    return setup, _rows(own, rates, carriers), out


def _rows(own: dict[str, str], rates: Sequence[str], carriers: Sequence[str]) -> list[Row]:
    rows = [Row(figures.PLAIN)]
    for rate in rates:
        for mode in _choices("modes", own, MODES):
            if not figures.MODES[mode].exchanges:
                rows.append(Row(mode, rate=rate))
                continue
            for wire in _choices("wires", own, WIRES):
                rows += [Row(mode, wire, carrier, rate) for carrier in carriers]
    # The plain step again: how far two measurements of one thing differ.
    return [*rows, Row(figures.PLAIN, turn=1)]


def _number(name: str, own: dict[str, str], kind: type, least: float) -> Any:
    try:
        value = kind(own[name])
    except ValueError:
        value = None
    if value is None or not least <= value < float("inf"):
        raise ConfigError(
            f"{name}={own[name]} is not {'a whole' if kind is int else 'a'} number of {least} or "
            f"more. Use {(OWN | KEYS)[name]}, say."
        )
    return value


def _choices(name: str, own: dict[str, str], offered: Sequence[str]) -> list[str]:
    chosen = offered if own[name] == "all" else own[name].split(",")
    for one in chosen:
        if one not in offered:
            raise ConfigError(
                f"{name}={own[name]}: {one!r} is not offered. Use all, or some of "
                f"{','.join(offered)}."
            )
    return list(chosen)


def _rates(text: str) -> list[str]:
    """Each once, as the rows name it."""
    rates = []
    for one in text.split(","):
        if one != figures.UNLIMITED:
            try:
                one = f"{float(one):g}"
            except ValueError:
                one = "0"
        if one != figures.UNLIMITED and not 0.1 <= float(one) <= 100_000:
            raise ConfigError(
                f"rates={text}: every rate is a number of Mbit/s from 0.1 to 100000 or "
                f"{figures.UNLIMITED}. Use {OWN['rates']}, say."
            )
        rates.append(one)
    return list(dict.fromkeys(rates))


def stored(out: pathlib.Path, setup: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that are measured already. Raises ConfigError for those of another setup."""
    path = out / "rows.json"
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        return []
    saved = json.loads(path.read_text(encoding="utf-8"))
    if saved["setup"] != setup:
        differ = [name for name in setup if saved["setup"].get(name) != setup[name]]
        raise ConfigError(
            f"out={out} has rows that were measured with another {', '.join(differ)}: figures of "
            f"one table have to compare. Name another folder, or remove this one."
        )
    return saved["rows"]


def run(row: Row, setup: dict[str, Any], out: pathlib.Path, done: list[dict[str, Any]]) -> bool:
    """Measure a row, unless it is in `done`, and store it there. Whether it is there then."""
    if any(Row(*(one[name] for name in Row._fields)) == row for one in done):
        return True
    plain = next((one for one in done if one["mode"] == figures.PLAIN), None)
    folder = out / "logs" / row.name()
    try:
        figure = measure(row, setup, folder, plain)
    except RowError as error:
        print(f"RowError: {error}", file=sys.stderr, flush=True)
        return False
    done.append(figure)
    draft = out / "rows.json.new"
    draft.write_text(json.dumps({"setup": setup, "rows": done}, indent=1), encoding="utf-8")
    os.replace(draft, out / "rows.json")
    spread = f"{min(figure['period_ms']):,.1f}..{max(figure['period_ms']):,.1f}"
    print(f"{row.name()}: {figure['step_ms']:,.1f} ms a step ({spread} by period)", flush=True)
    return True


def report(out: pathlib.Path, setup: dict[str, Any], rows: list[dict[str, Any]]) -> int:
    """Write the table and the figures; 1 where the bytes are not those that are claimed."""
    measured = [row for row in rows if row["mode"] != figures.PLAIN]
    if not measured:
        return 0
    table = figures.table(rows, setup)
    (out / "table.md").write_text(table, encoding="utf-8")
    (out / "utilisation.svg").write_text(draw.utilisation(rows, setup), encoding="utf-8")
    (out / "period.svg").write_text(draw.period(rows, setup), encoding="utf-8")
    print(table)
    code = 0
    for row in measured:
        one = figures.result(row, rows, setup)
        if not one.bytes_agree:
            code = 1
            print(
                f"bytes: {figures.label(row, int(setup['keys'][figures.TAU]))} at {row['rate']} "
                f"Mbit/s: {one.claimed_ratio:.3f} of what dcn/bytes_sent claims is on the link."
            )
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
