"""Several processes train as one, and end as one."""

import contextlib
import re
import signal
import socket
import time

import numpy as np
import process_tools as tools
import pytest
import run_tools
from etils import epath
from tiers import full

from maxdiloco import train
from maxdiloco.checkpoint import seal
from maxdiloco.metrics import line_files
from maxdiloco.processes.signals import SAME_PRESS_S
from maxdiloco.storage.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("programs")

# Of one replica over two processes: keys, the axis between them, and the sequences of a device;
# devices that share sequences count as one.
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, router="{normalise_weights: true}")
AXES = {
    "expert": (EXPERTS | dict(load_balance_loss_weight=0.01), "dcn_expert_parallelism", 1),
    "context": ({}, "dcn_context_parallelism", 2),
}
STEPS = 200  # far more than run before the signal comes
LONG = {"steps": 100000, "checkpoint_period": 100000, "learning_rate_schedule_steps": 1000}
# For errors, which do not depend on the devices of a slice: with one each programs are shared.
ONE_EACH = LONG | {"ici_fsdp_parallelism": 1}
HOST = socket.gethostname()
# A trainer whose learning rate is RATE, which no key could be in one process alone.
OWN_RATE = """
import os
from maxdiloco import train
from maxdiloco.trainer import optimizer
if rate := os.environ.get("RATE"):
    optimizer.learning_rate_schedule = lambda cfg, steps: lambda t: float(rate)
train.main()
"""


def named(run_name, folder, changes):
    """The changes with a run's name and place."""
    return changes | {"run_name": run_name, "base_output_directory": folder}


def without_carrier(run):
    """The rows of a run; processes exchange through host memory, without padding."""
    return [
        {name: x for name, x in row.items() if name not in ("dcn/bytes_sent", "dcn/waited_s")}
        for row in run_tools.rows(run)
    ]


def stopped_at(processes, number, code, words):
    """The step of which all of a run say that they have saved it after a signal to the second; of
    Ctrl-C the first one alone does."""
    processes[0].wait_for("step 2/")
    processes[1].popen.send_signal(number)
    tools.ends(processes, code, code)
    tell = processes[:1] if number == signal.SIGINT else processes
    (step,) = {re.search(words + r" after step (\d+): saved", p.text())[1] for p in tell}
    return int(step)


@pytest.mark.parametrize(
    "number, code, words",
    [(signal.SIGTERM, 143, "SIGTERM"), full(signal.SIGINT, 130, "Ctrl-C")],
)
def test_a_signal_to_one_saves_the_same_step_in_all(started, tmp_path, number, code, words):
    """JAX's preemption service names a step that no process has passed."""
    started += tools.trainers(2, named("two", tmp_path, ONE_EACH), tmp_path)
    step = stopped_at(started, number, code, words)
    assert run_tools.saved_steps(tmp_path / "two") == [step]
    assert run_tools.logged_steps(tmp_path / "two") == list(range(1, step + 1))


# A trainer that holds a phase, the second time it comes, until a signal has come and gone.
HELD = """
import itertools
import os
import time
from maxdiloco import train
from maxdiloco.checkpoint import write
from maxdiloco.evaluation import held_out

PHASES = {
    "commit": (write, "commit"),  # of process 0
    "part": (write, "write_part"),  # of process 1
    "evaluation": (held_out.Evaluation, "_sums_by_batch"),
}
if phase := os.environ.get("PHASE"):
    owner, name = PHASES[phase]
    function, calls = getattr(owner, name), itertools.count(1)

    def held(*args, **options):
        if next(calls) == 2:
            print("held", flush=True)
            time.sleep(float(os.environ["HELD_S"]))
        return function(*args, **options)

    setattr(owner, name, held)
train.main()
"""
SAVES = {"steps": 30, "checkpoint_period": 5, "eval_interval": 5, "eval_steps": 1}


