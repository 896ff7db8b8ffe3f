"""The commands of docs/two_slices.md: each that can run here does, on a tiny decoder."""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from maxdiloco import evaluate, generate, plan, report, train
from maxdiloco.flags import config
from maxdiloco.planning.choices import EXACT

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs/two_slices.md").read_text(encoding="utf-8")
PROGRAMS = dict(train=train, plan=plan, evaluate=evaluate, generate=generate, report=report)
# Why a command is not run; its keys are read all the same.
NOT_RUN = {
    "bash scripts/xpk_run.sh": "needs a cluster; its dry run is run",
    "python -m maxdiloco.train_compile": "minutes of compiling; test_train_compile.py",
}
SMALL = dict(
    override_model_config="true", log_period=2, eval_steps=1, max_target_length=16, base_emb_dim=16,
    base_num_decoder_layers=2, base_mlp_dim=16, base_num_query_heads=2, base_num_kv_heads=1,
    head_dim=8, per_device_batch_size=2, dtype="float32", enable_tensorboard="false",
    opt_type="sgd",
)  # fmt: skip


def lines():
    """Every line of every block."""
    blocks = re.findall(r"^```\n(.*?)^```", PAGE, re.S | re.M)
    return [line for block in blocks for line in block.splitlines()]


def not_run():
    return [line for line in lines() if line.startswith(tuple(NOT_RUN))]


def with_steps(argument):
    """100 steps are 6, 150 are 8; H follows."""
    short = {"steps=100": "steps=6", "steps=150": "steps=8", "diloco_sync_period=30":
             "diloco_sync_period=4"}  # fmt: skip
    return short.get(argument, argument)


def in_this_process(line, capsys):
    python, flag, module, *arguments = shlex.split(line)
    assert (python, flag) == ("python", "-m")
    name = module.removeprefix("maxdiloco.")
    if name == "plan" and "step_time" not in line:
        arguments.append("step_time=0.86")  # what compiling 1b for v5e-16 gives
    if name == "train":
        arguments = list(map(with_steps, arguments))
    if name == "generate":
        arguments.append("max_new_tokens=3")
    assert PROGRAMS[name].main(arguments) == 0, (line, capsys.readouterr())
    return capsys.readouterr().out


def in_a_shell(line, folder, environ):
    """export lines are kept in `environ` for those that follow."""
    if line.startswith("export "):
        environ |= dict(word.split("=", 1) for word in shlex.split(line)[1:])
        return ""
    words = line if "DRY_RUN" in line else " ".join(map(with_steps, line.split(" ")))
    words = words.replace("scripts/", f"{ROOT}/scripts/")
    done = subprocess.run(
        ["bash", "-c", words], cwd=folder, env=environ, text=True, capture_output=True, timeout=500
    )
    assert done.returncode == 0, (line, done.stdout, done.stderr)
    return done.stdout


@pytest.mark.full
@pytest.mark.usefixtures("few_compiler_passes")
def test_each_command_that_can_run_here_does_what_the_page_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("M_")}
    dry = clean | {"MAXDILOCO_VENV": sys.prefix}
    small = {f"M_{name.upper()}": str(value) for name, value in SMALL.items()}
    local = dict(os.environ) | small | {"MAXDILOCO_VENV": sys.prefix}
    local |= {"M_ENABLE_CHECKPOINTING": "false"}  # what it writes is only watched
    local |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    said = {}
    for line in lines():
        if line in not_run():
            continue
        if line.startswith("python"):
            with monkeypatch.context() as patch:
                if ".plan" not in line:  # of the real models
                    for name, value in small.items():
                        patch.setenv(name, value)
                said[line] = in_this_process(line, capsys)
        else:
            said[line] = in_a_shell(line, tmp_path, dry if "xpk" in line or "export" in line
                                    else local)  # fmt: skip
    rows = [json.loads(text.splitlines()[-1]) for line, text in said.items() if "tail" in line]
    assert [row["step"] for row in rows] == [6, 6] and all(row["perf/step_time"] for row in rows)
    (dry_run,) = [text for line, text in said.items() if line.startswith("DRY_RUN")]
    assert dry_run.startswith("xpk workload create") and "two-slices" in dry_run
    assert {line.split()[2].partition(".")[2] for line in said if line.startswith("python")} == {
        "train", "plan", "evaluate", "generate", "report"
    }  # fmt: skip
    assert len(said) + len(not_run()) == len(lines())
    assert (tmp_path / "runs/laptop/checkpoints/8").is_dir()
    proposed_by_the_plan(said)


def proposed_by_the_plan(said):
    """The runs of the page have the keys that the plans above them print."""
    laptop, slices = [text for line, text in said.items() if ".plan" in line]
    for text, start in (
        (laptop, "bash scripts/run_local_slices.sh 2 model_name=tiny"),
        (slices, "DRY_RUN=1 bash"),
        (slices, "bash scripts/xpk_run.sh"),
        (slices, "python -m maxdiloco.train_compile"),
    ):
        (line,) = [line for line in lines() if line.startswith(start)]
        (command,) = [each for each in text.splitlines() if "-m maxdiloco.train " in each]
        chosen = [word for word in command.split() if word.partition("=")[0] in EXACT.keys()]
        assert len(chosen) == 5 and set(chosen) <= set(line.split()), (line, command)


def test_the_keys_of_what_is_not_run_are_read_too():
    found = not_run()
    assert len(found) == len(NOT_RUN)
    for line in found:
        words = [word for word in shlex.split(line) if "=" in word]
        cfg = config.load(words, {})
        assert "report" in line or cfg.model_name == "1b"
