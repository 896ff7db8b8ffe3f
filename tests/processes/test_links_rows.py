"""Rows of metrics over real links: nobody waits at a log step, and a lost process is named."""

import link_tools
import numpy as np
import pytest
from link_tools import later, together, until

from maxdiloco.errors import LostPeerError
from maxdiloco.metrics.rows import Rows

REPLICAS = {0: [0], 1: [1], 2: [2]}
STAR = {0: {"rows": [1, 2]}, 1: {"rows": [0]}, 2: {"rows": [0]}}  # as run_links has it


def joined(network, **options):
    """The rows of three processes without bulk, and the losses of each row that 0 has written."""
    ranks = network.links(3, bulk=(), each=STAR, **options)
    together(*(each.meet for each in ranks))
    written = []

    def write(step, metrics, values):
        written.append((step, metrics["loss"].tolist()))

    return [Rows(p, REPLICAS, links=ranks[p], write=write) for p in REPLICAS], ranks, written


def add(rows, step, *processes):
    for p in processes:
        rows[p].add(step, {"loss": np.float32([step + p / 4])}, {})


def test_a_late_process_holds_up_no_step_of_process_0_and_no_row_is_lost(network):
    rows, _, written = joined(network)
    for step in range(1, 50):
        add(rows, step, 0, 1)
        rows[0].write_complete()
    assert written == []  # process 2 has sent nothing: no step has waited for it
    for step in range(1, 50):
        add(rows, step, 2)
    rows[0].write_all()
    assert written == [(step, [step, step + 0.25, step + 0.5]) for step in range(1, 50)]


@pytest.mark.parametrize(
    "end, line",
    [("silent", "process [12] at .* silent"), ("left", "process 2 at .* has ended and never sent")],
)
def test_a_lost_process_ends_the_wait_for_its_row_with_its_name(network, end, line):
    """Silent for longer than the timeout, or ended without it. Control: the row before is
    written."""
    rows, ranks, written = joined(network, proxies=(0,), timeout_s=2)
    add(rows, 1, 0, 1, 2)
    until(lambda: rows[0].write_complete() or written)
    add(rows, 2, 0, 1)
    waiting = later(rows[0].write_all)
    leave = network.proxies[0].stop if end == "silent" else lambda: ranks[2].close(1.0)
    leaving = later(leave)
    with pytest.raises(LostPeerError, match=line):
        waiting.result(link_tools.WAIT_S)
    leaving.result(link_tools.WAIT_S)
    assert written == [(1, [1.0, 1.25, 1.5])]
