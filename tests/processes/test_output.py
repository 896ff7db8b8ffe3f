"""A program goes on when nobody takes its output, and ends with the exit code it would have."""

import errno
import fcntl
import io
import os
import pathlib
import pty
import struct
import subprocess
import sys
import termios

import pytest

from maxdiloco.processes import output

ROOT = pathlib.Path(__file__).parents[2]

PROGRAM = """
import os
from maxdiloco.command_line import end_with
from maxdiloco.processes.output import say, say_error

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
    command = shell.format(f"{sys.executable} -c '{PROGRAM}' {tmp_path}/end")
    done = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
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


def test_what_the_stream_cannot_encode_is_escaped_and_a_line_stays_one_line():
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
