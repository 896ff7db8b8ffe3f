"""One process of a run that meets a fault: maxdiloco.train that stands still at a moment.

    python -m benchmarks.link.fault_process FOLDER VICTIM MOMENT T key=value ...

Process VICTIM touches FOLDER/held at the MOMENT (see moments.py) of step T and stands there until
FOLDER/go exists; -1: none does. Every process writes the times of its inner steps
(time.monotonic() [s]) to FOLDER/steps.<process>, and touches FOLDER/take.<process> before it waits
for the data that was sent after step T.
"""

import os
import pathlib
import sys
import time

from benchmarks import child
from benchmarks.link import moments


def main() -> None:
    folder, victim, moment, t, *keys = sys.argv[1:]
    folder, process = pathlib.Path(folder), os.environ["JAX_PROCESS_ID"]
    child.begin(())

    from maxdiloco import train
    from maxdiloco.engine.diloco import DiLoCo

    steps = (folder / f"steps.{process}").open("w", buffering=1)
    if process == victim:
        held, go = folder / "held", folder / "go"
        moments.act_at(moment, int(t), lambda: moments.wait_for_file(held, go))
    moments.act_at_receive(int(t), (folder / f"take.{process}").touch)
    moments.before(
        DiLoCo, "step", lambda *_: True, lambda: steps.write(f"{time.monotonic():.6f}\n")
    )
    sys.argv[1:] = keys
    train.main()


if __name__ == "__main__":
    main()
