"""How the processes of a run connect for the watch, and how each of them leaves."""

import contextlib
import functools
import json
import os
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import jax

from maxdiloco import json_text
from maxdiloco.errors import (
    CRASHED,
    INTERRUPTED,
    USER_ERRORS,
    ConfigError,
    DataError,
    LostPeerError,
    NumericsError,
    Preempted,
    SaveError,
)
from maxdiloco.processes import coordination, links, star
from maxdiloco.processes.coordination import Job
from maxdiloco.processes.watch import Watch

CAUSE_S = 3.0  # an error of the main thread waits this long for a loss that may have caused it [s]
KEY = "maxdiloco/watch"
LAST_PORT = 65535

# Errors that no lost peer causes. It can cause a CheckpointError.
OWN_ERRORS = (
    *(ConfigError, DataError, NumericsError, Preempted, SaveError),
    *(KeyboardInterrupt, SystemExit),
)


@contextlib.contextmanager
def watched(
    job: Job, *, peer_port: int, next_port: bool, timeout_s: float, silence_s: float
) -> Iterator[None]:
    """Watch the other processes of the run for the time of a `with`.

    Enter it in the main thread after jax.distributed.initialize. The normal end waits for the
    others. After an error the peers are told, and the process ends by os._exit once the main
    thread is over; with the line of the watch instead where a lost peer caused the error.
    peer_port, next_port: see _listen. timeout_s: to connect. silence_s: see Watch.
    """
    watch = _start_watch(job, peer_port, next_port, timeout_s=timeout_s, silence_s=silence_s)
    with contextlib.ExitStack() as stack:
        stack.push(functools.partial(_leave, watch))
        yield
        jax.distributed.shutdown()  # a barrier: every process is done


def exit_code(error: BaseException) -> int:
    """The exit code of a program that ends with this error."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return error.exit_code if isinstance(error, USER_ERRORS) else CRASHED


def _start_watch(
    job: Job, peer_port: int, next_port: bool, *, timeout_s: float, silence_s: float
) -> Watch:
    try:
        connected = _connect(job, peer_port, next_port, timeout_s=timeout_s)
    except (ConfigError, LostPeerError) as error:
        Watch(job.process_id, [], silence_s=silence_s).leave(error.exit_code)
        raise
    return Watch(job.process_id, connected, silence_s=silence_s)


def _leave(
    watch: Watch,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """Stop watching at the normal end; after an error tell the peers, and why."""
    if error is None:
        watch.close()
        return
    if not isinstance(error, OWN_ERRORS):
        watch.end_if_lost(CAUSE_S)
    why = f"{kind.__name__}: {one_line(error)}." if isinstance(error, USER_ERRORS) else None
    watch.leave(exit_code(error), why)


def one_line(error: BaseException) -> str:
    """The text of an error in one line, without its full stop."""
    return " ".join(str(error).split()).rstrip(".")


def _connect(job: Job, peer_port: int, next_port: bool, *, timeout_s: float) -> list[star.Link]:
    """Links to the peers; process 0 gives its port and secret by JAX's key-value store."""
    address, coordinator_port = coordination.address()
    if job.process_id == 0:
        try:
            listener, secret = _listen(peer_port, coordinator_port + 1 if next_port else 0)
        except ConfigError as error:
            coordination.put(KEY, json.dumps({"problem": str(error)}))
            _wait_until_read()
            raise
        place = {"port": listener.getsockname()[1], "secret": secret, "host": socket.gethostname()}
        coordination.put(KEY, json.dumps(place))
        return star.gather(listener, secret, job.num_processes, timeout_s=timeout_s)
    try:
        text = coordination.get(KEY, timeout_s=timeout_s)
    except jax.errors.JaxRuntimeError as error:
        raise LostPeerError(
            f"process 0 at {address} was lost before process {job.process_id} could connect to it. "
            f"See the end of its output and start the run again."
        ) from error
    place = _place(text, address)
    if "problem" in place:
        _wait_until_read()
        line = f"process 0 at {address} has ended: {place['problem']}"
        raise LostPeerError(line, ConfigError.exit_code)
    return star.join(address, **place, process_id=job.process_id, timeout_s=timeout_s)


def _place(text: str, address: str) -> dict[str, Any]:
    """What process 0 has told. Raises LostPeerError where somebody else has written it."""
    try:
        place = json_text.parse(text)
    except ValueError:
        place = None
    told = {name: type(value) for name, value in place.items()} if isinstance(place, dict) else {}
    if told not in ({"problem": str}, {"port": int, "secret": str, "host": str}):
        raise LostPeerError(
            f"JAX's key-value store holds no place of process 0 at {address}, but {text[:60]!r}. "
            f"{links.OTHERS_WRITE}"
        )
    return place


def _listen(peer_port: int, next_port: int) -> tuple[socket.socket, str]:
    """What star.listen returns: on peer_port, else on next_port, else on any free port.

    Each may be 0 for none. Raises ConfigError when peer_port is taken; next_port may be.
    """
    if peer_port:
        try:
            return star.listen(peer_port)
        except OSError as error:
            raise ConfigError(
                f"peer_port={peer_port} cannot be used on {socket.gethostname()}: "
                f"{os.strerror(error.errno)}. Name a free port, or leave peer_port=0 to take one."
            ) from error
    if 0 < next_port <= LAST_PORT:
        with contextlib.suppress(OSError):
            return star.listen(next_port)
    return star.listen()


def _wait_until_read() -> None:
    """Wait until every process has read why process 0 ends: JAX's store ends with it."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # a lost process has nothing to read
        coordination.barrier("maxdiloco/watch_read", timeout_s=CAUSE_S)
