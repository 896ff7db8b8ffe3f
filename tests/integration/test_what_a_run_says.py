"""A run that is stopped between two rows: what it says, what is in its folder, the rows after."""

import json
import re
import time
import types

import pytest
import run_tools as tools

from maxdiloco.flags import config
from maxdiloco.processes.preemption import Preemption
from maxdiloco.trainer import training

pytestmark = pytest.mark.usefixtures("programs")

ROWS = dict(steps=8, log_period=4, checkpoint_period=100)


def test_a_run_stopped_between_two_rows_goes_on_from_its_config_with_the_same_rows(
    tmp_path, capfd, monkeypatch
):
    """Stopped after step 6 of rows at 4 and 8; without a name at first, so it says the name."""
    assert tools.run(tmp_path, "whole", **ROWS) == 0

    monkeypatch.setattr(Preemption, "requested", lambda preemption, t: t == 6)
    clock = types.SimpleNamespace(time=lambda: 1234.0, perf_counter=time.perf_counter)
    monkeypatch.setattr(training, "time", clock)
    assert tools.run(tmp_path, "", **ROWS) == 143
    told = capfd.readouterr()
    assert tools.run(tmp_path, "unsaved", **ROWS, enable_checkpointing="false") == 143
    monkeypatch.undo()
    nothing = "SIGTERM after step 6: nothing is saved, since enable_checkpointing=false."
    assert nothing in capfd.readouterr().err
    folder = tmp_path / "run-1234"
    assert f"run folder: {folder}; run_name=run-1234 goes on." in told.out
    assert "SIGTERM after step 6: saved. run_name=run-1234 goes on." in told.err

    assert training.run(config.load([str(folder / "config.yml")], {}), 0.0) == 0
    assert [row["step"] for row in tools.rows(folder)] == [4, 8]
    assert tools.rows(folder) == tools.rows(tmp_path / "whole")

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["learning/tokens"] for row in rows] == [4 * 64, 8 * 64]
    assert rows[0]["perf/wall_time_s"] < rows[1]["perf/wall_time_s"]
    assert not [name for name in rows[1] if name.startswith("device/")]
    log = (folder / "log.txt").read_text()
    lines = [line.partition(" ")[2] for line in log.splitlines()]
    assert len([line for line in lines if line.startswith("-- ")]) == 2
    assert "Preempted: SIGTERM after step 6: saved. run_name=run-1234 goes on." in lines
    assert re.search(r"resumed after step 6; 8 steps in all\n", log)
    assert json.loads((folder / "environment.json").read_text())["devices"] == {"cpu": 8}
