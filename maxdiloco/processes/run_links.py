"""Links between the processes of a run; addresses and secret come by JAX's key-value store."""

import contextlib
import secrets
from collections.abc import Iterator

import jax

from maxdiloco.errors import ConfigError, LostPeerError
from maxdiloco.processes import coordination
from maxdiloco.processes.links import Links, exchange_addresses, interface_towards, listen

SECRET = "maxdiloco/links/secret"


@contextlib.contextmanager
def opened(
    *, peer_port: int, interface: str, fingerprint: str, timeout_s: float, bulk: bool = True
) -> Iterator[Links]:
    """Links of this process to others; enter it after jax.distributed.initialize.

    Rows go between process 0 and each other process. bulk: so does bulk, between any two.
    peer_port: process i listens on the port 1 + i after it, since process 0 has the watch on it; 0:
    on a free one. interface: the address to listen on and to be reached at; "": the one from which
    the coordinator is reached. fingerprint: must be equal
    in all processes. timeout_s: silence after which a peer is lost. The normal end waits as long
    for what is queued. Raises ConfigError for an address that cannot be used, LostPeerError.
    """
    job = coordination.job()
    address = interface or interface_towards(coordination.address())
    number = peer_port + 1 + job.process_id if peer_port else 0
    try:
        listener = listen(address, number)
    except (OSError, OverflowError) as error:  # that of a port above 65535
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(
            f"exchange_interface={interface} peer_port={peer_port}: process {job.process_id} cannot "
            f"listen on {address} port {number}: {why}. Use an address of this host and free "
            f"ports, or leave both keys out."
        ) from error

    def get(key: str) -> str:
        return coordination.get(key, timeout_s=timeout_s)

    try:
        if job.process_id == 0:
            coordination.put(SECRET, secrets.token_hex(32))
        secret = bytes.fromhex(get(SECRET))
        others = [process for process in range(job.num_processes) if process != job.process_id]
        rows = others if job.process_id == 0 else [0]
        peers = others if bulk else rows
        mine = (address, listener.getsockname()[1])
        addresses = exchange_addresses(
            job.process_id, peers, mine, put=coordination.put, get=get
        )
    except jax.errors.JaxRuntimeError as error:
        listener.close()
        raise LostPeerError(
            "a process was lost before the others could connect to it. See the end of the output "
            "of each and start the run again."
        ) from error
    links = Links(
        job.process_id,
        addresses,
        listener=listener,
        secret=secret,
        fingerprint=fingerprint,
        timeout_s=timeout_s,
        bulk=peers if bulk else (),
        rows=rows,
    )
    with contextlib.ExitStack() as stack:
        stack.callback(links.close, 0.0)  # after an error; at the normal end they are closed
        links.meet()
        yield links
        links.close(timeout_s)
