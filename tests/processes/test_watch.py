"""Losses and ends of peers, with real sockets and threads inside one process."""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from maxdiloco.processes import watch

WAIT_S = 20  # far above what anything here takes
HOST = socket.gethostname()


class Room:
    """Watches, their links, and what they would have ended their processes with."""

    def __init__(self):
        self._ends, self._watches, self._bare = queue.Queue(), [], []

    def guard(self, process_id, *links, silence_s=WAIT_S, **options):
        def end(code, line):  # stands for os._exit
            self._ends.put((code, line))

        made = watch.Watch(process_id, list(links), silence_s=silence_s, end=end, **options)
        self._watches.append(made)
        return made

    def leaving(self, bare):
        """The watch of process 1 at the bare end of a link, whose main thread has ended."""
        return self.guard(1, watch.Link(bare, 0, "host-a"), main=over())

    def pair(self, peer=1, host="host-b"):
        """A link to a peer, and the peer's bare end of it."""
        ours, theirs = socket.socketpair()
        theirs.settimeout(WAIT_S)
        self._bare.append(theirs)
        return watch.Link(ours, peer, host), theirs

    def end(self):
        return self._ends.get(timeout=WAIT_S)

    def goes_on(self):
        return self._ends.empty()

    def close(self):
        """Their threads would keep pytest alive."""
        for each in self._watches + self._bare:
            each.close()


@pytest.fixture
def room(monkeypatch):
    for name in ("BEAT_S", "PATIENCE_S", "GRACE_S"):
        monkeypatch.setattr(watch, name, 0.05)
    made = Room()
    yield made
    made.close()


def over():
    """A main thread that has ended."""
    thread = threading.Thread()
    thread.start()
    thread.join()
    return thread


def heard(bare, word):
    """The next message that has `word`."""
    for line in bare.makefile():
        if word in (message := json.loads(line)):
            return message
    raise AssertionError(f"the connection closed without {word}")


def say(bare, **message):
    bare.sendall(json.dumps(message).encode() + b"\n")


def test_a_closed_connection_ends_the_process_with_5_and_the_name(room, capfd):
    """kill -9 closes the connection at once, long before any timeout. Process 0 tells the others,
    which hold no connection to each other. A peer says the name of its host. The stack that JAX
    prints without process 0 is announced, and without another one there is none."""
    (one, bare_one), (two, bare_two) = room.pair(1, ""), room.pair(2, "host-c")
    room.guard(0, one, two)
    say(bare_one, host="host-b")
    bare_one.close()
    code, line = room.end()
    assert code == 5
    assert "process 1 on host-b is gone" in line
    assert "Start the run again with the same run_name" in line
    assert "\n" not in line
    assert "process 1 on host-b is gone" in heard(bare_two, "loss")["loss"][0]
    assert capfd.readouterr().err == ""
    link, bare = room.pair(0, "host-b")
    room.guard(1, link)
    bare.close()
    room.end()
    assert capfd.readouterr().err == f"process 0 on host-b is gone. {watch.STACK}\n"


def test_silence_ends_the_process_with_the_name_the_key_and_the_remedy(room):
    """A stopped process, or one behind a cut cable, keeps its connection open. When it comes back
    it learns who has lost it: its line must not name itself alone."""
    link, bare = room.pair()
    room.guard(0, link, silence_s=0.5)
    told, told_code, _ = heard(bare, "loss")["loss"]
    code, line = room.end()
    assert told_code == code == 5
    assert "process 1 on host-b has been silent for" in line
    assert "(peer_timeout_seconds=0.5)" in line
    assert "Raise peer_timeout_seconds" in line
    assert told == f"process 0 on {HOST} says: {line}"


def test_peers_that_only_beat_are_not_lost(room):
    """The positive control of the silence: two watches face to face for twice silence_s."""
    link, bare = room.pair()
    zero = room.guard(0, link, silence_s=1.0)
    one = room.guard(1, watch.Link(bare, 0, "host-a"), silence_s=1.0)
    zero.end_if_lost(2.0)
    zero.close()
    one.close()
    assert room.goes_on()


def test_an_error_that_a_loss_may_be_behind_waits_for_it_and_ends_the_process(room):
    """The main thread has an error of a collective; it need not wait for the patience to pass."""
    link, bare = room.pair(0, "host-a")
    guard = room.guard(1, link)
    say(bare, loss=["process 2 on host-c is gone", 5, 10 * WAIT_S])
    guard.end_if_lost(WAIT_S)
    assert not room.goes_on() and room.end() == (5, "process 2 on host-c is gone")


