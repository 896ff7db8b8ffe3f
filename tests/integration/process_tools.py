"""Starts the trainer as real processes and watches what they print."""

import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

from run_tools import ROOT, WAIT_S

# Code generation as it comes, see tests/conftest.py: the older one rounds a metric of `merge` and
# `synchronise` differently.
AS_USERS = {"XLA_FLAGS": ""}
# Half the compile time, for claims that no pass of the compiler decides. A start takes 7 s of CPU
# time so, and 15 with the compiler as it comes.
FEW_PASSES = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}

# Two slices of two devices; one layer and plain SGD, to compile in seconds.
FLAGS = (
    "model_name=tiny override_model_config=true base_emb_dim=16 base_num_decoder_layers=1 "
    "base_mlp_dim=32 base_num_query_heads=2 base_num_kv_heads=1 head_dim=8 dataset_type=synthetic "
    "max_target_length=16 per_device_batch_size=1 hardware=cpu dcn_diloco_parallelism=2 "
    "ici_fsdp_parallelism=2 diloco_sync_period=2 log_period=1 enable_tensorboard=false "
    "opt_type=sgd"
)
# The trainer, to which a lock is stale after three seconds.
IMPATIENT = """
from maxdiloco import train
from maxdiloco.storage import object_lock

object_lock.STALE_S = 3.0
train.main()
"""
TINY = dict(flag.split("=") for flag in FLAGS.split())


def flags(changes):
    """TINY with changes, as key=value arguments."""
    return [f"{key}={value}" for key, value in (TINY | changes).items()]


class Process:
    """One process of a run; its output goes to a file that can be read while it lives."""

    def __init__(self, command, log, environ):
        self.log = pathlib.Path(log)
        environ = os.environ | {"PYTHONUNBUFFERED": "1"} | environ
        with self.log.open("w") as output:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environ,
                start_new_session=True,
            )

    def text(self):
        return self.log.read_text()

    def wait_for(self, words):
        """Return once the output has the words."""
        limit = time.monotonic() + WAIT_S
        while words not in self.text():
            assert self.popen.poll() is None, f"ended without {words!r}:\n{self.text()}"
            assert time.monotonic() < limit, f"no {words!r} in {WAIT_S} s:\n{self.text()}"
            time.sleep(0.02)

    def end(self):
        """Wait for the end; the exit code, negative for a signal."""
        return self.popen.wait(timeout=WAIT_S)

    def errors(self):
        """The lines that name an error of ours."""
        return [
            line for line in self.text().splitlines() if re.match(r"(\[\d+\] )?\w+Error: ", line)
        ]

    def kill(self):
        """End what is left of it and of what it started."""
        for pid in session_members(self.popen.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.popen.wait()


def trainer(changes, log, environ=None, program=None):
    """`python -m maxdiloco.train` as one process. program: Python code in its place."""
    code = ["-c", program] if program else ["-m", "maxdiloco.train"]
    command = [sys.executable, *code, *flags(changes)]
    return Process(command, log, FEW_PASSES | (environ or {}))


def variables(count):
    """The variables of the environment that make each of `count` processes one of a run."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    together = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count)}
    return [together | {"JAX_PROCESS_ID": str(index)} for index in range(count)]


def trainers(count, changes, folder, environs=None, program=None):
    """`count` processes of one run. environs: further variables of each. program: of trainer."""
    return [
        trainer(
            changes,
            pathlib.Path(folder) / f"process_{index}.log",
            together | (environs[index] if environs else {}),
            program,
        )
        for index, together in enumerate(variables(count))
    ]


def local_slices(count, changes, log, environ=None):
    """scripts/run_local_slices.sh with this Python."""
    command = ["bash", str(ROOT / "scripts" / "run_local_slices.sh"), str(count)]
    environ = FEW_PASSES | {"MAXDILOCO_VENV": sys.prefix} | (environ or {})
    return Process([*command, *flags(changes)], log, environ)


def ends(processes, *codes):
    """All have ended with these codes."""
    found = [process.end() for process in processes]
    assert found == list(codes), "\n".join(process.text() for process in processes)


def session_members(leader):
    """Ids of the living processes in the session of a process that has ended (Linux)."""
    members = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except FileNotFoundError:  # it has just ended
                continue
            if int(session) == leader and state not in "ZX":
                members.append(int(entry.name))
    return members
