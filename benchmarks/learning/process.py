"""One run of the trainer on some cores: python -m benchmarks.learning.process CPUS key=value ...

CPUS: their numbers with commas, or "" for all.
"""

import sys

from benchmarks import child


def main() -> None:
    cpus, *keys = sys.argv[1:]
    child.begin({int(cpu) for cpu in cpus.split(",") if cpu})

    from maxdiloco import train

    sys.argv[1:] = keys
    train.main()


if __name__ == "__main__":
    main()
