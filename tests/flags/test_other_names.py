"""MaxText's names of the data."""

import pytest

from maxdiloco.errors import ConfigError
from maxdiloco.flags import base_yml, config, resume
from maxdiloco.flags.other_names import OTHER_NAMES

MAXTEXT = "grain_train_files=/data/a", "grain_file_type=arrayrecord", "train_data_columns=[body]"


def test_the_names_of_maxtext_set_the_keys_that_mean_the_same(tmp_path):
    """On the command line, in the environment and in a yml file; later layers win as ever."""
    cfg = config.load(MAXTEXT, {})
    assert (cfg.dataset_path, cfg.dataset_type, cfg.text_column) == (
        "/data/a",
        "arrayrecord",
        "body",
    )
    assert config.load([], {"M_HF_PATH": "/data/b"}).dataset_path == "/data/b"
    path = tmp_path / "a.yml"
    path.write_text("hf_train_files: /data/c\ntrain_data_columns: ['body']\n")
    cfg = config.load([str(path)], {})
    assert (cfg.dataset_path, cfg.text_column) == ("/data/c", "body")
    assert config.load([str(path), "dataset_path=/data/d"], {}).dataset_path == "/data/d"


def test_each_other_name_is_of_a_key_and_none_is_one():
    """An alias of nothing would be accepted and lost."""
    keys = base_yml.declared()
    assert set(OTHER_NAMES.values()) <= set(keys)
    assert not set(OTHER_NAMES) & set(keys)


def test_the_old_and_the_new_name_of_a_renamed_key_mean_the_same():
    """On the command line, and in the config of a checkpoint that is read or resumed."""
    old, new = "cosine_learning_rate_final_fraction", "learning_rate_final_fraction"
    for name in (old, new):
        assert config.load([f"{name}=0.2"], {}).learning_rate_final_fraction == 0.2
        assert config.from_dict({name: 0.2}).learning_rate_final_fraction == 0.2
    stored = config.load([], {}).as_dict()
    stored[old] = stored.pop(new)
    new_config = config.load([], {}).as_dict()
    assert resume.changed_keys(stored, new_config, keys=base_yml.declared()) == {}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["hf_path=a", "dataset_path=b"], "dataset_path=b and hf_path=a both mean dataset_path"),
        (["train_data_columns=[a,b]"], r"\[a, b\] names 2 columns.*Use text_column=NAME"),
        (["hf_pat=a"], "hf_pat=a .* is no key"),
    ],
)
def test_a_value_by_two_names_is_refused(arguments, why):
    """Which of them is meant is not guessed."""
    with pytest.raises(ConfigError, match=why):
        config.load(arguments, {})
