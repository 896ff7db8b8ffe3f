"""Draw runs as one HTML page: `python -m maxdiloco.report RUN [RUN ...] [out=FILE]`."""

from collections.abc import Sequence
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from maxdiloco.command_line import HELP, Option, guarded, option_lines, read_options
from maxdiloco.errors import ConfigError
from maxdiloco.output import say

if TYPE_CHECKING:
    from maxdiloco.report.run_data import RunData

USAGE = """usage: python -m maxdiloco.report RUN [RUN ...] [key=value ...]

RUN: name of a run, its folder, or the folder of one of its checkpoints; also in a bucket

The page shows losses, learning rates, norms, cosine, drift and speed, and the schedule of one or
two periods. It lists sessions, checkpoints and differing keys. Several runs are compared at equal
tokens. Every curve can be drawn against steps, tokens, bytes and seconds. The page is one file and
works offline.

examples:
  python -m maxdiloco.report laptop
  python -m maxdiloco.report laptop two out=both.html

options:"""
OPTIONS = MappingProxyType({
    "out": Option("", "file to write; empty: report.html in the first run's folder, or in the "
                  "working directory for a run in a bucket"),
    "base_output_directory": Option("runs", "folder that contains the runs that are given by name"),
})  # fmt: skip


@guarded
def main(argv: Sequence[str]) -> int:
    """Run the program, and return its exit code."""
    if not argv or argv[0] in HELP:
        say("\n".join([USAGE, *option_lines(OPTIONS)]))
        return 0
    options, names = read_options(argv, OPTIONS, "report", names=True)
    if not names:
        raise ConfigError("RUN is missing: give the name or the folder of one run or more.")
    say(_write(names, options))
    return 0


def _load(names: Sequence[str], options: SimpleNamespace) -> tuple[list["RunData"], dict[str, Any]]:
    """Return the runs, and the default of every key."""
    from maxdiloco.config import checks
    from maxdiloco.report import run_data, timeline

    for name in names:
        checks.refuse_store("RUN", name)
    checks.refuse_store("base_output_directory", options.base_output_directory)
    defaults = run_data.default_config()
    base = options.base_output_directory
    runs = run_data.load(names, base_output_directory=base, defaults=defaults)
    for name, run in zip(names, runs, strict=True):
        try:
            timeline.schedule_of(run)
        except (TypeError, ValueError) as error:
            values = ", ".join(f"{key}={run.config[key]}" for key in timeline.KEYS)
            raise ConfigError(
                f"RUN={name}: {run.folder}/config.yml has {values}, which make no schedule. "
                f"Restore the file, or move it away for a page without a timeline."
            ) from error
    return runs, defaults


def _write(names: Sequence[str], options: SimpleNamespace) -> str:
    """Write the page, and return a line on the file."""
    from maxdiloco.report import html
    from maxdiloco.storage import output_file
    from maxdiloco.storage.run_folder import is_local

    runs, defaults = _load(names, options)
    folder = runs[0].folder
    out = options.out or (str(folder / "report.html") if is_local(folder) else "report.html")
    output_file.check_path("out", out)
    content = html.page(runs, defaults).encode()
    output_file.write_whole("out", out, content)
    rows = sum(len(run.steps) for run in runs)
    return f"{out}: {len(content) / 1e6:.2f} MB, {rows:,} rows"


if __name__ == "__main__":
    main()
