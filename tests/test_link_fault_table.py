"""The benchmark of faults on the link: its moments, its judgement, and how it cuts a link.

Whole runs that meet faults, without network namespaces, are in integration/test_link_faults.py.
"""

import contextlib
import os
import subprocess
import sys

import pytest

from benchmarks import link_faults
from benchmarks.link import faults, hosts, moments
from benchmarks.link.faults import End, Fault
from maxdiloco.errors import ConfigError
from maxdiloco.flags import base_yml

GONE = "LostPeerError: process 1 on host-b is gone."


def end(code, line="", after_s=1.0):
    return End(code, after_s, 0.1, line)


def test_the_keys_are_the_trainers():
    keys = set(base_yml.declared(faults.ROOT / "configs" / "base.yml"))
    assert set(link_faults.KEYS) <= keys
    assert not set(link_faults.OWN) & keys


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


@pytest.mark.parametrize(
    "argument, words",
    [
        ("fault=kill", "fault is no key of the trainer"),
        ("moments=lunch", "use all, or some of: inner steps, in flight"),
        ("hosts=1", "hosts=1 is not a number of 2 or more"),
    ],
)
def test_what_is_not_offered_is_refused_with_one_line(argument, words, capsys):
    assert link_faults.main([argument]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ConfigError: ") and error.count("\n") == 1
    assert words in error


RECEIVE = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as place:
    place.bind(("0.0.0.0", 5000))
    print("up", flush=True)
    while True:
        print(place.recv(100).decode(), flush=True)
"""
SEND = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as place:
    place.sendto(sys.argv[2].encode(), (sys.argv[1], 5000))
"""


@contextlib.contextmanager
def two_hosts():
    """Skips where this machine cannot make hosts."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces are made by root")
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(hosts.hosts(2, hosts.Link()))
        except ConfigError as error:
            pytest.skip(f"no hosts on this machine: {error}")
        yield made


@pytest.mark.xdist_group("hosts")  # as in test_thin_link_hosts.py
def test_a_cut_drops_only_its_direction_until_it_is_mended():
    """What arrives is what was sent in a direction that was not cut, in this order."""
    fault = Fault("cut", victim=1, receives=False)
    with two_hosts() as made:
        there = [
            made.start(i, [sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE, text=True)
            for i in range(2)
        ]
        assert [process.stdout.readline() for process in there] == ["up\n"] * 2

        def send(source, words):
            command = [sys.executable, "-c", SEND, made.addresses[1 - source], words]
            assert made.start(source, command).wait(60) == 0

        send(1, "before")
        faults._cut(fault, made, mend=False)
        send(1, "lost")
        send(0, "the other way")
        faults._cut(fault, made, mend=True)
        send(1, "after")
        assert [there[0].stdout.readline() for _ in range(2)] == ["before\n", "after\n"]
        assert there[1].stdout.readline() == "the other way\n"
