"""Batches read ahead: their order, their errors, what close ends, who stops the processes."""

import _multiprocessing
import errno
import functools
import multiprocessing
import multiprocessing.synchronize  # before its SemLock is replaced
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from maxdiloco.data.read_ahead import read_ahead
from maxdiloco.errors import ConfigError, DataError, LostPeerError


def failing(number):
    if number == 1:
        raise DataError("dataset_path=x is gone")
    return number


def test_batches_come_in_order_and_end_and_two_are_read_ahead():
    """No more, which would fill the memory. A reader at its end stays there; one with nothing to
    read is at its end."""
    for count in (7, 0):
        batches = read_ahead(abs, count)
        assert list(batches) == list(range(count))
        assert list(batches) == []
        batches.close()
    read, asked = [], threading.Semaphore(0)

    def remember(number):
        read.append(number)
        asked.release()
        return number

    batches = read_ahead(remember, 10)
    for taken in range(3):
        assert next(batches) == taken
        while len(read) < taken + 3:
            assert asked.acquire(timeout=60)
        time.sleep(0.05)  # for a third, were there one
        assert read == list(range(taken + 3))
    batches.close()


def test_processes_without_shared_memory_are_refused(monkeypatch):
    """As with a /dev/shm that is mounted read-only."""

    def refused(*arguments):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(_multiprocessing, "SemLock", refused)
    batches = read_ahead(abs, 3, 1, setting="grain_worker_count=1")
    with pytest.raises(ConfigError, match="^grain_worker_count=1: /dev/shm "):
        next(batches)
    assert list(read_ahead(abs, 3)) == [0, 1, 2], "the control: a thread needs none"


@pytest.mark.parametrize("worker_count", [0, 1])
def test_an_error_is_raised_where_its_batch_would_come(worker_count):
    """As it is: not before, not lost in a thread, and not taken for a lost process."""
    batches = read_ahead(failing, 3, worker_count)
    assert next(batches) == 0
    with pytest.raises(DataError) as raised:
        next(batches)
    assert str(raised.value) == "dataset_path=x is gone"
    batches.close()
    assert multiprocessing.active_children() == []


def test_close_waits_for_the_read_under_way():
    """A file is closed before the run continues; while open there is one thread."""
    begun, ended = threading.Event(), []

    def threads():
        return sum("read-ahead" in thread.name for thread in threading.enumerate())

    def slow(number):
        if number == 1:
            begun.set()
            time.sleep(0.2)
            ended.append(number)
        return number

    batches = read_ahead(slow, 9)
    assert next(batches) == 0 and begun.wait(60)
    assert threads() == 1
    batches.close()
    assert (ended, threads()) == ([1], 0)


def blocked_signals(process):
    with open(f"/proc/{process}/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    bits = int(fields["SigBlk"], 16)
    return {number for number in range(1, 65) if bits >> (number - 1) & 1}


def test_a_reader_ignores_signals_and_a_killed_one_is_reported():
    """Ctrl-C and a cluster's SIGTERM reach all processes; the trainer still wants its batches.
    A process that is killed with half a batch in a pipe would be waited for without an end."""
    large = functools.partial(np.full, (1, 131072))  # 1 MiB: more than a pipe holds
    batches = read_ahead(large, 200, 1, setting="processes=1")
    try:
        assert [next(batches)[0, 0] for _ in range(3)] == [0, 1, 2]
        (process,) = multiprocessing.active_children()
        # From its start on: it has to import Grain before it can ignore Ctrl-C.
        assert signal.SIGINT in blocked_signals(process.pid)
        assert signal.SIGINT not in blocked_signals(os.getpid())
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(process.pid, number)
        # Far more than were read ahead.
        assert [next(batches)[0, 0] for _ in range(97)] == list(range(3, 100))
        time.sleep(0.5)  # until it has read ahead, and only waits for its batches to be taken
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(LostPeerError, match="^processes=1: "):
            list(batches)
    finally:
        batches.close()


KILLED = """
    import multiprocessing, os, signal
    from multiprocessing import resource_tracker
    import numpy as np
    from maxdiloco.data.read_ahead import read_ahead
    if __name__ == "__main__":
        batches = read_ahead(np.arange, 10**4, 1)
        next(batches)
        reader, tracker = multiprocessing.active_children()[0], resource_tracker._resource_tracker
        for process in reader.pid, tracker._pid:
            print(os.path.samefile(f"/proc/{process}/fd/2", "/proc/self/fd/2"), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_kill_9_of_the_trainer_leaves_no_process_and_no_output(tmp_path):
    """A reader would wait for ever for someone to take its batches; multiprocessing's tracker would
    warn of the shared memory that it removes. The pipe ends with the last one that holds it."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(KILLED))
    out = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    done = subprocess.run([sys.executable, program], check=False, **out)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "True\nTrue\n")
