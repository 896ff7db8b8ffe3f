"""Connect the processes of a run: find each other, authenticate, and leave in order."""

import contextlib
import functools
import inspect
import json
import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import jax

from maxdiloco import errors, json_text, small_files
from maxdiloco.cluster import certificates, coordination, sockets
from maxdiloco.cluster.coordination import Job
from maxdiloco.cluster.failure_detector import FailureDetector
from maxdiloco.cluster.messages import Messenger, Peer
from maxdiloco.cluster.payloads import BULK, CONTROL
from maxdiloco.errors import ConfigError, LostPeerError

START = "maxdiloco/start"  # key under which process 0 publishes the start
# After an error of the main thread, wait this long for a loss that may have caused it [s]: a killed
# peer is detected after 2 s, and then process 0 notifies the others.
CAUSE_S = 4.0
REACHABLE = "let the hosts open TCP connections to each other."
SAME_SECRET = "Give all processes the same exchange_secret_file."

# Errors that a lost peer cannot cause. It can cause a CheckpointError.
OWN_ERRORS = (
    *(ConfigError, errors.DataError, errors.NumericsError, errors.Preempted, errors.SaveError),
    *(KeyboardInterrupt, SystemExit),
)


class Address(NamedTuple):
    """The address on which this process listens.

    Attributes:
      peer_port: process i listens on this port plus i; 0: on any free port.
      next_port: whether, with peer_port=0, process 0 prefers the port after JAX's.
      interface: address of this host to listen on; "": process 0 listens on all interfaces, other
        processes on the interface from which they reach process 0.
    """

    peer_port: int
    next_port: bool
    interface: str


