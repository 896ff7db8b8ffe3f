"""Several processes that train one run, and end together."""

import contextlib
import re
import signal
import socket
import time

import numpy as np
import pytest
from etils import epath
from run import (
    CLUSTER_KEYS,
    DEFAULT_CODE_GENERATION,
    FEW_OPTIMIZATIONS,
    assert_exit_codes,
    names_key,
    session_members,
    start_cluster,
    start_local_slices,
    start_train,
    train,
)
from run_files import assert_equal_bits, checkpoint_arrays, logged_steps, metrics_rows, saved_steps
from tiers import full

from maxdiloco.checkpoint import seal
from maxdiloco.cluster.signals import SAME_PRESS_S
from maxdiloco.metrics import history
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
LONG = dict(steps=100000, checkpoint_period=100000, learning_rate_schedule_steps=1000)
# For errors, which do not depend on the devices of a slice: with one each programs are shared.
ONE_EACH = LONG | dict(ici_fsdp_parallelism=1)
HOST = socket.gethostname()
# A trainer whose learning rate is RATE, which no key could be in one process alone.
OWN_RATE = """
import os
from maxdiloco import train
from maxdiloco.run import optimizer
if rate := os.environ.get("RATE"):
    optimizer.learning_rate_schedule = lambda cfg, steps: lambda t: float(rate)
train.main()
"""


def without_transport(run):
    """Return the rows of a run without what depends on the transport: processes exchange through
    host memory, without padding."""
    return [
        {name: x for name, x in row.items() if name not in ("dcn/bytes_sent", "dcn/waited_s")}
        for row in metrics_rows(run)
    ]


def step_saved_after(processes, number, code, words):
    """Send a signal to the second process; return the step that all processes log as saved. Only
    the first process logs it after Ctrl-C."""
    processes[0].wait_for_output("step 2/")
    processes[1].popen.send_signal(number)
    assert_exit_codes(processes, code, code)
    logging = processes[:1] if number == signal.SIGINT else processes
    (step,) = {re.search(words + r" after step (\d+): saved", p.output)[1] for p in logging}
    return int(step)


@pytest.mark.parametrize(
    "number, code, words",
    [(signal.SIGTERM, 143, "SIGTERM"), full(signal.SIGINT, 130, "Ctrl-C")],
)
def test_a_signal_to_one_saves_the_same_step_in_all(started, tmp_path, number, code, words):
    """JAX's preemption service names a step that no process has passed. The text is
    prepared before."""
    text = dict(dataset_type="text", dataset_path="docs", vocab_size=257)
    started += start_cluster(2, tmp_path / "two", **ONE_EACH | text)
    step = step_saved_after(started, number, code, words)
    assert saved_steps(tmp_path / "two") == [step]
    assert logged_steps(tmp_path / "two") == list(range(1, step + 1))


# A trainer that holds a phase, the second time it comes, until a signal has come and gone.
HELD = """
import itertools
import os
import time
from maxdiloco import train
from maxdiloco.checkpoint import write
from maxdiloco.run import evaluation

PHASES = {
    "commit": (write, "commit"),  # of process 0
    "part": (write, "write_part"),  # of process 1
    "evaluation": (evaluation.Evaluation, "_sums_by_batch"),
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
SAVES = dict(steps=30, checkpoint_period=5, eval_interval=5, eval_steps=1)


@pytest.fixture(scope="module")
def uninterrupted(programs, tmp_path_factory):
    """The folder of a run of two processes with SAVES."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    processes = start_cluster(2, folder / "two", **SAVES)
    try:
        assert_exit_codes(processes, 0, 0)
    finally:
        for process in processes:
            process.kill_session()
    return folder / "two"


@pytest.mark.full
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("phase", ["commit", "part", "evaluation"])
def test_a_signal_in_a_save_or_evaluation_of_two_loses_nothing(
    started, uninterrupted, tmp_path, phase, number, code, times
):
    """Both processes receive it, once or again after the time in which two count as one. Every
    checkpoint is whole or absent; the resumed run has the same rows and bits."""
    gap_s = SAME_PRESS_S + 0.3
    environ = {"PHASE": phase, "HELD_S": str(1 + times * gap_s)}
    first = start_cluster(2, tmp_path / "two", environs=[environ] * 2, program=HELD, **SAVES)
    started += first
    first[1 if phase == "part" else 0].wait_for_output("held\n")
    for _ in range(times):
        for process in first:
            with contextlib.suppress(ProcessLookupError):
                process.popen.send_signal(number)
        time.sleep(gap_s)
    assert_exit_codes(first, code, code)
    checkpoints = epath.Path(tmp_path / "two" / "checkpoints")
    steps = saved_steps(tmp_path / "two")
    assert steps and all(seal.damage(checkpoints / str(step)) is None for step in steps)
    again = start_cluster(2, tmp_path / "two", **SAVES)
    started += again
    assert_exit_codes(again, 0, 0)
    assert without_transport(tmp_path / "two") == without_transport(uninterrupted)
    assert_equal_bits(*(checkpoint_arrays(run, 30) for run in (tmp_path / "two", uninterrupted)))


