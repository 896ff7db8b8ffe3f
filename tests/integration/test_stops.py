"""Runs that stop early and resume: signals, infinite losses, failed saves, a power cut."""

import errno
import itertools
import json
import os
import re
import shutil
import signal
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec
from power import small_ext4
from run import STEPS, WAIT_S, names_key, start_train, train
from run_files import (
    assert_equal_runs,
    checkpoint_arrays,
    item_arrays,
    logged_steps,
    metrics_rows,
    saved_steps,
)
from tiers import corner, full

from maxdiloco.checkpoint import orbax_io, own_folder, seal, write
from maxdiloco.cluster.signals import Preemption
from maxdiloco.config import config
from maxdiloco.errors import NumericsError
from maxdiloco.metrics import history
from maxdiloco.metrics.monitor import Monitor
from maxdiloco.metrics.start_time import StartClock
from maxdiloco.run import evaluation, start
from maxdiloco.storage.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("programs")


@pytest.mark.parametrize(
    "number, code, words",
    [
        (signal.SIGTERM, 143, r"Preempted: SIGTERM after step (\d+): saved\."),
        full(signal.SIGINT, 130, r"Ctrl-C after step (\d+): saved\."),
    ],
)
def test_a_run_that_is_asked_to_stop_saves_and_resumes(finished, tmp_path, number, code, words):
    """While it runs, another run with its name is refused. history.jsonl has both starts and how
    each ended."""
    keys = dict(checkpoint_period=10**6)
    with start_train(tmp_path / "stopped", paced=True, **keys) as process:
        process.wait_for_output("step 8/")
        second = train(tmp_path / "stopped", **keys)
        assert second.code == 2 and names_key(second.error, "run_name")
        process.popen.send_signal(number)
        assert process.wait_for_exit() == code, process.output
    step = int(re.search(words, process.output)[1])
    assert 8 <= step < STEPS
    assert saved_steps(tmp_path / "stopped") == [step]

    files = [tmp_path / "stopped" / name for name in ("config.yml", "metrics.jsonl")]
    kept = [path.read_text() for path in files]
    for key, value in {"adam_b1": 0.5, "enable_checkpointing": "false"}.items():
        changed = train(tmp_path / "stopped", **keys, **{key: value})
        assert changed.code == 2 and names_key(changed.error, key)
    assert [path.read_text() for path in files] == kept

    assert f"resumed after step {step};" in train(tmp_path / "stopped", **keys).output
    assert_equal_runs(tmp_path / "stopped", finished, steps=STEPS)
    events = history.read_history(RunFolder(tmp_path / "stopped"))
    assert [event["event"] for event in events] == ["start", "end"] * 2
    starts = [(event["step"], event["until"]) for event in events[::2]]
    assert starts == [(0, STEPS), (step, STEPS)]
    assert re.match(words if code == 143 else "$", events[1]["why"]) and events[3]["why"] == ""


def test_ctrl_c_any_number_of_times_ends_with_130_and_no_traceback(tmp_path):
    """Beginning in the training, through the last save. The second one quits, unless all of it
    was so quick that the run had ended."""
    with start_train(tmp_path / "stopped", paced=True, checkpoint_period=10**6) as process:
        process.wait_for_output("step 8/")
        while process.popen.poll() is None:
            process.popen.send_signal(signal.SIGINT)
            time.sleep(0.02)
        assert process.wait_for_exit() == 130, process.output
    assert "Traceback" not in process.output
    assert "Ctrl-C" in process.output


def test_a_loss_that_is_not_finite_exits_with_4_and_names_the_step(finished, tmp_path):
    """lr 1e30 from step 63 on: the loss of 64 is not finite, though nobody looks before 65."""
    shutil.copytree(finished, tmp_path / "finished")
    keys = dict(learning_rate=1e30, steps=80, log_period=10**6)
    run = train(tmp_path / "finished", **keys)
    assert run.code == 4
    assert "step 64:" in run.error and "replica 0 " in run.error and "step 62 " in run.error
    assert names_key(run.error, "learning_rate") and names_key(run.error, "nan_policy")
    assert saved_steps(tmp_path / "finished")[-1] == 62


