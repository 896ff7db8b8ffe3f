"""Runs with the host transport whose processes are killed, and what they end with.

test_fault_matrix.py has processes that are stopped, and faults of links.
"""

import pathlib
import random
import re
import sys

import pytest
from run import (
    CLUSTER_KEYS,
    DEFAULT_CODE_GENERATION,
    ROOT,
    WAIT_S,
    Process,
    train_arguments,
)
from run_files import assert_equal_bits, checkpoint_arrays

SCRIPT = ROOT / "scripts" / "run_local_slices.sh"
KILLED = pathlib.Path(__file__).with_name("killed_process.py")
# A file of a virtual environment that starts killed_process.py instead of maxdiloco.train.
PYTHON = """#!/bin/sh
if [ "$2" = maxdiloco.train ]; then shift 2; exec {0} {1} {2} "$@"; fi
exec {0} "$@"
"""

STEPS = 24
KEYS = dict(steps=STEPS, checkpoint_period=5, log_period=4, ici_fsdp_parallelism=1)
STREAMING = {
    "enable_streaming_diloco": "true",
    "num_diloco_fragments": 2,
    "diloco_sync_period": 6,  # sends at 3, 6, 9, ...; applied two steps later
    "num_communication_overlapping_steps": 2,
    "diloco_exchange_dtype": "float4_e3m0",
}
# Parts leave beside the step after a send, means beside the next two.
OWNERS = STREAMING | {
    "diloco_collective": "reduce_scatter",
    "num_communication_overlapping_steps": 3,
}
EAGER = {"diloco_round_overlap": "eager", "diloco_sync_period": 4}
DATA_PARALLEL = {"enable_diloco": "false"}


@pytest.fixture(scope="module")
def started(programs):
    """Starts a program that sees the compiled programs of this module; none outlives it."""
    processes = []

    def start(command, environ):
        processes.append(Process(command, DEFAULT_CODE_GENERATION | environ))
        return processes[-1]

    yield start
    for process in processes:
        process.kill_session()


@pytest.fixture(scope="module")
def run(started, tmp_path_factory):
    """Trains two processes to the end through kills; returns the run's folder and the output."""

    def run(changes, kills=()):
        folder = tmp_path_factory.mktemp("run")
        (folder / "kills").write_text("".join(f"{kill}\n" for kill in kills))
        python = folder / "bin" / "python"
        python.parent.mkdir()
        python.write_text(PYTHON.format(sys.executable, KILLED, folder / "kills"))
        python.chmod(0o755)
        restart = ["--restart", str(len(kills))] if kills else []
        command = ["bash", str(SCRIPT), *restart, "2", *arguments(changes, folder)]
        process = started(command, {"MAXDILOCO_VENV": str(folder)})
        code = process.wait_for_exit(timeout_s=WAIT_S * (1 + len(kills)))
        assert code == 0, process.output
        return folder / "run", process.output

    return run


def arguments(changes, folder):
    return train_arguments(folder / "run", **CLUSTER_KEYS | KEYS | changes)


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


def last_arrays(run_folder, steps=STEPS):
    """Return the parameters, optimizer states and in-flight exchanges at a run's end. The receive
    buffers are left out: slots that wait for their next exchange may still hold the last one."""
    arrays = checkpoint_arrays(run_folder, steps)
    arrived = ("flight['incoming']", "flight['arrived']")
    return {name: x for name, x in arrays.items() if not name.startswith(arrived)}


def assert_restarts(text, kills):
    """The script tells of each kill, and after SIGKILL the process that was left of the other."""
    causes = re.findall(r"^run_local_slices: restart .* ended first, .* \(SIG(\w+)\)", text, re.M)
    assert causes == [kill.split(" ")[1] for kill in kills]
    lost = re.findall(r"^\[(\d)\] LostPeerError: process (\d) on ", text, re.M)
    assert lost == [(str(1 - int(kill[0])), kill[0]) for kill in kills if " KILL " in kill]


@pytest.fixture(scope="module")
def undisturbed(run):
    """What the streaming run ends with when nothing happens."""
    folder, text = run(STREAMING)
    assert "run_local_slices: " not in text
    return last_arrays(folder)


@pytest.mark.full
def test_kills_in_flight_and_in_a_save_and_a_stop_change_no_bit(run, undisturbed):
    """Before step 4, between a send and its apply; SIGTERM before step 9, which saves; and as the
    arrays of step 20 are saved."""
    kills = ["1 KILL in flight:4", "0 TERM inner steps:9", "0 KILL checkpoint:20"]
    folder, text = run(STREAMING, kills)
    assert_restarts(text, kills)
    assert_equal_bits(last_arrays(folder), undisturbed)


@pytest.mark.full
def test_kills_between_the_parts_and_the_means_change_no_bit(run):
    """After the parts of a fragment have met and before its means have left: process 1 with those
    of step 6, process 0 with those of step 12. Resumed after step 5, where the means of step 3 have
    arrived, and after 10, where those of step 9 are on their way; the other process ends by itself
    and names the one that is gone."""
    at_once = OWNERS | {"async_checkpointing": "false"}
    folder, text = run(at_once)
    assert "run_local_slices: " not in text
    undisturbed = last_arrays(folder)
    assert any(x.any() for name, x in undisturbed.items() if name.startswith("flight['parts']"))
    kills = ["1 KILL at share:6", "0 KILL at share:12"]
    killed, text = run(at_once, kills)
    assert_restarts(text, kills)
    assert re.findall(r"^\[0\] resumed after step (\d+)", text, re.M) == ["5", "10"]
    assert_equal_bits(last_arrays(killed), undisturbed)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("changes", [STREAMING, OWNERS, EAGER, DATA_PARALLEL])
def test_twenty_kills_at_random_steps_change_no_bit(run, changes):
    """SIGKILL and SIGTERM, compared with an undisturbed run of as many processes."""
    changes = changes | {"steps": 120}
    folder, _ = run(changes)
    kills = random_kills(20, seed=0)
    assert {kill.split(" ")[1] for kill in kills} == {"KILL", "TERM"}
    assert int(kills[-1].partition(":")[2]) < 112, "the last one has steps to come to its save"
    killed, text = run(changes, kills)
    assert_restarts(text, kills)
    assert_equal_bits(last_arrays(killed, 120), last_arrays(folder, 120))
