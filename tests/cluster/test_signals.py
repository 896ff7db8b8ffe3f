"""How a run is told to stop, and how a program ends whatever its threads and readers do."""

import contextlib
import errno
import fcntl
import io
import os
import pathlib
import pty
import queue
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time

import pytest
from messenger_tools import WAIT_S, until

from maxdiloco import output
from maxdiloco.cluster import signals as signals_lib
from maxdiloco.cluster.signals import Preemption, signal_handler

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def before():
    """before(number, handler): what takes a signal before a test, until its end."""
    with contextlib.ExitStack() as ends:
        yield lambda number, handler: ends.callback(
            signal.signal, number, signal.signal(number, handler)
        )


def test_the_inner_context_hears_and_then_the_outer_one_again():
    """One of another signal passes this one on: Python has one descriptor for all signals."""
    heard = queue.Queue()
    before = signal.getsignal(signal.SIGINT)

    def hears(number, expected):
        os.kill(os.getpid(), number)
        return heard.get(timeout=WAIT_S) == expected

    with signal_handler(signal.SIGINT, lambda: heard.put("outer")):
        with signal_handler(signal.SIGINT, lambda: heard.put("inner")):
            assert hears(signal.SIGINT, "inner")
        with signal_handler(signal.SIGTERM, lambda: heard.put("inner")):
            assert hears(signal.SIGINT, "outer") and hears(signal.SIGTERM, "inner")
        assert hears(signal.SIGINT, "outer")
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_at_the_end_of_a_context_is_not_handled_twice(before, monkeypatch):
    """The earlier handler may be the default one, which ends the process. Control: after the
    context it is called."""
    heard = queue.Queue()
    join = threading.Thread.join

    def hit_while_joining(thread):
        os.kill(os.getpid(), signal.SIGINT)
        join(thread)

    before(signal.SIGINT, lambda number, frame: heard.put("handler"))
    with signal_handler(signal.SIGINT, lambda: None):
        monkeypatch.setattr(threading.Thread, "join", hit_while_joining)
    assert heard.empty()
    os.kill(os.getpid(), signal.SIGINT)
    assert heard.get(timeout=WAIT_S) == "handler"


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
def test_ctrl_c_ends_a_program_with_one_line_and_130(started, what, count):
    """However often it is pressed, in a clean-up too, and while no Python code runs."""
    child = started(PROGRAM, what)
    assert child.stdout.readline() == "begun\n"
    time.sleep(0.2 if what == "native" else 0.0)  # until it is in there
    for _ in range(count):
        child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=WAIT_S)
    assert (child.returncode, errors.count("\n")) == (130, 1)


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
def test_a_program_ends_though_a_thread_of_a_library_never_does(started, end, code):
    """After a save that a read-only disk has refused Orbax's threads wait for minutes."""
    child = started(HANGING, end)
    out, errors = child.communicate(timeout=WAIT_S)
    assert (child.returncode, out) == (code, "done\n")
    assert ("RuntimeError: crash" in errors) == (end == "crash")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_stops_the_run_and_the_old_handler_returns(before, number):
    """SIGHUP is that of a closed terminal. Ctrl-C is told at once, too."""
    mine, told = lambda number, frame: pytest.fail("called"), queue.Queue()
    before(number, mine)
    with Preemption(told.put) as preemption:
        assert not preemption.requested(1)
        os.kill(os.getpid(), number)
        until(lambda: preemption.requested(2))
        assert preemption.requested(3)
        assert preemption.by_ctrl_c == (number == signal.SIGINT)
    assert signal.getsignal(number) is mine
    if number == signal.SIGINT:
        assert "Ctrl-C" in told.get(timeout=WAIT_S)


