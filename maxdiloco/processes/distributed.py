"""Several processes as one run: what started them, jax.distributed and links for them."""

import contextlib
import functools
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping

import jax

from maxdiloco.errors import ConfigError, LostPeerError
from maxdiloco.processes import coordination, links, peers, watch
from maxdiloco.processes.coordination import Job
from maxdiloco.processes.links import Links
from maxdiloco.processes.peers import one_line
from maxdiloco.processes.signals import ending_at_second_sigterm

ADDRESS = "JAX_COORDINATOR_ADDRESS"
BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
COUNT = "JAX_NUM_PROCESSES"
INDEX = "JAX_PROCESS_ID"
TPU = "TPU"
SLURM = "Slurm"
OPEN_MPI = "Open MPI"

SECRET = "maxdiloco/links/secret"
JAX_PATIENCE_S = 60  # JAX's timeouts end in an abort, so they are this much longer; our choice


def launcher(environ: Mapping[str, str], *, on_tpu: bool) -> str | None:
    """What started several processes, as the environment says; None for a run of one process.

    The variables are those that jax.distributed.initialize reads, and JAX_NUM_PROCESSES and
    JAX_PROCESS_ID, which it does not. on_tpu: JAX's first platform is a TPU; JAX finds the number
    of its hosts, which may be one, in the metadata of the TPU.
    Raises ConfigError when the variables of a local run are incomplete.
    """
    if environ.get(COUNT) == "1":
        return None
    if ADDRESS in environ:
        return ADDRESS
    for key in (COUNT, INDEX):
        if key in environ:
            raise ConfigError(
                f"{key}={environ[key]} is set but {ADDRESS} is not: the processes cannot find each "
                f"other. Set {ADDRESS}=host:port of process 0, or unset {key}."
            )
    if "OMPI_COMM_WORLD_SIZE" in environ:  # first, as for JAX: its daemons may be Slurm's tasks
        return OPEN_MPI if environ["OMPI_COMM_WORLD_SIZE"] != "1" else None
    if {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID"} <= environ.keys():
        return SLURM if environ.get("SLURM_NTASKS", "1") != "1" else None
    if on_tpu:
        return TPU
    if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environ.keys():
        return "Kubernetes"
    return None


@contextlib.contextmanager
def processes(
    environ: Mapping[str, str], *, timeout_s: float, peer_timeout_s: float, peer_port: int = 0
) -> Iterator[Job]:
    """Context manager around jax.distributed; a no-op for one process.

    Enter it in the main thread before any JAX call that starts a backend, and use devices only
    inside. A lost peer ends this process with exit code 5; a peer that ends with 2, 3, 4 or 75
    ends it with the same code. Either prints one line; for other errors see peers.watched.
    timeout_s: until all processes have started. peer_timeout_s: a process that is silent for so
    long is lost. peer_port: of process 0, for the watch over peers; 0: see peers._listen.
    Raises ConfigError, LostPeerError.
    """
    kind = launcher(environ, on_tpu=(jax.config.jax_platforms or "").startswith("tpu"))
    if kind is None:
        yield Job(0, 1)
        return
    watch.delay_aborts()
    _initialize(kind, environ, timeout_s=timeout_s, peer_timeout_s=peer_timeout_s)
    job = coordination.job()
    with contextlib.ExitStack() as stack:
        stack.enter_context(ending_at_second_sigterm())
        if job.num_processes == 1:
            stack.callback(jax.distributed.shutdown)
        else:
            watched = peers.watched(
                job,
                peer_port=peer_port,
                next_port=kind not in (SLURM, OPEN_MPI),  # there the next job's JAX listens on it
                timeout_s=min(timeout_s, peer_timeout_s),  # all have started: JAX has connected
                silence_s=peer_timeout_s,
            )
            stack.enter_context(watched)
        yield job


@contextlib.contextmanager
def linked(
    *, peer_port: int, interface: str, fingerprint: str, timeout_s: float, bulk: bool = True
) -> Iterator[Links]:
    """Links of this process to others; enter it after jax.distributed.initialize.

    Rows go between process 0 and each other process. bulk: so does bulk, between any two.
    peer_port: process i listens on the port 1 + i after it; 0: on any free one. interface: the
    address to listen on and to be reached at; "": the one from which the coordinator is reached.
    fingerprint: must be equal in all processes. timeout_s: silence after which a peer is lost. The
    normal end waits as long for what is queued. Raises ConfigError for an address that cannot be
    used, LostPeerError.
    """
    job = coordination.job()
    address = interface or links.interface_towards(coordination.address())
    number = peer_port + 1 + job.process_id if peer_port else 0
    try:
        listener = links.listen(address, number)
    except (OSError, OverflowError) as error:  # that of a port above 65535
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(
            f"exchange_interface={interface} peer_port={peer_port}: process {job.process_id} "
            f"cannot listen on {address} port {number}: {why}. Use an address of this host and "
            f"free ports, or leave both keys out."
        ) from error

    get = functools.partial(coordination.get, timeout_s=timeout_s)
    try:
        if job.process_id == 0:
            coordination.put(SECRET, secrets.token_hex(32))
        secret = bytes.fromhex(get(SECRET))
        others = [process for process in range(job.num_processes) if process != job.process_id]
        rows = others if job.process_id == 0 else [0]
        towards = others if bulk else rows
        mine = (address, listener.getsockname()[1])
        addresses = links.exchange_addresses(
            job.process_id, towards, mine, put=coordination.put, get=get
        )
    except jax.errors.JaxRuntimeError as error:
        listener.close()
        raise LostPeerError(
            "a process was lost before the others could connect to it. See the end of the output "
            "of each and start the run again."
        ) from error
    made = Links(
        job.process_id,
        addresses,
        listener=listener,
        secret=secret,
        fingerprint=fingerprint,
        timeout_s=timeout_s,
        bulk=towards if bulk else (),
        rows=rows,
    )
    with contextlib.ExitStack() as stack:
        stack.callback(made.close, 0.0)  # after an error; at the normal end they are closed
        made.meet()
        yield made
        made.close(timeout_s)


def _local(environ: Mapping[str, str]) -> dict[str, object]:
    """Arguments for jax.distributed.initialize from the variables of a local run."""
    host, _, port = environ[ADDRESS].rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(
            f"{ADDRESS}={environ[ADDRESS]} has no host and port: set it to host:port of process 0."
        )
    numbers = {}
    for key, name, words in (
        (COUNT, "num_processes", "the number of processes"),
        (INDEX, "process_id", "the index of this process, from 0"),
    ):
        if key in environ:
            if not environ[key].isdecimal():
                raise ConfigError(f"{key}={environ[key]} is not a whole number: set it to {words}.")
            numbers[name] = int(environ[key])
    if len(numbers) == 2 and numbers["process_id"] >= numbers["num_processes"]:
        raise ConfigError(
            f"{INDEX}={numbers['process_id']} must be below {COUNT}={numbers['num_processes']}: "
            f"processes are counted from 0. Use {numbers['num_processes'] - 1} or less."
        )
    if numbers.get("process_id") == 0:
        _check_free(environ)
    if len(numbers) == 2:  # nothing is left to ask a cluster's service
        return {**numbers, "cluster_detection_method": "deactivate"}
    return numbers


def _check_free(environ: Mapping[str, str]) -> None:
    """Refuse a port in use: JAX's coordination service may crash on it."""
    key = BIND_ADDRESS if BIND_ADDRESS in environ else ADDRESS
    host, _, port = environ[key].rpartition(":")
    interface = host.strip("[]") if key == BIND_ADDRESS else ""
    try:
        links.listen(interface, int(port)).close()
    except (OSError, OverflowError, ValueError) as error:
        raise LostPeerError(
            f"{key}={environ[key]} names a port that process 0 cannot use on "
            f"{socket.gethostname()}: {error}. End what holds it, or choose another address."
        ) from error


def _gpus(kind: str, environ: Mapping[str, str]) -> dict[str, object]:
    """Arguments for jax.distributed.initialize that leave a process all the GPUs it sees.

    Under Slurm and Open MPI JAX gives process i of a host its GPU i. That is wrong where a host has
    one process, and where the launcher hides the GPUs of the other processes.
    """
    alone_on_host = {
        SLURM: environ.get("SLURM_STEP_NUM_NODES") == environ.get("SLURM_NTASKS"),
        OPEN_MPI: environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1",
    }
    hidden = "," not in environ.get("CUDA_VISIBLE_DEVICES", ",")
    if kind not in alone_on_host or "JAX_LOCAL_DEVICE_IDS" in environ:
        return {}
    return {"local_device_ids": []} if alone_on_host[kind] or hidden else {}


def _initialize(
    kind: str, environ: Mapping[str, str], *, timeout_s: float, peer_timeout_s: float
) -> None:
    arguments = _local(environ) if kind == ADDRESS else _gpus(kind, environ)
    line = (
        f"jax_distributed_initialization_timeout={timeout_s:g} s have passed and not all processes "
        f"have started (launched by {kind}). See the output of the others; raise the key if they "
        f"only start slowly."
    )
    alarm = threading.Timer(timeout_s, watch.end_process, (LostPeerError.exit_code, line))
    alarm.daemon = True
    alarm.start()
    try:
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=int(timeout_s) + JAX_PATIENCE_S,
            heartbeat_timeout_seconds=int(peer_timeout_s) + JAX_PATIENCE_S,
        )
    except jax.errors.JaxRuntimeError as error:
        raise LostPeerError(
            f"the processes started by {kind} cannot connect: {one_line(error)}. See the output "
            f"of the others, and that the port of {ADDRESS} is free on the host of process 0."
        ) from error
    except (ValueError, RuntimeError) as error:
        if kind == TPU and isinstance(error, ValueError):
            return  # one TPU host without a cluster's metadata, as under a notebook
        raise ConfigError(
            f"several processes were started by {kind}, but JAX cannot find them: "
            f"{one_line(error)}. Set {ADDRESS}=host:port, {COUNT} and {INDEX} for each process, "
            f"or {COUNT}=1 for a run of one."
        ) from error
    finally:
        alarm.cancel()
