"""Which way to synchronise fits a link: `python -m maxdiloco.plan`.

Takes the flags of maxdiloco.train and the bandwidth of the link between slices. The plain step is
compiled for compile_topology, or its time is given as step_time and nothing is compiled; that of
GPUs is guessed from their peak. Exit code 1 when no choice fills the link.
"""

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from maxdiloco.aot import gpus
from maxdiloco.command_line import Option, end_with, guarded, read_options
from maxdiloco.errors import ConfigError
from maxdiloco.flags import base_yml, config, help
from maxdiloco.flags.config import ENVIRONMENT_PREFIX, Config
from maxdiloco.processes.output import one_line, say, say_error

REFUSED = 1
OPTIONS = MappingProxyType({
    "step_time": Option(
        None,
        "seconds of an inner step without an exchange, measured; then nothing is compiled",
        float,
        0,
    ),
    "host_bandwidth_gbps": Option(
        None, "Gbit/s of a host's link, in place of dcn_bandwidth_gbps", float, 0
    ),
    "slice_bandwidth_gbps": Option(
        None, "Gbit/s of a slice's link, in place of dcn_bandwidth_gbps", float, 0
    ),
    "latency_ms": Option(
        None,
        "milliseconds from one slice to another, half a round trip; by default none",
        float,
        0,
    ),
})  # fmt: skip
# Each names one link between slices: of a device, a host, a slice.
LINKS = ("dcn_bandwidth_gbps", "host_bandwidth_gbps", "slice_bandwidth_gbps")


class Options(NamedTuple):
    """What is not a key of base.yml. None: not given. keys: the rest of the command line."""

    numbers: dict[str, float]
    keys: list[str]


@guarded
def main(argv: Sequence[str]) -> int:
    """Run the program; returns its exit code."""
    if words := help.asked(argv):
        say(help_text(words[1:]))
        return 0
    options = parse(argv)
    cfg = config.load(options.keys, os.environ)
    given = given_keys(options.keys, os.environ)
    link = _link(options, given)
    if not cfg.compile_topology and "step_time" not in options.numbers:
        raise ConfigError(
            "step_time is not given and compile_topology is empty, so the time of a step is "
            "unknown. Give step_time=0.8 (seconds), or compile_topology=v5e-16 or h100-8 with "
            "compile_topology_num_slices=2."
        )
    from maxdiloco.evaluation import run_tokenizer

    return _plan(run_tokenizer.resolved(cfg), options, given, link)


def help_text(words: Sequence[str]) -> str:
    """What --help prints: the plan's own options and the keys, or the keys that words choose."""
    keys = help.help_text("maxdiloco.plan", words)
    if words:
        return keys
    own = "\n".join(f"  {name}=  {option.meaning}" for name, option in OPTIONS.items())
    head, rest = keys.split("\n", 1)
    return f"{head}\n{rest}\n\nof the plan, beside the keys of a run\n{own}"


def parse(argv: Sequence[str]) -> Options:
    """Split the command line. Raises ConfigError for an option that is no positive number."""
    values, keys = read_options(argv, OPTIONS, "plan", keys=True)
    return Options({k: v for k, v in vars(values).items() if v is not None}, keys)


def given_keys(keys: Sequence[str], environ: Mapping[str, str]) -> set[str]:
    """Names of the keys that the user has set, whatever their values."""
    names = {key.partition("=")[0].lstrip("-") for key in keys}
    names |= {
        name.removeprefix(ENVIRONMENT_PREFIX).lower()
        for name in environ
        if name.startswith(ENVIRONMENT_PREFIX)
    }
    if keys and keys[0].endswith((".yml", ".yaml")):
        path = pathlib.Path(keys[0])
        if path.resolve() != (base_yml.config_folder() / "base.yml").resolve():
            names |= {name for name, _, _ in base_yml.read_yml(path)}
    return names


def _link(options: Options, given: set[str]) -> str:
    """The name of the bandwidth that the user gave."""
    names = [name for name in LINKS if name in options.numbers or name in given]
    if not names:
        raise ConfigError(
            "dcn_bandwidth_gbps is not given, and the plan is for a link. Give one device's share "
            "in Gbit/s, or host_bandwidth_gbps or slice_bandwidth_gbps."
        )
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(names)} name the same link. Give one of them.")
    return names[0]


def _plan(cfg: Config, options: Options, given: set[str], link: str) -> int:
    from maxdiloco.aot import topology
    from maxdiloco.planning import choices, compiled, job, rating, table
    from maxdiloco.trainer import compiled_file

    if cfg.report:
        compiled_file.check_place("report", cfg.report)
    planned = job.of(cfg)
    on_host = planned.per_slice
    if cfg.compile_topology:
        on_host = min(on_host, topology.devices_per_host(cfg.compile_topology))
    shares = dict(zip(LINKS, [(1, "device"), (on_host, "host"), (planned.per_slice, "slice")],
                      strict=True))  # fmt: skip
    share = shares[link]
    gbps = options.numbers.get(link, cfg.dcn_bandwidth_gbps) / share[0]
    families = choices.families(planned, given)
    if not families:
        raise ConfigError(
            "no way to synchronise has the values that are given for H, P and tau. Leave one out."
        )
    latency_s = options.numbers.get("latency_ms", 0.0) / 1e3
    step = rating.Step(options.numbers.get("step_time", 1.0))
    is_guessed = "step_time" not in options.numbers and gpus.kind_of(cfg.compile_topology)
    if is_guessed:
        step = compiled.estimated_step(planned)
    rows = rating.ranked(planned, families, step=step, gbps=gbps, latency_s=latency_s)
    _check_memory(planned, rows)
    if "step_time" not in options.numbers and not is_guessed:
        step = compiled.plain_step(cfg, gbps=gbps, say=_say)
        rows = rating.ranked(planned, families, step=step, gbps=gbps, latency_s=latency_s)
        _check_memory(planned, rows)
    plan = table.Plan(planned, step, gbps, share, rows, options.keys, latency_s)
    for line in table.lines(plan):
        _say(line)
    if cfg.report:
        text = json.dumps(table.as_json(plan), indent=1) + "\n"
        compiled_file.write_whole("report", cfg.report, text.encode())
    refused = table.refusals(plan)
    for line in refused:
        say_error(f"refused: {line}")
    return REFUSED if refused else 0


def _check_memory(planned, rows) -> None:
    """Raise ConfigError where no choice fits the chip."""
    from maxdiloco.metrics.compiles import make_room
    from maxdiloco.planning.table import MIB

    if any(row.fits for row in rows):
        return
    cfg, least = planned.cfg, min(row.memory for row in rows)
    raise ConfigError(
        f"model_name={cfg.model_name} is too big for {cfg.compile_topology}: every choice needs at "
        f"least {least / MIB:,.0f} MiB a device, which has {planned.chip.hbm / MIB:,.0f}. "
        f"{make_room(cfg, outer_state=False)}"  # the plan has tried pinned_host
    )


def _say(line: str) -> None:
    say(one_line(line))


def cli() -> None:
    """The console entry `maxdiloco-plan`."""
    end_with(main)


if __name__ == "__main__":
    cli()
