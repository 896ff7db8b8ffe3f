"""Values that are far beyond any use end in one line too."""

import types

import pytest

from maxdiloco import train
from maxdiloco.errors import ConfigError
from maxdiloco.flags import base_yml, checks, config


def refusal(argv, environ=()) -> str:
    """The line that load refuses with."""
    with pytest.raises(ConfigError) as caught:
        config.load(argv, dict(environ))
    line = str(caught.value)
    assert "\n" not in line
    return line


TOO_LARGE = "9223372036854775808"


@pytest.fixture(scope="module")
def keys():
    return base_yml.declared()


def test_every_whole_number_has_an_upper_limit(keys):
    """JAX takes no more than int32 or int64, and some sizes are allocated at once."""
    whole = [name for name, key in keys.items() if type(key.default) is int]
    assert {"vocab_size", "learning_rate_schedule_steps", "dcn_diloco_parallelism"} <= set(whole)
    for name in whole:
        for number in (2**32, 2**63):
            cfg = types.SimpleNamespace(**{n: key.default for n, key in keys.items()})
            vars(cfg)[name] = number
            with pytest.raises(ConfigError, match=f"{name}={number} (is too large|must be)"):
                checks.check(cfg, keys)


@pytest.mark.parametrize("digits", [TOO_LARGE, "-" + TOO_LARGE, "2147483648", "1" * 50, "1" * 5000])
@pytest.mark.parametrize("source", ["command line", "yml", "environment"])
def test_a_number_of_any_length_is_refused_in_one_line(tmp_path, digits, source):
    """Python itself refuses to read more than 4,300 digits."""
    argv, environ = [f"base_mlp_dim={digits}"], {}
    if source == "environment":
        argv, environ = [], {"M_BASE_MLP_DIM": digits}
    if source == "yml":
        (tmp_path / "run.yml").write_text(f"base_mlp_dim: {digits}\n")
        argv = [str(tmp_path / "run.yml")]
    line = refusal(argv, environ)
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
    assert "is not a list" in refusal([f"{name}={value}"])
    (tmp_path / "run.yml").write_text(f"steps: 5\n{name}: {value}\n")
    line = refusal([str(tmp_path / "run.yml")])
    assert "run.yml is not a yml file: line 2: " in line or "line 3" in line


def test_lists_as_deep_as_a_key_has_them_are_taken():
    """The other side of the limit."""
    cfg = config.load(["logical_axis_rules=[[embed, [fsdp, tensor]]]"], {})
    assert cfg.logical_axis_rules == (("embed", ("fsdp", "tensor")),)
    assert config.load(["steps=2147483647"], {}).steps == 2**31 - 1


def test_a_value_with_a_line_feed_makes_a_message_of_one_line(capsys):
    assert train.main(["run_name=a\nb\x1b[2J"]) == 2
    assert capsys.readouterr().err == (
        r"ConfigError: run_name=a\nb\x1b[2J cannot name a folder. Use letters, digits, '.', '_' "
        "and '-'; base_output_directory says where the folder is.\n"
    )
