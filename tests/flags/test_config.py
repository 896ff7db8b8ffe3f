"""What a config is made of, in which order, and that it is ready before JAX is imported."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxdiloco.flags import base_yml, config
from maxdiloco.flags.base_yml import Table

BASE = config.load([], {})


def test_each_layer_overrides_those_before_it(tmp_path):
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


def test_base_yml_itself_may_stand_first():
    """MaxText's commands name base.yml; it is the first layer already, not a third one."""
    base = base_yml.config_folder() / "base.yml"
    assert config.load([str(base), "model_name=35m"], {}).base_emb_dim == 512


@pytest.mark.parametrize(
    "written, value",
    [("1e-4", 0.0001), ("3E-3", 0.003), ("1", 1.0), ("0.5", 0.5), (".5", 0.5), ("2.", 2.0)],
)
def test_a_float_is_written_in_every_usual_way(tmp_path, written, value):
    """yml 1.1 alone would read 1e-4 as text; a whole number is a float where one is wanted."""
    (tmp_path / "run.yml").write_text(f"learning_rate: {written}\n")
    for cfg in (
        config.load([f"learning_rate={written}"], {}),
        config.load([], {"M_LEARNING_RATE": written}),
        config.load([str(tmp_path / "run.yml")], {}),
    ):
        assert type(cfg.learning_rate) is float
        assert cfg.learning_rate == value


def test_integers_booleans_lists_and_text_are_read_by_the_type_of_the_default(tmp_path):
    cfg = config.load(
        [
            "steps=1_000",
            "enable_data_shuffling=False",
            "mlp_activations=[gelu]",
            "run_name=1e-4",
            "logical_axis_rules=[[embed, [fsdp, tensor]], [mlp, []], [vocab, data]]",
            "dataset_path=/a=b/*.py",
        ],
        {},
    )
    assert cfg.steps == 1000
    assert cfg.enable_data_shuffling is False
    assert cfg.mlp_activations == ("gelu",)
    assert cfg.run_name == "1e-4"  # a text key stays text
    assert cfg.logical_axis_rules == (("embed", ("fsdp", "tensor")), ("mlp", ()), ("vocab", "data"))
    assert cfg.dataset_path == "/a=b/*.py"  # only the first = separates
    (tmp_path / "run.yml").write_text("mlp_activations: [gelu]\n")
    assert config.load([str(tmp_path / "run.yml")], {}).mlp_activations == ("gelu",)


def test_a_table_is_read_from_yml_and_from_json_and_kept_in_a_stored_config(tmp_path):
    """In its order, on the command line and in a file."""
    wanted = (("wiki", "/data/wiki"), ("code", "/c"))
    (tmp_path / "run.yml").write_text("eval_sets:\n  wiki: /data/wiki\n  code: /c\n")
    cfg = config.load(['eval_sets={"wiki": "/data/wiki", "code": "/c"}'], {})
    assert cfg.eval_sets == wanted
    for again in (
        config.load([f"eval_sets={base_yml.show(cfg.eval_sets)}"], {}),
        config.load([str(tmp_path / "run.yml")], {}),
        config.from_dict(json.loads(json.dumps(cfg.as_dict()))),
    ):
        assert again.eval_sets == wanted
        assert again == cfg


def test_a_config_cannot_be_changed():
    with pytest.raises(AttributeError, match=r"steps=5 cannot be set.*Load another"):
        BASE.steps = 5
    with pytest.raises(AttributeError, match=r"steps cannot be deleted.*Load another"):
        del BASE.steps
    assert BASE.steps == 1000


VALUES = {
    bool: st.booleans(),
    int: st.integers(),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(),
    tuple: st.recursive(
        st.text() | st.integers(),
        lambda inner: st.lists(inner, max_size=3).map(tuple),
        max_leaves=5,
    ).filter(lambda value: isinstance(value, tuple)),
    Table: st.lists(st.tuples(st.text(), st.text()), unique_by=lambda pair: pair[0]).map(Table),
}


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_stored_config_comes_back_as_it_was(data):
    """as_dict is what a checkpoint stores; from_dict neither checks nor changes any value."""
    stored = BASE.as_dict()
    names = data.draw(st.lists(st.sampled_from(sorted(stored)), max_size=8, unique=True))
    for name in names:
        stored[name] = config.Config(
            **{name: data.draw(VALUES[type(vars(BASE)[name])], label=name)}
        ).as_dict()[name]
    restored = config.from_dict(stored)
    assert restored.as_dict() == stored
    assert config.from_dict(restored.as_dict()) == restored


def test_a_key_that_a_stored_config_lacks_takes_its_default():
    stored = BASE.as_dict()
    del stored["steps"]
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
    assert config.describe_differences(BASE) == ["diloco_outer_momentum=0.6 (default -1.0)"]


@pytest.mark.parametrize(
    "argv, words",
    [
        (
            ["diloco_outer_overlap=eager", "diloco_outer_optimizer=adam"],
            ["diloco_outer_optimizer=adam", "diloco_outer_overlap=eager", "Use nesterov"],
        ),
        (["enable_streaming_diloco=true"], ["num_diloco_fragments=1", "every three layers"]),
        (["steps=99"], ["steps=99", "diloco_sync_period=100", "shorter period"]),
        (["compile_topology=v5e-16"], ["compile_topology=v5e-16", "train_compile", "Leave it out"]),
    ],
)
def test_what_works_but_is_seldom_meant_is_a_warning(argv, words):
    (line,) = config.warnings(config.load(argv, {}))
    assert all(word in line for word in words)
    assert "\n" not in line


def test_usual_settings_give_no_warning():
    """The other side of each condition above: linear outer optimizer, several fragments, steps."""
    for flags in (
        "",
        "diloco_outer_overlap=eager",
        "diloco_outer_optimizer=adam",
        "enable_streaming_diloco=true num_diloco_fragments=3",
        "steps=100",
        "steps=99 enable_diloco=false",
        "steps=-1",
    ):
        assert config.warnings(config.load(flags.split(), {})) == []


HEAVY = ("jax", "numpy", "flax", "optax", "orbax", "grain")


def imported(code: str) -> set[str]:
    """The heavy modules that are loaded in a fresh Python after running `code`."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split()) & set(HEAVY)


def test_jax_is_not_imported_by_the_config():
    """A wrong flag is refused before JAX is loaded; NumPy stands for what else costs time."""
    code = (
        "from maxdiloco.flags import config, help\n"
        "cfg = config.load(['model_name=1b', 'steps=3'], {})\n"
        "config.describe_differences(cfg), config.warnings(cfg), config.from_dict(cfg.as_dict())\n"
        "help.help_text('maxdiloco.train')"
    )
    assert imported(code) == set()
    assert imported("import numpy") == {"numpy"}  # the check sees what is there
