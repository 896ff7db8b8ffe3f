"""Losses and ends of peers, with real sockets and threads inside one process."""

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time

import pytest

from maxdiloco.processes import star, watch

WAIT_S = 20  # far above what anything here takes
HOST = socket.gethostname()


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    for name in ("BEAT_S", "PATIENCE_S", "GRACE_S"):
        monkeypatch.setattr(watch, name, 0.05)


class Ends(queue.Queue):
    """Stands for os._exit: what the watch would have ended the process with."""

    def __call__(self, code, line):
        self.put((code, line))

    def next(self):
        return self.get(timeout=WAIT_S)


@pytest.fixture
def ends():
    return Ends()


@pytest.fixture
def guarding(ends):
    """Makes watches, and stops their threads after the test, which would keep pytest alive."""
    made = []

    def make(process_id, links, **options):
        made.append(watch.Watch(process_id, links, end=ends, **options))
        return made[-1]

    yield make
    for guard in made:
        guard.close()


@pytest.fixture
def link_pair():
    """Makes links to a peer, each with the peer's bare end of it."""
    bare = []

    def make(peer=1, host="host-b"):
        ours, theirs = socket.socketpair()
        theirs.settimeout(WAIT_S)
        bare.append(theirs)
        return star.Link(ours, peer, host), theirs

    yield make
    for each in bare:
        each.close()


def heard(bare, word):
    """The next message that has `word`."""
    for line in bare.makefile():
        if word in (message := json.loads(line)):
            return message
    raise AssertionError(f"the connection closed without {word}")


def over():
    """A main thread that has ended."""
    thread = threading.Thread()
    thread.start()
    thread.join()
    return thread


def say(bare, **message):
    bare.sendall(json.dumps(message).encode() + b"\n")


def test_a_closed_connection_ends_the_process_with_5_and_the_name(ends, guarding, link_pair, capfd):
    """kill -9 closes the connection at once, long before any timeout. Process 0 tells the others,
    which hold no connection to each other."""
    (one, bare_one), (two, bare_two) = link_pair(1, "host-b"), link_pair(2, "host-c")
    guarding(0, [one, two], silence_s=WAIT_S)
    bare_one.close()
    code, line = ends.next()
    assert code == 5
    assert "process 1 on host-b is gone" in line
    assert "Start the run again with the same run_name" in line
    assert "\n" not in line
    assert "process 1 on host-b is gone" in heard(bare_two, "loss")["loss"][0]
    assert capfd.readouterr().err == "", "the control of the next test"


def test_the_stack_that_JAX_prints_without_process_0_is_announced(ends, guarding, link_pair, capfd):
    link, bare = link_pair(0, "host-b")
    guarding(1, [link], silence_s=WAIT_S)
    bare.close()
    ends.next()
    assert capfd.readouterr().err == f"process 0 on host-b is gone. {watch.STACK}\n"


def test_silence_ends_the_process_with_the_name_the_key_and_the_remedy(ends, guarding, link_pair):
    """A stopped process, or one behind a cut cable, keeps its connection open. When it comes back
    it learns who has lost it: its line must not name itself alone."""
    link, bare = link_pair()
    guarding(0, [link], silence_s=0.5)
    told, told_code, _ = heard(bare, "loss")["loss"]
    code, line = ends.next()
    assert told_code == code == 5
    assert "process 1 on host-b has been silent for" in line
    assert "(peer_timeout_seconds=0.5)" in line
    assert "Raise peer_timeout_seconds" in line
    assert told == f"process 0 on {HOST} says: {line}"


def test_peers_that_only_beat_are_not_lost(ends, guarding, link_pair):
    """The positive control of the silence: two watches face to face for twice silence_s."""
    link, bare = link_pair()
    sides = [
        guarding(0, [link], silence_s=1.0),
        guarding(1, [star.Link(bare, 0, "host-a")], silence_s=1.0),
    ]
    sides[0].end_if_lost(2.0)
    for side in sides:
        side.close()
    assert ends.empty()


def test_an_error_that_a_loss_may_be_behind_waits_for_it_and_ends_the_process(
    ends, guarding, link_pair
):
    """The main thread has an error of a collective; it need not wait for the patience to pass."""
    link, bare = link_pair(0, "host-a")
    guard = guarding(1, [link], silence_s=WAIT_S)
    say(bare, loss=["process 2 on host-c is gone", 5, 10 * WAIT_S])
    guard.end_if_lost(WAIT_S)
    assert ends.get_nowait() == (5, "process 2 on host-c is gone")


def test_the_first_loss_that_process_0_tells_is_the_one_that_is_printed(ends, guarding, link_pair):
    """The later ones follow from it: processes that end because of it close their connections."""
    link, bare = link_pair(0, "host-a")
    guarding(2, [link], silence_s=WAIT_S)
    say(bare, loss=["process 1 on host-b ended with exit code 2", 2, 0.5])
    say(bare, loss=["process 3 on host-d is gone", 5, 0.0])
    bare.close()
    assert ends.next() == (2, "process 1 on host-b ended with exit code 2")


