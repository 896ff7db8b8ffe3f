"""scripts/run_local_slices.sh --restart: killed processes leave no trace in the parameters."""

import pathlib
import random
import re
import sys

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


@pytest.fixture
def script(tmp_path):
    """Starts the script with arguments; no process outlives the test."""
    started = []

    def start(name, *arguments, **environ):
        log = tmp_path / f"{name}.log"
        environ = tools.AS_USERS | {"MAXDILOCO_VENV": sys.prefix} | environ
        started.append(tools.Process(["bash", str(SCRIPT), *arguments], log, environ))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def run(script, tmp_path):
    """Trains two processes to the end through kills; returns the run's folder and the output."""

    def run(name, changes, kills=()):
        (tmp_path / "kills").write_text("".join(f"{kill}\n" for kill in kills))
        changes = KEYS | changes | {"run_name": name, "base_output_directory": tmp_path}
        restart = ["--restart", str(len(kills))] if kills else []
        venv = environment(tmp_path / "venv", KILLED, tmp_path / "kills")
        process = script(name, *restart, "2", *tools.flags(changes), MAXDILOCO_VENV=str(venv))
        code = process.popen.wait(timeout=tools.WAIT_S * (1 + len(kills)))
        assert code == 0, process.text()
        return tmp_path / name, process.text()

    return run


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
    """Kills of either process before random steps, later and later."""
    chance = random.Random(seed)
    steps = sorted(chance.choices(range(1, STEPS + 1), k=count))
    return [f"{chance.randrange(2)} inner steps:{t}" for t in steps]


def ends(run_folder):
    """Parameters, optimizers' states and what was sent and not applied, at the end of a run.

    Without what has arrived: places that wait for their next exchange may still hold the last one.
    """
    arrays = run_tools.arrays(run_folder, STEPS)
    return {name: x for name, x in arrays.items() if not name.startswith("flight['incoming']")}


FULL = [pytest.mark.full_grid, pytest.mark.timeout(3600)]


@pytest.mark.slow
@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    "changes, kills",
    [
        # Before step 4, between a send and its apply; then while step 20 is being saved.
        pytest.param(STREAMING, ["1 in flight:4", "0 checkpoint:20"], id="streaming"),
        pytest.param(STREAMING, random_kills(20, seed=0), id="streaming, 20", marks=FULL),
        pytest.param(EAGER, random_kills(20, seed=1), id="eager, 20", marks=FULL),
        pytest.param(DATA_PARALLEL, random_kills(20, seed=2), id="parallel, 20", marks=FULL),
    ],
)
def test_processes_that_are_killed_change_no_bit_of_what_a_run_ends_with(run, changes, kills):
    """Against an undisturbed run of as many processes."""
    undisturbed, _ = run("undisturbed", changes)
    killed, text = run("killed", changes, kills)
    lines = re.findall(r"^run_local_slices: restart .*", text, re.MULTILINE)
    assert lines == [
        f"run_local_slices: restart {n} of {len(kills)}: process {kill[0]} ended first, with exit "
        f"code 137 (SIGKILL)."
        for n, kill in enumerate(kills, 1)
    ]
    arrays = ends(undisturbed)
    assert len(arrays) > 20
    run_tools.assert_equal_bits(ends(killed), arrays)
