"""Several processes as one run: when, how they find each other, and how each of them ends."""

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping

import jax

from maxdiloco.errors import ConfigError, LostPeerError
from maxdiloco.processes import aborts, coordination, links, peers
from maxdiloco.processes.coordination import Job
from maxdiloco.processes.peers import one_line
from maxdiloco.processes.watch import end_process

ADDRESS = "JAX_COORDINATOR_ADDRESS"
BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
COUNT = "JAX_NUM_PROCESSES"
INDEX = "JAX_PROCESS_ID"
TPU = "TPU"
SLURM = "Slurm"
OPEN_MPI = "Open MPI"

JAX_PATIENCE_S = 60  # JAX's own timeouts, which abort, come this much after ours; our choice


def launcher(environ: Mapping[str, str], *, on_tpu: bool) -> str | None:
    """What started several processes, read off the environment; None for a run of one process.

    The variables are those that jax.distributed.initialize looks at, plus the number and index of
    the processes beside JAX_COORDINATOR_ADDRESS, which it does not read. A Slurm allocation or
    an MPI environment of one task is one process. on_tpu: JAX's first platform is a TPU; its hosts
    are found through its metadata, so that JAX is asked for one host too.
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
    """Join the other processes of the run for the time of a `with`; with none, do nothing.

    Enter it in the main thread before any JAX call that starts a backend, and let everything that
    uses devices happen inside. A lost peer ends this process with exit code 5, and a peer that
    ends with 2, 3 or 4 with that code; either with one line: by a LostPeerError out of the `with`
    where the main thread notices (gloo and NCCL raise), else from a thread. Any other error leaves
    it unchanged, but the process then ends by `os._exit` once the main thread is over: JAX's own
    teardown waits for the peers and aborts.
    timeout_s: for all processes to come. peer_timeout_s: silence after which one is lost.
    peer_port: of process 0, for the others to say that they are there; 0: see _listen.
    Raises ConfigError, LostPeerError.
    """
    kind = launcher(environ, on_tpu=(jax.config.jax_platforms or "").startswith("tpu"))
    if kind is None:
        yield Job(0, 1)
        return
    aborts.delay()
    _initialize(kind, environ, timeout_s=timeout_s, peer_timeout_s=peer_timeout_s)
    job = coordination.job()
    if job.num_processes == 1:
        try:
            yield job
        finally:
            jax.distributed.shutdown()
        return
    with peers.watched(
        job,
        peer_port=peer_port,
        next_port=kind not in (SLURM, OPEN_MPI),  # there it is JAX's port of the next job
        timeout_s=min(timeout_s, peer_timeout_s),  # JAX has connected them all by now
        silence_s=peer_timeout_s,
    ):
        yield job


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
    if numbers.get("process_id") == 0 and BIND_ADDRESS not in environ:
        _check_free(int(port))
    # Everything is told: nothing to detect, and no question to a cluster's service.
    told = {"cluster_detection_method": "deactivate"} if len(numbers) == 2 else {}
    return {**numbers, **told}


def _check_free(port: int) -> None:
    """Refuse a port that is taken: JAX's service, which is to listen there, may then crash."""
    try:
        links.listen(port)[0].close()
    except (OSError, OverflowError) as error:
        raise LostPeerError(
            f"{ADDRESS} names port {port}, which process 0 cannot use on {socket.gethostname()}: "
            f"{error}. End what holds it, or choose another port."
        ) from error


def _gpus(kind: str, environ: Mapping[str, str]) -> dict[str, object]:
    """Arguments for jax.distributed.initialize that leave a process all the GPUs it sees.

    Under Slurm and Open MPI JAX gives a process the one GPU of its place on the host. That is
    wrong where it has the host to itself, and where the launcher hides the GPUs of the others.
    """
    alone = {
        SLURM: environ.get("SLURM_STEP_NUM_NODES") == environ.get("SLURM_NTASKS"),
        OPEN_MPI: environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1",
    }
    hidden = "," not in environ.get("CUDA_VISIBLE_DEVICES", ",")
    keeps = kind in alone and (alone[kind] or hidden) and "JAX_LOCAL_DEVICE_IDS" not in environ
    return {"local_device_ids": []} if keeps else {}


def _initialize(
    kind: str, environ: Mapping[str, str], *, timeout_s: float, peer_timeout_s: float
) -> None:
    arguments = _local(environ) if kind == ADDRESS else _gpus(kind, environ)
    line = (
        f"jax_distributed_initialization_timeout={timeout_s:g} s have passed and not all processes "
        f"have come (launched by {kind}). See the output of the others; raise the key if they only "
        f"start slowly."
    )
    alarm = threading.Timer(timeout_s, end_process, (LostPeerError.exit_code, line))
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
            f"the processes started by {kind} cannot meet: {one_line(error)}. See the output of "
            f"the others, and that the port of {ADDRESS} is free on the host of process 0."
        ) from error
    except (ValueError, RuntimeError) as error:
        # A TPU host without a cluster's metadata, as under a notebook, is alone.
        if kind == TPU and isinstance(error, ValueError):
            return
        raise ConfigError(
            f"several processes were started by {kind}, but JAX cannot find them: "
            f"{one_line(error)}. Set {ADDRESS}=host:port, {COUNT} and {INDEX} for each process, "
            f"or {COUNT}=1 for a run of one."
        ) from error
    finally:
        alarm.cancel()
