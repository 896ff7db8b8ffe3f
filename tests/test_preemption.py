"""SIGTERM: one process, and two that must leave at the same step."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

from maxdiloco.preemption import Preemption

ROOT = pathlib.Path(__file__).parents[1]

TWO_PROCESSES = """
import os, signal, sys, time
import jax
rank, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_num_cpu_devices", 1)
jax.distributed.initialize(f"localhost:{port}", 2, rank)
from maxdiloco.preemption import Preemption
with Preemption() as preemption:
    for step in range(1, 100_000):
        time.sleep(0.01 if rank else 0.03)  # one runs ahead
        if rank == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        if preemption.requested(step):
            print("left at", step)
            break
"""

ONE_PROCESS = """
import os, signal
from maxdiloco.preemption import Preemption
with Preemption() as preemption:
    os.kill(os.getpid(), signal.SIGTERM)
    print("alive", preemption.requested(1), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("still alive")
"""


def test_sigterm_is_noted_and_nothing_before_it():
    with Preemption() as preemption:
        assert not preemption.requested(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.requested(2)
        assert preemption.requested(3)


def test_the_handler_before_comes_back():
    def mine(number, frame):
        raise AssertionError("called")

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with Preemption():
            assert signal.getsignal(signal.SIGTERM) is not mine
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


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
