"""What a config is made of, in which order, before JAX is imported; and what --help prints."""

import json
import pathlib
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run import ROOT, names_key, output_of, refused

from maxdiloco import __main__, train_compile
from maxdiloco import train as train_program
from maxdiloco.config import config, files, help, maxtext
from maxdiloco.config.keys import KEYS
from maxdiloco.config.values import show
from maxdiloco.version import __version__

BASE = config.load([], {})


def test_each_layer_overrides_those_before_it_and_nothing_the_config(tmp_path):
    """base.yml < model file < yml file < environment < key=value, one key for each step."""
    yml = tmp_path / "run.yml"
    yml.write_text(
        "model_name: 35m\nmax_target_length: 256\nlog_period: 21\nsteps: 31\neval_steps: 41\n"
    )
    environ = {"M_LOG_PERIOD": "22", "M_STEPS": "32", "PATH": "/bin"}
    cfg = config.load([str(yml), "steps=33"], environ)
    assert cfg.base_emb_dim == 512  # the model file over base.yml's 128
    assert cfg.max_target_length == 256  # the yml file over base.yml's 1024
    assert cfg.log_period == 22  # the environment over the yml file's 21
    assert cfg.steps == 33  # the command line over the environment's 32
    assert cfg.eval_steps == 41  # only in the yml file
    assert cfg.checkpoint_period == 500  # only in base.yml
    # MaxText's commands name base.yml; it is the first layer already, not a third one.
    base = files.config_folder() / "base.yml"
    assert config.load([str(base), "model_name=35m"], {}).base_emb_dim == 512
    with pytest.raises(ValueError, match="steps"):
        cfg.steps = 5
    with pytest.raises(ValueError, match="steps"):
        del cfg.steps
    with pytest.raises(AttributeError, match="stepz"):
        _ = cfg.stepz
    assert cfg.steps == 33


@pytest.mark.parametrize(
    "written, environ, argv, layers",
    [
        ("model_name: 90m", {}, [], 9),
        ("steps: 5", {"M_MODEL_NAME": "90m"}, [], 9),
        ("", {}, ["model_name=90m"], 9),
        ("model_name: 90m", {"M_MODEL_NAME": "180m"}, [], 12),
        ("model_name: 90m", {"M_MODEL_NAME": "180m"}, ["model_name=35m"], 6),
        ("", {}, ["model_name=35m", "base_num_decoder_layers=6"], 6),  # as the model file says
        ("", {}, ["model_name=35m", "base_num_decoder_layers=2", "override_model_config=true"], 2),
        ("# nothing yet", {}, ["base_num_decoder_layers=7"], 7),
    ],
)
def test_the_model_file_is_the_second_layer_whichever_layer_names_it(
    tmp_path, written, environ, argv, layers
):
    """override_model_config=true lets a later layer win over it; without a model a key is free."""
    path = tmp_path / "run.yml"
    path.write_text(written)
    assert config.load([str(path), *argv], environ).base_num_decoder_layers == layers


SCALARS = {
    bool: st.booleans(),
    int: st.integers(1, 8),
    float: st.floats(0.125, 0.875),
    str: st.text(),
}


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_stored_config_comes_back_as_it_was(data):
    """as_dict is what a checkpoint stores; from_dict does not check values against each other."""
    stored = BASE.as_dict()
    router = {"scaling_factor": 2, "num_groups": 2}
    table = config.from_dict({"router": router | {"balance_bias": False}}).router
    assert table == router and type(table["scaling_factor"]) is float
    free = [
        name
        for name, key in KEYS.items()
        if type(key.default) in SCALARS
        and (key.choices or key.default != "auto")
        and not (type(key.default) is str and key.field.metadata)  # text with a pattern
    ]
    names = data.draw(st.lists(st.sampled_from(sorted(free)), max_size=8, unique=True))
    for name in names:
        choices = KEYS[name].choices
        drawn = st.sampled_from(choices) if choices else SCALARS[type(KEYS[name].default)]
        stored[name] = data.draw(drawn, label=name)
    stored["rope_scaling"] = {}
    stored["max_target_length"] = 2
    for name in ("head_dim", "vocab_size"):
        stored[name] = max(stored[name], 2)
    restored = config.from_dict(json.loads(json.dumps(stored)))
    assert restored.as_dict() == stored
    assert config.from_dict(restored.as_dict()) == restored
    del stored["steps"]  # a key that it lacks takes its default
    stored["learning_rate"] = 1  # JSON may lose the point of 1.0
    restored = config.from_dict(stored)
    assert restored.steps == 1000
    assert type(restored.learning_rate) is float


def test_only_what_differs_from_base_yml_is_described():
    """The start of a run prints these lines and no others."""
    argv = ["run_name=a", "learning_rate=1e-3", "enable_diloco=false", "mlp_activations=[gelu]"]
    assert config.describe_differences(config.load(argv, {})) == [
        "run_name=a (default empty)",
        "mlp_activations=[gelu] (default [silu, linear])",
        "learning_rate=0.001 (default 0.0004)",
        "enable_diloco=false (default true)",
    ]
    assert config.describe_differences(BASE) == []
    assert config.describe_differences(BASE.model_copy(update={"diloco_outer_lr": 0.7})) == [
        "diloco_outer_lr=0.7 (default auto)"
    ]


