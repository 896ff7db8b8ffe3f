"""Evaluate a stored checkpoint: `python -m maxdiloco.evaluate RUN [key=value ...]`.

Only the parameters are read. The flags are checked before JAX starts (run/stored.py).
"""

import functools
import os
from collections.abc import Sequence
from types import MappingProxyType, SimpleNamespace

from maxdiloco.command_line import HELP, Option, guarded, option_lines, read_options
from maxdiloco.output import one_line, say

USAGE = """usage: python -m maxdiloco.evaluate RUN [key=value ...]

RUN: name of a run, its folder, or the folder of one of its checkpoints; also in a bucket

examples:
  python -m maxdiloco.evaluate laptop
  python -m maxdiloco.evaluate laptop eval_dataset_path='{held_out: , wiki: /data/wiki}'
  python -m maxdiloco.evaluate laptop tasks=hellaswag,arc_easy report=tasks.json

options:"""
OPTIONS = MappingProxyType({
    "step": Option(-1, "step of the checkpoint to evaluate; -1: the newest", int, -1),
    "parameters": Option("outer", "outer: the outer parameters; replica_0, replica_1, ...: one "
                         "replica's parameters; mean: the mean over the replicas"),
    "tasks": Option("", "evaluate on these tasks of lm_eval instead of text: names with commas, or "
                    "the yml file of one task (needs the extra eval)"),
    "report": Option("", "file to write the result to, as JSON"),
})  # fmt: skip
OF_HARNESS = ("batch_size=", "device=")  # options of the harness, which are not keys


@guarded
def main(argv: Sequence[str]) -> int:
    """Run the program; return its exit code."""
    if not argv or argv[0] in HELP:
        import textwrap

        from maxdiloco.config.keys import EVALUATION_KEYS

        say("\n".join([USAGE, *option_lines(OPTIONS)]))
        say("\nkeys that may differ from the run's (eval_dataset_path: the text to evaluate on):")
        for line in textwrap.wrap(", ".join(EVALUATION_KEYS), 98):
            say(f"  {line}")
        return 0
    run, (options, keys) = argv[0], read_options(argv[1:], OPTIONS, "evaluate", keys=True)
    from maxdiloco.checkpoint import read
    from maxdiloco.config import checks, config

    checks.refuse_store("RUN", run)
    place = [key for key in keys if key.startswith("base_output_directory=")]
    environ = {k: v for k, v in os.environ.items() if k == "M_BASE_OUTPUT_DIRECTORY"}
    base = config.load(place, environ).base_output_directory
    folder = read.locate(run, base_output_directory=base, step=options.step)
    from maxdiloco.run import stored

    configure = functools.partial(stored.configure, environ=os.environ)
    if options.tasks:
        # The keys are checked before lm_eval loads its tasks.
        of_model = [key for key in keys if not key.startswith(OF_HARNESS)]
        configure(read.newest_meta(folder, key="RUN"), of_model)
        _evaluate_tasks(run, options, keys, base)
        return 0
    import jax

    from maxdiloco.run import startup
    from maxdiloco.storage import output_file

    # The mesh must be known before JAX's backends start. The parameters are read afterwards.
    configure = functools.partial(configure, argv=keys)
    cfg = configure(read.newest_meta(folder, key="RUN"))
    with startup.set_up(cfg) as (_, _, notes):
        say_once = read.primary_only(lambda line: say(one_line(line)))
        for line in notes:
            say_once(line)
        report = options.report if jax.process_index() == 0 else ""
        output_file.check_path("report", report)
        evaluated, texts = stored.evaluate(folder, configure, options.parameters, say_once)
        for line in stored.table(texts):
            say_once(line)
        output_file.write_json("report", report, stored.as_json(evaluated, texts))
    return 0


def _evaluate_tasks(run: str, options: SimpleNamespace, keys: Sequence[str], base: str) -> None:
    """Evaluate a checkpoint on tasks of the evaluation harness; print and write the results."""
    from maxdiloco.data import packages
    from maxdiloco.storage import output_file

    packages.require("lm_eval", f"tasks={options.tasks}", extra="eval")
    from maxdiloco.huggingface import harness

    output_file.check_path("report", options.report)
    tasks, manager = harness.find_tasks(options.tasks.split(","))
    model = harness.HarnessModel(
        run,
        step=options.step,
        parameters=options.parameters,
        **{"base_output_directory": base} | dict(key.partition("=")[::2] for key in keys),
    )
    found = model.checkpoint
    say(f"step {found.step} of {found.path.parent.parent}, parameters: {options.parameters}")
    results = harness.evaluate(model, tasks, manager)
    for line in harness.as_text(results):
        say(line)
    evaluated = {"checkpoint": str(found.path), "step": found.step}
    evaluated |= {"parameters": options.parameters, "tasks": harness.as_json(results)}
    output_file.write_json("report", options.report, evaluated)


if __name__ == "__main__":
    main()
