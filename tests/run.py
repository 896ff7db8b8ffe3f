"""Run the programs of the package: in this process, in a subprocess, or in several processes.

    run = train(tmp_path / "a", steps=5)
    assert run.code == 0 and run.rows[-1]["step"] == 5

    process = start_train(tmp_path / "a", paced=True)
    process.wait_for_output("step 8/")
    process.popen.kill()

    processes = start_cluster(2, tmp_path / "two", steps=5)
    assert_exit_codes(processes, 0, 0)

`run_files.py` reads the files that a run leaves.
"""

import contextlib
import io
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import jax
import run_files

from maxdiloco import train as train_program

ROOT = pathlib.Path(__file__).parent.parent
WAIT_S = 300  # far more than a start takes on a busy machine

# The run that every function here trains: two replicas on two devices, rounds of four steps, a
# learning rate that does not depend on the number of steps. 62 steps are more than an unread pipe
# holds (see Process), and no multiple of the period, so that the replicas differ at the end.
STEPS = 62
KEYS = dict(
    hardware="cpu",
    dcn_diloco_parallelism=2,
    ici_fsdp_parallelism=1,
    dataset_type="synthetic",
    vocab_size=32,
    base_emb_dim=16,
    base_num_decoder_layers=2,
    base_mlp_dim=32,
    base_num_query_heads=2,
    base_num_kv_heads=2,
    head_dim=8,
    max_target_length=16,
    per_device_batch_size=2,
    remat_policy="none",
    learning_rate=1e-2,
    diloco_sync_period=4,
    learning_rate_schedule_steps=100,
    log_period=1,
    checkpoint_period=5,
    async_checkpointing="false",
    enable_tensorboard="false",
    steps=STEPS,
)
# What `start_cluster` changes: slices of two devices, and a model that compiles faster, since each
# process compiles it.
CLUSTER_KEYS = dict(
    ici_fsdp_parallelism=2,
    base_num_decoder_layers=1,
    base_num_kv_heads=1,
    per_device_batch_size=1,
    diloco_sync_period=2,
    opt_type="sgd",
    checkpoint_period=500,
    async_checkpointing="true",
)

# Variables of a process. The default code generation of XLA instead of the older one that
# tests/conftest.py selects, which rounds a metric of `merge` and `synchronise` differently.
DEFAULT_CODE_GENERATION = {"XLA_FLAGS": ""}
# Half the compile time, for claims that do not depend on optimizations: a start takes 7 s of CPU
# time instead of 15.
FEW_OPTIMIZATIONS = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


@dataclass(frozen=True)
class Run:
    """The end of a program.

    Attributes:
      code: the exit code.
      output: what the program wrote to stdout.
      errors: what it wrote to stderr.
      folder: the folder of the training run, if it is one.
    """

    code: int
    output: str
    errors: str
    folder: object = None

    @property
    def rows(self):
        """The rows of metrics.jsonl, see run_files.metrics_rows."""
        return run_files.metrics_rows(self.folder)

    @property
    def error(self):
        """The only line on stderr. Fails if there are more."""
        line = self.errors.strip()
        assert line and "\n" not in line and "Traceback" not in line, self.errors
        return line


