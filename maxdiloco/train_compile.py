"""Compile a run ahead of time and report its traffic: `python -m maxdiloco.train_compile`.

The arguments are the flags of maxdiloco.train, and OPTIONS. With compile_topology no accelerator is
needed, only libtpu or JAX's plugin for CUDA. The exit code is 1 if the programs should not be run
as they are, so that a job script can run this check first.
"""

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace

from maxdiloco.command_line import Option, guarded, option_lines, read_options
from maxdiloco.config import config, help
from maxdiloco.errors import ConfigError
from maxdiloco.output import one_line, say, say_error, span
from maxdiloco.planning import compile_time

REFUSED = 1
OPTIONS = MappingProxyType({
    "dcn_bandwidth_gbps": Option(25.0, "one device's share of the link between slices [Gbit/s]; "
                                 "25 is a host of four chips with 100 Gbit/s", float, 0),
    "max_exposed_fraction": Option(1.0, "largest fraction of an exchange's time on the link that "
                                   "may be exposed, 0 to 1. Above it the exit code is 1. Without "
                                   "overlap steps all of it is exposed", float),
    "compile_data_parallel": Option(False, "also compile data parallelism on the same mesh, for a "
                                    "comparison; it doubles the compile time", bool),
    "report": Option("", "file to write the report to, as JSON; empty: print it only"),
})  # fmt: skip

EXAMPLES = (
    "model_name=1b compile_topology=v5e-16 compile_topology_num_slices=2 dcn_bandwidth_gbps=2",
    "model_name=tiny hardware=cpu dcn_diloco_parallelism=2 ici_fsdp_parallelism=2",
)


@guarded
def main(argv: Sequence[str]) -> int:
    """Run the program; return its exit code."""
    if words := help.help_words(argv):
        say(help_text("maxdiloco.train_compile", words[1:], OPTIONS, EXAMPLES))
        return 0
    options, keys = read_options(argv, OPTIONS, "train_compile", keys=True)
    if not 0 <= options.max_exposed_fraction <= 1:
        raise ConfigError(
            f"max_exposed_fraction={options.max_exposed_fraction:g}: expected a number from 0 to "
            f"1, such as 0.05."
        )
    cfg = config.load(keys, os.environ)
    count = 2 if options.compile_data_parallel and cfg.enable_diloco else 1
    expected = span(count * compile_time.run_seconds(cfg))
    target = cfg.compile_topology or f"{cfg.hardware} of this machine"
    say_line(f"compiling {cfg.model_name} for {target}: about {expected} (a guess)")
    from maxdiloco.run import tokenizer as run_tokenizer

    return _compile(run_tokenizer.resolve_vocab_size(cfg), options)


def help_text(
    program: str, words: Sequence[str], options: Mapping[str, Option], examples: Sequence[str]
) -> str:
    """Return the text of --help: the program's options and the groups of keys.

    With `words`, return the options and keys that the words select.
    """
    own = {name: option for name, option in options.items() if not words or name in words}
    keys = [word for word in words if word not in options]
    if not words:
        return help.help_text(program, own=option_lines(own), examples=examples)
    lines = [f"options of {program}:", *option_lines(own)] if own else []
    return "\n".join([*lines, *([help.help_text(program, keys)] if keys else [])])


def _compile(cfg: config.Config, options: SimpleNamespace) -> int:
    from maxdiloco.parallel import mesh as mesh_lib
    from maxdiloco.planning import compile_report, compile_run, report_text
    from maxdiloco.run import settings
    from maxdiloco.storage import output_file

    gbps = options.dcn_bandwidth_gbps
    output_file.check_path("report", options.report)
    cfg, mesh, chip = compile_run.open_devices(cfg)
    cfg = settings.with_replicas(cfg, settings.count_replicas(settings.read_batch(cfg), mesh))
    for line in config.describe_differences(cfg):
        say_line(line)
    say_line(mesh_lib.describe(mesh, settings.read_mesh(cfg)))
    parts, result = compile_run.report_run(cfg, mesh, chip, gbps=gbps, say=say_line)
    results = [result]
    if options.compile_data_parallel and cfg.enable_diloco:
        baseline = config.from_dict(cfg.as_dict() | {"enable_diloco": False})
        results.append(compile_run.report_run(baseline, mesh, chip, gbps=gbps, say=say_line)[-1])
    texts = [line for each in results for line in report_text.verdict_lines(each)]
    for line in ["", *texts, "", *parts.trainer.description.fragments]:
        say_line(line)
    for each in results:
        for line in ["", *report_text.lines(each)]:
            say_line(line)
    reports = [compile_report.as_json(each) for each in results] if options.report else []
    output_file.write_json("report", options.report, {"reports": reports})
    return refuse(report_text.refusals(result, max_exposed_fraction=options.max_exposed_fraction))


def refuse(reasons: Sequence[str]) -> int:
    """Print the reasons why the programs should not be run; return the exit code."""
    for reason in reasons:
        say_error(f"refused: {reason}")
    return REFUSED if reasons else 0


def say_line(line: str) -> None:
    """Print a line with its control characters escaped."""
    say(one_line(line))


if __name__ == "__main__":
    main()
