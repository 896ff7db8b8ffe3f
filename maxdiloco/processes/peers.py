"""How the processes of a run find each other, and how each of them leaves."""

import contextlib
import functools
import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import jax

from maxdiloco import errors, small_files
from maxdiloco.errors import ConfigError, LostPeerError
from maxdiloco.processes import certificates, coordination, sockets
from maxdiloco.processes.certificates import Peer
from maxdiloco.processes.coordination import Job
from maxdiloco.processes.mailbox import BULK, WORDS, Mailbox
from maxdiloco.processes.watch import Watch

SECRET = "maxdiloco/secret"
OF_A_FILE = "of exchange_secret_file"  # there in place of a secret
# In seconds, our choice.
CAUSE_S = 4.0  # an error of the main thread waits this long for a loss that may have caused it
REACHABLE = "let the hosts open TCP connections to each other."

# Errors that no lost peer causes. It can cause a CheckpointError.
OWN_ERRORS = (
    *(ConfigError, errors.DataError, errors.NumericsError, errors.Preempted, errors.SaveError),
    *(KeyboardInterrupt, SystemExit),
)


class Place(NamedTuple):
    """Where the processes of a run listen.

    peer_port: process i listens on the i-th port after it; 0: on any. next_port: process 0 takes
    the port after JAX's then, if it is free. interface: the address to listen on and to be reached
    at; "": process 0 listens on all, the others on the one from which the coordinator is reached.
    """

    peer_port: int
    next_port: bool
    interface: str


