"""When a program is one of several processes, and errors when these cannot connect."""

import re
import signal
import socket
import threading

import jax
import pytest

from maxdiloco.cluster import failure_detector, start
from maxdiloco.errors import ConfigError, LostPeerError

SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "a,b"}
SLURM |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
ALONE_ON_HOST = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "2"}
MPI = {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1"}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
LOCAL = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1"}
LOCAL_0 = {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}
LOCAL_2 = LOCAL | LOCAL_0


@pytest.mark.parametrize(
    "environ, expected",
    [
        ({}, None),
        (LOCAL_2, "JAX_COORDINATOR_ADDRESS"),
        (LOCAL_2 | {"JAX_NUM_PROCESSES": "1"}, None),
        (LOCAL, "JAX_COORDINATOR_ADDRESS"),
        (SLURM | {"SLURM_NTASKS": "2"}, "Slurm"),
        (SLURM | {"SLURM_NTASKS": "1"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}, None),  # salloc without srun
        (MPI | {"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI"),
        (MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI"),  # 5: found by later versions of JAX alone
        (SLURM | {"SLURM_NTASKS": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI"),  # its daemon's
        (KUBERNETES | {"JOB_COMPLETION_INDEX": "0"}, "Kubernetes"),
        (KUBERNETES, None),  # any pod
    ],
)
def test_the_environment_shows_whether_there_are_processes(environ, expected):
    """The variables that jax.distributed.initialize looks at; a count of one is one process."""
    assert start.launcher(environ, on_tpu=False) == expected


def test_a_tpu_host_without_a_cluster_is_one_process(monkeypatch):
    """jax.distributed.initialize finds no coordinator, as on the machine behind a notebook."""
    assert start.launcher({}, on_tpu=True) == start.TPU == "TPU"

    def finds_none(**arguments):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", finds_none)
    monkeypatch.setattr(failure_detector, "delay_aborts", lambda: None)
    monkeypatch.setattr(start, "launcher", lambda environ, on_tpu: start.TPU)
    with start.join_processes({}, timeout_s=1, peer_timeout_s=1) as job:
        assert job is None


@pytest.fixture
def asked(monkeypatch):
    """Arguments of jax.distributed.initialize, which raises asked["error"] if there is one."""
    asked = {"error": None}

    def initialize(**arguments):
        asked.update(arguments)
        if asked["error"]:
            raise asked["error"]

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    return asked


def initialize(kind, environ=None):
    start._initialize(kind, environ or {}, {}, timeout_s=60, peer_timeout_s=60)


@pytest.mark.parametrize(
    ("kind", "environ", "all_it_sees"),
    [
        ("Slurm", {"SLURM_NTASKS": "16", "SLURM_STEP_NUM_NODES": "2"}, False),
        ("Slurm", {"SLURM_NTASKS": "16", "CUDA_VISIBLE_DEVICES": "0"}, True),  # --gpus-per-task=1
        ("Slurm", {"SLURM_NTASKS": "16", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, False),
        ("Slurm", ALONE_ON_HOST, True),
        ("Slurm", ALONE_ON_HOST | {"JAX_LOCAL_DEVICE_IDS": "0,1"}, False),  # named by the user
        ("Open MPI", {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, True),
        ("Open MPI", {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, False),
        ("TPU", {}, False),
        ("Kubernetes", {}, False),
    ],
)
def test_a_process_alone_on_its_host_keeps_all_gpus(asked, kind, environ, all_it_sees):
    """JAX would give it the one of its place on the host; [] leaves what is visible."""
    initialize(kind, environ)
    assert asked.get("local_device_ids") == ([] if all_it_sees else None)


NO_CLUSTER = RuntimeError("Failed to recognize\n coordinator address job-0.")
PORT_TAKEN = jax.errors.JaxRuntimeError("UNKNOWN: Failed to start RPC server")  # by another program


@pytest.mark.parametrize(
    ("kind", "error", "raised", "reason"),
    [
        ("TPU", NO_CLUSTER, ConfigError, "Failed to recognize coordinator address job-0"),
        ("Slurm", PORT_TAKEN, LostPeerError, "Failed to start RPC server"),
    ],
)
def test_an_error_of_jax_is_one_line_with_its_reason(asked, kind, error, raised, reason):
    """JAX's own errors have several lines on some clusters."""
    asked["error"] = error
    with pytest.raises(raised, match=reason) as caught:
        initialize(kind)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "bind",
    ["", "127.0.0.1:{port}", "192.0.2.1:{port}"],  # the last is TEST-NET-1: of no host
)
def test_a_coordinators_port_that_cannot_be_used_is_named(asked, free_port, bind):
    """Before JAX starts: jaxlib's service sometimes crashes on a port in use. The last part has a
    free port as the control."""
    environ = LOCAL_0 | {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port}"}
    given = {"JAX_COORDINATOR_BIND_ADDRESS": bind.format(port=free_port)} if bind else {}
    ((key, value),) = (given or {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port}"}).items()
    with socket.create_server(("127.0.0.1" if bind else "", free_port)):
        with pytest.raises(LostPeerError, match=f"{key}={value} "):
            initialize("JAX_COORDINATOR_ADDRESS", environ | given)
    assert "num_processes" not in asked
    here = {"JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{free_port}"} if bind else {}
    initialize("JAX_COORDINATOR_ADDRESS", environ | here)
    assert asked["num_processes"] == 2


@pytest.mark.parametrize(
    ("others", "key", "value"),
    [
        (LOCAL_0, "JAX_COORDINATOR_ADDRESS", "10.0.0.1"),
        (LOCAL_0, "JAX_COORDINATOR_ADDRESS", "host:"),
        (LOCAL_0, "JAX_COORDINATOR_ADDRESS", ":80"),
        (LOCAL_0, "JAX_COORDINATOR_ADDRESS", "host:http"),
        (LOCAL_0, "JAX_COORDINATOR_ADDRESS", "host:65536"),
        (LOCAL_2, "JAX_COORDINATOR_BIND_ADDRESS", "0.0.0.0"),
        ({}, "JAX_NUM_PROCESSES", "2"),
        ({}, "JAX_PROCESS_ID", "2"),
        (LOCAL_2, "JAX_NUM_PROCESSES", "0"),
        (LOCAL_2, "JAX_NUM_PROCESSES", "two"),
        (LOCAL_2, "JAX_PROCESS_ID", "-1"),
        (LOCAL_2, "JAX_PROCESS_ID", "2"),
    ],
)
def test_a_variable_of_a_local_run_that_cannot_work_is_named(asked, others, key, value):
    processes = start.join_processes(others | {key: value}, timeout_s=1, peer_timeout_s=1)
    with pytest.raises(ConfigError, match=f"{key}={value}[ :]"):
        processes.__enter__()
    assert "num_processes" not in asked


def test_one_process_is_left_alone():
    """No service, no thread, no signal handler."""
    before = signal.getsignal(signal.SIGABRT), signal.getsignal(signal.SIGTERM)
    with start.join_processes({}, timeout_s=1, peer_timeout_s=1) as job:
        assert job is None
        assert "maxdiloco-failure-detector" not in [thread.name for thread in threading.enumerate()]
        assert (signal.getsignal(signal.SIGABRT), signal.getsignal(signal.SIGTERM)) == before


ALONE = """
import os, sys
from maxdiloco.errors import ConfigError
from maxdiloco.cluster import failure_detector, start
try:
    with start.join_processes(os.environ, timeout_s=1, peer_timeout_s=1):
        print("met")
except ConfigError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize(
    ("environ", "code", "named"),
    [
        # An address without a number of processes, and no cluster that has one.
        ({}, 1, "JAX_COORDINATOR_ADDRESS.*JAX_NUM_PROCESSES"),
        # JAX's own timeout ends in an abort; ours comes before it.
        (LOCAL_0, 5, "LostPeerError: jax_distributed_.*=1 "),
        # Left in the shell by an earlier attempt.
        (
            LOCAL_0 | {"MEGASCALE_SLICE_ID": "1"},
            5,
            "LostPeerError: .*JAX.*MEGASCALE_SLICE_ID=1[ .]",
        ),
        (
            LOCAL_2 | {"JAX_PROCESS_ID": "1", "JAX_COORDINATOR_ADDRESS": "no.invalid:1"},
            5,
            r"LostPeerError: .*JAX_COORDINATOR_ADDRESS=no\.invalid:1 does not resolve",
        ),
    ],
)
def test_processes_that_are_not_found_or_never_come_end_the_wait(
    started, free_port, environ, code, named
):
    ended = started(ALONE, **{"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port}"} | environ)
    out, errors = ended.communicate()
    assert (ended.returncode, out) == (code, "")
    assert re.search(named, errors)