def test_the_first_loss_that_process_0_tells_is_the_one_that_is_printed(room):
    """The later ones follow from it: processes that end because of it close their connections."""
    link, bare = room.pair(0, "host-a")
    room.guard(2, link)
    say(bare, loss=["process 1 on host-b ended with exit code 2", 2, 0.5])
    say(bare, loss=["process 3 on host-d is gone", 5, 0.0])
    bare.close()
    assert room.end() == (2, "process 1 on host-b ended with exit code 2")


@pytest.mark.parametrize("code", [2, 3, 4, 75, 1, 5, 130])
def test_a_bad_end_is_shared_with_its_reason_or_a_loss_where_a_restart_mends_it(room, code):
    """Process 1 says goodbye, so it is not `gone`; process 0 tells process 2. Each character of a
    reason may take six bytes. Start again: that is what exit code 5 tells a cluster."""
    (one, bare_one), (two, bare_two) = room.pair(1, "host-b"), room.pair(2, "host-c")
    room.guard(0, one, two)
    reason, code_of_all = "DataError: no text." + (code == 3) * "\N{SNOWMAN}" * 100_000, code
    why = ", and so does this process: DataError: no text."
    if code in (1, 5, 130):
        why = " while this process was still running: See the end of its own output. Start the run"
        reason, code_of_all = None, 5
    room.leaving(bare_one).leave(code, reason)
    own, (found, line) = sorted([room.end(), room.end()], key=lambda end: bool(end[1]))
    assert own == (code, None) and found == code_of_all
    assert line.startswith(f"process 1 on {HOST} ended with exit code {code}{why}")
    assert heard(bare_two, "loss")["loss"][:2] == [line, found]


@pytest.mark.parametrize(
    "torn, why",
    [
        *((torn, "was cut off") for torn in (b'{"be{"beat": true}\n', b"7\n", b"\xff\n")),
        (b"[" * 60_000 + b"\n", "was cut off"),
        (b" " * 1_000_000, "is longer than 65536 bytes"),  # it is not kept for ever
    ],
)
def test_a_message_that_makes_no_sense_or_has_no_end_is_a_loss(room, torn, why):
    """The thread goes on: it has to name the peer and end the process."""
    link, bare = room.pair()
    room.guard(0, link)
    with contextlib.suppress(OSError):
        bare.sendall(b'{"beat": true}\n' + torn)
    code, line = room.end()
    assert code == 5
    assert f"process 1 on host-b is gone: a message from it {why}" in line


@pytest.mark.parametrize("code", [0, 143])
def test_ends_that_all_processes_share_are_no_losses(room, code):
    """Positive control: the codes in the tests above."""
    link, bare = room.pair()
    guard = room.guard(0, link, silence_s=0.3)
    room.leaving(bare).leave(code)
    assert room.end() == (code, None)
    guard.end_if_lost(1.0)
    guard.close()
    assert room.goes_on()


def test_process_0_leaves_last(room, monkeypatch):
    """JAX aborts the others once process 0 is gone: it waits until their connections close."""
    monkeypatch.setattr(watch, "GRACE_S", WAIT_S)
    link, bare = room.pair()
    room.guard(0, link, main=over()).leave(3)
    assert heard(bare, "end")["end"] == 3
    time.sleep(1.0)
    assert room.goes_on()
    bare.close()
    assert room.end() == (3, None)


END = """
import sys; from maxdiloco.processes import watch; print('last step', end='')
watch.end_process(5, 'process 1 on host-b is gone')
"""
ABORT = """
import ctypes, os, resource, sys, threading, time
from maxdiloco.processes import watch
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
if sys.argv[1] == "delayed":
    watch.delay_aborts()
threading.Thread(target=ctypes.CDLL(None).abort).start()  # without the GIL, as in C++
time.sleep(1.0)
os._exit(5)
"""


def run(program, *arguments):
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=buffered)


def test_the_process_ends_at_once_with_one_line_and_what_it_had_printed():
    """os._exit drops what is buffered; the line goes to stderr."""
    ended = run(END)
    assert (ended.returncode, ended.stdout) == (5, "last step")
    assert ended.stderr == "LostPeerError: process 1 on host-b is gone\n"


@pytest.mark.parametrize("what, code", [("delayed", 5), ("at once", -signal.SIGABRT)])
def test_an_abort_in_another_thread_waits_for_the_watch(what, code):
    """As the watch: it sees the lost peer, and ends the process after its patience of 1 s."""
    assert run(ABORT, what).returncode == code