@pytest.mark.parametrize("code", [2, 3, 4, 75])
def test_an_end_that_no_restart_mends_is_shared_with_its_reason(ends, guarding, link_pair, code):
    """Process 1 says goodbye, so it is not `gone`; process 0 tells process 2. Each character of a
    reason may take six bytes."""
    (one, bare_one), (two, bare_two) = link_pair(1, "host-b"), link_pair(2, "host-c")
    guarding(0, [one, two], silence_s=WAIT_S)
    leaving = guarding(1, [star.Link(bare_one, 0, "host-a")], silence_s=WAIT_S, main=over())
    leaving.leave(code, "DataError: no text." + (code == 3) * "\N{SNOWMAN}" * 100_000)
    (_, nothing), (_, line) = found = sorted(
        [ends.next(), ends.next()], key=lambda end: bool(end[1])
    )
    assert [each[0] for each in found] == [code, code] and nothing is None
    assert line.startswith(
        f"process 1 on {HOST} ended with exit code {code}, and so does this process: DataError: no"
    )
    assert heard(bare_two, "loss")["loss"][:2] == [line, code]


@pytest.mark.parametrize("code", [1, 5, 130])
def test_any_other_bad_end_of_a_peer_is_a_loss(ends, guarding, link_pair, code):
    """Start again: that is what exit code 5 tells a cluster."""
    link, bare = link_pair(1, "host-b")
    guarding(0, [link], silence_s=WAIT_S)
    leaving = guarding(1, [star.Link(bare, 0, "host-a")], silence_s=WAIT_S, main=over())
    leaving.leave(code)
    (found, nothing), (lost, line) = sorted(
        [ends.next(), ends.next()], key=lambda end: bool(end[1])
    )
    assert (found, nothing, lost) == (code, None, 5)
    assert line.startswith(
        f"process 1 on {HOST} ended with exit code {code} while this process was still running: "
        "See the end of its own output. Start the run again"
    )


@pytest.mark.parametrize(
    "torn, why",
    [
        *((torn, "was cut off") for torn in (b'{"be{"beat": true}\n', b"7\n", b"\xff\n")),
        (b"[" * 60_000 + b"\n", "was cut off"),
        (b" " * 1_000_000, "is longer than 65536 bytes"),  # it is not kept for ever
    ],
)
def test_a_message_that_makes_no_sense_or_has_no_end_is_a_loss(
    ends, guarding, link_pair, torn, why
):
    """The thread goes on: it has to name the peer and end the process."""
    link, bare = link_pair()
    guarding(0, [link], silence_s=WAIT_S)
    with contextlib.suppress(OSError):
        bare.sendall(b'{"beat": true}\n' + torn)
    code, line = ends.next()
    assert code == 5
    assert f"process 1 on host-b is gone: a message from it {why}" in line


def test_process_0_names_the_host_that_a_peer_has_said(ends, guarding, link_pair):
    link, bare = link_pair(1, "")
    guarding(0, [link], silence_s=WAIT_S)
    say(bare, host="host-b")
    bare.close()
    assert "process 1 on host-b is gone" in ends.next()[1]


@pytest.mark.parametrize("code", [0, 143])
def test_ends_that_all_processes_share_are_no_losses(ends, guarding, link_pair, code):
    """Positive control: the codes in the tests above."""
    link, bare = link_pair()
    guard = guarding(0, [link], silence_s=0.3)
    leaving = guarding(1, [star.Link(bare, 0, "host-a")], silence_s=WAIT_S, main=over())
    leaving.leave(code)
    assert ends.next() == (code, None)
    guard.end_if_lost(1.0)
    guard.close()
    assert ends.empty()


def test_process_0_leaves_last(ends, guarding, link_pair, monkeypatch):
    """JAX aborts the others once process 0 is gone: it waits until their connections close."""
    monkeypatch.setattr(watch, "GRACE_S", WAIT_S)
    link, bare = link_pair()
    guard = guarding(0, [link], silence_s=WAIT_S, main=over())
    guard.leave(3)
    assert heard(bare, "end")["end"] == 3
    time.sleep(1.0)
    assert ends.empty()
    bare.close()
    assert ends.next() == (3, None)


def test_the_process_ends_at_once_with_one_line_and_what_it_had_printed():
    """os._exit drops what is buffered; the line goes to stderr."""
    program = (
        "import sys; from maxdiloco.processes import watch; print('last step', end='')\n"
        "watch.end_process(5, 'process 1 on host-b is gone')"
    )
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, env=buffered)
    assert ended.returncode == 5
    assert ended.stdout == "last step"
    assert ended.stderr == "LostPeerError: process 1 on host-b is gone\n"
