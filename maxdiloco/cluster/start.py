"""Start several processes as one run: find their launcher, start jax.distributed, and connect."""

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import jax

from maxdiloco.cluster import coordination, sockets
from maxdiloco.cluster.signals import exit_on_second_sigterm
from maxdiloco.errors import ConfigError, LostPeerError

if TYPE_CHECKING:
    from maxdiloco.cluster.peers import Cluster

ADDRESS = "JAX_COORDINATOR_ADDRESS"
BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
COUNT = "JAX_NUM_PROCESSES"
INDEX = "JAX_PROCESS_ID"
MEGASCALE = "MEGASCALE_"  # prefix of libtpu's variables for several slices
# Environment variables that a shell or a container may keep from an earlier attempt.
OF_A_START = (ADDRESS, BIND_ADDRESS, COUNT, INDEX, MEGASCALE)
TPU = "TPU"
SLURM = "Slurm"
OPEN_MPI = "Open MPI"

JAX_EXTRA_S = 60  # JAX's timeouts end in an abort, so they are a minute longer than ours


def launcher(environ: Mapping[str, str], *, on_tpu: bool) -> str | None:
    """Return the name of the launcher of several processes; None for a run of one process.

    Args:
      environ: the environment, with the variables that jax.distributed.initialize reads, and
        JAX_NUM_PROCESSES and JAX_PROCESS_ID, which it does not read.
      on_tpu: whether JAX's first platform is a TPU. JAX reads the number of its hosts, which may be
        one, from the metadata of the TPU.

    Raises:
      ConfigError: the variables of a local run are incomplete.
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
    if "OMPI_COMM_WORLD_SIZE" in environ:  # first, as in JAX: mpirun may run under Slurm
        return OPEN_MPI if environ["OMPI_COMM_WORLD_SIZE"] != "1" else None
    if {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID"} <= environ.keys():
        return SLURM if environ.get("SLURM_NTASKS", "1") != "1" else None
    if on_tpu:
        return TPU
    if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environ.keys():
        return "Kubernetes"
    return None


@contextlib.contextmanager
def join_processes(
    environ: Mapping[str, str],
    *,
    timeout_s: float,
    peer_timeout_s: float,
    peer_port: int = 0,
    interface: str = "",
    secret_file: str = "",
) -> Iterator["Cluster | None"]:
    """Join the other processes of the run for the time of a `with`; None in a run of one process.

    Enter it in the main thread before any JAX call that starts a backend, and use devices only
    inside. A lost peer ends this process with exit code 5. A peer that exits with 2, 3, 4 or 75
    ends this process with the same code. Both print one line. Other errors: see
    peers.connect_peers.

    Args:
      environ: see launcher.
      timeout_s: time limit for all processes to start [s].
      peer_timeout_s: silence after which a process is lost [s].
      peer_port: see peers.Address.
      interface: see peers.Address.
      secret_file: see peers.connect_peers.

    Raises:
      ConfigError, LostPeerError: the processes cannot connect.
    """
    kind = launcher(environ, on_tpu=(jax.config.jax_platforms or "").startswith("tpu"))
    if kind is None:
        yield None
        return
    # Imported here, so that a program of one process starts without aiohttp and cryptography.
    from maxdiloco.cluster import failure_detector, peers

    failure_detector.delay_aborts()
    with contextlib.ExitStack() as stack:
        tls = stack.enter_context(peers.tls_of_jax(secret_file))
        _initialize(kind, environ, tls, timeout_s=timeout_s, peer_timeout_s=peer_timeout_s)
        job = coordination.job()
        stack.enter_context(exit_on_second_sigterm())
        if job.num_processes == 1:
            stack.callback(jax.distributed.shutdown)
            yield None
            return
        cluster = stack.enter_context(
            peers.connect_peers(
                job,
                # If a scheduler starts the processes, the next job's JAX listens on the next port.
                peers.Address(peer_port, kind not in (SLURM, OPEN_MPI), interface),
                secret_file=secret_file,
                timeout_s=min(timeout_s, peer_timeout_s),  # JAX is connected: all have started
                silence_s=peer_timeout_s,
                jax_has_tls=bool(tls),
            )
        )
        yield cluster


def _local(environ: Mapping[str, str]) -> dict[str, object]:
    """Return arguments for jax.distributed.initialize from the variables of a local run."""
    _host_and_port(ADDRESS, environ)
    numbers = {}
    for key, name, words in (
        (COUNT, "num_processes", "the number of processes"),
        (INDEX, "process_id", "the index of this process, from 0"),
    ):
        if key in environ:
            if not environ[key].isdecimal():
                raise ConfigError(f"{key}={environ[key]}: expected an integer, {words}.")
            numbers[name] = int(environ[key])
    if numbers.get("num_processes") == 0:
        raise ConfigError(f"{COUNT}=0: expected 1 or more processes.")
    if len(numbers) == 2 and numbers["process_id"] >= numbers["num_processes"]:
        raise ConfigError(
            f"{INDEX}={numbers['process_id']} must be below {COUNT}={numbers['num_processes']}: "
            f"processes are counted from 0. Use {numbers['num_processes'] - 1} or less."
        )
    if numbers.get("process_id") == 0:
        _check_free(environ)
    if len(numbers) == 2:  # then JAX need not query a cluster's service
        return {**numbers, "cluster_detection_method": "deactivate"}
    return numbers


def _host_and_port(key: str, environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the host and port in a variable. Raises ConfigError."""
    host, _, port = environ[key].rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise ConfigError(
            f"{key}={environ[key]} has no host and port: set it to host:port of process 0."
        )
    return host, int(port)


