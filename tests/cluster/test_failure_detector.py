"""Losses and ends of peers, as the failure detector handles them."""

import contextlib
import json
import queue
import signal
import socket
import threading
import time

import pytest
from messenger_tools import WAIT_S

from maxdiloco import output
from maxdiloco.cluster import failure_detector
from maxdiloco.cluster.failure_detector import FailureDetector

HOST = socket.gethostname()
NAMES = {0: "host-a", 1: "host-b", 2: "host-c"}


class Box:
    """A messenger whose peers the test plays. said: the messages that each peer received."""

    def __init__(self, *peers):
        self.machines = {peer: NAMES[peer] for peer in peers}
        self.said, self.left = queue.Queue(), threading.Event()
        self.closed, self.failure, self.has_silent_peer = False, None, False

    def subscribe(self, word, on_message, on_loss):
        self.hear = lambda peer, loss: on_message(peer, json.dumps(loss).encode())
        self.lose, self.raw = on_loss, on_message

    def notify(self, peer, word, data):
        self.said.put((peer, json.loads(data)))

    def fail(self, error):
        self.failure = error

    def wait_until_left(self, within_s):
        self.left.wait(within_s)

    def close(self, within_s):
        self.closed = True


class Room(contextlib.ExitStack):
    """Failure detectors, whose threads would keep pytest alive, and their exit codes."""

    def __init__(self):
        super().__init__()
        self._ends = queue.Queue()

    def guard(self, process_id, *peers, **options):
        """The box and the failure detector of a process."""
        box = Box(*peers)
        made = FailureDetector(process_id, end=lambda *it: self._ends.put(it), **options)
        self.callback(made.close)
        made.begin(box)
        return box, made

    def end(self):
        return self._ends.get(timeout=WAIT_S)

    def goes_on(self):
        return self._ends.empty()


@pytest.fixture
def room(monkeypatch):
    for name in ("CLEAN_UP_S", "GRACE_S"):
        monkeypatch.setattr(failure_detector, name, 0.05)
    with Room() as made:
        yield made


def over():
    """A main thread that has ended."""
    thread = threading.Thread()
    thread.start()
    thread.join()
    return thread


def test_a_lost_peer_ends_the_process_with_5_and_its_name(room, capfd):
    """Process 0 tells the others, which have no words for each other, and the peer who has lost it:
    its line must not name itself alone. The stack that JAX prints without process 0 is announced,
    and without another one there is none."""
    gone = "is gone: it closed its connections without a goodbye."
    box, _ = room.guard(0, 1, 2)
    box.lose(1, gone)
    code, line = room.end()
    assert code == 5 and "\n" not in line
    assert line.startswith(f"process 1 on host-b {gone}")
    assert box.said.get(timeout=WAIT_S) == (1, [f"process 0 on {HOST} says: {line}", 5, 0.05])
    assert box.said.get(timeout=WAIT_S) == (2, [line, 5, 0.05])
    assert str(box.failure) == line and box.failure.exit_code == 5 and box.closed
    assert capfd.readouterr().err == ""
    box, _ = room.guard(1, 0)
    box.lose(0, gone)
    room.end()
    assert capfd.readouterr().err == f"process 0 on host-a is gone. {failure_detector.STACK}\n"


def test_an_error_that_a_loss_caused_waits_for_the_loss(room):
    """The main thread has an error of a collective; it need not wait for the patience to pass."""
    box, guard = room.guard(1, 0)
    box.hear(0, ["process 2 on host-c is gone", 5, 10 * WAIT_S])
    guard.end_if_lost(WAIT_S)
    assert not room.goes_on() and room.end() == (5, "process 2 on host-c is gone")
    box, guard = room.guard(1, 0)
    guard.end_if_lost(0.1)
    assert room.goes_on(), "the control: nothing is lost"
    box.has_silent_peer = True
    threading.Timer(0.5, box.lose, (0, "has been out of reach for 8 s.")).start()
    guard.end_if_lost(0.1)
    assert not room.goes_on()
    code, line = room.end()
    assert code == 5 and line.startswith("process 0 on host-a has been out of reach for 8 s.")


def test_an_error_waits_once_for_a_loss_that_may_be_behind_it(room):
    """The history asks, and then the end of the process."""
    _, guard = room.guard(1, 0)
    begun = time.monotonic()
    assert [guard.find_loss(0.3) for _ in range(50)] == [None] * 50
    assert 0.3 <= time.monotonic() - begun < 0.3 * 40


def test_the_loss_is_noted_before_the_process_ends(room):
    """With the words of the terminal; a note that hangs does not keep the process."""
    noted, stuck = [], threading.Event()
    box, guard = room.guard(1, 0)
    guard.before_end(noted.append)
    guard.before_end(lambda text: stuck.wait(WAIT_S))
    box.lose(0, "is gone.")
    code, line = room.end()
    assert (code, noted) == (5, [f"LostPeerError: {line}"])
    stuck.set()


