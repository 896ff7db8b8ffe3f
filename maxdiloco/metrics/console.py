"""The console of a run: a line at each log point, and a progress bar on a terminal."""

import sys
import textwrap
from collections.abc import Mapping

from maxdiloco.processes.output import one_line, say

WIDTH = 100  # of a terminal, in characters; our choice

# (metric, its format), in the order of the line.
_COLUMNS = (
    ("learning/loss", "loss {:.4f}"),
    ("eval/loss", "eval loss {:.4f}"),
    ("learning/lr", "lr {:.2e}"),
    ("learning/grad_norm", "grad norm {:.3f}"),
    ("diloco/outer_grad_norm", "outer grad norm {:.3f}"),
    ("diloco/drift", "drift {:.2e}"),
    ("perf/step_time", "{:.3f} s/step"),
    ("perf/tokens_per_second", "{:,.0f} tokens/s"),
    ("perf/mfu", "mfu {:.1%}"),
)


def console_line(step: int, total_steps: int, values: Mapping[str, float]) -> str:
    """step 120/2000 | loss 2.3456 | lr 3.00e-04 | 0.812 s/step: the metrics of _COLUMNS."""
    shown = [form.format(values[name]) for name, form in _COLUMNS if name in values]
    return " | ".join([f"step {step}/{total_steps}", *shown])


def sample_lines(step: int, text: str) -> str:
    """A generated text below a headline, in lines of WIDTH characters at most."""
    lines = [f"sample after step {step}:"]
    for line in text.splitlines():
        lines += textwrap.wrap(one_line(line), WIDTH - 4, drop_whitespace=False) or [""]
    return "\n".join([lines[0], *(f"  | {line}".rstrip() for line in lines[1:])])


class Progress:
    """A progress bar if standard error is a terminal, and lines on standard output.

    A context manager. first_step, total_steps: steps done before, and at the end. shown: False in
    all processes but the first; nothing is printed then.
    """

    def __init__(self, *, first_step: int, total_steps: int, shown: bool = True):
        self._shown = shown
        self._bar = None
        if shown and sys.stderr is not None and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                initial=first_step,
                total=total_steps,
                unit="step",
                dynamic_ncols=True,
                leave=False,
            )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind, exception, traceback) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self) -> None:
        """Move the bar by one step."""
        if self._bar is not None:
            self._bar.update()

    def line(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is not None:
            with self._bar.external_write_mode():
                say(text)
        elif self._shown:
            say(text)
