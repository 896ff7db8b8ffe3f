"""Signals that stop a run: one process, and two that must leave at the same step."""

import os
import pathlib
import queue
import re
import signal
import subprocess
import sys
import time

import pytest

from maxdiloco.processes import preemption as preemption_lib
from maxdiloco.processes.preemption import Preemption

ROOT = pathlib.Path(__file__).parents[2]

AT_ONE_STEP = """
import os, signal, time
from maxdiloco.processes import distributed
from maxdiloco.processes.preemption import Preemption
with distributed.processes(os.environ, timeout_s=60, peer_timeout_s=60) as job:
    with Preemption(print) as preemption:
        for step in range(1, 100_000):
            time.sleep(0.01 if job.process_id else 0.03)  # one runs ahead
            if job.process_id == 1 and step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            if preemption.requested(step):
                print("left at", step)
                break
"""

# Both take note of the first SIGTERM; then each is in one native call of many minutes.
WAITING = """
import hashlib, os, sys
from maxdiloco.processes import distributed
from maxdiloco.processes.preemption import Preemption
with distributed.processes(os.environ, timeout_s=60, peer_timeout_s=60), Preemption(print) as it:
    print("begun", flush=True)
    step = 0
    while not it.requested(step := step + 1):
        pass
    print("noted", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""

WAIT_S = 60  # far above what a thread takes to be woken


def wait_until(holds):
    limit = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.001)


def test_sigterm_is_noted_and_nothing_before_it():
    with Preemption(print) as preemption:
        assert not preemption.requested(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.requested(2)
        assert preemption.requested(3)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_the_handler_before_comes_back(number):
    def mine(number, frame):
        raise AssertionError("called")

    before = signal.signal(number, mine)
    try:
        with Preemption(print):
            assert signal.getsignal(number) is not mine
        assert signal.getsignal(number) is mine
    finally:
        signal.signal(number, before)


def test_a_closed_terminal_counts_as_sigterm_and_under_nohup_for_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup too
    try:
        with Preemption(print) as preemption:
            os.kill(os.getpid(), signal.SIGHUP)
            assert preemption.requested(1)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with Preemption(print) as preemption:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not preemption.requested(1)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ctrl_c_is_told_at_once_and_noted():
    told = queue.Queue()
    with Preemption(told.put) as preemption:
        assert not preemption.requested(1)
        os.kill(os.getpid(), signal.SIGINT)
        line = told.get(timeout=WAIT_S)
        assert line == "Ctrl-C: stopping after this step; press it again to quit now."
        wait_until(lambda: preemption.requested(2))
        assert preemption.by_ctrl_c


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_arrives_twice_is_one_and_a_later_one_ends_the_process(monkeypatch, number):
    """A launcher passes on the signal that the terminal has sent to the process already, and may
    send one twice. The next one is meant, whatever the process waits for."""
    ends = queue.Queue()
    monkeypatch.setattr(preemption_lib, "quit_now", lambda *end: ends.put(end))

    def hit_twice():
        with Preemption(lambda line: None) as preemption:
            os.kill(os.getpid(), number)
            wait_until(lambda: preemption.requested(1))
            os.kill(os.getpid(), number)

    monkeypatch.setattr(preemption_lib, "SAME_PRESS_S", 1000.0)
    hit_twice()
    assert ends.empty()  # the context has ended the thread that hears
    monkeypatch.setattr(preemption_lib, "SAME_PRESS_S", 0.0)
    hit_twice()
    end = ends.get(timeout=WAIT_S)
    if number == signal.SIGTERM:
        assert end[0].startswith("SIGTERM again: ended at once.") and end[1] == 143


def test_ctrl_c_after_sigterm_does_not_change_why_the_run_stops():
    told = queue.Queue()
    with Preemption(told.put) as preemption:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        told.get(timeout=WAIT_S)
    assert preemption.requested(1)
    assert not preemption.by_ctrl_c


@pytest.fixture
def two_processes(free_port):
    """Starts a program twice, as the processes of a run; what is left is killed at the end."""
    environ = os.environ | {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port}"}
    environ |= {"JAX_NUM_PROCESSES": "2", "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    runs = []

    def start(program):
        for rank in ("0", "1"):
            runs.append(
                subprocess.Popen(
                    [sys.executable, "-c", program],
                    env=environ | {"JAX_PROCESS_ID": rank},
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return runs

    yield start
    for run in runs:
        run.kill()


def test_processes_leave_at_one_step(two_processes):
    """SIGTERM in one of two; the faster one has passed steps that the slower one has not."""
    runs = two_processes(AT_ONE_STEP)
    outputs = [run.communicate(timeout=120) for run in runs]
    steps = [re.fullmatch(r"left at (\d+)\n", out).group(1) for out, _ in outputs]
    assert steps[0] == steps[1]
    assert int(steps[0]) > 5
    assert [run.returncode for run in runs] == [0, 0]


def test_a_second_sigterm_ends_one_of_several_that_waits_for_ever(two_processes):
    """JAX's handler takes note of each and ends nothing: SIGKILL was the only way out."""
    runs = two_processes(WAITING)
    assert [run.stdout.readline() for run in runs] == ["begun\n"] * 2
    runs[1].send_signal(signal.SIGTERM)
    assert [run.stdout.readline() for run in runs] == ["noted\n"] * 2
    time.sleep(preemption_lib.SAME_PRESS_S)
    runs[1].send_signal(signal.SIGTERM)
    _, errors = runs[1].communicate(timeout=20)
    assert runs[1].returncode == 143
    assert errors.splitlines()[-1] == preemption_lib.SECOND_SIGTERM
    assert runs[0].wait(timeout=20) == 5
