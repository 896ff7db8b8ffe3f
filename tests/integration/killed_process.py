"""maxdiloco.train as a process that kills itself, for scripts/run_local_slices.sh --restart.

    usage: killed_process.py KILLS key=value ...

KILLS: a file with a line "process moment:t" for each kill that is still to come; a life of the run
has the first one.
"""

import os
import pathlib
import signal
import sys

from benchmarks.link import moments
from maxdiloco import train


def main():
    kills = pathlib.Path(sys.argv.pop(1))
    lines = kills.read_text().splitlines()  # before the processes meet, so by all before the kill
    if lines:
        process, _, moment = lines[0].partition(" ")
        if process == os.environ["JAX_PROCESS_ID"]:
            moment, _, t = moment.partition(":")
            moments.act_at(moment, int(t), lambda: die(kills, lines[1:]))
    train.cli()


def die(kills, left):
    kills.write_text("".join(f"{line}\n" for line in left))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
