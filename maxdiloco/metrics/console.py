"""The console of a run: every line for the user, a progress bar on a terminal, and the log file."""

import contextlib
import shutil
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping

from etils import epath

from maxdiloco.errors import USER_ERRORS, CheckpointError
from maxdiloco.metrics.line_files import open_lines
from maxdiloco.metrics.line_writer import LineWriter
from maxdiloco.output import one_line, say, shows_bars, span
from maxdiloco.storage.os_errors import reason

WIDTH = 100  # of a terminal, in characters
_GAP = "  "  # between the columns of a row
_KEPT = "\0"  # a space that no line ends at

# (metric, its name and format), in the order of the row.
_COLUMNS = (
    ("learning/loss", "loss {:.4f}"),
    ("eval/loss", "eval {:.4f}"),
    ("learning/lr", "lr {:.1e}"),
    ("learning/grad_norm", "grad {:.3f}"),
    ("learning/skipped", "skipped {:.3g}"),
    ("diloco/outer_grad_norm", "outer {:.3f}"),
    ("perf/step_time", "{:.3f} s"),
    ("perf/tokens_per_second", "{} tok/s"),
    ("perf/mfu", "mfu {:.0%}"),
    ("islands/progress", "{:.1%} of the run"),
)
# A fixed length leaves room for the terminal's echo of Ctrl-C.
_BAR = "{percentage:3.0f}%|{bar:30}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]"
_CLEAR_LINE = "\r\x1b[K"  # of every terminal since the VT100


def console_line(
    step: int, total_steps: int | None, values: Mapping[str, float], *, left: bool = False
) -> str:
    """Format a row as `step 120/2000  loss 2.3456  lr 3.0e-04  0.812 s`.

    Args:
      step: of the row.
      total_steps: None if it is not known.
      values: of the row, of which those in _COLUMNS are shown.
      left: whether to add the time of the remaining steps, `25.4 min left`, without evaluations and
        saves.
    """
    columns = [
        form.format(_short(values[name]) if form.startswith("{}") else values[name])
        for name, form in _COLUMNS
        if name in values
    ]
    if total_steps is None:
        return _GAP.join([f"step {step}", *columns])
    if left and step < total_steps and "perf/step_time" in values:
        columns.append(f"{span((total_steps - step) * values['perf/step_time'])} left")
    return _GAP.join([f"step {step}/{total_steps}", *columns])


def _short(number: float) -> str:
    """Format a number with three digits: 12345.6 -> 12.3k."""
    units = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
    # From 999.5 on, three digits need the next unit.
    limit, unit = next((each for each in units if number >= 0.9995 * each[0]), (1.0, ""))
    return f"{number / limit:.3g}{unit}"


def sample_lines(step: int, text: str) -> str:
    """A generated text below a headline, in lines of WIDTH characters at most."""
    lines = [f"sample after step {step}:"]
    for line in text.splitlines():
        lines += textwrap.wrap(one_line(line), WIDTH - 4, drop_whitespace=False) or [""]
    return "\n".join([lines[0], *(f"  | {line}".rstrip() for line in lines[1:])])


def fit(text: str, width: int) -> str:
    """A line as lines of at most width characters: a row is cut between columns, prose at words."""
    columns, indent = text.split(_GAP), "  "
    if text.startswith("step ") and max(map(len, columns)) <= width - 4:
        text, indent = _GAP.join(column.replace(" ", _KEPT) for column in columns), "    "
    return textwrap.fill(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ).replace(_KEPT, " ")


class Console:
    """Prints lines above the progress bar, if there is one, and keeps them for the log file.

    Any thread may call it.
    """

    def __init__(self, *, shown: bool = True):
        """Start without a log file; lines are kept until there is one.

        Args:
          shown: False in all processes except the first: they print nothing.
        """
        self._shown = shown
        self._bar = None
        self._early: list[str] | None = []  # lines before there is a log
        self._log: LineWriter | None = None
        self._path: epath.Path | None = None  # of the log
        self._failing = False  # the log
        self._lock = threading.Lock()  # of all that is the log's

    @property
    def has_bar(self) -> bool:
        """Whether a progress bar shows how long the run still takes."""
        return self._bar is not None

    def say(self, text: str) -> None:
        """Print one line; control characters are escaped."""
        self.line(one_line(text))

    def line(self, text: str) -> None:
        """Print a line, or several lines as they are."""
        if self._shown:
            self._print(text)
        with self._lock:
            if self._early is not None:
                self._early.append(text)
            self._write(text)

    @contextlib.contextmanager
    def logging(
        self, path: epath.Path, *, require_lock: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Write all lines to a file, also earlier ones, and an error that leaves the `with`.

        Each has the time of day. In a bucket it arrives a minute later at most. If the file cannot
        be written, there is a line on the console, training continues, and the lines are kept.

        Args:
          path: of the file.
          require_lock: of RunFolder: a run that has lost its folder writes no more there.
        """

        def close(kind, error, trace):
            with self._lock:
                if isinstance(error, USER_ERRORS):
                    self._write(one_line(f"{kind.__name__}: {error}"))
                elif error is not None:
                    self._write("".join(traceback.format_exception(error)).rstrip("\n"))
                with self._failures_told():
                    if self._log is not None:
                        self._log.close()
                self._log = None

        with contextlib.ExitStack() as stack:
            stack.push(close)
            with self._lock:
                self._path = path
                with self._failures_told():
                    self._log = open_lines(path, require_lock)
                early, self._early = self._early or [], None
                for text in [f"-- {time.strftime('%Y-%m-%d %H:%M:%S %z')}", *early]:
                    self._write(text)
            yield

    def _write(self, text: str) -> None:
        now = time.strftime("%H:%M:%S")
        if self._log is not None:
            with self._failures_told():
                self._log.write("".join(f"{now} {x}\n" for x in text.split("\n")).encode())

    @contextlib.contextmanager
    def _failures_told(self) -> Iterator[None]:
        try:
            yield
            self._failing = False
        except CheckpointError:  # the lock is another run's; the next row or save ends this one
            self._log = None
        except OSError as error:
            if not self._failing:
                self._print(f"note: {self._path} cannot be written: {reason(error)}.")
            self._failing = True

    @contextlib.contextmanager
    def progress(self, *, first_step: int, total_steps: int | None) -> Iterator[None]:
        """A progress bar, of which first_step steps are done, if standard error is a terminal."""
        if not self._shown or not shows_bars():
            yield
            return
        from tqdm import tqdm

        with tqdm(
            initial=first_step,
            total=total_steps,
            unit="step",
            dynamic_ncols=True,
            bar_format=_BAR,
            leave=False,
        ) as self._bar:
            try:
                yield
            finally:
                bar, self._bar = self._bar, None
                _clear(bar)

    def advance(self) -> None:
        """Move the bar by one step."""
        if self._bar is not None:
            self._bar.update()

    def _print(self, text: str) -> None:
        if sys.stdout is not None and sys.stdout.isatty():
            width = min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH)
            text = "\n".join(fit(line, max(width, 40)) for line in text.split("\n"))
        bar = self._bar
        if bar is None:
            say(text)
            return
        with bar.get_lock():  # of all bars: no step is drawn in between
            _clear(bar)
            say(text)
            bar.refresh(nolock=True)


def _clear(bar) -> None:
    """Remove the bar and the terminal's echo behind it."""
    bar.fp.write(_CLEAR_LINE)
    bar.fp.flush()