@pytest.mark.full
def test_two_processes_that_stop_and_resume_equal_one_bit_for_bit(started, tmp_path):
    """The same programs on the same mesh; which process owns a device changes no order of a sum,
    except in the evaluation, which sums over four devices. A slice has two, and a + b is b + a."""
    keys = dict(steps=STEPS, eval_interval=100, eval_steps=1, checkpoint_period=1000)
    environ = FEW_OPTIMIZATIONS | DEFAULT_CODE_GENERATION
    alone = start_train(tmp_path / "alone", environ=environ, **CLUSTER_KEYS | keys)
    started.append(alone)
    assert_exit_codes([alone], 0)
    first = start_cluster(2, tmp_path / "two", environs=[environ] * 2, **keys)
    started += first
    step = step_saved_after(first, signal.SIGTERM, 143, "SIGTERM")
    assert step < STEPS
    again = start_cluster(2, tmp_path / "two", environs=[environ] * 2, **keys)
    started += again
    assert_exit_codes(again, 0, 0)
    assert f"resumed after step {step}" in again[0].output

    found, wanted = (without_transport(tmp_path / run) for run in ("two", "alone"))
    for row, expected in zip(found, wanted, strict=True):
        of_text = [name for name in row if name.startswith("eval/")]
        summed, wanted_sums = ([each.pop(n) for n in of_text] for each in (row, expected))
        np.testing.assert_allclose(summed, wanted_sums, rtol=1e-5)
        assert row == expected
    assert_equal_bits(*(checkpoint_arrays(tmp_path / run, STEPS) for run in ("two", "alone")))


@pytest.mark.parametrize(
    "victim, when, carrier",
    [full(0, "ready to compile", "auto"), (1, "step 2/", "xla"), full(1, "step 2/", "host")],
)
def test_a_killed_process_ends_the_others_with_5_and_its_name(
    started, tmp_path, victim, when, carrier
):
    """Process 0 holds JAX's coordination service: JAX aborts without it, here while it compiles
    and no error of a collective can come first. With `program` one does; history.jsonl has the
    error of the terminal in both cases."""
    keys = ONE_EACH | dict(diloco_transport=carrier)
    if victim == 0:
        keys["jax_cache_dir"] = tmp_path / "programs"
    started += start_cluster(2, tmp_path / "lost", **keys)
    started[0].wait_for_output(when)
    started[victim].popen.kill()
    other = started[1 - victim]
    assert other.wait_for_exit() == 5, other.output
    (line,) = other.error_lines()
    assert line.startswith(f"LostPeerError: process {victim} on {HOST} ")
    assert names_key(line, "run_name")
    if victim != 0:  # process 0 writes it
        events = history.read_history(RunFolder(tmp_path / "lost"))
        assert [event["event"] for event in events] == ["start", "end"]
        assert events[1]["why"] == line


@pytest.mark.full
def test_hardware_auto_and_no_mesh_sizes_train_to_the_end(started, tmp_path):
    """Three CPU processes have a device each; every process is a slice. The rows are those of one
    process with three devices and the same transport, bit for bit: this process, with the compiler
    settings of the others."""
    short = dict(steps=5, enable_checkpointing="false")
    sizes = dict(hardware="auto", dcn_diloco_parallelism=-1, ici_fsdp_parallelism=-1)
    started += start_cluster(3, tmp_path / "open", **short | sizes)
    assert_exit_codes(started, 0, 0, 0)
    assert "mesh: 3 x cpu; diloco 3" in started[0].output
    sizes = dict(dcn_diloco_parallelism=3, ici_fsdp_parallelism=1, diloco_transport="host")
    assert train(tmp_path / "alone", **CLUSTER_KEYS | short | sizes).code == 0
    found, wanted = (without_transport(tmp_path / run) for run in ("open", "alone"))
    assert found == wanted
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5]
    assert found[-1].keys() >= {"learning/loss_replica_2", "diloco/drift", "learning/z_loss"}


@pytest.mark.full
@pytest.mark.parametrize("blind", [0, 1])
def test_a_folder_that_one_host_cannot_read_ends_all_with_3(started, tmp_path, blind):
    """The host logs the reason; the others log the host and the reason. JAX aborts them with
    process 0, unless they exit first."""
    keys = ONE_EACH | dict(dataset_type="text", vocab_size=257)
    environs = [{"M_DATASET_PATH": "docs"}] * 2
    environs[blind] = {"M_DATASET_PATH": str(tmp_path / "absent")}
    started += start_cluster(2, tmp_path / "one", environs=environs, **keys)
    assert_exit_codes(started, 3, 3)
    (own,) = started[blind].error_lines()
    assert own.startswith("DataError: ") and names_key(own, "dataset_path")
    (line,) = started[1 - blind].error_lines()
    assert f"process {blind} on {HOST} " in line and own in line


