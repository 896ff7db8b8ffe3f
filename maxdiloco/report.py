"""Draw runs as one HTML page: `python -m maxdiloco.report RUN [RUN ...] [out=FILE]`."""

import time
from collections.abc import Sequence
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from maxdiloco.command_line import HELP, Option, guarded, option_lines, read_options
from maxdiloco.errors import ConfigError
from maxdiloco.processes.output import say

if TYPE_CHECKING:
    from maxdiloco.page.run import Run

USAGE = """usage: python -m maxdiloco.report RUN [RUN ...] [key=value ...]

RUN: name of a run, its folder, or the folder of one of its checkpoints; also in a bucket

The page shows losses of the replicas and of theta, learning rates, norms, cosine, drift, speed, one
or two periods of the schedule, keys that differ, starts and checkpoints; of several runs also the
differences of theta. It is one file and needs no network."""
OPTIONS = MappingProxyType({
    "out": Option("", "file to write; empty: report.html in the first run's folder, of a bucket in "
                  "this one"),
    "watch": Option(0, "seconds after which the page is written again, and a browser that shows it "
                    "reads it again, until every run has ended; 0: write it once", int, 0),
    "base_output_directory": Option("runs", "where the runs are, when RUN is a name"),
})  # fmt: skip


@guarded
def main(argv: Sequence[str]) -> int:
    """Run the program; returns its exit code."""
    if not argv or argv[0] in HELP:
        say("\n".join([USAGE, *option_lines(OPTIONS)]))
        return 0
    options, named = read_options(argv, OPTIONS, "report", names=True)
    if not named:
        raise ConfigError("RUN is missing: give the name or the folder of one run or more.")
    running, said = options.watch > 0, False
    while running:
        running, line = _write(named, options, reload_s=options.watch)
        if running and not said:
            say(f"{line}; written again every {options.watch} s until every run has ended")
        if running:
            time.sleep(options.watch)
        said = True
    say(_write(named, options, reload_s=0)[1])
    return 0


def _load(
    names: Sequence[str], options: SimpleNamespace
) -> tuple[list["Run"], dict[str, Any], bool]:
    """The runs, the defaults of every key, and whether a run has not ended."""
    from maxdiloco.flags import base_yml, checks
    from maxdiloco.page import facts, timeline
    from maxdiloco.page import run as run_lib

    for name in names:
        checks.refuse_store("RUN", name)
    checks.refuse_store("base_output_directory", options.base_output_directory)
    defaults = {name: base_yml.as_lists(key.default) for name, key in base_yml.declared().items()}
    base = options.base_output_directory
    runs = run_lib.load(names, base_output_directory=base, defaults=defaults)
    for name, run in zip(names, runs, strict=True):
        try:
            timeline.schedule_of(run)
        except (TypeError, ValueError) as error:
            values = ", ".join(f"{key}={run.keys[key]}" for key in timeline.KEYS)
            raise ConfigError(
                f"RUN={name}: {run.folder}/config.yml has {values}, which make no schedule. "
                f"Restore the file, or move it away for a page without a timeline."
            ) from error
    newest = [life for run in runs for life in facts.lives(run)[-1:]]
    return runs, defaults, any(life.end is None for life in newest)  # it goes on, or was killed


def _write(names: Sequence[str], options: SimpleNamespace, *, reload_s: int) -> tuple[bool, str]:
    """Write the page. Returns whether a run has not ended, and a line on the file."""
    from maxdiloco.page import html
    from maxdiloco.storage import output_file
    from maxdiloco.storage.run_folder import is_local

    runs, defaults, running = _load(names, options)
    folder = runs[0].folder
    out = options.out or (str(folder / "report.html") if is_local(folder) else "report.html")
    output_file.check_path("out", out)
    content = html.page(runs, defaults, reload_s=reload_s).encode()
    output_file.write_whole("out", out, content)
    size = f"{out}: {len(content) / 1e6:.2f} MB, {sum(len(run.steps_N) for run in runs):,} rows"
    return running, size


if __name__ == "__main__":
    main()
