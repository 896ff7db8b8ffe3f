"""maxdiloco.train as a process that kills itself, for scripts/run_local_slices.sh --restart.

    usage: killed_process.py KILLS key=value ...

KILLS: a file with a line "process signal moment:t" for each kill that is still to come; a life of
the run has the first one. After SIGTERM the process continues when all processes know of it.
"""

import os
import pathlib
import signal
import sys
import time

from jax._src import distributed

from benchmarks.link import moments
from maxdiloco import train


def main():
    kills = pathlib.Path(sys.argv.pop(1))
    lines = kills.read_text().splitlines()  # before the processes meet, so by all before the kill
    if lines:
        process, name, moment = lines[0].split(" ", 2)
        if process == os.environ["JAX_PROCESS_ID"]:
            moment, _, t = moment.partition(":")
            number = signal.Signals[f"SIG{name}"]
            moments.act_at(moment, int(t), lambda: die(kills, lines[1:], number))
    train.main()


def die(kills, left, number):
    kills.write_text("".join(f"{line}\n" for line in left))
    os.kill(os.getpid(), number)
    # Lives on after SIGTERM. Each process publishes its step; they stop after the last of these.
    published = "PREEMPTION_CURRENT_COUNTER/"
    processes = int(os.environ["JAX_NUM_PROCESSES"])
    while len(distributed.global_state.client.key_value_dir_get(published)) < processes:
        time.sleep(0.01)


if __name__ == "__main__":
    main()