def test_processes_with_other_keys_all_exit_with_2_and_name_them(started, tmp_path):
    """Two commands typed by hand, of which one has a variable more; meshes differ with M. Without
    the comparison two learning rates train two runs that mix, and two periods wait for ever."""
    keys = ONE_EACH | dict(steps=4, diloco_outer_lr=0.7)
    own = {"M_EXCHANGE_INTERFACE": "127.0.0.1", "M_SHOW_MEMORY": "true"}  # keys that may differ
    others = {"M_NUM_DILOCO_REPLICAS": "4", "M_ADAM_B1": "0.5"}
    started += start_cluster(2, tmp_path / "two", environs=[own, others], **keys)
    assert_exit_codes(started, 2, 2)
    for process in started:
        (line,) = process.error_lines()
        assert line.startswith("ConfigError: ")
        assert names_key(line, "adam_b1") and names_key(line, "num_diloco_replicas")
        assert not names_key(line, "show_memory")
        assert "mesh:" not in process.output


@pytest.mark.full
def test_a_loss_that_is_not_finite_in_one_process_stops_all_with_4(started, tmp_path):
    """Nothing is exchanged before: process 0, whose own steps are finite, learns of it from the
    failure detector. No row of that step or a later one is written."""
    keys = ONE_EACH | dict(diloco_sync_period=1000, gradient_clipping_threshold=0)
    environs = [{}, {"RATE": "1e30"}]
    started += start_cluster(2, tmp_path / "nan", environs=environs, program=OWN_RATE, **keys)
    assert_exit_codes(started, 4, 4)
    (own,) = started[1].error_lines()
    assert own.startswith("NumericsError: step ") and " replica 1 " in own
    (line,) = started[0].error_lines()
    assert f"process 1 on {HOST} " in line and own[:-1] in line
    steps = logged_steps(tmp_path / "nan")
    bad = int(re.match(r"NumericsError: step (\d+)", own)[1])
    assert steps == list(range(1, len(steps) + 1)) and len(steps) < bad


@pytest.mark.full
def test_ctrl_c_saves_the_same_step_in_all_processes(started, tmp_path):
    """Through the script, as from a terminal; the session that it leads is empty afterwards."""
    script = start_local_slices(2, tmp_path / "interrupted", **LONG)
    started.append(script)
    script.wait_for_output("[0] step 2/")
    script.popen.send_signal(signal.SIGINT)
    assert_exit_codes([script], 130)
    (step,) = re.findall(r"^\[0\] Ctrl-C after step (\d+): saved\.", script.output, re.MULTILINE)
    assert saved_steps(tmp_path / "interrupted") == [int(step)]
    assert "Traceback" not in script.output
    assert session_members(script.popen.pid) == []


@pytest.mark.parametrize("count, key, lines", [("two", "N", 0), (2, "diloco_sync_perod", 2)])
def test_the_local_script_exits_with_the_code_of_its_processes(started, count, key, lines):
    """A misspelt key is refused by each process before JAX is imported; a count by the script."""
    started.append(start_local_slices(count, "a", diloco_sync_perod=2))
    assert_exit_codes(started, 2)
    assert names_key(started[0].output, key) and len(started[0].error_lines()) == lines


@pytest.mark.full
@pytest.mark.parametrize("axis", AXES)
def test_an_axis_over_two_processes_equals_one_device(started, tmp_path, axis):
    """Experts, or the tokens of a sequence. Loss, norm of the gradient and balance of two steps
    with an exchange; sums in float32 in another order. Control: other sequences have another loss
    by far more."""
    keys, over_slices, sequences = AXES[axis]
    keys = keys | dict(steps=2, enable_checkpointing="false")
    keys |= dict(dcn_diloco_parallelism=1, ici_fsdp_parallelism=1)
    alone = CLUSTER_KEYS | keys | dict(per_device_batch_size=2)
    started.append(start_train(tmp_path / "alone", **alone))
    keys |= {over_slices: 2, "per_device_batch_size": sequences}
    started += start_cluster(2, tmp_path / "shared", **keys)
    assert_exit_codes(started, 0, 0, 0)
    assert f"over slices: {axis} 2" in started[1].output
    found, expected = (metrics_rows(tmp_path / name) for name in ("shared", "alone"))
    compared = [n for n in expected[0] if n.startswith(("learning/loss", "learning/grad", "moe/"))]
    assert len(compared) >= 2
    values, others = ([[row[n] for n in compared] for row in rows] for rows in (found, expected))
    np.testing.assert_allclose(values, others, rtol=1e-5)
    losses = [row["learning/loss"] for row in expected]
    assert abs(losses[0] - losses[1]) > 1e-3
