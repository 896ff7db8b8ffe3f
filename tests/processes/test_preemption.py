"""Signals that stop a run: one process, and two that must leave at the same step."""

import os
import pathlib
import queue
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from maxdiloco.processes import preemption as preemption_lib
from maxdiloco.processes.preemption import Preemption

ROOT = pathlib.Path(__file__).parents[2]

TWO_PROCESSES = """
import os, signal, sys, time
import jax
rank, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_num_cpu_devices", 1)
jax.distributed.initialize(f"localhost:{port}", 2, rank)
from maxdiloco.processes.preemption import Preemption
with Preemption(print) as preemption:
    for step in range(1, 100_000):
        time.sleep(0.01 if rank else 0.03)  # one runs ahead
        if rank == 1 and step == 5:
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

ONE_PROCESS = """
import os, signal
from maxdiloco.processes.preemption import Preemption
with Preemption(print) as preemption:
    os.kill(os.getpid(), signal.SIGTERM)
    print("alive", preemption.requested(1), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("still alive")
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


def test_a_press_that_arrives_twice_is_one_and_another_press_quits(monkeypatch):
    """A launcher passes on the signal that the terminal has sent to the process already."""
    told, quits = queue.Queue(), queue.Queue()
    monkeypatch.setattr(preemption_lib, "quit_now", lambda: quits.put(True))
    monkeypatch.setattr(preemption_lib, "SAME_PRESS_S", 1000.0)
    with Preemption(told.put) as preemption:
        os.kill(os.getpid(), signal.SIGINT)
        told.get(timeout=WAIT_S)
        wait_until(lambda: preemption.requested(1))
        os.kill(os.getpid(), signal.SIGINT)
    assert quits.empty()  # the context has ended the thread that hears
    monkeypatch.setattr(preemption_lib, "SAME_PRESS_S", 0.0)
    with Preemption(told.put) as preemption:
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: preemption.requested(1))
        os.kill(os.getpid(), signal.SIGINT)
        quits.get(timeout=WAIT_S)


def test_a_second_sigterm_ends_a_process_whatever_it_waits_for(monkeypatch):
    """A launcher may send one twice; the next one is meant. Python's handler would only take note,
    and after the native call."""
    ends = queue.Queue()
    monkeypatch.setattr(preemption_lib, "quit_now", lambda *end: ends.put(end))
    with Preemption(print) as preemption:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # within SAME_PRESS_S
        assert preemption.requested(1)
    assert ends.empty()  # the context has ended the thread that hears
    monkeypatch.setattr(preemption_lib, "SAME_PRESS_S", 0.0)
    with Preemption(print):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        line, code = ends.get(timeout=WAIT_S)
    assert code == 143
    assert line.startswith("SIGTERM again: ended at once.")


def test_ctrl_c_after_sigterm_does_not_change_why_the_run_stops():
    told = queue.Queue()
    with Preemption(told.put) as preemption:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        told.get(timeout=WAIT_S)
    assert preemption.requested(1)
    assert not preemption.by_ctrl_c


def test_sigterm_kills_again_afterwards():
    done = subprocess.run(
        [sys.executable, "-c", ONE_PROCESS], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == "alive True\n"
    assert done.returncode == -signal.SIGTERM


def test_processes_leave_at_one_step():
    """SIGTERM in one of two; the faster one has passed steps that the slower one has not."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(rank), port],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [run.communicate(timeout=120) for run in runs]
    finally:
        for run in runs:
            run.kill()
    steps = [re.fullmatch(r"left at (\d+)\n", out).group(1) for out, _ in outputs]
    assert steps[0] == steps[1]
    assert int(steps[0]) > 5
    assert [run.returncode for run in runs] == [0, 0]


def test_a_second_sigterm_ends_one_of_several_that_waits_for_ever(free_port):
    """JAX's handler takes note of each and ends nothing: SIGKILL was the only way out."""
    together = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port}", "JAX_NUM_PROCESSES": "2"}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", WAITING],
            env=os.environ | together | {"JAX_PROCESS_ID": str(rank), "JAX_PLATFORMS": "cpu"},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert [run.stdout.readline() for run in runs] == ["begun\n"] * 2
        runs[1].send_signal(signal.SIGTERM)
        assert [run.stdout.readline() for run in runs] == ["noted\n"] * 2
        time.sleep(preemption_lib.SAME_PRESS_S)
        runs[1].send_signal(signal.SIGTERM)
        _, errors = runs[1].communicate(timeout=20)
        assert runs[1].returncode == 143
        assert errors.splitlines()[-1] == preemption_lib.SECOND_SIGTERM
        assert runs[0].wait(timeout=20) == 5
    finally:
        for run in runs:
            run.kill()