def test_a_closed_terminal_counts_for_nothing_under_nohup(before):
    before(signal.SIGHUP, signal.SIG_IGN)
    with Preemption(print) as preemption:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not preemption.requested(1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_doubled_signal_is_one_and_a_later_one_ends_the_run(monkeypatch, number):
    """A launcher passes on the signal that the terminal has sent to the process already, and may
    send one twice. The next one is meant, whatever the process waits for."""
    ends = queue.Queue()
    monkeypatch.setattr(signals_lib, "quit_now", lambda *end: ends.put(end))

    def hit_twice():
        with Preemption(lambda line: None) as preemption:
            os.kill(os.getpid(), number)
            until(lambda: preemption.requested(1))
            os.kill(os.getpid(), number)

    monkeypatch.setattr(signals_lib, "SAME_PRESS_S", 1000.0)
    hit_twice()
    assert ends.empty()  # the context has ended the thread that hears
    monkeypatch.setattr(signals_lib, "SAME_PRESS_S", 0.0)
    hit_twice()
    end = ends.get(timeout=WAIT_S)
    if number == signal.SIGTERM:
        assert "SIGTERM" in end[0] and end[1] == 143


def test_ctrl_c_after_sigterm_does_not_change_why_the_run_stops():
    told = queue.Queue()
    with Preemption(told.put) as preemption:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        told.get(timeout=WAIT_S)
    assert preemption.requested(1)
    assert not preemption.by_ctrl_c


# Both take note of the first SIGTERM; then each is in one native call of many minutes.
WAITING = """
import hashlib, os, sys
from maxdiloco.cluster import start
from maxdiloco.cluster.signals import Preemption
with start.join_processes(os.environ, timeout_s=60, peer_timeout_s=60), Preemption(print) as it:
    print("begun", flush=True)
    step = 0
    while not it.requested(step := step + 1):
        pass
    print("noted", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""


def test_a_second_sigterm_ends_a_process_that_waits_forever(started, free_port):
    """JAX's handler takes note of each and ends nothing: SIGKILL was the only way out."""
    environ = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port}", "JAX_NUM_PROCESSES": "2"}
    environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    runs = [started(WAITING, JAX_PROCESS_ID=rank, **environ) for rank in "01"]
    assert [run.stdout.readline() for run in runs] == ["begun\n"] * 2
    runs[1].send_signal(signal.SIGTERM)
    assert [run.stdout.readline() for run in runs] == ["noted\n"] * 2
    time.sleep(signals_lib.SAME_PRESS_S)
    runs[1].send_signal(signal.SIGTERM)
    _, errors = runs[1].communicate(timeout=20)
    assert runs[1].returncode == 143
    assert errors.splitlines()[-1] == signals_lib.SECOND_SIGTERM
    assert runs[0].wait(timeout=20) == 5


PRINTING = """
import os
from maxdiloco.command_line import end_with
from maxdiloco.output import say, say_error

def program(argv):
    for number in range(10_000):  # more than a pipe holds
        say(f"line {number}")
    say_error("error")
    with open(argv[0], "w") as file:
        file.write(str(file.fileno()))
    return 7

end_with(program)
"""


@pytest.mark.parametrize(
    "shell", ["{} >/dev/full", "{} >/dev/full 2>&1", "{} | head -n 1", "{} >&-", "{} >&- 2>&- <&-"]
)
def test_a_program_ends_as_if_all_of_its_output_was_taken(shell, tmp_path):
    """The last words are reached; no number of a standard stream went to another file."""
    command = shell.format(f"{sys.executable} -c '{PRINTING}' {tmp_path}/end")
    command = ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 7
    assert done.stderr == ("" if "2>" in shell else "error\n")
    assert int((tmp_path / "end").read_text()) > 2


class FullOnce(io.StringIO):
    def flush(self):
        if self.getvalue() == "first\n":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_after_a_full_disk_lines_are_printed_again():
    stream = FullOnce()
    output.say("first", stream)
    output.say("second", stream)
    assert stream.getvalue() == "first\nsecond\n"


def test_text_that_a_stream_cannot_encode_is_escaped():
    """The name of a file need not be text; Python reads the byte 255 as \\udcff."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    output.say("dataset_path=\udcff\u2192", stream)
    assert stream.buffer.getvalue() == b"dataset_path=\\udcff\\u2192\n"
    escaped = r"run_name=a\nb\r\x1b[2J\u2028\x85é"
    assert output.one_line("run_name=a\nb\r\x1b[2J\u2028\x85é") == escaped


def test_a_terminal_of_no_columns_shows_no_bar(monkeypatch):
    """As some containers have it; tqdm would draw an empty bar over and over."""
    first, second = pty.openpty()  # of 0 columns until somebody sets them
    with open(first, "rb"), open(second, "w") as terminal:
        monkeypatch.setattr(output.sys, "stderr", terminal)
        assert not output.shows_bars()
        fcntl.ioctl(second, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        assert output.shows_bars()
    for stream in (None, io.StringIO()):
        monkeypatch.setattr(output.sys, "stderr", stream)
        assert not output.shows_bars()


@pytest.mark.parametrize("what", ["sleep", "native"])
def test_a_program_that_is_process_1_ends_at_sigterm_with_143(started, what):
    """Linux drops a signal of process 1, the program of a container, that has no handler."""
    if shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.skip("a PID namespace needs root and unshare of util-linux")
    unshare = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", PROGRAM, what]
    child = started("import os, sys; os.execvp(sys.argv[1], sys.argv[1:])", *unshare)
    assert child.stdout.readline() == "begun\n"
    time.sleep(0.2 if what == "native" else 0.0)
    (first,) = pathlib.Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    os.kill(int(first), signal.SIGTERM)
    _, errors = child.communicate(timeout=WAIT_S)
    assert (child.returncode, errors.count("\n")) == (143, 1)
