"""One process of a benchmarked run: Run maxdiloco.train with a clock around every inner step.

    python -m benchmarks.link.process TRACE CPU FAST_MS key=value ...

TRACE: file that gets a line for each inner step, time.monotonic() at its beginning [s]. CPU: the
core it runs on; -1: any. FAST_MS: a fast device instead of the CPU: after every inner step the
process waits until its results are there and then sleeps for this time [ms]; 0: no such device.
Exchanges inside the step's own program are over by then, so they are not hidden.
"""

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from benchmarks import child

INNER = ("inner", "data parallel")  # how programs that hold an inner step are called


def trace_steps(program: type, trace: TextIO, fast_s: float, wait: Callable[[Any], Any]) -> None:
    """Make every call of an inner program write its time, and sleep after its results are there.

    program: maxdiloco.parallel.program.Program. wait: jax.block_until_ready.
    """
    call = program.__call__

    def traced(self, *args: Any) -> Any:
        if not self.name.startswith(INNER):
            return call(self, *args)
        trace.write(f"{time.monotonic():.6f}\n")
        results = call(self, *args)
        if fast_s:
            wait(results)
            time.sleep(fast_s)
        return results

    program.__call__ = traced


def main() -> None:
    trace, cpu, fast_ms, *keys = sys.argv[1:]
    child.begin({int(cpu)} - {-1})

    import jax

    from maxdiloco import train
    from maxdiloco.parallel.program import Program

    steps = open(trace, "w", buffering=1, encoding="utf-8")  # open as long as the process lives
    trace_steps(Program, steps, float(fast_ms) / 1000, jax.block_until_ready)
    sys.argv[1:] = keys
    train.main()


if __name__ == "__main__":
    main()
