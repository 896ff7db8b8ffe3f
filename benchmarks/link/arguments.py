"""The command line of the benchmark: its own names, the trainer's keys, and grids of both."""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.link import figures
from benchmarks.link.command import choices, number, split_arguments
from benchmarks.link.grid import GRIDS, Row
from maxdiloco.config import config
from maxdiloco.errors import ConfigError

WIRES = ("float32", "bfloat16", "int8", "float4_e3m0")
MODES = tuple(mode for mode in figures.MODES if mode != figures.PLAIN)
CARRIERS = ("xla", "host")
OWN = {
    "grid": "",  # rows that have a name: published, reduce_scatter
    "hosts": "2",
    "modes": ",".join(mode for mode in MODES if mode != "reduce_scatter"),
    "wires": "float32,float4_e3m0",  # of all WIRES
    "carriers": "all",  # of CARRIERS
    "lines": "",  # mode or mode:wire:carrier, instead of modes, wires and carriers
    "rates": "unlimited,100,20,10",  # Mbit/s, each direction
    "delay_ms": "0",  # from host to host, one way
    "loss_pct": "0",  # of the frames, where delay_ms is not 0
    "fast_device_ms": "0",  # sleep in a step of a small model; 0: real compute
    "periods": "5",  # of H steps, that are measured at the lowest rate
    "other_periods": "",  # at the other rates; empty: the same number
    "row_seconds": "300",  # then a row measures fewer periods, at least one
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
SMALL_STEP = {"max_target_length": "64", "per_device_batch_size": "1"}  # with a fast device
SET_HERE = {
    "steps", "run_name", "base_output_directory", "num_slices", "enable_diloco", "diloco_transport",
    "enable_streaming_diloco", "diloco_round_overlap", "diloco_exchange_dtype",
}  # fmt: skip


class Part(NamedTuple):
    """Rows of one table. setup: the values that all of them share."""

    setup: dict[str, Any]
    rows: list[Row]
    out: pathlib.Path


def parts(argv: Sequence[str]) -> list[Part]:
    """The request of a command line: the parts of a grid, or one. Raises ConfigError."""
    given = dict(argument.partition("=")[::2] for argument in argv)
    grid = given.pop("grid", "")
    if grid and grid not in GRIDS:
        raise ConfigError(f"grid={grid} is not known. Use {' or '.join(GRIDS)}.")
    lines = [given]
    if grid:
        out = pathlib.Path(given.pop("out", OWN["out"]))
        lines = [
            dict(pair.split("=", 1) for pair in pairs) | given | {"out": str(out / folder)}
            for folder, pairs in GRIDS[grid].items()
        ]
    found = [Part(*arguments([f"{name}={value}" for name, value in one.items()])) for one in lines]
    for part in found:  # rows that the trainer refuses are refused before the first row
        keys = figures.mode_keys(figures.PLAIN, part.setup["keys"])
        cfg = config.load([f"{name}={value}" for name, value in keys.items()], {})
        tied = cfg.vocab_size * cfg.base_emb_dim if cfg.logits_via_embedding else 0
        part.setup["tied_parameters"] = tied
    return found


def arguments(argv: Sequence[str]) -> tuple[dict[str, Any], list[Row], pathlib.Path]:
    """The values that all rows share, the rows in their order, and the folder for results.

    Raises ConfigError.
    """
    options, given = split_arguments(argv, OWN, SET_HERE)
    options["other_periods"] = options["other_periods"] or options["periods"]
    setup: dict[str, Any] = {
        "hosts": number("hosts", options, least=2),
        "periods": number("periods", options),
        "other_periods": number("other_periods", options),
        "delay_ms": number("delay_ms", options, float, least=0),
        "loss_pct": number("loss_pct", options, float, least=0),
        "fast_device_ms": number("fast_device_ms", options, float, least=0),
        "queue_ms": number("queue_ms", options, float),
        "row_seconds": number("row_seconds", options, float),
        "row_limit_s": number("row_limit_s", options, float),
        "congestion": options["congestion"],
    }
    small = SMALL_STEP if setup["fast_device_ms"] else {}
    keys = KEYS | small | given
    H, log = number("diloco_sync_period", keys), number("log_period", keys)
    if H % log:
        raise ConfigError(
            f"log_period={log} does not divide diloco_sync_period={H}: a period would not be as "
            f"long as the next. Use log_period={H}."
        )
    out = pathlib.Path(options["out"]).resolve()
    setup["keys"] = keys | {"jax_cache_dir": str(out / "jax_cache")}
    rates = _rates(options)
    setup["thinnest"] = min(rates, key=lambda rate: figures.mbit({"rate": rate}))
    rows = [Row(*line, rate) for rate in rates for line in _lines(options)]
    # The plain step again: how far two measurements of one thing differ.
    return setup, [Row(figures.PLAIN), *rows, Row(figures.PLAIN, turn=1)], out


def _lines(options: dict[str, str]) -> list[tuple[str, str, str]]:
    """(mode, wire, carrier) of every row at one rate."""
    if not options["lines"]:
        return _product(
            choices("modes", options, MODES),
            choices("wires", options, WIRES),
            choices("carriers", options, CARRIERS),
        )
    offered = {":".join(filter(None, line)): line for line in _product(MODES, WIRES, CARRIERS)}
    return [offered[name] for name in choices("lines", options, list(offered))]


def _product(
    modes: Sequence[str], wires: Sequence[str], carriers: Sequence[str]
) -> list[tuple[str, str, str]]:
    """Every mode with every wire and carrier, where it exchanges."""
    exchanges = [(wire, carrier) for wire in wires for carrier in carriers]
    return [
        (mode, *exchange)
        for mode in modes
        for exchange in (exchanges if figures.MODES[mode].exchanges else [("", "")])
    ]


def _rates(options: dict[str, str]) -> list[str]:
    """Each once, as the rows name it."""
    rates = []
    for rate in options["rates"].split(","):
        if rate != figures.UNLIMITED:
            rate = f"{number('rates', {'rates': rate}, float, least=0.1):g}"
        rates.append(rate)
    return list(dict.fromkeys(rates))