def test_an_infinite_gradient_ends_the_run_though_the_loss_is_finite():
    """nan_policy=stop is about both: the parameters of the next step would be NaN."""
    mesh = jax.make_mesh((1,), ("diloco",), devices=jax.devices()[:1])
    placed = NamedSharding(mesh, PartitionSpec())
    like = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=placed)
    metrics = {"loss": like, "grad_norm": like}
    program = types.SimpleNamespace(out_shapes=lambda: (None, None, metrics))
    plain = types.SimpleNamespace(program=program, args=())
    trainer = types.SimpleNamespace(
        mesh=mesh,
        check_finite=lambda state, **_: None,
        calls=lambda batch: [plain],
    )
    monitor = Monitor(trainer, None, stop_on_nan=True, on_compile=lambda *_: None)

    def add(step, *grad_norm_R):
        metrics = {"loss": jnp.ones(3), "grad_norm": jnp.array(grad_norm_R)}
        monitor.add(step, jax.device_put(metrics, placed))

    add(7, 1.0, 1.0, 1.0)
    monitor.check(None, list)
    add(8, 1.0, 1.0, np.inf)
    add(9, 1.0, 1.0, 1.0)
    with pytest.raises(NumericsError, match="step 8: .* replica 2 .*learning_rate"):
        monitor.check(None, list)


def test_nan_policy_skip_keeps_the_parameters_and_continues(tmp_path):
    """The learning rate is 1e30 in step 1: from step 2 on every update is skipped."""
    keys = dict(learning_rate=1e30, warmup_steps_fraction=0.0, nan_policy="skip", steps=6)
    run = train(tmp_path / "skip", **keys)
    assert run.code == 0
    rows = run.rows
    assert [row["learning/skipped"] for row in rows] == [0, 1, 1, 1, 1, 1]
    # Not finite is null in JSON; the loss is the mean of the steps that were taken.
    assert rows[0]["learning/loss"] is not None
    assert rows[1]["learning/loss"] is rows[1]["learning/grad_norm"] is None
    assert "grad nan  skipped 1  " in run.output
    params = item_arrays(checkpoint_arrays(tmp_path / "skip", 6), "params")
    assert all(np.all(np.isfinite(x)) for x in params.values())


ROWS = dict(steps=8, log_period=4, checkpoint_period=100)


def test_a_run_stopped_between_two_rows_resumes_from_its_config(tmp_path, monkeypatch):
    """Stopped after step 6, with rows at 4 and 8; it has no name at first, so it prints the one
    that it gets."""
    assert train(tmp_path / "whole", **ROWS).code == 0

    monkeypatch.setattr(Preemption, "requested", lambda preemption, t: t == 6)
    clock = types.SimpleNamespace(time=lambda: 1234.0, perf_counter=time.perf_counter)
    monkeypatch.setattr(start, "time", clock)
    unnamed = train(tmp_path / "unnamed", **ROWS, run_name="")
    assert unnamed.code == 143
    unsaved = train(tmp_path / "unsaved", **ROWS, enable_checkpointing="false")
    assert unsaved.code == 143 and names_key(unsaved.error, "enable_checkpointing")
    monkeypatch.undo()
    (folder,) = tmp_path.glob("run-1234-????")  # four random digits after the second
    assert f"run_name={folder.name}" in unnamed.output
    assert f"run_name={folder.name}" in unnamed.error

    assert start.run(config.load([str(folder / "config.yml")], {}), StartClock()) == 0
    assert logged_steps(folder) == [4, 8]
    assert metrics_rows(folder) == metrics_rows(tmp_path / "whole")

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["learning/tokens"] for row in rows] == [4 * 64, 8 * 64]
    assert rows[0]["perf/wall_time_s"] < rows[1]["perf/wall_time_s"]
    assert not [name for name in rows[1] if name.startswith("device/")]
    log = (folder / "log.txt").read_text()
    lines = [line.partition(" ")[2] for line in log.splitlines()]
    assert len([line for line in lines if line.startswith("-- ")]) == 2
    assert unnamed.error in lines
    assert "resumed after step 6;" in log
    assert json.loads((folder / "environment.json").read_text())["devices"] == {"cpu": 8}


LAST = dict(steps=12, checkpoint_period=4)  # saves after 4, 8 and 12


@pytest.fixture
def failing(monkeypatch):
    """failing(4, 12, 12): how often the save of a step fails, before it succeeds."""
    commit, left = write.commit, []

    def commit_or_fail(save, writer):
        step = int(save.target.name)
        if step in left:
            left.remove(step)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        commit(save, writer)

    monkeypatch.setattr(write, "commit", commit_or_fail)
    return lambda *steps: left.extend(steps)