def run_program(program, *arguments):
    """Call a program's `main` in this process, with the arguments as text, and return its Run."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = program([str(argument) for argument in arguments])
    return Run(code, output.getvalue(), errors.getvalue())


def output_of(program, *arguments):
    """Return what a program prints that exits with 0."""
    run = run_program(program, *arguments)
    assert run.code == 0, run.errors
    return run.output


def refused(program, *arguments):
    """Return the exit code and the only line of error of a program that refuses its arguments."""
    run = run_program(program, *arguments)
    return run.code, run.error


def names_key(line, key):
    """Return whether an error names a key: `steps` is not named by `num_steps`."""
    return re.search(rf"(?<!\w){re.escape(key)}(?!\w)", line) is not None


def train_arguments(run_folder, *arguments, **keys):
    """Return the command line of a run.

    Args:
      run_folder: becomes base_output_directory and run_name.
      *arguments: come first, such as a yml file.
      **keys: override KEYS.
    """
    base, _, name = str(run_folder).rpartition("/")
    values = KEYS | dict(base_output_directory=base, run_name=name) | keys
    return [*map(str, arguments), *(f"{key}={value}" for key, value in values.items())]


def train(run_folder, *arguments, **keys):
    """Train in this process and return the Run; the arguments are those of train_arguments."""
    run = run_program(train_program.main, *train_arguments(run_folder, *arguments, **keys))
    return Run(run.code, run.output, run.errors, run_folder)


class Process:
    """A command in a session of its own, whose output a test reads while it runs.

    Args:
      command: the program and its arguments.
      environ: changes to the environment.
      paced: whether output that the test has not read holds the process back. A pipe of 4096 bytes
        holds about 30 lines of a run, so the run cannot finish before the test reacts to a line.
    """

    def __init__(self, command, environ=None, *, paced=False):
        self._file = None if paced else tempfile.TemporaryFile()
        self._read = b""
        self.popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if paced else self._file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | (environ or {}),
            start_new_session=True,
            pipesize=4096 if paced else -1,
        )
        if paced:
            os.set_blocking(self.popen.stdout.fileno(), False)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.kill_session()

    @property
    def output(self):
        """What the process has printed so far; if it is paced, what has been read of it."""
        if self._file is not None:  # not `read`: the process writes at the offset of the file
            size = os.fstat(self._file.fileno()).st_size
            self._read = os.pread(self._file.fileno(), size, 0)
        return self._read.decode(errors="replace")

    def wait_for_output(self, text):
        """Return as soon as the output contains a text."""
        limit = time.monotonic() + WAIT_S
        while text not in self.output:
            running = self.popen.poll() is None
            if not self._read_pipe():
                assert running or text in self.output, f"ended without {text!r}:\n{self.output}"
                assert time.monotonic() < limit, f"no {text!r} in {WAIT_S} s:\n{self.output}"
                time.sleep(0.02)

    def wait_for_exit(self, timeout_s=WAIT_S):
        """Wait for the end, and return the exit code: negative for a signal that killed it."""
        limit = time.monotonic() + timeout_s
        while self._read_pipe() or self.popen.poll() is None:
            assert time.monotonic() < limit, f"no end in {timeout_s} s:\n{self.output}"
            time.sleep(0.005)
        while self._read_pipe():
            pass
        return self.popen.returncode

    def error_lines(self):
        """Return the lines that name an error of the package."""
        pattern = re.compile(r"(\[\d+\] )?\w+Error: ")
        return [line for line in self.output.splitlines() if pattern.match(line)]

    def kill_session(self):
        """Kill what is left of the process and of its children."""
        for pid in session_members(self.popen.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.popen.wait()

    def _read_pipe(self):
        """Read up to 1024 bytes of a paced process; return whether there were any."""
        if self.popen.stdout is None or self.popen.stdout.closed:
            return False
        with contextlib.suppress(BlockingIOError):
            found = os.read(self.popen.stdout.fileno(), 1024)
            self._read += found
            return bool(found)
        return False


def start_train(run_folder, *, environ=None, program=None, paced=False, **keys):
    """Start `python -m maxdiloco.train` and return its Process.

    Args:
      run_folder, **keys: see train_arguments.
      environ: changes to the environment.
      program: Python code that replaces the module.
      paced: see Process.
    """
    # As many devices as this process has, so that both share compiled programs.
    environ = {"JAX_NUM_CPU_DEVICES": str(jax.device_count())} | (environ or {})
    command = [sys.executable, *_code(program), *train_arguments(run_folder, **keys)]
    return Process(command, environ, paced=paced)


def kill_train_at(run_folder, text, **keys):
    """Start a run, and kill it when its output contains a text."""
    with start_train(run_folder, paced=True, **keys) as process:
        process.wait_for_output(text)
        process.popen.kill()
        assert process.wait_for_exit() == -signal.SIGKILL


def start_cluster(count, run_folder, *, environs=None, program=None, **keys):
    """Start `count` processes that train one run, with CLUSTER_KEYS, and return their Processes.

    environs has further variables of each process. The other arguments are those of start_train.
    """
    keys = CLUSTER_KEYS | keys
    command = [sys.executable, *_code(program), *train_arguments(run_folder, **keys)]
    return [
        Process(command, FEW_OPTIMIZATIONS | of_cluster | own)
        for of_cluster, own in zip(cluster_environs(count), environs or [{}] * count, strict=True)
    ]


def _code(program):
    return ["-c", program] if program else ["-m", "maxdiloco.train"]


def start_local_slices(count, run_folder, *, environ=None, **keys):
    """Start scripts/run_local_slices.sh with this Python and CLUSTER_KEYS; return its Process."""
    script = ROOT / "scripts" / "run_local_slices.sh"
    keys = CLUSTER_KEYS | keys
    command = ["bash", str(script), str(count), *train_arguments(run_folder, **keys)]
    environ = FEW_OPTIMIZATIONS | {"MAXDILOCO_VENV": sys.prefix} | (environ or {})
    return Process(command, environ)


def cluster_environs(count):
    """Return the variables that make each of `count` processes one of a run."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    shared = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count)}
    return [shared | {"JAX_PROCESS_ID": str(index)} for index in range(count)]


def assert_exit_codes(processes, *codes):
    """Wait for the end of all processes, and compare their exit codes."""
    found = [process.wait_for_exit() for process in processes]
    assert found == list(codes), "\n".join(process.output for process in processes)


def session_members(leader):
    """Return the ids of the living processes in the session of a process (Linux)."""
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
