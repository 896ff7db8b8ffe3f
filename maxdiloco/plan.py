"""Which way to synchronise fits a link: `python -m maxdiloco.plan`.

Takes the flags of maxdiloco.train and the bandwidth of the link between slices. The plain step is
compiled for compile_topology, or its time is given as step_time and nothing is compiled; that of
GPUs is guessed from their peak. Exit code 1 when no choice fills the link.
"""

import os
import pathlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace

from maxdiloco import train_compile
from maxdiloco.command_line import Option, guarded, read_options
from maxdiloco.errors import ConfigError
from maxdiloco.flags import base_yml, config, help
from maxdiloco.processes.output import say

OPTIONS = MappingProxyType({
    "step_time": Option(None, "seconds of an inner step without an exchange, measured; then "
                        "nothing is compiled", float, 0),
    "dcn_bandwidth_gbps": Option(None, "Gbit/s of one device's share of the link", float, 0),
    "host_bandwidth_gbps": Option(None, "Gbit/s of a host's link, in place of dcn_bandwidth_gbps",
                                  float, 0),
    "slice_bandwidth_gbps": Option(None, "Gbit/s of a slice's link, in place of dcn_bandwidth_gbps",
                                   float, 0),
    "latency_ms": Option(None, "milliseconds from one slice to another, half a round trip; by "
                         "default none", float, 0),
    "report": train_compile.OPTIONS["report"],
})  # fmt: skip
# Each names one link between slices: of a device, a host, a slice.
LINKS = ("dcn_bandwidth_gbps", "host_bandwidth_gbps", "slice_bandwidth_gbps")


@guarded
def main(argv: Sequence[str]) -> int:
    """Run the program; returns its exit code."""
    if words := help.asked(argv):
        say(train_compile.help_text("maxdiloco.plan", words[1:], OPTIONS))
        return 0
    options, keys = read_options(argv, OPTIONS, "plan", keys=True)
    cfg = config.load(keys, os.environ)
    names = [name for name in LINKS if vars(options)[name] is not None]
    if not names:
        raise ConfigError(
            "dcn_bandwidth_gbps is not given, and the plan is for a link. Give one device's share "
            "in Gbit/s, or host_bandwidth_gbps or slice_bandwidth_gbps."
        )
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(names)} name the same link. Give one of them.")
    if not cfg.compile_topology and options.step_time is None:
        raise ConfigError(
            "step_time is not given and compile_topology is empty, so the time of a step is "
            "unknown. Give step_time=0.8 (seconds), or compile_topology=v5e-16 or h100-8 with "
            "compile_topology_num_slices=2."
        )
    from maxdiloco.evaluation import run_tokenizer

    return _plan(run_tokenizer.resolved(cfg), options, keys, names[0])


def given_keys(keys: Sequence[str], environ: Mapping[str, str]) -> set[str]:
    """Names of the keys that the user has set, whatever their values."""
    names = {key.partition("=")[0].lstrip("-") for key in keys}
    names |= {
        name.removeprefix(config.ENVIRONMENT_PREFIX).lower()
        for name in environ
        if name.startswith(config.ENVIRONMENT_PREFIX)
    }
    if keys and keys[0].endswith((".yml", ".yaml")):
        path = config.found(pathlib.Path(keys[0]))
        if path.resolve() != (base_yml.config_folder() / "base.yml").resolve():
            names |= {name for name, _, _ in base_yml.read_yml(path)}
    return names


def _plan(cfg: config.Config, options: SimpleNamespace, keys: Sequence[str], link: str) -> int:
    from maxdiloco.planning import compiled, job, rating, table
    from maxdiloco.trainer import compiled_file
    from maxdiloco.trainer.remat_choice import make_room

    compiled_file.check_place("report", options.report)
    planned = job.of(cfg)
    sharing = ((1, "device"), (planned.per_host, "host"), (planned.per_slice, "slice"))
    share = sharing[LINKS.index(link)]
    gbps, latency_s = vars(options)[link] / share[0], (options.latency_ms or 0.0) / 1e3
    families = rating.families(planned, given_keys(keys, os.environ))
    if not families:
        raise ConfigError(
            "no way to synchronise has the values that are given for H, P and tau. Leave one out."
        )

    def ranked(step: rating.Step) -> list[rating.Rated]:
        rows = rating.ranked(planned, families, step=step, gbps=gbps, latency_s=latency_s)
        if not any(row.fits for row in rows):
            least, hbm = (
                n / table.MIB for n in (min(r.memory_bytes for r in rows), planned.chip.hbm)
            )
            raise ConfigError(
                f"model_name={cfg.model_name} is too big for {cfg.compile_topology}: every choice "
                f"needs at least {least:,.0f} MiB a device, which has {hbm:,.0f}. "
                f"{make_room(cfg, outer_state=False)}"  # the plan has tried pinned_host
            )
        return rows

    if options.step_time is not None:
        step = rating.Step(options.step_time)
    elif not planned.chip.timed:
        step = compiled.estimated_step(cfg, planned)
    else:
        ranked(rating.Step(1.0))  # refuse a model whose state alone is too big before compiling
        step = compiled.plain_step(cfg, gbps=gbps, say=train_compile.say_line)
    plan = table.Plan(planned, step, gbps, share, ranked(step), keys, table.measured(), latency_s)
    for line in table.lines(plan):
        train_compile.say_line(line)
    compiled_file.write_json("report", options.report, table.as_json(plan))
    return train_compile.refuse(table.refusals(plan))


if __name__ == "__main__":
    main()
