"""Processes that read text: who stops them, and what is said when one is gone."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from maxdiloco.data import workers
from maxdiloco.errors import LostPeerError


def test_a_process_that_reads_leaves_signals_to_the_trainer_and_is_missed_when_killed():
    """Ctrl-C and a cluster's SIGTERM reach all processes; the trainer still wants its batches."""
    reader, close = workers.open_reader(range(2000), 1)
    try:
        assert [next(reader) for _ in range(3)] == [0, 1, 2]
        (child,) = multiprocessing.active_children()
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(child.pid, number)
        # Far more than were read ahead.
        assert [next(reader) for _ in range(997)] == list(range(3, 1000))
        os.kill(child.pid, signal.SIGKILL)
        told = r"^a process that reads text is gone \(grain_worker_count=1\).*Give the machine more"
        with pytest.raises(LostPeerError, match=told):
            list(reader)
    finally:
        close()


def test_an_error_of_the_source_is_no_lost_process():
    """It comes as it is, here and from another process."""
    for count in (0, 1):
        reader, close = workers.open_reader(Failing(), count)
        try:
            with pytest.raises(RuntimeError, match="of its own"):
                next(reader)
        finally:
            close()


class Failing:
    """A source that cannot be read."""

    def __len__(self):
        return 1

    def __getitem__(self, number):
        raise RuntimeError("of its own")


KILLED = """
    import multiprocessing, os, signal
    from maxdiloco.data import workers
    if __name__ == "__main__":
        reader, close = workers.open_reader(range(10**6), 1)
        next(reader)
        print(multiprocessing.active_children()[0].pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def runs(process):
    """Whether a process is there; one that only nobody has asked about is not."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_kill_9_of_the_trainer_leaves_no_process_behind(tmp_path):
    """They would wait for ever for someone to take their batches."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(KILLED))
    # Not through a pipe: a process left behind would hold it open.
    with open(tmp_path / "out", "w") as out:
        done = subprocess.run([sys.executable, program], stdout=out, stderr=out, check=False)
    text = (tmp_path / "out").read_text()
    assert done.returncode == -signal.SIGKILL, text
    for _ in range(600):
        if not runs(int(text)):
            return
        time.sleep(0.1)
    os.kill(int(text), signal.SIGKILL)
    pytest.fail("a process that reads is still there a minute later")
