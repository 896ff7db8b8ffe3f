"""How the processes of a run connect for the watch, and how each of them leaves.

A connection to process 0 begins with the proofs of handshake.py, and process 0 says that it has
taken it.
"""

import contextlib
import functools
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import jax

from maxdiloco import errors, json_text
from maxdiloco.errors import ConfigError, LostPeerError
from maxdiloco.processes import coordination, handshake, links
from maxdiloco.processes.coordination import Job
from maxdiloco.processes.handshake import Hello
from maxdiloco.processes.watch import Link, Watch

KEY = "maxdiloco/watch"
CHANNEL = 2  # of the hello: beside BULK and ROWS of links.py
TAKEN = b"taken"  # what process 0 says once a link is the one of its process
# In seconds, our choice.
CAUSE_S = 3.0  # an error of the main thread waits this long for a loss that may have caused it
TRY_S = 10.0  # for one try to connect
MOST_PAUSE_S = 2.0  # between two of them
REACHABLE = "let the hosts open TCP connections to each other."

# Errors that no lost peer causes. It can cause a CheckpointError.
OWN_ERRORS = (
    *(ConfigError, errors.DataError, errors.NumericsError, errors.Preempted, errors.SaveError),
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
    try:
        connected = _connect(job, peer_port, next_port, timeout_s=timeout_s)
    except (ConfigError, LostPeerError) as error:
        Watch(job.process_id, [], silence_s=silence_s).leave(error.exit_code)
        raise
    watch = Watch(job.process_id, connected, silence_s=silence_s)
    with contextlib.ExitStack() as stack:
        stack.push(functools.partial(_leave, watch))
        yield
        jax.distributed.shutdown()  # a barrier: every process is done


def exit_code(error: BaseException) -> int:
    """The exit code of a program that ends with this error."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return errors.INTERRUPTED
    return error.exit_code if isinstance(error, errors.USER_ERRORS) else errors.CRASHED


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
    why = f"{kind.__name__}: {one_line(error)}." if isinstance(error, errors.USER_ERRORS) else None
    watch.leave(exit_code(error), why)


def one_line(error: BaseException) -> str:
    """The text of an error in one line, without its full stop."""
    return " ".join(str(error).split()).rstrip(".")


def _connect(job: Job, peer_port: int, next_port: bool, *, timeout_s: float) -> list[Link]:
    """Links to the peers; process 0 gives its port and secret by JAX's key-value store."""
    address, coordinator_port = coordination.address()
    if job.process_id == 0:
        try:
            listener = _listen(peer_port, coordinator_port + 1 if next_port else 0)
        except ConfigError as error:
            coordination.put(KEY, json.dumps({"problem": str(error)}))
            _wait_until_read()
            raise
        port, secret = listener.getsockname()[1], secrets.token_hex(32)
        place = {"port": port, "secret": secret, "host": socket.gethostname()}
        coordination.put(KEY, json.dumps(place))
        return gather(listener, secret, job.num_processes, timeout_s=timeout_s)
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
    return join(address, **place, process_id=job.process_id, timeout_s=timeout_s)


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


def _listen(peer_port: int, next_port: int) -> socket.socket:
    """A listener on peer_port (ConfigError where it is taken), else next_port, else any."""
    if peer_port:
        try:
            return links.listen(port=peer_port)
        except OSError as error:
            raise ConfigError(
                f"peer_port={peer_port} cannot be used on {socket.gethostname()}: "
                f"{os.strerror(error.errno)}. Name a free port, or leave peer_port=0 to take one."
            ) from error
    with contextlib.suppress(OSError, OverflowError):  # that of a port above 65535
        return links.listen(port=next_port)
    return links.listen()


def _wait_until_read() -> None:
    """Wait until every process has read why process 0 ends: JAX's store ends with it."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # a lost process has nothing to read
        coordination.barrier("maxdiloco/watch_read", timeout_s=CAUSE_S)


def gather(
    listener: socket.socket, secret: str, num_processes: int, *, timeout_s: float
) -> list[Link]:
    """Process 0: wait for all other processes, then close the listener. Strangers are refused.

    A second connection of a process is refused, too, while its first one stands.
    Raises LostPeerError naming the processes that did not come within timeout_s, MismatchError.
    """
    came: dict[int, Link] = {}
    failures: list[BaseException] = []
    over = threading.Event()

    def admit(hello: Hello, connection: socket.socket) -> None:
        if hello.source in came and not _has_closed(came[hello.source].socket):
            connection.close()
            return
        came[hello.source] = Link(connection, hello.source)
        with contextlib.suppress(OSError):  # gone again: the next one takes its place
            connection.sendall(TAKEN)  # the buffer of a new socket has room for it
        if len(came) == num_processes - 1:
            over.set()

    def fail(error: BaseException) -> None:
        failures.append(error)
        over.set()

    expected = [(process, CHANNEL) for process in range(1, num_processes)]
    acceptor = handshake.Acceptor(
        *(0, secret.encode(), listener, expected, admit),
        complain=lambda hello, problem: None,  # a process of the run tries again
        fail=fail,
    )
    acceptor.start()
    over.wait(timeout_s)
    acceptor.stop()
    if failures:
        raise failures[0]
    if missing := sorted({process for process, _ in expected} - came.keys()):
        raise LostPeerError(
            f"processes {missing} did not reach process 0 on {socket.gethostname()} within "
            f"{timeout_s:g} s (the lesser of jax_distributed_initialization_timeout and "
            f"peer_timeout_seconds). See the end of their own output, and {REACHABLE}"
        )
    return list(came.values())


def _has_closed(connection: socket.socket) -> bool:
    """Whether the peer has ended a connection on which it has sent nothing; never waits."""
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def join(
    address: str, port: int, secret: str, host: str, process_id: int, *, timeout_s: float
) -> list[Link]:
    """Every other process: connect to process 0. Raises LostPeerError if it cannot be reached.

    address: of process 0. host: its name for messages. Tries again until timeout_s where process 0
    has sent it away among many. Raises MismatchError for another version.
    """
    limit = time.monotonic() + timeout_s
    failures = 0
    while True:
        try:
            connection = _dial((address, port), secret, process_id, limit)
            break
        except OSError as error:
            pause_s = handshake.pause_s(failures, MOST_PAUSE_S)
            again = isinstance(error, handshake.RefusedError | ConnectionResetError | TimeoutError)
            if not again or time.monotonic() + pause_s > limit:
                raise LostPeerError(
                    f"process {process_id} cannot reach process 0 at {address} port {port}: "
                    f"{error}. See the end of the output of process 0, and {REACHABLE}"
                ) from error
        time.sleep(pause_s)
        failures += 1
    link = Link(connection, 0, host)
    link.send(host=socket.gethostname())
    return [link]


def _dial(address: tuple[str, int], secret: str, process_id: int, limit: float) -> socket.socket:
    """A connection that process 0 has taken. Raises OSError, MismatchError."""
    try_s = max(0.0, min(TRY_S, limit - time.monotonic()))
    mine = handshake.hello(process_id, 0, CHANNEL)
    connection = handshake.dial(address, secret.encode(), mine, connect_s=try_s, answer_s=try_s)
    with contextlib.ExitStack() as stack:
        stack.callback(connection.close)
        if handshake.receive(connection, len(TAKEN), time.monotonic() + try_s) != TAKEN:
            raise handshake.RefusedError("it has not taken the connection")
        stack.pop_all()
    return connection
