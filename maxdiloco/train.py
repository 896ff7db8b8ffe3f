"""Train one language model over several slices: `python -m maxdiloco.train [file.yml] key=value`.

The flags are checked before JAX is imported; the loop is in training.py.
"""

import os
import sys
import time
from collections.abc import Sequence

from maxdiloco import config, config_help
from maxdiloco.command_line import guarded

HELP = ("-h", "--help", "help")


def main(argv: Sequence[str]) -> int:
    """Run the program; returns its exit code."""
    return guarded(_main, argv)


def _main(argv: Sequence[str]) -> int:
    if any(argument in HELP for argument in argv):
        print(config_help.help_text("maxdiloco.train"))
        return 0
    begun = time.perf_counter()
    cfg = config.load(argv, os.environ)
    from maxdiloco.training import run

    return run(cfg, begun)


def cli() -> None:
    """The console entry `maxdiloco-train`."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    cli()