def _check_free(environ: Mapping[str, str]) -> None:
    """Raise LostPeerError if the port is in use: JAX's coordination service may crash on it."""
    key = BIND_ADDRESS if BIND_ADDRESS in environ else ADDRESS
    host, port = _host_and_port(key, environ)
    try:
        sockets.listen(host.strip("[]") if key == BIND_ADDRESS else "", port).close()
    except OSError as error:
        raise LostPeerError(
            f"{key}={environ[key]} names a port that process 0 cannot use on "
            f"{socket.gethostname()}: {error}. Stop the process that uses it, or choose another "
            f"address."
        ) from error


def _variables_to_check(environ: Mapping[str, str]) -> str:
    """Return sentences about possibly stale variables, for the error of a start that failed."""
    lines = []
    for key in (ADDRESS, MEGASCALE + "COORDINATOR_ADDRESS"):
        if key in environ:
            host = environ[key].rpartition(":")[0] or environ[key]
            try:
                socket.getaddrinfo(host.strip("[]"), None)
            except OSError as error:
                lines.append(f"{key}={environ[key]} does not resolve: {error.strerror}.")
    found = [f"{key}={environ[key]}" for key in sorted(environ) if key.startswith(OF_A_START)]
    if found:
        lines.append(f"Unset those that are left of an earlier attempt: {' '.join(found)}.")
    return " ".join(lines)


def _gpus(kind: str, environ: Mapping[str, str]) -> dict[str, object]:
    """Return arguments for jax.distributed.initialize with which a process uses all visible GPUs.

    Under Slurm and Open MPI, JAX assigns GPU i of a host to its process i. That is wrong if a host
    has one process, or if the launcher hides the GPUs of other processes.
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
    kind: str,
    environ: Mapping[str, str],
    tls: Mapping[str, str],
    *,
    timeout_s: float,
    peer_timeout_s: float,
) -> None:
    from maxdiloco.cluster.failure_detector import end_process
    from maxdiloco.cluster.peers import SAME_SECRET, one_line

    arguments = _local(environ) if kind == ADDRESS else _gpus(kind, environ)

    def give_up() -> None:
        line = (
            f"jax_distributed_initialization_timeout={timeout_s:g} s have passed and not all "
            f"processes have started (launched by {kind}). {_variables_to_check(environ)} See the "
            f"output of the others; raise the key if they only start slowly. "
            f"{SAME_SECRET if tls else ''}"
        )
        end_process(LostPeerError.exit_code, " ".join(line.split()))

    alarm = threading.Timer(timeout_s, give_up)
    alarm.daemon = True
    alarm.start()
    try:
        jax.distributed.initialize(
            **arguments,
            **tls,
            initialization_timeout=int(timeout_s) + JAX_EXTRA_S,
            heartbeat_timeout_seconds=int(peer_timeout_s) + JAX_EXTRA_S,
        )
    except jax.errors.JaxRuntimeError as error:
        raise LostPeerError(
            f"the processes started by {kind} cannot connect: {one_line(error)}. See the output "
            f"of the others, and that the port of {ADDRESS} is free on the host of process 0."
        ) from error
    except (ValueError, RuntimeError) as error:
        if kind == TPU and isinstance(error, ValueError):
            return  # one TPU host without a cluster's metadata, as in a notebook
        raise ConfigError(
            f"several processes were started by {kind}, but JAX cannot find them: "
            f"{one_line(error)}. Set {ADDRESS}=host:port, {COUNT} and {INDEX} for each process, "
            f"or {COUNT}=1 for a run of one."
        ) from error
    finally:
        alarm.cancel()
