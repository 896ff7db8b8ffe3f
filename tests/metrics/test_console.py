"""The line at a log point, the bar that is only for terminals, and the log of both."""

import io
import re
import sys

import pytest
from etils import epath

from maxdiloco.errors import NumericsError
from maxdiloco.metrics.console import WIDTH, Console, console_line, fit, sample_lines


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal(monkeypatch):
    """Both streams, one terminal. No fixture: pytest sets the streams again before the test."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(sys, "stdout", sys.stderr)
    return sys.stderr


def screen(written):
    """The lines that a terminal shows after what was written to it."""
    lines, column = [""], 0
    for part in re.findall(r"\r|\n|\x1b\[K|[^\r\n\x1b]+", written):
        if part == "\n":
            lines.append("")
        if part in "\r\n":
            column = 0
        elif part == "\x1b[K":
            lines[-1] = lines[-1][:column]
        else:
            lines[-1] = lines[-1][:column].ljust(column) + part + lines[-1][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines]


VALUES = {
    "perf/step_time": 0.8123,
    "learning/lr": 3e-4,
    "learning/loss": 2.34567,
    "learning/loss_replica_0": 2.3,
    "perf/tokens_per_second": 12345.6,
    "perf/mfu": 0.4123,
}


def test_the_line_of_a_row_has_the_known_metrics_in_order():
    """The line of a long run fits a terminal. It shows the time left if steps are left: 1,880 steps
    of 0.8123 s; a log file and a pipe have no progress bar."""
    line = "step 120/2000  loss 2.3457  lr 3.0e-04  0.812 s  12.3k tok/s  mfu 41%"
    assert console_line(120, 2000, VALUES) == line
    assert console_line(120, 2000, VALUES, left=True) == f"{line}  25.5 min left"
    assert "left" not in console_line(2000, 2000, VALUES, left=True)
    assert "left" not in console_line(120, 2000, {"learning/loss": 2.3}, left=True)
    norms = {"learning/grad_norm": 1.234, "diloco/outer_grad_norm": 12.345}
    assert len(console_line(20_000, 20_000, VALUES | norms)) <= WIDTH
    three_digits = {12.3456: "12.3", 999.4: "999", 999.6: "1k", 999_999: "1M", 1.234e9: "1.23G"}
    for tokens, words in three_digits.items():
        assert console_line(1, 2, {"perf/tokens_per_second": tokens}).endswith(f"  {words} tok/s")


def test_a_line_that_is_too_long_is_cut_between_columns_or_words():
    row = console_line(20_000, 20_000, VALUES | {"eval/loss": 2.5})
    assert fit(row, 40) == (
        "step 20000/20000  loss 2.3457\n    eval 2.5000  lr 3.0e-04  0.812 s\n"
        "    12.3k tok/s  mfu 41%"
    )
    assert fit("a warning of several words", 18) == "a warning of\n  several words"
    assert fit(row, 200) == row
    # Of a sample spaces and empty lines stay, and control characters are escaped.
    text = "def f():\n    return 1\n\n" + "a" * 150 + "\x07"
    lines = sample_lines(20, text).split("\n")
    assert lines[:4] == ["sample after step 20:", "  | def f():", "  |     return 1", "  |"]
    assert "".join(line.removeprefix("  | ") for line in lines[4:]) == "a" * 150 + r"\x07"
    assert max(map(len, lines)) <= 100 and len(lines) > 5


def test_a_line_erases_the_bar_and_the_echo_of_ctrl_c(monkeypatch):
    """Positive control: the bar is on the screen before the line."""
    written = terminal(monkeypatch)
    console = Console()
    console.say("before")
    with console.progress(first_step=5, total_steps=10):
        assert "5/10" in screen(written.getvalue())[-1]
        written.write("^C")
        console.say("short")
        assert "/10" in screen(written.getvalue())[-1]
    console.say("done")
    assert screen(written.getvalue()) == ["before", "short", "done", ""]


def test_without_a_terminal_only_process_0_prints_only_lines(capsys, monkeypatch):
    for shown in (True, False):
        console = Console(shown=shown)
        with console.progress(first_step=0, total_steps=3):
            for step in range(1, 4):
                console.advance()
                console.say(f"step {step} " + "x" * 150)
        said = "".join(f"step {t} {'x' * 150}\n" for t in (1, 2, 3)) if shown else ""
        assert capsys.readouterr() == (said, "")
    written = terminal(monkeypatch)
    with Console(shown=False).progress(first_step=0, total_steps=1):
        assert written.getvalue() == ""


@pytest.mark.parametrize("shown", [True, False])
def test_the_log_has_the_lines_before_it_opened_and_the_error(tmp_path, capsys, shown):
    """In the processes that print nothing, too."""
    path = epath.Path(tmp_path / "log.txt")
    console = Console(shown=shown)
    console.say("early\n")

    def run(error, log):
        with log.logging(path):
            log.line("two\nlines")
            raise error

    with pytest.raises(NumericsError):
        run(NumericsError("step 3: bad"), console)
    console.say("not logged")
    with pytest.raises(KeyError):
        run(KeyError("a bug"), Console(shown=False))
    lines = [line.split(" ", 1)[1] for line in path.read_text().splitlines()]  # without the time
    found = [line for line in lines if not line.startswith("-- ")]  # nor that of each start
    assert found[:4] == [r"early\n", "two", "lines", "NumericsError: step 3: bad"]
    assert found[6] == "Traceback (most recent call last):" and found[-1] == "KeyError: 'a bug'"
    shown_lines = "early\\n\ntwo\nlines\nnot logged\n" if shown else ""
    assert capsys.readouterr().out == shown_lines
    # Every process names a log that cannot be written.
    path = tmp_path / "absent" / "log.txt"
    with console.logging(epath.Path(path)):
        console.say("goes on")
    note, *rest = capsys.readouterr().out.splitlines()
    assert str(path) in note and rest == ["goes on"] * shown
