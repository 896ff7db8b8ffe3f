"""Values and names as people write them: what is taken, and what a refusal suggests."""

import pytest

from maxdiloco.errors import ConfigError
from maxdiloco.flags import config


@pytest.mark.parametrize(
    "argument, words",
    [
        ("steps=1e99", "is too large. Write it like the default, steps=1000"),
        ("steps=1e999999999", "is too large"),
        ("steps=0.5", "is not a whole number"),
        ("log_period=null", "is not a whole number"),
        ("learning_rate=null", "is not a number"),
    ],
)
def test_numbers_that_a_key_cannot_have_are_refused(argument, words):
    with pytest.raises(ConfigError, match=words):
        config.load([argument], {})


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
