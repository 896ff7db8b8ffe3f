"""One of several processes that train the trainers of streaming.py.

usage: streaming_process.py SLOTS REPLICAS [MODE:WIRE[:OUTER_MEMORY[:COLLECTIVE]] ...]

Each case with both transports, whose bits are compared after every step. Without one, every mode
until its NaN stops it: a JSON object for each has the error, and digests of what this process's
devices hold after every step; the last of the errors ends the process, as it would end train.py.
"""

import json
import os
import sys

import jax
import streaming

from maxdiloco.cluster import start
from maxdiloco.command_line import guarded
from maxdiloco.errors import NumericsError


@guarded
def main(argv):
    """0 when both transports had the same bits in every case."""
    slots, replicas, *cases = argv
    jax.config.update("jax_num_cpu_devices", 2 * int(slots) // int(os.environ["JAX_NUM_PROCESSES"]))
    with start.join_processes(os.environ, timeout_s=200, peer_timeout_s=100) as cluster:
        if not cases:
            raise [stopped(mode) for mode in streaming.STOPS][-1]
        cluster.open_bulk()
        for case in cases:
            compared(int(slots), int(replicas), cluster.messenger, *case.split(":"))
    return 0


def compared(slots, replicas, messenger, mode, wire, memory="device", collective="all_gather"):
    """Print what `take` has brought and whether it is the same, step by step."""
    found = {}
    for carrier in ("xla", "host"):
        options = dict(transport=carrier, messenger=messenger, num_replicas=replicas)
        options |= dict(outer_memory=memory, collective=collective)
        algorithm = streaming.made(mode, wire, slots, **options)
        first, found[carrier] = algorithm.init(streaming.placed(algorithm.mesh), ()), []
        for state in streaming.steps(algorithm, first):
            found[carrier].append(streaming.digests(state))
        algorithm.checkpoint(state)  # waits for exchanges under way: the next case has their keys
        algorithm.close()
    assert found["host"] == found["xla"], (mode, wire)
    count = messenger.received_bytes
    print(f"equal {mode} {wire} {memory} {collective}: {count} bytes received", flush=True)


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
