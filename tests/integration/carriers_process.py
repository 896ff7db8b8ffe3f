"""One of several processes that train with both carriers and compare the bits after every step.

    usage: carriers_process.py SLOTS REPLICAS MODE:WIRE[:OUTER_MEMORY] ...
"""

import os
import sys

import jax
import streaming

from maxdiloco.command_line import guarded
from maxdiloco.processes import distributed, run_links


@guarded
def main(argv):
    """0 when both carriers had the same bits in every case."""
    slots, replicas = int(argv[0]), int(argv[1])
    jax.config.update("jax_num_cpu_devices", 2 * slots // int(os.environ["JAX_NUM_PROCESSES"]))
    with distributed.processes(os.environ, timeout_s=200, peer_timeout_s=100):
        where = dict(port=0, interface="", fingerprint="test", timeout_s=100)
        with run_links.opened(**where) as links:
            for case in argv[2:]:
                compared(slots, replicas, links, *case.split(":"))
    return 0


def compared(slots, replicas, links, mode, wire, memory="device"):
    """Print what `take` has brought and whether it is the same, step by step."""
    found = {}
    for carrier in ("program", "host"):
        options = dict(exchange_carrier=carrier, links=links, num_replicas=replicas)
        algorithm = streaming.made(mode, wire, slots, outer_memory=memory, **options)
        first = algorithm.init(streaming.placed(algorithm.mesh), ())
        found[carrier] = list(map(streaming.digests, streaming.steps(algorithm, first)))
        algorithm.close()
    assert found["host"] == found["program"], (mode, wire)
    sent = sum(traffic.payload_sent for traffic in links.traffic().values())
    print(f"equal {mode} {wire} {memory}: {sent} bytes sent", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
