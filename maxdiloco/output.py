"""Print lines for the user. A stream that is full or closed does not end the program."""

import contextlib
import errno
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

# Errors of a full disk: the line is dropped, and the next one is tried.
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LINE_S = 5.0  # time between two lines of `progress` [s]


def say(text: str, stream: TextIO | None = None) -> None:
    """Print one or more lines, by default to standard output; drop them if they cannot be written.

    Control characters are escaped, except line feeds and tabs. Generated text, tokenizers and names
    in stored files could otherwise control the terminal.
    """
    stream, text = stream or sys.stdout, escape_controls(text, keep="\n\t")
    if stream is None:  # Python was started with the stream closed
        return
    try:
        stream.write(f"{text}\n")  # in one write, since threads also print
        stream.flush()
    except UnicodeEncodeError:  # a path that is not valid text, or an ASCII terminal
        say(text.encode("ascii", "backslashreplace").decode(), stream)
    except OSError as error:
        if error.errno not in _FULL:
            _drop_everything(stream)


def say_error(text: str) -> None:
    """Print a line to standard error, as `say` does."""
    if sys.stderr is not None:
        say(text, sys.stderr)


def shows_bars() -> bool:
    """Return whether to show progress bars: standard error is a terminal of at least a column."""
    stream = sys.stderr
    if stream is None or not stream.isatty():
        return False
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except OSError:  # a replacement of the stream that is not a terminal
        return True


@contextlib.contextmanager
def progress(
    verb: str,
    total: int,
    line: Callable[[str], None],
    *,
    done: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Callable[[int], None]]:
    """Show the progress of work on bytes: a bar on a terminal, otherwise a line every _LINE_S.

    Args:
      verb: past participle for the lines, such as tokenised.
      total: total number of bytes.
      line: called with each line.
      done: number of bytes that are already done.
      clock: returns the time [s].

    Yields:
      A function to call with the number of bytes done since its last call.
    """
    if shows_bars():
        from tqdm import tqdm

        with tqdm(total=total, initial=done, unit="B", unit_scale=True, leave=False) as bar:
            yield bar.update
        return
    before, begun = done, clock()
    last = begun

    def advance(size: int) -> None:
        nonlocal done, last
        done, now = done + size, clock()
        if before < done < total and now - last >= _LINE_S:
            last = now
            left = (now - begun) / (done - before) * (total - done)
            line(f"{verb} {done / total:.0%} of {total / 1e6:,.0f} MB, about {left:.0f} s left")

    yield advance


def one_line(text: str) -> str:
    r"""Escape all control characters of a text: a line feed becomes `\n`."""
    return escape_controls(text)


def escape_controls(text: str, keep: str = "") -> str:
    """Escape the control characters of a text as in Python, except those in `keep`."""
    return re.sub(
        r"[\x00-\x1f\x7f-\x9f\u2028\u2029]",
        lambda match: match[0] if match[0] in keep else match[0].encode("unicode_escape").decode(),
        text,
    )


def aligned(rows: Sequence[Sequence[object]]) -> list[str]:
    """Format rows as lines with aligned columns: the first one to the left, others to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def span(seconds: float) -> str:
    """Format a duration in a suitable unit: '744 ms', '5.9 s', '6.8 min'."""
    units = ((730 * 86400, 365.25 * 86400, "years"), (2 * 86400, 86400, "days"),
             (6000, 3600, "h"), (100, 60, "min"), (1, 1, "s"))  # fmt: skip
    for least, size, unit in units:
        if seconds >= least:
            return f"{seconds / size:.3g} {unit}"
    return f"{1e3 * seconds:.3g} ms" if seconds else "0 s"


def amount(number: float) -> str:
    """Format a number of bytes in a suitable unit: 1234567.0 as '1.23 MB'."""
    if not number:
        return "0 B"
    power = min(max(int(math.log10(abs(number)) // 3), 0), 5)
    return f"{number / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB', 'PB')[power]}"


def last_words(line: str | None, within_s: float = 1.0) -> None:
    """Print a last line on standard error, if any, and flush, before the process is ended at once.

    within_s: longest time to try [s], since writing to a full pipe without a reader never returns.
    """

    def speak() -> None:
        if line is not None:
            say_error(line)
        finish()

    speaking = threading.Thread(target=speak, daemon=True)
    try:
        speaking.start()
    except RuntimeError:  # from Python 3.12 on, no thread can start once the interpreter ends
        speak()
        return
    speaking.join(within_s)


def finish() -> None:
    """Flush both streams. An error at Python's exit would print a traceback and change the code."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            _drop_everything(stream)


def fill_closed_streams() -> None:
    """Open the null device for closed standard streams, so that no file gets their descriptors."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, this one


def _drop_everything(stream: TextIO) -> None:
    """Replace the file of a stream by the null device, which discards buffered text."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