@pytest.mark.parametrize("steps, at", [((4, 8), 8), full((12, 12), 12)])
def test_two_failed_saves_in_a_row_end_the_run_with_75(tmp_path, failing, steps, at):
    """In the middle of a run, and at its end. The same command resumes it."""
    failing(*steps)
    run = train(tmp_path / "run", **LAST)
    assert run.code == 75
    warned = [line for line in run.output.splitlines() if line.startswith("warning: step")]
    assert [line.split()[2] for line in warned] == [str(steps[0])]
    assert run.error.startswith(f"SaveError: base_output_directory: step {at} ")
    assert "done" not in run.output
    assert train(tmp_path / "run", **LAST).code == 0
    assert saved_steps(tmp_path / "run")[-1] == 12


def test_a_stopped_run_whose_save_fails_does_not_report_a_save(tmp_path, failing, monkeypatch):
    requested = Preemption.requested

    def at_five(self, step):
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return requested(self, step)

    monkeypatch.setattr(Preemption, "requested", at_five)
    failing(5, 5)
    run = train(tmp_path / "run", **LAST)
    assert run.code == 75
    assert "step 5: saved" not in run.output + run.errors
    assert "step 5 " in run.error and " 4." in run.error
    failing(5)
    assert train(tmp_path / "run", **LAST).code == 143  # the second try saves it
    assert saved_steps(tmp_path / "run") == [4, 5]


@pytest.mark.full  # test_power_cut.py has a checkpoint of a cut disk
def test_a_finished_run_survives_a_power_cut_with_its_rows(tmp_path):
    with small_ext4(tmp_path) as disk:
        keys = LAST | dict(async_checkpointing="true", max_num_checkpoints_to_keep=1)
        assert train(disk.path / "run", **keys).code == 0
        disk.cut()
        assert saved_steps(disk.path / "run") == [12]
        assert logged_steps(disk.path / "run") == list(range(1, 13))
        run = train(disk.path / "run", **keys | dict(steps=13))
        assert run.code == 0 and "resumed after step 12;" in run.output


# What a save and an evaluation call, in the main thread or in that of the saves.
PHASES = {
    "start": (orbax_io, "start_writing"),
    "arrays": (write, "wait_for_arrays"),
    "commit": (write, "commit"),
    "removal": (own_folder.OwnFolder, "keep"),
    "evaluation": (evaluation.Evaluation, "_sums_by_batch"),
}
SAVES = dict(
    steps=12, checkpoint_period=4, eval_interval=4, eval_steps=1, max_num_checkpoints_to_keep=1
)
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}


@pytest.fixture(scope="module")
def uninterrupted(programs, tmp_path_factory):
    """The folder of a run with SAVES."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert train(folder / "run", **SAVES).code == 0
    return folder / "run"


@pytest.mark.parametrize("asynchronous", ["true", full("false")])
@pytest.mark.parametrize(
    ("number", "phase"),
    corner(
        itertools.product(CODES, PHASES),
        [(signal.SIGTERM, "commit"), (signal.SIGINT, "evaluation")],
    ),
)
def test_a_signal_in_a_save_or_an_evaluation_loses_nothing(
    uninterrupted, tmp_path, monkeypatch, number, phase, asynchronous
):
    """At the second one of its kind. Every checkpoint is whole; the resumed run has the same rows
    and bits."""
    owner, name = PHASES[phase]
    function, calls, sent = getattr(owner, name), itertools.count(1), threading.Event()
    requested = Preemption.requested

    def signalled(*args, **options):
        if next(calls) == 2:
            os.kill(os.getpid(), number)
            sent.set()
            time.sleep(0.3)  # the phase continues when the signal has been heard
        return function(*args, **options)

    def requested_once_sent(preemption, step):
        """The steps after the save of 8 would be over before its thread is there."""
        if step > 8:
            assert sent.wait(WAIT_S)
            while not preemption._requested:
                time.sleep(0.01)
        return requested(preemption, step)

    keys = SAVES | dict(async_checkpointing=asynchronous)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, signalled)
        patch.setattr(Preemption, "requested", requested_once_sent)
        assert train(tmp_path / "run", **keys).code == CODES[number]
    checkpoints = epath.Path(tmp_path / "run" / "checkpoints")
    (step,) = saved_steps(tmp_path / "run")
    assert [path.name for path in checkpoints.iterdir()] == [str(step)] and step in (8, 9)
    assert seal.damage(checkpoints / str(step), range(1000)) is None
    assert train(tmp_path / "run", **keys).code == 0
    assert_equal_runs(tmp_path / "run", uninterrupted, steps=12)
