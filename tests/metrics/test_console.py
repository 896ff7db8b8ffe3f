"""The line at a log point, and the bar that is only for terminals."""

import io
import sys

from maxdiloco.metrics.console import Progress, console_line, sample_lines


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal(monkeypatch):
    """Standard error from now on. No fixture: pytest sets the streams again before the test."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    return sys.stderr


def test_the_line_shows_known_names_in_order_and_leaves_the_rest_to_the_files():
    line = console_line(
        120,
        2000,
        {
            "perf/step_time": 0.8123,
            "learning/lr": 3e-4,
            "learning/loss": 2.34567,
            "learning/loss_replica_0": 2.3,
            "perf/tokens_per_second": 12345.6,
            "perf/mfu": 0.4123,
        },
    )
    assert line == (
        "step 120/2000 | loss 2.3457 | lr 3.00e-04 | 0.812 s/step | 12,346 tokens/s | mfu 41.2%"
    )


def test_elsewhere_than_on_a_terminal_only_lines_are_printed(capsys):
    with Progress(first_step=0, total_steps=3) as progress:
        for step in range(1, 4):
            progress.advance()
            progress.line(f"step {step}")
    assert capsys.readouterr() == ("step 1\nstep 2\nstep 3\n", "")


def test_on_a_terminal_there_is_a_bar_that_starts_at_the_resumed_step(monkeypatch, capsys):
    stderr = terminal(monkeypatch)
    with Progress(first_step=5, total_steps=10) as progress:
        progress.line("step 5")
        progress.advance()
    assert "5/10" in stderr.getvalue()
    assert "step 5\n" in capsys.readouterr().out


def test_the_other_processes_show_nothing(monkeypatch, capsys):
    stderr = terminal(monkeypatch)
    with Progress(first_step=0, total_steps=1, shown=False) as progress:
        progress.advance()
        progress.line("step 1")
    assert stderr.getvalue() == capsys.readouterr().out == ""


def test_a_sample_keeps_its_lines_and_fits_the_terminal():
    """Long lines are broken, spaces and empty lines stay, control characters are escaped."""
    text = "def f():\n    return 1\n\n" + "a" * 150 + "\x07"
    lines = sample_lines(20, text).split("\n")
    assert lines[:4] == ["sample after step 20:", "  | def f():", "  |     return 1", "  |"]
    assert "".join(line.removeprefix("  | ") for line in lines[4:]) == "a" * 150 + r"\x07"
    assert max(map(len, lines)) <= 100 and len(lines) > 5
