"""One run of the trainer on some cores: python -m benchmarks.learning.process CPUS key=value ...

CPUS: their numbers with commas, or "" for all.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2): the run ends with the benchmark


def main() -> None:
    cpus, *keys = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if cpus:
        os.sched_setaffinity(0, set(map(int, cpus.split(","))))  # before XLA counts its threads

    from maxdiloco import train

    sys.argv[1:] = keys
    train.cli()


if __name__ == "__main__":
    main()
