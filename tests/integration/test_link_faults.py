"""Runs with the host carrier whose processes are killed or stopped, and what they end with."""

import pathlib
import random
import re
import signal
import sys
import time

import process_tools as tools
import pytest
import run_tools

SCRIPT = tools.ROOT / "scripts" / "run_local_slices.sh"
KILLED = pathlib.Path(__file__).with_name("killed_process.py")

STEPS = 24
KEYS = {"steps": STEPS, "checkpoint_period": 5, "log_period": 4, "ici_fsdp_parallelism": 1}
STREAMING = {
    "enable_streaming_diloco": "true",
    "num_diloco_fragments": 2,
    "diloco_sync_period": 6,  # sends at 3, 6, 9, ...; applied two steps later
    "num_communication_overlapping_steps": 2,
    "diloco_exchange_dtype": "float4_e3m0",
}
EAGER = {"diloco_outer_overlap": "eager", "diloco_sync_period": 4}
DATA_PARALLEL = {"enable_diloco": "false"}


@pytest.fixture(scope="module")
def started(programs):
    """Starts a program that sees the compiled programs of this module; none outlives it."""
    processes = []

    def start(command, log, environ):
        processes.append(tools.Process(command, log, tools.AS_USERS | environ))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


@pytest.fixture(scope="module")
def run(started, tmp_path_factory):
    """Trains two processes to the end through kills; returns the run's folder and the output."""

    def run(changes, kills=()):
        folder = tmp_path_factory.mktemp("run")
        (folder / "kills").write_text("".join(f"{kill}\n" for kill in kills))
        venv = environment(folder / "venv", KILLED, folder / "kills")
        restart = ["--restart", str(len(kills))] if kills else []
        command = ["bash", str(SCRIPT), *restart, "2", *flags(changes, folder)]
        process = started(command, folder / "log", {"MAXDILOCO_VENV": str(venv)})
        code = process.popen.wait(timeout=tools.WAIT_S * (1 + len(kills)))
        assert code == 0, process.text()
        return folder / "run", process.text()

    return run


@pytest.fixture(scope="module")
def undisturbed(run):
    """What the streaming run ends with when nothing happens."""
    folder, text = run(STREAMING)
    assert "run_local_slices: " not in text
    return ends(folder)


def flags(changes, folder):
    names = {"run_name": "run", "base_output_directory": folder}
    return tools.flags(KEYS | changes | names)