@dataclass(frozen=True)
class Room:
    """The mailbox and the watch of this process, and the store in which the others say who they
    are.
    """

    job: Job
    mailbox: Mailbox
    secret: bytes
    timeout_s: float
    watch: Watch

    def raise_cause(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """At the end of a `with`, raise the loss of a peer instead of an error that it has caused.

        A collective fails with an error of its library before the watch has found the loss.
        """
        if error is None or isinstance(error, OWN_ERRORS):
            return
        if (loss := self.watch.loss_behind(CAUSE_S)) is not None:
            raise loss from error

    def open(self, lane: str, ranks: Iterable[int], **limits: int) -> None:
        """Open a lane to these processes and wait until it stands. Raises LostPeerError.

        All of them have to do so within timeout_s; the error names those that have not.
        """
        limit = time.monotonic() + self.timeout_s
        peers, late, wrong = {}, [], []
        for rank in ranks:
            try:
                peers[rank] = self._told(rank, limit)
            except jax.errors.JaxRuntimeError:
                late.append(rank)
            except LostPeerError as error:
                wrong.append(error)
        self.mailbox.open(lane, peers, **limits)
        if wrong:  # which those hear whom this process can reach
            self.mailbox.meet(lane, min(CAUSE_S, limit - time.monotonic()))
            raise wrong[0]
        if not late:
            late = self.mailbox.meet(lane, limit - time.monotonic())
        if late:
            raise LostPeerError(
                f"process {self.job.process_id} on {socket.gethostname()} and processes {late} did "
                f"not reach each other within {self.timeout_s:g} s (the lesser of "
                f"jax_distributed_initialization_timeout and peer_timeout_seconds). See the end of "
                f"their own output, and {REACHABLE}"
            )

    def open_bulk(self, most_bytes: int) -> None:
        """Open the lane of the outer gradients to all others. Raises LostPeerError."""
        others = [rank for rank in range(self.job.num_processes) if rank != self.job.process_id]
        self.open(BULK, others, most_bytes=most_bytes)

    def _told(self, rank: int, limit: float) -> Peer:
        get = functools.partial(coordination.get, timeout_s=limit - time.monotonic())
        try:
            peer = certificates.told(rank, self.secret, get)
        except LostPeerError as error:
            if error.exit_code == ConfigError.exit_code:
                _wait_until_read()
            raise
        return peer if peer.host else peer._replace(host=coordination.address()[0])


@contextlib.contextmanager
def watched(
    job: Job, place: Place, *, secret_file: str = "", timeout_s: float, silence_s: float
) -> Iterator[Room]:
    """Watch the other processes of the run for the time of a `with`.

    Enter it in the main thread after jax.distributed.initialize. The normal end waits for the
    others. After an error the peers are told, and the process ends by os._exit once the main
    thread is over; with the line of the watch instead where a lost peer caused the error.
    secret_file: holds the secret of the run; "": process 0 makes one, for which JAX's key-value
    store is the place. timeout_s: to connect. silence_s: after it a peer is lost.
    Raises ConfigError, LostPeerError.
    """
    watch = Watch(job.process_id)
    with contextlib.ExitStack() as stack:
        stack.push(functools.partial(_leave, watch))
        try:
            secret = _secret(job, secret_file, timeout_s)
            listener = _listen(job, place)
        except ConfigError as error:
            certificates.tell_problem(job.process_id, str(error), coordination.put)
            _wait_until_read()
            raise
        identity = certificates.make_identity()
        host, port = listener.getsockname()[:2]
        host = host if place.interface or job.process_id else ""
        mine = Peer(host, port, socket.gethostname(), identity.certificate.decode())
        certificates.tell(job.process_id, mine, secret, coordination.put)
        mailbox = Mailbox(job.process_id, identity, listener=listener, timeout_s=silence_s)
        watch.begin(mailbox)
        room = Room(job, mailbox, secret, timeout_s, watch)
        star = range(1, job.num_processes) if job.process_id == 0 else [0]
        room.open(WORDS, star)
        yield room
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


def secret_of_file(path: str) -> bytes:
    """The secret that exchange_secret_file names. Raises ConfigError."""
    try:
        secret = small_files.read_secret(path).strip()
    except OSError as error:
        raise ConfigError(
            f"exchange_secret_file={path}: {error.strerror}. Put the same file on every host, or "
            "leave the key out."
        ) from error
    if len(secret) < certificates.LEAST_SECRET:
        raise ConfigError(
            f"exchange_secret_file={path} has {len(secret)} bytes: {certificates.LEAST_SECRET} "
            "are the least. Write a random one, as `openssl rand -hex 32` prints it."
        )
    return secret


def _secret(job: Job, file: str, timeout_s: float) -> bytes:
    """The secret of the run. Raises ConfigError, LostPeerError."""
    try:
        if job.process_id == 0:
            coordination.put(SECRET, OF_A_FILE if file else secrets.token_hex(32))
        shared = coordination.get(SECRET, timeout_s=timeout_s)
    except jax.errors.JaxRuntimeError as error:
        raise LostPeerError(
            f"process 0 at {coordination.address()[0]} was lost before process {job.process_id} "
            f"could connect to it. See the end of its output and start the run again."
        ) from error
    if bool(file) != (shared == OF_A_FILE):
        raise ConfigError(
            f"exchange_secret_file={file} in process {job.process_id}, and process 0 has "
            f"{'none' if file else 'one'}. Give all processes the same."
        )
    if file:
        return secret_of_file(file)
    secret = shared.encode()
    if len(secret) < certificates.LEAST_SECRET:
        raise LostPeerError(
            f"JAX's key-value store holds a secret of {len(secret)} bytes, which no process of "
            f"this run wrote. {certificates.OTHERS_WRITE}"
        )
    return secret


def _listen(job: Job, place: Place) -> socket.socket:
    """The listener of this process. Raises ConfigError."""
    address, coordinator_port = coordination.address()
    port = place.peer_port + job.process_id if place.peer_port else 0
    interface = place.interface
    if job.process_id == 0:
        if not port and place.next_port:
            with contextlib.suppress(OSError, OverflowError):  # that of a port above 65535
                return sockets.listen(interface, coordinator_port + 1)
    elif not interface:
        interface = sockets.interface_towards((address, coordinator_port))
    try:
        return sockets.listen(interface, port)
    except (OSError, OverflowError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        raise ConfigError(
            f"exchange_interface={place.interface} peer_port={place.peer_port}: process "
            f"{job.process_id} cannot listen on {interface or 'any address'} port {port} of "
            f"{socket.gethostname()}: {why}. Use an address of this host and free ports, or leave "
            f"both keys out."
        ) from error


def _wait_until_read() -> None:
    """Wait until every process has read why this one ends: JAX's store ends with process 0."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # a lost process has nothing to read
        coordination.barrier("maxdiloco/problem_read", timeout_s=CAUSE_S)
