"""What a config is made of, in which order, before JAX is imported; and what --help prints."""

import pathlib
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run import names_key, output_of, refused

from maxdiloco import __main__
from maxdiloco import train as train_program
from maxdiloco.flags import base_yml, config, help, maxtext
from maxdiloco.flags.base_yml import Table
from maxdiloco.version import __version__

BASE = config.load([], {})
KEYS = base_yml.declared()


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
    base = base_yml.config_folder() / "base.yml"
    assert config.load([str(base), "model_name=35m"], {}).base_emb_dim == 512
    with pytest.raises(AttributeError, match="steps=5"):
        cfg.steps = 5
    with pytest.raises(AttributeError, match="steps"):
        del cfg.steps
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


VALUES = {
    bool: st.booleans(),
    int: st.integers(),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(),
    tuple: st.recursive(
        st.text(),
        lambda inner: st.lists(inner, max_size=3).map(tuple),
        max_leaves=5,
    ).filter(lambda value: isinstance(value, tuple)),
    Table: st.lists(st.tuples(st.text(), st.text()), unique_by=lambda pair: pair[0]).map(Table),
}


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_stored_config_comes_back_as_it_was(data):
    """as_dict is what a checkpoint stores; from_dict neither checks nor changes any value, but for
    entries of a table that are at their default."""
    stored = BASE.as_dict()
    router = {"scaling_factor": 2, "num_groups": 2}
    table = config.from_dict({"router": router | {"balance_bias": False}}).router
    assert dict(table) == router and type(table[0][1]) is float
    free = [name for name, key in KEYS.items() if not key.entries]
    names = data.draw(st.lists(st.sampled_from(sorted(free)), max_size=8, unique=True))
    for name in names:
        drawn = data.draw(VALUES[type(vars(BASE)[name])], label=name)
        stored[name] = config.Config(**{name: drawn}).as_dict()[name]
    restored = config.from_dict(stored)
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
    assert config.describe_differences(config.with_replicas(BASE, 2)) == [
        "diloco_outer_lr=0.7 (default -1.0)",
        "diloco_outer_momentum=0.6 (default -1.0)",
    ]


def test_jax_is_not_imported_by_the_config():
    """A wrong flag is refused before JAX is loaded; NumPy stands for what else costs time."""
    code = (
        "from maxdiloco.flags import config, help\n"
        "cfg = config.load(['model_name=1b', 'steps=3'], {})\n"
        "config.describe_differences(cfg), config.from_dict(cfg.as_dict())\n"
        "help.help_text('maxdiloco.train')"
    )
    for run, loaded in ((code, set()), ("import numpy", {"numpy"})):  # the control
        command = [sys.executable, "-c", f"{run}\nimport sys\nprint(*sys.modules)"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        heavy = {"jax", "numpy", "optax", "orbax", "grain"}
        assert heavy & set(done.stdout.split()) == loaded


def table(text):
    """{key: (its group, its text in one line)} of what --help prints."""
    group, name, found = "", "", {}
    for line in text.splitlines():
        if re.match(r"\w+: ", line):
            group = line
        elif match := re.match(r"  (\w+)=(.*)", line):
            name = match[1]
            found[name] = (group, match[2])
        elif name and line.startswith("      "):
            found[name] = (group, f"{found[name][1]} {line.strip()}")
    return found


def test_help_lists_every_key_with_group_default_and_meaning():
    text = help.help_text("maxdiloco.train")
    assert text.splitlines()[0] == "usage: python -m maxdiloco.train [file.yml] [key=value ...]"
    assert "Model names: default, 10b, " in text
    found = table(text)
    assert list(found) == list(KEYS)
    for name, key in KEYS.items():
        assert found[name][0] == key.group
        assert found[name][1].startswith(f"{base_yml.show(key.default)}  {key.meaning}")
    assert found["num_communication_overlapping_steps"][1].endswith(
        "(tau). [>= 0; inner steps; may change on resume]"
    )
    for program in ("train", "train_compile"):
        lines = help.help_text(f"maxdiloco.{program}").splitlines()
        assert max(map(len, lines)) <= help.WIDTH


def test_help_of_a_group_a_key_and_a_part_of_a_name():
    of_group = table(help.help_text("maxdiloco.train", ["diloco"]))
    assert list(of_group) == [key.name for key in KEYS.values() if key.group.startswith("diloco:")]
    some = table(help.help_text("maxdiloco.train", ["momentum", "run_name"]))
    assert list(some) == ["run_name", "diloco_outer_momentum", "diloco_outer_optimizer"]
    found = {
        "retention": "max_num_checkpoints_to_keep",  # a name that another trainer has
        "biases": "enable_wandb",  # a word of the meaning
        "nesterov": "diloco_outer_optimizer",  # Nesterov there
    }
    for word, key in found.items():
        assert key in table(help.help_text("maxdiloco.train", [word])), word
    assert list(table(output_of(train_program.main, "steps=5", "--help", "steps"))) == ["steps"]
    code, line = refused(train_program.main, "--help", "colour")
    assert code == 2 and names_key(line, "colour")


def test_names_of_other_trainers_are_of_keys_and_of_one_each():
    """None is a key, was one, or is MaxText's, whose own errors and notes are better."""
    known, others = maxtext.tables(), base_yml.read_table("other_trainers.yml")
    names = [name for of_key in others.values() for name in of_key]
    assert set(others) <= set(KEYS) and len(names) == len(set(names)) > 100
    for name in names:
        assert name not in {*KEYS, *known.removed, *known.other_names}, name
        assert known.foreign(name) is None, name


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
