"""What islands_storm.py says of the islands and of torchft: steps, pauses, commits, and starts."""

import json
import signal
import types

import pytest

from benchmarks.link import storm_figures, torchft_storm
from benchmarks.link.storm_figures import Fault
from benchmarks.link.torchft_elastic import Ledger


def test_steps_are_beside_those_of_the_median_step():
    """Three starts take 3, 1 and 3 steps of 1 s. It lives 2 + 0 + 4 s, of which it stands still 3;
    from the first step to the end are 12 s."""
    times = {"a": [[0.0, 1.0, 2.0], [6.0], [7.0, 8.0, 11.0]]}
    (steps,) = storm_figures.given(times, {"a": 3.0}, end=12.0)
    assert steps == (7, 6 - 3, 12)


FAULTS = [Fault("kill", "a", 10.0, 13.0), Fault("store", "", 20.0, 30.0)]


@pytest.mark.parametrize(
    ("box", "steps", "longest"),
    [
        ("a", [0, 4, 5], {"no fault": 4}),
        ("b", [0, 4, 10.5, 12], {"no fault": 4, "kill": 6.5}),  # begins before, is of the fault
        ("b", [14, 19], {"kill": 5}),  # the last one before
        ("b", [11, 21], {"kill": 10}),  # it goes on when the pause begins, not the next one
        ("b", [22, 31], {"store": 9}),
        ("a", [9, 15, 19], {}),  # its own
        ("a", [14, 21], {}),  # begins in what its own has left
        ("a", [21, 29], {"store": 8}),
    ],
)
def test_a_pause_belongs_to_the_fault_of_another_box(box, steps, longest):
    """Starts do not matter: torchft may end by itself, which is a pause of its box."""
    times = {box: [steps[:1], steps[1:]]}
    assert storm_figures.longest_pauses(times, FAULTS, begun=0.0) == longest
    assert storm_figures.longest_pauses(times, FAULTS, begun=23.0) == {}
    assert storm_figures.pauses_text({"store": 9, "kill": 6.54}) == "kill 6.5 s, store 9.0 s"


def test_steps_count_once_fragment_0_is_committed(tmp_path):
    """8 of 10 steps are sent and committed; fragment 1 counts none; 12 more and the 2: 14. Then a
    failure loses 11 and 2 are committed; a peer's state replaces 5, and 3 are committed."""
    ledger = Ledger(str(tmp_path / "events"))

    def exchange(before, after, commit, committed=True):
        ledger.steps += before
        ledger.sent = ledger.steps
        ledger.steps += after
        ledger.outcome(commit, committed, commit[1] % 2)

    exchange(8, 2, [1, 0])
    exchange(0, 0, [1, 1])
    exchange(12, 0, [1, 2])
    exchange(0, 0, [1, 3])
    exchange(10, 1, [1, 4], committed=False)
    exchange(2, 0, [2, 4])
    ledger.steps += 5
    ledger.load([[2, 4], [2, 5]])
    exchange(3, 0, [3, 6])
    found = torchft_storm._lines(tmp_path / "events")
    assert [event["steps"] for event in found if "commit" in event] == [8, 0, 14, 0, 2, 3]
    assert found[-2]["line"] == [[2, 4], [2, 5]] and ledger.line == [[2, 4], [2, 5], [3, 6]]


def test_commits_count_that_the_last_state_comes_from(tmp_path):
    """Box a goes on alone in quorum 2 for two commits, while b and c have three in quorum 3: a
    takes their state, and its 7 are in none. c was killed; its 4 were b's commit too."""
    commit = lambda q, s, n: {"commit": [q, s], "steps": n}  # noqa: E731
    line = {"line": [[1, 0], [3, 1], [3, 2], [3, 3]]}
    found = {
        "a": [[commit(1, 0, 10), commit(2, 1, 0), commit(2, 2, 7), line, commit(4, 4, 1)]],
        "b": [[commit(1, 0, 20), commit(3, 1, 0), commit(3, 2, 5), commit(3, 3, 0)]],
        "c": [[commit(1, 0, 30), commit(3, 1, 0), commit(3, 2, 4)], []],
    }
    assert torchft_storm.committed(found) == (10 + 20 + 30 + 5 + 4 + 1, 7)
    assert torchft_storm.committed({"a": [[]]}) == (0, 0)
    path = tmp_path / "events"
    path.write_text(json.dumps(line) + '\n{"commit": [1')
    assert torchft_storm._lines(path) == [line]
    assert torchft_storm._lines(tmp_path / "none") == []


class Process:
    """Ends when it is told to, or when it is killed."""

    def __init__(self, pid):
        self.pid, self.code = pid, None

    def poll(self):
        return self.code

    def wait(self):
        return self.code


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Two boxes' replicas on made-up hosts; what was launched: (host, command, process)."""
    found, now = [], [0.0]

    def launch(host, command, name, environ):
        assert environ["GLOO_SOCKET_IFNAME"] == "net0"
        (tmp_path / f"{name}.log").write_text("one\nRuntimeError: two\n")
        found.append((host, command, Process(len(found))))
        return found[-1][2]

    def kill(pid, number):
        assert found[pid][2].code is None
        found[pid][2].code = -number if number == signal.SIGKILL else None

    monkeypatch.setattr(torchft_storm.os, "killpg", kill)
    monkeypatch.setattr(torchft_storm, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    made = types.SimpleNamespace(addresses=[f"10.0.0.{i}" for i in range(6)])
    sleeps, job = {"a": "100", "b": "50"}, {"spec": {}}
    replicas = torchft_storm.Replicas(tmp_path / "python", job, sleeps, made, tmp_path, launch)
    return replicas, found, now


def test_torchft_is_on_hosts_of_its_own_and_started_again(launched):
    """Host 0 has the store, 1 and 2 the islands, 3 the lighthouse. A replica that is killed comes
    back after DOWN_S; one that ends by itself, with 0 too, does so as well and is reported."""
    replicas, found, now = launched
    assert [host for host, *_ in found] == [3, 4, 5] and not replicas.trains()
    job = json.loads(found[2][1][-1])
    assert (job["address"], job["lighthouse"]) == ("10.0.0.5", "http://10.0.0.3:29510")
    assert (job["replica"], job["sleep_ms"]) == (1, 50.0)
    replicas.signal("a", signal.SIGKILL)
    replicas.signal("a", signal.SIGCONT)
    found[2][2].code = 0
    now[0] = torchft_storm.DOWN_S - 0.1
    replicas.tend()
    assert len(found) == 3 and replicas.ended == ["b with 0: RuntimeError: two"]
    now[0] = torchft_storm.DOWN_S
    replicas.tend()
    assert [host for host, *_ in found[3:]] == [4]
    now[0] += torchft_storm.DOWN_S
    replicas.tend()
    assert [host for host, *_ in found[3:]] == [4, 5] and len(replicas.ended) == 1
    assert [start.trace.name for start in replicas.starts["b"]] == [
        "torchft_b.0.steps", "torchft_b.1.steps",
    ]  # fmt: skip
    replicas.close()
    assert all(process.code is not None for *_, process in found)
