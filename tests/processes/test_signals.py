"""Ctrl-C is heard while native code runs; how a program ends, whatever its threads do."""

import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time

import pytest

from maxdiloco.processes.signals import hearing

ROOT = pathlib.Path(__file__).parents[2]
WAIT_S = 60  # far above what a thread takes to be woken


def test_the_inner_context_hears_and_then_the_outer_one_again():
    heard = queue.Queue()
    before = signal.getsignal(signal.SIGINT)
    with hearing(signal.SIGINT, lambda: heard.put("outer")):
        with hearing(signal.SIGINT, lambda: heard.put("inner")):
            os.kill(os.getpid(), signal.SIGINT)
            assert heard.get(timeout=WAIT_S) == "inner"
        os.kill(os.getpid(), signal.SIGINT)
        assert heard.get(timeout=WAIT_S) == "outer"
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_context_of_another_signal_inside_passes_this_one_on():
    """Python has one descriptor for all signals, the innermost context's."""
    heard = queue.Queue()
    with (
        hearing(signal.SIGINT, lambda: heard.put("outer")),
        hearing(signal.SIGTERM, lambda: heard.put("inner")),
    ):
        for number, expected in ((signal.SIGINT, "outer"), (signal.SIGTERM, "inner")):
            os.kill(os.getpid(), number)
            assert heard.get(timeout=WAIT_S) == expected


def test_a_signal_while_the_context_ends_does_not_meet_the_handler_from_before(monkeypatch):
    """That may be the default one, which ends the process. Control: after the context it does."""
    heard = queue.Queue()
    join = threading.Thread.join

    def hit_while_joining(thread):
        os.kill(os.getpid(), signal.SIGINT)
        join(thread)

    before = signal.signal(signal.SIGINT, lambda number, frame: heard.put("handler"))
    try:
        with hearing(signal.SIGINT, lambda: None):
            monkeypatch.setattr(threading.Thread, "join", hit_while_joining)
        assert heard.empty()
        os.kill(os.getpid(), signal.SIGINT)
        assert heard.get(timeout=WAIT_S) == "handler"
    finally:
        signal.signal(signal.SIGINT, before)


PROGRAM = """
import hashlib, time
from maxdiloco.command_line import end_with, guarded

def program(argv):
    print("begun", flush=True)
    if argv[0] == "native":
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # one call, many minutes
    try:
        time.sleep(600)
    finally:
        time.sleep(600)  # what a clean-up would do

end_with(guarded(program))
"""


@pytest.mark.parametrize("what, count", [("sleep", 1), ("sleep", 20), ("native", 1)])
def test_ctrl_c_ends_a_program_with_one_line_and_130(what, count):
    """However often it is pressed, in a clean-up too, and while no Python code runs."""
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, what],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout.readline() == "begun\n"
        time.sleep(0.2 if what == "native" else 0.0)  # until it is in there
        for _ in range(count):
            child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=WAIT_S)
    assert errors == "Interrupted.\n"
    assert child.returncode == 130


HANGING = """
import threading
from maxdiloco import command_line

def program(argv):
    threading.Thread(target=threading.Event().wait).start()
    print("done", flush=True)
    if argv[0] == "crash":
        raise RuntimeError("crash")
    return 7

command_line.LEAVE_S = 0.1
command_line.end_with(program)
"""


@pytest.mark.parametrize("end, code", [("return", 7), ("crash", 1)])
def test_a_program_ends_though_a_thread_of_a_library_never_does(end, code):
    """After a save that a read-only disk has refused Orbax's threads wait for minutes."""
    done = subprocess.run(
        [sys.executable, "-c", HANGING, end], cwd=ROOT, capture_output=True, text=True,
        timeout=WAIT_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (code, "done\n")
    assert ("RuntimeError: crash" in done.stderr) == (end == "crash")
