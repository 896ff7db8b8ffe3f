"""The processes of one island: process 0 decides, and the others follow in the same order.

Only process 0 has the executor, its threads and the store. Before it reads or replaces values on
the devices it broadcasts an operation, since these programs span all processes (needs JAX).
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxdiloco.errors import CheckpointError, ConfigError, NumericsError

# The operations that process 0 broadcasts.
READ, WRITE, RESET, WAIT, GO, FAIL = "read", "write", "reset", "wait", "go", "fail"
_BYTES = 4096  # of a message, which is broadcast with a fixed size
_ERRORS = {kind.__name__: kind for kind in (CheckpointError, ConfigError, NumericsError)}


def decides() -> bool:
    """Return whether this is process 0."""
    return jax.process_index() == 0


def tell(what: str, value: Any = None) -> None:
    """In process 0: broadcast the next operation to the others."""
    if jax.process_count() > 1:
        _broadcast(json.dumps([what, value]).encode())


def told() -> tuple[str, Any]:
    """In another process: wait for the next operation of process 0, and return it.

    Raises:
      Exception: the error that ends process 0.
    """
    while True:
        what, value = json.loads(_broadcast(b"").rstrip(b"\0"))
        if what == FAIL:
            raise _ERRORS[value[0]](value[1])
        if what != WAIT:
            return what, value


def first(work: Callable[[], Any]) -> Any:
    """Call `work` in process 0 only, and return its result in all processes.

    Raises:
      Exception: an error of this package that `work` raises, in all processes.
    """
    if not decides():
        return told()[1]
    with failing_together():
        result = work()
    tell(GO, result)
    return result


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """In process 0: end the others with an error of this package that ends process 0."""
    try:
        yield
    except tuple(_ERRORS.values()) as error:
        tell(FAIL, [type(error).__name__, str(error)[: _BYTES // 8]])
        raise


def _broadcast(data: bytes) -> bytes:
    if len(data) > _BYTES:
        raise AssertionError(f"{len(data)} bytes do not fit")
    padded = np.frombuffer(data.ljust(_BYTES, b"\0"), np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8).tobytes()
