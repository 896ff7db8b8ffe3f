"""One of several processes that train the trainers of streaming.py, each until its NaN stops it.

Prints a JSON object for each mode: the error, and digests of what this process's devices hold
after every step. Ends with the last of the errors, as train.py would.
"""

import json
import os
import sys

import jax
import streaming

from maxdiloco.command_line import guarded
from maxdiloco.errors import NumericsError
from maxdiloco.processes import distributed


@guarded
def main(argv):
    """Every mode of streaming.STOPS; returns no exit code, since each ends in an error."""
    jax.config.update("jax_num_cpu_devices", 2)
    with distributed.processes(os.environ, timeout_s=200, peer_timeout_s=100):
        for mode in streaming.STOPS:
            error = stopped(mode)
        raise error


def stopped(mode):
    """The error that ends a run of this mode."""
    wire, bad, _, _ = streaming.STOPS[mode]
    algorithm = streaming.made(mode, wire, slots=2)
    first = algorithm.init(streaming.placed(algorithm.mesh), ())
    found = []
    try:
        found.extend(map(streaming.digests, streaming.poisoned(algorithm, first, bad)))
    except NumericsError as error:
        print(json.dumps({"mode": mode, "error": str(error), "digests": found}), flush=True)
        return error
    raise AssertionError(f"{mode} went on")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