def environment(folder, *program):
    """A virtual environment whose python starts a program in place of maxdiloco.train."""
    command = " ".join([sys.executable, *map(str, program)])
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(
        f'#!/bin/sh\nif [ "$2" = maxdiloco.train ]; then shift 2; exec {command} "$@"; fi\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return folder


def random_kills(count, *, seed):
    """SIGKILL or SIGTERM to either process before random steps, later and later."""
    chance, kills, t = random.Random(seed), [], 1
    for _ in range(count):
        t += chance.randrange(4)
        name = chance.choice(("KILL", "KILL", "TERM"))
        kills.append(f"{chance.randrange(2)} {name} inner steps:{t}")
        if name == "TERM":  # the checkpoint is of a step that both come to, a few later
            t += 8
    return kills


def ends(run_folder, steps=STEPS):
    """Parameters, optimizers' states and what was sent and not applied, at the end of a run.

    Without what has arrived: places that wait for their next exchange may still hold the last one.
    """
    arrays = run_tools.arrays(run_folder, steps)
    return {name: x for name, x in arrays.items() if not name.startswith("flight['incoming']")}


def assert_restarts(text, kills):
    """A line of the script for each kill, and after SIGKILL one of the process that was left."""
    lines = re.findall(r"^run_local_slices: restart .*", text, re.MULTILINE)
    assert len(lines) == len(kills)
    for n, (line, kill) in enumerate(zip(lines, kills, strict=True), 1):
        first, end = kill[0], "137 (SIGKILL)"
        if " TERM " in kill:  # both have saved
            first, end = "[01]", "143 (SIGTERM)"
        why = f"process {first} ended first, with exit code {re.escape(end)}."
        assert re.fullmatch(f"run_local_slices: restart {n} of {len(kills)}: {why}", line)
    lost = re.findall(r"^\[(\d)\] LostPeerError: process (\d) on ", text, re.MULTILINE)
    assert lost == [(str(1 - int(kill[0])), kill[0]) for kill in kills if " KILL " in kill]


@pytest.mark.full
def test_processes_that_are_killed_in_flight_told_to_stop_and_killed_in_a_save_change_no_bit(
    run, undisturbed
):
    """Before step 4, between a send and its apply; SIGTERM before step 9, which saves; and as the
    arrays of step 20 are saved."""
    kills = ["1 KILL in flight:4", "0 TERM inner steps:9", "0 KILL checkpoint:20"]
    folder, text = run(STREAMING, kills)
    assert_restarts(text, kills)
    run_tools.assert_equal_bits(ends(folder), undisturbed)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("changes", [STREAMING, EAGER, DATA_PARALLEL])
def test_twenty_kills_at_random_steps_change_no_bit(run, changes):
    """SIGKILL and SIGTERM, against an undisturbed run of as many processes."""
    changes = changes | {"steps": 120}
    folder, _ = run(changes)
    kills = random_kills(20, seed=0)
    assert {kill.split(" ")[1] for kill in kills} == {"KILL", "TERM"}
    assert int(kills[-1].partition(":")[2]) < 112, "the last one has steps to come to its save"
    killed, text = run(changes, kills)
    assert_restarts(text, kills)
    run_tools.assert_equal_bits(ends(killed, 120), ends(folder, 120))


class Stopped:
    """Two processes, of which number 1 stands still before it sends what is sent after step 6,
    and number 0 waits for that."""

    def __init__(self, started, folder, timeout_s):
        environ = {"PYTHONPATH": str(tools.ROOT)}
        module = [sys.executable, "-m", "benchmarks.link.fault_process", str(folder)]
        changes = STREAMING | {"num_slices": 2, "peer_timeout_seconds": timeout_s}
        command = [*module, "1", "at apply", "6", *flags(changes, folder)]
        self.folder = folder
        self.processes = [
            started(command, folder / f"{i}.log", environ | mine)
            for i, mine in enumerate(tools.variables(2))
        ]
        limit = time.monotonic() + tools.WAIT_S
        for name in ("held", "take.0"):
            while not (folder / name).exists():
                assert time.monotonic() < limit, self.processes[0].text()
                assert [p.popen.poll() for p in self.processes] == [None] * 2, self.texts()
                time.sleep(0.05)
        self.signal(signal.SIGSTOP)
        (folder / "go").touch()

    def signal(self, number):
        self.processes[1].popen.send_signal(number)

    def texts(self):
        return "\n".join(process.text() for process in self.processes)


@pytest.mark.full
def test_a_process_that_is_stopped_for_less_than_the_timeout_changes_no_bit(
    started, tmp_path, undisturbed
):
    """Longer than the silence after which its connections are made anew, a quarter of it."""
    stopped = Stopped(started, tmp_path, timeout_s=20)
    time.sleep(6)
    assert stopped.processes[0].popen.poll() is None
    stopped.signal(signal.SIGCONT)
    assert [process.end() for process in stopped.processes] == [0, 0], stopped.texts()
    run_tools.assert_equal_bits(ends(tmp_path / "run"), undisturbed)


@pytest.mark.full
def test_a_process_that_is_stopped_for_longer_ends_the_other_with_5_and_then_itself(
    started, tmp_path
):
    """The other one waits for an exchange, and names it; woken up, it finds that it is alone."""
    stopped = Stopped(started, tmp_path, timeout_s=10)
    zero, one = stopped.processes
    assert zero.end() == 5, zero.text()
    (line,) = zero.errors()
    assert line.startswith("LostPeerError: process 1 ")
    assert "peer_timeout_seconds=10" in line
    stopped.signal(signal.SIGCONT)
    assert one.end() == 5, one.text()
    (line,) = one.errors()
    assert line.startswith("LostPeerError: process 0 ")
