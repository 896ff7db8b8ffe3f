"""Errors of files and stores in one line for the user."""

import contextlib
from collections.abc import Iterator


def reason(error: BaseException) -> str:
    """Return the last, most specific part of an error's text, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.rstrip(".")
    # The file layer writes "while doing a: while doing b: why [code]", then lines of details.
    first_line = str(error).partition("\n")[0].partition(" [")[0]
    parts = [part for part in first_line.split(": ") if part]
    return ": ".join(parts[-2:]).rstrip(".") if parts else type(error).__name__


@contextlib.contextmanager
def replace_os_error(kind: type[Exception], what: str, remedy: str) -> Iterator[None]:
    """Replace an OSError inside the `with` by an error of this kind.

    Args:
      kind: class of the error to raise.
      what: the file, and the operation that failed.
      remedy: sentences.
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {reason(error)}. {remedy}") from error
