"""Values and names as people write them, and values far beyond any use: what is said of them."""

import types

import pytest

from maxdiloco import train
from maxdiloco.errors import ConfigError
from maxdiloco.flags import base_yml, checks, config


@pytest.mark.parametrize(
    "name, remedy",
    [
        ("my_dtype", "--help lists every key."),
        ("enable_more_recording", "--help lists every key."),
        ("enable_tensorbord", "Did you mean enable_tensorboard? --help lists every key."),
        ("stepz", "Did you mean steps? --help lists every key."),
        ("outer_lr", "Did you mean diloco_outer_lr? --help lists every key."),
    ],
)
def test_only_a_slip_or_words_of_a_key_are_taken_for_that_key(name, remedy):
    with pytest.raises(ConfigError) as caught:
        config.load([f"{name}=1"], {})
    assert str(caught.value) == f"{name}=1 (command line) is no key. {remedy}"


def test_all_unknown_keys_are_named_at_once(tmp_path):
    (tmp_path / "run.yml").write_text("qqq: 2\n")
    with pytest.raises(ConfigError) as caught:
        config.load([str(tmp_path / "run.yml"), "steps=5", "log_perod=3"], {})
    assert str(caught.value) == (
        f"qqq=2 ({tmp_path}/run.yml) is no key. log_perod=3 (command line) is no key. Did you mean "
        "log_period? --help lists every key."
    )


@pytest.mark.parametrize(
    "argument, name, value",
    [
        *[(f"enable_diloco={text}", "enable_diloco", True) for text in ("1", "yes", "on", "True")],
        *[(f"enable_diloco={text}", "enable_diloco", False) for text in ("0", "no", "off")],
        ("steps=1e3", "steps", 1000),
        ("steps=2.5e3", "steps", 2500),
        ("per_device_batch_size=12.0", "per_device_batch_size", 12),
        ("steps=-1.0", "steps", -1),
        ("--steps=7", "steps", 7),
        ("num_diloco_fragments=null", "num_diloco_fragments", 1),
        ("num_slices=null", "num_slices", -1),
        ("run_name=null", "run_name", ""),
        ("eval_sets=null", "eval_sets", ()),
    ],
)
def test_values_are_taken_as_people_write_them(argument, name, value):
    """Other programs write yes, 1e3, 12.0, --key=value and null; null is no choice of one's own."""
    found = vars(config.load([argument], {}))[name]
    assert (found, type(found) is bool) == (value, type(value) is bool)


def test_of_a_key_that_is_given_twice_the_last_one_counts_with_a_warning():
    """So that a script may append to the flags of another."""
    told = []
    assert config.load(["steps=1", "log_period=2", "steps=3"], {}, warn=told.append).steps == 3
    assert told == [
        "warning: steps=3 comes after steps=1 on the command line, and the last one counts."
    ]
    config.load(["steps=1", "log_period=2"], {"M_STEPS": "4"}, warn=told.append)
    assert len(told) == 1


def test_every_whole_number_has_an_upper_limit():
    """JAX takes no more than int32 or int64, and some sizes are allocated at once."""
    keys = base_yml.declared()
    whole = [name for name, key in keys.items() if type(key.default) is int]
    assert {"vocab_size", "learning_rate_schedule_steps", "dcn_diloco_parallelism"} <= set(whole)
    for name in whole:
        for number in (2**32, 2**63):
            cfg = types.SimpleNamespace(**{n: key.default for n, key in keys.items()})
            vars(cfg)[name] = number
            with pytest.raises(ConfigError, match=f"{name}={number} (is too large|must be)"):
                checks.check(cfg, keys)


@pytest.mark.parametrize("digits", [f"{-(2**63)}", "2147483648", "1" * 5000])
@pytest.mark.parametrize("source", ["command line", "yml", "environment"])
def test_a_number_of_any_length_is_refused_in_one_line(tmp_path, digits, source):
    """Python itself refuses to read more than 4,300 digits."""
    argv, environ = [f"base_mlp_dim={digits}"], {}
    if source == "environment":
        argv, environ = [], {"M_BASE_MLP_DIM": digits}
    if source == "yml":
        (tmp_path / "run.yml").write_text(f"base_mlp_dim: {digits}\n")
        argv = [str(tmp_path / "run.yml")]
    with pytest.raises(ConfigError) as caught:
        config.load(argv, environ)
    line = str(caught.value)
    assert f"base_mlp_dim={digits[:100]}" in line
    assert "is too large" in line or "must be >= 1" in line
    assert len(line) < 500


@pytest.mark.parametrize(
    "value", ["&a [*a]", "[*a]", "&a [silu]", "[" * 900 + "]" * 900, "[" * 12 + "]" * 12,
              "[" * 100_000, "[[*a,*a],&a x]"]
)  # fmt: skip
@pytest.mark.parametrize("name", ["mlp_activations", "logical_axis_rules"])
def test_a_list_without_an_end_is_refused(tmp_path, name, value):
    """Aliases and nested lists, of which few letters make a value of any size."""
    with pytest.raises(ConfigError, match="is not a list"):
        config.load([f"{name}={value}"], {})
    (tmp_path / "run.yml").write_text(f"steps: 5\n{name}: {value}\n")
    with pytest.raises(ConfigError, match=r"run\.yml is not a yml file: line [23]"):
        config.load([str(tmp_path / "run.yml")], {})


def test_a_value_with_a_line_feed_makes_a_message_of_one_line(capsys):
    assert train.main(["run_name=a\nb\x1b[2J"]) == 2
    assert capsys.readouterr().err == (
        r"ConfigError: run_name=a\nb\x1b[2J cannot name a folder. Use letters, digits, '.', '_' "
        "and '-'; base_output_directory says where the folder is.\n"
    )
