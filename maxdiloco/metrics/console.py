"""The console of a run: every line for the user, a progress bar on a terminal, and the log file."""

import contextlib
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping

from etils import epath

from maxdiloco.metrics.line_files import LogFile
from maxdiloco.processes.output import one_line, say, shows_bars, span

WIDTH = 100  # of a terminal, in characters; our choice
_GAP = "  "  # between the columns of a row

# (metric, its name and format), in the order of the row.
_COLUMNS = (
    ("learning/loss", "loss {:.4f}"),
    ("eval/loss", "eval {:.4f}"),
    ("learning/lr", "lr {:.1e}"),
    ("learning/grad_norm", "grad {:.3f}"),
    ("diloco/outer_grad_norm", "outer {:.3f}"),
    ("perf/step_time", "{:.3f} s"),
    ("perf/tokens_per_second", "{} tok/s"),
    ("perf/mfu", "mfu {:.0%}"),
)
# Of a fixed length: what a terminal echoes at Ctrl-C has room behind it.
_BAR = "{percentage:3.0f}%|{bar:30}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]"
_CLEAR_LINE = "\r\x1b[K"  # of every terminal since the VT100


def console_line(
    step: int, total_steps: int, values: Mapping[str, float], *, left: bool = False
) -> str:
    """step 120/2000  loss 2.3456  lr 3.0e-04  0.812 s: the metrics of _COLUMNS, s a step.

    left: add the time of the steps that are left, `25.4 min left`, without evaluations and saves.
    """
    columns = [
        form.format(_short(values[name]) if form.startswith("{}") else values[name])
        for name, form in _COLUMNS
        if name in values
    ]
    if left and step < total_steps and "perf/step_time" in values:
        columns.append(f"{span((total_steps - step) * values['perf/step_time'])} left")
    return _GAP.join([f"step {step}/{total_steps}", *columns])


def _short(number: float) -> str:
    """Three digits: 12345.6 -> 12.3k."""
    units = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
    # From 999.5 on three digits are those of the next unit.
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
    if len(text) <= width:
        return text
    first, *parts = text.split(_GAP)
    if not text.startswith("step ") or max(map(len, [first, *parts])) > width - 4:
        return textwrap.fill(
            text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    lines = [first]
    for part in parts:
        if len(lines[-1]) + len(_GAP) + len(part) > width:
            lines.append(f"    {part}")
        else:
            lines[-1] += _GAP + part
    return "\n".join(lines)


class Console:
    """Prints lines above the progress bar, if there is one, and keeps them for the log file.

    Any thread may call it. shown: False in all processes but the first, which print nothing.
    """

    def __init__(self, *, shown: bool = True):
        self._shown = shown
        self._bar = None
        self._early: list[str] | None = []  # lines before there is a log
        self._log: LogFile | None = None
        self._lock = threading.Lock()  # of the two above

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
            if self._log is not None:
                self._log.write(text)

    @contextlib.contextmanager
    def logging(
        self, path: epath.Path, *, require_lock: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Keep the lines in a file, those before this call too. require_lock: of RunFolder."""
        with LogFile(path, say=self._print, require_lock=require_lock) as log:
            with self._lock:
                early, self._early, self._log = self._early, None, log
                for text in early or ():
                    log.write(text)
            try:
                yield
            finally:
                with self._lock:
                    self._log = None

    @contextlib.contextmanager
    def progress(self, *, first_step: int, total_steps: int) -> Iterator[None]:
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
    """Remove the bar and what the terminal has echoed behind it."""
    bar.fp.write(_CLEAR_LINE)
    bar.fp.flush()
