"""Errors of XLA for a program that does not fit the device."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from maxdiloco.errors import ConfigError


@contextmanager
def require_fit(name: str, remedy: str) -> Iterator[None]:
    """Raise ConfigError if the program that is compiled or run in the context does not fit.

    Args:
      name: of the program.
      remedy: a sentence for the error.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if (reason := out_of_memory_message(error)) is None:
            raise
        raise ConfigError(f"{name} does not fit the device: {reason} {remedy}") from error


def out_of_memory_message(error: jax.errors.JaxRuntimeError) -> str | None:
    """Return the message of XLA when a program does not fit; None for another error."""
    _, status, message = str(error).replace("\n", " ").partition("RESOURCE_EXHAUSTED: ")
    if not status:
        return None
    end = message.find(". ")
    return message[: end + 1] if end > 0 else message


def temporary_bytes(message: str, arguments: int) -> int:
    """Return the size of a program's temporaries from the result of out_of_memory_message.

    Args:
      message: of XLA.
      arguments: bytes of the program's arguments, which some messages include.

    Returns:
      Bytes; 0 if the message has no size.
    """
    number = r"([\d.]+)([KMGT])"
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    if found := re.search(rf"HLO temporaries \({number}\)", message):
        return int(float(found[1]) * units[found[2]])
    if found := re.search(rf"Used {number} of", message):
        return max(0, int(float(found[1]) * units[found[2]]) - arguments)
    return 0