@pytest.fixture(scope="module")
def uninterrupted(programs, tmp_path_factory):
    """The folder of a run of two processes with SAVES."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    processes = tools.trainers(2, named("two", folder, SAVES), folder)
    try:
        tools.ends(processes, 0, 0)
    finally:
        for process in processes:
            process.kill()
    return folder / "two"


@pytest.mark.full
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("phase", ["commit", "part", "evaluation"])
def test_a_signal_in_a_save_or_evaluation_of_two_loses_nothing(
    started, uninterrupted, tmp_path, phase, number, code, times
):
    """Both get it, once or again after the time in which two are one press. Every checkpoint is
    whole or absent; the resumed run has the same rows and bits."""
    changes, gap_s = named("two", tmp_path, SAVES), SAME_PRESS_S + 0.3
    environ = {"PHASE": phase, "HELD_S": str(1 + times * gap_s)}
    first = tools.trainers(2, changes, tmp_path, [environ] * 2, HELD)
    started += first
    first[1 if phase == "part" else 0].wait_for("held\n")
    for _ in range(times):
        for process in first:
            with contextlib.suppress(ProcessLookupError):
                process.popen.send_signal(number)
        time.sleep(gap_s)
    tools.ends(first, code, code)
    checkpoints = epath.Path(tmp_path / "two" / "checkpoints")
    steps = run_tools.saved_steps(tmp_path / "two")
    assert steps and all(seal.damage(checkpoints / str(step)) is None for step in steps)
    again = tools.trainers(2, changes, tmp_path)
    started += again
    tools.ends(again, 0, 0)
    assert without_carrier(tmp_path / "two") == without_carrier(uninterrupted)
    arrays = (run_tools.arrays(run, 30) for run in (tmp_path / "two", uninterrupted))
    run_tools.assert_equal_bits(*arrays)


@pytest.mark.full
def test_two_processes_that_are_stopped_and_go_on_equal_one_bit_for_bit(started, tmp_path):
    """The same programs on the same mesh; which process owns a device changes no order of a sum,
    but for the evaluation: it sums over four devices. A slice has two, and a + b is b + a."""
    keys = {"steps": STEPS, "eval_interval": 100, "eval_steps": 1, "checkpoint_period": 1000}
    changes = named("two", tmp_path, keys)
    alone = named("alone", tmp_path, keys)
    started.append(tools.trainer(alone, tmp_path / "log", tools.AS_USERS))
    tools.ends(started, 0)
    first = tools.trainers(2, changes, tmp_path, [tools.AS_USERS] * 2)
    started += first
    step = stopped_at(first, signal.SIGTERM, 143, "SIGTERM")
    assert step < STEPS
    again = tools.trainers(2, changes, tmp_path, [tools.AS_USERS] * 2)
    started += again
    tools.ends(again, 0, 0)
    assert f"resumed after step {step}" in again[0].text()

    found, wanted = (without_carrier(tmp_path / run) for run in ("two", "alone"))
    for row, expected in zip(found, wanted, strict=True):
        of_text = [name for name in row if name.startswith("eval/")]
        summed, wanted_sums = ([each.pop(n) for n in of_text] for each in (row, expected))
        np.testing.assert_allclose(summed, wanted_sums, rtol=1e-5)
        assert row == expected
    arrays = (run_tools.arrays(tmp_path / run, STEPS) for run in ("two", "alone"))
    run_tools.assert_equal_bits(*arrays)


@pytest.mark.parametrize(
    "victim, when, carrier",
    [full(0, "ready to compile", "auto"), (1, "step 2/", "program"), full(1, "step 2/", "host")],
)
def test_a_killed_process_ends_the_others_with_5_and_its_name(
    started, tmp_path, victim, when, carrier
):
    """Process 0 holds JAX's coordination service: JAX aborts without it, here while it compiles
    and no error of a collective can come first. With `program` one does; history.jsonl has the
    words of the terminal all the same."""
    changes = {"exchange_carrier": carrier}
    if victim == 0:
        changes["jax_cache_dir"] = tmp_path / "programs"
    changes = named("lost", tmp_path, ONE_EACH | changes)
    started += tools.trainers(2, changes, tmp_path)
    started[0].wait_for(when)
    started[victim].popen.kill()
    other = started[1 - victim]
    assert other.end() == 5, other.text()
    (line,) = other.errors()
    assert line.startswith(f"LostPeerError: process {victim} on {HOST} is gone")
    assert "Start the run again with the same run_name" in line
    if victim != 0:  # process 0 writes it
        events = line_files.read_history(RunFolder(tmp_path / "lost"))
        assert [event["event"] for event in events] == ["start", "end"]
        assert events[1]["why"] == line


@pytest.mark.full
def test_hardware_auto_and_no_mesh_sizes_train_to_the_end(started, tmp_path):
    """Three CPU processes bring a device each; every process is a slice. The rows are those of one
    process with three devices and the same carrier, bit for bit: this one, with the compiler that
    the others have."""
    short = {"steps": 5, "enable_checkpointing": "false"}
    sizes = {"hardware": "auto", "dcn_diloco_parallelism": -1, "ici_fsdp_parallelism": -1}
    started += tools.trainers(3, named("open", tmp_path, short | sizes), tmp_path)
    tools.ends(started, 0, 0, 0)
    assert "mesh: 3 x cpu; diloco 3 (over slices: diloco 3 = 3)" in started[0].text()
    assert "done: step 5" in started[0].text()
    sizes = {"dcn_diloco_parallelism": 3, "ici_fsdp_parallelism": 1, "exchange_carrier": "host"}
    assert train.main(tools.flags(named("alone", tmp_path, short | sizes))) == 0
    found, wanted = (without_carrier(tmp_path / run) for run in ("open", "alone"))
    assert found == wanted
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5]
    assert found[-1].keys() >= {"learning/loss_replica_2", "diloco/drift", "learning/z_loss"}


@pytest.mark.full
@pytest.mark.parametrize("blind", [0, 1])
def test_a_folder_that_one_host_cannot_read_ends_all_with_3_and_the_reason(
    started, tmp_path, blind
):
    """The host says why; the others say who and why. JAX aborts them with process 0, unless they
    end first."""
    changes = named("one", tmp_path, ONE_EACH | {"dataset_type": "text"})
    environs = [{"M_DATASET_PATH": "docs"}] * 2
    environs[blind] = {"M_DATASET_PATH": str(tmp_path / "absent")}
    started += tools.trainers(2, changes, tmp_path, environs)
    tools.ends(started, 3, 3)
    (own,) = started[blind].errors()
    assert own.startswith("DataError: ")
    (line,) = started[1 - blind].errors()
    ended = f"process {blind} on {HOST} ended with exit code 3, and so does this process: {own}"
    assert ended in line


def test_processes_with_other_keys_all_end_with_2_and_both_values(started, tmp_path):
    """Two commands typed by hand, of which one has a variable more; meshes differ with M. Without
    the comparison a rate trains to the end as two runs that mix, and a period waits for ever."""
    short = ONE_EACH | {"steps": 4, "diloco_outer_lr": 0.7}
    own = {"M_EXCHANGE_INTERFACE": "127.0.0.1", "M_SHOW_MEMORY": "true"}  # a host's own
    others = {"M_NUM_DILOCO_REPLICAS": "4", "M_LEARNING_RATE": "1e-3"}
    started += tools.trainers(2, named("two", tmp_path, short), tmp_path, [own, others])
    tools.ends(started, 2, 2)
    for process in started:
        (line,) = process.errors()
        assert line.startswith(
            "ConfigError: learning_rate is 0.0004 in process 0, 0.001 in process 1; "
            "num_diloco_replicas is -1 in process 0, 4 in process 1. All processes"
        )
        assert "mesh:" not in process.text()


@pytest.mark.full
def test_a_loss_that_is_not_finite_in_one_process_stops_all_with_4(started, tmp_path):
    """Nothing is exchanged before: process 0, whose own steps are finite, learns of it from the
    watch. No row of that step or a later one is written."""
    changes = ONE_EACH | {"diloco_sync_period": 1000, "gradient_clipping_threshold": 0}
    environs = [{}, {"RATE": "1e30"}]
    started += tools.trainers(2, named("nan", tmp_path, changes), tmp_path, environs, OWN_RATE)
    tools.ends(started, 4, 4)
    (own,) = started[1].errors()
    assert own.startswith("NumericsError: step ") and " of replica 1 is not finite" in own
    (line,) = started[0].errors()
    ended = f"process 1 on {HOST} ended with exit code 4, and so does this process"
    assert f"{ended}: {own[:-1]}" in line
    steps = run_tools.logged_steps(tmp_path / "nan")
    bad = int(re.match(r"NumericsError: step (\d+)", own)[1])
    assert steps == list(range(1, len(steps) + 1)) and len(steps) < bad


@pytest.mark.full
def test_ctrl_c_saves_the_same_step_in_all_processes(started, tmp_path):
    """Through the script, as from a terminal; the session that it leads is empty afterwards."""
    changes = named("interrupted", tmp_path, LONG)
    started.append(tools.local_slices(2, changes, tmp_path / "log"))
    started[0].wait_for("[0] step 2/")
    started[0].popen.send_signal(signal.SIGINT)
    tools.ends(started, 130)
    text = started[0].text()
    assert "[0] Ctrl-C: stopping after this step; press it again to quit now." in text
    (step,) = re.findall(r"^\[0\] Ctrl-C after step (\d+): saved\.", text, re.MULTILINE)
    assert run_tools.saved_steps(tmp_path / "interrupted") == [int(step)]
    assert "Traceback" not in text
    assert tools.session_members(started[0].popen.pid) == []


@pytest.mark.parametrize(
    "count, words",
    [
        ("two", ["N=two is not a number of processes. usage: bash"]),
        (2, ["[0] ConfigError: diloco_sync_perod", "[1] ConfigError: diloco_sync_perod"]),
    ],
)
def test_the_local_script_ends_with_the_exit_code_of_its_processes(started, tmp_path, count, words):
    """A misspelt key is refused by each process before JAX is imported; a count by the script."""
    started.append(tools.local_slices(count, {"diloco_sync_perod": 2}, tmp_path / "log"))
    assert started[0].end() == 2
    for word in words:
        assert word in started[0].text()


@pytest.mark.full
@pytest.mark.parametrize("axis", AXES)
def test_an_axis_over_two_processes_equals_one_device(started, tmp_path, axis):
    """Experts, or the tokens of a sequence. Loss, norm of the gradient and balance of two steps
    with an exchange; sums in float32 in another order. Control: other sequences have another loss
    by far more."""
    keys, over_slices, sequences = AXES[axis]
    keys = keys | dict(steps=2, enable_checkpointing="false")
    keys |= dict(dcn_diloco_parallelism=1, ici_fsdp_parallelism=1)
    alone = named("alone", tmp_path, keys | dict(per_device_batch_size=2))
    shared = named("shared", tmp_path, keys | {over_slices: 2, "per_device_batch_size": sequences})
    started.append(tools.trainer(alone, tmp_path / "alone.log"))
    started += tools.trainers(2, shared, tmp_path)
    tools.ends(started, 0, 0, 0)
    assert f"{axis} 2 (over slices: {axis} 2 = 2)" in started[1].text()
    found, expected = (run_tools.rows(tmp_path / name) for name in ("shared", "alone"))
    compared = [n for n in expected[0] if n.startswith(("learning/loss", "learning/grad", "moe/"))]
    assert len(compared) >= 2
    values, others = ([[row[n] for n in compared] for row in rows] for rows in (found, expected))
    np.testing.assert_allclose(values, others, rtol=1e-5)
    losses = [row["learning/loss"] for row in expected]
    assert abs(losses[0] - losses[1]) > 1e-3
