"""Several processes as one run: when, how they find each other, and how each of them ends."""

import contextlib
import ctypes
import functools
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType

import jax
from jax._src import distributed as jax_distributed  # the only way to its key-value store

from maxdiloco.errors import (
    USER_ERRORS,
    ConfigError,
    DataError,
    LostPeerError,
    NumericsError,
    Preempted,
    SaveError,
)
from maxdiloco.processes import watch

ADDRESS = "JAX_COORDINATOR_ADDRESS"
BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
COUNT = "JAX_NUM_PROCESSES"
INDEX = "JAX_PROCESS_ID"
TPU = "TPU"
SLURM = "Slurm"
OPEN_MPI = "Open MPI"

# In seconds, our choice.
JAX_PATIENCE_S = 60  # JAX's own timeouts, which abort, come this much after ours
CAUSE_S = 3.0  # an error of the main thread waits this long for the loss that may be behind it

# Errors that no lost peer brings about; an error of a checkpoint can come from one.
OWN_ERRORS = (
    *(ConfigError, DataError, NumericsError, Preempted, SaveError),
    *(KeyboardInterrupt, SystemExit),
)
INTERRUPTED = 130
CRASHED = 1
LAST_PORT = 65535


@dataclass(frozen=True)
class Job:
    """This process among those of the run."""

    process_id: int
    num_processes: int


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
    _delay_aborts()
    _initialize(kind, environ, timeout_s=timeout_s, peer_timeout_s=peer_timeout_s)
    job = Job(jax_distributed.global_state.process_id, jax_distributed.global_state.num_processes)
    with contextlib.ExitStack() as stack:
        if job.num_processes == 1:
            stack.callback(jax.distributed.shutdown)
        else:
            listen = functools.partial(_listen, kind, peer_port)
            guard = _guard(job, listen, timeout_s=timeout_s, peer_timeout_s=peer_timeout_s)
            stack.push(functools.partial(_part, guard))
        yield job


def exit_code(error: BaseException) -> int:
    """The exit code of a program that ends with this error."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return error.exit_code if isinstance(error, USER_ERRORS) else CRASHED


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
        watch.listen(port)[0].close()
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
            f"the processes started by {kind} cannot meet: {_one_line(error)}. See the output of "
            f"the others, and that the port of {ADDRESS} is free on the host of process 0."
        ) from error
    except (ValueError, RuntimeError) as error:
        # A TPU host without a cluster's metadata, as under a notebook, is alone.
        if kind == TPU and isinstance(error, ValueError):
            return
        raise ConfigError(
            f"several processes were started by {kind}, but JAX cannot find them: "
            f"{_one_line(error)}. Set {ADDRESS}=host:port, {COUNT} and {INDEX} for each process, "
            f"or {COUNT}=1 for a run of one."
        ) from error
    finally:
        alarm.cancel()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _guard(
    job: Job,
    listen: Callable[[int], tuple[socket.socket, str]],
    *,
    timeout_s: float,
    peer_timeout_s: float,
) -> watch.Watch:
    try:
        # JAX has connected all processes by now: whoever does not come has been lost since.
        links = _meet(job, listen, timeout_s=min(timeout_s, peer_timeout_s))
    except (ConfigError, LostPeerError) as error:
        watch.Watch(job.process_id, [], silence_s=peer_timeout_s).leave(error.exit_code)
        raise
    return watch.Watch(job.process_id, links, silence_s=peer_timeout_s)


def _listen(kind: str, peer_port: int, coordinator_port: int) -> tuple[socket.socket, str]:
    """What watch.listen returns, on the port after JAX's own, which may be open to other hosts.

    Any free port instead where it is taken, and under Slurm and Open MPI: there the port after it
    is that of the next job. peer_port: if not 0, this port or a ConfigError.
    """
    if peer_port:
        try:
            return watch.listen(peer_port)
        except OSError as error:
            raise ConfigError(
                f"peer_port={peer_port} cannot be used on {socket.gethostname()}: "
                f"{os.strerror(error.errno)}. Name a free port, or leave peer_port=0 to take one."
            ) from error
    if kind not in (SLURM, OPEN_MPI) and coordinator_port < LAST_PORT:
        with contextlib.suppress(OSError):
            return watch.listen(coordinator_port + 1)
    return watch.listen()


def _meet(
    job: Job, listen: Callable[[int], tuple[socket.socket, str]], *, timeout_s: float
) -> list[watch.Link]:
    """Connect to the watch of process 0, whose port and secret travel by JAX's key-value store."""
    state, key = jax_distributed.global_state, "maxdiloco/watch"
    host, _, port = state.coordinator_address.rpartition(":")
    host = host.strip("[]")
    if job.process_id == 0:
        try:
            listener, secret = listen(int(port))
        except ConfigError as error:
            state.client.key_value_set(key, json.dumps({"problem": str(error)}))
            _all_know(state.client)
            raise
        told = {"port": listener.getsockname()[1], "secret": secret}
        state.client.key_value_set(key, json.dumps(told))
        return watch.gather(listener, secret, job.num_processes, timeout_s=timeout_s)
    try:
        told = json.loads(state.client.blocking_key_value_get(key, int(timeout_s * 1000)))
    except jax.errors.JaxRuntimeError as error:
        raise LostPeerError(
            f"process 0 at {host} was lost before process {job.process_id} could meet it. See the "
            f"end of its output and start the run again."
        ) from error
    if "problem" in told:
        _all_know(state.client)
        line = f"process 0 at {host} has ended: {told['problem']}"
        raise LostPeerError(line, ConfigError.exit_code)
    return watch.join(host, told["port"], told["secret"], job.process_id, timeout_s=timeout_s)


def _part(
    guard: watch.Watch,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> bool:
    """Leave the `with`: all together at the normal end, alone after an error."""
    if error is None:
        try:
            jax.distributed.shutdown()  # a barrier: every process is done
        except jax.errors.JaxRuntimeError as failure:
            _part(guard, type(failure), failure, failure.__traceback__)
            raise
        guard.close()
        return False
    if not isinstance(error, OWN_ERRORS) and (loss := guard.cause(CAUSE_S)):
        guard.leave(loss.code)
        raise LostPeerError(*loss) from error
    known = isinstance(error, USER_ERRORS)
    guard.leave(exit_code(error), f"{kind.__name__}: {_one_line(error)}." if known else None)
    return False


def _all_know(client: object) -> None:
    """Wait until every process has read why process 0 ends: JAX's store ends with it."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # a lost process has nothing to read
        client.wait_at_barrier("maxdiloco/watch_read", int(CAUSE_S * 1000))


def _delay_aborts() -> None:
    """Let an abort of JAX wait until the watch has named the peer whose loss is behind it.

    When process 0 dies, JAX's service thread in each of the others aborts within 0.1 s, without
    the GIL and with no hook. The handler is libc's sleep: it gets the signal's number, 6, as its
    seconds; then the abort goes on. It needs no Python to run.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(int(signal.SIGABRT), ctypes.cast(libc.sleep, ctypes.c_void_p))
