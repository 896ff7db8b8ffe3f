"""Evaluate a stored checkpoint: `python -m maxdiloco.evaluate RUN [key=value ...]`.

Only the parameters are read. The flags are checked before JAX starts (evaluation/eval_stored.py).
"""

import json
import os
from collections.abc import Sequence
from types import MappingProxyType

from maxdiloco.command_line import HELP, Option, end_with, guarded, option_lines, read_options
from maxdiloco.processes.output import one_line, say

USAGE = """usage: python -m maxdiloco.evaluate RUN [key=value ...]

RUN: name of a run, its folder, or the folder of one of its checkpoints; also on gs://
  eval_sets={}  texts to evaluate on beside the held-out one, as {wiki: /data/wiki}"""
OPTIONS = MappingProxyType({
    "step": Option(-1, "of the checkpoint; -1: the newest", int, -1),
    "parameters": Option(
        "outer", "outer: theta; replica_0 ...: those of one replica; mean: of all replicas"
    ),
    "report": Option("", "file to write the result to, as JSON"),
})  # fmt: skip


@guarded
def main(argv: Sequence[str]) -> int:
    """Run the program; returns its exit code."""
    if not argv or argv[0] in HELP:
        _help()
        return 0
    run, (options, keys) = argv[0], read_options(argv[1:], OPTIONS, "evaluate", keys=True)
    from maxdiloco.checkpoint import find
    from maxdiloco.flags import checks, config

    checks.refuse_store("RUN", run)
    place = [key for key in keys if key.startswith("base_output_directory=")]
    environ = {k: v for k, v in os.environ.items() if k == "M_BASE_OUTPUT_DIRECTORY"}
    base = config.load(place, environ).base_output_directory
    folder = find.locate(run, base_output_directory=base, step=options.step, key="RUN")
    return _run(folder, options.parameters, options.report, keys)


def _help() -> None:
    import textwrap

    from maxdiloco.evaluation import eval_stored

    say("\n".join([USAGE, *option_lines(OPTIONS)]))
    say("The other keys are those of the run. These may be set anew:")
    indent = "  "
    for line in textwrap.wrap(", ".join(eval_stored.may_change()), 98):
        say(indent + line)


def _run(folder, parameters: str, report: str, keys: list[str]) -> int:
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
        if report and primary:
            compiled_file.check_place("report", report)
        result = eval_stored.evaluate(
            folder, key="RUN", argv=keys, environ=os.environ, parameters=parameters, say=say_once
        )
        for line in eval_stored.table(result):
            say_once(line)
        if report and primary:
            text = json.dumps(eval_stored.as_json(result), indent=1) + "\n"
            compiled_file.write_whole("report", report, text.encode())
    return 0


def cli() -> None:
    """The console entry `maxdiloco-evaluate`."""
    end_with(main)


if __name__ == "__main__":
    cli()
