"""enable_wandb with a package that only looks like wandb: what it is given, and how it may fail."""

import importlib
import json
import sys

import pytest

from maxdiloco import train
from maxdiloco.errors import ConfigError
from maxdiloco.metrics import wandb_run
from maxdiloco.metrics.writer import MetricsWriter

WANDB = """
import types
class Error(Exception): pass
errors = types.SimpleNamespace(Error=Error)
calls = []
refuses = set()
class Run:
    def log(self, values, step):
        if "log" in refuses: raise Error("quota")
        calls.append(("log", step, values))
    def finish(self): calls.append(("finish",))
def init(**options):
    if "init" in refuses: raise Error("no login")
    calls.append(("init", options))
    return Run()
"""


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield importlib.import_module("wandb")
    sys.modules.pop("wandb", None)


def write(folder, steps, resume_step=None, say=lambda line: None):
    options = dict(tensorboard=False, resume_step=resume_step, say=say)
    with MetricsWriter(folder, wandb_config={"steps": 9}, **options) as writer:
        for step in steps:
            writer.write(step, {"learning/loss": step / 4})


def test_the_rows_go_to_wandb_and_a_restart_goes_on_with_the_same_run(folder, wandb):
    write(folder, [2, 4])
    write(folder, [6], resume_step=4)
    first, *_, second, row, _ = wandb.calls
    assert wandb.calls[1:4] == [
        ("log", 2, {"learning/loss": 0.5}), ("log", 4, {"learning/loss": 1.0}), ("finish",)
    ]  # fmt: skip
    assert (first, row) == (second, ("log", 6, {"learning/loss": 1.5}))
    options = first[1]
    assert (options["project"], options["name"], options["config"]) == (
        "maxdiloco", "run", {"steps": 9}
    )  # fmt: skip
    assert options["resume"] == "allow" and options["id"]


def test_a_row_that_wandb_refuses_is_one_warning_and_the_file_goes_on(folder, wandb):
    wandb.refuses.add("log")
    said = []
    write(folder, [2, 4], say=said.append)
    assert said == ["warning: wandb is given up: quota. metrics.jsonl goes on."]
    rows = [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()]
    assert rows == [2, 4]


def test_a_run_that_wandb_refuses_to_begin_is_one_line(folder, wandb):
    wandb.refuses.add("init")
    with pytest.raises(ConfigError, match="cannot begin a run .no login.*Run `wandb login`"):
        write(folder, [2])


def test_without_the_package_the_run_is_refused_before_it_has_a_folder(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)  # what makes an import fail
    with pytest.raises(ConfigError, match="enable_wandb=true needs the package wandb"):
        wandb_run.require()
    keys = ["enable_wandb=true", "dataset_type=synthetic", "hardware=cpu", "run_name=w"]
    mesh = ["dcn_diloco_parallelism=2", "ici_fsdp_parallelism=1"]
    assert train.main([*keys, *mesh, f"base_output_directory={tmp_path}/runs"]) == 2
    assert "pip install wandb; or set enable_wandb=false" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
