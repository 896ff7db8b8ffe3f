"""The benchmark of faults on the link: its moments and its judgement.

Whole runs that meet faults, without network namespaces, are in integration/test_link_faults.py; how
a link is cut is in test_thin_link_hosts.py.
"""

import pytest

from benchmarks import link_faults
from benchmarks.link import moments
from benchmarks.link.faults import End, Fault

GONE = "LostPeerError: process 1 on host-b is gone."


def end(code, line="", after_s=1.0):
    return End(code, after_s, 0.1, line)


def test_the_moments_are_what_they_are_called():
    """By the schedule of the keys: what is between send and apply before a step, and what a step
    sends and saves."""
    keys = link_faults.KEYS
    H, P = keys["diloco_sync_period"], keys["num_diloco_fragments"]
    sends = {t for t in range(1, keys["steps"]) for p in range(P) if (t - p * H // P) % H == 0}
    tau, at = keys["num_communication_overlapping_steps"], link_faults.MOMENTS
    assert tuple(at) == moments.MOMENTS
    assert not {at["inner steps"] - k for k in range(1, tau + 1)} & sends
    assert {at["in flight"] - k for k in range(1, tau + 1)} & sends
    assert at["at apply"] in sends
    assert at["checkpoint"] % keys["checkpoint_period"] == 0


def test_a_fault_shorter_than_the_timeout_must_end_no_process():
    short, kill = Fault("stop", seconds=5.0), Fault("kill")
    assert link_faults._wrong(short, [end(0), end(0)], 8) == []
    (problem,) = link_faults._wrong(short, [end(5, GONE), end(0)], 8)
    assert problem == f"process 0 ended with 5: {GONE}"
    assert link_faults._wrong(kill, [end(5, GONE), end(-9)], 8) == []


@pytest.mark.parametrize(
    "survivor", [end(0), end(-6, "Aborted"), end(5, "Traceback"), end(1, GONE)]
)
def test_a_lasting_fault_must_end_the_others_with_5_and_a_line(survivor):
    (problem,) = link_faults._wrong(Fault("kill"), [survivor, end(-9)], 8)
    assert problem.startswith(f"process 0 ended with {survivor.code}")


def test_the_table_has_times_codes_and_what_was_equal():
    ends = [end(5, GONE, after_s=1.25), end(-9, after_s=0.1)]
    cases = [
        link_faults.Case("kill", "in flight", ends, True, []),
        link_faults.Case("cut", "at apply", [end(0), end(0)], False, []),
    ]
    rows = link_faults.table(cases).splitlines()[2:]
    assert rows == [
        "| kill | in flight | 5 after 1.2 s | -9 after 0.1 s | yes, restarted |",
        "| cut | at apply | goes on after 0.1 s | goes on after 0.1 s | NO |",
    ]