def test_jax_is_not_imported_by_the_config():
    """A wrong key is refused before JAX is loaded; NumPy stands for what else costs time."""
    code = (
        "from maxdiloco.config import config, help\n"
        "cfg = config.load(['model_name=1b', 'steps=3'], {})\n"
        "config.describe_differences(cfg), config.from_dict(cfg.as_dict())\n"
        "help.help_text('maxdiloco.train'), help.schema_text()"
    )
    for run, loaded in ((code, set()), ("import numpy", {"numpy"})):  # the control
        command = [sys.executable, "-c", f"{run}\nimport sys\nprint(*sys.modules)"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        heavy = {"jax", "numpy", "optax", "orbax", "grain"}
        assert heavy & set(done.stdout.split()) == loaded


def names_in(text):
    """The keys that a table of --help has, in its order."""
    return re.findall(r"(?m)^  (\w+)=", text)


def test_help_has_usage_examples_and_groups_and_help_all_every_key():
    text = output_of(train_program.main, "--help")
    assert text.startswith("usage: python -m maxdiloco.train ")
    assert names_in(text) == []
    for word in ("--help", "--schema", "--version", "configs/recipes/", "10b"):
        assert word in text, word
    groups = {key.group for key in KEYS.values()}
    assert groups <= set(re.findall(r"(?m)^  (\w+) ", text))
    assert all(key.name in text for key in KEYS.values() if key.start_here)
    assert len(text.splitlines()) < 50
    everything = output_of(train_program.main, "--help", "all")
    assert names_in(everything) == list(KEYS)
    words = " ".join(everything.split())
    for name, key in KEYS.items():
        assert f"{name}={show(key.default)} {key.description}"[:60] in words.replace("  ", " ")
        assert all(entry.description[:60] in words for entry in key.entries.values())
    for lines in (text, everything, output_of(train_compile.main, "--help")):
        shown = [line for line in lines.splitlines() if not line.startswith("  python -m ")]
        assert max(map(len, shown)) <= help.WIDTH  # a command stays in one line


def test_every_example_of_help_is_a_command_line_that_loads(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert len(train_program.EXAMPLES) >= 4
    for example in train_program.EXAMPLES:
        argv = example.split()
        if argv and argv[0].startswith("runs/"):  # the config.yml of a run
            argv = argv[1:]
        assert config.load(argv, {}), example


def test_help_of_a_group_a_key_and_a_word():
    of_group = names_in(help.help_text("maxdiloco.train", ["diloco"]))
    assert of_group == [key.name for key in KEYS.values() if key.group == "diloco"]
    some = names_in(help.help_text("maxdiloco.train", ["momentum", "run_name"]))
    assert some == ["run_name", "diloco_outer_momentum", "diloco_outer_optimizer"]
    found = {
        "retention": "max_num_checkpoints_to_keep",  # a name that another trainer has
        "biases": "enable_wandb",  # a word of the description
        "nesterov": "diloco_outer_optimizer",  # Nesterov there
    }
    for word, key in found.items():
        assert key in names_in(help.help_text("maxdiloco.train", [word])), word
    assert names_in(output_of(train_program.main, "steps=5", "--help", "steps")) == ["steps"]
    code, line = refused(train_program.main, "--help", "colour")
    assert code == 2 and names_key(line, "colour")


def test_names_of_other_trainers_are_of_one_key_each():
    """None is a key, or MaxText's, whose own errors and notes are better."""
    known, others = maxtext.read(), files.read_data("other_trainers.yml")
    names = [name for of_key in others.values() for name in of_key]
    assert set(others) <= set(KEYS) and len(names) == len(set(names)) > 100
    for name in names:
        assert not {name} & {*KEYS, *known.other_names} and known.find(name) is None, name


def test_the_package_lists_its_programs_and_prints_its_version():
    """The version of setup.py."""
    assert output_of(train_program.main, "steps=5", "--version") == f"maxdiloco {__version__}\n"
    setup = pathlib.Path(__file__).parents[2] / "setup.py"
    assert f'version="{__version__}"' in setup.read_text(encoding="utf-8")
    lines = output_of(__main__.main).splitlines()
    assert max(map(len, lines)) <= help.WIDTH
    for name in ("train", "train_compile", "generate", "evaluate", "prepare", "tokenizer"):
        (line,) = [line for line in lines if f" -m maxdiloco.{name} " in line]
        assert re.search(rf"maxdiloco\.{name} +[A-Z]\w* .+", line)
    code, line = refused(__main__.main, "train")
    assert code == 2 and names_key(line, "maxdiloco.train")


# Makes a Python that lacks JAX and what depends on it.
WITHOUT_JAX = """
import importlib.machinery as machinery
absent, find = {"jax", "jaxlib", "flax", "optax", "orbax", "grain"}, machinery.PathFinder.find_spec
machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, path=None, target=None:
    None if name.partition(".")[0] in absent else find(name, path, target)
)
"""


@pytest.mark.parametrize("program", sorted(__main__.programs_of(files.PACKAGE)))
def test_help_with_examples_and_version_need_no_jax(program, tmp_path):
    """Control: the same Python refuses to train."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_JAX)
    words = [["--help"], ["--version"]]
    if program == "train":
        words += [["--schema"], ["--help", "all"], ["steps=1"]]
    for argv in words:
        command = [sys.executable, "-m", f"maxdiloco.{program}", *argv]
        environ = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
        done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=tmp_path)
        if argv == ["--help"]:
            usage, command = done.stdout.partition("\n\n")[0], f"python -m maxdiloco.{program}"
            assert usage.startswith(f"usage: {command}") and f"\n  {command}" in done.stdout
        refused_here = argv == ["steps=1"]
        assert (done.returncode, bool(done.stdout)) == ((2, False) if refused_here else (0, True))
        assert ("jax" in done.stderr) == refused_here, done.stderr