def test_the_first_loss_that_process_0_reports_is_printed(room):
    """The later ones follow from it: processes that end because of it close their connections."""
    box, _ = room.guard(2, 0)
    box.hear(0, ["process 1 on host-b ended with exit code 2", 2, 0.5])
    box.hear(0, ["process 3 on host-d is gone", 5, 0.0])
    box.lose(0, "is gone.")
    assert room.end() == (2, "process 1 on host-b ended with exit code 2")


@pytest.mark.parametrize("code", [2, 3, 4, 75, 1, 5, 130])
def test_a_bad_end_is_shared_with_its_reason_or_is_a_loss(room, code):
    """Exit code 5 makes a cluster restart the run."""
    box, guard = room.guard(1, 0, main=over())
    reason, code_of_all = "DataError: no text." + (code == 3) * "\N{SNOWMAN}" * 100_000, code
    why = "DataError: no text."
    if code in (1, 5, 130):
        why, reason, code_of_all = "", None, 5
    guard.leave(code, reason)
    assert room.end() == (code, None) and box.closed
    peer, (line, found, _) = box.said.get(timeout=WAIT_S)
    assert (peer, found) == (0, code_of_all) and len(line) < 5000
    assert line.startswith(f"process 1 on {HOST} ") and f" {code}" in line and why in line


@pytest.mark.parametrize("torn", [b"7", b"\xff", b"[]", b'["a", 1]', b"[1, 2, 3]", b"[" * 60_000])
def test_a_message_that_makes_no_sense_is_a_loss(room, torn):
    """The thread continues: it has to name the peer and end the process."""
    box, _ = room.guard(0, 1)
    box.raw(1, torn)
    code, line = room.end()
    assert code == 5
    assert line.startswith("process 1 on host-b ")


@pytest.mark.parametrize("code", [0, 143])
def test_ends_that_all_processes_share_are_no_losses(room, code):
    """Positive control: the codes in the tests above."""
    box, guard = room.guard(1, 0, main=over())
    guard.leave(code)
    assert room.end() == (code, None) and box.closed and box.said.empty()


def test_process_0_leaves_last(room, monkeypatch):
    """JAX aborts the others once process 0 is gone: it waits until they have said goodbye."""
    monkeypatch.setattr(failure_detector, "GRACE_S", WAIT_S)
    box, guard = room.guard(0, 1, main=over())
    guard.leave(3)
    assert box.said.get(timeout=WAIT_S)[0] == 1
    time.sleep(0.3)
    assert room.goes_on() and not box.closed
    box.left.set()
    assert room.end() == (3, None) and box.closed


END = """
import sys; from maxdiloco.cluster import failure_detector; print('last step', end='')
failure_detector.end_process(5, 'process 1 on host-b is gone')
"""
FULL = """
import os, sys, threading, time
from maxdiloco import output
from maxdiloco.cluster import signals
threading.Thread(target=output.say, args=("x" * (1 << 22),), daemon=True).start()
time.sleep(0.5)
signals.quit_now("Interrupted.", 130)
"""
ABORT = """
import ctypes, os, resource, sys, threading, time
from maxdiloco.cluster import failure_detector
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
if sys.argv[1] == "delayed":
    failure_detector.delay_aborts()
threading.Thread(target=ctypes.CDLL(None).abort).start()  # without the GIL, as in C++
time.sleep(1.0)
os._exit(5)
"""


def test_a_process_ends_at_once_with_one_line_and_its_output(started):
    """os._exit drops what is buffered; the line goes to stderr."""
    ended = started(END)
    line = "LostPeerError: process 1 on host-b is gone\n"
    assert ended.communicate(timeout=WAIT_S) == ("last step", line) and ended.returncode == 5


def test_a_full_pipe_that_nobody_reads_keeps_no_process(started):
    """A thread is inside its write and has the stream's lock."""
    process = started(FULL)
    assert process.wait(WAIT_S) == 130
    assert process.stderr.read().count("\n") == 1


@pytest.mark.parametrize("what, code", [("delayed", 5), ("at once", -signal.SIGABRT)])
def test_an_abort_in_another_thread_waits_for_the_detector(started, what, code):
    """The failure detector ends the process 1 s after a loss."""
    assert started(ABORT, what).wait(WAIT_S) == code


def test_last_words_are_said_where_python_begins_no_thread(monkeypatch, capfd):
    """As at the end of an interpreter from 3.12 on. Control: by a thread elsewhere."""
    output.last_words("by a thread")

    def start(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    output.last_words("the end")
    assert capfd.readouterr().err == "by a thread\nthe end\n"
