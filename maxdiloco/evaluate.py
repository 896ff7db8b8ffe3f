"""Evaluate a stored checkpoint: `python -m maxdiloco.evaluate RUN [key=value ...]`.

Only the parameters are read. The flags are checked before JAX starts (evaluation/eval_stored.py).
"""

import json
import os
import re
from collections.abc import Sequence

from maxdiloco.command_line import HELP, end_with, guarded
from maxdiloco.errors import ConfigError
from maxdiloco.processes.output import one_line, say

USAGE = """usage: python -m maxdiloco.evaluate RUN [key=value ...]

RUN: name of a run, its folder, or the folder of one of its checkpoints; also on gs://
  step=-1  step of the checkpoint; -1: the newest
  parameters=outer  outer: theta; replica_0 ...: those of one replica; mean: of all replicas
  eval_sets={}  texts to evaluate on beside the held-out one, as {wiki: /data/wiki}
  report=  file to write the result to, as JSON
The other keys are those of the run. These may be set anew:"""


@guarded
def main(argv: Sequence[str]) -> int:
    """Run the program; returns its exit code."""
    if not argv or argv[0] in HELP:
        _help()
        return 0
    run, options, keys = argv[0], *_split(argv[1:])
    from maxdiloco.checkpoint import find
    from maxdiloco.flags import checks, config

    checks.refuse_store("RUN", run)
    place = [key for key in keys if key.startswith("base_output_directory=")]
    environ = {k: v for k, v in os.environ.items() if k == "M_BASE_OUTPUT_DIRECTORY"}
    base = config.load(place, environ).base_output_directory
    folder = find.locate(run, base_output_directory=base, step=options["step"], key="RUN")
    return _run(folder, options["parameters"], keys)


def _help() -> None:
    import textwrap

    from maxdiloco.evaluation import eval_stored

    say(USAGE)
    indent = "  "
    for line in textwrap.wrap(", ".join(eval_stored.may_change()), 98):
        say(indent + line)


def _split(arguments: Sequence[str]) -> tuple[dict, list[str]]:
    """The options of this program, and the keys of base.yml."""
    options = {"step": -1, "parameters": "outer"}
    given, keys = set(), []
    for argument in arguments:
        name, _, raw = argument.partition("=")
        if name not in options:
            keys.append(argument)
            continue
        if name in given:
            raise ConfigError(f"{argument}: {name} is given twice. Give it once.")
        given.add(name)
        options[name] = raw
    if not re.fullmatch(r"-1|[0-9]{1,18}", str(options["step"])):
        raise ConfigError(f"step={options['step']} is no step. Use -1 for the newest, or a number.")
    options["step"] = int(options["step"])
    return options, keys


def _run(folder, parameters: str, keys: list[str]) -> int:
    import jax

    from maxdiloco.checkpoint import find
    from maxdiloco.evaluation import eval_stored
    from maxdiloco.parallel import job
    from maxdiloco.trainer import compiled_file, saved_programs

    # The mesh has to be known before JAX's backends start; the checkpoint itself is read after.
    cfg = eval_stored.configure(find.newest_meta(folder, key="RUN"), keys, os.environ)
    with job.joined(cfg), saved_programs.compile_cache(cfg) as notes:
        primary = jax.process_index() == 0

        def say_once(line: str) -> None:
            if primary:
                say(one_line(line))

        for line in notes:
            say_once(line)
        if cfg.report and primary:
            compiled_file.check_place("report", cfg.report)
        result = eval_stored.evaluate(
            folder, key="RUN", argv=keys, environ=os.environ, parameters=parameters, say=say_once
        )
        for line in eval_stored.table(result):
            say_once(line)
        if cfg.report and primary:
            text = json.dumps(eval_stored.as_json(result), indent=1) + "\n"
            compiled_file.write_whole("report", cfg.report, text.encode())
    return 0


def cli() -> None:
    """The console entry `maxdiloco-evaluate`."""
    end_with(main)


if __name__ == "__main__":
    cli()
