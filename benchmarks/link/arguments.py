"""The command line of the benchmark: its own names, the trainer's keys, and grids of both."""

import pathlib
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from benchmarks.link import figures
from benchmarks.link.command import divided
from benchmarks.link.grid import GRIDS, Row
from maxdiloco.errors import ConfigError
from maxdiloco.flags import config

WIRES = ("float32", "bfloat16", "int8", "float4_e3m0")
MODES = tuple(mode for mode in figures.MODES if mode != figures.PLAIN)
CARRIERS = ("program", "host")
OWN = {
    "grid": "",  # rows that have a name: published, owners
    "hosts": "2",
    "modes": ",".join(mode for mode in MODES if mode != "owners"),
    "wires": "float32,float4_e3m0",  # of all WIRES
    "carriers": "all",  # of CARRIERS
    "lines": "",  # mode or mode:wire:carrier, in place of modes, wires and carriers
    "rates": "unlimited,100,20,10",  # Mbit/s, each direction
    "delay_ms": "0",  # from host to host, one way
    "loss_pct": "0",  # of the frames, where delay_ms is not 0
    "fast_device_ms": "0",  # so long a step, slept beside a small one; 0: real compute
    "periods": "5",  # of H steps, that are measured at the lowest rate
    "other_periods": "",  # at the other rates; empty: as many
    "row_seconds": "300",  # then a row measures fewer periods, at least one
    "congestion": "",  # TCP's congestion control; empty: the system's
    "queue_ms": "400",  # of a link
    "row_limit_s": "1800",  # then a row has failed
    "out": "runs/thin_link",
}
PRODUCT = ("modes", "wires", "carriers")  # what `lines` stands in for
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


class Part(NamedTuple):
    """Rows of one table. setup: what is the same for all of them."""

    setup: dict[str, Any]
    rows: list[Row]
    out: pathlib.Path


def parts(argv: Sequence[str]) -> list[Part]:
    """What a command line asks for: the parts of a grid, or one. Raises ConfigError."""
    given = dict(argument.partition("=")[::2] for argument in argv)
    grid = given.pop("grid", "")
    if grid and grid not in GRIDS:
        raise ConfigError(f"grid={grid} is not known. Use {' or '.join(GRIDS)}.")
    asked = [given]
    if grid:
        out = pathlib.Path(given.pop("out", OWN["out"]))
        asked = [
            dict(pair.split("=", 1) for pair in pairs) | given | {"out": str(out / folder)}
            for folder, pairs in GRIDS[grid].items()
        ]
    found = [Part(*arguments([f"{name}={value}" for name, value in one.items()])) for one in asked]
    for part in found:  # what the trainer refuses is refused before the first row
        keys = figures.mode_keys(figures.PLAIN, part.setup["keys"])
        cfg = config.load([f"{name}={value}" for name, value in keys.items()], {})
        tied = cfg.vocab_size * cfg.base_emb_dim if cfg.logits_via_embedding else 0
        part.setup["tied_parameters"] = tied
    return found


def arguments(argv: Sequence[str]) -> tuple[dict[str, Any], list[Row], pathlib.Path]:
    """What is the same for all rows, the rows in their order, and the folder for results.

    Raises ConfigError.
    """
    own, given = divided(argv, OWN, SET_HERE)
    named = {argument.partition("=")[0] for argument in argv}
    own["other_periods"] = own["other_periods"] or own["periods"]
    setup: dict[str, Any] = {
        "hosts": _number("hosts", own, int, 2),
        "periods": _number("periods", own, int, 1),
        "other_periods": _number("other_periods", own, int, 1),
        "delay_ms": _number("delay_ms", own, float, 0),
        "loss_pct": _number("loss_pct", own, float, 0),
        "fast_device_ms": _number("fast_device_ms", own, float, 0),
        "queue_ms": _number("queue_ms", own, float, 1),
        "row_seconds": _number("row_seconds", own, float, 1),
        "row_limit_s": _number("row_limit_s", own, float, 1),
        "congestion": own["congestion"],
    }
    small = SMALL_STEP if setup["fast_device_ms"] else {}
    keys = KEYS | small | given
    H, log = (_number(name, keys, int, 1) for name in ("diloco_sync_period", "log_period"))
    _number("num_diloco_fragments", keys, int, 1)
    _number(figures.TAU, keys, int, 0)
    if H % log:
        raise ConfigError(
            f"log_period={log} does not divide diloco_sync_period={H}: a period would not be as "
            f"long as the next. Use log_period={H}."
        )
    out = pathlib.Path(own["out"]).resolve()
    setup["keys"] = keys | {"jax_cache_dir": str(out / "jax_cache")}
    rates = _rates(own["rates"])
    setup["thinnest"] = min(rates, key=lambda rate: figures.mbit({"rate": rate}))
    rows = [Row(*line, rate) for rate in rates for line in _lines(own, named)]
    # The plain step again: how far two measurements of one thing differ.
    return setup, [Row(figures.PLAIN), *rows, Row(figures.PLAIN, turn=1)], out


def _lines(own: dict[str, str], named: Collection[str]) -> list[tuple[str, str, str]]:
    """(mode, wire, carrier) of every row at one rate. named: on the command line."""
    if not own["lines"]:
        modes, wires, carriers = (
            _choices(name, own, offered)
            for name, offered in zip(PRODUCT, (MODES, WIRES, CARRIERS), strict=True)
        )
        exchanges = [(wire, carrier) for wire in wires for carrier in carriers]
        return [
            (mode, *exchange)
            for mode in modes
            for exchange in (exchanges if figures.MODES[mode].exchanges else [("", "")])
        ]
    both = [name for name in PRODUCT if name in named]
    if both:
        raise ConfigError(
            f"{both[0]}={own[both[0]]} and lines={own['lines']}: lines names mode, wire and "
            f"carrier of every row. Leave one of the two out."
        )
    lines = []
    for line in own["lines"].split(","):
        mode, *exchange = line.split(":")
        if mode in MODES and not figures.MODES[mode].exchanges and not exchange:
            lines.append((mode, "", ""))
        elif (mode in MODES and figures.MODES[mode].exchanges and len(exchange) == 2
              and exchange[0] in WIRES and exchange[1] in CARRIERS):  # fmt: skip
            lines.append((mode, *exchange))
        else:
            raise ConfigError(
                f"lines={own['lines']}: {line!r} is not {figures.DATA_PARALLEL} or mode:wire:"
                f"carrier with a wire of {','.join(WIRES)} and a carrier of {','.join(CARRIERS)}. "
                f"Use {figures.DATA_PARALLEL},eager:float4_e3m0:host, say."
            )
    return list(dict.fromkeys(lines))


def _number(name: str, own: dict[str, str], kind: type, least: float) -> Any:
    try:
        value = kind(own[name])
    except ValueError:
        value = None
    if value is None or not least <= value < float("inf"):
        raise ConfigError(
            f"{name}={own[name]} is not {'a whole' if kind is int else 'a'} number of {least} or "
            f"more. Use {(OWN | KEYS)[name] or least}, say."
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
    return list(dict.fromkeys(chosen))


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
