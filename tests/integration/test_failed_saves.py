"""Whole runs whose saves fail, and one that loses its power."""

import errno
import os
import signal

import pytest
import run_tools as tools
from power import small_ext4

from maxdiloco.checkpoint import write
from maxdiloco.processes.preemption import Preemption

pytestmark = pytest.mark.usefixtures("programs")

LAST = dict(steps=12, checkpoint_period=4)  # saves after 4, 8 and 12


@pytest.fixture
def failing(monkeypatch):
    """failing(4, 12, 12): how often the save of a step fails, before it succeeds."""
    commit = write.commit

    def fail(*steps):
        left = list(steps)

        def commit_or_fail(save, writer):
            step = int(save.target.name)
            if step in left:
                left.remove(step)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            commit(save, writer)

        monkeypatch.setattr(write, "commit", commit_or_fail)

    return fail


@pytest.mark.parametrize("steps, at", [((4, 8), 8), ((12, 12), 12)])
def test_two_failed_saves_in_a_row_end_the_run_with_75_and_one_line(
    tmp_path, capfd, failing, steps, at
):
    """In the middle of a run, and at its end. Given again, the command goes on."""
    failing(*steps)
    assert tools.run(tmp_path, "run", **LAST) == 75
    told = capfd.readouterr()
    warned = [line for line in told.out.splitlines() if line.startswith("warning: step")]
    assert [line.split()[2] for line in warned] == [str(steps[0])]
    assert told.err.count("\n") == 1
    assert told.err.startswith(f"SaveError: base_output_directory: step {at} could not be saved")
    assert "done" not in told.out
    failing()
    assert tools.run(tmp_path, "run", **LAST) == 0
    assert tools.saved_steps(tmp_path / "run")[-1] == 12


def test_a_run_told_to_stop_does_not_say_saved_when_it_is_not(
    tmp_path, capfd, failing, monkeypatch
):
    requested = Preemption.requested

    def at_five(self, step):
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return requested(self, step)

    monkeypatch.setattr(Preemption, "requested", at_five)
    failing(5, 5)
    assert tools.run(tmp_path, "run", **LAST) == 75
    told = capfd.readouterr()
    assert "saved. The same command" not in told.out + told.err
    assert "step 5 could not be saved" in told.err and "the last step saved is 4." in told.err
    failing(5)
    assert tools.run(tmp_path, "run", **LAST) == 143  # the second try saves it
    assert tools.saved_steps(tmp_path / "run") == [4, 5]


def test_a_finished_run_survives_a_power_cut_with_its_rows(tmp_path, capfd):
    with small_ext4(tmp_path) as disk:
        keys = LAST | dict(async_checkpointing="true", max_num_checkpoints_to_keep=1)
        assert tools.run(disk.path, "run", **keys) == 0
        disk.cut()
        assert tools.saved_steps(disk.path / "run") == [12]
        assert [row["step"] for row in tools.rows(disk.path / "run")] == list(range(1, 13))
        capfd.readouterr()
        assert tools.run(disk.path, "run", **keys | dict(steps=13)) == 0
        assert "resumed after step 12; 13 steps in all" in capfd.readouterr().out
