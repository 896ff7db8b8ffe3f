"""Processes that make parts, one after the other, until there are none left."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import connection
from typing import Any

from maxdiloco.errors import USER_ERRORS, LostPeerError

Make = Callable[..., Any]


def map_parts(
    make: Make, common: tuple, calls: Sequence[tuple], processes: int
) -> Iterator[tuple[int, Any]]:
    """(i, make(*common, *calls[i])) of every call, in the order in which they end.

    common: pickled once into each process. processes: how many; they end with this one.
    Raises what make raises, of the errors a user can act on, and LostPeerError when a process is
    gone.
    """
    context = multiprocessing.get_context("spawn")  # JAX, where it runs, does not survive a fork
    waiting = iter(range(len(calls)))
    children: dict[connection.Connection, Any] = {}
    busy: set[connection.Connection] = set()  # the others have ended, or are about to
    try:
        for _ in range(min(processes, len(calls))):
            ours, theirs = context.Pipe()
            child = context.Process(target=_run, args=(theirs, make, common), daemon=True)
            child.start()
            theirs.close()
            children[ours] = child
            if _give(ours, waiting, calls):
                busy.add(ours)
        while busy:
            for ready in connection.wait(busy):
                number, value = _receive(ready, children[ready])
                if not _give(ready, waiting, calls):
                    busy.remove(ready)
                yield number, value
    finally:
        for ours, child in children.items():
            child.kill()  # what it has written under temporary names is removed by the next start
            child.join()
            ours.close()


def _give(ours, waiting, calls):
    """Send a process its next call; whether there is one."""
    number = next(waiting, None)
    with suppress(BrokenPipeError):  # the loss of the process is seen when it is waited for
        ours.send(None if number is None else (number, calls[number]))
    return number is not None


def _receive(ours, child):
    try:
        number, value, error = ours.recv()
    except (EOFError, ConnectionResetError) as lost:
        child.join()
        raise LostPeerError(
            f"a process that tokenises text is gone (exit code {child.exitcode}): killed, or out "
            "of memory. The same command goes on where it was; processes=1 needs less memory."
        ) from lost
    if error is not None:
        raise error
    return number, value


def _run(theirs, make, common):
    """The program of a process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for the first process
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    # Each process has a core of its own; tokenizers would take all of them in each.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    while (call := theirs.recv()) is not None:
        number, arguments = call
        try:
            theirs.send((number, make(*common, *arguments), None))
        except USER_ERRORS as error:
            theirs.send((number, None, error))


def _end_with(parent):
    parent.join()
    os._exit(1)
