"""How a run ends before its end: signals, numbers that are not finite, a damaged checkpoint."""

import re
import shutil
import signal
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import run_tools as tools
from jax.sharding import NamedSharding, PartitionSpec
from tiers import full

from maxdiloco.errors import NumericsError
from maxdiloco.metrics import history
from maxdiloco.metrics.monitor import Monitor
from maxdiloco.storage.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("programs")

STEPS = tools.TINY["steps"]


@pytest.mark.parametrize(
    "number, code, words",
    [
        (signal.SIGTERM, 143, r"Preempted: SIGTERM after step (\d+): saved\."),
        full(signal.SIGINT, 130, r"Ctrl-C after step (\d+): saved\."),
    ],
)
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_later(
    finished, tmp_path, capfd, number, code, words
):
    """While it runs, a second one with its name is refused. The step is no multiple of 5.

    history.jsonl has both starts and how each ended.
    """
    keys = dict(checkpoint_period=10**6)
    with tools.Child(tmp_path, "stopped", **keys) as child:
        child.until("step 8/")
        assert tools.run(tmp_path, "stopped", **keys) == 2
        line = capfd.readouterr().err.strip()
        assert "\n" not in line
        assert "run_name=stopped is in use: process " in line
        assert "or set another run_name" in line
        child.send(number)
        assert child.end() == code, child.text
    step = int(re.search(words + " The same command goes on", child.text)[1])
    assert 8 <= step < STEPS
    assert tools.saved_steps(tmp_path / "stopped") == [step]

    assert tools.run(tmp_path, "stopped", **keys) == 0
    assert f"resumed after step {step};" in capfd.readouterr().out
    tools.assert_equal_runs(tmp_path / "stopped", finished, steps=STEPS)
    events = history.read(RunFolder(tmp_path / "stopped"))
    assert [event["event"] for event in events] == ["start", "end"] * 2
    assert [(events[k]["step"], events[k]["until"]) for k in (0, 2)] == [(0, STEPS), (step, STEPS)]
    assert re.match(words if code == 143 else "$", events[1]["why"]) and events[3]["why"] == ""


def test_ctrl_c_any_number_of_times_ends_with_130_and_no_traceback(tmp_path):
    """Beginning in the training, through the last save. The second one quits, unless all of it
    was so quick that the run had ended."""
    with tools.Child(tmp_path, "stopped", checkpoint_period=10**6) as child:
        child.until("step 8/")
        while child.lives():
            child.send(signal.SIGINT)
            time.sleep(0.02)
        assert child.end() == 130, child.text
    assert "Traceback" not in child.text
    assert "Ctrl-C: stopping after this step; press it again to quit now." in child.text
    assert child.text.endswith(("\nInterrupted.\n", "saved. The same command goes on.\n"))


def test_a_run_whose_output_nobody_reads_goes_on_to_the_same_end(finished, tmp_path):
    """As behind `| head`: the pipe is closed while the programs compile."""
    with tools.Child(tmp_path, "unread") as child:
        child.until("ready to compile")
        child.close_output()
        assert child.end() == 0
    tools.assert_equal_runs(tmp_path / "unread", finished, steps=STEPS)


def test_a_loss_that_is_not_finite_ends_with_4_step_replica_and_checkpoint(
    finished, tmp_path, capfd
):
    """lr 1e30 from step 63 on: the loss of 64 is not finite, though nobody looks before 65."""
    shutil.copytree(finished, tmp_path / "finished")
    capfd.readouterr()
    keys = dict(learning_rate=1e30, steps=80, log_period=10**6)
    assert tools.run(tmp_path, "finished", **keys) == 4
    line = capfd.readouterr().err.strip()
    assert line == (
        "NumericsError: step 64: the loss or gradient of replica 0 is not finite; the last good "
        "checkpoint is that of step 62. Resume with a lower learning_rate, or with "
        "nan_policy=skip."
    )
    assert tools.saved_steps(tmp_path / "finished")[-1] == 62


def test_a_gradient_that_is_not_finite_ends_the_run_though_the_loss_is():
    """nan_policy=stop speaks of both: the parameters of the next step would be NaN."""
    mesh = jax.make_mesh((1,), ("diloco",), devices=jax.devices()[:1])
    fine = {"loss": jnp.ones(3), "grad_norm": jnp.ones(3)}
    placed = NamedSharding(mesh, PartitionSpec())
    like = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=placed)
    trainer = types.SimpleNamespace(
        mesh=mesh,
        check_exchanges=lambda state: None,
        abstract_metrics=lambda batch: {"loss": like, "grad_norm": like},
    )
    monitor = Monitor(trainer, None, stop_on_nan=True, on_compile=lambda *_: None)
    fine = jax.device_put(fine, placed)
    monitor.add(7, fine)
    monitor.check(None, list)
    bad = jax.device_put(jnp.array([1.0, 1.0, np.inf]), placed)
    monitor.add(8, fine | {"grad_norm": bad})
    monitor.add(9, fine)
    words = "step 8: .* replica 2 .* no checkpoint was saved. .* lower learning_rate"
    with pytest.raises(NumericsError, match=words):
        monitor.check(None, list)


def test_nan_policy_skip_leaves_the_parameters_and_goes_on(tmp_path):
    """lr 1e30 in step 1: from step 2 on no update is taken, and the run ends as planned."""
    keys = dict(learning_rate=1e30, warmup_steps_fraction=0.0, nan_policy="skip", steps=6)
    assert tools.run(tmp_path, "skip", **keys) == 0
    rows = tools.rows(tmp_path / "skip")
    assert [row["learning/skipped"] for row in rows] == [0, 1, 1, 1, 1, 1]
    # The loss of step 2 is finite, its gradient is not (null in JSON).
    assert rows[1]["learning/loss"] is not None
    assert rows[1]["learning/grad_norm"] is None
    params = tools.item(tools.arrays(tmp_path / "skip", 6), "params")
    assert all(np.all(np.isfinite(x)) for x in params.values())
