"""Rows of metrics come together in process 0 while every process continues. No JAX, no socket.

# R replicas
"""

import numpy as np
import pytest

from maxdiloco.errors import LostPeerError
from maxdiloco.metrics.rows import RowCollector

REPLICAS = {0: [0, 3], 1: [1], 2: [2, 4], 3: []}  # process 3 shares a slice with another


class Messenger:
    """Of a process. messages: of all, under way; late: processes of which none has arrived."""

    timeout_s = 60.0

    def __init__(self, messages, late, rank):
        self._messages, self._late, self._rank = messages, late, rank

    def put(self, peer, key, buffers, channel):
        assert (peer, self._rank, key) not in self._messages
        self._messages[peer, self._rank, key] = bytearray(b"".join(buffers))

    def has_message(self, peer, key):
        return (self._rank, peer, key) in self._messages and peer not in self._late

    def get(self, peer, key, deadline):
        if (self._rank, peer, key) not in self._messages:
            raise LostPeerError(f"process {peer} is gone")
        return self._messages.pop((self._rank, peer, key))


def metrics(step, replicas):
    """Of a step and some replicas: other numbers for each, and names of several dtypes."""
    where = np.array(replicas)
    return {
        "loss": (1 / (step + where)).astype(np.float32),
        "count": (100 * step + where).astype(np.int32),
        "half": where.astype(np.float16) / 2,
    }


@pytest.fixture
def run():
    """(rows of each process, messages, who is late, what process 0 has written)."""
    messages, late, written = {}, set(), []
    write = lambda *row: written.append(row)  # noqa: E731
    rows = [
        RowCollector(p, REPLICAS, messenger=Messenger(messages, late, p), write=write)
        for p in REPLICAS
    ]
    return rows, messages, late, written


def add(rows, step, *processes):
    for p in processes:
        rows[p].add(step, metrics(step, REPLICAS[p]), {"perf/step_time": 10 * step + p})


def test_a_row_has_the_bits_of_all_replicas_in_their_order(run):
    rows, messages, late, written = run
    add(rows, 7, 0, 1, 2, 3)
    rows[0].write_complete()
    ((step, found, values),) = written
    assert (step, values) == (7, {"perf/step_time": 70})
    wanted = metrics(7, range(5))
    assert found.keys() == wanted.keys()
    for name, values_R in wanted.items():
        assert found[name].dtype == values_R.dtype
        assert found[name].tobytes() == values_R.tobytes()
    assert messages == {}


def test_process_0_does_not_wait_and_writes_in_order_of_steps(run):
    """Row 4 has no metrics and does not wait for a process, but still for row 2."""
    rows, messages, late, written = run
    late.add(2)
    for step in (1, 2, 3):
        add(rows, step, *((0, 1, 2) if step < 3 else (0, 1)))
        rows[0].write_complete()
    rows[0].add(4, None, {"eval/loss": 1.5})
    rows[0].write_complete()
    assert written == []
    late.clear()
    rows[0].write_complete()
    assert [step for step, *_ in written] == [1, 2]
    add(rows, 3, 2)
    rows[0].write_complete()
    assert [step for step, *_ in written] == [1, 2, 3, 4]
    assert written[-1][1:] == (None, {"eval/loss": 1.5})
    # At the end the rows that are missing are waited for, here until a process is gone.
    add(rows, 5, 0, 1, 2)
    add(rows, 6, 0, 1)
    late.add(1)
    with pytest.raises(LostPeerError, match="process 2 is gone"):
        rows[0].write_all()
    assert [step for step, *_ in written] == [1, 2, 3, 4, 5]


def test_a_process_without_metrics_or_replica_sends_nothing(run):
    rows, messages, _, _ = run
    rows[1].add(1, None, {"eval/loss": 2.0})
    rows[3].add(1, metrics(1, []), {})
    assert messages == {}
    rows[1].add(2, metrics(2, [1]), {})  # the control
    assert list(messages) == [(0, 1, ("row", 2))]