@dataclass(frozen=True)
class Cluster:
    """The connections of this process to the other processes of the run.

    Attributes:
      job: the number of this process, and the number of processes.
      messenger: sends and receives messages.
      failure_detector: ends this process when another is lost.
      authority: fingerprint of the run's certificate authority.
      timeout_s: time limit for all processes to connect [s].
      jax_has_tls: whether JAX's coordination service accepts only processes of the run.
    """

    job: Job
    messenger: Messenger
    failure_detector: FailureDetector
    authority: str
    timeout_s: float
    jax_has_tls: bool = False

    @property
    def firewall_note(self) -> str:
        """A line about the ports that accept unauthenticated clients."""
        service = f"JAX's coordination service (port {coordination.address()[1]}), "
        return (
            f"note: {'' if self.jax_has_tls else service}Gloo, NCCL and MEGASCALE accept "
            f"unauthenticated clients on their ports. Open these to the hosts of the run only, see "
            f"docs/howto/networking-and-security.md."
        )

    def raise_cause(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """At the end of a `with`, raise the loss of a peer instead of an error that it has caused.

        A collective may fail with an error of its library before the loss is detected.
        """
        if error is None or isinstance(error, OWN_ERRORS):
            return
        if (loss := self.failure_detector.find_loss(CAUSE_S)) is not None:
            raise loss from error

    def open(self, channel: str, processes: Iterable[int]) -> None:
        """Open a channel to these processes, which must do the same, and wait for its connections.

        Raises:
          LostPeerError: a process did not connect within timeout_s, or has another secret.
        """
        deadline = time.monotonic() + self.timeout_s
        peers, late, wrong = {}, [], []
        for process in processes:
            try:
                peers[process] = self._published(process, deadline)
            except jax.errors.JaxRuntimeError:
                late.append(process)
            except LostPeerError as error:
                wrong.append(error)
        self.messenger.open(channel, peers)
        if wrong:  # wait for connections, so that these peers receive the error
            self.messenger.wait_until_connected(channel, min(CAUSE_S, deadline - time.monotonic()))
            raise wrong[0]
        if not late:
            late = self.messenger.wait_until_connected(channel, deadline - time.monotonic())
        if late:
            raise LostPeerError(
                f"process {self.job.process_id} on {socket.gethostname()} and processes {late} did "
                f"not reach each other within {self.timeout_s:g} s (the lesser of "
                f"jax_distributed_initialization_timeout and peer_timeout_seconds). See the end of "
                f"their own output, and {REACHABLE}"
            )

    def open_bulk(self) -> None:
        """Open the channel for outer gradients to all other processes. Raises LostPeerError."""
        job = self.job
        self.open(BULK, [peer for peer in range(job.num_processes) if peer != job.process_id])

    def _published(self, process: int, deadline: float) -> Peer:
        """Return the address that a process published. Raises LostPeerError, JaxRuntimeError."""
        text = coordination.get(_key(process), timeout_s=deadline - time.monotonic())
        match json_text.fields(text):
            case {"problem": str(problem)}:
                _wait_until_read()
                line = f"process {process} has ended: {problem}"
                raise LostPeerError(line, ConfigError.exit_code)
            case {"host": str(host), "port": int(port), "machine": str(machine), **rest}:
                if rest == {"authority": self.authority}:
                    return Peer(host or coordination.address()[0], port, machine)
        raise LostPeerError(
            f"process {process} has published no address with the secret of process "
            f"{self.job.process_id}, but {text[:60]!r}. {SAME_SECRET}"
        )


@contextlib.contextmanager
def connect_peers(
    job: Job,
    address: Address,
    *,
    secret_file: str = "",
    timeout_s: float,
    silence_s: float,
    jax_has_tls: bool = False,
) -> Iterator[Cluster]:
    """Connect to the other processes of the run for the time of a `with`.

    Enter it in the main thread after jax.distributed.initialize. A normal exit waits for the other
    processes. After an error the peers are notified, and os._exit ends the process after its main
    thread. If a lost peer caused the error, a line about the peer is printed.

    Args:
      job: the number of this process, and the number of processes.
      address: the address on which this process listens.
      secret_file: file with the secret of the run; "": process 0 makes a secret and publishes it.
      timeout_s: time limit to connect [s].
      silence_s: silence after which a peer is lost [s].
      jax_has_tls: see Cluster.

    Raises:
      ConfigError, LostPeerError: the processes cannot connect.
    """
    detector = FailureDetector(job.process_id)
    with contextlib.ExitStack() as stack:
        stack.push(functools.partial(_leave, detector))
        try:
            start_id, secret = _start_of_run(job, secret_file, timeout_s)
            listener = _listen(job, address)
        except ConfigError as error:
            coordination.put(_key(job.process_id), json.dumps({"problem": str(error)}))
            _wait_until_read()
            raise
        authority = certificates.authority_key(secret)
        fingerprint = certificates.fingerprint(authority)
        with certificates.key_files(authority, certificates.name_of(job.process_id)) as keys:
            messenger = Messenger(
                job.process_id, keys, listener=listener, timeout_s=silence_s, start_id=start_id
            )
        host, port = listener.getsockname()[:2]
        host = host if address.interface or job.process_id else ""
        mine = {"host": host, "port": port, "machine": socket.gethostname()}
        published = json.dumps(mine | {"authority": fingerprint})
        coordination.put(_key(job.process_id), published)
        detector.begin(messenger)
        cluster = Cluster(job, messenger, detector, fingerprint, timeout_s, jax_has_tls)
        cluster.open(CONTROL, range(1, job.num_processes) if job.process_id == 0 else [0])
        yield cluster
        jax.distributed.shutdown()  # a barrier: waits until every process is done


def exit_code(error: BaseException) -> int:
    """Return the exit code of a program that ends with this error."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return errors.INTERRUPTED
    return error.exit_code if isinstance(error, errors.USER_ERRORS) else errors.CRASHED


def one_line(error: BaseException) -> str:
    """Return the text of an error in one line, without its full stop."""
    return " ".join(str(error).split()).rstrip(".")


def secret_of_file(path: str) -> bytes:
    """Return the secret that exchange_secret_file names. Raises ConfigError."""
    try:
        secret = small_files.read_secret(path).strip()
    except OSError as error:
        raise ConfigError(
            f"exchange_secret_file={path}: {error.strerror}. Put the same file on every host, or "
            "leave the key out."
        ) from error
    if len(secret) < certificates.SECRET_BYTES:
        raise ConfigError(
            f"exchange_secret_file={path} has {len(secret)} bytes: expected at least "
            f"{certificates.SECRET_BYTES}. Write a random one, as `openssl rand -hex 32` prints it."
        )
    return secret


@contextlib.contextmanager
def tls_of_jax(secret_file: str) -> Iterator[dict[str, str]]:
    """Yield arguments for jax.distributed.initialize that restrict its service to this run.

    They are empty without a secret file, and before jax 0.12. JAX reads the files repeatedly, so
    they exist until the end of the `with`. Raises ConfigError.
    """
    known = inspect.signature(jax.distributed.initialize).parameters
    if not secret_file or "mtls_cert_file" not in known:
        yield {}
        return
    authority = certificates.authority_key(secret_of_file(secret_file))
    with certificates.key_files(authority, "coordination.maxdiloco.internal") as keys:
        yield {
            "mtls_ca_file": keys.authority,
            "mtls_cert_file": keys.certificate,
            "mtls_key_file": keys.key,
            "mtls_peer_uri_prefix": certificates.URI_PREFIX,
        }


def _leave(
    detector: FailureDetector,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """Close the failure detector; after an error, notify the peers of its reason."""
    if error is None:
        detector.close()
        return
    if not isinstance(error, OWN_ERRORS):
        detector.end_if_lost(CAUSE_S)
    why = f"{kind.__name__}: {one_line(error)}." if isinstance(error, errors.USER_ERRORS) else None
    detector.leave(exit_code(error), why)


def _key(process: int) -> str:
    return f"maxdiloco/peer/{process}"


def _start_of_run(job: Job, file: str, timeout_s: float) -> tuple[str, bytes]:
    """Return (id of this start, secret of the run). Raises ConfigError, LostPeerError."""
    try:
        if job.process_id == 0:
            secret = "" if file else secrets.token_hex(32)
            coordination.put(START, json.dumps({"id": secrets.token_hex(8), "secret": secret}))
        text = coordination.get(START, timeout_s=timeout_s)
    except jax.errors.JaxRuntimeError as error:
        raise LostPeerError(
            f"process 0 at {coordination.address()[0]} was lost before process {job.process_id} "
            f"could connect to it. See the end of its output and start the run again."
        ) from error
    found = json_text.fields(text)
    start_id, secret = found.get("id"), found.get("secret")
    valid = isinstance(start_id, str) and isinstance(secret, str)
    if not valid or 0 < len(secret) < certificates.SECRET_BYTES:
        raise LostPeerError(f"{START}={text[:60]!r}: process 0 has not published it. {SAME_SECRET}")
    if bool(file) == bool(secret):
        raise ConfigError(
            f"exchange_secret_file={file} in process {job.process_id}, and process 0 has "
            f"{'none' if file else 'one'}. {SAME_SECRET}"
        )
    return start_id, secret_of_file(file) if file else secret.encode()


def _listen(job: Job, address: Address) -> socket.socket:
    """Return the listening socket of this process. Raises ConfigError."""
    coordinator, coordinator_port = coordination.address()
    port = address.peer_port + job.process_id if address.peer_port else 0
    interface = address.interface
    if job.process_id == 0:
        if not port and address.next_port:
            with contextlib.suppress(OSError, OverflowError):  # OverflowError: port above 65535
                return sockets.listen(interface, coordinator_port + 1)
    elif not interface:
        interface = sockets.interface_towards((coordinator, coordinator_port))
    try:
        return sockets.listen(interface, port)
    except (OSError, OverflowError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        raise ConfigError(
            f"exchange_interface={address.interface} peer_port={address.peer_port or 'auto'}: "
            f"process {job.process_id} cannot listen on {interface or 'any address'} port {port} "
            f"of {socket.gethostname()}: {why}. Use an address of this host and free ports, or "
            f"leave both keys out."
        ) from error


def _wait_until_read() -> None:
    """Wait until every process has read why this process ends; JAX's store ends with process 0."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # a lost process does not come
        coordination.wait_for_all("maxdiloco/problem_read", timeout_s=CAUSE_S)
